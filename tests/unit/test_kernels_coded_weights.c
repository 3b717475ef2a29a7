/* SPDX-License-Identifier: Apache-2.0 */
/* Coded weights: for every format that can be decoded, at every level, a kernel gives the same bits
 * as on the decoded numbers. */
#include <math.h>
#include <stdlib.h>

#include "kernel_case.h"
#include "kernels/cpu/code_rows.h"
#include "kernels/embed.h"
#include "kernels/grouped.h"
#include "kernels/head.h"
#include "kernels/linear.h"
#include "numeric/code_rows.h"

enum { K = 512, M = 87 };

/* A matrix in codes: all rows in f, or the last 30 in another format. */
typedef struct {
    int64_t rows;
    lm_code_rows codes;
    void *block;
    void *numbers; /* decoded to act */
} coded;

static void encode_run(struct lm_code_run *r, const float *x)
{
    void *plane[LM_MAX_PLANES] = { NULL };
    lm_tensor_size size;
    assert_int_equal(lm_tensor_bytes(r->format, 2, (int64_t[]){ r->rows, K }, &size, NULL), 0);
    uint8_t *at = (uint8_t *)(uintptr_t)r->data;
    for (int p = 0; p < r->format->n_planes; p++) {
        plane[p] = at;
        at += size.plane[p];
    }
    if (r->format->encode)
        r->format->encode(r->format, x, r->rows, K, K, plane, NULL);
    else
        for (size_t i = 0; i < size.all; i++) /* read only: any codes */
            ((uint8_t *)plane[0])[i] = (uint8_t)(17 * i % 113);
}

/* Memory of the runs, at odd addresses. */
static void place_runs(coded *c)
{
    size_t at[2], all = 1;
    for (int i = 0; i < c->codes.n; i++) {
        lm_tensor_size size;
        int64_t dim[] = { c->codes.run[i].rows, K };
        assert_int_equal(lm_tensor_bytes(c->codes.run[i].format, 2, dim, &size, NULL), 0);
        at[i] = all;
        all += size.all / 2 * 2;
    }
    c->block = take(all + 1);
    for (int i = 0; i < c->codes.n; i++)
        c->codes.run[i].data = (uint8_t *)c->block + at[i];
}

/* A byte of a row: scales of all kinds.  Rows 4 and 5 suit Q8_0: its first scale infinite; its numbers the least of
 * F16, the last 32 negative zeros. */
static uint8_t any_byte(int64_t row, int64_t at, uint32_t random)
{
    if (row < 2)
        return (uint8_t)(row * 128);
    if (row < 4)
        return random % 3 % 2;
    if (row == 4)
        return at == 0 ? 0 : at == 1 ? 0x7c : 1;
    if (row == 5)
        return at % 34 == 1 ? at / 34 / 15 * 128 : at % 34 == 0 || at < 34 * 15;
    return row < 40 ? (uint8_t)(random % 123 | (row % 2) << 7) : (uint8_t)random;
}

static void fill_run(const struct lm_code_run *r)
{
    lm_tensor_size size;
    lm_rng rng = lm_rng_make(9, r->format->name, 0);
    assert_int_equal(lm_tensor_bytes(r->format, 2, (int64_t[]){ r->rows, K }, &size, NULL), 0);
    uint8_t *to = (uint8_t *)(uintptr_t)r->data;
    size_t row = size.all / (size_t)r->rows;
    for (size_t i = 0; i < size.all; i++)
        to[i] = any_byte((int64_t)(i / row), (int64_t)(i % row), lm_rng_u32(rng, i));
}

