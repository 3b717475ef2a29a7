/* SPDX-License-Identifier: Apache-2.0 */
/* portions.c -- which elements of a dimension each of several ranks holds. */
#include "numeric/portions.h"

/* Run number i; without runs, the whole dimension is one. */
static struct lm_portions_run run_at(const lm_portions *p, int i, int64_t len)
{
    return p->n ? p->run[i] : (struct lm_portions_run){ 1, len, 1 };
}

static int runs(const lm_portions *p)
{
    return p->n ? p->n : 1;
}

/* Begin of range `at` of `n` ranges over `len`.  No product overflows. */
static int64_t range_begin(int64_t len, int64_t at, int64_t n)
{
    return len / n * at + len % n * at / n;
}

/* What a rank holds of a piece, relative to its begin. */
static lm_range share_of(const lm_portions *p, const struct lm_portions_run *r, int ranks, int rank)
{
    int64_t units = r->size / r->unit, from = range_begin(units, rank, ranks);
    if (p->n && units < ranks)
        return (lm_range){ from * r->unit, r->unit };
    return (lm_range){ from * r->unit, (range_begin(units, rank + 1, ranks) - from) * r->unit };
}

/* The ranges of a rank in each piece, and number `half` of them, relative to its begin. */
static int ranges(const lm_portions *p)
{
    return p->ends ? 2 : 1;
}

static lm_range range_of(const lm_portions *p, const struct lm_portions_run *r, int ranks, int rank,
                         int64_t half)
{
    const int64_t each = r->size / r->unit / (2 * (int64_t)ranks) * r->unit;
    if (!p->ends)
        return share_of(p, r, ranks, rank);
    return (lm_range){ (half ? 2 * (int64_t)ranks - 1 - rank : rank) * each, each };
}

bool lm_portions_fit(const lm_portions *p, int64_t len)
{
    int64_t sum = 0;
    if (p->n < 0 || p->n > LM_PORTIONS_RUNS)
        return false;
    for (int i = 0; i < p->n; i++) {
        const struct lm_portions_run *r = &p->run[i];
        if (r->times < 1 || r->unit < 1 || r->size < r->unit || r->size % r->unit ||
            r->times > (len - sum) / r->size)
            return false;
        sum += r->times * r->size;
    }
    return p->n ? sum == len : !p->ends;
}

bool lm_portions_serve(const lm_portions *p, int64_t len, int ranks, bool even, bool shared)
{
    for (int i = 0; i < runs(p); i++) {
        struct lm_portions_run r = run_at(p, i, len);
        int64_t units = r.size / r.unit;
        if (p->ends && units % (2 * (int64_t)ranks))
            return false;
        if (units < ranks ? !shared || !p->n || units < 1 || ranks % units : even && units % ranks)
            return false;
    }
    return true;
}

bool lm_portions_shared(const lm_portions *p, int ranks)
{
    for (int i = 0; i < p->n; i++)
        if (p->run[i].size / p->run[i].unit < ranks)
            return true;
    return false;
}

int64_t lm_portions_count(const lm_portions *p, int64_t len, int ranks, int rank)
{
    int64_t sum = 0;
    for (int i = 0; i < runs(p); i++) {
        struct lm_portions_run r = run_at(p, i, len);
        sum += ranges(p) * r.times * range_of(p, &r, ranks, rank, 0).count;
    }
    return sum;
}

bool lm_portions_at(const lm_portions *p, int64_t len, int ranks, int rank, int64_t k,
                    lm_range *out)
{
    int64_t begin = 0;
    for (int i = 0; i < runs(p); i++) {
        struct lm_portions_run r = run_at(p, i, len);
        if (k < ranges(p) * r.times) {
            *out = range_of(p, &r, ranks, rank, k % ranges(p));
            out->from += begin + k / ranges(p) * r.size;
            return true;
        }
        k -= ranges(p) * r.times;
        begin += r.times * r.size;
    }
    return false;
}

/* The next range that is not empty, joined with those that begin where it ends; *k moves behind it. */
static bool next_range(const lm_portions *p, int64_t len, int ranks, int rank, int64_t *k,
                       lm_range *out)
{
    lm_range more;
    *out = (lm_range){ 0 };
    for (; lm_portions_at(p, len, ranks, rank, *k, &more); ++*k) {
        if (out->count && more.count && more.from != out->from + out->count)
            return true;
        if (!out->count)
            *out = more;
        else
            out->count += more.count;
    }
    return out->count > 0;
}

/* One piece of which each rank holds as much: the units do not matter. */
static bool is_even(const lm_portions *p, int64_t len, int ranks)
{
    const struct lm_portions_run r = run_at(p, 0, len);
    return !p->ends && runs(p) == 1 && r.times == 1 && r.size / r.unit % ranks == 0;
}

static bool same_runs(const lm_portions *a, const lm_portions *b)
{
    bool same = a->n == b->n && a->ends == b->ends;
    for (int i = 0; same && i < a->n; i++)
        same = a->run[i].times == b->run[i].times && a->run[i].size == b->run[i].size &&
               a->run[i].unit == b->run[i].unit;
    return same;
}

bool lm_portions_same(const lm_portions *a, const lm_portions *b, int64_t len, int ranks)
{
    if (same_runs(a, b) || (is_even(a, len, ranks) && is_even(b, len, ranks)))
        return true;
    for (int rank = 0; rank < ranks; rank++) {
        int64_t i = 0, k = 0;
        lm_range x, y;
        for (bool more = true; more;) {
            more = next_range(a, len, ranks, rank, &i, &x);
            if (more != next_range(b, len, ranks, rank, &k, &y))
                return false;
            if (more && (x.from != y.from || x.count != y.count))
                return false;
        }
    }
    return true;
}
