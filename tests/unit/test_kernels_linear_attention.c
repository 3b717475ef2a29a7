/* SPDX-License-Identifier: Apache-2.0 */
/* Linear attention: every level's chunks against the recurrence, and gradients against those by pairs, also where documents
 * begin on and beside the borders of chunks; what it adds up, worked out by hand; pieces of a sequence through a state. */
#include "kernel_case.h"

#include "kernels/linear_attention.h"

enum { MOST_ROWS = 2 * 300 };

/* Documents begin at the rows of `start`, which ends with a negative number; NULL: one. */
static void fill_documents(int32_t *lo, const lm_linear_attention_attr *a, const int *start)
{
    for (int64_t i = 0; i < a->batch * a->seq; i++) {
        lo[i] = 0;
        for (const int *s = start; s && *s >= 0; s++)
            if (*s <= i % a->seq)
                lo[i] = *s;
    }
}

static kernel_case forward_of(const lm_linear_attention_attr *a, const int32_t *lo)
{
    int64_t n = a->batch * a->seq, D = a->head_dim;
    kernel_case k = { .op = "linear_attention", .attr = a, .tol_f32 = 1e-5, .tol_bf16 = 1e-2 };
    k.in[0] = mat(ACT, n, (a->heads + 2 * a->kv_heads) * D);
    if (lo)
        k.in[1] = given(vec(I32, n), lo);
    k.out[0] = mat(ACT, n, a->heads * D);
    return k;
}

/* Forward and backward, at every level and with several numbers of threads. */
static void check_both(lm_linear_attention_attr a, const int *start)
{
    static int32_t lo[MOST_ROWS];
    a.eps = 1e-6;
    a.state_rows = lm_linear_state_rows(a.feature, a.head_dim);
    fill_documents(lo, &a, start);
    kernel_case f = forward_of(&a, start ? lo : NULL), b = f;
    instance y;
    check_case(&f);
    build(&f, LM_DTYPE_F64, LM_DTYPE_BF16, &y);
    run(&y, lm_cpu_kernel("linear_attention", LM_DTYPE_F64, LM_CPU_REF), NULL);
    b.op = "linear_attention_dx";
    b.in[0] = f.out[0];
    b.in[1] = f.in[0];
    if (a.feature == LM_FEATURE_ELU)
        b.in[2] = given(f.out[0], y.out[0].data);
    b.in[3] = f.in[1];
    b.out[0] = f.in[0];
    check_case(&b);
    drop(&f, &y);
}

/* Each of the forms: both features, with and without decay. */
static void check_forms(lm_linear_attention_attr a, const int *start)
{
    for (int i = 0; i < 4; i++) {
        a.feature = (lm_feature)(i % 2);
        a.decay = i / 2;
        check_both(a, start);
    }
}

static void all_shapes(void **state)
{
    (void)state;
    const int64_t dims[] = { 1, 16, 33, 64, 128 };
    const int64_t heads[][2] = { { 1, 1 }, { 4, 2 }, { 3, 1 } };
    for (int i = 0; i < 5; i++)
        for (int64_t seq = 1; seq < 300; seq = 2 * seq + 1)
            check_forms((lm_linear_attention_attr){ .batch = 1 + i % 2,
                                                    .seq = seq,
                                                    .heads = heads[i % 3][0],
                                                    .kv_heads = heads[i % 3][1],
                                                    .head_dim = dims[i],
                                                    .scale = 0.3 },
                        NULL);
}

static void documents(void **state)
{
    (void)state;
    static const int starts[][8] = { { 64, -1 },           { 63, 65, -1 },
                                     { 1, 2, 3, 128, -1 }, { 127, 129, 192, 193, 199, -1 },
                                     { 10, -1 },           { 64, 128, 192, -1 } };
    for (int i = 0; i < 6; i++)
        check_forms(
            (lm_linear_attention_attr){
                .batch = 2, .seq = 200, .heads = 2, .kv_heads = 1, .head_dim = 24, .scale = 1 },
            starts[i]);
}

/* Fewer heads than threads: these share chunks, some at a time. */
static void more_threads_than_heads(void **state)
{
    static const int starts[][4] = { { -1 }, { 511, 530, -1 } };
    (void)state;
    for (int i = 0; i < 8; i++) {
        lm_linear_attention_attr a = { .batch = 1,
                                       .seq = MOST_ROWS - 7,
                                       .heads = i / 2 % 2 ? 1 : 3,
                                       .kv_heads = 1,
                                       .head_dim = 40,
                                       .feature = (lm_feature)(i % 2),
                                       .decay = i % 3 == 0,
                                       .scale = 1 };
        check_both(a, starts[i / 4]);
    }
}

/* Queries and keys that are NaN reach the results that read them, later ones of their document in the case of keys, and no
 * others.  (NaN of values may reach rows before them: 0 times NaN.) */
