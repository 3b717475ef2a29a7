/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_case.h -- compares one matrix product or a batch on the CUDA backend, on any path of its
 * kernels, with sums in double: in three orders of threads, with guards, and with NaN in memory
 * that must not be read. */
#ifndef LM_TESTS_GEMM_CASE_H
#define LM_TESTS_GEMM_CASE_H

#include "cuda_case.h"
#include "kernels/cuda/blaslt.h"
#include "kernels/linear.h"

static const char *const paths[] = { "plain", "tensor", "tf32" };

static inline void open_path(const char *path)
{
    lm_err e = { 0 };
    device_must(cuda_open(path, true, &device, &e), &e);
}

/* Store a function of the emulated module in a variable of its type; false if it does not exist. */
static inline bool get_symbol(const char *name, void *function)
{
    void *found = emu_symbol(name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static inline lm_lt_counts counts_now(void)
{
    void (*counts)(const lm_stream *, lm_lt_counts *) = NULL;
    lm_lt_counts c = { 0 };
    if (!get_symbol("lm_cuda_lt_counts", &counts))
        skip();
    counts(device->main, &c);
    return c;
}

/* The emulated cuBLASLt serves all shapes.  So a refused call is a wrong call, which the plain
 * kernels would otherwise hide by computing the product instead. */
static inline void close_path(const char *path)
{
    if (!cuda_is_real()) {
        lm_lt_counts c = counts_now();
        assert_int_equal(c.unserved, 0);
        assert_true(strcmp(path, "plain") ? c.shapes > 0 : c.shapes == 0);
    }
    lm_backend_close(device);
}

/* ---- products ---- */

typedef struct {
    lm_gemm g;
    int64_t slack;     /* numbers between rows of A, B and C */
    int shift;         /* misalignment of all operands, in elements */
    bool odd_bias;     /* the bias is misaligned independently of the others */
    int64_t batch;     /* 0: one */
    bool share_b;      /* by the whole batch */
    bool once;         /* in one order of threads only */
    lm_activation act; /* with slope or want_z as in gemm_call */
    bool slope, want_z, sums;
    double tol;
} product;

enum { DRAWN = 4093 }; /* a prime: rows differ */

static inline void *drawn(lm_dtype d, int64_t count, uint64_t which)
{
    char *p = take((size_t)count * lm_dtype_size(d));
    lm_rng r = lm_rng_make(3, "factors", which);
    for (int64_t i = 0; i < count && i < DRAWN; i++)
        lm_set(d, p, i, 2 * lm_rng_uniform(r, (uint64_t)i) - 1);
    for (int64_t i = DRAWN; i < count; i++)
        memcpy(p + (size_t)i * lm_dtype_size(d), p + (size_t)(i - DRAWN) * lm_dtype_size(d),
               lm_dtype_size(d));
    return p;
}

/* Numbers of a row-major matrix with a pitch. */
static inline int64_t spread(int64_t rows, int64_t cols, int64_t slack)
{
    return rows * (cols + slack) - slack;
}

static inline double *widened(lm_dtype d, const void *p, int64_t count)
{
    double *x = take((size_t)count * sizeof *x);
    lm_convert(d, p, LM_DTYPE_F64, x, count);
    return x;
}

static inline double gelu(lm_activation act, double x)
{
    return act == LM_ACT_GELU ? x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)))
                              : x / 2 * erfc(-x / sqrt(2));
}
static inline double gelu_slope(lm_activation act, double x)
{
    double h = 1e-5; /* the error of the central difference is of order h * h */
    return (gelu(act, x + h) - gelu(act, x - h)) / (2 * h);
}

/* Memory on host and device: inputs, outputs, and the outputs of the first run. */
typedef struct {
    void *host, *back, *first, *dev;
    size_t bytes, shift;
} buffer;

static inline buffer buffer_of(lm_dtype d, int64_t count, uint64_t which, int shift)
{
    buffer b = { .bytes = (size_t)count * lm_dtype_size(d),
                 .shift = lm_dtype_size(d) * (size_t)shift };
    b.host = drawn(d, count, which);
    b.back = take(b.bytes);
    b.first = take(b.bytes);
    return b;
}

static inline void buffer_send(buffer *b)
{
    b->dev = b->bytes ? device_twin(b->host, b->bytes + GUARD, b->shift) : NULL;
}

static inline void buffer_fetch(buffer *b, bool first)
{
    if (!b->dev)
        return;
    device_copy(b->back, b->dev, b->bytes + GUARD);
    device_drop(b->dev, b->bytes + GUARD, b->shift);
    for (int i = 0; i < GUARD; i++)
        assert_int_equal(((unsigned char *)b->back)[b->bytes + (size_t)i], 0x5a);
    if (first)
        memcpy(b->first, b->back, b->bytes);
    else
        assert_memory_equal(b->first, b->back, b->bytes);
}

