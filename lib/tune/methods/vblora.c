/* SPDX-License-Identifier: Apache-2.0 */
/* vblora.c -- low-rank matrices of vectors from a bank that all modules share: W' = W + B A, where
 * each piece of a row of A, and of a column of B, is the sum of the topk vectors with the largest
 * logits, weighted by the softmax of these.
 *
 * logits_A [r, in/v, n], logits_B [out/v, r, n], bank [n,v].  With save_only_topk_weights the file
 * has in place of logits the numbers of the vectors, [.., topk], and their weights but the last,
 * [.., topk - 1]. Sources: arXiv:2405.15179; huggingface/peft tuners/vblora. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 4, 1, 1e6, "rank", LM_WHOLE },
    { "num_vectors", 256, 1, 1e9, "vectors in the bank", LM_WHOLE },
    { "vector_length", 256, 1, 1e9, "their length", LM_WHOLE },
    { "topk", 2, 1, 16, "vectors in a sum", LM_WHOLE },
    { "vblora_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { "init_vector_bank_bound", 0.02, 0, 1e9, "bound of the bank at the beginning", NULL },
    { "init_logits_std", 0.1, 0, 1e9, "deviation of logits at the beginning", NULL },
    { "save_only_topk_weights", 0, 0, 1, "the file has no logits, but what they choose",
      "false true" },
    { 0 },
};
enum { R, VECTORS, LENGTH, TOP, DROP, BOUND, STD, CHOSEN };
enum { LOGITS_A, LOGITS_B, BANK, IDS_A, SHARES_A, IDS_B, SHARES_B };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R], v = (int64_t)m->hyper[LENGTH];
    int64_t count = (int64_t)m->hyper[VECTORS];
    lm_tune_tensor *t;

    *n = 0;
    if (m->in % v || m->out % v || m->hyper[TOP] > m->hyper[VECTORS])
        return lm_fail(e, LM_EUSAGE, m->name, "use a vector_length that divides both sides",
                       "its weight [%lld,%lld] does not divide into vectors of %lld",
                       (long long)m->out, (long long)m->in, (long long)v);
    t = lm_tune_tensor_add(out, n, "vblora_logits_A", r, m->in / v, LM_TUNE_NORMAL, m->hyper[STD]);
    t->ndim = 3;
    t->dim[2] = count;
    t = lm_tune_tensor_add(out, n, "vblora_logits_B", m->out / v, r, LM_TUNE_NORMAL, m->hyper[STD]);
    t->ndim = 3;
    t->dim[2] = count;
    t = lm_tune_tensor_add(out, n, "vblora_vector_bank", count, v, LM_TUNE_UNIFORM,
                           m->hyper[BOUND]);
    t->shared = true;
    out[LOGITS_A].off = out[LOGITS_B].off = m->hyper[CHOSEN] > 0;
    for (int i = 0; i < 4; i++) {
        static const char *const names[] = { "vblora_logits_A_topk_indices",
                                             "vblora_logits_A_topk_weights",
                                             "vblora_logits_B_topk_indices",
                                             "vblora_logits_B_topk_weights" };

        t = lm_tune_tensor_add(out, n, names[i], i < 2 ? r : m->out / v, i < 2 ? m->in / v : r,
                               LM_TUNE_ZEROS, 0);
        t->ndim = 3;
        t->dim[2] = (int64_t)m->hyper[TOP] - i % 2;
        t->ids = i % 2 == 0;
        t->frozen = true;
        t->off = m->hyper[CHOSEN] <= 0 || t->dim[2] < 1;
    }
    return LM_OK;
}

/* Sums of vectors by their numbers and weights. */
static lm_vid sums_chosen(lm_rule *r, const lm_tune_module *m, int ids, lm_vid shares, int64_t rows,
                          lm_vid bank)
{
    int64_t k = (int64_t)m->hyper[TOP], count = (int64_t)m->hyper[VECTORS], *at = NULL;
    const int64_t *id = m->ids ? m->ids[ids] : NULL;
    double *one = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &at, (size_t)(rows * k), sizeof *at, r->e) ||
        lm_arena_alloc(r->arena, &one, 1, sizeof *one, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < rows * k; i++)
        at[i] = !id || id[i] < 0 || id[i] >= count ? -1 : i / k * count + id[i];
    *one = 1;
    lm_vid all = lm_r_const(r, LM_DIMS(1, 1), one);
    if (k > 1) { /* the last is what the others leave of 1 */
        lm_vid given = lm_r_shape2(r, shares, rows, k - 1);

        all = lm_r_join(r, given,
                        LM_R_MAP(r, "y = 1 - s", LM_IS("s", lm_r_sum(r, given, false, false))));
    } else {
        all = lm_r_matmul(r, lm_r_spread(r, 1, rows, false), false, all, false);
    }
    return lm_r_matmul(r, lm_r_scatter(r, all, at, LM_DIMS(rows, count)), false, bank, false);
}

/* Sums of vectors [rows,v] by logits [rows,n]. */
static lm_vid sums(lm_rule *r, const lm_tune_module *m, lm_vid logits, lm_vid bank)
{
    lm_vid left = logits, largest = LM_NONE, least = LM_NONE;

    for (int k = 0; k < (int)m->hyper[TOP]; k++) {
        least = lm_r_stop(r, lm_r_row_max(r, left));
        largest = k ? largest : least;
        left = LM_R_MAP(r, "y = where(a < m, a, -1e30)", LM_IS("a", left), LM_IS("m", least));
    }
    lm_vid e = LM_R_MAP(r, "y = where(a < k, 0, exp(a - m))", LM_IS("a", logits), LM_IS("k", least),
                        LM_IS("m", largest));
    lm_vid share =
        LM_R_MAP(r, "y = e / s", LM_IS("e", e), LM_IS("s", lm_r_sum(r, e, false, false)));
    return lm_r_matmul(r, share, false, bank, false);
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t n = (int64_t)m->hyper[R], v = (int64_t)m->hyper[LENGTH];
    int64_t count = (int64_t)m->hyper[VECTORS], in = m->in / v, out = m->out / v;
    bool chosen = m->hyper[CHOSEN] > 0;
    lm_vid a = chosen ? sums_chosen(r, m, IDS_A, p[SHARES_A], n * in, p[BANK])
                      : sums(r, m, lm_r_shape2(r, p[LOGITS_A], n * in, count), p[BANK]);
    lm_vid b = chosen ? sums_chosen(r, m, IDS_B, p[SHARES_B], out * n, p[BANK])
                      : sums(r, m, lm_r_shape2(r, p[LOGITS_B], out * n, count), p[BANK]);

    return lm_r_add(r, w, 1,
                    lm_r_matmul(r,
                                lm_r_permute(r, b, LM_DIMS(out, n, v), (const int[]){ 0, 2, 1 },
                                             LM_DIMS(m->out, n)),
                                false, lm_r_shape2(r, a, n, m->in), false));
}

const lm_tune_method lm_tune_vblora = {
    .peft_type = "VBLORA",
    .name = "vblora",
    .about = "low-rank matrices from a shared bank of vectors",
    .prefix = "vblora_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
