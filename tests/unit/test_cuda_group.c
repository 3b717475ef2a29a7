/* SPDX-License-Identifier: Apache-2.0 */
/* Exchanges between devices: their results beside those of lib/comm, recordings of them, and failures. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "cuda_ranks.h"
#include "exchange_case.h"

/* In a rank, a difference is an error of that rank: cmocka's checks belong to the main thread. */
#define EXPECT(c)                                                                                \
    do {                                                                                         \
        if (!(c))                                                                                \
            return lm_fail(e, LM_EBUG, "test", NULL, "line %d: %s, rank %d of %d", __LINE__, #c, \
                           r->l->rank, r->l->size);                                              \
    } while (0)

enum { LONG = 40000 }; /* more than one part, in each type */

/* Numbers whose sums are rounded, of type d. */
static void draw(int rank, lm_dtype d, size_t n, void *out)
{
    const lm_rng rng = lm_rng_make(5, "test", (uint64_t)rank);
    for (size_t i = 0; i < n; i++)
        lm_set(d, out, (int64_t)i,
               (double)lm_rng_below(rng, i, 2000001) * (d == LM_DTYPE_I32 || d == LM_DTYPE_I64
                                                            ? 1
                                                            : 1e-3 * pow(2, (double)(i % 7))) -
                   1e3);
}

typedef struct {
    char *host, *want, *device;
} rooms;

static lm_code open_rooms(const cuda_rank *r, size_t bytes, rooms *m, lm_err *e)
{
    *m = (rooms){ 0 };
    return lm_alloc_n(&m->host, bytes, 1, "a test", e) ||
                   lm_alloc_n(&m->want, bytes, 1, "a test", e) ||
                   r->b->alloc(r->b, bytes, "a test", (void **)&m->device, e)
               ? e->code
               : LM_OK;
}

static void close_rooms(const cuda_rank *r, size_t bytes, rooms *m)
{
    lm_free(m->host);
    lm_free(m->want);
    r->b->free(r->b, m->device, bytes);
}

static lm_code put(const cuda_rank *r, const rooms *m, size_t bytes, lm_err *e)
{
    return r->b->copy(r->b, m->device, m->host, bytes, NULL, e);
}

/* What is on the device, to m->host. */
static lm_code get(const cuda_rank *r, const rooms *m, size_t from, size_t bytes, lm_err *e)
{
    return r->b->copy(r->b, m->host, m->device + from, bytes, NULL, e) || r->b->sync(r->b, NULL, e)
               ? e->code
               : LM_OK;
}

static const lm_dtype types[] = { LM_DTYPE_F64,  LM_DTYPE_F32, LM_DTYPE_F16,
                                  LM_DTYPE_BF16, LM_DTYPE_I64, LM_DTYPE_I32 };

static lm_code check_sum(const cuda_rank *r, const rooms *m, size_t n, lm_dtype d,
                         lm_exchange_op op, lm_err *e)
{
    const size_t bytes = n * lm_dtype_size(d);
    draw(r->l->rank, d, n, m->host);
    if (n > 9 && d == LM_DTYPE_F32 && r->l->rank == 1)
        lm_set(d, m->host, 9, NAN);
    if (put(r, m, bytes, e) || lm_comm_all_reduce(r->c, m->host, m->want, n, d, (lm_comm_op)op, e))
        return e->code;
    r->l->all_reduce(r->l, m->device, m->device, n, d, op);
    if (get(r, m, 0, bytes, e))
        return e->code;
    for (size_t i = 0; i < n; i++)
        if (isnan(lm_get(d, m->want, (int64_t)i)))
            EXPECT(isnan(lm_get(d, m->host, (int64_t)i)));
        else
            EXPECT(lm_get(d, m->want, (int64_t)i) == lm_get(d, m->host, (int64_t)i));
    return LM_OK;
}

