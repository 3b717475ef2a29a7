/* SPDX-License-Identifier: Apache-2.0 */
/* kv_example.h -- shared by the operators of coded caches.  Private to lib/op. */
#ifndef LM_OP_KV_EXAMPLE_H
#define LM_OP_KV_EXAMPLE_H

#include "kernels/kv.h"
#include "op/example.h"

/* Plain tokens leave the groups of the cache's format whole. */
bool lm_kv_keeps_groups(const lm_kv_attr *a, const lm_tensor *t);

/* A format of keys or values by any number. */
const lm_kv_format *lm_kv_example_format(bool values, uint64_t i);
/* Normal numbers with an offset that changes with the channel, encoded by the definition. */
void lm_kv_example_pages(lm_rng r, const lm_tensor *t);

#endif
