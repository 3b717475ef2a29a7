/* SPDX-License-Identifier: Apache-2.0 */
/* bench_linear_attention.c -- linear attention beside softmax attention of the same heads: forward, backward and a token
 * behind a context, at contexts of 1024 to 8192 tokens; FLOP/s of whole sequences in F32 as a share of the vector ceiling.
 *
 * usage: bench_linear_attention [--quick] [--threads N]
 *
 * FLOPs are those that the operators count (lm_op.cost), of softmax attention those of bench_attention.  Figures are medians.
 * LM_CPU=LEVEL measures the kernels of another level. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/rng.h"
#include "kernels/attention.h"
#include "kernels/linear_attention.h"
#include "op/ops.h"
#include "tests/bench/call.h"

enum { HEADS = 12, KEYS = 12, DIM = 64, WIDE = (HEADS + 2 * KEYS) * DIM };

static lm_par *par;
static lm_ceilings *ceilings;
static lm_cpu_level level;
static bool quick;

static void die(const lm_err *e)
{
    fprintf(stderr, "bench_linear_attention: %s: %s\n", e->where, e->what);
    exit(1);
}

/* Normal numbers; whole numbers are zeros. */
static lm_tensor make(lm_dtype type, int64_t rows, int64_t cols)
{
    lm_tensor t = { .dtype = type, .ndim = 2, .dim = { rows, cols } };
    lm_err e = { 0 };
    if (lm_block_alloc(&t.data, (size_t)(rows * cols) * lm_dtype_size(type), "a bench operand", &e))
        die(&e);
    lm_rng r = lm_rng_make(5, "bench", (uint64_t)cols);
    for (int64_t i = 0; i < rows * cols; i++)
        if (type == LM_DTYPE_F32)
            ((float *)t.data)[i] = (float)lm_rng_normal(r, (uint64_t)(i % 65521));
        else if (type == LM_DTYPE_BF16)
            ((uint16_t *)t.data)[i] =
                lm_f32_to_bf16((float)lm_rng_normal(r, (uint64_t)(i % 65521)));
        else
            ((int32_t *)t.data)[i] = 0;
    return t;
}

static void drop(lm_tensor *t)
{
    if (t->data)
        lm_block_free(t->data, (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype));
}

/* Seconds of a call; flops 0: what the operator counts. */
static double measure(const lm_op *op, lm_call *c, const char *what, int64_t T, double flops)
{
    const lm_dtype act = c->out[0].dtype;
    const lm_kernel *k = lm_cpu_kernel(op->name, act, level);
    double t = 0, peak = act == LM_DTYPE_F32 ? lm_ceiling_fma_f32(ceilings) : 0;
    lm_cost cost = { 0 };
    lm_err e = { 0 };
    if (call_seconds(k, c, quick ? 3 : 9, &t, &e))
        die(&e);
    if (!(flops > 0))
        op->cost(c, &cost);
    flops = flops > 0 ? flops : cost.flops;
    printf("T %5lld  %-24s %-8s %-5s %-11s %9.3f ms %7.1f GFLOP/s", (long long)T, op->name, what,
           lm_dtype_name(act), lm_cpu_level_name(k->level), t * 1e3, flops / t * 1e-9);
    if (peak > 0)
        printf(" %5.1f %%", 100 * flops / t / peak);
    putchar('\n');
    return t;
}

static lm_linear_attention_attr linear_of(int64_t T, lm_feature feature, bool decay)
{
    return (lm_linear_attention_attr){ .batch = 1,
                                       .seq = T,
                                       .heads = HEADS,
                                       .kv_heads = KEYS,
                                       .head_dim = DIM,
                                       .state_rows = lm_linear_state_rows(feature, DIM),
                                       .feature = feature,
                                       .decay = decay,
                                       .scale = 1,
                                       .eps = 1e-6 };
}

static lm_attention_attr softmax_of(int64_t T)
{
    return (lm_attention_attr){ .batch = 1,
                                .seq = T,
                                .heads = HEADS,
                                .kv_heads = KEYS,
                                .head_dim = DIM,
                                .causal = true,
                                .scale = 1 / sqrt(DIM) };
}

static lm_call call_of(const void *attr, const lm_tensor *in, int n_in, lm_tensor *out, int n_out)
{
    static const lm_step step = { .seed = 1 };
    return (lm_call){
        .attr = attr, .in = in, .n_in = n_in, .out = out, .n_out = n_out, .par = par, .step = &step
    };
}