static coded make_rows(const lm_format *f, const lm_format *last, int64_t rows, lm_dtype act,
                       bool any)
{
    coded c = { .rows = rows, .codes = { .n = 1, .run = take(2 * sizeof *c.codes.run) } };
    c.codes.run[0] = (struct lm_code_run){ .rows = rows, .format = f };
    float *x = take((size_t)(rows * K) * sizeof *x);
    lm_rng rng = lm_rng_make(3, "codes", 0);
    for (uint64_t i = 0; i < (uint64_t)(rows * K); i++)
        x[i] = (float)lm_rng_normal(rng, i);
    if (last) {
        c.codes.n = 2;
        c.codes.run[0].rows = rows - 30;
        c.codes.run[1] = (struct lm_code_run){ .row = rows - 30, .rows = 30, .format = last };
    }
    place_runs(&c);
    for (int i = 0; i < c.codes.n; i++) {
        encode_run(&c.codes.run[i], x + c.codes.run[i].row * K);
        if (any)
            fill_run(&c.codes.run[i]);
    }
    c.numbers = take((size_t)(rows * K) * lm_dtype_size(act));
    void *scratch = take(lm_code_rows_scratch(act, K) + 1);
    lm_code_rows_numbers(&c.codes, 0, rows, K, act, NULL, c.numbers, scratch);
    lm_free(scratch);
    lm_free(x);
    return c;
}

static coded make_coded(const lm_format *f, const lm_format *last, lm_dtype act, bool any)
{
    return make_rows(f, last, M, act, any);
}

static void drop_coded(coded *c)
{
    lm_free(c->block);
    lm_free(c->codes.run);
    lm_free(c->numbers);
}

/* Equal bits; a NaN may have any. */
static bool equal(lm_dtype t, const void *a, const void *b, int64_t n)
{
    size_t size = lm_dtype_size(t);
    for (int64_t i = 0; i < n; i++)
        if (memcmp((const char *)a + (size_t)i * size, (const char *)b + (size_t)i * size, size) &&
            !(isnan(lm_get(t, a, i)) && isnan(lm_get(t, b, i))))
            return false;
    return true;
}

/* One call of k with operand `w` in codes, then as numbers: the same bits of output y. */
static void check_output(const lm_kernel *k, lm_call call, lm_tensor *in, int w, int y,
                         const coded *c, int threads)
{
    lm_step step = { 0 };
    size_t bytes = (size_t)lm_tensor_count(&call.out[y]) * lm_dtype_size(call.out[y].dtype);
    void *got = take(bytes), *want = take(bytes);
    call.par = threads > 1 ? pool_of(threads) : NULL;
    call.step = &step;
    for (int numbers = 0; numbers < 2; numbers++) {
        in[w].codes = numbers ? NULL : &c->codes;
        in[w].data = numbers ? c->numbers : c->block;
        size_t room = k->work ? k->work(&call, threads) : 0;
        call.work = take(room + 64);
        void *kept = call.work;
        call.work = (void *)(((uintptr_t)kept + 63) / 64 * 64);
        call.out[y].data = numbers ? want : got;
        k->run(&call);
        lm_free(kept);
    }
    if (!equal(call.out[y].dtype, got, want, lm_tensor_count(&call.out[y])))
        fail_msg("%s %s %s of %s, %d threads: other bits", k->op, lm_dtype_name(k->act),
                 lm_cpu_level_name((lm_cpu_level)k->level), c->codes.run[0].format->name, threads);
    lm_free(got);
    lm_free(want);
}

static void check_call(const lm_kernel *k, lm_call call, lm_tensor *in, int w, const coded *c,
                       int threads)
{
    check_output(k, call, in, w, 0, c, threads);
}

static double number_of_x(int64_t row, int64_t i)
{
    return row == 1 ? -1e-39 : row == 2 ? 0 : row == 3 ? 1 : (double)(i * 7919 % 201 - 100) / 50;
}

static void check_linear(const coded *c, lm_dtype act, int level, int64_t rows, int threads)
{
    lm_linear_attr attr = { LM_ACC_FIRST };
    lm_tensor in[3] = { { .dtype = act, .ndim = 2, .dim = { rows, K } },
                        { .dtype = act, .ndim = 2, .dim = { M, K } },
                        { .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { M } } };
    lm_tensor out = { .dtype = act, .ndim = 2, .dim = { rows, M } };
    float bias[M];
    in[0].data = take((size_t)(rows * K) * lm_dtype_size(act));
    for (int64_t i = 0; i < rows * K; i++)
        lm_set(act, in[0].data, i, number_of_x(i / K, i));
    for (int i = 0; i < M; i++)
        bias[i] = i == 5 ? -0.0f : (float)i / 9;
    in[2].data = bias;
    check_call(lm_cpu_kernel("linear", act, (lm_cpu_level)level),
               (lm_call){ .attr = &attr, .in = in, .n_in = 3, .out = &out, .n_out = 1 }, in, 1, c,
               threads);
    lm_free(in[0].data);
}

