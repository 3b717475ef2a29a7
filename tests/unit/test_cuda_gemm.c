/* Matrix products, one and batches, and the linear families on the CUDA backend, on every path of
 * its kernels, against sums in double: transposes, pitches, ragged shapes, shapes that go each of
 * the plain path's ways, pointers off their alignment, groups of rows, the same bits in any order
 * of threads; what cuBLASLt is asked. */
#include "cuda_case.h"
#include "kernels/cuda/blaslt.h"
#include "kernels/grouped.h"
#include "kernels/linear.h"

static const char *const paths[] = { "plain", "tensor", "tf32" };

static void open_path(const char *path)
{
    lm_err e = { 0 };
    device_must(cuda_open(path, true, &device, &e), &e);
}

/* A function of the emulated module into a variable of its type; false where there is none. */
static bool get_symbol(const char *name, void *function)
{
    void *found = emu_symbol(name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static lm_lt_counts counts_now(void)
{
    void (*counts)(const lm_stream *, lm_lt_counts *) = NULL;
    lm_lt_counts c = { 0 };
    if (!get_symbol("lm_cuda_lt_counts", &counts))
        skip();
    counts(device->main, &c);
    return c;
}

/* The emulated cuBLASLt serves all shapes: a call of it that is wrong, and so refused, would be
 * made good by the plain tiles, unseen. */
static void close_path(const char *path)
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
    int64_t slack; /* numbers between rows of A, B and C */
    int shift;     /* by which all lie off their alignment */
    int64_t batch; /* 0: one */
    bool share_b;  /* by the whole batch */
    bool once;     /* not in other orders too */
    lm_act act;    /* with slope or want_z as in gemm_call */
    bool slope, want_z, sums;
    double tol;
} product;

enum { DRAWN = 4093 }; /* a prime: rows differ */

static void *drawn(lm_dtype d, int64_t count, uint64_t which)
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
static int64_t spread(int64_t rows, int64_t cols, int64_t slack)
{
    return rows * (cols + slack) - slack;
}

static double *widened(lm_dtype d, const void *p, int64_t count)
{
    double *x = take((size_t)count * sizeof *x);
    lm_convert(d, p, LM_DTYPE_F64, x, count);
    return x;
}

static double gelu(lm_act act, double x)
{
    return act == LM_ACT_GELU ? x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)))
                              : x / 2 * erfc(-x / sqrt(2));
}
static double gelu_slope(lm_act act, double x)
{
    double h = 1e-5; /* good to h * h */
    return (gelu(act, x + h) - gelu(act, x - h)) / (2 * h);
}

/* Memory on both sides: what goes in, what comes out, and what came out first. */
typedef struct {
    void *host, *back, *first, *dev;
    size_t bytes, shift;
} buffer;

static buffer buffer_of(lm_dtype d, int64_t count, uint64_t which, int shift)
{
    buffer b = { .bytes = (size_t)count * lm_dtype_size(d),
                 .shift = lm_dtype_size(d) * (size_t)shift };
    b.host = drawn(d, count, which);
    b.back = take(b.bytes);
    b.first = take(b.bytes);
    return b;
}

static void buffer_send(buffer *b)
{
    b->dev = b->bytes ? device_twin(b->host, b->bytes + GUARD, b->shift) : NULL;
}

static void buffer_fetch(buffer *b, bool first)
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

static void buffer_drop(buffer *b)
{
    lm_free(b->host);
    lm_free(b->back);
    lm_free(b->first);
}

/* How far C is off sums in double, and how large they are, squared; z likewise. */
static void error_of(const product *p, const lm_gemm *g, const buffer *z, const void *c0,
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

static double batch_error(const product *p, const lm_gemm *all, const buffer *aux, int64_t batch,
                          const int64_t stride[3], const void *c0, const void *c, int64_t counts[3])
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
static void check_sums(const lm_gemm *g, const buffer *b, int64_t count)
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

static void check_product(const product *p)
{
    size_t (*work_of)(const lm_gemm *, int64_t, const int64_t *, const lm_stream *) = NULL;
    void (*run_gemm)(const lm_gemm *, lm_act, bool, void *, int64_t, const int64_t *, lm_stream *) =
        NULL;
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
    d.bias = bias ? device_twin(bias, bias_bytes, (size_t)p->shift * 4) : NULL;
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
             i++) { /* what lies between rows stays */
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
        device_drop((void *)d.bias, bias_bytes, (size_t)p->shift * 4);
    device_drop(d.work, work + GUARD, 0);
    buffer_drop(&z);
    buffer_drop(&a_sum);
    void *mine[] = { a, b, c0, c, first, bias, junk };
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++)
        lm_free(mine[i]);
}

