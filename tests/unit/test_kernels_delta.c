/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule: every level's chunks against the recurrence, also where documents begin on and beside the borders of
 * chunks; and what the recurrence recalls, worked out by hand. */
#include "kernel_case.h"

#include "kernels/delta.h"
#include "numeric/kv_format.h"

enum { MOST_ROWS = 2 * 300, MOST_HEADS = 8 };

/* Gives of a call: decays, corrections and documents of rows. */
typedef struct {
    double g[MOST_ROWS * MOST_HEADS], beta[MOST_ROWS * MOST_HEADS];
    int32_t lo[MOST_ROWS];
} gates;

/* Documents begin at the rows of `start`, which ends with a negative number; NULL: one. */
static void fill_gates(gates *x, const lm_delta_attr *a, double decay, const int *start)
{
    for (int64_t i = 0; i < a->batch * a->seq * a->heads; i++) {
        lm_u32x4 u = lm_philox((uint64_t)i, 0, 11);
        x->g[i] = -decay * u.v[0] * 0x1p-32;
        x->beta[i] = u.v[1] * 0x1p-32;
    }
    for (int64_t i = 0; i < a->batch * a->seq; i++) {
        x->lo[i] = 0;
        for (const int *s = start; s && *s >= 0; s++)
            if (*s <= i % a->seq)
                x->lo[i] = *s;
    }
}

static kernel_case forward_of(const lm_delta_attr *a, const gates *x, bool documents)
{
    int64_t n = a->batch * a->seq, width = 2 * a->key_heads * a->key_dim + a->heads * a->value_dim;
    kernel_case k = { .op = "delta", .attr = a, .tol_f32 = 1e-5, .tol_bf16 = 1e-2 };
    k.in[0] = mat(ACT, n, width);
    k.in[1] = given(mat(F32, n, a->heads), x->g);
    k.in[2] = given(mat(F32, n, a->heads), x->beta);
    if (documents)
        k.in[3] = given(vec(I32, n), x->lo);
    k.out[0] = mat(ACT, n, a->heads * a->value_dim);
    k.out[1] = mat(F32, a->batch * a->chunks, a->heads * a->key_dim * a->value_dim);
    return k;
}

static void check_both(lm_delta_attr a, double decay, const int *start)
{
    static gates x;
    a.chunks = lm_delta_chunks(a.seq);
    a.eps = 1e-6;
    fill_gates(&x, &a, decay, start);
    kernel_case f = forward_of(&a, &x, start), b = f;
    instance y;
    check_case(&f);
    build(&f, LM_DTYPE_F64, LM_DTYPE_BF16, &y);
    run(&y, lm_cpu_kernel("delta", LM_DTYPE_F64, LM_CPU_REF), NULL);
    b.op = "delta_dx";
    b.in[0] = f.out[0];
    memcpy(&b.in[1], f.in, 3 * sizeof *f.in);
    b.in[4] = given(f.out[1], y.out[1].data);
    b.in[5] = f.in[3];
    b.out[0] = f.in[0];
    b.out[1] = f.in[1];
    b.out[2] = f.in[2];
    b.out[1].data = b.out[2].data = NULL;
    check_case(&b);
    drop(&f, &y);
}

static void all_shapes(void **state)
{
    (void)state;
    const int64_t dims[][2] = { { 1, 1 }, { 16, 32 }, { 33, 20 }, { 64, 64 }, { 128, 128 } };
    const int64_t heads[][2] = { { 1, 1 }, { 4, 2 }, { 3, 1 } };
    for (int i = 0; i < 5; i++)
        for (int64_t seq = 1; seq < 300; seq = 2 * seq + 1)
            check_both((lm_delta_attr){ .batch = 1 + i % 2,
                                        .seq = seq,
                                        .heads = heads[i % 3][0],
                                        .key_heads = heads[i % 3][1],
                                        .key_dim = dims[i][0],
                                        .value_dim = dims[i][1],
                                        .scale = 0.3 },
                       0.2, NULL);
}

