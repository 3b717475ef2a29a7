/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in codes on the CUDA backend: every format that it reads, in every operator that reads it, against the reference
 * in double on the decoded numbers. */
#include "gemm_case.h"
#include "kernels/arrange.h"
#include "kernels/divergence.h"
#include "kernels/embed.h"
#include "kernels/grouped.h"
#include "kernels/head.h"
#include "numeric/code_rows.h"

enum { K = 512, MOST_RUNS = 6 };

/* ---- a matrix in codes ---- */

typedef struct {
    lm_code_rows codes; /* in device memory */
    struct lm_code_run run[MOST_RUNS];
    uint8_t *host;
    void *dev;
    size_t bytes;
    double *numbers; /* as F32 */
} coded;

static coded matrix;

static size_t run_bytes(const struct lm_code_run *r)
{
    lm_tensor_size size;
    assert_int_equal(lm_tensor_bytes(r->format, 2, (int64_t[]){ r->rows, K }, &size, NULL), 0);
    return size.all;
}

static bool is_named(const lm_format *f, const char *name)
{
    return !strcmp(f->name, name);
}

/* Any codes of a format that is read only, with small scales. */
static void draw_codes(const lm_format *f, uint8_t *to, size_t bytes)
{
    lm_rng rng = lm_rng_make(9, f->name, 0);
    const size_t block = (size_t)f->plane[0].bits / 8;
    for (size_t i = 0; i < bytes; i++) {
        to[i] = (uint8_t)lm_rng_u32(rng, i);
        if (is_named(f, "fp8_e4m3_128") && (to[i] & 0x7f) == 0x7f)
            to[i] ^= 1; /* a NaN hides what stands beside it */
    }
    for (size_t at = 0; at < bytes; at += block) {
        const float scale = 0.01f * (float)(1 + at / block % 7);
        if (is_named(f, "mxfp4"))
            to[at] = (uint8_t)(121 + at / block % 5);
        else
            memcpy(to + at, &scale, sizeof scale);
    }
}

static void make_run(const struct lm_code_run *r, uint8_t *to)
{
    float *x = take((size_t)(r->rows * K) * sizeof *x);
    lm_rng rng = lm_rng_make(3, "codes", (uint64_t)r->row);
    void *plane[LM_MAX_PLANES] = { to };
    for (int64_t i = 0; i < r->rows * K; i++)
        x[i] = (float)lm_rng_normal(rng, (uint64_t)i);
    if (r->format->encode)
        r->format->encode(r->format, x, r->rows, K, K, plane, NULL);
    else
        draw_codes(r->format, to, run_bytes(r));
    lm_free(x);
}

/* Runs of so many rows each, in these formats in turn; each begins at a multiple of 64 bytes, as in a store. */
static void make_matrix(const int64_t *rows, int runs, const lm_format *f, const lm_format *other)
{
    coded *c = &matrix;
    size_t at[MOST_RUNS];
    int64_t row = 0;
    c->codes = (lm_code_rows){ .n = runs, .run = c->run };
    c->bytes = 0;
    for (int i = 0; i < runs; row += rows[i++]) {
        c->run[i] =
            (struct lm_code_run){ .row = row, .rows = rows[i], .format = i % 2 ? other : f };
        at[i] = c->bytes;
        c->bytes += (run_bytes(&c->run[i]) + 63) / 64 * 64;
    }
    float *x = take((size_t)(row * K) * sizeof *x);
    c->numbers = take((size_t)(row * K) * sizeof *c->numbers);
    c->host = take(c->bytes);
    for (int i = 0; i < runs; i++) {
        c->run[i].data = c->host + at[i];
        make_run(&c->run[i], c->host + at[i]);
    }
    lm_code_rows_numbers(&c->codes, 0, row, K, LM_DTYPE_F32, NULL, x, NULL);
    lm_convert(LM_DTYPE_F32, x, LM_DTYPE_F64, c->numbers, row * K);
    c->dev = device_twin(c->host, c->bytes, 0);
    for (int i = 0; i < runs; i++)
        c->run[i].data = (uint8_t *)c->dev + at[i];
    lm_free(x);
}

