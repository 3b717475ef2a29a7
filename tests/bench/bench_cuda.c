/* bench_cuda.c -- what a CUDA device can do at most, and how near to it the kernels come: bytes/s of a copy
 * within the device, FLOP/s of big products by cuBLASLt, then each kernel on shapes of GPT-2 and Llama.
 *
 * usage: bench_cuda [--quick] [--toy] [--seconds N] [--paths LIST] [--device DEV] MODULES [NAME]
 *        bench_cuda --probe [--device DEV] MODULES      (what the device is, and what of it is free)
 *
 * MODULES is the folder of libcore-cuda.so; NAME takes operators only whose names begin so.  Bytes and FLOPs
 * are those of the operators' cost rules, every operand once.  A kernel's ceiling is that of copies or of
 * products in its type, whichever would take longer; both are measured first, in the same run.  Operands are
 * random normal numbers; small ones lie there several times over, so that caches hold nothing of the last
 * call.  --toy: shapes that an emulated device can do. */
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/embed.h"
#include "kernels/head.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/optim.h"
#include "kernels/rope.h"
#include "op/ops.h"
#include "tests/bench/cuda_bench.h"

enum fill { NOTHING, NORMAL, POSITIVE, IDS, VALUE, POSITIONS };
enum { SETS = 32, PATTERN = 65521 };
static const size_t cold = (size_t)256 << 20; /* bytes that no cache holds */

typedef struct {
    lm_dtype dtype;
    int ndim;
    int64_t dim[4];
    enum fill fill;
    double x; /* deviation of NORMAL and POSITIVE, bound of IDS and POSITIONS, the VALUE */
} operand;

typedef struct {
    const char *op;
    char shape[64];
    lm_dtype act;
    _Alignas(16) char attr[128];
    operand in[LM_MAX_IN], out[LM_MAX_OUT];
    double bytes; /* of what is no operator of graphs */
} bench_case;

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

static struct {
    lm_backend *path[PATHS]; /* one device; NULL where a path is not to be had */
    bool wanted[PATHS];
    double copy, product[PATHS]; /* ceilings: bytes/s; FLOP/s of BF16, F32 and TF32; 0: unknown */
    double deadline, budget;
    const char *only;
    bool quick, toy, probe;
    int left_out;
} bench;

static lm_backend *device(void)
{
    return bench.path[0];
}

/* ---- operands ---- */

static size_t tensor_bytes(const lm_tensor *t)
{
    return t->ndim ? (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype) : 0;
}

