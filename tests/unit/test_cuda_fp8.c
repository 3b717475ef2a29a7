/* SPDX-License-Identifier: Apache-2.0 */
/* FP8 on the CUDA backend: codes and scales against lib/numeric's bit for bit, products on the
 * plain path and by cuBLASLt against sums in double. */
#include "cuda_case.h"
#include "kernels/cuda/blaslt.h"
#include "kernels/fp8.h"

static void *symbol(const char *name)
{
    void *f = module_symbol(name);
    if (!f)
        skip();
    return f;
}
#define GET(f, name) (*(void **)&(f) = symbol(name))

static void open_path(const char *path)
{
    lm_err e = { 0 };
    device_must(cuda_open(path, true, &device, &e), &e);
}

static uint8_t code_of(lm_dtype d, float x)
{
    return d == LM_DTYPE_F8E4M3 ? lm_f32_to_f8e4m3(x, true) : lm_f32_to_f8e5m2(x, true);
}

/* ---- codes and scales ---- */

/* The definition of kernels/fp8.h, element by element. */
static void quantize_plainly(const lm_fp8_quantize *q, uint8_t *codes, float *scale)
{
    int64_t rows = q->transpose ? q->cols : q->rows, k = q->transpose ? q->rows : q->cols;
    int64_t n = lm_fp8_scales(q->scaling, rows, k);
    float top = q->type == LM_DTYPE_F8E4M3 ? 448 : 57344;

    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < k; j++) {
                int64_t from = q->transpose ? j * q->ldx + i : i * q->ldx + j;
                int64_t at = lm_fp8_scale_at(q->scaling, rows, k, i, j);
                float x = (float)lm_get(q->in, q->x, from);
                if (pass)
                    codes[i * q->ld + j] = code_of(q->type, x * (1 / scale[at]));
                else if (!q->given && fabsf(x) > scale[at])
                    scale[at] = fabsf(x);
            }
        for (int64_t s = 0; s < n && !pass && !q->given; s++) {
            scale[s] = fmaxf(scale[s] / top, 0x1p-126f);
            if (q->power_of_two && isfinite(scale[s])) {
                int e;
                scale[s] = frexpf(scale[s], &e) == 0.5f ? scale[s] : ldexpf(1, e);
            }
        }
    }
    lm_fp8_steps p = lm_fp8_steps_of(q->scaling, rows, k);
    for (int64_t s = 0; s < n && q->scaling == LM_FP8_BLOCK; s++)
        if (s % p.row_step >= lm_fp8_blocks(k))
            scale[s] = 0;
}

/* x is host memory; the result is compared with the definition, in three orders of threads. */
static void check_codes(lm_fp8_quantize q, float scale)
{
    size_t (*work_of)(const lm_fp8_quantize *);
    void (*quantize)(const lm_fp8_quantize *, const lm_stream *);
    int64_t rows = q.transpose ? q.cols : q.rows, k = q.transpose ? q.rows : q.cols;
    size_t x_bytes = (size_t)(q.rows * q.ldx) * lm_dtype_size(q.in);
    size_t n_codes = (size_t)(rows * q.ld);
    size_t scales = (size_t)lm_fp8_scales(q.scaling, rows, k) * sizeof(float);
    uint8_t *want = take(n_codes), *got = take(n_codes);
    float *want_scale = take(scales), *got_scale = take(scales);

    GET(work_of, "lm_cuda_fp8_quantize_work");
    GET(quantize, "lm_cuda_fp8_quantize");
    memset(want, 0xa5, n_codes);
    memset(want_scale, 0, scales);
    if (q.given)
        *want_scale = scale;
    quantize_plainly(&q, want, want_scale);
    for (int order = 0; order < 3; order++) {
        size_t work = work_of(&q);
        void *junk = take(work);
        lm_fp8_quantize d = q;
        memset(junk, 0xff, work); /* kernels must not rely on scratch */
        emu_order(order);
        memset(got, 0xa5, n_codes);
        memset(got_scale, 0xff, scales);
        if (q.given)
            *got_scale = scale;
        d.x = device_twin(q.x, x_bytes, 0);
        d.codes = device_twin(got, n_codes + GUARD, 0);
        d.scale = device_twin(got_scale, scales + GUARD, 0);
        d.work = device_twin(junk, work + GUARD, 0);
        quantize(&d, device->main);
        device_copy(junk, d.work, work + GUARD);
        for (int i = 0; i < GUARD; i++)
            assert_int_equal(((unsigned char *)junk)[work + (size_t)i], 0x5a);
        device_copy(got, d.codes, n_codes + GUARD);
        device_copy(got_scale, d.scale, scales + GUARD);
        assert_memory_equal(got_scale, want_scale, scales + GUARD);
        for (size_t i = 0; i < n_codes + GUARD; i++)
            if (got[i] != want[i])
                fail_msg("%s from %s, scaling %d%s, %lld x %lld: code %zu is %02x, not %02x",
                         lm_dtype_name(q.type), lm_dtype_name(q.in), q.scaling,
                         q.transpose ? " turned" : "", (long long)q.rows, (long long)q.cols, i,
                         got[i], want[i]);
        device_drop((void *)d.x, x_bytes, 0);
        device_drop(d.codes, n_codes + GUARD, 0);
        device_drop(d.scale, scales + GUARD, 0);
        device_drop(d.work, work + GUARD, 0);
        lm_free(junk);
    }
    emu_order(0);
    lm_free(want);
    lm_free(got);
    lm_free(want_scale);
    lm_free(got_scale);
}

