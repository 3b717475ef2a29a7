/* cuda_cases.c -- the shapes that bench_cuda measures (cuda_cases.h). */
#include "tests/bench/cuda_cases.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/embed.h"
#include "kernels/head.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/optim.h"
#include "kernels/rope.h"

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
/* What a kernel only writes. */
static operand result(operand o)
{
    o.fill = NOTHING;
    return o;
}

static bench_case begin(const char *op, lm_dtype act, const void *attr, size_t size)
{
    bench_case c = { .op = op, .act = act };
    if (attr)
        memcpy(c.attr, attr, size);
    return c;
}

static void linear_cases(int64_t rows, int64_t from, int64_t to, lm_dtype act, bool backward,
                         cuda_measure *measure)
{
    const lm_linear_attr attr = { LM_ACC_FIRST };
    const operand x = cuda_matrix(act, rows, from), dy = cuda_matrix(act, rows, to);
    bench_case c = begin("linear", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld -> %lld", (long long)rows, (long long)from,
             (long long)to);
    c.in[0] = x;
    c.in[1] = weights(act, to, from);
    c.out[0] = result(dy);
    measure(&c);
    if (!backward)
        return;
    c.op = "linear_dx";
    c.in[0] = dy;
    c.out[0] = result(x);
    measure(&c);
    c.op = "linear_dw";
    c.in[1] = x;
    c.out[0] = result(weights(LM_DTYPE_F32, to, from));
    measure(&c);
}

static void norm_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    const lm_norm_attr attr = { m->llama ? LM_NORM_RMS : LM_NORM_LAYER, 1e-5, LM_ACC_FIRST };
    const operand x = cuda_matrix(act, m->rows, m->c), w = vector(LM_DTYPE_F32, m->c);
    bench_case c = begin("norm", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%s %lld x %lld", m->llama ? "rms" : "layer",
             (long long)m->rows, (long long)m->c);
    c.in[0] = c.in[3] = x;
    c.in[1] = w;
    if (!m->llama)
        c.in[2] = w;
    c.out[0] = c.out[2] = result(x);
    c.out[1] = result(statistics(m->rows));
    measure(&c);
    c.op = "norm_dx";
    c.in[0] = c.in[1] = c.in[4] = x;
    c.in[2] = w;
    c.in[3] = statistics(m->rows);
    c.out[1].ndim = c.out[2].ndim = 0;
    measure(&c);
    c.op = "norm_dw";
    c.in[2] = statistics(m->rows);
    c.in[3].ndim = c.in[4].ndim = 0;
    c.out[0] = result(w);
    if (!m->llama)
        c.out[1] = result(w);
    measure(&c);
}

static void activation_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    const lm_gelu_attr attr = { false };
    const operand h = cuda_matrix(act, m->rows, m->ffn);
    const operand x = cuda_matrix(act, m->rows, m->llama ? 2 * m->ffn : m->ffn);
    bench_case c = begin(m->llama ? "swiglu" : "gelu", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld", (long long)m->rows, (long long)m->ffn);
    c.in[0] = x;
    c.out[0] = result(h);
    measure(&c);
    c.op = m->llama ? "swiglu_dx" : "gelu_dx";
    c.in[0] = h;
    c.in[1] = x;
    c.out[0] = result(x);
    measure(&c);
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
        const lm_rope_attr attr = { m->h, m->kv, m->d, m->d, false };
        const operand qkv = cuda_matrix(act, m->rows, (m->h + 2 * m->kv) * m->d);
        c = begin("rope", act, &attr, sizeof attr);
        snprintf(c.shape, sizeof c.shape, "%lld x (%lld+2x%lld)x%lld", (long long)m->rows,
                 (long long)m->h, (long long)m->kv, (long long)m->d);
        c.in[0] = qkv;
        c.in[1] = integers(m->rows, POSITIONS, m->seq);
        c.in[2] = cuda_matrix(LM_DTYPE_F32, m->seq, m->d);
        c.out[0] = result(qkv);
        measure(&c);
    }
}

static void embed_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    const lm_embed_attr attr = { LM_ACC_FIRST, LM_ACC_FIRST };
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
    const lm_head_attr attr = { m->vocab, 0, LM_ACC_FIRST };
    int64_t rows = m->rows < 4096 ? m->rows : 4096;
    bench_case c = begin("head_loss", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld -> %lld", (long long)rows, (long long)m->c,
             (long long)m->vocab);
    c.in[0] = cuda_matrix(act, rows, m->c);
    c.in[1] = weights(act, m->vocab, m->c);
    c.in[2] = integers(rows, IDS, m->vocab);
    c.in[3] = (operand){ LM_DTYPE_F32, 1, { 1 }, VALUE, 1.0 / (double)rows };
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
    /* Scores of such queries and keys are normal: about the sum that a row of them has. */
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

/* One token more of each sequence, behind a full cache. */
static void cached_case(const dims *m, int64_t batch, int64_t room, lm_dtype act,
                        cuda_measure *measure)
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
    measure(&c);
}

static void model_cases(const dims *m, lm_dtype act, cuda_measure *measure)
{
    int64_t qkv = (m->h + 2 * m->kv) * m->d;
    linear_cases(m->rows, m->c, qkv, act, false, measure);
    linear_cases(m->rows, m->h * m->d, m->c, act, false, measure);
    linear_cases(m->rows, m->c, m->llama ? 2 * m->ffn : m->ffn, act, true, measure);
    linear_cases(m->rows, m->ffn, m->c, act, false, measure);
    attention_cases(m, m->seq, act, measure);
    if (m->seq > 1024)
        attention_cases(m, 1024, act, measure);
    norm_cases(m, act, measure);
    activation_cases(m, act, measure);
    plain_cases(m, act, measure);
    embed_cases(m, act, measure);
    head_case(m, act, measure);
}

void cuda_decoding_cases(bool toy, cuda_measure *measure)
{
    const dims *m = toy ? &toys[1] : &models[1];
    static const int64_t batches[] = { 1, 64 };
    int64_t room = toy ? 40 : 32768, vocab = toy ? m->vocab : 128256;
    for (int i = 0; i < 2; i++) {
        int64_t rows = toy ? 1 + 2 * i : batches[i];
        cached_case(m, rows, i && !toy ? room / 4 : room, LM_DTYPE_BF16, measure);
        linear_cases(rows, m->c, (m->h + 2 * m->kv) * m->d, LM_DTYPE_BF16, false, measure);
        linear_cases(rows, m->c, 2 * m->ffn, LM_DTYPE_BF16, false, measure);
        linear_cases(rows, m->c, vocab, LM_DTYPE_BF16, false, measure);
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
    c.out[0] = (operand){ LM_DTYPE_F64, 1, { 1 }, NOTHING, 0 };
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