static void check_dx(const coded *c, lm_dtype act, int level, int64_t rows, int threads)
{
    lm_tensor in[2] = { { .dtype = act, .ndim = 2, .dim = { rows, M } },
                        { .dtype = act, .ndim = 2, .dim = { M, K } } };
    lm_tensor out = { .dtype = act, .ndim = 2, .dim = { rows, K } };
    in[0].data = take((size_t)(rows * M) * lm_dtype_size(act));
    for (int64_t i = 0; i < rows * M; i++)
        lm_set(act, in[0].data, i, number_of_x(i / M, i));
    check_call(lm_cpu_kernel("linear_dx", act, (lm_cpu_level)level),
               (lm_call){ .in = in, .n_in = 2, .out = &out, .n_out = 1 }, in, 1, c, threads);
    lm_free(in[0].data);
}

/* Groups of rows of the matrix, some without rows of x. */
static void check_grouped(const coded *c, lm_dtype act, int level, int64_t rows, int threads)
{
    enum { G = 3 };
    lm_grouped_attr attr = { G, M / G, LM_ACC_FIRST };
    int32_t offsets[G + 1] = { 0, 0, (int32_t)(rows / 3), (int32_t)rows };
    for (int dx = 0; dx < 2; dx++) {
        int64_t from = dx ? M / G : K, to = dx ? K : M / G;
        lm_tensor in[3] = {
            { .dtype = act, .ndim = 2, .dim = { rows, from } },
            { .dtype = act, .ndim = 2, .dim = { M, K } },
            { .data = offsets, .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { G + 1 } }
        };
        lm_tensor out = { .dtype = act, .ndim = 2, .dim = { rows, to } };
        in[0].data = take((size_t)(rows * from) * lm_dtype_size(act));
        for (int64_t i = 0; i < rows * from; i++)
            lm_set(act, in[0].data, i, number_of_x(i / from, i));
        check_call(
            lm_cpu_kernel(dx ? "grouped_linear_dx" : "grouped_linear", act, (lm_cpu_level)level),
            (lm_call){ .attr = &attr, .in = in, .n_in = 3, .out = &out, .n_out = 1 }, in, 1, c,
            threads);
        lm_free(in[0].data);
    }
}

static void check_embed(const coded *c, lm_dtype act, int level, int threads)
{
    enum { N = 40 };
    lm_embed_attr attr = { .scale = 2.5 };
    int32_t tok[N];
    lm_tensor in[2] = { { .data = tok, .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { N } },
                        { .dtype = act, .ndim = 2, .dim = { M, K } } };
    lm_tensor out = { .dtype = act, .ndim = 2, .dim = { N, K } };
    for (int i = 0; i < N; i++)
        tok[i] = i * 31 % M;
    check_call(lm_cpu_kernel("embed", act, (lm_cpu_level)level),
               (lm_call){ .attr = &attr, .in = in, .n_in = 2, .out = &out, .n_out = 1 }, in, 1, c,
               threads);
}

/* Of head_stats the losses; of the others the gradients of x. */
static void check_head(const coded *c, const char *op, lm_dtype act, int level, int threads)
{
    enum { N = 19 };
    lm_head_attr attr = { .vocab = c->rows };
    int32_t target[N];
    float lse[N], scale[N];
    lm_tensor in[5] = { { .dtype = act, .ndim = 2, .dim = { N, K } },
                        { .dtype = act, .ndim = 2, .dim = { c->rows, K } },
                        { .data = target, .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { N } },
                        { .data = lse, .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { N } },
                        { .data = scale, .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { N } } };
    lm_tensor out[2] = { { .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { N } },
                         { .dtype = act, .ndim = 2, .dim = { N, K } } };
    float loss[N];
    bool grad = !strcmp(op, "head_grad"), both = !strcmp(op, "head_loss");
    in[0].data = take((size_t)(N * K) * lm_dtype_size(act));
    for (int64_t i = 0; i < N * K; i++)
        lm_set(act, in[0].data, i, (double)(i * 7919 % 201 - 100) / 500);
    for (int i = 0; i < N; i++) {
        target[i] = i * 5 % (int)c->rows;
        lse[i] = 4;
        scale[i] = (float)(i + 1) / N;
    }
    if (both) {
        in[3] = in[4];
        out[0].data = loss;
    }
    lm_call call = { .attr = &attr,
                     .in = in,
                     .n_in = grad   ? 5
                             : both ? 4
                                    : 3,
                     .out = grad ? &out[1] : out,
                     .n_out = both ? 2 : 1 };
    check_output(lm_cpu_kernel(op, act, (lm_cpu_level)level), call, in, 1, both ? 1 : 0, c,
                 threads);
    lm_free(in[0].data);
}

