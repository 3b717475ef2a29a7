/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_cases.c -- the shapes that bench_cuda measures (cuda_cases.h). */
#include "tests/bench/cuda_cases.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/embed.h"
#include "kernels/head.h"
#include "kernels/kv.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/optim.h"
#include "kernels/rope.h"
#include "kernels/sample.h"

/* One model at one size of batch; GPT-2's vocabulary is padded. */
typedef struct {
    const char *name;
    bool llama, quick;
    int64_t c, h, kv, d, ffn, vocab, seq, rows;
} dims;

static const dims models[] = {
    { "gpt2-124m", false, true, 768, 12, 12, 64, 3072, 50304, 1024, 16384 },
    { "llama-8b", true, true, 4096, 32, 8, 128, 14336, 128256, 8192, 8192 },
    { "gpt2-1.5b", false, false, 1600, 25, 25, 64, 6400, 50304, 1024, 16384 },
    { "llama-1b", true, false, 2048, 32, 8, 64, 8192, 128256, 8192, 8192 },
};
static const dims toys[] = {
    { "toy-gpt2", false, true, 64, 2, 2, 32, 96, 131, 16, 32 },
    { "toy-llama", true, true, 128, 2, 1, 64, 96, 131, 16, 32 },
};

static operand vector(lm_dtype d, int64_t n)
{
    return (operand){ d, 1, { n }, NORMAL, 1 };
}
static operand weights(lm_dtype d, int64_t rows, int64_t cols)
{
    return (operand){ d, 2, { rows, cols }, NORMAL, 0.02 };
}
static operand statistics(int64_t rows)
{
    return (operand){ LM_DTYPE_F32, 2, { rows, 2 }, POSITIVE, 1 };
}
static operand integers(int64_t n, enum fill how, int64_t x)
{
    return (operand){ LM_DTYPE_I32, 1, { n }, how, (double)x };
}
/* An operand that a kernel only writes. */
static operand result(operand o)
{
    o.fill = NOTHING;
    return o;
}

static bench_case begin(const char *op, lm_dtype act, const void *attr, size_t size)
{
    bench_case c = { .op = op, .act = act };
    if (attr)
        cuda_set_attr(&c, attr, size);
    return c;
}

/* c replaces p, too. */
static void takes_in(bench_case *c, const bench_case *p)
{
    int i = 0;
    while (c->part[i].op)
        i++;
    c->part[i].op = p->op;
    memcpy(c->part[i].shape, p->shape, sizeof p->shape);
}

/* ---- products ---- */

/* op: linear, linear_dx or linear_dw, all by the shape of the forward. */
static bench_case linear_case(const char *op, int64_t rows, int64_t from, int64_t to, lm_dtype act)
{
    const lm_linear_attr attr = { LM_ACC_FIRST };
    const operand x = cuda_matrix(act, rows, from), dy = cuda_matrix(act, rows, to);
    const operand w = weights(act, to, from);
    bool dx = !strcmp(op, "linear_dx"), dw = !strcmp(op, "linear_dw");
    bench_case c = begin(op, act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld -> %lld", (long long)rows, (long long)from,
             (long long)to);
    c.in[0] = dx || dw ? dy : x;
    c.in[1] = dw ? x : w;
    c.out[0] = result(dw ? weights(LM_DTYPE_F32, to, from) : dx ? x : dy);
    return c;
}

static void linear_cases(int64_t rows, int64_t from, int64_t to, lm_dtype act, bool backward,
                         cuda_measure *measure)
{
    static const char *const ops[] = { "linear", "linear_dx", "linear_dw" };
    for (int i = 0; i < (backward ? 3 : 1); i++) {
        bench_case c = linear_case(ops[i], rows, from, to, act);
        measure(&c);
    }
}

/* The logits of decoding: into F32. */
static bench_case logits_case(int64_t rows, int64_t from, int64_t vocab, lm_dtype act)
{
    bench_case c = linear_case("linear", rows, from, vocab, act);
    c.out[0].dtype = LM_DTYPE_F32;
    return c;
}

