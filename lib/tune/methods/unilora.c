/* SPDX-License-Identifier: Apache-2.0 */
/* unilora.c -- every entry of every A and B is one of a few shared numbers, scaled: W' = W + B A,
 * A[i,j] = theta[a[i,j]] s[i,j], and B likewise.  theta [d] trains; the indices a [r,in], b
 * [out,r] and the scales are in files with save_indices; without them a file is refused, because
 * they are drawn by NumPy.  Sources: arXiv:2506.00799; huggingface/peft tuners/unilora. */
#include <math.h>

#include "base/mem.h"
#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 4, 1, 1e6, "rank", LM_WHOLE },
    { "theta_d_length", 256, 1, 1e9, "shared numbers", LM_WHOLE },
    { "init_theta_d_bound", 0.02, 0, 1e9, "their bound at the beginning", NULL },
    { "unilora_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { 0 },
};
enum { R, LENGTH, BOUND };
enum { THETA, INDEX_A, INDEX_B, SCALE_A, SCALE_B };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];
    lm_tune_tensor *t;

    (void)e;
    *n = 0;
    t = lm_tune_tensor_add(out, n, "unilora_theta_d", (int64_t)m->hyper[LENGTH], 0, LM_TUNE_UNIFORM,
                           m->hyper[BOUND]);
    t->shared = true;
    for (int i = 0; i < 4; i++) {
        static const char *const names[] = { "unilora_indices_A", "unilora_indices_B",
                                             "unilora_scales_A", "unilora_scales_B" };

        t = lm_tune_tensor_add(out, n, names[i], i % 2 ? m->out : r, i % 2 ? r : m->in,
                               LM_TUNE_BASE, 0);
        t->ids = t->wide = i < 2;
        t->frozen = true;
    }
    return LM_OK;
}

/* A or B. */
static lm_vid factor(lm_rule *r, const lm_tune_module *m, const lm_vid *p, int index, int64_t rows,
                     int64_t cols)
{
    const int64_t *from = m->ids[index];
    int32_t *ids = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &ids, (size_t)(rows * cols), sizeof *ids, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < rows * cols; i++) {
        if (from[i] < 0 || from[i] >= (int64_t)m->hyper[LENGTH]) {
            lm_fail(r->e, LM_EFORMAT, m->name, NULL, "an index of its matrices is %lld",
                    (long long)from[i]);
            return LM_NONE;
        }
        ids[i] = (int32_t)from[i];
    }
    return LM_R_MAP(r, "y = t * s", LM_IS("t", lm_r_gather(r, p[THETA], ids, LM_DIMS(rows, cols))),
                    LM_IS("s", p[index + 2]));
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t n = (int64_t)m->hyper[R];

    return lm_r_add(r, w, 1,
                    lm_r_matmul(r, factor(r, m, p, INDEX_B, m->out, n), false,
                                factor(r, m, p, INDEX_A, n, m->in), false));
}

/* Each number is used about as often; which ones are used where is drawn, and the scale is that of
 * their mean use. */
static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R], d = (int64_t)m->hyper[LENGTH];
    int64_t na = r * m->in, nb = r * m->out;
    int64_t *uses = NULL;
    lm_code rc = lm_alloc_n(&uses, (size_t)d, sizeof *uses, "uses of numbers", e);

    (void)w, (void)changed;
    for (int64_t i = 0; !rc && i < na + nb; i++) {
        int64_t at = (int64_t)(lm_rng_permute(rng, (uint64_t)i, (uint64_t)(na + nb)) % (uint64_t)d);

        v[i < na ? INDEX_A : INDEX_B][i < na ? i : i - na] = (double)at;
        uses[at]++;
    }
    for (int64_t i = 0; !rc && i < na + nb; i++) {
        int64_t k = i < na ? i : i - na;

        v[i < na ? SCALE_A : SCALE_B][k] =
            1 / sqrt((double)(uses[(int64_t)v[i < na ? INDEX_A : INDEX_B][k]] * m->places));
    }
    lm_free(uses);
    return rc;
}

const lm_tune_method lm_tune_unilora = {
    .peft_type = "UNILORA",
    .name = "unilora",
    .about = "a few shared numbers in every low-rank matrix",
    .prefix = "unilora_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .extra = "{\"save_indices\": true}",
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