static void not_finite(void **state)
{
    (void)state;
    enum { T = 150, H = 2, D = 24, WIDTH = (H + 2) * D };
    static const int start[] = { 30, 50, 70, 128, -1 };
    static const int64_t at[][2] = {
        { 17, 5 }, { 40, H * D + 3 }, { 69, H * D }, { 100, H * D + 23 }
    };
    static double x[T * WIDTH];
    static int32_t lo[T];
    for (int i = 0; i < 32; i++) {
        lm_linear_attention_attr a = { .batch = 1,
                                       .seq = T,
                                       .heads = H,
                                       .kv_heads = 1,
                                       .head_dim = D,
                                       .feature = (lm_feature)(i % 2),
                                       .decay = i / 2 % 2,
                                       .scale = 1,
                                       .eps = 1e-6 };
        a.state_rows = lm_linear_state_rows(a.feature, D);
        fill_documents(lo, &a, start);
        kernel_case k = forward_of(&a, i / 4 % 2 ? lo : NULL);
        for (int64_t j = 0; j < T * WIDTH; j++)
            x[j] = value_at(&k.in[0], 0, j);
        x[at[i / 8][0] * WIDTH + at[i / 8][1]] = NAN;
        k.in[0] = given(k.in[0], x);
        check_nan(&k, LM_DTYPE_F32);
        check_nan(&k, LM_DTYPE_BF16);
    }
}

/* The results of the reference for one head of two numbers, without documents or with one at row 2. */
static void run_reference(lm_linear_attention_attr a, const double *rows, const int32_t *lo,
                          double *out)
{
    instance y;
    a.batch = a.heads = a.kv_heads = 1;
    a.head_dim = 2;
    a.state_rows = lm_linear_state_rows(a.feature, 2);
    kernel_case k = forward_of(&a, lo);
    k.in[0] = given(k.in[0], rows);
    build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("linear_attention", LM_DTYPE_F64, LM_CPU_REF), NULL);
    for (int64_t i = 0; i < 2 * a.seq; i++)
        out[i] = lm_get(LM_DTYPE_F64, y.out[0].data, i);
    drop(&k, &y);
}

/* Three rows of query, key, value.  Identity: each value is weighed by the product of query and key, and with a decay of
 * 1 - 2^-5 by that for each row since.  elu+1: by features that are x + 1 and exp(x), which add up to 1. */
static void adds_up_by_hand(void **state)
{
    (void)state;
    const double rows[] = { 1, 2, 3, 0, 10, 1, /**/ 2, 0, 0, 1, 20, 2, /**/ 1, 1, -1, 0, 30, 3 };
    const double a = 1 - 1.0 / 32, plain[] = { 30, 3, 60, 6, 10 * 3 + 20 - 30, 3 + 2 - 3 };
    lm_linear_attention_attr x = { .seq = 3, .scale = 0.5, .feature = LM_FEATURE_IDENTITY };
    double out[6];
    run_reference(x, rows, NULL, out);
    for (int i = 0; i < 6; i++)
        assert_float_equal(out[i], plain[i] / 2, 1e-12);
    x.decay = true;
    run_reference(x, rows, NULL, out);
    assert_float_equal(out[0], 15, 1e-12);
    assert_float_equal(out[2], a * 60 / 2, 1e-12);
    assert_float_equal(out[4], (a * a * 30 + a * 20 - 30) / 2, 1e-12);
    run_reference(x, rows, (const int32_t[]){ 0, 0, 2 }, out);
    assert_float_equal(out[2], a * 60 / 2, 1e-12);
    assert_float_equal(out[4], -15, 1e-12);

    x = (lm_linear_attention_attr){ .seq = 3, .scale = 1, .eps = 1e-12 };
    run_reference(x, rows, NULL, out);
    /* features of keys: (4,1), (1,2), (1/e,1); of the last query (2,2), of the second (3,1) */
    const double w[3] = { 10, 6, 2 * (exp(-1) + 1) }, v[2] = { 13, 5 };
    assert_float_equal(out[0], 10, 1e-9);
    assert_float_equal(out[2], (v[0] * 10 + v[1] * 20) / (v[0] + v[1]), 1e-9);
    assert_float_equal(out[4], (w[0] * 10 + w[1] * 20 + w[2] * 30) / (w[0] + w[1] + w[2]), 1e-9);
}

/* Rows of one sequence from `at` on through linear_attention_cached, at a level. */
static void run_piece(lm_linear_attention_attr a, lm_cpu_level level, const float *qkv, int64_t at,
                      int64_t n, float *S, float *o)
{
    int32_t used = (int32_t)at, fresh = (int32_t)n;
    int64_t width = (a.heads + 2 * a.kv_heads) * a.head_dim;
    a.seq = n;
    lm_tensor in[6] = {
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { n, width } },
        { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { 1 }, .data = &used },
        { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { 1 }, .data = &fresh },
    };
    lm_tensor out[2] = {
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { n, a.heads * a.head_dim }, .data = o },
        { .dtype = LM_DTYPE_F32,
          .ndim = 4,
          .dim = { 1, a.kv_heads, a.state_rows, a.head_dim },
          .data = S }
    };
    in[0].data = (void *)(uintptr_t)(qkv + at * width);
    instance i = { .call = { .attr = &a, .in = in, .n_in = 6, .out = out, .n_out = 2 } };
    run(&i, lm_cpu_kernel("linear_attention_cached", LM_DTYPE_F32, level), pool_of(2));
}