static const char *const heads[] = { "head_stats", "head_grad", "head_loss" };
enum { N_HEADS = sizeof heads / sizeof *heads };

static void check_format(const lm_format *f, const lm_format *last)
{
    static const int64_t rows[] = { 1, 2, 3, 4, 5, 8, 9, 70 };
    for (int low = 0; low < 2; low++) {
        lm_dtype act = low ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        coded c = make_coded(f, last, act, false);
        for (int level = 0; level <= (int)lm_cpu_detect(); level++)
            for (int threads = 1; threads <= 3; threads += 2) {
                for (int i = 0; i < 8; i++) {
                    check_linear(&c, act, level, rows[i], threads);
                    check_dx(&c, act, level, rows[i], threads);
                    check_grouped(&c, act, level, rows[i], threads);
                }
                check_embed(&c, act, level, threads);
                for (int i = 0; i < N_HEADS; i++)
                    check_head(&c, heads[i], act, level, threads);
            }
        drop_coded(&c);
    }
}

/* Products of few rows with any codes: NaN, infinite and zero results too. */
static void check_few_rows(const lm_format *f)
{
    for (int low = 0; low < 2; low++) {
        lm_dtype act = low ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        coded c = make_coded(f, NULL, act, true);
        for (int level = 0; level <= (int)lm_cpu_detect(); level++)
            for (int rows = 1; rows < 6; rows++)
                check_linear(&c, act, level, rows, 1);
        drop_coded(&c);
    }
}

static void any_codes(void **state)
{
    const lm_format *f;
    (void)state;
    for (int i = 0; (f = lm_format_at(i)); i++)
        if (lm_format_codes(f, K) && f->n_planes == 1)
            check_few_rows(f);
}

static void every_format(void **state)
{
    const lm_format *f;
    int met = 0;
    (void)state;
    for (int i = 0; (f = lm_format_at(i)); i++) {
        if (!lm_format_codes(f, K))
            continue;
        check_format(f, NULL);
        met++;
    }
    assert_true(met > 22);
}

/* A coder of vectors gives the numbers of plain C for any bytes, scales at the ends of their range too. */
static void check_coder(const lm_code_rows_coder *by, const lm_format *f, int64_t cols)
{
    enum { ROWS = 64, MOST = 600 };
    uint8_t *bytes = take((size_t)ROWS * MOST * 8);
    float *want = take(ROWS * MOST * sizeof *want), *got = take(ROWS * MOST * sizeof *got);
    uint16_t *low = take(ROWS * MOST * sizeof *low);
    lm_tensor_size size;
    lm_rng rng = lm_rng_make(5, f->name, 0);
    assert_int_equal(lm_tensor_bytes(f, 2, (int64_t[]){ ROWS, cols }, &size, NULL), 0);
    for (size_t i = 0; i < size.all; i++)
        bytes[i] = i < 600 && i % 17 == 0 ? (uint8_t)(i / 17 % 2 ? 255 - i / 34 : i / 34)
                                          : (uint8_t)lm_rng_u32(rng, i);
    const void *const plane[LM_MAX_PLANES] = { bytes, bytes + size.plane[0] };
    f->decode(f, plane, ROWS, cols, want, cols);
    if (by->decode(f, plane, ROWS, cols, got))
        for (int64_t i = 0; i < ROWS * cols; i++)
            if (memcmp(&got[i], &want[i], 4) && !(isnan(got[i]) && isnan(want[i])))
                fail_msg("%s: %a, not %a", f->name, (double)got[i], (double)want[i]);
    if (by->decode_bf16(f, plane, ROWS, cols, low))
        for (int64_t i = 0; i < ROWS * cols; i++)
            if (low[i] != lm_f32_to_bf16(want[i]) && !isnan(want[i]))
                fail_msg("%s: %x, not %a in BF16", f->name, low[i], (double)want[i]);
    lm_free(bytes);
    lm_free(want);
    lm_free(got);
    lm_free(low);
}

