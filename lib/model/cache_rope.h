/* SPDX-License-Identifier: Apache-2.0 */
/* cache_rope.h -- caches between methods that store keys before their rotation by positions and those that store them
 * after it, by the rotary settings that a cache names (lm_rope_text). */
#ifndef LM_MODEL_CACHE_ROPE_H
#define LM_MODEL_CACHE_ROPE_H

#include "kv/image.h"

/* lm_kv_image_convert, which rotates keys, or undoes it, where the two forms differ in that: in double by the tables of
 * lm_rope_table, one rounding to the type of the cache at the end.  Fails: as lm_kv_image_convert; LM_EFORMAT for
 * settings that cannot be read, or that do not fit the heads or positions. */
lm_code lm_cache_convert(const lm_kv_image *m, const lm_kv_plan *plan, lm_cpu_level cpu,
                         lm_par *par, lm_kv_image **out, lm_err *e);

#endif
