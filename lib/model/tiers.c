/* SPDX-License-Identifier: Apache-2.0 */
/* tiers.c -- copies of pages between three tiers, and the thread that makes them beside the rows of a step. */
#include "model/tiers.h"

#include <pthread.h>
#include <string.h>
#include <sys/uio.h>

#include "base/clock.h"
#include "base/mem.h"
#include "kv/tier_file.h"
#include "model/page_code.h"

typedef struct {
    double bytes, seconds;
} amount;

struct lm_tiers {
    lm_paged *g;
    lm_backend *b;
    size_t page, below; /* bytes of a page on the device, and below it */
    lm_page_code *code; /* NULL: they are the same */
    /* pages of the host; behind them a page of a device, which the host cannot read, for disk and codes; and one in codes,
     * for the disk */
    char *host, *bounce, *coded;
    size_t host_bytes;
    lm_tier_file *disk;      /* NULL: none */
    lm_stream *stream;       /* of copies to and from a device; NULL on the CPU */
    struct iovec *from, *to; /* a page in pieces */
    double begun;            /* when the copies began that are not waited for; */
    double copied;           /* their bytes */
    amount done[LM_TIERS];
    lm_tiers_stats count;
    lm_kv_move *move; /* that run beside the rows */
    size_t move_cap;
    int64_t moves;
    int32_t *lost;
    size_t lost_cap;
    int64_t n_lost;
    lm_err err; /* of these moves */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool running, due, quit; /* there is a thread; it has moves to perform, it ends: under lock */
};

/* ---- one move ---- */

/* A place of the host. */
static char *host_place(const lm_tiers *t, int64_t place)
{
    return t->host + (size_t)place * t->below;
}

/* The memory `at` in pieces of the sizes of a page's. */
static int pieces_at(const lm_tiers *t, char *at, struct iovec *out)
{
    int n = lm_paged_pieces(t->g, 0, out);
    for (int i = 0; i < n; at += out[i++].iov_len)
        out[i].iov_base = at;
    return n;
}

/* Wait for the copies so far, and count their time. */
static lm_code wait_for_copies(lm_tiers *t, lm_err *e)
{
    double now;
    if (t->stream && t->b->sync(t->b, t->stream, e))
        return e->code;
    if (!t->copied)
        return LM_OK;
    now = lm_now();
    t->done[LM_TIER_HOST].bytes += t->copied;
    t->done[LM_TIER_HOST].seconds += now - t->begun;
    t->copied = 0;
    return LM_OK;
}

/* A page goes to or comes from the host. */
static void begin_copy(lm_tiers *t)
{
    if (!t->copied)
        t->begun = lm_now();
    t->copied += (double)t->page;
}

/* Between places of the device, or a place and the bounce page. */
static lm_code copy_pieces(lm_tiers *t, const struct iovec *from, const struct iovec *to, int n,
                           lm_err *e)
{
    for (int i = 0; i < n; i++) {
        if (t->b->host_memory) /* the backend belongs to another thread */
            memcpy(to[i].iov_base, from[i].iov_base, from[i].iov_len);
        else if (t->b->copy(t->b, to[i].iov_base, from[i].iov_base, from[i].iov_len, t->stream, e))
            return e->code;
    }
    return LM_OK;
}

/* A page of the device where the host can read or write it: in place, or in the bounce page.  Returns the pieces' number. */
static int readable(const lm_tiers *t, int64_t place, struct iovec *out)
{
    return t->b->host_memory ? lm_paged_pieces(t->g, place, out) : pieces_at(t, t->bounce, out);
}