/* ---- norms and activations ---- */

static bench_case norm_case(const char *op, const dims *m, int64_t rows, lm_dtype act)
{
    const lm_norm_attr attr = { m->llama ? LM_NORM_RMS : LM_NORM_LAYER, 1e-5, LM_ACC_FIRST, false };
    const operand x = cuda_matrix(act, rows, m->c), w = vector(LM_DTYPE_F32, m->c);
    bool dw = !strcmp(op, "norm_dw"), both = !strcmp(op, "norm_dx_dw");
    bench_case c = begin(op, act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%s %lld x %lld", m->llama ? "rms" : "layer", (long long)rows,
             (long long)m->c);
    c.in[0] = x;
    if (!strcmp(op, "norm")) {
        c.in[1] = w;
        if (!m->llama)
            c.in[2] = w;
        c.in[3] = x;
        c.out[0] = c.out[2] = result(x);
        c.out[1] = result(statistics(rows));
        return c;
    }
    c.in[1] = x;
    c.in[2] = dw ? statistics(rows) : w;
    if (!dw) {
        c.in[3] = statistics(rows);
        c.in[4] = x;
        c.out[0] = result(x);
    }
    if (dw || both) {
        c.out[both] = result(w);
        if (!m->llama)
            c.out[both + 1] = result(w);
    }
    return c;
}

static void norm_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    bench_case forward = norm_case("norm", m, m->rows, act);
    bench_case dx = norm_case("norm_dx", m, m->rows, act);
    bench_case dw = norm_case("norm_dw", m, m->rows, act);
    bench_case both = norm_case("norm_dx_dw", m, m->rows, act);
    measure(&forward);
    measure(&dx);
    measure(&dw);
    takes_in(&both, &dx);
    takes_in(&both, &dw);
    measure(&both);
}

static bench_case activation_case(const dims *m, bool backward, int64_t rows, lm_dtype act)
{
    static const char *const ops[2][2] = { { "gelu", "gelu_dx" }, { "swiglu", "swiglu_dx" } };
    const lm_gelu_attr attr = { false };
    const operand h = cuda_matrix(act, rows, m->ffn);
    const operand x = cuda_matrix(act, rows, m->llama ? 2 * m->ffn : m->ffn);
    bench_case c = begin(ops[m->llama][backward], act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld", (long long)rows, (long long)m->ffn);
    c.in[backward] = x;
    if (backward)
        c.in[0] = h;
    c.out[0] = result(backward ? x : h);
    return c;
}

/* The products around an activation, and for GELU the joined forms. */
static void feed_forward_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    const lm_linear_act_attr gelu = { LM_ACT_GELU };
    bench_case up = linear_case("linear", m->rows, m->c, m->ffn, act);
    bench_case down_dx = linear_case("linear_dx", m->rows, m->ffn, m->c, act);
    bench_case forward = activation_case(m, false, m->rows, act), joined = up;
    bench_case backward = activation_case(m, true, m->rows, act);
    linear_cases(m->rows, m->c, m->llama ? 2 * m->ffn : m->ffn, act, true, measure);
    linear_cases(m->rows, m->ffn, m->c, act, false, measure);
    measure(&forward);
    measure(&backward);
    if (m->llama)
        return;
    measure(&down_dx);
    cuda_set_attr(&joined, &gelu, sizeof gelu);
    joined.op = "linear_act";
    joined.out[1] = joined.out[0]; /* read by the backward */
    takes_in(&joined, &up);
    takes_in(&joined, &forward);
    measure(&joined);
    joined = down_dx;
    cuda_set_attr(&joined, &gelu, sizeof gelu);
    joined.op = "linear_act_dx";
    joined.in[2] = backward.in[1];
    takes_in(&joined, &down_dx);
    takes_in(&joined, &backward);
    measure(&joined);
}

/* ---- others ---- */

