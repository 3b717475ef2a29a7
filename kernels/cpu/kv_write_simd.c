/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write_simd.c -- writes into coded caches: rows are loaded as floats, and encoded by kv_code_simd.c.  A unit is a
 * page of keys or values of one head. */
#include "kernels/cpu/kv_write.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/kv_code.h"

#define CODE_PASTE(level) lm_kv_code_##level
#define CODE(level)       CODE_PASTE(level)

enum { ENCODED = 64 /* tokens that are encoded together, or a step of the format */ };

/* Room of a worker: rows as floats, [D up to 16] each; a page of them for the definition. */
typedef struct {
    float *x;
    int64_t ld;
} rows;

/* ---- pages ---- */

static void load_row(const kvw_side *w, int64_t j, float *x)
{
    const void *from = kvw_plain_row(w, j);
    VF_FOR(d, n, w->D, {
        vf v = w->act == LM_DTYPE_BF16 ? vf_get_any(LM_DTYPE_BF16, from, d, n)
                                       : vf_get_any(LM_DTYPE_F32, from, d, n);
        vf_store(x + d, v);
    });
}

/* Tokens [from, to) of one page. */
static void encode_rows(const kvw_side *w, int64_t from, int64_t to, const rows *r)
{
    if (!w->f) {
        kvw_copy(w, from, to);
        return;
    }
    char *page = kvw_page(w, from);
    int64_t step = lm_kv_step(w->f, w->T), part = (ENCODED + step - 1) / step * step;
    for (int64_t j = from, n; j < to; j += n) {
        n = part - j % w->T % part;
        n = n < to - j ? n : to - j;
        for (int64_t i = 0; i < n; i++)
            load_row(w, j + i, r->x + i * r->ld);
        CODE(LM_SIMD).encode(w->f, w->T, w->D, w->kv, r->x, r->ld, j % w->T, n,
                             w->range ? w->range + 2 * (j - w->ranges) : NULL, page);
    }
}

static int64_t padded_dim(const lm_call *c)
{
    return (kvw_widest(c) + 15) / 16 * 16;
}

/* Floats of a worker: a page of one head, or a token of all. */
static int64_t room_of(const lm_call *c)
{
    int64_t page = c->out[KVW_KEYS].dim[2] * padded_dim(c);
    int64_t token = 2 * c->out[KVW_KEYS].dim[1] * c->out[KVW_KEYS].dim[3];
    return page > token ? page : (token + 15) / 16 * 16;
}

static rows worker_rows(const lm_call *c, int worker)
{
    return (rows){ (float *)c->work + worker * room_of(c), padded_dim(c) };
}

/* The ranges of values lie behind all workers' room. */
static float *ranges_of(const lm_call *c)
{
    return (float *)c->work + lm_par_threads(c->par) * room_of(c);
}

typedef struct {
    const lm_call *c;
    int64_t pages; /* most that the new codes of a head lie in */
} writing;

static int64_t most_pages(const lm_call *c)
{
    const lm_kv_attr *a = c->attr;
    int64_t T = c->out[KVW_KEYS].dim[2], most = 0;
    int64_t late = a->residual[0] > a->residual[1] ? a->residual[0] : a->residual[1];
    for (int64_t b = 0; b < a->attention.batch; b++) {
        int64_t n = kvw_int(c, KVW_FRESH, b);
        most = n > most ? n : most;
    }
    return most ? (most + late) / T + 2 : 0;
}

/* Unit u is a page of keys or values of a head. */
static void encode_pages(void *ctx, int64_t begin, int64_t end, int worker)
{
    const writing *x = ctx;
    const lm_call *c = x->c;
    int64_t K = ((const lm_kv_attr *)c->attr)->attention.kv_heads;
    rows r = worker_rows(c, worker);
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / (2 * x->pages);
        kvw_side w = kvw_side_of(c, bk / K, bk % K, u / x->pages % 2);
        if (u / x->pages % 2 && kvw_has_ranges(c))
            kvw_use_ranges(&w, ranges_of(c));
        int64_t from = kvw_coded_end(&w, w.used), to = kvw_coded_end(&w, w.end);
        int64_t page = (from / w.T + u % x->pages) * w.T;
        from = from > page ? from : page;
        to = to < page + w.T ? to : page + w.T;
        if (from < to)
            encode_rows(&w, from, to, &r);
    }
}

/* Unit u is keys or values of a head, whose tokens are replaced. */
static void replace_tokens(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int64_t K = ((const lm_kv_attr *)c->attr)->attention.kv_heads;
    rows r = worker_rows(c, worker);
    for (int64_t u = begin; u < end; u++) {
        kvw_side w = kvw_side_of(c, u / 2 / K, u / 2 % K, u % 2);
        if (u % 2 && kvw_has_ranges(c))
            kvw_use_ranges(&w, ranges_of(c));
        for (int64_t i = 0; i < w.end - w.used; i++) {
            kvw_side one = kvw_one_row(c, &w, i);
            encode_rows(&one, one.used, one.end, &r);
        }
    }
}

static void find_ranges(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    rows r = worker_rows(c, worker);
    for (int64_t n = begin; n < end; n++)
        kvw_range_at(c, n, r.x, ranges_of(c));
}

static void keep_tails(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    int64_t K = ((const lm_kv_attr *)c->attr)->attention.kv_heads;
    (void)worker;
    for (int64_t u = begin; u < end; u++) {
        kvw_side w = kvw_side_of(c, u / 2 / K, u / 2 % K, u % 2);
        if (w.tail)
            kvw_keep_tail(&w);
    }
}

static bool has_tail(const lm_kv_attr *a, int side)
{
    return a->residual[side] + a->sinks[side] > 0;
}

static void kv_write(const lm_call *c)
{
    const lm_kv_attr *a = c->attr;
    int64_t heads = a->attention.batch * a->attention.kv_heads;
    writing x = { c, most_pages(c) };
    if (x.pages == 0)
        return;
    if (kvw_has_ranges(c))
        lm_par_for(c->par, c->in[KVW_QKV].dim[0], 8, find_ranges, (void *)(uintptr_t)c);
    if (kvw_has_rows(c)) {
        lm_par_for(c->par, heads * 2, 1, replace_tokens, (void *)(uintptr_t)c);
        return;
    }
    lm_par_for(c->par, heads * 2 * x.pages, 1, encode_pages, &x);
    if (has_tail(a, 0) || has_tail(a, 1))
        lm_par_for(c->par, heads * 2, 8, keep_tails, (void *)(uintptr_t)c);
}

static size_t kv_write_work(const lm_call *c, int threads)
{
    int64_t ranges = kvw_has_ranges(c) ? 2 * c->in[KVW_QKV].dim[0] : 0;
    return (size_t)(threads * room_of(c) + ranges) * sizeof(float);
}

const lm_kernel LM_TABLE_NAME(kv_write, LM_SIMD)[] = {
    VF_KERNEL("kv_write", kv_write, kv_write_work),
    VF_KERNEL_END,
};