/* What a result of this type may be off by, its sums being good to 1e-6; tf32 rounds the
 * factors. */
static double allowed(lm_dtype ab, lm_dtype cd, const char *path)
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

/* Every transpose and type, with and without accumulation and bias, pitches and alignments that let
 * packs be read and ones that do not, on each path. */
static void test_small(void **state)
{
    static const int64_t shapes[][3] = { { 1, 1, 1 },    { 3, 5, 7 },    { 8, 33, 65 },
                                         { 16, 64, 32 }, { 65, 70, 33 }, { 20, 130, 17 } };
    static const float some;
    int turn = 0;
    (void)state;
    for (int path = 0; path < 3; path++) {
        open_path(paths[path]);
        for (int s = 0; s < 6; s++)
            for (int t = 0; t < 5; t++)
                for (int form = 0; form < 4; form++, turn++) {
                    product p = { .g = { .m = shapes[s][0],
                                         .n = shapes[s][1],
                                         .k = shapes[s][2],
                                         .ab = all_types[t].ab,
                                         .cd = all_types[t].cd,
                                         .ta = form & 1,
                                         .tb = form >> 1,
                                         .accumulate = turn % 3 == 1,
                                         .bias = turn % 2 ? &some : NULL },
                                  .slack = turn % 5 == 2   ? 3
                                           : turn % 5 == 4 ? 8
                                                           : 0,
                                  .shift = turn % 7 == 3 };
                    p.tol = allowed(p.g.ab, p.g.cd, paths[path]);
                    check_product(&p);
                }
        close_path(paths[path]);
    }
}

/* Shapes that take the other ways of the plain path. */
static void test_ways(void **state)
{
    static const struct {
        int64_t m, n, k;
        bool ta, tb;
        int type;
    } cases[] = {
        { 1, 4099, 40, false, true, 1 },     /* four columns to a warp */
        { 2, 4096, 72, false, true, 0 },     /* the same, packed */
        { 7, 4101, 24, false, true, 4 },     /* up to 8 rows */
        { 4, 40, 600, false, true, 2 },      /* lanes go around several times */
        { 40, 24, 700, true, false, 0 },     /* k in parts, the last one short */
        { 9, 70, 1541, false, true, 1 },     /* likewise into BF16 */
        { 1030, 2055, 20, false, false, 0 }, /* tiles of 128 x 128, several bands */
        { 1088, 2048, 16, true, false, 3 },  /* the same in F16, packed */
        { 1025, 2049, 17, false, true, 2 },  { 1100, 1930, 8, true, true, 0 },
    };
    (void)state;
    open_path("plain");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        product p = { .g = { .m = cases[i].m,
                             .n = cases[i].n,
                             .k = cases[i].k,
                             .ab = all_types[cases[i].type].ab,
                             .cd = all_types[cases[i].type].cd,
                             .ta = cases[i].ta,
                             .tb = cases[i].tb,
                             .accumulate = i % 2 },
                      .once = cases[i].m > 1000 };
        p.tol = allowed(p.g.ab, p.g.cd, "plain");
        check_product(&p);
    }
    lm_backend_close(device);
}

/* An F32 sum over a long k stays as good as one over a short k: in parts, each folded into C. */
static void test_long_k(void **state)
{
    product p = { .g = { .m = 33,
                         .n = 20,
                         .k = 40000,
                         .ab = LM_DTYPE_F32,
                         .cd = LM_DTYPE_F32,
                         .ta = true,
                         .accumulate = true },
                  .once = true,
                  .tol = 6e-7 };
    (void)state;
    open_path("plain");
    check_product(&p);
    lm_backend_close(device);
}

/* Batches in each of the plain path's ways, with pitches between their matrices; one B for all;
 * more than one launch takes. */
