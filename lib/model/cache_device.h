/* SPDX-License-Identifier: Apache-2.0 */
/* cache_device.h -- the formats of caches for kernels of a device: their arrays (fixed ranges, scales of heads) lie in
 * its memory, as the caches do.  Private to lib/model. */
#ifndef LM_MODEL_CACHE_DEVICE_H
#define LM_MODEL_CACHE_DEVICE_H

#include "kv/spec.h"
#include "model/config.h"

struct lm_backend;

typedef struct {
    const lm_kv_plan *plan; /* for graphs on the backend */
    lm_kv_plan own;
    lm_kv_side *side;     /* NULL: plan is that of the host */
    lm_kv_format *format; /* of each side */
    float *arrays;        /* on the backend */
    size_t bytes;
    struct lm_backend *b;
} lm_cache_formats;

/* The plan with its arrays copied to the memory of b.  out->plan is `plan` itself if b computes in the host's memory, or
 * the plan has no arrays.  plan (may be NULL) and b are borrowed until lm_cache_formats_fini.  Fails: LM_ELIMIT. */
lm_code lm_cache_formats_on(const lm_kv_plan *plan, const lm_config *c, struct lm_backend *b,
                            lm_cache_formats *out, lm_err *e);
/* Release it, after the graphs. */
void lm_cache_formats_fini(lm_cache_formats *f);

#endif