static lm_code check_scatter(const cuda_rank *r, const rooms *m, size_t n, lm_dtype d,
                             lm_exchange_op op, bool even, lm_err *e)
{
    size_t count[CUDA_RANKS], first = 0;
    const size_t size = lm_dtype_size(d), ranks = (size_t)r->l->size;
    n = even ? n / ranks * ranks : n;
    for (size_t k = 0; k < ranks; k++) {
        count[k] = even ? n / ranks : k + 1 < ranks ? n / ranks / 2 * k : 0;
        count[ranks - 1] = n - first;
        first += count[k];
    }
    first = 0;
    for (int k = 0; k < r->l->rank; k++)
        first += count[k];
    draw(r->l->rank, d, n, m->host);
    if (put(r, m, n * size, e) ||
        lm_comm_reduce_scatter(r->c, m->host, m->want, count, d, (lm_comm_op)op, e))
        return e->code;
    char *own = m->device + first * size;
    r->l->reduce_scatter(r->l, m->device, own, count, d, op);
    if (get(r, m, first * size, count[r->l->rank] * size, e))
        return e->code;
    EXPECT(!memcmp(m->host, m->want, count[r->l->rank] * size));
    return LM_OK;
}

static lm_code sums(const cuda_rank *r, lm_err *e)
{
    static const size_t lengths[] = { 0, 1, 3, 1000, LONG };
    rooms m;
    if (!open_rooms(r, LONG * sizeof(double), &m, e))
        for (size_t t = 0; t < sizeof types / sizeof *types && !e->code; t++)
            for (int op = LM_EXCHANGE_SUM; op <= LM_EXCHANGE_MIN && !e->code; op++)
                for (size_t k = 0; k < sizeof lengths / sizeof *lengths && !e->code; k++)
                    if (!check_sum(r, &m, lengths[k], types[t], (lm_exchange_op)op, e) &&
                        !check_scatter(r, &m, lengths[k], types[t], (lm_exchange_op)op, false, e))
                        check_scatter(r, &m, lengths[k], types[t], (lm_exchange_op)op, true, e);
    close_rooms(r, LONG * sizeof(double), &m);
    return e->code;
}

/* Parts that do not fit into the scratch. */
static lm_code long_sum(const cuda_rank *r, lm_err *e)
{
    const size_t n = ((size_t)16 << 20) / sizeof(float) + 77;
    rooms m;
    if (!open_rooms(r, n * sizeof(float), &m, e) &&
        !check_sum(r, &m, n, LM_DTYPE_F32, LM_EXCHANGE_SUM, e))
        check_scatter(r, &m, n, LM_DTYPE_F32, LM_EXCHANGE_SUM, false, e);
    close_rooms(r, n * sizeof(float), &m);
    return e->code;
}

/* Rank r gives k + 2 r bytes to rank k, and to rank 1 none. */
static size_t given(int from, int to)
{
    return to == 1 ? 0 : (size_t)(to + 2 * from);
}

static lm_code check_moves(const cuda_rank *r, const rooms *m, lm_err *e)
{
    const int ranks = r->l->size, me = r->l->rank;
    size_t give[CUDA_RANKS], take[CUDA_RANKS], all = 0, part[CUDA_RANKS], at = 0;
    for (int k = 0; k < ranks; k++) {
        give[k] = given(me, k);
        take[k] = given(k, me);
        all += take[k];
        part[k] = (size_t)(3 * k);
        at += k < me ? part[k] : 0;
    }
    for (int i = 0; i < 64; i++)
        m->host[i] = (char)(64 * me + i);
    if (put(r, m, 64, e) || lm_comm_all_to_all(r->c, m->host, give, m->want, take, e))
        return e->code;
    r->l->all_to_all(r->l, m->device, give, m->device + 128, take);
    if (get(r, m, 128, all, e))
        return e->code;
    EXPECT(!memcmp(m->host, m->want, all));
    for (int even = 0; even < 2; even++) {
        for (int k = 0; even && k < ranks; k++)
            part[k] = 5;
        at = 0;
        for (int k = 0; k < me; k++)
            at += part[k];
        if (lm_comm_all_gather(r->c, "0123456789" + me, m->want, part, e) ||
            r->b->copy(r->b, m->device + at, "0123456789" + me, part[me], NULL, e))
            return e->code;
        r->l->all_gather(r->l, m->device + at, m->device, part);
        all = 0;
        for (int k = 0; k < ranks; k++)
            all += part[k];
        if (get(r, m, 0, all, e))
            return e->code;
        EXPECT(!memcmp(m->host, m->want, all));
    }
    memset(m->host, 10 + me, 8);
    if (put(r, m, 8, e))
        return e->code;
    if (me)
        r->l->recv(r->l, me - 1, m->device + 8, 8);
    if (me + 1 < ranks)
        r->l->send(r->l, me + 1, m->device, 8);
    if (get(r, m, 8, 8, e))
        return e->code;
    EXPECT(!me || m->host[7] == 9 + me);
    return LM_OK;
}