static void documents(void **state)
{
    (void)state;
    static const int starts[][8] = { { 64, -1 },           { 63, 65, -1 },
                                     { 1, 2, 3, 128, -1 }, { 127, 129, 192, 193, 199, -1 },
                                     { 10, -1 },           { 64, 128, 192, -1 } };
    for (int i = 0; i < 6; i++)
        check_both((lm_delta_attr){ .batch = 2,
                                    .seq = 200,
                                    .heads = 2,
                                    .key_heads = 1,
                                    .key_dim = 24,
                                    .value_dim = 40,
                                    .scale = 1 },
                   0.1, starts[i]);
}

/* Decays from none to all at once: differences of sums of them must not overflow. */
static void decays(void **state)
{
    (void)state;
    for (double decay = 0; decay <= 200; decay = 5 * decay + 0.01)
        check_both((lm_delta_attr){ .batch = 1,
                                    .seq = 150,
                                    .heads = 2,
                                    .key_heads = 2,
                                    .key_dim = 16,
                                    .value_dim = 16,
                                    .scale = 1 },
                   decay, (const int[]){ 100, -1 });
}

/* Rows write 10 at key 1, 20 at key 2, then 30 at key 1, and read keys 1, 2, 1.  Without decay and with whole corrections a
 * key's new value replaces its old one and leaves the other alone; with half of one the mean of both is there. */
static void recalls_what_was_written(void **state)
{
    (void)state;
    lm_delta_attr a = { .batch = 1,
                        .seq = 3,
                        .chunks = 1,
                        .heads = 1,
                        .key_heads = 1,
                        .key_dim = 2,
                        .value_dim = 1,
                        .scale = 0.5 };
    const double rows[] = { 7, 0, 3, 0, 10, /**/ 0, 2, 0, 5, 20, /**/ 1, 0, 4, 0, 30 };
    static const double wants[2][3] = { { 5, 10, 15 }, { 5, 10, 10 } };
    for (int half = 0; half < 2; half++) {
        gates x = { .g = { 0 }, .beta = { 1, 1, half ? 0.5 : 1 } };
        kernel_case k = forward_of(&a, &x, false);
        instance y;
        k.in[0] = given(k.in[0], rows);
        build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &y);
        run(&y, lm_cpu_kernel("delta", LM_DTYPE_F64, LM_CPU_REF), NULL);
        for (int t = 0; t < 3; t++)
            assert_float_equal(lm_get(LM_DTYPE_F64, y.out[0].data, t), wants[half][t], 1e-12);
        drop(&k, &y);
    }
}

/* What is kept decays by exp(g) a row, and nothing passes to the next document. */
static void forgets(void **state)
{
    (void)state;
    lm_delta_attr a = { .batch = 1,
                        .seq = 4,
                        .chunks = 1,
                        .heads = 1,
                        .key_heads = 1,
                        .key_dim = 1,
                        .value_dim = 1,
                        .scale = 1 };
    const double rows[] = { 1, 1, 8, 1, 1, 0, 1, 1, 0, 1, 1, 0 };
    gates x = { .g = { 0, log(0.5), log(0.25), 0 }, .beta = { 1, 0, 0, 0 }, .lo = { 0, 0, 0, 3 } };
    kernel_case k = forward_of(&a, &x, true);
    instance y;
    k.in[0] = given(k.in[0], rows);
    build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("delta", LM_DTYPE_F64, LM_CPU_REF), NULL);
    const double want[] = { 8, 4, 1, 0 };
    for (int t = 0; t < 4; t++)
        assert_float_equal(lm_get(LM_DTYPE_F64, y.out[0].data, t), want[t], 1e-6);
    drop(&k, &y);
}

