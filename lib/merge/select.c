/* SPDX-License-Identifier: Apache-2.0 */
/* select.c -- see select.h. */
#include "merge/select.h"

#include <math.h>
#include <stdatomic.h>

enum {
    RUN = 64,         /* consecutive elements of a sample */
    SAMPLE = 1 << 16, /* a larger one costs more than its narrower bracket saves */
    LISTED = 1 << 17, /* up to this size all are listed */
    BUCKET_BITS = 11,
    BUCKETS = 1 << BUCKET_BITS,
};
static const uint64_t FIRST = UINT64_C(1)
                              << 62; /* the key of index 0; later ones have smaller keys */

/* The search for one threshold. */
typedef struct {
    lm_merge_top *top;
    uint64_t lo, hi;        /* the k-th largest lies in [lo, hi) */
    int64_t room;           /* of list */
    lm_blend_entry *list;   /* those of [lo, hi) */
    _Atomic int64_t listed; /* more than its capacity: the list is incomplete */
    _Atomic int64_t above;  /* >= hi */
    int shift;              /* of a bucket's width */
    bool done;
} search;

typedef struct {
    const lm_merge_values *v;
    search *of;
    int n, threads;
    void *cells;            /* v->rows + v->extra rows per worker */
    lm_blend_entry *picked; /* one block of them per worker */
    uint32_t *count;        /* [worker][search][BUCKETS] */
    int64_t *equal;         /* [chunk][search] */
} selection;

static uint64_t end_of_bits(const lm_blend *b)
{
    return b->real == 8 ? UINT64_C(1) << 63 : UINT64_C(1) << 31;
}

static void *values_at(const selection *s, int64_t at, int64_t n, int worker)
{
    const lm_merge_values *v = s->v;
    void *cells = lm_merge_cells_of(s->cells, v->rows + v->extra, worker);
    v->fill(v->ctx, at, n, cells, lm_merge_cell(v->loops, cells, v->rows));
    return cells;
}

static bool before(lm_blend_entry a, lm_blend_entry b)
{
    return a.bits > b.bits || (a.bits == b.bits && a.index < b.index);
}

/* Put the entry of rank r (0: the largest) at list[r], larger ones before it (Hoare's FIND; the
 * pivot's position is hashed from the bounds, so no order of the input is slow). */
static lm_blend_entry select_rank(lm_blend_entry *list, int64_t n, int64_t r)
{
    int64_t lo = 0, hi = n - 1;
    while (lo < hi) {
        uint64_t h = (uint64_t)(lo * 31 + hi) * UINT64_C(0x9E3779B97F4A7C15) >> 32;
        lm_blend_entry pivot = list[lo + (int64_t)(h % (uint64_t)(hi - lo + 1))];
        int64_t i = lo, k = hi;
        while (i <= k) {
            while (before(list[i], pivot))
                i++;
            while (before(pivot, list[k]))
                k--;
            if (i <= k) {
                lm_blend_entry t = list[i];
                list[i++] = list[k];
                list[k--] = t;
            }
        }
        if (r <= k)
            hi = k;
        else if (r >= i)
            lo = i;
        else
            break;
    }
    return list[r];
}

/* The order of entries: by the bits, among equal ones by the index. */
static uint64_t key_of(const lm_blend_entry *e, bool by_place)
{
    return by_place ? FIRST - (uint64_t)e->index : e->bits;
}

/* The bucket, 2^shift wide and counted from lo on, that holds rank r (0: the largest) among the
 * keys of [lo, hi); r becomes the rank in it.  Neighbours are often equal, so they are counted in
 * separate tables. */
static uint64_t bucket_of(const lm_blend_entry *list, int64_t n, bool by_place, uint64_t lo,
                          uint64_t hi, int shift, int64_t *r)
{
    int64_t count[4][BUCKETS] = { { 0 } };
    uint64_t bucket = BUCKETS;
    for (int64_t i = 0; i < n; i++) {
        uint64_t k = key_of(&list[i], by_place) - lo; /* below lo it wraps to a large number */
        if (k < hi - lo)
            count[i % 4][k >> shift]++;
    }
    for (int64_t here = 0;; *r -= here) {
        bucket--;
        here = count[0][bucket] + count[1][bucket] + count[2][bucket] + count[3][bucket];
        if (*r < here)
            return bucket;
    }
}