/* Every BF16 number, NaNs and infinities included, and the F32 numbers next to each on both
 * sides. */
static void test_every_code(void **state)
{
    static const lm_dtype to[] = { LM_DTYPE_F8E4M3, LM_DTYPE_F8E5M2 };
    uint16_t *all = take(65536 * sizeof *all);
    float *ties = take(2 * 65536 * sizeof *ties);
    (void)state;
    open_path("plain");
    for (int i = 0; i < 65536; i++) {
        uint32_t u = (uint32_t)i << 16;
        float x;
        memcpy(&x, &u, 4);
        ties[2 * i] = isnan(x) ? 1 : nextafterf(x, -INFINITY);
        ties[2 * i + 1] = isnan(x) ? -1 : nextafterf(x, INFINITY);
        all[i] = (uint16_t)i;
    }
    for (int t = 0; t < 2; t++) {
        lm_fp8_quantize q = { .rows = 256,
                              .cols = 256,
                              .ldx = 256,
                              .ld = 256,
                              .in = LM_DTYPE_BF16,
                              .x = all,
                              .type = to[t],
                              .given = true };
        check_codes(q, 1);
        q.in = LM_DTYPE_F32;
        q.rows = 512;
        q.x = ties;
        check_codes(q, 1);
    }
    lm_free(all);
    lm_free(ties);
    lm_backend_close(device);
}

static void test_scales(void **state)
{
    static const int64_t shapes[][2] = { { 1, 1 },     { 3, 130 },   { 129, 7 },
                                         { 128, 128 }, { 140, 300 }, { 2200, 7 } };
    static const lm_dtype in[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    int turn = 0;
    (void)state;
    open_path("plain");
    for (int s = 0; s < 6; s++)
        for (int scaling = 0; scaling < 3; scaling++)
            for (int form = 0; form < 4; form++, turn++) {
                lm_fp8_quantize q = { .rows = shapes[s][0],
                                      .cols = shapes[s][1],
                                      .in = in[turn % 3],
                                      .transpose = form & 1,
                                      .power_of_two = form >> 1,
                                      .type = turn % 5 < 3 ? LM_DTYPE_F8E4M3 : LM_DTYPE_F8E5M2,
                                      .scaling = (lm_fp8_scaling)scaling };
                q.ldx = q.cols + (turn % 4 == 1 ? 3 : 0);
                q.ld = (q.transpose ? q.rows : q.cols) + (turn % 4 == 2 ? 5 : 0);
                char *x = take((size_t)(q.rows * q.ldx) * lm_dtype_size(q.in));
                for (int64_t i = 0; i < q.rows * q.ldx; i++) {
                    double v = bell(lm_philox((uint64_t)i, (uint64_t)turn, 3));
                    lm_set(q.in, x, i, i % q.ldx > 200 ? 0 : i % 37 ? v : 100 * v);
                }
                lm_set(q.in, x, (q.rows - 1) * q.ldx, -1000); /* the largest, in the last row */
                if (turn % 6 == 5) {                          /* a NaN and an infinity */
                    lm_set(q.in, x, 0, NAN);
                    lm_set(q.in, x, q.rows * q.ldx - 1, INFINITY);
                } else if (q.in != LM_DTYPE_F16) {
                    lm_set(q.in, x, 0, 1e-42);
                }
                q.x = x;
                check_codes(q, 0);
                lm_free(x);
            }
    lm_backend_close(device);
}

/* ---- products ---- */

/* [rows, k] with a pitch, and scales between 0.5 and 1.5. */
static lm_fp8_matrix drawn(lm_dtype type, lm_fp8_scaling scaling, int64_t rows, int64_t k,
                           int64_t ld, uint64_t which)
{
    uint8_t *codes = take((size_t)(rows * ld));
    int64_t n = lm_fp8_scales(scaling, rows, k);
    float *scale = take((size_t)n * sizeof *scale);

    memset(codes, 0x7f, (size_t)(rows * ld)); /* NaN in a part that is not read */
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < k; j++)
            codes[i * ld + j] =
                code_of(type, (float)bell(lm_philox((uint64_t)(i * k + j), which, 1)));
    for (int64_t i = 0; i < n; i++)
        scale[i] = 0.5f + (float)lm_philox((uint64_t)i, which, 2).v[0] * 0x1p-32f;
    return (lm_fp8_matrix){ type, scaling, codes, ld, scale };
}

