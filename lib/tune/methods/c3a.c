/* SPDX-License-Identifier: Apache-2.0 */
/* c3a.c -- block-circulant change: W'[t b + i, j b + k] = W[..] + K[t, j, (k - i) mod b] / in.  K
 * [out/b, in/b, b]. Sources: arXiv:2407.19342; huggingface/peft tuners/c3a. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "block_size", 256, 1, 1e9, "side of a circulant block", LM_WHOLE },
    { 0 },
};

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    double b = m->hyper[0];
    int64_t size = (int64_t)b;
    lm_tune_tensor *t;

    *n = 0;
    if (lm_tune_pattern_value(m, "block_size_pattern", &b))
        size = (int64_t)b;
    if (size < 1 || m->in % size || m->out % size)
        return lm_fail(e, LM_EUSAGE, m->name, "use a block_size that divides both sides",
                       "its weight [%lld,%lld] does not divide into blocks of %lld",
                       (long long)m->out, (long long)m->in, (long long)size);
    t = lm_tune_tensor_add(out, n, "c3a_kernel", m->out / size, m->in / size, LM_TUNE_UNIFORM,
                           sqrt(6 / (double)(m->in + m->out)));
    t->ndim = 3;
    t->dim[2] = size;
    return LM_OK;
}

/* The shifts as one product with a constant matrix: row k of [b,b,b] is one shift. */
static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t b = lm_r_dim(r, p[0], 2), rows = lm_r_dim(r, p[0], 0), cols = lm_r_dim(r, p[0], 1);
    int32_t *ids = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &ids, (size_t)(b * b), sizeof *ids, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < b; i++)
        for (int64_t k = 0; k < b; k++)
            ids[i * b + k] = (int32_t)((k - i + b) % b);
    lm_vid all = lm_r_columns(r, lm_r_shape2(r, p[0], rows * cols, b), ids, b * b);
    lm_vid d = lm_r_permute(r, all, LM_DIMS(rows, cols, b, b), (const int[]){ 0, 2, 1, 3 },
                            LM_DIMS(m->out, m->in));

    return lm_r_add(r, w, 1 / (double)m->in, d);
}

const lm_tune_method lm_tune_c3a = {
    .peft_type = "C3A",
    .name = "c3a",
    .about = "block-circulant change",
    .prefix = "c3a_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .extra = "{\"block_size_pattern\": {}}",
    .tensors = tensors,
    .weight = weight,
};