static size_t in_units(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static lm_tensor shape_of(const operand *o)
{
    lm_tensor t = { .dtype = o->ndim ? o->dtype : LM_DTYPE_NONE, .ndim = o->ndim };
    for (int i = 0; i < o->ndim; i++)
        t.dim[i] = o->dim[i];
    return t;
}

static double number(const operand *o, lm_rng r, int64_t i)
{
    switch (o->fill) {
    case NORMAL:
        return o->x * lm_rng_normal(r, (uint64_t)i);
    case POSITIVE:
        return o->x * fabs(lm_rng_normal(r, (uint64_t)i));
    case IDS:
        return (double)lm_rng_below(r, (uint64_t)i, (uint64_t)o->x);
    case POSITIONS:
        return (double)(i % (int64_t)o->x);
    default:
        return o->x;
    }
}

/* The beginning is drawn here, the rest is copies of it there: their period is a prime, but for
 * positions, whose period must be theirs. */
static void fill(const operand *o, void *data)
{
    static uint64_t drawn;
    static char pattern[PATTERN * 8];
    int64_t count = 1, first;
    size_t size = lm_dtype_size(o->dtype), done, all;
    lm_backend *b = device();
    lm_err e = { 0 };
    lm_rng r = lm_rng_make(1, "bench", drawn++);
    for (int i = 0; i < o->ndim; i++)
        count *= o->dim[i];
    first = o->fill == POSITIONS ? (int64_t)o->x : PATTERN;
    first = first < count ? first : count;
    for (int64_t i = 0; i < first; i++)
        lm_set(o->dtype, pattern, i, number(o, r, i));
    done = (size_t)first * size;
    all = (size_t)count * size;
    bench_must(b->copy(b, data, pattern, done, b->main, &e), &e);
    for (size_t n; done < all; done += n) {
        n = done < all - done ? done : all - done;
        bench_must(b->copy(b, (char *)data + done, data, n, b->main, &e), &e);
    }
    bench_must(b->sync(b, NULL, &e), &e);
}

/* A case with its operands on the device, so many times over that caches do not help. */
typedef struct {
    const bench_case *c;
    const lm_kernel *kernel;
    lm_tensor in[SETS][LM_MAX_IN], out[SETS][LM_MAX_OUT];
    lm_call call[SETS];
    int sets, next;
    void *block;
    size_t set_bytes;
} placed;

static const lm_tensor *place(const operand *o, size_t set, lm_tensor *t, char **at)
{
    size_t bytes;
    *t = shape_of(o);
    bytes = in_units(tensor_bytes(t));
    if (!bytes)
        return t;
    t->data = *at;
    if (set == 0 && o->fill != NOTHING)
        fill(o, *at);
    *at += bytes;
    return t;
}

static void describe(const bench_case *c, placed *p)
{
    *p = (placed){ .c = c };
    for (int i = 0; i < LM_MAX_IN + LM_MAX_OUT; i++) {
        lm_tensor t = shape_of(i < LM_MAX_IN ? &c->in[i] : &c->out[i - LM_MAX_IN]);
        p->set_bytes += in_units(tensor_bytes(&t));
    }
}

/* False: it does not fit into what the device has free, which is noted. */
static bool put_in_place(const bench_case *c, placed *p)
{
    lm_backend *b = device();
    lm_err e = { 0 };
    size_t free, total;
    describe(c, p);
    bench_must(b->memory(b, &free, &total, &e), &e);
    p->sets = 1;
    while (!bench.toy && p->sets < SETS && (size_t)p->sets * p->set_bytes < cold)
        p->sets *= 2;
    if (p->set_bytes > free / 2) {
        put_note("%s %s left out: it takes %.1f GB, %.1f are free", c->op, c->shape,
                 (double)p->set_bytes * 1e-9, (double)free * 1e-9);
        return false;
    }
    bench_must(b->alloc(b, (size_t)p->sets * p->set_bytes, "operands", &p->block, &e), &e);
    for (int s = 0; s < p->sets; s++) {
        char *base = (char *)p->block + (size_t)s * p->set_bytes, *at = base;
        for (int i = 0; i < LM_MAX_IN; i++)
            place(&c->in[i], (size_t)s, &p->in[s][i], &at);
        for (int i = 0; i < LM_MAX_OUT; i++)
            place(&c->out[i], (size_t)s, &p->out[s][i], &at);
        if (s)
            bench_must(b->copy(b, base, p->block, p->set_bytes, b->main, &e), &e);
        p->call[s] = (lm_call){ .attr = c->attr,
                                .in = p->in[s],
                                .n_in = LM_MAX_IN,
                                .out = p->out[s],
                                .n_out = LM_MAX_OUT };
    }
    bench_must(b->sync(b, NULL, &e), &e);
    return true;
}

static void take_away(placed *p)
{
    device()->free(device(), p->block, (size_t)p->sets * p->set_bytes);
}

/* ---- times ---- */

static void call_next(void *arg)
{
    placed *p = arg;
    p->kernel->run(&p->call[p->next]);
    p->next = (p->next + 1) % p->sets;
}

static bool is_product(const char *op)
{
    return !strncmp(op, "linear", 6) || !strcmp(op, "head_loss");
}

/* Has this path a way of its own to do it? */
static bool differs(const bench_case *c, int path)
{
    const lm_kernel *k;
    if (path == 0)
        return true;
    if (is_product(c->op))
        return path == 1 || c->act == LM_DTYPE_F32;
    k = bench.path[path]->kernel(bench.path[path], c->op, c->act);
    return k && k->level == path;
}

static bool time_on(placed *p, int path, timing *t)
{
    static const lm_step step = { .seed = 1, .step = 3 };
    lm_backend *b = bench.path[path];
    lm_err e = { 0 };
    size_t work = 0, free, total;
    void *scratch = NULL;
    p->kernel = b->kernel(b, p->c->op, p->c->act);
    if (!p->kernel) {
        put_note("%s has no kernel for %s", p->c->op, lm_dtype_name(p->c->act));
        return false;
    }
    for (int s = 0; s < p->sets; s++) {
        p->call[s].stream = b->main;
        p->call[s].step = &step;
    }
    if (p->kernel->work)
        work = p->kernel->work(&p->call[0], b->threads);
    bench_must(b->memory(b, &free, &total, &e), &e);
    if (work > free / 2) {
        put_note("%s %s left out: its scratch takes %.1f GB, %.1f are free", p->c->op, p->c->shape,
                 (double)work * 1e-9, (double)free * 1e-9);
        return false;
    }
    if (work)
        bench_must(b->alloc(b, work, "scratch", &scratch, &e), &e);
    for (int s = 0; s < p->sets; s++)
        p->call[s].work = scratch;
    bench_must(b->step(b, &step, b->main, &e), &e);
    bench_must(time_calls(b, call_next, p, bench.budget, t, &e), &e);
    bench_must(b->sync(b, NULL, &e), &e);
    if (work)
        b->free(b, scratch, work);
    return true;
}

/* ---- rows ---- */

static double product_ceiling(const bench_case *c, int path)
{
    if (!is_product(c->op) && strncmp(c->op, "attention", 9))
        return 0;
    return bench.product[c->act != LM_DTYPE_F32 ? 0 : path == 2 ? 2 : 1];
}

static void report(const placed *p, int path, const timing *t)
{
    const bench_case *c = p->c;
    const lm_op *op = lm_op_find(c->op);
    lm_cost cost = { .bytes = c->bytes };
    char of[64];
    double peak = product_ceiling(c, path), by_copy, by_product;
    row r = { .part = "kernel",
              .name = c->op,
              .shape = c->shape,
              .dtype = lm_dtype_name(c->act),
              .path = path_names[path],
              .t = *t,
              .of = of };
    if (op)
        op->cost(&p->call[0], &cost);
    by_copy = cost.bytes / bench.copy;
    by_product = peak > 0 ? cost.flops / peak : 0;
    if (by_product > by_copy) {
        r.rate = cost.flops / t->median * 1e-12;
        r.unit = "TFLOP/s";
        r.share = by_product / t->median;
        snprintf(of, sizeof of, "cuBLASLt, %.4g TFLOP/s", peak * 1e-12);
    } else {
        r.rate = cost.bytes / t->median * 1e-9;
        r.unit = "GB/s";
        r.share = by_copy / t->median;
        snprintf(of, sizeof of, "copy, %.4g GB/s", bench.copy * 1e-9);
    }
    put_row(&r);
}

static void measure(const bench_case *c)
{
    placed p;
    timing t;
    bool there = false;
    if (bench.only && strncmp(c->op, bench.only, strlen(bench.only)))
        return;
    for (int path = 0; path < PATHS; path++) {
        if (!bench.path[path] || !bench.wanted[path] || !differs(c, path))
            continue;
        if (lm_now() > bench.deadline) {
            bench.left_out++;
            continue;
        }
        if (!there && !put_in_place(c, &p))
            return;
        there = true;
        if (time_on(&p, path, &t))
            report(&p, path, &t);
    }
    if (there)
        take_away(&p);
}

/* ---- cases ---- */

static operand vector(lm_dtype d, int64_t n)
{
    return (operand){ d, 1, { n }, NORMAL, 1 };
}
static operand matrix(lm_dtype d, int64_t rows, int64_t cols)
{
    return (operand){ d, 2, { rows, cols }, NORMAL, 1 };
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

static void linear_cases(int64_t rows, int64_t from, int64_t to, lm_dtype act, bool backward)
{
    const lm_linear_attr attr = { LM_ACC_FIRST };
    const operand x = matrix(act, rows, from), dy = matrix(act, rows, to);
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

static void norm_cases(const dims *m, lm_dtype act)
{
    const lm_norm_attr attr = { m->llama ? LM_NORM_RMS : LM_NORM_LAYER, 1e-5, LM_ACC_FIRST };
    const operand x = matrix(act, m->rows, m->c), w = vector(LM_DTYPE_F32, m->c);
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

static void activation_cases(const dims *m, lm_dtype act)
{
    const lm_gelu_attr attr = { false };
    const operand h = matrix(act, m->rows, m->ffn);
    const operand x = matrix(act, m->rows, m->llama ? 2 * m->ffn : m->ffn);
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

static void plain_cases(const dims *m, lm_dtype act)
{
    const operand x = matrix(act, m->rows, m->c);
    bench_case c = begin("add", act, NULL, 0);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld", (long long)m->rows, (long long)m->c);
    c.in[0] = c.in[1] = x;
    c.out[0] = result(x);
    measure(&c);
    if (act == LM_DTYPE_F32) {
        c.op = "cast";
        c.in[1].ndim = 0;
        c.out[0] = result(matrix(LM_DTYPE_BF16, m->rows, m->c));
        measure(&c);
    }
    if (m->llama) {
        const lm_rope_attr attr = { m->h, m->kv, m->d, m->d, false };
        const operand qkv = matrix(act, m->rows, (m->h + 2 * m->kv) * m->d);
        c = begin("rope", act, &attr, sizeof attr);
        snprintf(c.shape, sizeof c.shape, "%lld x (%lld+2x%lld)x%lld", (long long)m->rows,
                 (long long)m->h, (long long)m->kv, (long long)m->d);
        c.in[0] = qkv;
        c.in[1] = integers(m->rows, POSITIONS, m->seq);
        c.in[2] = matrix(LM_DTYPE_F32, m->seq, m->d);
        c.out[0] = result(qkv);
        measure(&c);
    }
}

static void embed_cases(const dims *m, lm_dtype act)
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
    c.out[0] = result(matrix(act, m->rows, m->c));
    measure(&c);
    c.op = "embed_dw";
    c.in[1] = c.in[0];
    c.in[0] = matrix(act, m->rows, m->c);
    c.in[3].ndim = 0;
    c.out[0] = result(weights(LM_DTYPE_F32, m->vocab, m->c));
    if (!m->llama)
        c.out[1] = result(weights(LM_DTYPE_F32, m->seq, m->c));
    measure(&c);
}

static void head_case(const dims *m, lm_dtype act)
{
    const lm_head_attr attr = { m->vocab, 0, LM_ACC_FIRST };
    int64_t rows = m->rows < 4096 ? m->rows : 4096;
    bench_case c = begin("head_loss", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "%lld x %lld -> %lld", (long long)rows, (long long)m->c,
             (long long)m->vocab);
    c.in[0] = matrix(act, rows, m->c);
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

static void attention_cases(const dims *m, int64_t seq, lm_dtype act)
{
    const lm_attention_attr attr = attention_of(m, m->rows / seq, seq);
    const operand qkv = matrix(act, m->rows, (m->h + 2 * m->kv) * m->d);
    const operand o = matrix(act, m->rows, m->h * m->d);
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
static void cached_case(const dims *m, int64_t batch, int64_t room, lm_dtype act)
{
    const lm_attention_attr attr = attention_of(m, batch, 1);
    const operand cache = { act, 4, { batch, m->kv, room, m->d }, NORMAL, 1 };
    bench_case c = begin("attention_cached", act, &attr, sizeof attr);
    snprintf(c.shape, sizeof c.shape, "B=%lld H=%lld/%lld S=%lld D=%lld", (long long)batch,
             (long long)m->h, (long long)m->kv, (long long)room, (long long)m->d);
    c.in[0] = matrix(act, batch, (m->h + 2 * m->kv) * m->d);
    c.in[1] = integers(batch, VALUE, room - 1);
    c.in[2] = integers(batch, VALUE, 1);
    c.out[0] = result(matrix(act, batch, m->h * m->d));
    c.out[1] = c.out[2] = cache;
    measure(&c);
}

static void model_cases(const dims *m, lm_dtype act)
{
    int64_t qkv = (m->h + 2 * m->kv) * m->d;
    linear_cases(m->rows, m->c, qkv, act, false);
    linear_cases(m->rows, m->h * m->d, m->c, act, false);
    linear_cases(m->rows, m->c, m->llama ? 2 * m->ffn : m->ffn, act, true);
    linear_cases(m->rows, m->ffn, m->c, act, false);
    attention_cases(m, m->seq, act);
    if (m->seq > 1024)
        attention_cases(m, 1024, act);
    norm_cases(m, act);
    activation_cases(m, act);
    plain_cases(m, act);
    embed_cases(m, act);
    head_case(m, act);
}

static void decode_cases(const dims *m)
{
    static const int64_t batches[] = { 1, 64 };
    int64_t room = bench.toy ? 40 : 32768, vocab = bench.toy ? m->vocab : 128256;
    for (int i = 0; i < 2; i++) {
        int64_t rows = bench.toy ? 1 + 2 * i : batches[i];
        cached_case(m, rows, i && !bench.toy ? room / 4 : room, LM_DTYPE_BF16);
        linear_cases(rows, m->c, (m->h + 2 * m->kv) * m->d, LM_DTYPE_BF16, false);
        linear_cases(rows, m->c, 2 * m->ffn, LM_DTYPE_BF16, false);
        linear_cases(rows, m->c, vocab, LM_DTYPE_BF16, false);
    }
}

static void optimiser_cases(void)
{
    static const lm_adamw_attr attr = { 1e-4, 0.9, 0.95, 1e-8, 0.1, 0.5, 0.5, 1, 0 };
    int64_t n = bench.toy ? 1000 : 124439808;
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

/* ---- ceilings ---- */

/* The fastest of big square products of a type on a path; FLOP/s. */
static double product_rate(lm_dtype act, int path)
{
    static const int64_t sides[] = { 4096, 8192, 16384 };
    const lm_linear_attr attr = { LM_ACC_FIRST };
    double best = 0;
    for (int i = 0; i < (act == LM_DTYPE_F32 ? 2 : 3) && bench.path[path]; i++) {
        int64_t n = bench.toy ? 16 << i : sides[i];
        bench_case c = begin("linear", act, &attr, sizeof attr);
        placed p;
        timing t;
        c.in[0] = c.in[1] = matrix(act, n, n);
        c.out[0] = result(matrix(act, n, n));
        snprintf(c.shape, sizeof c.shape, "%lld^3", (long long)n);
        if (!put_in_place(&c, &p))
            continue;
        if (time_on(&p, path, &t)) {
            double rate = 2.0 * (double)n * (double)n * (double)n / t.median;
            put_row(&(row){ .part = "ceiling",
                            .name = "cuBLASLt",
                            .shape = c.shape,
                            .dtype = lm_dtype_name(act),
                            .path = path_names[path],
                            .t = t,
                            .rate = rate * 1e-12,
                            .unit = "TFLOP/s" });
            best = rate > best ? rate : best;
        }
        take_away(&p);
    }
    return best;
}

static void ceilings(void)
{
    bench.copy = copy_ceiling(device(), bench.toy ? 1 << 20 : (size_t)2 << 30, "copy");
    bench.product[0] = product_rate(LM_DTYPE_BF16, 1);
    bench.product[1] = product_rate(LM_DTYPE_F32, 1);
    bench.product[2] = product_rate(LM_DTYPE_F32, 2);
}

static const char *arguments(int argc, char **argv, const char **paths, const char **name)
{
    const char *modules = NULL;
    double seconds = 240;
    *paths = "plain,tensor,tf32";
    *name = "cuda:0";
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--quick"))
            bench.quick = true;
        else if (!strcmp(argv[i], "--toy"))
            bench.toy = true;
        else if (!strcmp(argv[i], "--probe"))
            bench.probe = true;
        else if (!strcmp(argv[i], "--seconds") && ++i)
            seconds = atof(value);
        else if (!strcmp(argv[i], "--paths") && ++i)
            *paths = value;
        else if (!strcmp(argv[i], "--device") && ++i)
            *name = value;
        else if (!modules)
            modules = argv[i];
        else
            bench.only = argv[i];
    }
    if (!modules) {
        fprintf(stderr, "bench-cuda: name the folder of the module\n");
        exit(2);
    }
    bench.deadline = lm_now() + seconds;
    bench.budget = bench.toy ? 1e-3 : bench.quick ? 0.2 : 0.5;
    return modules;
}

static void probe(const char *modules, const char *name)
{
    size_t free, total;
    lm_err e = { 0 };
    open_path(modules, name, 0, &bench.path[0]);
    bench_must(device()->memory(device(), &free, &total, &e), &e);
    printf("{\"part\":\"device\",\"name\":\"%s\",\"free\":%zu,\"total\":%zu}\n", device()->device,
           free, total);
    lm_backend_close(device());
}

int main(int argc, char **argv)
{
    const char *paths, *name, *modules = arguments(argc, argv, &paths, &name);
    const dims *m = bench.toy ? toys : models;
    size_t n = bench.toy ? sizeof toys / sizeof *toys : sizeof models / sizeof *models;
    if (bench.probe) {
        probe(modules, name);
        return 0;
    }
    for (int i = 0; i < PATHS; i++) {
        bench.wanted[i] = strstr(paths, path_names[i]) != NULL;
        open_path(modules, name, i, &bench.path[i]);
    }
    ceilings();
    decode_cases(&m[1]);
    optimiser_cases();
    for (size_t i = 0; i < n; i++) {
        if (bench.quick && !m[i].quick)
            continue;
        put_note("%s", m[i].name);
        model_cases(&m[i], LM_DTYPE_BF16);
        if (i == 0)
            model_cases(&m[i], LM_DTYPE_F32);
    }
    if (bench.left_out)
        put_note("%d rows left out: the time was over", bench.left_out);
    if (!bench.only)
        copy_ceiling(device(), bench.toy ? 1 << 20 : (size_t)2 << 30, "copy, at the end");
    for (int i = PATHS - 1; i >= 0; i--)
        if (bench.path[i])
            lm_backend_close(bench.path[i]);
    return 0;
}