static lm_fp8_matrix twin_of(const lm_fp8_matrix *x, int64_t rows, int64_t k)
{
    lm_fp8_matrix d = *x;
    d.codes = device_twin(x->codes, (size_t)(rows * x->ld), 0);
    d.scale = device_twin(x->scale, (size_t)lm_fp8_scales(x->scaling, rows, k) * 4, 0);
    return d;
}

static void drop_twin(const lm_fp8_matrix *d, int64_t rows, int64_t k)
{
    device_drop((void *)d->codes, (size_t)(rows * d->ld), 0);
    device_drop((void *)d->scale, (size_t)lm_fp8_scales(d->scaling, rows, k) * 4, 0);
}

static double number(const lm_fp8_matrix *x, int64_t rows, int64_t k, int64_t i, int64_t q)
{
    return lm_get(x->type, x->codes, i * x->ld + q) *
           (double)x->scale[lm_fp8_scale_at(x->scaling, rows, k, i, q)];
}

static double fp8_error(const lm_fp8_gemm *g, const void *c0, const void *c)
{
    double off = 0, size = 0;
    for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++) {
            double s = (g->bias ? g->bias[j] : 0) +
                       (g->accumulate ? lm_get(g->cd, c0, i * g->ldc + j) : 0);
            for (int64_t q = 0; q < g->k; q++)
                s += number(&g->a, g->m, g->k, i, q) * number(&g->b, g->n, g->k, j, q);
            double d = lm_get(g->cd, c, i * g->ldc + j) - s;
            off += d * d;
            size += s * s;
        }
    return sqrt(off / size);
}

typedef struct {
    int64_t m, n, k, slack;
    lm_dtype a, b, cd;
    lm_fp8_scaling a_scaling, b_scaling;
    bool accumulate, bias;
} fp8_case;

static void check_fp8(const fp8_case *p)
{
    size_t (*work_of)(const lm_fp8_gemm *);
    void (*run_gemm)(const lm_fp8_gemm *, const lm_stream *);
    lm_fp8_gemm g = { .m = p->m,
                      .n = p->n,
                      .k = p->k,
                      .cd = p->cd,
                      .accumulate = p->accumulate,
                      .ldc = p->n + p->slack };
    size_t c_bytes = (size_t)(g.m * g.ldc) * lm_dtype_size(g.cd);
    void *c0 = take(c_bytes), *c = take(c_bytes), *first = take(c_bytes);
    float *bias = take((size_t)g.n * sizeof *bias);

    GET(work_of, "lm_cuda_fp8_gemm_work");
    GET(run_gemm, "lm_cuda_fp8_gemm");
    g.a = drawn(p->a, p->a_scaling, g.m, g.k, g.k + p->slack, 1);
    g.b = drawn(p->b, p->b_scaling, g.n, g.k, g.k + p->slack, 2);
    for (int64_t i = 0; i < g.m * g.ldc; i++)
        lm_set(g.cd, c0, i, bell(lm_philox((uint64_t)i, 5, 5)));
    for (int64_t i = 0; i < g.n; i++)
        bias[i] = (float)(i % 7) - 3;
    g.bias = p->bias ? bias : NULL;
    lm_fp8_gemm d = g;
    d.a = twin_of(&g.a, g.m, g.k), d.b = twin_of(&g.b, g.n, g.k);
    d.bias = p->bias ? device_twin(bias, (size_t)g.n * 4, 0) : NULL;
    size_t work = work_of(&d);
    void *junk = take(work);
    memset(junk, 0xff, work);
    d.work = device_twin(junk, work + GUARD, 0);
    for (int order = 0; order < 3; order++) {
        emu_order(order);
        d.c = device_twin(c0, c_bytes + GUARD, 0);
        run_gemm(&d, device->main);
        device_copy(c, d.c, c_bytes + GUARD);
        device_drop(d.c, c_bytes + GUARD, 0);
        for (int i = 0; i < GUARD; i++)
            assert_int_equal(((unsigned char *)c)[c_bytes + (size_t)i], 0x5a);
        if (!order)
            memcpy(first, c, c_bytes);
        assert_memory_equal(first, c, c_bytes);
    }
    emu_order(0);
    /* tensor cores of real cards keep fewer bits of such sums */
    bool exact = !cuda_is_real() || !strncmp(device->detail, "plain", 5);
    double error = fp8_error(&g, c0, c), tol = p->cd == LM_DTYPE_BF16 ? 4e-3 : exact ? 1e-6 : 1e-3;
    if (!(error <= tol))
        fail_msg("%s %s x %s, scalings %d %d, %lldx%lldx%lld: relative error %.3g, allowed %.3g",
                 device->detail, lm_dtype_name(p->a), lm_dtype_name(p->b), p->a_scaling,
                 p->b_scaling, (long long)g.m, (long long)g.n, (long long)g.k, error, tol);
    drop_twin(&d.a, g.m, g.k);
    drop_twin(&d.b, g.n, g.k);
    if (p->bias)
        device_drop((void *)d.bias, (size_t)g.n * 4, 0);
    device_drop(d.work, work + GUARD, 0);
    void *mine[] = { junk,
                     c0,
                     c,
                     first,
                     bias,
                     (void *)g.a.codes,
                     (void *)g.b.codes,
                     (void *)g.a.scale,
                     (void *)g.b.scale };
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++)
        lm_free(mine[i]);
}

