/* SPDX-License-Identifier: Apache-2.0 */
/* oft.c -- orthogonal rotation of the inputs in blocks: W' = W blockdiag(R)^T, y = W' x = W (R x),
 * with R = (1 - Q)(1 + Q)^-1 for a skew-symmetric Q of each block, or with use_cayley_neumann a
 * few terms of its series.
 *
 * The file has the n(n-1)/2 entries above the diagonal of each Q.  `r` blocks, or blocks of
 * oft_block_size; the other is 0. block_share: one R for all blocks.  coft: the length of Q is at
 * most eps / sqrt(blocks). Sources: arXiv:2306.07280, 2506.19847; huggingface/peft tuners/oft. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 0, 0, 1e9, "number of blocks; 0: by their size", LM_WHOLE },
    { "oft_block_size", 32, 0, 1e9, "size of a block; 0: by their number", LM_WHOLE },
    { "module_dropout", 0, 0, 1, "share of blocks dropped in training", NULL },
    { "coft", 0, 0, 1, "rotations are kept small", "false true" },
    { "eps", 6e-5, 0, 1e9, "how small", NULL },
    { "block_share", 0, 0, 1, "one rotation for all blocks", "false true" },
    { "use_cayley_neumann", 1, 0, 1, "a series in place of the inverse", "false true" },
    { "num_cayley_neumann_terms", 5, 1, 100, "its terms", LM_WHOLE },
    { 0 },
};
enum { R, SIZE, DROP, SMALL, EPS, SHARE, SERIES, TERMS };

/* The divisor of `all` that is nearest to n, the lesser of two; as peft's adjust_oft_parameters. */
static int64_t nearest_divisor(int64_t all, int64_t n)
{
    int64_t up = n, down = n;

    if (n > all)
        return all;
    while (up <= all && all % up)
        up++;
    while (down > 1 && all % down)
        down--;
    return up <= all && up - n < n - down ? up : down;
}

static lm_code size_of(const lm_tune_module *m, int64_t *size, lm_err *e)
{
    int64_t n = (int64_t)m->hyper[R], s = (int64_t)m->hyper[SIZE];

    if (!n == !s)
        return lm_fail(e, LM_EUSAGE, m->name, "set one of them to 0",
                       "r is %lld and oft_block_size is %lld", (long long)n, (long long)s);
    *size = n ? m->in / nearest_divisor(m->in, n) : nearest_divisor(m->in, s);
    return LM_OK;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t size = 1;
    lm_code rc = size_of(m, &size, e);

    *n = 0;
    if (!rc && size < 2)
        rc = lm_fail(e, LM_EUSAGE, m->name, "use another block size",
                     "blocks of one input cannot rotate");
    if (!rc)
        lm_tune_tensor_add(out, n, "oft_R.weight", m->hyper[SHARE] > 0 ? 1 : m->in / size,
                           size * (size - 1) / 2, LM_TUNE_ZEROS, 0);
    return rc;
}

static lm_vid rotate(lm_rule *r, const lm_tune_module *m, lm_vid x, lm_vid upper)
{
    int64_t size = 1, blocks = lm_r_dim(r, upper, 0);

    if (!lm_r_ok(r) || size_of(m, &size, r->e))
        return LM_NONE;
    if (m->hyper[SMALL] > 0) /* |Q| of its entries above and below the diagonal */
        upper = LM_R_MAP(r, "n = sqrt(max(2*q, 1e-30)); y = u * where(k < n, k / n, 1)",
                         LM_IS("u", upper), LM_IS("q", lm_r_sum(r, upper, true, false)),
                         LM_CONSTANT("k", m->hyper[EPS] / sqrt((double)blocks)));
    return lm_r_blocks(
        r, x,
        lm_r_cayley(r, lm_r_skew(r, upper, size), m->hyper[SERIES] > 0 ? (int)m->hyper[TERMS] : 0));
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    /* w R^T of rows w is what rows x of the input go through, too */
    return rotate(r, m, w, p[0]);
}

const lm_tune_method lm_tune_oft = {
    .peft_type = "OFT",
    .name = "oft",
    .about = "orthogonal rotation of the inputs in blocks",
    .prefix = "oft_",
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
