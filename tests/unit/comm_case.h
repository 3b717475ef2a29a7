/* SPDX-License-Identifier: Apache-2.0 */
/* comm_case.h -- what every transport must do: the work of a rank, and the checks of runs.
 *
 * A runner runs a function on several ranks and returns the error of the first that failed, whose `where` has "rank r of n";
 * what ranks write into ctx is seen by the caller if ctx is shared memory (shared_memory). */
#ifndef LM_TESTS_COMM_CASE_H
#define LM_TESTS_COMM_CASE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/hash.h"
#include "base/mem.h"
#include "comm/lane.h"
#include "comm/threads.h"

typedef lm_code runner(int ranks, double timeout, lm_rank_fn *fn, void *ctx, lm_err *e);

static inline void *shared_memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_ptr_not_equal(p, MAP_FAILED);
    return p;
}

enum { MOST = 7, N = 1531 };

/* Element i of rank r. */
static double value(int r, size_t i)
{
    return (double)((r * 7919 + (int64_t)i * 104729) % 2003 - 1001);
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

/* NaN in some places, and sums that would have other bits if they were rounded after each addition. */
static lm_code extremes(void *ctx, lm_comm *c_, lm_err *e)
{
    static const lm_dtype real[] = { LM_DTYPE_F64, LM_DTYPE_F32, LM_DTYPE_F16, LM_DTYPE_BF16 };
    int rank = lm_comm_rank(c_), size = lm_comm_size(c_);
    double in[3], out[3];

    (void)ctx;
    for (size_t t = 0; t < 4; t++)
        for (int op = LM_COMM_MAX; op <= LM_COMM_MIN; op++) {
            for (int i = 0; i < 3; i++)
                lm_set(real[t], in, i, i == 1 && rank == size - 1 ? (double)NAN : rank);
            if (lm_comm_all_reduce(c_, in, out, 3, real[t], (lm_comm_op)op, e))
                return e->code;
            EXPECT(isnan(lm_get(real[t], out, 1)));
            EXPECT(lm_get(real[t], out, 0) == (op == LM_COMM_MAX ? size - 1 : 0));
            EXPECT(lm_get(real[t], out, 2) == lm_get(real[t], out, 0));
        }
    for (size_t t = 2; t < 4; t++) {
        double big = t == 2 ? 2048 : 256; /* and 1 more is half of the last place */

        lm_set(real[t], in, 0, rank == 0 ? big : rank < 3);
        if (lm_comm_all_reduce(c_, in, out, 1, real[t], LM_COMM_SUM, e))
            return e->code;
        EXPECT(lm_get(real[t], out, 0) == (size < 3 ? big : big + 2));
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

enum { LANE_MESSAGES = 40, LANE_LONGEST = 9000 };

/* Byte k of message number i. */
static inline unsigned char lane_byte(int i, size_t k)
{
    return (unsigned char)(i * 31 + (int)(k % 251));
}

/* Messages of both directions of ranks 0 and 1, which travel while all ranks add up numbers. */
static lm_code run_lanes(lm_comm *c_, lm_lane *out, lm_lane *in, unsigned char *sent,
                         unsigned char *got, lm_err *e)
{
    uint64_t last_out = 0, last_in = 0;
    int64_t one = 1, sum = 0;
    for (int i = 0; i < LANE_MESSAGES && out; i++) {
        const size_t bytes = (size_t)i * 977 % LANE_LONGEST;
        for (size_t k = 0; k < bytes; k++)
            sent[(size_t)i * LANE_LONGEST + k] = lane_byte(i, k);
        if (lm_lane_take(in, got + (size_t)i * LANE_LONGEST, bytes, &last_in, e) ||
            lm_lane_give(out, sent + (size_t)i * LANE_LONGEST, bytes, &last_out, e))
            return e->code;
    }
    for (int i = 0; i < 5; i++) {
        if (lm_comm_all_reduce(c_, &one, &sum, 1, LM_DTYPE_I64, LM_COMM_SUM, e))
            return e->code;
        EXPECT(sum == lm_comm_size(c_));
    }
    if (out && (lm_lane_wait(in, last_in, e) || lm_lane_wait(out, last_out, e)))
        return e->code;
    for (int i = 0; i < LANE_MESSAGES && out; i++)
        for (size_t k = 0; k < (size_t)i * 977 % LANE_LONGEST; k++)
            EXPECT(got[(size_t)i * LANE_LONGEST + k] == lane_byte(i, k));
    return LM_OK;
}

static lm_code lanes(void *ctx, lm_comm *c_, lm_err *e)
{
    const int rank = lm_comm_rank(c_);
    lm_comm *pair[2] = { NULL, NULL };
    lm_lane *lane[2] = { NULL, NULL };
    unsigned char *room = NULL;
    (void)ctx;
    if (lm_comm_size(c_) == 1)
        return LM_OK;
    for (int k = 0; k < 2 && !e->code; k++) /* lane k leads from rank k */
        if (!lm_comm_split(c_, rank < 2 ? 0 : -1, rank, &pair[k], e) && pair[k])
            lm_lane_new(pair[k], 1 - rank, rank == k, &lane[k], e);
    if (!e->code && !lm_alloc_n(&room, 2 * LANE_MESSAGES * LANE_LONGEST, 1, "a test", e))
        run_lanes(c_, lane[rank == 1], lane[rank != 1], room, room + LANE_MESSAGES * LANE_LONGEST,
                  e);
    if (e->code)
        lm_comm_abort(c_, e);
    for (int k = 0; k < 2; k++) {
        lm_lane_free(lane[k]);
        lm_comm_free(pair[k]);
    }
    lm_free(room);
    return e->code;
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

/* ---- failures ---- */

/* Shared by the ranks. */
typedef struct {
    int which;
    atomic_int gave_up;
    atomic_int wrong; /* calls with another result than they must have */
} failing;

static lm_code one_fails(void *ctx, lm_comm *c, lm_err *e)
{
    const failing *f = ctx;

    if (lm_comm_barrier(c, e))
        return e->code;
    if (lm_comm_rank(c) == f->which)
        return lm_fail(e, LM_ENUMERIC, "loss", NULL, "is not finite");
    return lm_comm_barrier(c, e);
}

/* Until the others have lost patience. */
static lm_code one_hangs(void *ctx, lm_comm *c, lm_err *e)
{
    failing *f = ctx;
    float x[4] = { 0 };

    while (lm_comm_rank(c) == 1 && !atomic_load(&f->gave_up))
        usleep(10000);
    lm_comm_all_reduce(c, x, x, 4, LM_DTYPE_F32, LM_COMM_SUM, e);
    atomic_store(&f->gave_up, 1);
    return e->code;
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

static lm_code types_differ(void *ctx, lm_comm *c, lm_err *e)
{
    double x[4] = { 0 };

    (void)ctx;
    return lm_comm_all_reduce(c, x, x, 4, lm_comm_rank(c) == 1 ? LM_DTYPE_F64 : LM_DTYPE_F32,
                              LM_COMM_SUM, e);
}

static lm_code operations_differ(void *ctx, lm_comm *c, lm_err *e)
{
    size_t count[3] = { 1, 1, 1 };
    double x[3] = { 0 }, out;

    (void)ctx;
    return lm_comm_reduce_scatter(c, x, &out, count, LM_DTYPE_F64,
                                  lm_comm_rank(c) == 1 ? LM_COMM_MAX : LM_COMM_SUM, e);
}

/* The others wait already. */
static lm_code one_aborts(void *ctx, lm_comm *c, lm_err *e)
{
    failing *f = ctx;
    lm_err why = { 0 };

    if (lm_comm_rank(c) == f->which) {
        usleep(100000);
        lm_fail(&why, LM_ENUMERIC, "loss", NULL, "is not finite");
        lm_comm_abort(c, &why);
    }
    atomic_fetch_add(&f->wrong, lm_comm_barrier(c, e) != LM_ENUMERIC);
    return e->code;
}

/* The others make no calls. */
static lm_code one_is_seen(void *ctx, lm_comm *c, lm_err *e)
{
    failing *f = ctx;
    lm_err why = { 0 };

    if (lm_comm_barrier(c, e) || lm_comm_look(c, e))
        return lm_fail(e, LM_EBUG, "test", NULL, "has failed too early");
    if (lm_comm_rank(c) == f->which) {
        lm_fail(&why, LM_ENUMERIC, "loss", NULL, "is not finite");
        lm_comm_abort(c, &why);
    }
    for (int i = 0; i < 2000 && !lm_comm_look(c, e); i++)
        usleep(1000);
    atomic_fetch_add(&f->wrong, e->code != LM_ENUMERIC);
    return e->code;
}

static lm_code one_aborts_silently(void *ctx, lm_comm *c, lm_err *e)
{
    const lm_err why = { 0 };

    if (lm_comm_rank(c) == ((failing *)ctx)->which)
        lm_comm_abort(c, &why);
    return lm_comm_barrier(c, e);
}

/* A group of one waits for no other, and still fails. */
static lm_code all_calls_fail(void *ctx, lm_comm *c, lm_err *e)
{
    failing *f = ctx;
    lm_comm *own = NULL;
    lm_err why = { 0 };
    float x = 0;

    if (lm_comm_split(c, lm_comm_rank(c), 0, &own, e) || lm_comm_barrier(c, e))
        return e->code;
    if (lm_comm_rank(c) == f->which) {
        lm_fail(&why, LM_ENUMERIC, "loss", NULL, "is not finite");
        lm_comm_abort(c, &why);
    } else {
        lm_comm_barrier(c, e);
    }
    for (int k = 0; k < 3; k++) {
        lm_err got = { 0 };
        lm_code rc = k == 0   ? lm_comm_barrier(own, &got)
                     : k == 1 ? lm_comm_broadcast(own, &x, sizeof x, 0, &got)
                              : lm_comm_all_reduce(own, &x, &x, 1, LM_DTYPE_F32, LM_COMM_SUM, &got);

        atomic_fetch_add(&f->wrong, rc != LM_ENUMERIC);
    }
    lm_comm_free(own);
    return lm_comm_barrier(c, e);
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

/* ---- the bits of results ---- */

enum { BIG = 70001 };

/* Numbers of all sizes, and their hash after every collective call: equal on every transport. */
static lm_code hash_results(void *ctx, lm_comm *c_, lm_err *e)
{
    static const size_t lengths[] = { 5, 700, 9000, BIG };
    uint64_t *hash = (uint64_t *)ctx + lm_comm_rank(c_), h = 0;
    int rank = lm_comm_rank(c_), size = lm_comm_size(c_);
    size_t count[MOST], bytes[MOST];
    float *in = NULL, *out = NULL;
    lm_code rc = lm_alloc_n(&in, BIG, sizeof *in, "test", e);

    rc = rc ? rc : lm_alloc_n(&out, (size_t)BIG * 2, sizeof *out, "test", e);
    for (size_t k = 0; k < 4 && !rc; k++)
        for (int op = LM_COMM_SUM; op <= LM_COMM_MAX && !rc; op++)
            for (int d = 0; d < 2 && !rc; d++) {
                lm_dtype type = d ? LM_DTYPE_BF16 : LM_DTYPE_F32;
                size_t n = lengths[k], es = lm_dtype_size(type), first = 0;

                for (size_t i = 0; i < n; i++)
                    lm_set(type, in, (int64_t)i, value(rank, i) / 977);
                rc = lm_comm_all_reduce(c_, in, out, n, type, (lm_comm_op)op, e);
                h = lm_hash64(out, n * es, h);
                for (int r = 0; r < size; r++) {
                    count[r] = n / (size_t)size + (r == size - 1 ? n % (size_t)size : 0);
                    bytes[r] = count[r] * es;
                    first += r < rank ? bytes[r] : 0;
                }
                char *mine = (char *)in + first;
                rc = rc ? rc : lm_comm_reduce_scatter(c_, in, mine, count, type, (lm_comm_op)op, e);
                h = lm_hash64(mine, bytes[rank], h);
                rc = rc ? rc : lm_comm_all_gather(c_, mine, out, bytes, e);
                h = lm_hash64(out, n * es, h);
            }
    lm_free(in);
    lm_free(out);
    *hash = h;
    return rc;
}

/* Parts that are written past the cache, with ends of odd sizes. */
static lm_code large_parts(void *ctx, lm_comm *c_, lm_err *e)
{
    enum { PART = (1 << 20) + 1237 };
    int rank = lm_comm_rank(c_), size = lm_comm_size(c_);
    size_t n = (size_t)PART * (size_t)size, count[MOST], bytes[MOST];
    float *in = NULL, *out = NULL, *mine;
    lm_code rc = lm_alloc_n(&in, n, sizeof *in, "test", e);

    (void)ctx;
    rc = rc ? rc : lm_alloc_n(&out, n, sizeof *out, "test", e);
    for (size_t i = 0; i < n && !rc; i++)
        in[i] = (float)(i % 8191) + (float)rank;
    for (int r = 0; r < size; r++)
        count[r] = PART, bytes[r] = PART * sizeof *in;
    mine = out + (size_t)rank * PART;
    rc = rc ? rc : lm_comm_reduce_scatter(c_, in, mine, count, LM_DTYPE_F32, LM_COMM_SUM, e);
    rc = rc ? rc : lm_comm_all_gather(c_, mine, out, bytes, e);
    rc = rc ? rc : lm_comm_all_reduce(c_, in, in, n, LM_DTYPE_F32, LM_COMM_SUM, e);
    for (size_t i = 0; i < n && !rc; i++)
        if (out[i] != (float)(i % 8191) * (float)size + (float)(size * (size - 1) / 2) ||
            in[i] != out[i])
            rc = lm_fail(e, LM_EBUG, "test", NULL, "element %zu: %g, %g", i, out[i], in[i]);
    lm_free(in);
    lm_free(out);
    return rc;
}

/* ---- runs ---- */

/* What each call gives, by this rank's operands. */
static lm_code counts_bytes(void *ctx, lm_comm *c, lm_err *e)
{
    enum { GIVEN = 6 };
    const int rank = lm_comm_rank(c), size = lm_comm_size(c), left = (rank + size - 1) % size;
    double x[GIVEN * MOST] = { 0 }, y[GIVEN * MOST];
    size_t each[MOST], bytes[MOST];
    (void)ctx;
    for (int r = 0; r < size; r++) {
        each[r] = GIVEN;
        bytes[r] = (size_t)(r + 1) * 8;
    }
    const double before = lm_comm_used(c).bytes;
    double give = 0;
    lm_comm_all_reduce(c, x, y, GIVEN, LM_DTYPE_F64, LM_COMM_SUM, e);
    give += GIVEN * 8;
    lm_comm_reduce_scatter(c, x, y, each, LM_DTYPE_F64, LM_COMM_SUM, e);
    give += GIVEN * 8 * size;
    lm_comm_all_gather(c, x, y, bytes, e);
    give += (rank + 1) * 8;
    lm_comm_broadcast(c, x, 40, 0, e);
    give += rank ? 0 : 40;
    if (size > 1 && rank % 2 == 0 && rank + 1 < size) {
        lm_comm_send(c, rank + 1, x, 24, e);
        give += 24;
    } else if (size > 1 && rank % 2) {
        lm_comm_recv(c, left, x, 24, e);
    }
    lm_comm_barrier(c, e);
    const lm_comm_use use = lm_comm_used(c);
    return e->code || (use.bytes - before == give && use.seconds >= 0)
               ? e->code
               : lm_fail(e, LM_EBUG, "use", NULL, "%g bytes of %g", use.bytes - before, give);
}

static inline void check_calls(runner *run, int most, const char *what)
{
    lm_rank_fn *const all[] = {
        reductions, extremes, movements, ring, lanes, groups, counts_bytes
    };

    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
        for (int ranks = 1; ranks <= most; ranks++) {
            lm_err e = { 0 };

            if (run(ranks, 60, all[k], NULL, &e))
                fail_msg("%s, call %zu, %d ranks: %s: %s", what, k, ranks, e.where, e.what);
        }
}

static inline void check_large(runner *run)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        lm_err e = { 0 };

        if (run(ranks, 60, large_parts, NULL, &e))
            fail_msg("%d ranks: %s: %s", ranks, e.where, e.what);
    }
}

/* The same bits as threads, for every number of ranks. */
static inline void check_bits(runner *run, int most, const char *what)
{
    size_t room = MOST * sizeof(uint64_t);
    uint64_t *one = shared_memory(room), *other = shared_memory(room);

    for (int ranks = 2; ranks <= most; ranks++) {
        lm_err e = { 0 };

        assert_int_equal(lm_threads_run(ranks, 60, hash_results, one, &e), LM_OK);
        if (run(ranks, 60, hash_results, other, &e))
            fail_msg("%s, %d ranks: %s: %s", what, ranks, e.where, e.what);
        if (memcmp(one, other, (size_t)ranks * sizeof *one) != 0)
            fail_msg("%s, %d ranks: other bits than threads'", what, ranks);
    }
    munmap(one, room);
    munmap(other, room);
}

static inline void check_leaves(runner *run)
{
    static const int ranks[] = { 2, 4, 8, 3, 6 };
    sums *one = shared_memory(sizeof *one), *more = shared_memory(sizeof *more);
    lm_err e = { 0 };

    for (size_t k = 0; k < 5; k++) {
        one->leaves = more->leaves = ranks[k] % 3 ? 8 : 6;
        assert_int_equal(run(one->leaves, 60, sum_leaves, one, &e), LM_OK);
        assert_int_equal(run(ranks[k], 60, sum_leaves, more, &e), LM_OK);
        assert_memory_equal(one->sum, more->sum, sizeof one->sum);
    }
    munmap(one, sizeof *one);
    munmap(more, sizeof *more);
}

/* timeout: that of the ranks; `times` runs of each.  sizes: the transport names both sizes of what does not fit. */
static inline void check_failures(runner *run, double timeout, int times, bool sizes)
{
    static const struct {
        lm_rank_fn *fn;
        lm_code code;
        const char *rank, *where, *what;
        bool sizes;
    } bad[] = {
        { one_fails, LM_ENUMERIC, "rank 2 of 3", "loss", "is not finite", false },
        { one_hangs, LM_EIO, "", "all_reduce", "rank", false },
        { calls_differ, LM_EBUG, "rank", "", "ranks differ", false },
        { sizes_differ, LM_EBUG, "rank", "", "ranks differ", false },
        { types_differ, LM_EBUG, "rank", "", "ranks differ", false },
        { operations_differ, LM_EBUG, "rank", "", "ranks differ", false },
        { one_aborts, LM_ENUMERIC, "rank 2 of 3", "loss", "is not finite", false },
        { one_is_seen, LM_ENUMERIC, "rank 2 of 3", "loss", "is not finite", false },
        { one_aborts_silently, LM_EBUG, "rank 2 of 3", "abort", "without a reason", false },
        { all_calls_fail, LM_ENUMERIC, "rank 2 of 3", "loss", "is not finite", false },
        { messages_differ, LM_EBUG, "rank 1 of 3", "recv",
          "rank 0 sends 8 bytes to rank 1, which takes 4", true },
        { none_sends, LM_EIO, "", "recv", "rank", false },
        { exchanges_differ, LM_EBUG, "rank 2 of 3", "all_to_all",
          "rank 0 gives 1 bytes to rank 2, which takes 2", true },
    };
    failing *f = shared_memory(sizeof *f);

    f->which = 2;
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++)
        for (int again = 0; again < times; again++) {
            lm_err e = { 0 };

            atomic_store(&f->gave_up, 0);
            atomic_store(&f->wrong, 0);
            assert_int_equal(run(3, timeout, bad[k].fn, f, &e), bad[k].code);
            if (!strstr(e.where, bad[k].rank) || !strstr(e.where, bad[k].where) ||
                ((sizes || !bad[k].sizes) && !strstr(e.what, bad[k].what)))
                fail_msg("case %zu: %s: %s", k, e.where, e.what);
            if (atomic_load(&f->wrong))
                fail_msg("case %zu: %d calls end otherwise", k, atomic_load(&f->wrong));
        }
    munmap(f, sizeof *f);
}

static lm_code agreement(void *ctx, lm_comm *c_, lm_err *e)
{
    char text[200];
    lm_err odd = { 0 };

    (void)ctx;
    if (lm_comm_agree(c_, "version", "0.1.0", e))
        return e->code;
    memset(text, 'x', sizeof text);
    snprintf(text + 150, 50, "%d", lm_comm_rank(c_) == 2);
    EXPECT(lm_comm_agree(c_, "options", lm_comm_rank(c_) == 2 ? "--lr 2" : "--lr 1", &odd) ==
           LM_EUSAGE);
    EXPECT(!strcmp(odd.where, "options") && strstr(odd.what, "rank 2 of 3 on ") &&
           strstr(odd.what, " has --lr 2; rank 0 has --lr 1"));
    odd = (lm_err){ 0 };
    EXPECT(lm_comm_agree(c_, "data", text, &odd) == LM_EUSAGE && strstr(odd.what, "rank 2 of 3"));
    return lm_comm_barrier(c_, e);
}

static inline void check_agreement(runner *run)
{
    lm_err e = { 0 };

    if (run(3, 60, agreement, NULL, &e))
        fail_msg("%s: %s", e.where, e.what);
}

#endif