/* From the device to `to`, a page below it: complete when this returns, unless it goes as it is. */
static lm_code lower_page(lm_tiers *t, int64_t place, char *to, lm_err *e)
{
    int n = lm_paged_pieces(t->g, place, t->from);
    begin_copy(t);
    if (!t->code)
        return copy_pieces(t, t->from, t->to, pieces_at(t, to, t->to), e);
    if (!t->b->host_memory) {
        readable(t, place, t->to);
        if (copy_pieces(t, t->from, t->to, n, e) || t->b->sync(t->b, t->stream, e))
            return e->code;
        memcpy(t->from, t->to, (size_t)n * sizeof *t->from);
    }
    lm_page_encode(t->code, t->from, to);
    return LM_OK;
}

/* And back. */
static lm_code raise_page(lm_tiers *t, char *from, int64_t place, lm_err *e)
{
    int n = lm_paged_pieces(t->g, place, t->to);
    begin_copy(t);
    if (!t->code)
        return copy_pieces(t, t->from, t->to, pieces_at(t, from, t->from), e);
    readable(t, place, t->from);
    if (!t->b->host_memory && t->b->sync(t->b, t->stream, e)) /* what the bounce page held last */
        return e->code;
    lm_page_decode(t->code, from, t->from);
    return t->b->host_memory ? LM_OK : copy_pieces(t, t->from, t->to, n, e);
}

/* A page between the disk and pieces that the host can read. */
static lm_code use_disk(lm_tiers *t, const lm_kv_move *m, const struct iovec *piece, int n)
{
    lm_err bad = { 0 };
    double start = lm_now();
    if (m->to == LM_TIER_DISK)
        lm_tier_file_write(t->disk, m->target, piece, n, &bad);
    else
        lm_tier_file_read(t->disk, m->source, piece, n, &bad);
    if (bad.code) { /* its reason is kept by the file */
        t->lost[t->n_lost++] = m->page;
        t->count.lost++;
        return bad.code;
    }
    t->done[LM_TIER_DISK].bytes += (double)t->page;
    t->done[LM_TIER_DISK].seconds += lm_now() - start;
    return LM_OK;
}

/* Pages that go as they are pass between pieces and disk without a copy where the host can read them. */
static lm_code disk_move(lm_tiers *t, const lm_kv_move *m, lm_err *e)
{
    bool write = m->to == LM_TIER_DISK, host = m->from == LM_TIER_HOST;
    int64_t place = write ? m->source : m->target;
    char *at = host ? host_place(t, place) : t->code ? t->coded : t->bounce;
    if (wait_for_copies(t, e))
        return e->code;
    if (!host && !t->code && t->b->host_memory) {
        use_disk(t, m, t->from, lm_paged_pieces(t->g, place, t->from));
        return LM_OK;
    }
    if (write && !host && (lower_page(t, place, at, e) || wait_for_copies(t, e)))
        return e->code;
    t->from[0] = (struct iovec){ at, t->below };
    if (use_disk(t, m, t->from, 1) || write)
        return LM_OK;
    return raise_page(t, at, place, e) ? e->code : wait_for_copies(t, e);
}

/* A shared page is copied to be written. */
static bool is_copy(const lm_kv_move *m)
{
    return m->from == LM_TIER_DEVICE && m->to == LM_TIER_DEVICE;
}

static void count_move(lm_tiers *t, const lm_kv_move *m)
{
    lm_tiers_stats *c = &t->count;
    if (is_copy(m)) {
        c->copied++;
        return;
    }
    c->bytes += (double)t->below;
    c->saved += (double)t->page - (double)t->below;
    *(m->to == LM_TIER_DISK     ? &c->out
      : m->from == LM_TIER_DISK ? &c->in
      : m->to == LM_TIER_HOST   ? &c->down
                                : &c->up) += 1;
}

static lm_code perform_one(lm_tiers *t, const lm_kv_move *m, lm_err *e)
{
    if (m->from == LM_TIER_DISK || m->to == LM_TIER_DISK)
        return disk_move(t, m, e);
    if (m->to == LM_TIER_HOST)
        return lower_page(t, m->source, host_place(t, m->target), e);
    if (m->from == LM_TIER_HOST)
        return raise_page(t, host_place(t, m->source), m->target, e);
    lm_paged_pieces(t->g, m->source, t->from);
    return copy_pieces(t, t->from, t->to, lm_paged_pieces(t->g, m->target, t->to), e);
}