static void any_bytes(void **state)
{
    static const lm_code_rows_coder *const by[] = { NULL, &lm_code_rows_avx2, &lm_code_rows_avx512,
                                                    &lm_code_rows_bf16, &lm_code_rows_bf16 };
    const lm_format *f;
    (void)state;
    for (int level = 1; level <= (int)lm_cpu_detect(); level++)
        for (int i = 0; (f = lm_format_at(i)); i++) {
            if (!lm_format_codes(f, 512) || f->n_planes > 1)
                continue;
            check_coder(by[level], f, 512);
            if (f->element != LM_DTYPE_NONE)
                check_coder(by[level], f, 77);
        }
}

static void formats_in_turn(void **state)
{
    const lm_format *a, *b, *c;
    lm_err e = { 0 };
    (void)state;
    assert_int_equal(lm_format_find("q4_k", NULL, &a, &e), 0);
    assert_int_equal(lm_format_find("q6_k", NULL, &b, &e), 0);
    assert_int_equal(lm_format_find("bf16", NULL, &c, &e), 0);
    check_format(a, b);
    check_format(a, c);
    assert_false(lm_format_codes(a, 100)); /* no whole blocks */
}

/* Gradients of a vocabulary whose products are made in several pieces. */
static void large_vocabulary(void **state)
{
    enum { ROWS = 2 * 8192 + 77 };
    lm_err e = { 0 };
    const lm_format *f, *last;
    (void)state;
    assert_int_equal(lm_format_find("nf4_dq", NULL, &f, &e), 0);
    assert_int_equal(lm_format_find("q8_0", NULL, &last, &e), 0);
    for (int low = 0; low < 2; low++) {
        lm_dtype act = low ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        coded c = make_rows(f, last, ROWS, act, false);
        for (int level = 1; level <= (int)lm_cpu_detect(); level++)
            for (int threads = 1; threads <= 3; threads += 2)
                for (int i = 0; i < N_HEADS; i++)
                    check_head(&c, heads[i], act, level, threads);
        drop_coded(&c);
    }
}

/* Memory has the size that the formats state. */
static void sizes(void **state)
{
    const lm_format *f;
    lm_err e = { 0 };
    (void)state;
    assert_int_equal(lm_format_find("q8_0", NULL, &f, &e), 0);
    struct lm_code_run run[] = {
        { .rows = 3, .format = f },
        { .row = 3, .rows = 2, .format = lm_format_of_dtype(LM_DTYPE_F16) }
    };
    lm_code_rows c = { .n = 2, .run = run };
    lm_tensor t = { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { 5, 320 }, .codes = &c };
    assert_int_equal(lm_stored_bytes(&t), 3 * 340 + 2 * 640);
    t.codes = NULL;
    assert_int_equal(lm_stored_bytes(&t), 5 * 320 * 4);
    assert_int_equal(lm_code_rows_bytes(&c, 2, 2, 320), 340 + 640);
    lm_code_rows p = lm_code_rows_part(&c, 2, 2), q = lm_code_rows_part(&p, 1, 1);
    assert_int_equal(p.n, 2); /* rows 2 and 3 */
    assert_int_equal(lm_code_rows_run(&p, 0).row, -2);
    assert_int_equal(lm_code_rows_run(&p, 1).row, 1);
    assert_int_equal(lm_code_rows_bytes(&p, 0, 2, 320), 340 + 640);
    assert_int_equal(q.n, 1);
    assert_int_equal(lm_code_rows_run(&q, 0).row, 0);
    assert_int_equal(lm_code_rows_bytes(&q, 0, 1, 320), 640);
    t.dim[0] = INT64_MAX / 320;
    assert_int_equal(lm_stored_bytes(&t), SIZE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format),     cmocka_unit_test(any_bytes),
        cmocka_unit_test(any_codes),        cmocka_unit_test(formats_in_turn),
        cmocka_unit_test(large_vocabulary), cmocka_unit_test(sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