static void drop_matrix(void)
{
    device_drop(matrix.dev, matrix.bytes, 0);
    lm_free(matrix.host);
    lm_free(matrix.numbers);
}

static operand weight(int64_t rows)
{
    return given(mat(ACT, rows, K), matrix.numbers);
}

/* ---- one operator ---- */

/* The case k, whose input w is the matrix, of which the kernel gets the codes alone. */
static void check_coded(const kernel_case *k, int w, lm_dtype act, double tol)
{
    instance want, first, x;
    build(k, LM_DTYPE_F64, act, &want);
    run(&want, lm_cpu_kernel(k->op, LM_DTYPE_F64, LM_CPU_REF), NULL);
    const int orders = matrix.codes.run[0].rows > 1000 ? 1 : emu_order(0);
    for (int order = 0; order < orders; order++) {
        instance *it = order ? &x : &first;
        emu_order(order);
        build(k, act, act, it);
        memset(it->in[w].data, 0xff, bytes_of(&it->in[w])); /* NaN */
        it->in[w].codes = &matrix.codes;
        run_on_device(it, device_kernel(k->op, act), 0);
        for (int o = 0; o < 4; o++) {
            if (k->out[o].kind == ABSENT)
                continue;
            double d = distance(&it->out[o], &want.out[o]);
            if (!(d <= tol))
                fail_msg("%s %s %s of %s, out %d of %lld x %lld: relative error %.3g, allowed %.3g",
                         device->detail, k->op, lm_dtype_name(act), matrix.run[0].format->name, o,
                         (long long)k->out[o].rows, (long long)k->out[o].cols, d, tol);
            assert_memory_equal(it->out[o].data, first.out[o].data, bytes_of(&first.out[o]));
        }
        if (order)
            drop(k, &x);
    }
    emu_order(0);
    drop(k, &first);
    drop(k, &want);
}

static const lm_linear_attr plain = { LM_ACC_FIRST };

static void check_linear(int64_t n, int64_t m, lm_dtype act, int turn)
{
    const bool wide = turn % 2 && act != LM_DTYPE_F32;
    kernel_case y = { .op = "linear",
                      .attr = &plain,
                      .in = { mat(ACT, n, K), weight(m), turn % 3 ? vec(F32, m) : vec(ABSENT, 0) },
                      .out = { mat(wide ? F32 : ACT, n, m) } };
    kernel_case dx = { .op = "linear_dx",
                       .attr = &plain,
                       .in = { mat(ACT, n, m), weight(m) },
                       .out = { mat(ACT, n, K) } };
    check_coded(&y, 1, act, allowed(act, wide ? LM_DTYPE_F32 : act, device->detail));
    check_coded(&dx, 1, act, allowed(act, act, device->detail));
}

