/* SPDX-License-Identifier: Apache-2.0 */
/* miss.c -- one small matrix repeated along the inputs: W'[o, j r + i] = W[o, j r + i] + M[i,o]
 * for every j; a last block that is shorter takes the first rows of M.  M [r,out].
 *
 * init_weights "mini": M [r,mini_r] is repeated along the outputs.  "bat": M [out/r,r,r], and each
 * r x r block W_b of row block b becomes W_b + W_b M_b + M_b.  Sources: arXiv:2409.15371;
 * huggingface/peft tuners/miss. */
#include <string.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 64, 1, 1e6, "rows of the matrix", LM_WHOLE },
    { "mini_r", 1, 1, 1e6, "columns of a narrow one", LM_WHOLE },
    { "miss_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { "init_weights", 1, 0, 3, "kind of the matrix", "false true bat mini" },
    { 0 },
};
enum { R, MINI, DROP, KIND };
enum { BAT = 2, NARROW };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R], mini = (int64_t)m->hyper[MINI];
    lm_tune_tensor *t;

    *n = 0;
    if (r > m->in || (m->hyper[KIND] == BAT && (m->in % r || m->out % r)) ||
        (m->hyper[KIND] == NARROW && m->out % mini))
        return lm_fail(e, LM_EUSAGE, m->name, NULL,
                       "its weight [%lld,%lld] does not divide into blocks of %lld",
                       (long long)m->out, (long long)m->in,
                       (long long)(m->hyper[KIND] == NARROW ? mini : r));
    t = lm_tune_tensor_add(out, n, "miss_block", r, m->hyper[KIND] == NARROW ? mini : m->out,
                           LM_TUNE_ZEROS, 0);
    if (m->hyper[KIND] == BAT) {
        t->ndim = 3;
        t->dim[0] = m->out / r;
        t->dim[1] = t->dim[2] = r;
    }
    return LM_OK;
}

/* Blocks [out/r][in][r], so that one product of a row block serves all of its blocks. */
static lm_vid bat(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t n = (int64_t)m->hyper[R], rows = m->out / n, cols = m->in / n;
    /* w as [rows][cols][n x n]: rows of one batch are the blocks' rows */
    lm_vid blocks = lm_r_permute(r, w, LM_DIMS(rows, n, cols, n), (const int[]){ 0, 2, 1, 3 },
                                 LM_DIMS(rows, cols * n, n));
    lm_vid turned = lm_r_matmul(r, blocks, false, p[0], false);
    lm_vid whole = lm_r_permute(r, turned, LM_DIMS(rows, cols, n, n), (const int[]){ 0, 2, 1, 3 },
                                LM_DIMS(m->out, m->in));
    lm_vid added =
        lm_r_matmul(r, lm_r_shape2(r, p[0], rows * n, n), false, lm_r_repeat(r, n, cols), false);

    return LM_R_MAP(r, "y = w + a + b", LM_IS("w", w), LM_IS("a", whole), LM_IS("b", added));
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t n = (int64_t)m->hyper[R], mini = (int64_t)m->hyper[MINI];
    lm_vid block = p[0];

    if (m->hyper[KIND] == BAT)
        return bat(r, m, w, p);
    if (m->hyper[KIND] == NARROW)
        block = lm_r_matmul(r, block, false, lm_r_repeat(r, mini, m->out / mini), false);
    /* M^T times the matrix that repeats r columns along the inputs, cut to their number */
    return lm_r_add(
        r, w, 1,
        lm_r_matmul(r, block, true,
                    lm_r_part(r, lm_r_repeat(r, n, (m->in + n - 1) / n), 0, n, 0, m->in), false));
}

const lm_tune_method lm_tune_miss = {
    .peft_type = "MISS",
    .name = "miss",
    .about = "one small matrix repeated along the inputs",
    .prefix = "miss_",
    .hyper = hyper,
    .tensors = tensors,
    .weight = weight,
};
