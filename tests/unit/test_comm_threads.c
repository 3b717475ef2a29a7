/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_threads.c -- every collective on 1 to 7 thread ranks against a plain definition; groups of groups; the order of sums;
 * and that a rank that fails, hangs or calls something else ends all the others with one reason. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "comm/threads.h"

enum { MOST = 7, N = 1531 };

/* Element i of rank r. */
static double value(int r, size_t i)
{
    return (double)((r * 7919 + (int)i * 104729) % 2003 - 1001);
}

/* In a rank, a difference is an error of that rank: cmocka's checks belong to the main thread. */
#define EXPECT(c)                                                                                \
    do {                                                                                         \
        if (!(c))                                                                                \
            return lm_fail(e, LM_EBUG, "test", NULL, "line %d: %s, rank %d of %d", __LINE__, #c, \
                           lm_comm_rank(c_), lm_comm_size(c_));                                  \
    } while (0)

static const lm_dtype types[] = { LM_DTYPE_F64,  LM_DTYPE_F32, LM_DTYPE_F16,
                                  LM_DTYPE_BF16, LM_DTYPE_I64, LM_DTYPE_I32 };

/* Whole numbers that every type holds exactly, and their sums too. */
static double small(int r, size_t i)
{
    return (double)((r * 5 + (int)i * 3) % 17 - 8);
}

static double combined(int size, size_t i, lm_comm_op op)
{
    double v = small(0, i);

    for (int r = 1; r < size; r++)
        v = op == LM_COMM_SUM   ? v + small(r, i)
            : op == LM_COMM_MAX ? fmax(v, small(r, i))
                                : fmin(v, small(r, i));
    return v;
}

static lm_code reductions(void *ctx, lm_comm *c_, lm_err *e)
{
    int rank = lm_comm_rank(c_), size = lm_comm_size(c_);
    static const size_t lengths[] = { 0, 1, 3, 512, 513, N };
    double in[N], out[N];
    size_t count[MOST];

    (void)ctx;
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (int op = LM_COMM_SUM; op <= LM_COMM_MIN; op++)
            for (size_t k = 0; k < 6; k++) {
                size_t n = lengths[k], first = 0;

                for (size_t i = 0; i < n; i++)
                    lm_set(types[t], in, (int64_t)i, small(rank, i));
                if (lm_comm_all_reduce(c_, in, k % 2 ? in : out, n, types[t], (lm_comm_op)op, e))
                    return e->code;
                for (size_t i = 0; i < n; i++)
                    EXPECT(lm_get(types[t], k % 2 ? in : out, (int64_t)i) ==
                           combined(size, i, (lm_comm_op)op));
                for (size_t i = 0; i < n; i++)
                    lm_set(types[t], in, (int64_t)i, small(rank, i));
                for (int r = 0; r < size; r++) {
                    count[r] = n / (size_t)size + (r == 0 ? n % (size_t)size : 0);
                    first += r < rank ? count[r] : 0;
                }
                if (lm_comm_reduce_scatter(c_, in, out, count, types[t], (lm_comm_op)op, e))
                    return e->code;
                for (size_t i = 0; i < count[rank]; i++)
                    EXPECT(lm_get(types[t], out, (int64_t)i) ==
                           combined(size, first + i, (lm_comm_op)op));
            }
    return LM_OK;
}

static lm_code movements(void *ctx, lm_comm *c_, lm_err *e)
{
    int rank = lm_comm_rank(c_), size = lm_comm_size(c_);
    size_t bytes[MOST], give[MOST], take[MOST], at = 0;
    unsigned char in[64 * MOST], out[64 * MOST];

    (void)ctx;
    for (int r = 0; r < size; r++)
        bytes[r] = (size_t)(r * 5 % 4);
    memset(in, rank + 1, sizeof in);
    if (lm_comm_all_gather(c_, in, out, bytes, e))
        return e->code;
    for (int r = 0; r < size; r++)
        for (size_t i = 0; i < bytes[r]; i++)
            EXPECT(out[at++] == r + 1);
    at = 0;
    for (int r = 0; r < size; r++) {
        give[r] = (size_t)(rank + 2 * r) % 7;
        take[r] = (size_t)(r + 2 * rank) % 7;
        for (size_t i = 0; i < give[r]; i++)
            in[at++] = (unsigned char)(16 * rank + r);
    }
    if (lm_comm_all_to_all(c_, in, give, out, take, e))
        return e->code;
    at = 0;
    for (int r = 0; r < size; r++)
        for (size_t i = 0; i < take[r]; i++)
            EXPECT(out[at++] == 16 * r + rank);
    for (int root = 0; root < size; root++) {
        memset(out, rank == root ? 99 : 0, 8);
        if (lm_comm_broadcast(c_, out, 8, root, e))
            return e->code;
        EXPECT(out[0] == 99 && out[7] == 99);
    }
    return lm_comm_barrier(c_, e);
}

