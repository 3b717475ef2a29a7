/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_experts.c -- grouped products of mixtures of experts, for bench_cuda: gate and up of Qwen3-30B and of Mixtral, with
 * rows of training, of prompts and of decoding. */
#include <stdio.h>
#include <string.h>

#include "kernels/grouped.h"
#include "tests/bench/cuda_cases.h"

typedef struct {
    int64_t experts, from, to, rows; /* rows of each expert */
    bool backward;
} mixture;

static bench_case grouped_case(const char *op, const mixture *m)
{
    const lm_dtype act = LM_DTYPE_BF16;
    const lm_grouped_attr attr = { m->experts, m->to, LM_ACC_FIRST };
    const int64_t all = m->experts * m->rows;
    const operand x = cuda_matrix(act, all, m->from), dy = cuda_matrix(act, all, m->to);
    const operand w = { act, 2, { m->experts * m->to, m->from }, NORMAL, 0.02 };
    bool dx = !strcmp(op, "grouped_linear_dx"), dw = !strcmp(op, "grouped_linear_dw");
    bench_case c = { .op = op, .act = act };
    cuda_set_attr(&c, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld x %lld -> %lld", (long long)m->experts,
             (long long)m->rows, (long long)m->from, (long long)m->to);
    c.in[0] = dx || dw ? dy : x;
    c.in[1] = dw ? x : w;
    c.in[2] = (operand){ LM_DTYPE_I32, 1, { m->experts + 1 }, STEPS, (double)m->rows };
    c.out[0] = dw ? w : dx ? x : dy;
    c.out[0].fill = NOTHING;
    if (dw)
        c.out[0].dtype = LM_DTYPE_F32;
    return c;
}

void cuda_expert_cases(bool toy, cuda_measure *measure)
{
    static const char *const ops[] = { "grouped_linear", "grouped_linear_dx", "grouped_linear_dw" };
    static const mixture real[] = { { 128, 2048, 1536, 4, false },
                                    { 128, 2048, 1536, 64, true },
                                    { 128, 2048, 1536, 512, true },
                                    { 8, 4096, 28672, 512, true } };
    static const mixture small[] = { { 4, 64, 96, 20, true } };
    const mixture *m = toy ? small : real;
    for (int i = 0; i < (toy ? 1 : 4); i++)
        for (int op = 0; op < (m[i].backward ? 3 : 1); op++) {
            bench_case c = grouped_case(ops[op], &m[i]);
            measure(&c);
        }
}