/* All or most of the rows as a vocabulary: lookups with a position and of a virtual token, losses and gradients. */
static void check_vocabulary(int64_t rows, lm_dtype act)
{
    static const lm_embed_attr scaled = { .scale = 2.5 };
    const lm_head_attr head = { .vocab = rows - 3 };
    const lm_divergence_attr d = { .vocab = rows - 3, .beta = 0.4, .temperature = 1.5 };
    enum { N = 19 };
    const double tol = act == LM_DTYPE_F32 ? 1e-5 : 1e-2;
    operand ids = filled(vec(I32, N), IDS, rows + 1), target = filled(vec(I32, N), IDS, rows - 3);
    operand x = mat(ACT, N, K), lse = filled(vec(F32, N), POSITIVE, 0);
    double small[N * K];
    for (int i = 0; i < N * K; i++)
        small[i] = (i * 7919 % 201 - 100) / 2000.0;
    x = given(x, small);
    kernel_case look = { .op = "embed",
                         .attr = &scaled,
                         .in = { ids, weight(rows), filled(vec(I32, N), IDS, 5), mat(ACT, 5, K) },
                         .out = { mat(ACT, N, K) } };
    kernel_case stats = { .op = "head_stats",
                          .attr = &head,
                          .in = { x, weight(rows), target },
                          .out = { vec(F32, N), vec(F32, N) } };
    kernel_case grad = { .op = "head_grad",
                         .attr = &head,
                         .in = { x, weight(rows), target, filled(vec(F32, N), POSITIVE, 0), lse },
                         .out = { mat(ACT, N, K) } };
    kernel_case both = { .op = "head_loss",
                         .attr = &head,
                         .in = { x, weight(rows), target, lse },
                         .out = { vec(F32, N), mat(ACT, N, K) } };
    double five[N];
    for (int i = 0; i < N; i++)
        five[i] = 5;
    grad.in[3] = given(grad.in[3], five);
    kernel_case apart = { .op = "divergence",
                          .attr = &d,
                          .in = { x, weight(rows), x, weight(rows), target },
                          .out = { vec(F32, N) } };
    check_coded(&look, 1, act, allowed(act, act, device->detail));
    check_coded(&stats, 1, act, tol);
    check_coded(&grad, 1, act, tol);
    check_coded(&both, 1, act, tol);
    apart.in[1] = filled(mat(ACT, rows, K), NORMAL, 0);
    check_coded(&apart, 3, act, tol);
}

/* ---- experts ---- */

enum { G = 3 };

static void check_experts(int64_t n, int64_t each, const double *cuts, lm_dtype act)
{
    lm_grouped_attr attr = { G, each, LM_ACC_FIRST };
    kernel_case k = { .op = "grouped_linear",
                      .attr = &attr,
                      .in = { mat(ACT, n, K), weight(G * each), given(vec(I32, G + 1), cuts) },
                      .out = { mat(ACT, n, each) } };
    check_coded(&k, 1, act, allowed(act, act, device->detail));
}

/* Rows of none, one, few and many of an expert, and rows of no expert. */
static void check_groups(int64_t each, lm_dtype act)
{
    static const int32_t cuts[][G + 1] = { { 0, 0, 1, 1 },      { 0, 1, 2, 3 },    { 0, 7, 7, 12 },
                                           { 0, 0, 25, 30 },    { 0, 40, 41, 66 }, { 0, 0, 0, 0 },
                                           { 0, 130, 130, 139 } };
    static const int64_t rows[] = { 1, 3, 13, 32, 70, 33, 140 };
    for (int i = 0; i < 7; i++) {
        int32_t one[G + 1];
        memcpy(one, cuts[i], sizeof one);
        check_experts(rows[i], each, (const double *)(const void *)one, act);
    }
}

/* ---- tests ---- */

static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };

static const lm_format *format_of(const char *name)
{
    const lm_format *f = NULL;
    lm_err e = { 0 };
    device_must(lm_format_find(name, NULL, &f, &e), &e);
    return f;
}

/* Number i of the formats that the device reads; NULL: past the last. */
static const lm_format *read_format(int i)
{
    const lm_format *f;
    for (int k = 0; (f = lm_format_at(k)); k++)
        if (device->codes(device, "linear", 1, LM_DTYPE_BF16, f) && i-- == 0)
            break;
    return f;
}