static bench_case rope_case(const dims *m, int64_t rows, int64_t positions, lm_dtype act)
{
    const lm_rope_attr attr = { m->h, m->kv, m->d, m->d, false };
    const operand qkv = cuda_matrix(act, rows, (m->h + 2 * m->kv) * m->d);
    bench_case c = begin("rope", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x (%lld+2x%lld)x%lld", (long long)rows, (long long)m->h,
             (long long)m->kv, (long long)m->d);
    c.in[0] = qkv;
    c.in[1] = integers(rows, POSITIONS, positions);
    c.in[2] = cuda_matrix(LM_DTYPE_F32, positions, m->d);
    c.out[0] = result(qkv);
    return c;
}

static void plain_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    const operand x = cuda_matrix(act, m->rows, m->c);
    bench_case c = begin("add", act, NULL, 0);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld", (long long)m->rows, (long long)m->c);
    c.in[0] = c.in[1] = x;
    c.out[0] = result(x);
    measure(&c);
    if (act == LM_DTYPE_F32) {
        c.op = "cast";
        c.in[1].ndim = 0;
        c.out[0] = result(cuda_matrix(LM_DTYPE_BF16, m->rows, m->c));
        measure(&c);
    }
    if (m->llama) {
        c = rope_case(m, m->rows, m->seq, act);
        measure(&c);
    }
}

static void embed_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    const lm_embed_attr attr = { LM_ACC_FIRST, LM_ACC_FIRST, 0 };
    bench_case c = begin("embed", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld of %lld", (long long)m->rows, (long long)m->c,
             (long long)m->vocab);
    c.in[0] = integers(m->rows, IDS, m->vocab);
    c.in[1] = weights(act, m->vocab, m->c);
    if (!m->llama) {
        c.in[2] = integers(m->rows, POSITIONS, m->seq);
        c.in[3] = weights(act, m->seq, m->c);
    }
    c.out[0] = result(cuda_matrix(act, m->rows, m->c));
    measure(&c);
    c.op = "embed_dw";
    c.in[1] = c.in[0];
    c.in[0] = cuda_matrix(act, m->rows, m->c);
    c.in[3].ndim = 0;
    c.out[0] = result(weights(LM_DTYPE_F32, m->vocab, m->c));
    if (!m->llama)
        c.out[1] = result(weights(LM_DTYPE_F32, m->seq, m->c));
    measure(&c);
}

static void head_case(const dims *m, lm_dtype act, cuda_measure *measure)
{
    const lm_head_attr attr = { m->vocab, 0, LM_ACC_FIRST, 0 };
    int64_t rows = m->rows < 4096 ? m->rows : 4096;
    bench_case c = begin("head_loss", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld -> %lld", (long long)rows, (long long)m->c,
             (long long)m->vocab);
    c.in[0] = cuda_matrix(act, rows, m->c);
    c.in[1] = weights(act, m->vocab, m->c);
    c.in[2] = integers(rows, IDS, m->vocab);
    c.in[3] = (operand){ LM_DTYPE_F32, 1, { rows }, VALUE, 1.0 / (double)rows };
    c.out[0] = result(vector(LM_DTYPE_F32, rows));
    c.out[1] = result(c.in[0]);
    c.out[2] = result(weights(LM_DTYPE_F32, m->vocab, m->c));
    measure(&c);
}

static lm_attention_attr attention_of(const dims *m, int64_t batch, int64_t seq)
{
    return (lm_attention_attr){ .batch = batch,
                                .seq = seq,
                                .heads = m->h,
                                .kv_heads = m->kv,
                                .head_dim = m->d,
                                .causal = true,
                                .scale = 1 / sqrt((double)m->d) };
}