static inline void buffer_drop(buffer *b)
{
    lm_free(b->host);
    lm_free(b->back);
    lm_free(b->first);
}

/* Squared distance of C from the sums in double, and their squared norm; the same for z. */
static inline void error_of(const product *p, const lm_gemm *g, const buffer *z, const void *c0,
                            const void *c, int64_t counts[3], double *off, double *size)
{
    double *a = widened(g->ab, g->a, counts[0]), *b = widened(g->ab, g->b, counts[1]);
    double *row = take((size_t)g->n * sizeof *row);

    for (int64_t i = 0; i < g->m; i++) {
        for (int64_t j = 0; j < g->n; j++)
            row[j] = (g->bias ? g->bias[j] : 0) +
                     (g->accumulate ? lm_get(g->cd, c0, i * g->ldc + j) : 0);
        for (int64_t q = 0; q < g->k && !g->tb; q++) {
            double x = a[g->ta ? q * g->lda + i : i * g->lda + q];
            for (int64_t j = 0; j < g->n; j++)
                row[j] += x * b[q * g->ldb + j];
        }
        for (int64_t j = 0; j < g->n && g->tb; j++)
            for (int64_t q = 0; q < g->k; q++)
                row[j] += a[g->ta ? q * g->lda + i : i * g->lda + q] * b[j * g->ldb + q];
        for (int64_t j = 0; j < g->n; j++) {
            int64_t at = i * g->ldc + j;
            double d, x = row[j];
            if (p->want_z) {
                d = lm_get(g->cd, z->back, at) - x;
                *off += d * d;
                *size += x * x;
            }
            if (p->act != LM_ACT_NONE)
                x = p->slope ? x * gelu_slope(p->act, lm_get(g->cd, z->host, at)) : gelu(p->act, x);
            d = lm_get(g->cd, c, at) - x;
            *off += d * d;
            *size += x * x;
        }
    }
    lm_free(a);
    lm_free(b);
    lm_free(row);
}

static inline double batch_error(const product *p, const lm_gemm *all, const buffer *aux,
                                 int64_t batch, const int64_t stride[3], const void *c0,
                                 const void *c, int64_t counts[3])
{
    double off = 0, size = 0;
    size_t in = lm_dtype_size(all->ab), out = lm_dtype_size(all->cd);

    for (int64_t z = 0; z < batch; z++) {
        lm_gemm g = *all;
        g.a = (const char *)g.a + (size_t)(z * stride[0]) * in;
        g.b = (const char *)g.b + (size_t)(z * stride[1]) * in;
        error_of(p, &g, aux, (const char *)c0 + (size_t)(z * stride[2]) * out,
                 (const char *)c + (size_t)(z * stride[2]) * out, counts, &off, &size);
    }
    return sqrt(off / size);
}

/* The sums of op(A) over k. */
static inline void check_sums(const lm_gemm *g, const buffer *b, int64_t count)
{
    double *a = widened(g->ab, g->a, count), off = 0, size = 0;

    for (int64_t i = 0; i < g->m; i++) {
        double s = g->accumulate ? ((float *)b->host)[i] : 0;
        for (int64_t q = 0; q < g->k; q++)
            s += a[q * g->lda + i];
        double d = ((float *)b->back)[i] - s;
        off += d * d;
        size += s * s;
    }
    lm_free(a);
    if (!(sqrt(off / size) <= 1e-6))
        fail_msg("%s %lldx%lldx%lld: sums of A off by %.3g, allowed 1e-6", device->detail,
                 (long long)g->m, (long long)g->n, (long long)g->k, sqrt(off / size));
}