/* Numbers have the bits of lib/numeric, except for the sign of zeros. */
static void test_numbers(void **state)
{
    const lm_format *f;
    int count = 0;
    (void)state;
    open_path("plain");
    for (; (f = read_format(count)); count++)
        for (int a = 0; a < 3; a++) {
            const int64_t rows[] = { 40, 40, 7 };
            make_matrix(rows, 3, f, f);
            kernel_case k = { .op = "widen", .in = { weight(87) }, .out = { mat(F32, 87, K) } };
            instance want, x;
            build(&k, LM_DTYPE_F64, acts[a], &want);
            build(&k, acts[a], acts[a], &x);
            memset(x.in[0].data, 0xff, bytes_of(&x.in[0]));
            x.in[0].codes = &matrix.codes;
            run_on_device(&x, device_kernel("widen", acts[a]), 0);
            for (int64_t i = 0; i < 87 * K; i++) {
                double got = lm_get(LM_DTYPE_F32, x.out[0].data, i),
                       expected = lm_get(LM_DTYPE_F64, want.in[0].data, i);
                if (got != expected)
                    fail_msg("%s %s: number %d is %a, not %a", f->name, lm_dtype_name(acts[a]),
                             (int)i, got, expected);
            }
            drop(&k, &want);
            drop(&k, &x);
            drop_matrix();
        }
    assert_int_equal(count, 11);
    lm_backend_close(device);
}

/* Every format, alone and beside another one, as of q, k and v. */
static void test_linear(void **state)
{
    static const int64_t rows[] = { 40, 27, 20 }, counts[] = { 1, 2, 4, 5, 8, 9, 70 };
    const lm_format *f;
    int turn = 0;
    (void)state;
    for (int path = 0; path < 2; path++) {
        open_path(paths[path]);
        for (int i = 0; (f = read_format(i)); i++) {
            make_matrix(rows, 3, f, i % 2 ? f : format_of("q8_0"));
            for (int n = 0; n < 7; n++, turn++)
                check_linear(counts[n], 87, acts[turn % 3], turn);
            drop_matrix();
        }
        lm_backend_close(device);
    }
}

/* So many rows that neither product has all of their numbers at once. */
static void test_panels(void **state)
{
    static const int64_t rows[] = { 16380, 37 };
    (void)state;
    open_path("plain");
    make_matrix(rows, 2, format_of("q8_0"), format_of("mxfp4"));
    check_linear(9, 16417, LM_DTYPE_F32, 1);
    drop_matrix();
    lm_backend_close(device);
}

static void test_vocabulary(void **state)
{
    static const int64_t rows[] = { 50, 37 };
    static const char *const names[] = { "mxfp4", "q8_0", "q6_k" };
    (void)state;
    open_path("plain");
    for (int i = 0; i < 3; i++)
        for (int a = 0; a < 3; a++) {
            make_matrix(rows, 2, format_of(names[i]), format_of(i ? names[i] : "q4_k"));
            check_vocabulary(87, acts[a]);
            drop_matrix();
        }
    lm_backend_close(device);
}

/* The experts of a layer as one tensor, as a tensor each, as two each, and in several formats. */
static void test_experts(void **state)
{
    static const int64_t whole[] = { 240 }, each[] = { 80, 80, 80 },
                         two[] = { 40, 40, 40, 40, 40, 40 }, odd[] = { 81, 40, 119 };
    static const char *const names[] = { "mxfp4", "fp8_e4m3_128", "q8_0", "q4_0", "q4_k", "q6_k" };
    static const struct {
        const int64_t *rows;
        int runs;
        const char *other; /* NULL: the same */
    } forms[] = { { whole, 1, NULL }, { each, 3, NULL }, { two, 6, NULL }, { odd, 3, "q5_k" } };
    int turn = 0;
    (void)state;
    for (int path = 0; path < 2; path++) {
        open_path(paths[path]);
        for (int i = 0; i < 6; i++)
            for (int j = 0; j < 4; j++, turn++) {
                if ((i + j) % 2 && i > 1) /* half of these are enough */
                    continue;
                const lm_format *f = format_of(names[i]);
                make_matrix(forms[j].rows, forms[j].runs, f,
                            forms[j].other ? format_of(forms[j].other) : f);
                check_groups(80, acts[turn % 3]);
                drop_matrix();
            }
        lm_backend_close(device);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers), cmocka_unit_test(test_linear),
        cmocka_unit_test(test_panels),  cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_experts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