static int shift_for(uint64_t width)
{
    int shift = 0;
    while ((width - 1) >> shift >= BUCKETS)
        shift++;
    return shift;
}

/* The same for a list of bits in [lo, hi) and indices below `places`, in any order afterwards: a
 * long list is reduced to the bucket that holds rank r, which is moved to the front. */
static lm_blend_entry nth(lm_blend_entry *list, int64_t n, int64_t r, uint64_t lo, uint64_t hi,
                          int64_t places)
{
    bool by_place = false;
    while (n > BUCKETS) {
        if (hi - lo == 1 && !by_place) {
            by_place = true;
            lo = FIRST - (uint64_t)places + 1;
            hi = FIRST + 1;
        }
        int shift = shift_for(hi - lo);
        uint64_t bucket = bucket_of(list, n, by_place, lo, hi, shift, &r);
        int64_t front = 0;
        for (int64_t i = 0; i < n; i++) {
            lm_blend_entry t = list[i];
            list[i] = list[front];
            list[front] = t;
            front += (key_of(&t, by_place) - lo) >> shift == bucket;
        }
        n = front;
        lo += bucket << shift;
        hi = lo + (UINT64_C(1) << shift);
    }
    return select_rank(list, n, r);
}

/* Evenly spread runs, each at a random position of its span. */
static void sample_runs(void *ctx, int64_t begin, int64_t end, int worker)
{
    const selection *s = ctx;
    const lm_blend *b = s->v->loops;
    int64_t count = s->v->job->count, stretch = count / (SAMPLE / RUN);
    lm_rng r = lm_rng_make(0, "merge sample", 0);
    uint64_t bits[RUN];
    for (int64_t i = begin; i < end; i++) {
        int64_t at =
            i * stretch + (int64_t)lm_rng_below(r, (uint64_t)i, (uint64_t)(stretch - RUN + 1));
        void *cells = values_at(s, at, RUN, worker);
        for (int t = 0; t < s->n; t++) {
            b->bits(lm_merge_cell(b, cells, s->of[t].top->row), bits, RUN);
            for (int k = 0; k < RUN; k++)
                s->of[t].list[i * RUN + k] = (lm_blend_entry){ bits[k], i * RUN + k };
        }
    }
}

/* Approximate bounds of the bits of rank r of the sample: to the resolution of two histograms. */
static void around(const search *f, int64_t r, uint64_t *lo, uint64_t *hi)
{
    for (int step = 0; step < 2; step++) {
        int shift = shift_for(*hi - *lo);
        *lo += bucket_of(f->list, SAMPLE, false, *lo, *hi, shift, &r) << shift;
        *hi = *lo + (UINT64_C(1) << shift);
    }
}

/* Four standard errors of a rank in both directions, for independent draws. */
static void bracket(void *ctx, int64_t begin, int64_t end, int worker)
{
    const selection *s = ctx;
    (void)worker;
    for (int64_t t = begin; t < end; t++) {
        search *f = &s->of[t];
        uint64_t lo = f->lo, all = f->hi;
        double q = (double)f->top->k / (double)s->v->job->count;
        int64_t rank = (int64_t)(q * SAMPLE),
                margin = 16 + (int64_t)(4 * sqrt(SAMPLE * q * (1 - q)));
        if (rank - margin >= 0)
            around(f, rank - margin, &lo, &f->hi);
        if (rank + margin < SAMPLE)
            around(f, rank + margin, &f->lo, &all);
    }
}

static void list_chunk(void *ctx, int64_t begin, int64_t end, int worker)
{
    const selection *s = ctx;
    const lm_blend *b = s->v->loops;
    lm_blend_entry *mine = s->picked + (int64_t)worker * LM_BLEND_BLOCK;
    int64_t above[2 * LM_MERGE_MOST_MODELS] = { 0 };
    for (int64_t at = begin; at < end; at += LM_BLEND_BLOCK) {
        int64_t n = end - at < LM_BLEND_BLOCK ? end - at : LM_BLEND_BLOCK;
        void *cells = values_at(s, at, n, worker);
        for (int t = 0; t < s->n; t++) {
            search *f = &s->of[t];
            int64_t to, got = b->pick(lm_merge_cell(b, cells, f->top->row), f->lo, f->hi, at, n,
                                      &above[t], mine);
            if (!got)
                continue;
            to = atomic_fetch_add_explicit(&f->listed, got, memory_order_relaxed);
            if (to + got <= f->room)
                memcpy(f->list + to, mine, (size_t)got * sizeof *mine);
        }
    }
    for (int t = 0; t < s->n; t++)
        atomic_fetch_add_explicit(&s->of[t].above, above[t], memory_order_relaxed);
}