static inline void check_product(const product *p)
{
    size_t (*work_of)(const lm_gemm *, int64_t, const int64_t *, const lm_stream *) = NULL;
    void (*run_gemm)(const lm_gemm *, lm_activation, bool, void *, int64_t, const int64_t *,
                     lm_stream *) = NULL;
    void (*set_order)(int, uint64_t) = NULL;
    lm_gemm g = p->g, d;
    int64_t a_rows = g.ta ? g.k : g.m, a_cols = g.ta ? g.m : g.k;
    int64_t b_rows = g.tb ? g.n : g.k, b_cols = g.tb ? g.k : g.n;
    int64_t counts[3] = { spread(a_rows, a_cols, p->slack), spread(b_rows, b_cols, p->slack),
                          spread(g.m, g.n, p->slack) };
    int64_t batch = p->batch > 1 ? p->batch : 1;
    int64_t stride[3] = { counts[0] + p->slack, p->share_b ? 0 : counts[1] + p->slack,
                          counts[2] + p->slack };
    int64_t all[3];
    for (int i = 0; i < 3; i++)
        all[i] = counts[i] + (batch - 1) * stride[i];
    size_t in_size = lm_dtype_size(g.ab), in_shift = in_size * (size_t)p->shift;
    size_t bias_shift = sizeof(float) * (size_t)(p->shift || p->odd_bias);
    size_t out_size = lm_dtype_size(g.cd), out_shift = out_size * (size_t)p->shift;
    size_t a_bytes = (size_t)all[0] * in_size, b_bytes = (size_t)all[1] * in_size;
    size_t c_bytes = (size_t)all[2] * out_size, bias_bytes = (size_t)g.n * sizeof(float);
    void *a = drawn(g.ab, all[0], 1), *b = drawn(g.ab, all[1], 2);
    void *c0 = drawn(g.cd, all[2], 3), *c = take(c_bytes), *first = take(c_bytes);
    float *bias = g.bias ? drawn(LM_DTYPE_F32, g.n, 4) : NULL;
    buffer z = buffer_of(g.cd, p->slope || p->want_z ? all[2] : 0, 5, p->shift);
    buffer a_sum = buffer_of(LM_DTYPE_F32, p->sums ? g.m : 0, 6, p->shift);
    static float wanted;

    if (!get_symbol("lm_emu_gemm", &run_gemm) || !get_symbol("lm_emu_gemm_work", &work_of) ||
        !get_symbol("lm_emu_order", &set_order))
        skip();
    g.lda = a_cols + p->slack, g.ldb = b_cols + p->slack, g.ldc = g.n + p->slack;
    d = g;
    d.a = device_twin(a, a_bytes, in_shift), d.b = device_twin(b, b_bytes, in_shift);
    d.bias = bias ? device_twin(bias, bias_bytes, bias_shift) : NULL;
    d.a_sum = p->sums ? &wanted : NULL;
    size_t work = work_of(&d, p->batch, stride, device->main);
    void *junk = take(work);
    memset(junk, 0xff, work);
    d.work = device_twin(junk, work + GUARD, 0);
    for (int order = 0; order < 3; order++) {
        set_order(order, 5);
        d.c = device_twin(c0, c_bytes + GUARD, out_shift);
        buffer_send(&z);
        buffer_send(&a_sum);
        d.a_sum = a_sum.dev;
        run_gemm(&d, p->act, p->slope, z.dev, p->batch, stride, device->main);
        buffer_fetch(&z, !order);
        buffer_fetch(&a_sum, !order);
        device_copy(c, d.c, c_bytes + GUARD);
        device_drop(d.c, c_bytes + GUARD, out_shift);
        for (int i = 0; i < GUARD; i++)
            assert_int_equal(((unsigned char *)c)[c_bytes + (size_t)i], 0x5a);
        for (int64_t i = 0; i + 1 < g.m * batch && p->slack;
             i++) { /* the elements between rows are unchanged */
            if (p->want_z)
                assert_memory_equal((char *)z.back + (size_t)(i * g.ldc + g.n) * out_size,
                                    (char *)z.host + (size_t)(i * g.ldc + g.n) * out_size,
                                    (size_t)p->slack * out_size);
            assert_memory_equal((char *)c + (size_t)(i * g.ldc + g.n) * out_size,
                                (char *)c0 + (size_t)(i * g.ldc + g.n) * out_size,
                                (size_t)p->slack * out_size);
        }
        if (p->slope)
            assert_memory_equal(z.back, z.host, z.bytes);
        if (!order)
            memcpy(first, c, c_bytes);
        else
            assert_memory_equal(first, c, c_bytes);
        if (p->once)
            break;
    }
    set_order(0, 0);
    g.a = a, g.b = b, g.bias = bias;
    if (p->sums)
        check_sums(&g, &a_sum, counts[0]);
    double error = batch_error(p, &g, &z, batch, stride, c0, c, counts);
    if (getenv("LM_TEST_SHOW"))
        printf("%s %lldx%lldx%lld %s%s %s->%s shift %d: %.3g\n", device->detail, (long long)g.m,
               (long long)g.n, (long long)g.k, g.ta ? "T" : "N", g.tb ? "T" : "N",
               lm_dtype_name(g.ab), lm_dtype_name(g.cd), p->shift, error);
    if (!(error <= p->tol))
        fail_msg("%s %lldx%lldx%lld %s%s %s->%s shift %d: relative error %.3g, allowed %.3g",
                 device->detail, (long long)g.m, (long long)g.n, (long long)g.k, g.ta ? "T" : "N",
                 g.tb ? "T" : "N", lm_dtype_name(g.ab), lm_dtype_name(g.cd), p->shift, error,
                 p->tol);
    device_drop((void *)d.a, a_bytes, in_shift);
    device_drop((void *)d.b, b_bytes, in_shift);
    if (bias)
        device_drop((void *)d.bias, bias_bytes, bias_shift);
    device_drop(d.work, work + GUARD, 0);
    buffer_drop(&z);
    buffer_drop(&a_sum);
    void *mine[] = { a, b, c0, c, first, bias, junk };
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++)
        lm_free(mine[i]);
}

