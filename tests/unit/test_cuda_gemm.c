/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products, single and in batches, on every path of the CUDA backend, against sums in
 * double: transposes, pitches, ragged shapes, shapes for each variant of the plain path, misaligned
 * pointers, functions and sums joined to a product, the same bits in any order of threads. */
#include "gemm_case.h"

/* Every transpose and type, with and without accumulation and bias, with pitches and alignments
 * that allow reads of packs and with others, on each path. */
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

/* Shapes of the other variants of the plain path. */
static void test_ways(void **state)
{
    static const float some;
    static const struct {
        int64_t m, n, k;
        bool ta, tb;
        int type;
    } cases[] = {
        { 1, 4099, 40, false, true, 1 },     /* four columns to a warp */
        { 2, 4096, 72, false, true, 0 },     /* the same, packed */
        { 7, 4101, 24, false, true, 4 },     /* up to 8 rows */
        { 4, 40, 600, false, true, 2 },      /* several rounds of the lanes */
        { 40, 24, 700, true, false, 0 },     /* k in parts, the last one short */
        { 9, 70, 1541, false, true, 1 },     /* likewise into BF16 */
        { 1030, 2055, 20, false, false, 0 }, /* tiles of 128 x 128, several bands */
        { 1088, 2048, 16, true, false, 3 },  /* the same in F16, packed */
        { 1024, 2048, 24, false, true, 1 },  /* whole tiles of both, with a bias */
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
                             .bias = i % 3 ? &some : NULL,
                             .accumulate = i % 2 },
                      .odd_bias = i % 3 == 1,
                      .once = cases[i].m > 1000 };
        p.tol = allowed(p.g.ab, p.g.cd, "plain");
        check_product(&p);
    }
    lm_backend_close(device);
}

/* An F32 sum over a long k is as exact as one over a short k, because parts are added to C. */
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

/* Batches for each variant of the plain path, with pitches between their matrices; one B for all;
 * batches larger than one launch. */
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

static void test_functions(void **state)
{
    (void)state;
    for (int path = 0; path < 3; path++) {
        open_path(paths[path]);
        walk_functions(paths[path]);
        close_path(paths[path]);
    }
}

/* The other variants of the plain path: four columns to a warp, k in parts, tiles of 128 x 128,
 * parts in F32 added to C before the function. */
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

static void test_sums(void **state)
{
    (void)state;
    for (int path = 0; path < 3; path++) {
        open_path(paths[path]);
        walk_sums(paths[path]);
        close_path(paths[path]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small),     cmocka_unit_test(test_ways),
        cmocka_unit_test(test_long_k),    cmocka_unit_test(test_batches),
        cmocka_unit_test(test_functions), cmocka_unit_test(test_functions_ways),
        cmocka_unit_test(test_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
