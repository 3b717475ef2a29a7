/* SPDX-License-Identifier: Apache-2.0 */
/* shira.c -- r (in + out) entries of W train: W'[i,j] = W[i,j] + v at the places that the file
 * lists, shira_indices [2,n]. Sources: arXiv:2406.13175; huggingface/peft tuners/shira. */
#include "base/mem.h"
#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 32, 1, 1e6, "entries for each input and output", LM_WHOLE },
    { "random_seed", 0, 0, 9e15, "seed of the places", LM_WHOLE },
    { 0 },
};
enum { R, SEED };
enum { VALUES, PLACES };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t count = (int64_t)m->hyper[R] * (m->in + m->out);
    lm_tune_tensor *t;

    *n = 0;
    if (count > m->in * m->out)
        return lm_fail(e, LM_EUSAGE, m->name, "use a smaller r",
                       "r %g needs %lld entries of its %lld", m->hyper[R], (long long)count,
                       (long long)(m->in * m->out));
    lm_tune_tensor_add(out, n, "shira_weight", count, 0, LM_TUNE_ZEROS, 0);
    t = lm_tune_tensor_add(out, n, "shira_indices", 2, count, LM_TUNE_BASE, 0);
    t->ids = t->frozen = true;
    return LM_OK;
}

lm_vid lm_tune_scatter(lm_rule *r, lm_vid v, const int64_t *ids, int64_t rows, int64_t cols)
{
    int64_t *at = NULL, n = lm_r_dim(r, v, 0);
    lm_vid y;

    if (!lm_r_ok(r) || lm_alloc_n(&at, (size_t)n, sizeof *at, "places", r->e))
        return LM_NONE;
    for (int64_t k = 0; k < n; k++) {
        int64_t row = ids[k], col = ids[n + k];

        at[k] = row < 0 || row >= rows || col < 0 || col >= cols ? -1 : row * cols + col;
    }
    y = lm_r_scatter(r, v, at, LM_DIMS(rows, cols));
    lm_free(at);
    return y;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    return lm_r_add(r, w, 1, lm_tune_scatter(r, p[VALUES], m->ids[PLACES], m->out, m->in));
}

/* Distinct places: the first n of a permutation of all. */
static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    int64_t n = (int64_t)m->hyper[R] * (m->in + m->out);

    (void)w, (void)changed, (void)e;
    for (int64_t k = 0; k < n; k++) {
        int64_t at = (int64_t)lm_rng_permute(rng, (uint64_t)k, (uint64_t)(m->in * m->out));

        v[PLACES][k] = (double)(at / m->in);
        v[PLACES][n + k] = (double)(at % m->in);
    }
    return LM_OK;
}

const lm_tune_method lm_tune_shira = {
    .peft_type = "SHIRA",
    .name = "shira",
    .about = "some entries of the weights",
    .prefix = "shira_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