static lm_code perform(lm_tiers *t, const lm_kv_move *m, int64_t n, lm_err *e)
{
    for (; n-- > 0; m++) {
        count_move(t, m);
        if (perform_one(t, m, e))
            return e->code;
    }
    return wait_for_copies(t, e);
}

/* ---- beside the rows ---- */

static void *worker(void *arg)
{
    lm_tiers *t = arg;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (!t->due && !t->quit)
            pthread_cond_wait(&t->change, &t->lock);
        if (!t->due)
            break;
        pthread_mutex_unlock(&t->lock);
        perform(t, t->move, t->moves, &t->err);
        pthread_mutex_lock(&t->lock);
        t->due = false;
        pthread_cond_broadcast(&t->change);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static void set_due(lm_tiers *t, bool quit)
{
    pthread_mutex_lock(&t->lock);
    t->due = !quit;
    t->quit = quit;
    pthread_cond_broadcast(&t->change);
    pthread_mutex_unlock(&t->lock);
}

size_t lm_tiers_below(const lm_tiers *t)
{
    return t->below;
}

bool lm_tiers_beside(const lm_tiers *t)
{
    return t->running || !t->b->host_memory;
}

/* The rows waited for the first n moves: for copies by their share. */
static void count_wait(lm_tiers *t, const lm_kv_move *move, int64_t n, double seconds)
{
    int64_t copies = 0;
    for (int64_t i = 0; i < n; i++)
        copies += is_copy(&move[i]);
    double share = n ? (double)copies / (double)n : 0;
    t->count.copy_seconds += share * seconds;
    t->count.stalls += n ? (1 - share) * seconds : 0;
}

lm_code lm_tiers_begin(lm_tiers *t, const lm_kv_move *move, int64_t n, int64_t urgent, lm_err *e)
{
    double start = lm_now();
    t->n_lost = t->moves = 0;
    if (n <= 0)
        return LM_OK;
    if (lm_grow(&t->move, &t->move_cap, (size_t)n, sizeof *t->move, "moves of pages", e) ||
        lm_grow(&t->lost, &t->lost_cap, (size_t)n, sizeof *t->lost, "moves of pages", e))
        return e->code;
    if (t->stream && t->b->follow(t->b, t->stream, t->b->main, e)) /* the rows of the last step */
        return e->code;
    if (perform(t, move, urgent, e))
        return e->code;
    count_wait(t, move, urgent, lm_now() - start);
    t->moves = n - urgent;
    if (t->moves)
        memcpy(t->move, move + urgent, (size_t)t->moves * sizeof *move);
    if (t->moves && t->running)
        set_due(t, false);
    return LM_OK;
}

lm_code lm_tiers_work(lm_tiers *t, bool rows, lm_err *e)
{
    double start = lm_now();
    if (!t->moves || t->running)
        return LM_OK;
    perform(t, t->move, t->moves, e);
    if (!rows || t->b->host_memory)
        t->count.stalls += lm_now() - start;
    return e->code;
}

lm_code lm_tiers_end(lm_tiers *t, const int32_t **lost, int64_t *n, lm_err *e)
{
    if (t->moves && t->running) {
        double start = lm_now();
        pthread_mutex_lock(&t->lock);
        while (t->due)
            pthread_cond_wait(&t->change, &t->lock);
        pthread_mutex_unlock(&t->lock);
        t->count.stalls += lm_now() - start;
    }
    *lost = t->lost;
    *n = t->n_lost;
    if (t->err.code)
        *e = t->err;
    return t->err.code;
}

/* ---- life ---- */

static lm_code start_thread(lm_tiers *t, lm_err *e)
{
    int bad;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->change, NULL);
    if (!t->b->host_memory || t->b->threads < 2)
        return LM_OK;
    bad = pthread_create(&t->thread, NULL, worker, t);
    if (bad)
        return lm_fail(e, LM_ELIMIT, "pages", NULL, "cannot start a thread: %s", strerror(bad));
    t->running = true;
    return LM_OK;
}

