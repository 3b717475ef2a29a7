/* SPDX-License-Identifier: Apache-2.0 */
/* serve_room.c -- how many pages memory and disk have room for. */
#include <stdio.h>

#include "base/text.h"
#include "kv/spec.h"
#include "model/serve.h"

enum {
    PAGE = 64,      /* tokens */
    ROWS = 512,     /* of prompts in a step: 256 are a tenth to a fifth slower, 768 no faster */
    MOST = 1 << 28, /* pages of a tier */
    RESERVE = 4 /* a quarter of the free memory is for activations and the rest of the process */
};

static int64_t pages_in(size_t bytes, size_t page)
{
    size_t n = page ? bytes / page : MOST; /* a model of states alone has no pages */
    return n < MOST ? (int64_t)n : MOST;
}

/* Rows of a step with n sequences; more than there are tokens of prompts would only take memory. */
static int64_t rows_of(const lm_serve_sizes *ask, int64_t n)
{
    return n + (ask->prompts && ask->prompts < ROWS ? ask->prompts : ROWS);
}

/* What tails leave of the memory. */
static size_t without_tails(const lm_serve_room *r, size_t memory)
{
    size_t tails = r->size.tail * (size_t)(r->pages.slots + r->pages.snapshots);
    return tails < memory ? memory - tails : 0;
}

static int64_t pages_of(const lm_serve_room *r, int64_t tokens)
{
    return (tokens + r->pages.page - 1) / r->pages.page;
}

/* The bytes that are asked for, or what is free beside the weights. */
static lm_code choose_memory(const lm_serve_sizes *ask, const lm_serve_room *r, lm_backend *b,
                             size_t *memory, lm_err *e)
{
    size_t left, total;
    *memory = ask->memory;
    if (ask->memory)
        return LM_OK;
    if (b->memory(b, &left, &total, e))
        return e->code;
    *memory = r->size.weights < left ? (left - r->size.weights) / RESERVE * (RESERVE - 1) : 0;
    return LM_OK;
}

/* As many texts as the memory has room for with their tails, if each of them but one takes a quarter of the context; at
 * least one.  Those that make room keep their tails where there is memory for it. */
static void choose_texts(const lm_serve_sizes *ask, size_t memory, lm_serve_room *r)
{
    const bool lower = ask->host || ask->disk;
    const size_t whole = (size_t)pages_of(r, ask->context) * r->size.page,
                 part = (size_t)pages_of(r, (ask->context + 3) / 4) * r->size.page;
    int64_t n = ask->sequences;
    for (; n > 1; n--) {
        r->pages.slots = n + (lower ? n / 2 + 1 : 0);
        if (without_tails(r, memory) >= whole + (size_t)(n - 1) * part)
            break;
    }
    r->pages.slots = n + (lower ? n / 2 + 1 : 0);
    if (n == 1 && without_tails(r, memory) < whole)
        r->pages.slots = 1;
    r->pages.sequences = n;
    r->pages.rows = rows_of(ask, n);
}

static lm_code no_room(const lm_serve_sizes *ask, const lm_serve_room *r, size_t memory,
                       int64_t least, lm_err *e)
{
    char all[32], one[32], tail[32], need[32], beside[80] = "";
    const int64_t holds = r->pages.pages * r->pages.page;
    const double bytes = (double)pages_of(r, least) * (double)r->size.page + (double)r->size.tail;
    if (r->size.tail)
        snprintf(beside, sizeof beside, " and %s of plain tokens",
                 lm_show_bytes((double)r->size.tail, tail));
    return lm_fail(e, LM_EUSAGE, ask->name[LM_TIER_DEVICE],
                   ask->memory ? "give more, or a shorter context"
                               : "free memory, or give a shorter context",
                   "%s hold %lld token%s, and a text of %lld needs %s, in pages of %s%s",
                   lm_show_bytes((double)memory, all), (long long)holds, lm_plural((uint64_t)holds),
                   (long long)least, lm_show_bytes(bytes, need),
                   lm_show_bytes((double)r->size.page, one), beside);
}

/* Tails of beginnings of prompts: a fifth of the memory, and at most as many as there are chunks in all pages; where the
 * memory is not limited, at least those of one text. */
static int64_t choose_snapshots(const lm_serve_sizes *ask, size_t memory, const lm_serve_room *r)
{
    const double page = (double)r->size.page, tail = (double)r->size.tail,
                 need = (double)ask->sequences * ((double)pages_of(r, ask->context) * page + tail);
    const bool all = !ask->memory && need < (double)memory;
    const double bytes = all ? need : (double)memory;
    const int64_t most = pages_in((size_t)bytes, r->size.page) * r->pages.page / LM_KV_CHUNK,
                  one = ask->context / LM_KV_CHUNK;
    int64_t n = pages_in((size_t)bytes / 5, r->size.tail);
    if (LM_KV_CHUNK % r->pages.page)
        return 0;
    n = n < most ? n : most;
    return all && n < one ? one : n;
}

static lm_code choose_pages(const lm_serve_sizes *ask, lm_backend *b, lm_serve_room *r, lm_err *e)
{
    lm_paged_opts *o = &r->pages;
    const int64_t each = pages_of(r, ask->context), least = ask->shorter ? o->page : ask->context;
    size_t memory;
    if (choose_memory(ask, r, b, &memory, e))
        return e->code;
    if (r->size.tail) {
        o->snapshots = choose_snapshots(ask, memory, r);
        choose_texts(ask, memory, r);
        if (without_tails(r, memory) < (size_t)each * r->size.page) {
            o->snapshots = 0;
            choose_texts(ask, memory, r);
        }
    }
    o->pages = pages_in(without_tails(r, memory), r->size.page);
    if (!ask->memory && each < MOST / o->sequences && each * o->sequences < o->pages)
        o->pages = each * o->sequences;
    const int64_t most = o->pages * o->page;
    o->context = ask->context < most ? ask->context : most;
    return most < least ? no_room(ask, r, memory, least, e) : LM_OK;
}

/* Without pages that have bytes there is nothing to move. */
static lm_code lower_tier(const char *name, size_t bytes, size_t page, int64_t *pages, lm_err *e)
{
    char all[32], one[32];
    *pages = page ? pages_in(bytes, page) : 0;
    if (page && bytes && !*pages)
        return lm_fail(e, LM_EUSAGE, name, "give more", "%s hold no page of %s",
                       lm_show_bytes((double)bytes, all), lm_show_bytes((double)page, one));
    return LM_OK;
}

lm_code lm_serve_choose(const lm_loaded *w, lm_dtype dtype, lm_backend *b,
                        const lm_serve_sizes *ask, lm_serve_room *r, lm_err *e)
{
    *r = (lm_serve_room){ .pages = { .rows = rows_of(ask, ask->sequences),
                                     .sequences = ask->sequences,
                                     .context = ask->context,
                                     .page = ask->kv ? ask->kv->page : PAGE,
                                     .pages = 1,
                                     .kv = ask->kv,
                                     .state_codes = ask->state_codes,
                                     .down = ask->down,
                                     .like = ask->like } };
    if (lm_paged_measure(w, dtype, &r->pages, b, &r->size, e) || choose_pages(ask, b, r, e) ||
        lower_tier(ask->name[LM_TIER_HOST], ask->host, r->size.below, &r->tiers.host, e))
        return e->code;
    return lower_tier(ask->name[LM_TIER_DISK], ask->disk, r->size.below, &r->tiers.disk, e);
}