static void test_batches(void **state)
{
    static const float some;
    static const struct {
        int64_t m, n, k, batch, slack;
        bool ta, tb, share_b;
        int type;
    } cases[] = {
        { 20, 70, 33, 3, 0, false, true, false, 1 },
        { 16, 24, 64, 4, 8, true, false, false, 2 },
        { 65, 40, 16, 2, 5, false, false, true, 0 },
        { 3, 50, 40, 5, 0, false, true, false, 3 },   /* few rows */
        { 40, 24, 700, 2, 3, true, false, false, 0 }, /* k in parts */
        { 9, 30, 1100, 3, 0, false, true, true, 1 },  /* likewise into BF16 */
        { 70, 5, 9, 2, 1, true, true, false, 4 },
    };
    (void)state;
    for (int path = 0; path < 2; path++) {
        open_path(paths[path]);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            types t = all_types[cases[i].type];
            product p = { .g = { .m = cases[i].m,
                                 .n = cases[i].n,
                                 .k = cases[i].k,
                                 .ab = t.ab,
                                 .cd = t.cd,
                                 .ta = cases[i].ta,
                                 .tb = cases[i].tb,
                                 .accumulate = i % 2,
                                 .bias = i % 3 ? &some : NULL },
                          .slack = cases[i].slack,
                          .batch = cases[i].batch,
                          .share_b = cases[i].share_b,
                          .shift = i % 4 == 3,
                          .tol = allowed(t.ab, t.cd, paths[path]) };
            check_product(&p);
        }
        product deep = { .g = { .m = 1, .n = 1, .k = 1, .ab = LM_DTYPE_F32, .cd = LM_DTYPE_F32 },
                         .batch = 1026,
                         .once = true,
                         .tol = 1e-6 };
        if (path == 0)
            check_product(&deep);
        close_path(paths[path]);
    }
}

/* ---- functions and sums joined to a product ---- */

static const types narrow_types[] = { { LM_DTYPE_F32, LM_DTYPE_F32 },
                                      { LM_DTYPE_BF16, LM_DTYPE_BF16 },
                                      { LM_DTYPE_F16, LM_DTYPE_F16 } };

/* Turn by turn both functions, forward with what it is taken of and without, and its slope. */
static void check_function(const int64_t shape[3], bool tb, types t, int turn, const char *path)
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

static void walk_functions(const char *path)
{
    static const int64_t shapes[][3] = { { 1, 1, 1 },    { 5, 33, 17 },  { 16, 64, 32 },
                                         { 65, 72, 33 }, { 8, 40, 600 }, { 20, 136, 17 } };
    int turn = 0;
    for (int s = 0; s < 6; s++)
        for (int t = 0; t < 3; t++)
            for (int i = 0; i < 6; i++, turn++)
                check_function(shapes[s], (turn + s) % 2, narrow_types[t], turn, path);
}

static void test_functions(void **state)
{
    (void)state;
    for (int path = 0; path < 3; path++) {
        open_path(paths[path]);
        walk_functions(paths[path]);
        close_path(paths[path]);
    }
}

/* Where the plain path goes its other ways: four columns to a warp, k in parts, tiles of 128 x 128,
 * F32 folded into C before the function. */
static void test_functions_ways(void **state)
{
    static const int64_t rows[] = { 3, 4100, 24 }, parts[] = { 9, 70, 1541 };
    static const int64_t large[] = { 1025, 2049, 17 }, folded[] = { 9, 8250, 1040 };
    (void)state;
    open_path("plain");
    for (int turn = 0; turn < 6; turn++) {
        types t = narrow_types[turn % 3];
        check_function(rows, true, t, turn, "plain");
        check_function(parts, turn % 2, t, turn, "plain");
        check_function(parts, turn % 2, t, turn + 7, "plain");
    }
    for (int turn = 0; turn < 3; turn++)
        check_function(large, turn < 2, narrow_types[turn % 2], turn, "plain");
    check_function(folded, true, narrow_types[0], 1, "plain");
    lm_backend_close(device);
}

static void walk_sums(const char *path)
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
        bool folds = s[2] > 10000; /* which is what the plain path does */
        if ((i < 7 || !p.once) && (!folds || !strcmp(path, "plain")))
            check_product(&p);
    }
}

