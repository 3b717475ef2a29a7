/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix product on every level of this machine against sums in double: transposes,
 * accumulation, bias, row sums, packed operands, ragged shapes, 1 to 3 threads with the same bits,
 * operands that end at a page that must not be touched; and the operators linear, linear_dx,
 * linear_dw against linear_ref. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/par.h"
#include "base/rng.h"
#include "kernels/linear.h"
#include "kernels/panels.h"

static lm_par *pool[4];

static void *must(size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;

    assert_int_equal(lm_alloc_n(&p, bytes ? bytes : 1, 1, "test", &e), LM_OK);
    return p;
}

/* Memory whose last byte is followed by a page that faults. */
typedef struct {
    char *map, *data;
    size_t map_bytes, bytes;
} fenced;

static fenced fence(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t body = (bytes + page - 1) / page * page;
    fenced f = { .map_bytes = body + 2 * page, .bytes = bytes };

    f.map = mmap(NULL, f.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(f.map, MAP_FAILED);
    assert_int_equal(mprotect(f.map, page, PROT_NONE), 0);
    assert_int_equal(mprotect(f.map + page + body, page, PROT_NONE), 0);
    f.data = f.map + page + body - bytes;
    return f;
}

static void unfence(fenced f)
{
    munmap(f.map, f.map_bytes);
}

typedef struct {
    int64_t m, n, k, slack; /* slack: extra row pitch */
    lm_dtype ab, cd;
    bool ta, tb, accumulate, bias, sum, sum_add, packed;
} gemm_case;

typedef struct {
    lm_gemm g;
    fenced a, b, c, bias, sum;
    char *c0; /* what C held before */
    float *sum0;
} operands;

/* Numbers in (-1, 1): a prime number of them is drawn, then repeated (drawing is slow). */
static fenced fill(lm_dtype d, int64_t count, uint64_t sub)
{
    enum { DRAWN = 65521 };
    size_t size = lm_dtype_size(d);
    fenced f = fence((size_t)count * lm_dtype_size(d));
    lm_rng r = lm_rng_make(7, "gemm test", sub);

    for (int64_t i = 0; i < count && i < DRAWN; i++)
        lm_set(d, f.data, i, 2 * lm_rng_uniform(r, (uint64_t)i) - 1);
    for (int64_t i = DRAWN; i < count; i++)
        memcpy(f.data + (size_t)i * size, f.data + (size_t)(i - DRAWN) * size, size);
    return f;
}

static operands make(const gemm_case *t)
{
    operands o = { 0 };
    int64_t ar = t->ta ? t->k : t->m, ac = t->ta ? t->m : t->k;
    int64_t br = t->tb ? t->n : t->k, bc = t->tb ? t->k : t->n;

    o.g = (lm_gemm){ .m = t->m,
                     .n = t->n,
                     .k = t->k,
                     .ab = t->ab,
                     .cd = t->cd,
                     .ta = t->ta,
                     .tb = t->tb,
                     .accumulate = t->accumulate,
                     .lda = ac + t->slack,
                     .ldb = bc + t->slack,
                     .ldc = t->n + t->slack,
                     .a_sum_add = t->sum_add };
    o.a = fill(t->ab, (ar - 1) * o.g.lda + ac, 1);
    o.b = fill(t->ab, (br - 1) * o.g.ldb + bc, 2);
    o.c = fill(t->cd, (t->m - 1) * o.g.ldc + t->n, 3);
    o.bias = fill(LM_DTYPE_F32, t->n, 4);
    o.sum = fill(LM_DTYPE_F32, t->m, 5);
    o.c0 = must(o.c.bytes);
    memcpy(o.c0, o.c.data, o.c.bytes);
    o.sum0 = must(o.sum.bytes);
    memcpy(o.sum0, o.sum.data, o.sum.bytes);
    o.g.a = o.a.data;
    o.g.b = o.b.data;
    o.g.c = o.c.data;
    o.g.bias = t->bias ? (const float *)o.bias.data : NULL;
    o.g.a_sum = t->sum ? (float *)o.sum.data : NULL;
    return o;
}

static void unmake(operands *o)
{
    unfence(o->a);
    unfence(o->b);
    unfence(o->c);
    unfence(o->bias);
    unfence(o->sum);
    lm_free(o->c0);
    lm_free(o->sum0);
}

/* op(M) with one row for each of `rows`, as doubles. */
static double *as_doubles(lm_dtype d, const void *p, bool turned, int64_t ld, int64_t rows,
                          int64_t cols)
{
    double *out = must((size_t)(rows * cols) * sizeof(double));

    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            out[r * cols + c] = lm_get(d, p, turned ? c * ld + r : r * ld + c);
    return out;
}

static double dot(const double *a, const double *b, int64_t n)
{
    double s[4] = { 0 };

    for (int64_t i = 0; i < n; i++)
        s[i & 3] += a[i] * b[i];
    return s[0] + s[1] + s[2] + s[3];
}

/* Relative L2 distance of C (and a_sum) from sums in double; the padding of C must be unchanged. */
static double distance(const operands *o, const gemm_case *t)
{
    const lm_gemm *g = &o->g;
    double *a = as_doubles(g->ab, g->a, g->ta, g->lda, g->m, g->k);
    double *b = as_doubles(g->ab, o->b.data, !g->tb, g->ldb, g->n, g->k);
    double err = 0, norm = 0;

    for (int64_t i = 0; i < g->m; i++) {
        double rows = t->sum && t->sum_add ? (double)o->sum0[i] : 0;
        for (int64_t j = 0; j < g->n; j++) {
            double s = t->accumulate ? lm_get(g->cd, o->c0, i * g->ldc + j) : 0;
            s += dot(a + i * g->k, b + j * g->k, g->k) + (t->bias ? (double)g->bias[j] : 0);
            double d = lm_get(g->cd, g->c, i * g->ldc + j) - s;
            err += d * d;
            norm += s * s;
        }
        for (int64_t j = g->n; j < g->ldc && i + 1 < g->m; j++)
            assert_true(lm_get(g->cd, g->c, i * g->ldc + j) ==
                        lm_get(g->cd, o->c0, i * g->ldc + j));
        for (int64_t k = 0; t->sum && k < g->k; k++)
            rows += a[i * g->k + k];
        if (t->sum)
            assert_true(fabs(g->a_sum[i] - rows) < 1e-6 * (double)(g->k + 10));
    }
    lm_free(a);
    lm_free(b);
    return norm > 0 ? sqrt(err / norm) : sqrt(err);
}

static void show(const gemm_case *t, lm_cpu_level level, double d)
{
    fprintf(
        stderr,
        "level %s m %d n %d k %d slack %d ab %s cd %s ta %d tb %d acc %d bias %d sum %d packed %d: "
        "distance %g\n",
        lm_cpu_level_name(level), (int)t->m, (int)t->n, (int)t->k, (int)t->slack,
        lm_dtype_name(t->ab), lm_dtype_name(t->cd), t->ta, t->tb, t->accumulate, t->bias, t->sum,
        t->packed, d);
}

/* One product on 1, 2 and 3 threads. */
static void check(const gemm_case *t, lm_cpu_level level)
{
    char *first = NULL, *first_sum = NULL;

    for (int threads = 1; threads <= 3; threads++) {
        operands o = make(t);
        size_t work = lm_gemm_work(&o.g, level, threads);
        size_t pack = t->packed ? lm_gemm_pack_size(&o.g, level) : 0;
        void *packed = NULL;

        if (pack) {
            packed = must(pack);
            lm_gemm_pack(&o.g, level, pool[threads], packed);
            o.g.b_packed = packed;
            o.g.b = NULL;
            work = lm_gemm_work(&o.g, level, threads);
        }
        fenced w = fence((work + 63) / 64 * 64);
        memset(w.data, 0xff, w.bytes); /* NaN everywhere */
        o.g.work = w.data;
        lm_gemm_run(&o.g, level, pool[threads]);
        if (threads == 1) {
            double d = distance(&o, t), most = t->cd == LM_DTYPE_BF16 ? 4e-3 : 1e-6;
            if (!(d <= most)) {
                show(t, level, d);
                fail();
            }
            first = must(o.c.bytes);
            first_sum = must(o.sum.bytes);
            memcpy(first, o.c.data, o.c.bytes);
            memcpy(first_sum, o.sum.data, o.sum.bytes);
        } else {
            assert_memory_equal(first, o.c.data, o.c.bytes);
            assert_memory_equal(first_sum, o.sum.data, o.sum.bytes);
        }
        unfence(w);
        lm_free(packed);
        unmake(&o);
    }
    lm_free(first);
    lm_free(first_sum);
}

static gemm_case options(gemm_case t, uint32_t bits)
{
    t.ab = bits & 1 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    t.cd = bits & 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    t.ta = bits & 4;
    t.tb = bits & 8;
    t.accumulate = bits & 16;
    t.bias = bits & 32;
    t.sum = bits & 64;
    t.sum_add = bits & 128;
    t.packed = (bits & 768) == 768;
    t.slack = bits & 1024 ? (bits >> 11) % 5 : 0;
    return t;
}

static void every_option(void **state)
{
    (void)state;
    for (int l = LM_CPU_REF; l <= (int)lm_cpu_detect(); l++)
        for (uint32_t bits = 0; bits < 256; bits++) {
            gemm_case t = options((gemm_case){ .m = 45, .n = 37, .k = 51 }, bits);
            check(&t, (lm_cpu_level)l);
        }
}

static void ragged_shapes(void **state)
{
    static const int64_t some[] = {
        1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129
    };
    lm_rng r = lm_rng_make(11, "ragged", 0);
    uint64_t at = 0;

    (void)state;
    for (int l = LM_CPU_AVX2; l <= (int)lm_cpu_detect(); l++)
        for (int i = 0; i < 300; i++) {
            gemm_case t = { .m = some[lm_rng_below(r, at, 17)],
                            .n = some[lm_rng_below(r, at + 1, 17)],
                            .k = some[lm_rng_below(r, at + 2, 17)] };
            t = options(t, lm_rng_u32(r, at + 3));
            at += 4;
            check(&t, (lm_cpu_level)l);
        }
}

/* Each thread packs the columns that it multiplies: because there is one block of rows, or because two
 * blocks have few rows beside their columns. */
static void wide_shapes(void **state)
{
    static const gemm_case list[] = {
        { .m = 260, .n = 1100, .k = 45 }, { .m = 257, .n = 520, .k = 2100 },
        { .m = 70, .n = 1100, .k = 45 },  { .m = 130, .n = 410, .k = 300 },
        { .m = 33, .n = 700, .k = 2100 },
    };

    (void)state;
    for (int l = LM_CPU_AVX2; l <= (int)lm_cpu_detect(); l++)
        for (size_t i = 0; i < sizeof(list) / sizeof(list[0]); i++)
            for (uint32_t tb = 0; tb < 2; tb++) {
                gemm_case t = options(list[i], 1 | 32 | tb << 3 | tb << 4 | 3u << 10);
                check(&t, (lm_cpu_level)l);
            }
}

/* Shapes that need several blocks of rows, superblocks of depth, streamed stores and sweeps. */
static void large_shapes(void **state)
{
    static const gemm_case list[] = {
        { .m = 1025, .n = 300, .k = 33 }, { .m = 40, .n = 33, .k = 5000 },
        { .m = 300, .n = 65, .k = 2100 }, { .m = 3, .n = 1025, .k = 1025 },
        { .m = 640, .n = 640, .k = 64 },  { .m = 9, .n = 8200, .k = 2049 },
    };
    lm_rng r = lm_rng_make(12, "large", 0);

    (void)state;
    for (int l = LM_CPU_AVX2; l <= (int)lm_cpu_detect(); l++)
        for (size_t i = 0; i < sizeof(list) / sizeof(list[0]); i++)
            for (uint32_t v = 0; v < 2; v++) {
                gemm_case t = options(list[i], lm_rng_u32(r, 2 * i + v));
                check(&t, (lm_cpu_level)l);
            }
}

static lm_tensor tensor(void *data, lm_dtype d, int64_t rows, int64_t cols)
{
    lm_tensor t = { .data = data, .dtype = d, .ndim = cols ? 2 : 1, .dim = { rows, cols } };
    return t;
}

typedef struct {
    lm_tensor in[3], out[2];
} io;

static void run_op(const char *op, const lm_kernel *k, io *x, int n_in, int n_out, lm_par *par,
                   lm_acc acc)
{
    static const lm_step step = { 0 };
    lm_linear_attr attr = { acc };
    lm_call c = { .attr = &attr,
                  .in = x->in,
                  .n_in = n_in,
                  .out = x->out,
                  .n_out = n_out,
                  .par = par,
                  .step = &step };

    assert_non_null(k);
    assert_string_equal(k->op, op);
    if (k->work) {
        size_t bytes = k->work(&c, lm_par_threads(par));
        c.work = must(bytes < 64 ? 64 : bytes);
    }
    k->run(&c);
    lm_free(c.work);
}

static double apart(const lm_tensor *a, const lm_tensor *b)
{
    double err = 0, norm = 0;

    for (int64_t i = 0; i < lm_tensor_count(a); i++) {
        double x = lm_get(a->dtype, a->data, i), y = lm_get(b->dtype, b->data, i);
        err += (x - y) * (x - y);
        norm += y * y;
    }
    return sqrt(err / norm);
}

/* op on `level` and on the reference, from the same inputs and previous outputs. */
static void compare_op(const char *op, lm_dtype act, lm_cpu_level level, const io *given, int n_in,
                       int n_out, lm_acc acc)
{
    io x = *given, y = *given;

    for (int i = 0; i < n_out; i++) {
        size_t bytes = (size_t)lm_tensor_count(&given->out[i]) * lm_dtype_size(given->out[i].dtype);
        if (!given->out[i].data)
            continue;
        x.out[i].data = must(bytes);
        y.out[i].data = must(bytes);
        memcpy(x.out[i].data, given->out[i].data, bytes);
        memcpy(y.out[i].data, given->out[i].data, bytes);
    }
    run_op(op, lm_cpu_kernel(op, act, level), &x, n_in, n_out, pool[2], acc);
    run_op(op, lm_cpu_kernel(op, act, LM_CPU_REF), &y, n_in, n_out, pool[2], acc);
    for (int i = 0; i < n_out; i++) {
        if (!x.out[i].data)
            continue;
        double most = x.out[i].dtype == LM_DTYPE_BF16 ? 4e-3 : 1e-6;
        assert_true(apart(&x.out[i], &y.out[i]) <= most);
        lm_free(x.out[i].data);
        lm_free(y.out[i].data);
    }
}

/* One product of m rows with a weight [n,k] in the order of rows, and in panels: the same bits. */
static void check_panels(lm_cpu_level level, int64_t m, int64_t n, int64_t k, bool dx, int threads)
{
    lm_dtype act = LM_DTYPE_BF16;
    int64_t in = dx ? n : k, out = dx ? k : n;
    fenced x = fill(act, m * in, 1), w = fill(act, n * k, 2);
    fenced y = fill(act, m * out, 3), z = fill(act, m * out, 4);
    uint16_t *p = must((size_t)(n * k) * 2);
    io a = { { tensor(x.data, act, m, in), tensor(w.data, act, n, k) },
             { tensor(y.data, act, m, out) } };
    io b = { { a.in[0], tensor(p, act, n, k) }, { tensor(z.data, act, m, out) } };
    io pack = { { a.in[1] }, { b.in[1] } };
    const char *op = dx ? "linear_dx" : "linear";

    run_op("panels", lm_cpu_kernel("panels", act, level), &pack, 1, 1, pool[threads], 0);
    for (int64_t i = 0; i < n * k; i++)
        assert_int_equal(p[lm_panel_at(i / k, i % k, k)], ((uint16_t *)w.data)[i]);
    b.in[1].panels = true;
    run_op(op, lm_cpu_kernel(op, act, level), &a, 2, 1, pool[threads], 0);
    run_op(op, lm_cpu_kernel(op, act, level), &b, 2, 1, pool[threads], 0);
    assert_memory_equal(y.data, z.data, y.bytes);
    lm_free(p);
    unfence(x), unfence(w), unfence(y), unfence(z);
}

/* Few rows, which are multiplied with rows of the weight; several blocks of rows and of depth. */
static void weights_in_panels(void **state)
{
    static const int64_t rows[] = { 1, 5, 8, 9, 33, 70, 300, 1025 };
    static const int64_t sizes[][2] = {
        { 32, 32 }, { 96, 160 }, { 640, 64 }, { 64, 2112 }, { 2112, 64 }
    };

    (void)state;
    if (lm_cpu_detect() < LM_CPU_BF16)
        skip();
    for (int level = LM_CPU_BF16; level <= (int)lm_cpu_detect(); level++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
                for (int v = 0; v < 6; v++)
                    check_panels((lm_cpu_level)level, rows[i], sizes[s][0], sizes[s][1], v & 1,
                                 1 + v / 2);
}

static void operators(void **state)
{
    enum { N = 70, K = 45, M = 53 };

    (void)state;
    for (int l = LM_CPU_REF; l <= (int)lm_cpu_detect(); l++)
        for (int v = 0; v < 8; v++) {
            lm_dtype act = v & 1 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
            fenced x = fill(act, N * K, 1), w = fill(act, M * K, 2), dy = fill(act, N * M, 3);
            fenced b = fill(LM_DTYPE_F32, M, 4), y = fill(act, N * M, 5), dx = fill(act, N * K, 6);
            fenced dw = fill(LM_DTYPE_F32, M * K, 7), db = fill(LM_DTYPE_F32, M, 8);
            io f = { { tensor(x.data, act, N, K), tensor(w.data, act, M, K) },
                     { tensor(y.data, act, N, M) } };
            io d = { { tensor(dy.data, act, N, M), tensor(w.data, act, M, K) },
                     { tensor(dx.data, act, N, K) } };
            io g = { { tensor(dy.data, act, N, M), tensor(x.data, act, N, K) },
                     { tensor(dw.data, LM_DTYPE_F32, M, K) } };

            if (v & 2) {
                f.in[2] = tensor(b.data, LM_DTYPE_F32, M, 0);
                g.out[1] = tensor(db.data, LM_DTYPE_F32, M, 0);
            }
            compare_op("linear", act, (lm_cpu_level)l, &f, 3, 1, LM_ACC_FIRST);
            compare_op("linear_dx", act, (lm_cpu_level)l, &d, 2, 1, LM_ACC_FIRST);
            compare_op("linear_dw", act, (lm_cpu_level)l, &g, 2, 2,
                       v & 4 ? LM_ACC_ADD : LM_ACC_FIRST);
            unfence(x), unfence(w), unfence(dy), unfence(b), unfence(y), unfence(dx);
            unfence(dw), unfence(db);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option),      cmocka_unit_test(ragged_shapes),
        cmocka_unit_test(wide_shapes),       cmocka_unit_test(large_shapes),
        cmocka_unit_test(weights_in_panels), cmocka_unit_test(operators),
    };
    lm_err e = { 0 };

    lm_cpu_detect(); /* asks for AMX before there are threads */
    for (int i = 1; i <= 3; i++)
        if (lm_par_new(&pool[i], i, &e))
            return 1;
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    for (int i = 1; i <= 3; i++)
        lm_par_free(pool[i]);
    return rc;
}