/* A ring, in which each number visits every rank; several messages of a pair keep their order. */
static lm_code ring(void *ctx, lm_comm *c_, lm_err *e)
{
    int rank = lm_comm_rank(c_), size = lm_comm_size(c_), next = (rank + 1) % size,
        last = (rank + size - 1) % size;
    int64_t token = rank, got;

    (void)ctx;
    if (size == 1)
        return LM_OK;
    for (int k = 0; k < size; k++) {
        if (rank % 2 == 0 && lm_comm_send(c_, next, &token, sizeof token, e))
            return e->code;
        if (lm_comm_recv(c_, last, &got, sizeof got, e))
            return e->code;
        if (rank % 2 && lm_comm_send(c_, next, &token, sizeof token, e))
            return e->code;
        token = got;
    }
    EXPECT(token == rank);
    for (int64_t k = 0; k < 20 && rank < 2; k++) {
        if (rank == 0 ? lm_comm_send(c_, 1, &k, sizeof k, e)
                      : lm_comm_recv(c_, 0, &got, sizeof got, e))
            return e->code;
        EXPECT(rank == 0 || got == k);
    }
    return rank < 2 &&
                   (rank == 0 ? lm_comm_send(c_, 1, NULL, 0, e) : lm_comm_recv(c_, 0, NULL, 0, e))
               ? e->code
               : LM_OK;
}

/* Rows and columns of a mesh; a rank without a color; the order of keys. */
static lm_code groups(void *ctx, lm_comm *c_, lm_err *e)
{
    int rank = lm_comm_rank(c_), size = lm_comm_size(c_);
    lm_comm *row = NULL, *column = NULL, *back = NULL;
    int64_t one = rank, sum = 0;

    (void)ctx;
    if (lm_comm_split(c_, rank / 2, 0, &row, e) || lm_comm_split(c_, rank % 2, 0, &column, e) ||
        lm_comm_split(c_, rank == 0 ? -1 : 0, -rank, &back, e))
        return e->code;
    EXPECT(lm_comm_size(row) == (rank / 2 * 2 + 1 < size ? 2 : 1) && lm_comm_rank(row) == rank % 2);
    EXPECT(lm_comm_size(column) == (size + (rank % 2 == 0)) / 2 &&
           lm_comm_rank(column) == rank / 2);
    EXPECT(rank == 0 ? !back
                     : lm_comm_size(back) == size - 1 && lm_comm_rank(back) == size - 1 - rank);
    if (lm_comm_all_reduce(row, &one, &sum, 1, LM_DTYPE_I64, LM_COMM_SUM, e))
        return e->code;
    EXPECT(sum == rank / 2 * 4 * (lm_comm_size(row) == 2) + (lm_comm_size(row) == 2 ? 1 : rank));
    if (lm_comm_all_reduce(column, &one, &sum, 1, LM_DTYPE_I64, LM_COMM_MAX, e))
        return e->code;
    EXPECT(sum == (size - 1) - (size - 1 + rank) % 2);
    lm_comm_free(row);
    lm_comm_free(column);
    lm_comm_free(back);
    return LM_OK;
}

static void test_calls(void **state)
{
    lm_rank_fn *const all[] = { reductions, movements, ring, groups };

    (void)state;
    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
        for (int ranks = 1; ranks <= MOST; ranks++) {
            lm_err e = { 0 };

            if (lm_threads_run(ranks, 60, all[k], NULL, &e))
                fail_msg("call %zu, %d ranks: %s: %s", k, ranks, e.where, e.what);
        }
}

/* ---- the order of sums ---- */

typedef struct {
    int leaves;
    float sum[N];
} sums;

/* Each rank adds its own leaves by a tree of the same kind. */
static lm_code sum_leaves(void *ctx, lm_comm *c_, lm_err *e)
{
    sums *s = ctx;
    int rank = lm_comm_rank(c_), each = s->leaves / lm_comm_size(c_);
    float v[8][N];

    for (int k = 0; k < each; k++)
        for (size_t i = 0; i < N; i++)
            v[k][i] = (float)value(rank * each + k, i) / 977;
    for (int step = 1; step < each; step *= 2)
        for (int k = 0; k + step < each; k += 2 * step)
            for (size_t i = 0; i < N; i++)
                v[k][i] += v[k + step][i];
    if (lm_comm_all_reduce(c_, v[0], v[0], N, LM_DTYPE_F32, LM_COMM_SUM, e))
        return e->code;
    if (rank == lm_comm_size(c_) - 1)
        memcpy(s->sum, v[0], sizeof s->sum);
    return LM_OK;
}