static void measure_sequences(int64_t T, lm_dtype act)
{
    lm_tensor qkv = make(act, T, WIDE), dqkv = make(act, T, WIDE);
    lm_tensor o = make(act, T, HEADS * DIM), dout = make(act, T, HEADS * DIM);
    lm_tensor lse = make(LM_DTYPE_F32, HEADS, T), none = { 0 };
    double flops = 2.0 * HEADS * DIM * (double)T * (double)T;
    for (int i = 0; i < 2; i++) {
        const lm_linear_attention_attr a = linear_of(T, (lm_feature)i, i);
        const char *what = i ? "decay" : "elu+1";
        lm_call c = call_of(&a, &qkv, 1, &o, 1);
        measure(&lm_op_linear_attention, &c, what, T, 0);
        lm_tensor back[] = { dout, qkv, i ? none : o };
        c = call_of(&a, back, 3, &dqkv, 1);
        measure(&lm_op_linear_attention_dx, &c, what, T, 0);
    }
    const lm_attention_attr s = softmax_of(T);
    lm_tensor out[2] = { o, lse }, back[] = { dout, qkv, o, lse };
    lm_call c = call_of(&s, &qkv, 1, out, 2);
    measure(&lm_op_attention, &c, "", T, flops);
    c = call_of(&s, back, 4, &dqkv, 1);
    measure(&lm_op_attention_dx, &c, "", T, 2.5 * flops);
    lm_tensor *all[] = { &qkv, &dqkv, &o, &dout, &lse };
    for (int i = 0; i < 5; i++)
        drop(all[i]);
}

/* The backward of one head, whose chunks threads share. */
static void measure_one_head(int64_t T, lm_dtype act)
{
    lm_linear_attention_attr a = linear_of(T, LM_FEATURE_ELU, false);
    lm_tensor qkv = make(act, T, 3 * DIM), dqkv = make(act, T, 3 * DIM), o = make(act, T, DIM),
              dout = make(act, T, DIM);
    lm_tensor back[] = { dout, qkv, o };
    a.heads = a.kv_heads = 1;
    lm_call c = call_of(&a, back, 3, &dqkv, 1);
    measure(&lm_op_linear_attention_dx, &c, "one head", T, 0);
    lm_tensor *all[] = { &qkv, &dqkv, &o, &dout };
    for (int i = 0; i < 4; i++)
        drop(all[i]);
}

/* A token behind T - 1 others. */
static void measure_token(int64_t T)
{
    lm_tensor qkv = make(LM_DTYPE_F32, 1, WIDE), o = make(LM_DTYPE_F32, 1, HEADS * DIM);
    lm_tensor used = make(LM_DTYPE_I32, 1, 1), fresh = make(LM_DTYPE_I32, 1, 1);
    lm_tensor keys = make(LM_DTYPE_F32, KEYS * T, DIM), values = make(LM_DTYPE_F32, KEYS * T, DIM);
    lm_tensor state = make(LM_DTYPE_F32, KEYS * (DIM + 1), DIM);
    *(int32_t *)used.data = (int32_t)T - 1;
    *(int32_t *)fresh.data = 1;
    const lm_linear_attention_attr a = linear_of(1, LM_FEATURE_ELU, false);
    const lm_attention_attr s = softmax_of(1);
    lm_tensor in[3] = { qkv, used, fresh }, linear[2] = { o, state },
              plain[3] = { o, keys, values };
    for (int i = 1; i < 3; i++) {
        plain[i].ndim = 4;
        memcpy(plain[i].dim, (int64_t[]){ 1, KEYS, T, DIM }, 4 * sizeof(int64_t));
    }
    lm_call c = call_of(&a, in, 3, linear, 2);
    measure(&lm_op_linear_attention_cached, &c, "elu+1", T, 0);
    c = call_of(&s, in, 3, plain, 3);
    measure(&lm_op_attention_cached, &c, "", T, 4.0 * HEADS * DIM * (double)T);
    lm_tensor *all[] = { &qkv, &o, &used, &fresh, &keys, &values, &state };
    for (int i = 0; i < 7; i++)
        drop(all[i]);
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    int threads = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            quick = true;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
    }
    level = lm_cpu_detect();
    if (getenv("LM_CPU") && lm_cpu_level_parse(getenv("LM_CPU"), &level, &e))
        die(&e);
    if (lm_par_new(&par, threads, &e) || lm_ceilings_new(&ceilings, par, &e))
        die(&e);
    printf("%s, %d threads\n", lm_cpu_model(), lm_par_threads(par));
    for (int64_t T = 1024; T <= (quick ? 1024 : 8192); T *= 2) {
        measure_sequences(T, LM_DTYPE_F32);
        measure_sequences(T, LM_DTYPE_BF16);
        measure_one_head(T, LM_DTYPE_F32);
        measure_token(T);
    }
    lm_ceilings_free(ceilings);
    lm_par_free(par);
    return 0;
}