static void attention_cases(const dims *m, int64_t seq, lm_dtype act, cuda_measure *measure)
{
    const lm_attention_attr attr = attention_of(m, m->rows / seq, seq);
    const operand qkv = cuda_matrix(act, m->rows, (m->h + 2 * m->kv) * m->d);
    const operand o = cuda_matrix(act, m->rows, m->h * m->d);
    bench_case c = begin("attention", act, &attr, sizeof attr);
    operand lse = { LM_DTYPE_F32, 3, { attr.batch, m->h, seq }, NOTHING, 0 };
    snprintf(c.shape, sizeof c.shape, "B=%lld H=%lld/%lld T=%lld D=%lld", (long long)attr.batch,
             (long long)m->h, (long long)m->kv, (long long)seq, (long long)m->d);
    c.in[0] = qkv;
    c.out[0] = result(o);
    c.out[1] = lse;
    measure(&c);
    /* Scores of such queries and keys are normal: about the log-sum-exp of a row of them. */
    lse.fill = VALUE;
    lse.x = log((double)seq) + 0.5;
    c.op = "attention_dx";
    c.in[0] = c.in[2] = o;
    c.in[1] = qkv;
    c.in[3] = lse;
    c.out[0] = result(qkv);
    c.out[1].ndim = 0;
    measure(&c);
}

/* One more token of each sequence, with a full cache. */
static bench_case cached_case(const dims *m, int64_t batch, int64_t room, lm_dtype act)
{
    const lm_attention_attr attr = attention_of(m, batch, 1);
    const operand cache = { act, 4, { batch, m->kv, room, m->d }, NORMAL, 1 };
    bench_case c = begin("attention_cached", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "B=%lld H=%lld/%lld S=%lld D=%lld", (long long)batch,
             (long long)m->h, (long long)m->kv, (long long)room, (long long)m->d);
    c.in[0] = cuda_matrix(act, batch, (m->h + 2 * m->kv) * m->d);
    c.in[1] = integers(batch, VALUE, room - 1);
    c.in[2] = integers(batch, VALUE, 1);
    c.out[0] = result(cuda_matrix(act, batch, m->h * m->d));
    c.out[1] = c.out[2] = cache;
    return c;
}

/* The same, and the rotation before it. */
static void step_cases(const dims *m, int64_t batch, int64_t room, lm_dtype act,
                       cuda_measure *measure)
{
    bench_case cached = cached_case(m, batch, room, act);
    bench_case rope = rope_case(m, batch, room, act), step = cached;
    const lm_attention_step_attr attr = { .attention = attention_of(m, batch, 1),
                                          .rotary_dim = m->d,
                                          .eps = 1e-5 };
    measure(&rope);
    measure(&cached);
    step.op = "attention_step";
    cuda_set_attr(&step, &attr, sizeof attr);
    step.in[3] = integers(batch, VALUE, room - 1);
    step.in[4] = rope.in[2];
    takes_in(&step, &rope);
    takes_in(&step, &cached);
    measure(&step);
}

#define CACHE_FORMATS(side)                                                           \
    { .name = "int8", .values = side, .bits = 8, .scale = LM_DTYPE_F16 },             \
        { .name = "int4",                                                             \
          .values = side,                                                             \
          .bits = 4,                                                                  \
          .levels = LM_KV_ASYM,                                                       \
          .group = 32,                                                                \
          .scale = LM_DTYPE_F16 },                                                    \
    {                                                                                 \
        .name = "int2", .values = side, .bits = 2, .levels = LM_KV_ASYM, .group = 32, \
        .scale = LM_DTYPE_F16                                                         \
    }

const lm_kv_format *cuda_cache_format(int i)
{
    static const lm_kv_format formats[] = { CACHE_FORMATS(false), CACHE_FORMATS(true) };
    return &formats[i];
}