/* A decay of -inf leaves what a new document would have, in the chunks of every level, too. */
static void forgets_all(void **state)
{
    (void)state;
    static gates x, y;
    lm_delta_attr a = { .batch = 1,
                        .seq = 100,
                        .chunks = 2,
                        .heads = 1,
                        .key_heads = 1,
                        .key_dim = 8,
                        .value_dim = 8,
                        .scale = 1,
                        .eps = 1e-6 };
    fill_gates(&x, &a, 0.1, (const int[]){ 70, -1 });
    fill_gates(&y, &a, 0.1, NULL);
    y.g[70] = -INFINITY;
    kernel_case k = forward_of(&a, &x, true), f = forward_of(&a, &y, false);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        instance want, got;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &want);
        build(&f, LM_DTYPE_F32, LM_DTYPE_F32, &got);
        run(&want, lm_cpu_kernel("delta", LM_DTYPE_F32, (lm_cpu_level)level), pool_of(1));
        run(&got, lm_cpu_kernel("delta", LM_DTYPE_F32, (lm_cpu_level)level), pool_of(1));
        assert_true(distance(&got.out[0], &want.out[0]) < 1e-6);
        drop(&k, &want);
        drop(&f, &got);
    }
}

/* Rows of one sequence from `at` on through delta_cached, at a level; f: the state is codes. */
static void run_piece_as(lm_delta_attr a, lm_cpu_level level, const instance *all, int64_t at,
                         int64_t n, const lm_kv_format *f, void *S, float *o)
{
    int32_t used = (int32_t)at, fresh = (int32_t)n;
    int64_t width = 2 * a.key_heads * a.key_dim + a.heads * a.value_dim;
    const float *qkv = all->in[0].data, *g = all->in[1].data, *beta = all->in[2].data;
    a.seq = n;
    a.chunks = 0;
    lm_tensor in[8] = {
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { n, width } },
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { n, a.heads } },
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { n, a.heads } },
        { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { 1 }, .data = &used },
        { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { 1 }, .data = &fresh },
    };
    lm_tensor out[2] = {
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { n, a.heads * a.value_dim }, .data = o },
        { .dtype = LM_DTYPE_F32,
          .ndim = 4,
          .dim = { 1, a.heads, a.key_dim, a.value_dim },
          .kv = f,
          .data = S }
    };
    in[0].data = (void *)(uintptr_t)(qkv + at * width);
    in[1].data = (void *)(uintptr_t)(g + at * a.heads);
    in[2].data = (void *)(uintptr_t)(beta + at * a.heads);
    instance i = { .call = { .attr = &a, .in = in, .n_in = 8, .out = out, .n_out = 2 } };
    run(&i, lm_cpu_kernel("delta_cached", LM_DTYPE_F32, level), pool_of(2));
}

static void run_piece(lm_delta_attr a, lm_cpu_level level, const instance *all, int64_t at,
                      int64_t n, float *S, float *o)
{
    run_piece_as(a, level, all, at, n, NULL, S, o);
}

/* With codes a call decodes the state, runs, and encodes it: at every level the bits of these three by themselves, for a
 * prompt and the tokens behind it. */