/* Memory of the host: its pages, and those in which pages of the device are coded, or wait for the disk. */
static lm_code open_host(lm_tiers *t, const lm_tiers_opts *o, lm_err *e)
{
    size_t bounce = !t->b->host_memory && (o->disk || t->code) ? t->page : 0,
           coded = o->disk && t->code ? t->below : 0, pages;
    if (!lm_mul_ok((size_t)o->host, t->below, &pages) ||
        !lm_add_ok(pages, bounce + coded, &t->host_bytes))
        return lm_fail(e, LM_ELIMIT, "pages", NULL, "their size cannot be counted");
    if (t->host_bytes &&
        t->b->host_alloc(t->b, t->host_bytes, "pages of the host", (void **)&t->host, e))
        return e->code;
    t->bounce = t->host + pages;
    t->coded = t->bounce + bounce;
    return LM_OK;
}

static lm_code open_all(lm_tiers *t, const lm_tiers_opts *o, lm_err *e)
{
    size_t n = (size_t)lm_paged_pieces(t->g, 0, NULL);
    if (lm_alloc_n(&t->from, n, sizeof *t->from, "pieces of a page", e) ||
        lm_alloc_n(&t->to, n, sizeof *t->to, "pieces of a page", e) || open_host(t, o, e) ||
        (o->disk && lm_tier_file_new(o->dir, t->below, o->disk, &t->disk, e)))
        return e->code;
    return t->b->stream_new(t->b, &t->stream, e);
}

lm_code lm_tiers_new(lm_paged *g, const lm_tiers_opts *o, lm_tiers **out, lm_err *e)
{
    lm_tiers *t = NULL;
    *out = NULL;
    if (lm_alloc_n(&t, 1, sizeof *t, "tiers of pages", e))
        return e->code;
    t->g = g;
    t->b = lm_paged_backend(g);
    t->page = t->below = lm_paged_page_bytes(g);
    t->code = lm_paged_code(g);
    if (t->code)
        t->below = lm_page_code_bytes(t->code);
    if (start_thread(t, e) || open_all(t, o, e)) {
        lm_tiers_free(t);
        return e->code;
    }
    *out = t;
    return LM_OK;
}

void lm_tiers_free(lm_tiers *t)
{
    if (!t)
        return;
    if (t->running) {
        pthread_mutex_lock(&t->lock);
        while (t->due)
            pthread_cond_wait(&t->change, &t->lock);
        pthread_mutex_unlock(&t->lock);
        set_due(t, true);
        pthread_join(t->thread, NULL);
    }
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->change);
    if (t->stream) {
        lm_err ignored = { 0 };
        t->b->sync(t->b, t->stream, &ignored);
        t->b->stream_free(t->b, t->stream);
    }
    if (t->host)
        t->b->host_free(t->b, t->host, t->host_bytes);
    lm_tier_file_free(t->disk);
    lm_free(t->from);
    lm_free(t->to);
    lm_free(t->move);
    lm_free(t->lost);
    lm_free(t);
}

lm_err lm_tiers_closed(const lm_tiers *t)
{
    return t->disk ? *lm_tier_file_closed(t->disk) : (lm_err){ 0 };
}

lm_tiers_stats lm_tiers_count(const lm_tiers *t)
{
    lm_tiers_stats c = t->count;
    for (int i = LM_TIER_HOST; i < LM_TIERS; i++)
        c.rate[i] = t->done[i].seconds > 0 ? t->done[i].bytes / t->done[i].seconds : 0;
    return c;
}