static void test_sums(void **state)
{
    (void)state;
    for (int path = 0; path < 3; path++) {
        open_path(paths[path]);
        walk_sums(paths[path]);
        close_path(paths[path]);
    }
}

/* ---- the operators ---- */

static const lm_linear_attr first_pass = { LM_ACC_FIRST }, adding = { LM_ACC_ADD };

static void check_linear(int64_t n, int64_t m, int64_t k, lm_dtype act, int turn, const char *path)
{
    bool wide = act != LM_DTYPE_F32 && turn % 2;
    lm_step step = { 5, 2, turn % 3 == 1 };
    kernel_case y = { .op = "linear",
                      .attr = &first_pass,
                      .in = { mat(ACT, n, k), mat(ACT, m, k),
                              turn % 3 ? vec(F32, m) : vec(ABSENT, 0) },
                      .out = { mat(wide ? F32 : ACT, n, m) } };
    kernel_case dx = { .op = "linear_dx",
                       .attr = &first_pass,
                       .in = { mat(ACT, n, m), mat(ACT, m, k) },
                       .out = { mat(ACT, n, k) } };
    kernel_case dw = { .op = "linear_dw",
                       .attr = turn % 2 ? &adding : &first_pass,
                       .in = { mat(ACT, n, m), mat(ACT, n, k) },
                       .out = { mat(F32, m, k), turn % 4 ? vec(F32, m) : vec(ABSENT, 0) },
                       .step = step };
    lm_linear_act_attr gelu_attr = { turn % 2 ? LM_ACT_GELU_EXACT : LM_ACT_GELU };
    kernel_case f = { .op = "linear_act",
                      .attr = &gelu_attr,
                      .in = { y.in[0], y.in[1], y.in[2] },
                      .out = { mat(ACT, n, m), turn % 4 < 2 ? mat(ACT, n, m) : vec(ABSENT, 0) } };
    kernel_case df = { .op = "linear_act_dx",
                       .attr = &gelu_attr,
                       .in = { mat(ACT, n, m), mat(ACT, m, k), mat(ACT, n, k) },
                       .out = { mat(ACT, n, k) } };
    int shift = turn % 5 == 1;
    check_on_device(&f, act, allowed(act, act, path), shift, true);
    check_on_device(&df, act, allowed(act, act, path), shift, true);
    check_on_device(&y, act, allowed(act, wide ? LM_DTYPE_F32 : act, path), shift, true);
    check_on_device(&dx, act, allowed(act, act, path), shift, true);
    check_on_device(&dw, act, allowed(act, LM_DTYPE_F32, path), shift, true);
}

static void test_operators(void **state)
{
    static const int64_t shapes[][3] = { { 1, 1, 1 },    { 5, 3, 17 },  { 1, 96, 64 },
                                         { 64, 48, 40 }, { 33, 70, 9 }, { 700, 24, 16 },
                                         { 130, 257, 8 } };
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    (void)state;
    for (int path = 0; path < 3; path++) {
        open_path(paths[path]);
        for (int s = 0; s < 7; s++)
            for (int a = 0; a < 3; a++)
                check_linear(shapes[s][0], shapes[s][1], shapes[s][2], acts[a], s * 2 + a,
                             paths[path]);
        close_path(paths[path]);
    }
}

/* ---- grouped ---- */

/* A kernel_case whose weights, input or output `at`, are [groups, rows, cols]. */
static void in_groups(instance *x, bool out, int at, int64_t groups)
{
    lm_tensor *t = out ? &x->out[at] : &x->in[at];
    *t = (lm_tensor){ .dtype = t->dtype,
                      .ndim = 3,
                      .dim = { groups, t->dim[0] / groups, t->dim[1] },
                      .data = t->data };
}