/* Chunks, steps, and steps behind chunks give what one call gives; a cut between chunks gives the same bits; the state is not
 * read before it is written. */
static void check_pieces(lm_linear_attention_attr a, int64_t cut, bool steps)
{
    enum { ROWS = 150, MOST = 80 * 25 };
    static float S[4 * 25 * 25], o[ROWS * MOST];
    const int64_t width = a.heads * a.head_dim;
    a.batch = 1;
    a.seq = ROWS;
    a.eps = 1e-6;
    a.state_rows = lm_linear_state_rows(a.feature, a.head_dim);
    kernel_case k = forward_of(&a, NULL);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        instance all;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &all);
        run(&all, lm_cpu_kernel("linear_attention", LM_DTYPE_F32, (lm_cpu_level)level), pool_of(1));
        const float *qkv = all.in[0].data;
        lm_tensor got = all.out[0];
        got.data = o;
        memset(S, 0xff, sizeof S);
        run_piece(a, (lm_cpu_level)level, qkv, 0, cut, S, o);
        if (!steps)
            run_piece(a, (lm_cpu_level)level, qkv, cut, ROWS - cut, S, o + cut * width);
        for (int64_t t = cut; steps && t < ROWS; t++)
            run_piece(a, (lm_cpu_level)level, qkv, t, 1, S, o + t * width);
        assert_true(distance(&got, &all.out[0]) < 1e-5);
        if (level > LM_CPU_REF && !steps && cut % LM_LINEAR_CHUNK == 0)
            assert_memory_equal(o, all.out[0].data, (size_t)(ROWS * width) * sizeof *o);
        drop(&k, &all);
    }
}

static void pieces_make_the_whole(void **state)
{
    (void)state;
    static const int64_t cuts[] = { 1, 2, 63, 64, 65, 128, 149 };
    for (int i = 0; i < 4; i++)
        for (int c = 0; c < 7; c++)
            for (int steps = 0; steps < 2; steps++)
                check_pieces((lm_linear_attention_attr){ .heads = 4,
                                                         .kv_heads = 2,
                                                         .head_dim = 25,
                                                         .scale = 0.3,
                                                         .feature = (lm_feature)(i % 2),
                                                         .decay = i / 2 },
                             cuts[c], steps);
    /* more query heads of a key head than rows of a chunk */
    check_pieces(
        (lm_linear_attention_attr){ .heads = 80, .kv_heads = 1, .head_dim = 8, .scale = 1 }, 64,
        true);
}

/* Results of documents side by side in one sequence are those of each alone, whatever is in front of it. */
static void packed_documents_are_separate(void **state)
{
    (void)state;
    enum { ROWS = 200, D = 20, WIDE = 4 * D };
    static const int32_t start[] = { 0, 3, 64, 65, 130, ROWS };
    static int32_t lo[ROWS];
    static float o[ROWS * 2 * D];
    for (int d = 0; d < 5; d++)
        for (int32_t t = start[d]; t < start[d + 1]; t++)
            lo[t] = start[d];
    for (int i = 0; i < 4; i++)
        for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
            lm_linear_attention_attr a = { .batch = 1,
                                           .seq = ROWS,
                                           .heads = 2,
                                           .kv_heads = 1,
                                           .head_dim = D,
                                           .scale = 0.3,
                                           .eps = 1e-6,
                                           .feature = (lm_feature)(i % 2),
                                           .decay = i / 2 };
            a.state_rows = lm_linear_state_rows(a.feature, D);
            const lm_kernel *k =
                lm_cpu_kernel("linear_attention", LM_DTYPE_F32, (lm_cpu_level)level);
            kernel_case packed = forward_of(&a, lo);
            instance all;
            build(&packed, LM_DTYPE_F32, LM_DTYPE_F32, &all);
            run(&all, k, pool_of(1));
            for (int d = 0; d < 5; d++) {
                lm_linear_attention_attr alone = a;
                alone.seq = start[d + 1] - start[d];
                lm_tensor in = { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { alone.seq, WIDE } };
                lm_tensor out = { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { alone.seq, 2 * D } };
                in.data = (float *)all.in[0].data + start[d] * WIDE;
                out.data = o + start[d] * 2 * D;
                instance one = {
                    .call = { .attr = &alone, .in = &in, .n_in = 1, .out = &out, .n_out = 1 }
                };
                run(&one, k, pool_of(1));
            }
            lm_tensor got = all.out[0];
            got.data = o;
            assert_true(distance(&got, &all.out[0]) < 2e-6);
            drop(&packed, &all);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_shapes),
        cmocka_unit_test(documents),
        cmocka_unit_test(more_threads_than_heads),
        cmocka_unit_test(not_finite),
        cmocka_unit_test(adds_up_by_hand),
        cmocka_unit_test(pieces_make_the_whole),
        cmocka_unit_test(packed_documents_are_separate),
    };
    return cmocka_run_group_tests_name("kernels_linear_attention", tests, NULL, NULL);
}
