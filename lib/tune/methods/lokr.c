/* SPDX-License-Identifier: Apache-2.0 */
/* lokr.c -- a Kronecker product: W' = W + s w1 (x) w2, s = alpha / r, where w1 [a,b], w2 [c,d],
 * out = a c, in = b d.
 *
 * Sizes follow from decompose_factor: the divisor nearest to it (to the square root where it is
 * -1).  w2 is a product [c,r] [r,d] unless r is at least half of its longer side, and with
 * decompose_both w1 likewise. Sources: arXiv:2309.14859 (LyCORIS); huggingface/peft tuners/lokr. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 8, 1, 1e6, "rank of factors", LM_WHOLE },
    { "alpha", 8, -1e9, 1e9, "scale: alpha / r", NULL },
    { "rank_dropout", 0, 0, 1, "share of rows dropped in training", NULL },
    { "module_dropout", 0, 0, 1, "share of modules dropped in training", NULL },
    { "decompose_both", 0, 0, 1, "the left factor is of low rank too", "false true" },
    { "decompose_factor", -1, -1, 1e9, "size of the left factor; -1: near the square root",
      LM_WHOLE },
    { 0 },
};
enum { R, ALPHA, ROW_DROP, DROP, BOTH, FACTOR };
enum { W1, W1_A, W1_B, W2, W2_A, W2_B };

typedef struct {
    int64_t a, b, c, d;
    bool whole1, whole2;
} sizes;

/* n = *less * *more: the pair whose lesser one is nearest to `factor`, from below. */
static void split(int64_t n, int64_t factor, int64_t *less, int64_t *more)
{
    int64_t x = 1, y = n, length = 1 + n;

    if (factor > 0 && n % factor == 0) {
        *less = factor;
        *more = n / factor;
        return;
    }
    factor = factor == -1 ? n : factor;
    while (x < y) {
        int64_t next = x + 1;

        while (n % next)
            next++;
        if (next + n / next > length || next > factor)
            break;
        x = next;
        y = n / next;
    }
    *less = x < y ? x : y;
    *more = x < y ? y : x;
}

static sizes sizes_of(const lm_tune_module *m)
{
    sizes s;
    double r = m->hyper[R];

    split(m->in, (int64_t)m->hyper[FACTOR], &s.b, &s.d);
    split(m->out, (int64_t)m->hyper[FACTOR], &s.a, &s.c);
    s.whole1 = !(m->hyper[BOTH] > 0 && r < (double)(s.a > s.b ? s.a : s.b) / 2);
    s.whole2 = !(r < (double)(s.c > s.d ? s.c : s.d) / 2);
    return s;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    sizes s = sizes_of(m);
    int64_t r = (int64_t)m->hyper[R];
    double mid = 1 / sqrt((double)r);

    (void)e;
    *n = 0;
    lm_tune_tensor_add(out, n, "lokr_w1", s.a, s.b, LM_TUNE_ZEROS, 0)->off = !s.whole1;
    lm_tune_tensor_add(out, n, "lokr_w1_a", s.a, r, LM_TUNE_ZEROS, 0)->off = s.whole1;
    lm_tune_tensor_add(out, n, "lokr_w1_b", r, s.b, LM_TUNE_UNIFORM, 1 / sqrt((double)s.b))->off =
        s.whole1;
    lm_tune_tensor_add(out, n, "lokr_w2", s.c, s.d, LM_TUNE_UNIFORM, 1 / sqrt((double)s.d))->off =
        !s.whole2;
    lm_tune_tensor_add(out, n, "lokr_w2_a", s.c, r, LM_TUNE_UNIFORM, mid)->off = s.whole2;
    lm_tune_tensor_add(out, n, "lokr_w2_b", r, s.d, LM_TUNE_UNIFORM, 1 / sqrt((double)s.d))->off =
        s.whole2;
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    sizes s = sizes_of(m);
    lm_vid left = s.whole1 ? p[W1] : lm_r_matmul(r, p[W1_A], false, p[W1_B], false);
    lm_vid right = s.whole2 ? p[W2] : lm_r_matmul(r, p[W2_A], false, p[W2_B], false);
    /* [a,b,c,d] -> [a,c,b,d] */
    lm_vid outer = lm_r_matmul(r, lm_r_shape2(r, left, s.a * s.b, 1), false,
                               lm_r_shape2(r, right, 1, s.c * s.d), false);
    lm_vid kron = lm_r_permute(r, outer, LM_DIMS(s.a, s.b, s.c, s.d), (const int[]){ 0, 2, 1, 3 },
                               LM_DIMS(m->out, m->in));

    return lm_r_add(r, w, m->hyper[ALPHA] / m->hyper[R], kron);
}

const lm_tune_method lm_tune_lokr = {
    .peft_type = "LOKR",
    .name = "lokr",
    .about = "Kronecker product of two small matrices",
    .prefix = "lokr_",
    .is = LM_TUNE_LINEAR,
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