static void check_grouped(const kernel_case *k, bool out, int at, int64_t groups, lm_dtype act,
                          double tol)
{
    void (*set_order)(int, uint64_t) = NULL;
    instance want, x, first;

    if (!get_symbol("lm_emu_order", &set_order))
        skip();
    build(k, LM_DTYPE_F64, act, &want);
    in_groups(&want, out, at, groups);
    run(&want, lm_cpu_kernel(k->op, LM_DTYPE_F64, LM_CPU_REF), NULL);
    for (int order = 0; order < 3; order++) {
        instance *it = order ? &x : &first;
        set_order(order, 9);
        build(k, act, act, it);
        in_groups(it, out, at, groups);
        run_on_device(it, device_kernel(k->op, act), 0);
        double d = distance(&it->out[0], &want.out[0]);
        if (!(d <= tol))
            fail_msg("%s %s, %lld groups: relative error %.3g, allowed %.3g", k->op,
                     lm_dtype_name(act), (long long)groups, d, tol);
        assert_memory_equal(it->out[0].data, first.out[0].data, bytes_of(&first.out[0]));
        if (order)
            drop(k, &x);
    }
    set_order(0, 0);
    drop(k, &first);
    drop(k, &want);
}

/* Groups that fill tiles and ones that end inside, empty ones at both ends, and rows enough that a
 * weight's sum is folded. */
static void test_grouped(void **state)
{
    enum { G = 7, N = 1500, M = 70, K = 24 };
    static const int32_t cuts[][G + 1] = { { 0, 0, 64, 64, 192, 193, 1500, 1500 },
                                           { 0, 0, 0, 0, 0, 0, 0, N },
                                           { 0, 1, 63, 127, 128, 640, 1499, N } };
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    static const lm_grouped_attr first = { LM_ACC_FIRST }, add = { LM_ACC_ADD };
    (void)state;
    open_path("plain");
    for (int i = 0; i < 3; i++) {
        operand offsets = given(vec(I32, G + 1), cuts[i]);
        lm_dtype act = acts[i];
        kernel_case y = { .op = "grouped_linear",
                          .attr = &first,
                          .in = { mat(ACT, N, K), mat(ACT, G * M, K), offsets },
                          .out = { mat(ACT, N, M) } };
        kernel_case dx = { .op = "grouped_linear_dx",
                           .attr = &first,
                           .in = { mat(ACT, N, M), mat(ACT, G * M, K), offsets },
                           .out = { mat(ACT, N, K) } };
        kernel_case dw = { .op = "grouped_linear_dw",
                           .attr = i == 2 ? &add : &first,
                           .in = { mat(ACT, N, M), mat(ACT, N, K), offsets },
                           .out = { mat(F32, G * M, K) } };
        check_grouped(&y, false, 1, G, act, allowed(act, act, "plain"));
        check_grouped(&dx, false, 1, G, act, allowed(act, act, "plain"));
        check_grouped(&dw, true, 0, G, act, allowed(act, LM_DTYPE_F32, "plain"));
    }
    lm_backend_close(device);
}

/* ---- what cuBLASLt is asked ---- */

static void product_of(int64_t m, int64_t n, int64_t k, lm_dtype d, bool once)
{
    product p = { .g = { .m = m, .n = n, .k = k, .ab = d, .cd = d },
                  .once = once,
                  .tol = allowed(d, d, "") };
    check_product(&p); /* three times, unless once: in three orders of threads */
}

static void test_choices_are_kept(void **state)
{
    (void)state;
    open_path("plain");
    product_of(16, 16, 16, LM_DTYPE_F32, true);
    assert_int_equal(counts_now().shapes, 0);
    lm_backend_close(device);

    open_path("tensor");
    product_of(16, 24, 8, LM_DTYPE_BF16, false);
    lm_lt_counts c = counts_now();
    assert_int_equal(c.shapes, 1);
    assert_int_equal(c.hits, 2);
    product_of(16, 24, 8, LM_DTYPE_F32, false); /* another type is another shape */
    product_of(16, 24, 8, LM_DTYPE_BF16, false);
    c = counts_now();
    assert_int_equal(c.shapes, 2);
    assert_int_equal(c.hits, 7);
    for (int64_t i = 0; i < 511; i++) /* one more than are kept: the table starts anew */
        product_of(6 + i, 1, 1, LM_DTYPE_F32, true);
    product_of(16, 24, 8, LM_DTYPE_BF16, true);
    c = counts_now();
    assert_int_equal(c.shapes, 2 + 511 + 1);
    assert_int_equal(c.hits, 7);
    assert_int_equal(c.unserved_shapes, 0);
    assert_int_equal(c.unserved, 0);
    lm_backend_close(device);
}