/* Allowed error of a result of this type, if its sums have an error of 1e-6; tf32 also rounds the
 * factors. */
static inline double allowed(lm_dtype ab, lm_dtype cd, const char *path)
{
    double factors = ab == LM_DTYPE_F32 && !strcmp(path, "tf32") ? 1e-3 : 1e-6;
    return cd == LM_DTYPE_BF16 ? 4e-3 : cd == LM_DTYPE_F16 ? 5e-4 : factors;
}

typedef struct {
    lm_dtype ab, cd;
} types;
static const types all_types[] = { { LM_DTYPE_F32, LM_DTYPE_F32 },
                                   { LM_DTYPE_BF16, LM_DTYPE_BF16 },
                                   { LM_DTYPE_BF16, LM_DTYPE_F32 },
                                   { LM_DTYPE_F16, LM_DTYPE_F16 },
                                   { LM_DTYPE_F16, LM_DTYPE_F32 } };

/* ---- functions and sums joined to a product ---- */

static const types narrow_types[] = { { LM_DTYPE_F32, LM_DTYPE_F32 },
                                      { LM_DTYPE_BF16, LM_DTYPE_BF16 },
                                      { LM_DTYPE_F16, LM_DTYPE_F16 } };

/* Both functions: forward with and without the preactivation z as an output, and the derivative. */
static inline void check_function(const int64_t shape[3], bool tb, types t, int turn,
                                  const char *path)
{
    static const float some;
    bool slope = turn % 3 == 2;
    product p = { .g = { .m = shape[0],
                         .n = shape[1],
                         .k = shape[2],
                         .ab = t.ab,
                         .cd = t.cd,
                         .tb = tb,
                         .bias = !slope && turn % 4 ? &some : NULL },
                  .slack = turn % 5 == 2   ? 3
                           : turn % 5 == 4 ? 8
                                           : 0,
                  .shift = turn % 7 == 3,
                  .act = turn % 2 ? LM_ACT_GELU : LM_ACT_GELU_EXACT,
                  .slope = slope,
                  .want_z = turn % 3 == 1,
                  .once = shape[0] * shape[1] > 100000,
                  .tol = allowed(t.ab, t.cd, path) };
    check_product(&p);
}

static inline void walk_functions(const char *path)
{
    static const int64_t shapes[][3] = { { 1, 1, 1 },    { 5, 33, 17 },  { 16, 64, 32 },
                                         { 65, 72, 33 }, { 8, 40, 600 }, { 20, 136, 17 } };
    int turn = 0;
    for (int s = 0; s < 6; s++)
        for (int t = 0; t < 3; t++)
            for (int i = 0; i < 6; i++, turn++)
                check_function(shapes[s], (turn + s) % 2, narrow_types[t], turn, path);
}

static inline void walk_sums(const char *path)
{
    static const int64_t shapes[][3] = { { 1, 1, 1 },       { 70, 40, 33 }, { 24, 16, 700 },
                                         { 130, 257, 8 },   { 64, 64, 16 }, { 33, 20, 40000 },
                                         { 1030, 2055, 20 } };
    for (int i = 0; i < 21; i++) {
        const int64_t *s = shapes[i % 7];
        lm_dtype d = narrow_types[i % 3].ab;
        product p = { .g = { .m = s[0],
                             .n = s[1],
                             .k = s[2],
                             .ab = d,
                             .cd = LM_DTYPE_F32,
                             .ta = true,
                             .accumulate = i % 2 },
                      .slack = i % 5 == 2 ? 8 : i % 5 == 4,
                      .shift = i % 4 == 3,
                      .sums = true,
                      .once = s[0] * s[1] * s[2] > 1000000,
                      .tol = allowed(d, LM_DTYPE_F32, path) };
        bool folds = s[2] > 10000; /* as on the plain path */
        if ((i < 7 || !p.once) && (!folds || !strcmp(path, "plain")))
            check_product(&p);
    }
}

#endif