static void search_lists(void *ctx, int64_t begin, int64_t end, int worker)
{
    const selection *s = ctx;
    (void)worker;
    for (int64_t t = begin; t < end; t++) {
        search *f = &s->of[t];
        int64_t rank = f->top->k - 1 - f->above;
        if (f->listed <= f->room && rank >= 0 && rank < f->listed) {
            lm_blend_entry found = nth(f->list, f->listed, rank, f->lo, f->hi, s->v->job->count);
            f->top->bits = found.bits;
            f->top->cut = found.index;
            f->done = true;
        }
    }
}

static void count_chunk(void *ctx, int64_t begin, int64_t end, int worker)
{
    const selection *s = ctx;
    const lm_blend *b = s->v->loops;
    for (int64_t at = begin; at < end; at += LM_BLEND_BLOCK) {
        int64_t n = end - at < LM_BLEND_BLOCK ? end - at : LM_BLEND_BLOCK;
        void *cells = values_at(s, at, n, worker);
        for (int t = 0; t < s->n; t++) {
            const search *f = &s->of[t];
            if (!f->done)
                b->histogram(lm_merge_cell(b, cells, f->top->row), f->lo, f->hi, f->shift,
                             s->count + ((int64_t)worker * s->n + t) * BUCKETS, n);
        }
    }
}

/* The bucket that holds the k-th becomes the range. */
static void narrow(const selection *s, int t)
{
    search *f = &s->of[t];
    for (int64_t bucket = BUCKETS - 1; bucket >= 0; bucket--) {
        int64_t sum = 0;
        for (int w = 0; w < s->threads; w++)
            sum += s->count[((int64_t)w * s->n + t) * BUCKETS + bucket];
        if (f->above + sum >= f->top->k) {
            f->lo += (uint64_t)bucket << f->shift;
            f->hi = f->lo + (UINT64_C(1) << f->shift);
            return;
        }
        f->above += sum;
    }
}

static void equal_chunk(void *ctx, int64_t begin, int64_t end, int worker)
{
    const selection *s = ctx;
    const lm_blend *b = s->v->loops;
    int64_t *equal = s->equal + begin / LM_MERGE_CHUNK * s->n;
    lm_blend_entry *mine = s->picked + (int64_t)worker * LM_BLEND_BLOCK;
    for (int t = 0; t < s->n; t++)
        equal[t] = 0;
    for (int64_t at = begin; at < end; at += LM_BLEND_BLOCK) {
        int64_t n = end - at < LM_BLEND_BLOCK ? end - at : LM_BLEND_BLOCK, above;
        void *cells = values_at(s, at, n, worker);
        for (int t = 0; t < s->n; t++)
            if (!s->of[t].done)
                equal[t] += b->pick(lm_merge_cell(b, cells, s->of[t].top->row), s->of[t].lo,
                                    s->of[t].hi, at, n, &above, mine);
    }
}

/* The index of the last kept element among those equal to the threshold. */
static void find_cut(const selection *s, int t)
{
    search *f = &s->of[t];
    const lm_blend *b = s->v->loops;
    int64_t left = f->top->k - f->above, count = s->v->job->count, chunk = 0, above, at, got = 0;
    f->top->bits = f->lo;
    while (left > s->equal[chunk * s->n + t])
        left -= s->equal[chunk++ * s->n + t];
    for (at = chunk * LM_MERGE_CHUNK; left > got; at += LM_BLEND_BLOCK) {
        int64_t n = count - at < LM_BLEND_BLOCK ? count - at : LM_BLEND_BLOCK;
        void *cells = values_at(s, at, n, 0);
        left -= got;
        got = b->pick(lm_merge_cell(b, cells, f->top->row), f->lo, f->hi, at, n, &above, s->picked);
    }
    f->top->cut = s->picked[left - 1].index;
}