static lm_lt_counts counts_now(void)
{
    void (*counts)(const lm_stream *, lm_lt_counts *);
    lm_lt_counts c;
    GET(counts, "lm_cuda_lt_counts");
    counts(device->main, &c);
    return c;
}

static const lm_dtype pairs[][2] = { { LM_DTYPE_F8E4M3, LM_DTYPE_F8E4M3 },
                                     { LM_DTYPE_F8E4M3, LM_DTYPE_F8E5M2 },
                                     { LM_DTYPE_F8E5M2, LM_DTYPE_F8E4M3 } };

/* Every pair of types and of scalings, F32 and BF16.  cuBLASLt computes all products except those
 * with scales by blocks, and those that combine one scale for all with others; these are counted
 * and reported. */
static void test_products(void **state)
{
    static const char *const paths[] = { "plain", "tensor" };
    (void)state;
    for (int path = 0; path < 2; path++) {
        int64_t made = 0, asked = 0;
        open_path(paths[path]);
        for (int s = 0; s < 9; s++)
            for (int t = 0; t < 3; t++) {
                bool wide = (s + t) % 2;
                fp8_case p = { .m = 132,
                               .n = 80,
                               .k = 272,
                               .slack = t == 1 ? 16 : 0,
                               .a = pairs[t][0],
                               .b = pairs[t][1],
                               .cd = wide ? LM_DTYPE_F32 : LM_DTYPE_BF16,
                               .a_scaling = (lm_fp8_scaling)(s / 3),
                               .b_scaling = (lm_fp8_scaling)(s % 3),
                               .accumulate = s % 4 == 1,
                               .bias = !wide && t };
                check_fp8(&p);
                made += s == 0 || s == 4 || s == 5 || s == 7;
                asked++;
            }
        lm_lt_counts c = counts_now();
        assert_int_equal(c.shapes, path ? asked : 0);
        assert_int_equal(c.hits, path ? 2 * asked : 0);
        if (!cuda_is_real()) { /* real cards may support other products */
            assert_int_equal(c.unserved_shapes, path ? asked - made : 0);
            assert_int_equal(c.unserved, path ? 3 * (asked - made) : 0);
            assert_int_equal(device->shortfall(device) != NULL, path);
        }
        lm_backend_close(device);
    }
}

/* Ragged shapes: cuBLASLt has no algorithm for them, so both paths use the plain kernels. */
static void test_ragged(void **state)
{
    static const int64_t shapes[][3] = { { 1, 1, 1 }, { 3, 5, 130 }, { 65, 129, 33 } };
    (void)state;
    for (int path = 0; path < 2; path++) {
        open_path(path ? "tensor" : "plain");
        for (int s = 0; s < 3; s++)
            for (int t = 0; t < 3; t++) {
                fp8_case p = { .m = shapes[s][0],
                               .n = shapes[s][1],
                               .k = shapes[s][2],
                               .slack = t,
                               .a = pairs[t][0],
                               .b = pairs[t][1],
                               .cd = t ? LM_DTYPE_F32 : LM_DTYPE_BF16,
                               .a_scaling = (lm_fp8_scaling)((s + t) % 3),
                               .b_scaling = (lm_fp8_scaling)(s % 3),
                               .bias = !t };
                check_fp8(&p);
            }
        assert_int_equal(counts_now().unserved > 0, path);
        lm_backend_close(device);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_code),
        cmocka_unit_test(test_scales),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_ragged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
