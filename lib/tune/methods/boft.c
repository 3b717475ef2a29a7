/* SPDX-License-Identifier: Apache-2.0 */
/* boft.c -- orthogonal rotation of the inputs by butterflies: W' = diag(s) W (M_N ... M_1)^T, M_i
 * = P_i blockdiag(R_i) P_i^T, with R = (1 - Q)(1 + Q)^-1, Q = (D - D^T) / 2 of each block D, and
 * P_i a fixed permutation.
 *
 * boft_R [N, blocks, size, size], boft_s [out,1], N = boft_n_butterfly_factor.
 * Sources: arXiv:2311.06243; huggingface/peft tuners/boft. */
#include <math.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "boft_block_size", 4, 0, 1e9, "size of a block; 0: by their number", LM_WHOLE },
    { "boft_block_num", 0, 0, 1e9, "number of blocks; 0: by their size", LM_WHOLE },
    { "boft_n_butterfly_factor", 1, 1, 40, "factors M", LM_WHOLE },
    { "boft_dropout", 0, 0, 1, "share of blocks dropped in training", NULL },
    { 0 },
};
enum { SIZE, BLOCKS, FACTORS };
enum { ROTATION, SCALE };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t size = (int64_t)m->hyper[SIZE], blocks = (int64_t)m->hyper[BLOCKS];
    int64_t factors = (int64_t)m->hyper[FACTORS], given = size ? size : blocks;
    lm_tune_tensor *t;

    *n = 0;
    if (!size == !blocks || m->in % given)
        return lm_fail(e, LM_EUSAGE, m->name,
                       "set one of boft_block_size and boft_block_num, to a divisor",
                       "its %lld inputs do not divide into %lld blocks of %lld", (long long)m->in,
                       (long long)blocks, (long long)size);
    size = size ? size : m->in / blocks;
    blocks = m->in / size;
    if (factors > 1 && (size % 2 || blocks % ((int64_t)1 << (factors - 1))))
        return lm_fail(e, LM_EUSAGE, m->name, "use fewer factors",
                       "%lld blocks of %lld have no %lld butterfly factors", (long long)blocks,
                       (long long)size, (long long)factors);
    t = lm_tune_tensor_add(out, n, "boft_R", factors, blocks, LM_TUNE_ZEROS, 0);
    t->ndim = 4;
    t->dim[2] = t->dim[3] = size;
    lm_tune_tensor_add(out, n, "boft_s", m->out, 1, LM_TUNE_ONES, 0);
    return LM_OK;
}

/* P_i: within groups of in / (blocks / 2^i) inputs, pieces of half a block, the even ones first. */
static int32_t *permutation(lm_rule *r, int64_t in, int64_t group, int64_t half, bool backwards)
{
    int32_t *ids = NULL;
    int64_t pieces = group / half;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &ids, (size_t)in, sizeof *ids, r->e))
        return NULL;
    for (int64_t i = 0; i < in; i++) {
        int64_t at = i % group, piece = at / half, evens = (pieces + 1) / 2;
        int64_t from = piece < evens ? 2 * piece : 2 * (piece - evens) + 1;
        int64_t source = i - at + from * half + at % half;

        if (backwards)
            ids[source] = (int32_t)i;
        else
            ids[i] = (int32_t)source;
    }
    return ids;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t factors = lm_r_dim(r, p[ROTATION], 0), blocks = lm_r_dim(r, p[ROTATION], 1),
            size = lm_r_dim(r, p[ROTATION], 2);
    lm_vid d = lm_r_reshape(r, p[ROTATION], LM_DIMS(factors * blocks, size, size));
    lm_vid q = LM_R_MAP(r, "y = 0.5 * (a - b)", LM_IS("a", d), LM_IS("b", lm_r_turn(r, d)));
    lm_vid all = lm_r_reshape(r, lm_r_cayley(r, q, 0), LM_DIMS(factors, blocks * size * size));

    for (int64_t i = 0; i < factors; i++) {
        int64_t group = size << i;
        lm_vid one = lm_r_reshape(r, lm_r_part(r, all, i, 1, 0, blocks * size * size),
                                  LM_DIMS(blocks, size, size));

        if (factors > 1)
            w = lm_r_columns(r, w, permutation(r, m->in, group, size / 2, true), m->in);
        w = lm_r_blocks(r, w, one);
        if (factors > 1)
            w = lm_r_columns(r, w, permutation(r, m->in, group, size / 2, false), m->in);
    }
    return LM_R_MAP(r, "y = w * s", LM_IS("w", w), LM_IS("s", p[SCALE]));
}

const lm_tune_method lm_tune_boft = {
    .peft_type = "BOFT",
    .name = "boft",
    .about = "orthogonal rotation of the inputs by butterflies",
    .prefix = "boft_",
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