static void by_histograms(selection *s)
{
    lm_par *par = s->v->job->par;
    int64_t count = s->v->job->count;
    int bits = s->v->loops->real == 8 ? 63 : 31;
    for (int t = 0; t < s->n; t++) {
        s->of[t].lo = 0;
        s->of[t].hi = end_of_bits(s->v->loops);
        s->of[t].above = 0;
    }
    for (int shift = bits; shift > 0;) {
        shift = shift > BUCKET_BITS ? shift - BUCKET_BITS : 0;
        for (int t = 0; t < s->n; t++)
            s->of[t].shift = shift;
        memset(s->count, 0, (size_t)s->threads * (size_t)s->n * BUCKETS * sizeof *s->count);
        lm_par_for(par, count, LM_MERGE_CHUNK, count_chunk, s);
        for (int t = 0; t < s->n; t++)
            if (!s->of[t].done)
                narrow(s, t);
    }
    lm_par_for(par, count, LM_MERGE_CHUNK, equal_chunk, s);
    for (int t = 0; t < s->n; t++)
        if (!s->of[t].done)
            find_cut(s, t);
}

static void find_cuts(selection *s)
{
    const lm_merge_job *j = s->v->job;
    bool left = false;
    if (j->count > LISTED) {
        lm_par_for(j->par, SAMPLE / RUN, 64, sample_runs, s);
        lm_par_for(j->par, s->n, 1, bracket, s);
    }
    lm_par_for(j->par, j->count, LM_MERGE_CHUNK, list_chunk, s);
    lm_par_for(j->par, s->n, 1, search_lists, s);
    for (int t = 0; t < s->n; t++)
        left |= !s->of[t].done;
    if (left)
        by_histograms(s);
}

void lm_merge_select(const lm_merge_values *v, lm_merge_top *top, int n_tops, int threads,
                     lm_merge_scratch *scratch)
{
    int64_t count = v->job->count, room = count / 32 > LISTED ? count / 32 : LISTED;
    size_t n = (size_t)n_tops, w = (size_t)threads;
    selection s = { .v = v, .threads = threads };
    room = room > count ? count : room;
    s.of = lm_merge_take(scratch, n, sizeof *s.of);
    s.cells = lm_merge_take_cells(scratch, v->rows + v->extra, threads);
    s.picked = lm_merge_take(scratch, w * LM_BLEND_BLOCK, sizeof *s.picked);
    s.count = lm_merge_take(scratch, w * n * BUCKETS, sizeof *s.count);
    s.equal = lm_merge_take(scratch, n * (size_t)lm_merge_chunks(count), sizeof *s.equal);
    for (int t = 0; t < n_tops; t++) {
        lm_blend_entry *list = lm_merge_take(scratch, (size_t)room, sizeof *list);
        if (!scratch->at)
            continue;
        top[t].bits = top[t].k > 0 ? 0 : UINT64_MAX;
        top[t].cut = count;
        if (top[t].k <= 0 || top[t].k >= count)
            continue;
        s.of[s.n++] =
            (search){ .top = &top[t], .hi = end_of_bits(v->loops), .room = room, .list = list };
    }
    if (s.n)
        find_cuts(&s);
}

/* List the elements in [lo, hi) of the n from d on. */
static void keep_part(const lm_blend *b, void *d, int64_t from, int64_t to, uint64_t lo,
                      uint64_t hi, double scale)
{
    if (to > from)
        b->keep_bits((char *)d + (size_t)from * b->real, lo, hi, scale, to - from);
}

void lm_merge_keep(const lm_blend *b, void *d, int64_t at, int64_t n, const lm_merge_top *top,
                   const lm_merge_top *out, double scale)
{
    int64_t cut[2] = { top->cut + 1 - at, out ? out->cut + 1 - at : n }, from = 0;
    for (int part = 0; part < 3; part++) { /* up to the nearer cut, the farther one, the end */
        int64_t to = n;
        for (int i = 0; i < 2; i++)
            to = cut[i] > from && cut[i] < to ? cut[i] : to;
        uint64_t lo = from < cut[0] || top->bits == UINT64_MAX ? top->bits : top->bits + 1;
        uint64_t hi = UINT64_MAX;
        if (out && out->bits != UINT64_MAX)
            hi = from < cut[1] ? out->bits : out->bits + 1;
        keep_part(b, d, from, to, lo, hi, scale);
        from = to;
    }
}
