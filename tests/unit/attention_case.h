/* SPDX-License-Identifier: Apache-2.0 */
/* attention_case.h -- cases of attention (kernels/attention.h), for the tests of its kernels on
 * every backend. */
#ifndef LM_TESTS_ATTENTION_CASE_H
#define LM_TESTS_ATTENTION_CASE_H

#include "kernel_case.h"
#include "kernels/attention.h"

enum { MOST_ROWS = 2 * 1025 };

typedef enum { WHOLE, DOCUMENTS, BLIND, SHORT, OPEN } lo_kind;

/* Document starts: three documents of uneven length; a BLIND row starts after its own position, so
 * it attends to no key.  SHORT: many documents, of 1 to 199 positions.  OPEN: their
 * starts alone, also where attention is not causal. */
static inline const int32_t *starts(lo_kind kind, int64_t batch, int64_t seq)
{
    static int32_t lo[MOST_ROWS];
    for (int64_t n = 0, from = 0, to = 0; n < batch * seq; n++) {
        int64_t i = n % seq, cut1 = seq / 3 + n / seq, cut2 = seq * 3 / 4;
        lo[n] = (int32_t)(i < cut1 ? 0 : i < cut2 ? cut1 : cut2);
        if (kind == BLIND && (i % 5 == 2 || i == 0 || i / 40 == 1))
            lo[n] = (int32_t)i + 1;
        if (kind != SHORT && kind != OPEN)
            continue;
        if (i == 0 || i == to) {
            from = i;
            to = i + 1 + (to * 67 + 13 + n / seq) % 199;
        }
        lo[n] = (int32_t)from;
    }
    return lo;
}

/* The row after each row's document; one that sees nothing keeps that of the sequence. */
static inline const int32_t *ends(lo_kind kind, int64_t batch, int64_t seq)
{
    static int32_t hi[MOST_ROWS];
    const int32_t *lo = starts(kind == BLIND ? DOCUMENTS : kind, batch, seq);
    for (int64_t n = batch * seq - 1; n >= 0; n--) {
        bool last = n % seq == seq - 1 || lo[n + 1] != lo[n];
        hi[n] = last ? (int32_t)(n % seq + 1) : hi[n + 1];
    }
    return hi;
}

static inline lm_attention_attr attr_of(int64_t batch, int64_t seq, int64_t heads, int64_t kv,
                                        int64_t dim)
{
    return (lm_attention_attr){ .batch = batch,
                                .seq = seq,
                                .heads = heads,
                                .kv_heads = kv,
                                .head_dim = dim,
                                .causal = true,
                                .scale = 1 / sqrt((double)dim) };
}

/* Blocks of keys: multiples and parts of tiles, each of the ways to be seen, and blocks that hide nothing. */
enum { BLOCKS = 7 };
static inline lm_attention_blocks blocks_at(int i)
{
    static const lm_attention_blocks all[BLOCKS] = {
        { 16, 1, 0, 0, false },  { 64, 2, 1, 4, false }, { 16, 2, 1, 3, true },
        { 5, 1, 2, 0, false },   { 48, 1, 0, 5, false }, { 32, 3, 0, 8, false },
        { 4000, 1, 0, 0, true },
    };
    return all[i % BLOCKS];
}

static inline kernel_case forward_of(const lm_attention_attr *a, lo_kind kind)
{
    int64_t n = a->batch * a->seq;
    kernel_case k = { .op = "attention",
                      .attr = a,
                      .tol_f32 = 2e-6,
                      .tol_bf16 = 1e-2,
                      .step = { .seed = 11, .step = 65539, .micro = 70001 } };
    k.in[0] = mat(ACT, n, lm_attention_row(a, true));
    if (kind != WHOLE && kind != OPEN && !a->causal)
        k.in[2] = given(vec(I32, n), ends(kind, a->batch, a->seq));
    if (kind != WHOLE)
        k.in[1] = given(vec(I32, n), starts(kind, a->batch, a->seq));
    k.out[0] = mat(ACT, n, a->heads * lm_attention_value_dim(a));
    k.out[1] = mat(F32, a->batch * a->heads, a->seq);
    return k;
}

/* The backward with o and lse of `y`, a run of the forward in F64. */
static inline kernel_case backward_of(const kernel_case *f, const instance *y)
{
    kernel_case k = *f;
    k.op = "attention_dx";
    memset(k.out, 0, sizeof k.out);
    k.in[0] = f->out[0];
    k.in[1] = f->in[0];
    k.in[2] = given(f->out[0], y->out[0].data);
    k.in[3] = given(f->out[1], y->out[1].data);
    k.in[4] = f->in[1];
    k.in[5] = f->in[2];
    k.out[0] = f->in[0];
    return k;
}

/* The forward and the backward read the same q, k and v: inputs from 0 in the forward, from 1 in
 * the backward. */
static inline void run_forward(const kernel_case *f, lm_dtype narrow, instance *y)
{
    build(f, LM_DTYPE_F64, narrow, y);
    run(y, lm_cpu_kernel("attention", LM_DTYPE_F64, LM_CPU_REF), NULL);
}

#endif