/* What cuBLASLt has no algorithm for, the plain tiles make, and it is counted. */
static void test_unserved(void **state)
{
    void (*picky)(int) = NULL;
    (void)state;
    open_path("tensor");
    if (!get_symbol("lm_emu_picky", &picky))
        skip();
    picky(1); /* rows must be multiples of 16 bytes */
    product_of(16, 24, 17, LM_DTYPE_BF16, false);
    product_of(16, 24, 8, LM_DTYPE_BF16, false);
    lm_lt_counts c = counts_now();
    picky(0);
    assert_int_equal(c.shapes, 2);
    assert_int_equal(c.unserved_shapes, 1);
    assert_int_equal(c.unserved, 3);
    lm_backend_close(device);
}

/* Forward and slope are choices of their own, and what they are taken of may lie elsewhere the next
 * time. */
static void test_functions_kept(void **state)
{
    product forward = {
        .g = { .m = 16, .n = 64, .k = 32, .ab = LM_DTYPE_BF16, .cd = LM_DTYPE_BF16 },
        .act = LM_ACT_GELU,
        .want_z = true,
        .once = true,
        .tol = 4e-3
    };
    product slope = forward;
    char other[16 * 64 * 2 + GUARD] = { 0 };
    (void)state;
    slope.want_z = false, slope.slope = true;
    open_path("tensor");
    check_product(&forward);
    check_product(&slope);
    void *taken = device_twin(other, sizeof other, 0); /* where z just was */
    void *more = device_twin(other, sizeof other, 0);
    check_product(&forward);
    check_product(&slope);
    device_drop(taken, sizeof other, 0);
    device_drop(more, sizeof other, 0);
    if (!cuda_is_real())
        assert_int_equal(counts_now().shapes, 2);
    close_path("tensor");
}

/* An epilogue that cuBLASLt does not serve leaves the product with it, and is asked about once. */
static void test_epilogues_refused(void **state)
{
    void (*picky)(int) = NULL;
    types t = narrow_types[1];
    static const int64_t shape[] = { 16, 64, 32 };
    (void)state;
    open_path("tensor");
    if (!get_symbol("lm_emu_picky", &picky))
        skip();
    for (int turn = 1; turn < 6; turn += 2) /* the tanh form: z, slope, neither; no odd pitches */
        check_function(shape, true, t, (int[]){ 1, 5, 15 }[turn / 2], "tensor");
    lm_lt_counts c = counts_now();
    assert_int_equal(c.refused, 0);
    assert_null(device->shortfall(device));
    assert_int_equal(c.shapes, 3);
    assert_int_equal(c.hits, 6);
    lm_backend_close(device);

    open_path("tensor");
    picky(2);
    check_function(shape, true, t, 1, "tensor");
    c = counts_now();
    assert_int_equal(c.refused, 3);
    assert_int_equal(c.refused_shapes, 1);
    assert_int_equal(c.unserved, 0);
    assert_int_equal(c.shapes, 2); /* with and without */
    assert_string_equal(device->shortfall(device),
                        "cuBLASLt served 1 shapes of products, not 0 others, which plain kernels "
                        "made, and 1 only without the function or sums behind them");
    walk_functions("tensor");
    walk_sums("tensor");
    picky(0);
    c = counts_now();
    assert_int_equal(c.unserved, 0);
    assert_int_equal(c.unserved_shapes, 0);
    lm_backend_close(device);

    open_path("tensor");
    picky(1); /* neither the epilogue nor the product */
    check_function((int64_t[]){ 16, 24, 17 }, true, t, 1, "tensor");
    picky(0);
    c = counts_now();
    assert_int_equal(c.refused, 3);
    assert_int_equal(c.unserved, 3);
    assert_int_equal(c.unserved_shapes, 1);
    lm_backend_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small),
        cmocka_unit_test(test_ways),
        cmocka_unit_test(test_long_k),
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_functions),
        cmocka_unit_test(test_functions_ways),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_grouped),
        cmocka_unit_test(test_operators),
        cmocka_unit_test(test_choices_are_kept),
        cmocka_unit_test(test_unserved),
        cmocka_unit_test(test_functions_kept),
        cmocka_unit_test(test_epilogues_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