/* A new token over a coded cache in one page after another, and its row into the cache. */
static void kv_cases(const dims *m, int64_t batch, int64_t room, lm_dtype act,
                     cuda_measure *measure)
{
    const int64_t T = 64, P = (room + T - 1) / T;
    const lm_kv_attr attr = { .attention = attention_of(m, batch, 1) };
    for (int i = 0; i < 3; i++) {
        const operand keys = { act, 4, { batch * P, m->kv, T, m->d }, CODED, i };
        bench_case c = begin("kv_attention", act, &attr, sizeof attr);
        snprintf(c.shape, sizeof c.shape, "%s B=%lld H=%lld/%lld S=%lld D=%lld",
                 cuda_cache_format(i)->name, (long long)batch, (long long)m->h, (long long)m->kv,
                 (long long)room, (long long)m->d);
        c.in[0] = cuda_matrix(act, batch, (m->h + 2 * m->kv) * m->d);
        c.in[1] = integers(batch, VALUE, room - 1);
        c.in[2] = integers(batch, VALUE, 1);
        c.in[5] = (operand){ LM_DTYPE_I32, 2, { batch, P }, POSITIONS, (double)(batch * P) };
        c.in[6] = c.in[7] = keys;
        c.in[7].x = 3 + i;
        c.out[0] = result(cuda_matrix(act, batch, m->h * m->d));
        measure(&c);
        bench_case write = begin("kv_write", act, &attr, sizeof attr);
        memcpy(write.shape, c.shape, sizeof c.shape);
        memcpy(write.in, c.in, 3 * sizeof *c.in);
        write.in[4] = c.in[5];
        write.out[0] = c.in[6];
        write.out[1] = c.in[7];
        measure(&write);
    }
    const lm_head_rotate_attr rotate = { m->h, m->kv, m->d, true, true, true, 0 };
    bench_case c = begin("head_rotate", act, &rotate, sizeof rotate);
    snprintf(c.shape, sizeof c.shape, "B=%lld H=%lld/%lld D=%lld", (long long)batch,
             (long long)m->h, (long long)m->kv, (long long)m->d);
    c.in[0] = cuda_matrix(act, batch, (m->h + 2 * m->kv) * m->d);
    c.out[0] = result(c.in[0]);
    measure(&c);
}

static void model_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    int64_t qkv = (m->h + 2 * m->kv) * m->d;
    linear_cases(m->rows, m->c, qkv, act, false, measure);
    linear_cases(m->rows, m->h * m->d, m->c, act, false, measure);
    feed_forward_cases(m, act, measure);
    attention_cases(m, m->seq, act, measure);
    if (m->seq > 1024)
        attention_cases(m, 1024, act, measure);
    norm_cases(m, act, measure);
    plain_cases(m, act, measure);
    embed_cases(m, act, measure);
    head_case(m, act, measure);
}

/* ---- decoding ---- */

/* A product of few rows, measured alone and with the norm before it; swiglu: gate and up. */
static void norm_linear_cases(const dims *m, bench_case linear, bool swiglu, cuda_measure *measure)
{
    const lm_norm_linear_attr attr = { LM_NORM_RMS, 1e-5, swiglu ? LM_ACT_SWIGLU : LM_ACT_NONE,
                                       false };
    int64_t rows = linear.in[0].dim[0], to = linear.in[1].dim[0];
    bench_case norm = norm_case("norm", m, rows, linear.act);
    bench_case act = activation_case(m, false, rows, linear.act);
    bench_case c = begin("norm_linear", linear.act, &attr, sizeof attr);
    measure(&linear);
    takes_in(&c, &norm);
    takes_in(&c, &linear);
    snprintf(c.shape, sizeof c.shape, "%.50s%s", linear.shape, swiglu ? " swiglu" : "");
    c.in[0] = c.in[3] = norm.in[0];
    c.in[1] = norm.in[1];
    c.in[4] = linear.in[1];
    c.out[0] = linear.out[0];
    c.out[1] = norm.out[2];
    if (swiglu) {
        c.out[0].dim[1] = to / 2;
        takes_in(&c, &act);
    }
    measure(&c);
}