static void coded_states(void **state)
{
    (void)state;
    enum { ROWS = 80, H = 4, D = 32, E = 48, PROMPT = 70 };
    static const lm_kv_format formats[] = {
        { .name = "int8", .bits = 8, .levels = LM_KV_SYM, .scale = LM_DTYPE_F32 },
        { .name = "fp8",
          .bits = 8,
          .levels = LM_KV_FLOAT8,
          .float8 = LM_DTYPE_F8E4M3,
          .group = 16,
          .scale = LM_DTYPE_F16 },
        { .name = "int4", .bits = 4, .levels = LM_KV_ASYM, .group = 16, .scale = LM_DTYPE_F16 },
    };
    static float S[H * D * E], o[2][ROWS * H * E];
    static char codes[2][H * D * E * 4] __attribute__((aligned(64)));
    static gates x;
    lm_delta_attr a = { .batch = 1,
                        .seq = ROWS,
                        .chunks = 2,
                        .heads = H,
                        .key_heads = 2,
                        .key_dim = D,
                        .value_dim = E,
                        .scale = 0.3,
                        .eps = 1e-6 };
    fill_gates(&x, &a, 0.2, NULL);
    kernel_case k = forward_of(&a, &x, false);
    instance all;
    build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &all);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++)
        for (int i = 0; i < 3; i++) {
            const lm_kv_format *f = &formats[i];
            const size_t page = lm_kv_page_bytes(f, D, E);
            memset(codes, 0x5a, sizeof codes); /* is not read before it is written */
            memset(S, 0xff, sizeof S);
            for (int64_t at = 0, n = PROMPT; at < ROWS; at += n, n = 1) {
                run_piece_as(a, (lm_cpu_level)level, &all, at, n, f, codes[0], o[0]);
                for (int64_t h = 0; h < H && at; h++)
                    lm_kv_decode(f, D, E, h, codes[1] + (size_t)h * page, 0, D, S + h * D * E, E);
                run_piece(a, (lm_cpu_level)level, &all, at, n, S, o[1]);
                for (int64_t h = 0; h < H; h++)
                    lm_kv_encode(f, D, E, h, S + h * D * E, E, 0, D, NULL,
                                 codes[1] + (size_t)h * page);
                assert_memory_equal(o[0], o[1], (size_t)(n * H * E) * sizeof(float));
                assert_memory_equal(codes[0], codes[1], H * page);
            }
        }
    drop(&k, &all);
}

/* Chunks, steps, and steps behind chunks give what one call gives; a cut between chunks gives the same bits; the state is not
 * read before it is written. */
static void pieces_make_the_whole(void **state)
{
    (void)state;
    enum { ROWS = 150, WIDTH = 4 * 20 };
    static const int64_t cuts[] = { 1, 2, 63, 64, 65, 128, 149 };
    static float S[4 * 24 * 20], o[ROWS * WIDTH];
    static gates x;
    lm_delta_attr a = { .batch = 1,
                        .seq = ROWS,
                        .chunks = 3,
                        .heads = 4,
                        .key_heads = 2,
                        .key_dim = 24,
                        .value_dim = 20,
                        .scale = 0.3,
                        .eps = 1e-6 };
    fill_gates(&x, &a, 0.2, NULL);
    kernel_case k = forward_of(&a, &x, false);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        instance all;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &all);
        run(&all, lm_cpu_kernel("delta", LM_DTYPE_F32, (lm_cpu_level)level), pool_of(1));
        lm_tensor got = all.out[0];
        got.data = o;
        for (int c = 0; c < 7; c++)
            for (int steps = 0; steps < 2; steps++) {
                memset(S, 0xff, sizeof S);
                run_piece(a, (lm_cpu_level)level, &all, 0, cuts[c], S, o);
                if (!steps)
                    run_piece(a, (lm_cpu_level)level, &all, cuts[c], ROWS - cuts[c], S,
                              o + cuts[c] * WIDTH);
                for (int64_t t = cuts[c]; steps && t < ROWS; t++)
                    run_piece(a, (lm_cpu_level)level, &all, t, 1, S, o + t * WIDTH);
                assert_true(distance(&got, &all.out[0]) < 1e-5);
                if (level > LM_CPU_REF && !steps && cuts[c] % LM_DELTA_CHUNK == 0)
                    assert_memory_equal(o, all.out[0].data, sizeof o);
            }
        drop(&k, &all);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_shapes),
        cmocka_unit_test(documents),
        cmocka_unit_test(decays),
        cmocka_unit_test(recalls_what_was_written),
        cmocka_unit_test(forgets),
        cmocka_unit_test(forgets_all),
        cmocka_unit_test(pieces_make_the_whole),
        cmocka_unit_test(coded_states),
    };
    return cmocka_run_group_tests_name("kernels_delta", tests, NULL, NULL);
}