static lm_code moves(const cuda_rank *r, lm_err *e)
{
    rooms m;
    if (!open_rooms(r, 256, &m, e))
        check_moves(r, &m, e);
    close_rooms(r, 256, &m);
    return e->code;
}

/* ---- kernels ---- */

static lm_code kernels(const cuda_rank *r, lm_err *e)
{
    exchange_rank x = { 0 };
    if (!exchange_open(r->b, r->l, &x, e))
        exchange_all(&x, r->ctx, e);
    exchange_close(&x);
    return e->code;
}

/* ---- recordings ---- */

typedef struct {
    const cuda_rank *r;
    float *x;
} doubling;

static lm_code twice(void *ctx, lm_err *e)
{
    const doubling *d = ctx;
    (void)e;
    for (int i = 0; i < 2; i++)
        d->r->l->all_reduce(d->r->l, d->x, d->x, 1000, LM_DTYPE_F32, LM_EXCHANGE_SUM);
    return LM_OK;
}

static lm_code recorded(const cuda_rank *r, lm_err *e)
{
    lm_backend *b = r->b;
    lm_recording *rec = NULL;
    rooms m;
    if (!open_rooms(r, 4000, &m, e)) {
        doubling d = { r, (float *)m.device };
        for (int i = 0; i < 1000; i++)
            ((float *)m.host)[i] = 1;
        if (!put(r, &m, 4000, e) && !lm_record(b, twice, &d, &rec, e) &&
            !b->replay(b, rec, b->main, e) && !b->replay(b, rec, b->main, e) &&
            !get(r, &m, 0, 4000, e))
            for (int i = 0; i < 1000 && !e->code; i++)
                if (((float *)m.host)[i] != powf((float)r->l->size, 4))
                    lm_fail(e, LM_EBUG, "test", NULL, "element %d is %g", i,
                            (double)((float *)m.host)[i]);
        if (rec)
            b->recording_free(b, rec);
    }
    close_rooms(r, 4000, &m);
    return e->code;
}

/* ---- tests ---- */

static void run(int ranks, bool deterministic, cuda_rank_fn *fn)
{
    lm_err e = { 0 };
    if (!cuda_has(ranks - 1))
        skip();
    if (cuda_ranks_run(ranks, deterministic, fn, NULL, &e))
        fail_msg("%s: %s", e.where, e.what);
}

static void test_sums(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= CUDA_RANKS; ranks++)
        run(ranks, true, sums);
}

static void test_long_sums(void **state)
{
    (void)state;
    run(3, true, long_sum);
}

static void test_moves(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= CUDA_RANKS; ranks++)
        run(ranks, false, moves);
}

static void test_kernels(void **state)
{
    int made = 0;
    (void)state;
    for (int ranks = 1; ranks <= CUDA_RANKS && cuda_has(ranks - 1); ranks++) {
        lm_err e = { 0 };
        if (cuda_ranks_run(ranks, false, kernels, &made, &e))
            fail_msg("%d ranks: %s: %s", ranks, e.where, e.what);
    }
    assert_true(made > 20);
}