void cuda_decoding_cases(bool toy, cuda_measure *measure)
{
    const dims *m = toy ? &toys[1] : &models[1];
    static const int64_t batches[] = { 1, 4, 8, 64 }, few[] = { 1, 3 };
    const lm_dtype act = LM_DTYPE_BF16;
    const int64_t *rows = toy ? few : batches, room = toy ? 40 : 32768;
    for (int i = 0; i < (toy ? 2 : 4); i++) {
        bench_case norm = norm_case("norm", m, rows[i], act);
        bench_case swiglu = activation_case(m, false, rows[i], act);
        if (toy || rows[i] == 1 || rows[i] == 64) {
            step_cases(m, rows[i], rows[i] == 64 ? room / 4 : room, act, measure);
            kv_cases(m, rows[i], rows[i] == 64 ? room / 4 : room, act, measure);
        }
        measure(&norm);
        measure(&swiglu);
        norm_linear_cases(m, linear_case("linear", rows[i], m->c, (m->h + 2 * m->kv) * m->d, act),
                          false, measure);
        norm_linear_cases(m, linear_case("linear", rows[i], m->c, 2 * m->ffn, act), true, measure);
        norm_linear_cases(m, logits_case(rows[i], m->c, m->vocab, act), false, measure);
    }
}

void cuda_sampling_cases(bool toy, cuda_measure *measure)
{
    static const lm_sample_attr ways[] = {
        { .temperature = 0, .top_p = 1, .repetition_penalty = 1 },
        { .temperature = 0.8, .top_p = 0.95, .repetition_penalty = 1 },
    };
    const int64_t vocab = toy ? 512 : 128256;
    for (int64_t rows = 1; rows <= 64; rows *= 64)
        for (int way = 0; way < 2; way++) {
            bench_case c = begin("sample", LM_DTYPE_F32, &ways[way], sizeof ways[way]);
            snprintf(c.shape, sizeof c.shape, "%lld x %lld, %s", (long long)rows, (long long)vocab,
                     way ? "top-p" : "greedy");
            c.in[0] = (operand){ LM_DTYPE_F32, 2, { rows, vocab }, NORMAL, 3 };
            c.in[3] = (operand){ LM_DTYPE_F64, 1, { rows }, VALUE, 0.5 };
            c.in[4] = integers(rows, VALUE, 1);
            c.out[0] = result(integers(rows, VALUE, 0));
            c.bytes = 4.0 * (double)(rows * vocab);
            measure(&c);
        }
}

void cuda_optimiser_cases(bool toy, cuda_measure *measure)
{
    static const lm_adamw_attr attr = { 1e-4, 0.9, 0.95, 1e-8, 0.1, 0.5, 0.5, 1, 0 };
    int64_t n = toy ? 1000 : 124439808;
    bench_case c = begin("adamw", LM_DTYPE_F32, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld", (long long)n);
    c.in[0] = vector(LM_DTYPE_F32, n);
    c.in[1] = (operand){ LM_DTYPE_F64, 1, { 1 }, VALUE, 1 };
    for (int i = 0; i < 3; i++)
        c.out[i] = (operand){ LM_DTYPE_F32, 1, { n }, i == 2 ? POSITIVE : NORMAL, 0.02 };
    c.out[3] = result(vector(LM_DTYPE_BF16, n));
    c.bytes = 30.0 * (double)n; /* 4 read, 3 written, and the copy */
    measure(&c);
    c = begin("sumsq", LM_DTYPE_F32, NULL, 0);
    snprintf(c.shape, sizeof c.shape, "%lld", (long long)n);
    c.in[0] = vector(LM_DTYPE_F32, n);
    const int64_t size = toy ? 1000 : LM_SUM_BLOCK;
    c.in[1] = (operand){ LM_DTYPE_I32, 2, { n / size, 4 }, BLOCKS, (double)size };
    c.out[0] = (operand){ LM_DTYPE_F64, 1, { n / size }, NOTHING, 0 };
    c.bytes = 4.0 * (double)n;
    measure(&c);
}

void cuda_training_cases(bool quick, bool toy, void (*begin_model)(const char *name),
                         cuda_measure *measure)
{
    const dims *m = toy ? toys : models;
    size_t n = toy ? sizeof toys / sizeof *toys : sizeof models / sizeof *models;
    for (size_t i = 0; i < n; i++) {
        if (quick && !m[i].quick)
            continue;
        begin_model(m[i].name);
        model_cases(&m[i], LM_DTYPE_BF16, measure);
        if (i == 0)
            model_cases(&m[i], LM_DTYPE_F32, measure);
    }
}