static void test_same_bits(void **state)
{
    static const int ranks[] = { 2, 4, 8, 3, 6 };
    static sums one, more;
    lm_err e = { 0 };

    (void)state;
    for (size_t k = 0; k < 5; k++) {
        one.leaves = more.leaves = ranks[k] % 3 ? 8 : 6;
        assert_int_equal(lm_threads_run(one.leaves, 60, sum_leaves, &one, &e), LM_OK);
        assert_int_equal(lm_threads_run(ranks[k], 60, sum_leaves, &more, &e), LM_OK);
        assert_memory_equal(one.sum, more.sum, sizeof one.sum);
    }
}

/* ---- failures ---- */

static lm_code one_fails(void *ctx, lm_comm *c, lm_err *e)
{
    int *which = ctx;

    if (lm_comm_barrier(c, e))
        return e->code;
    if (lm_comm_rank(c) == *which)
        return lm_fail(e, LM_ENUMERIC, "loss", NULL, "is not finite");
    return lm_comm_barrier(c, e);
}

static lm_code one_hangs(void *ctx, lm_comm *c, lm_err *e)
{
    float x[4] = { 0 };

    (void)ctx;
    if (lm_comm_rank(c) == 1)
        usleep(900000);
    return lm_comm_all_reduce(c, x, x, 4, LM_DTYPE_F32, LM_COMM_SUM, e);
}

static lm_code calls_differ(void *ctx, lm_comm *c, lm_err *e)
{
    float x[4] = { 0 };

    (void)ctx;
    if (lm_comm_rank(c) == 1)
        return lm_comm_barrier(c, e);
    return lm_comm_all_reduce(c, x, x, 4, LM_DTYPE_F32, LM_COMM_SUM, e);
}

static lm_code sizes_differ(void *ctx, lm_comm *c, lm_err *e)
{
    float x[4] = { 0 };

    (void)ctx;
    return lm_comm_all_reduce(c, x, x, lm_comm_rank(c) == 1 ? 3 : 4, LM_DTYPE_F32, LM_COMM_SUM, e);
}

static lm_code messages_differ(void *ctx, lm_comm *c, lm_err *e)
{
    char x[8] = { 0 };

    (void)ctx;
    if (lm_comm_rank(c) > 1)
        return lm_comm_barrier(c, e);
    return lm_comm_rank(c) == 0 ? lm_comm_send(c, 1, x, 8, e) : lm_comm_recv(c, 0, x, 4, e);
}

static lm_code none_sends(void *ctx, lm_comm *c, lm_err *e)
{
    char x = 0;

    (void)ctx;
    return lm_comm_rank(c) == 2 ? lm_comm_recv(c, 0, &x, 1, e) : LM_OK;
}

static lm_code exchanges_differ(void *ctx, lm_comm *c, lm_err *e)
{
    size_t give[3] = { 1, 1, 1 }, take[3] = { 1, 1, 1 };
    char in[3] = { 0 }, out[4];

    (void)ctx;
    take[0] += lm_comm_rank(c) == 2;
    return lm_comm_all_to_all(c, in, give, out, take, e);
}

static void test_failures(void **state)
{
    int which = 2;
    const struct {
        lm_rank_fn *fn;
        lm_code code;
        const char *where, *what;
    } bad[] = {
        { one_fails, LM_ENUMERIC, "rank 2 of 3: loss", "is not finite" },
        { one_hangs, LM_EIO, "all_reduce", "has waited 0.3 s" },
        { calls_differ, LM_EBUG, "rank", "ranks differ" },
        { sizes_differ, LM_EBUG, "rank", "ranks differ" },
        { messages_differ, LM_EBUG, "rank 1 of 3: recv",
          "rank 0 sends 8 bytes to rank 1, which takes 4" },
        { none_sends, LM_EIO, "rank 2 of 3: recv", "has waited 0.3 s" },
        { exchanges_differ, LM_EBUG, "rank 2 of 3: all_to_all",
          "rank 0 gives 1 bytes to rank 2, which takes 2" },
    };

    (void)state;
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++)
        for (int again = 0; again < 5; again++) {
            lm_err e = { 0 };

            assert_int_equal(lm_threads_run(3, 0.3, bad[k].fn, &which, &e), bad[k].code);
            if (!strstr(e.where, bad[k].where) || !strstr(e.what, bad[k].what))
                fail_msg("%s: %s", e.where, e.what);
        }
}

static void test_arguments(void **state)
{
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_threads_run(0, 1, one_fails, NULL, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_threads_run(LM_THREAD_RANKS + 1, 1, one_fails, NULL, &e), LM_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_arguments),
    };
    return cmocka_run_group_tests_name("comm_threads", tests, NULL, NULL);
}