static void test_recordings(void **state)
{
    (void)state;
    for (int deterministic = 0; deterministic < 2; deterministic++)
        run(3, deterministic, recorded);
}

/* ---- failures ---- */

/* Rank 0 does not come. */
static lm_code one_misses(const cuda_rank *r, lm_err *e)
{
    lm_err again = { 0 };
    rooms m;
    if (!open_rooms(r, 64, &m, e)) {
        if (r->l->rank == 0) {
            usleep(100000);
            lm_fail(e, LM_ENUMERIC, "loss", NULL, "is not finite");
            lm_comm_abort(r->c, e);
        } else {
            r->l->all_reduce(r->l, m.device, m.device, 4, LM_DTYPE_F32, LM_EXCHANGE_SUM);
            r->b->sync(r->b, NULL, e);
            if (r->b->sync(r->b, NULL, &again) != e->code || strcmp(again.what, e->what) != 0)
                *(bool *)r->ctx = true;
        }
    }
    close_rooms(r, 64, &m);
    return e->code;
}

static void test_missing(void **state)
{
    lm_err e = { 0 };
    bool wrong = false;
    (void)state;
    if (!cuda_has(1))
        skip();
    assert_int_equal(cuda_ranks_run(2, true, one_misses, &wrong, &e), LM_ENUMERIC);
    assert_non_null(strstr(e.where, "rank 0 of 2"));
    assert_false(wrong);
}

static lm_code no_memory(lm_backend *b, size_t bytes, const char *what, void **out, lm_err *e)
{
    (void)b, (void)bytes, (void)out;
    return lm_fail(e, LM_ELIMIT, what, NULL, "no memory in this test");
}

/* Rank 1 cannot have what it needs for a group: none waits for it. */
static lm_code one_cannot(const cuda_rank *r, lm_err *e)
{
    lm_links *l = NULL;
    lm_err why = { 0 };
    lm_code (*alloc)(lm_backend *, size_t, const char *, void **, lm_err *) = r->b->alloc;
    if (r->l->rank == 1)
        r->b->alloc = no_memory;
    const lm_code rc = lm_links_new(r->b, r->c, NULL, &l, &why);
    r->b->alloc = alloc;
    EXPECT(rc == (r->l->rank == 1 ? LM_ELIMIT : LM_EIO));
    EXPECT(!l);
    EXPECT(!strcmp(why.what, r->l->rank == 1
                                 ? "no memory in this test"
                                 : "another one cannot use its device with the others"));
    /* and the group that there was goes on */
    return lm_links_new(r->b, r->c, NULL, &l, e) ? e->code : (lm_links_free(r->b, l), LM_OK);
}

static void test_unready(void **state)
{
    (void)state;
    run(3, false, one_cannot);
}

/* The library finds that a call has failed. */
static lm_code one_fails(const cuda_rank *r, lm_err *e)
{
    rooms m;
    if (!open_rooms(r, 64, &m, e)) {
        r->l->all_reduce(r->l, m.device, m.device, 4, LM_DTYPE_F32, LM_EXCHANGE_SUM);
        r->b->sync(r->b, NULL, e);
    }
    close_rooms(r, 64, &m);
    return e->code;
}

static void test_failing(void **state)
{
    lm_err e = { 0 };
    void (*fail_at)(uint64_t) = NULL;
    (void)state;
    if (!cuda_has(1))
        skip();
    *(void **)&fail_at = emu_symbol("lm_emu_nccl_fail");
    if (!fail_at)
        skip();
    fail_at(1);
    assert_int_equal(cuda_ranks_run(2, false, one_fails, NULL, &e), LM_EIO);
    fail_at(0);
    assert_non_null(strstr(e.what, "remote process exited"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),       cmocka_unit_test(test_long_sums),
        cmocka_unit_test(test_moves),      cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_recordings), cmocka_unit_test(test_missing),
        cmocka_unit_test(test_failing),    cmocka_unit_test(test_unready),
    };
    cuda_ranks_set();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
