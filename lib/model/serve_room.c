/* SPDX-License-Identifier: Apache-2.0 */
/* serve_room.c -- how many pages memory and disk have room for. */
#include <stdio.h>

#include "base/text.h"
#include "kv/spec.h"
#include "model/serve.h"

enum {
    PAGE = 64,      /* tokens */
    ROWS = 256,     /* of prompts in a step */
    MOST = 1 << 28, /* pages of a tier */
    RESERVE = 4 /* a quarter of the free memory is for activations and the rest of the process */
};

static int64_t pages_in(size_t bytes, size_t page)
{
    size_t n = bytes / page;
    return n < MOST ? (int64_t)n : MOST;
}

/* What tails leave of the memory. */
static size_t without_tails(const lm_serve_room *r, size_t memory)
{
    size_t tails = r->size.tail * (size_t)r->pages.slots;
    return tails < memory ? memory - tails : 0;
}

/* Pages for all sequences, or as many as fit into the memory that is free beside the weights. */
static lm_code default_pages(const lm_serve_room *r, lm_backend *b, int64_t all, int64_t *pages,
                             lm_err *e)
{
    size_t left, total;
    if (b->memory(b, &left, &total, e))
        return e->code;
    left = r->size.weights < left ? (left - r->size.weights) / RESERVE * (RESERVE - 1) : 0;
    int64_t fit = pages_in(without_tails(r, left), r->size.page);
    *pages = fit < all ? fit : all;
    return LM_OK;
}

static lm_code choose_context(const lm_serve_sizes *ask, const lm_serve_room *r, lm_paged_opts *o,
                              lm_err *e)
{
    char one[32], need[32], tails[32], beside[80] = "";
    int64_t most = o->pages * o->page, least = ask->shorter ? o->page : ask->context;
    o->context = ask->context < most ? ask->context : most;
    if (most >= least)
        return LM_OK;
    double bytes = (double)((least + o->page - 1) / o->page) * (double)r->size.page;
    if (r->size.tail)
        snprintf(beside, sizeof beside, ", beside %s of plain tokens",
                 lm_show_bytes((double)r->size.tail * (double)o->slots, tails));
    return lm_fail(e, LM_EUSAGE, "pages", NULL,
                   "their memory holds %lld token%s, and a text of %lld needs %s, in pages of %s%s",
                   (long long)most, lm_plural((uint64_t)most), (long long)least,
                   lm_show_bytes(bytes, need), lm_show_bytes((double)r->size.page, one), beside);
}

static lm_code lower_tier(const char *name, size_t bytes, size_t page, int64_t *pages, lm_err *e)
{
    char all[32], one[32];
    *pages = pages_in(bytes, page);
    if (bytes && !*pages)
        return lm_fail(e, LM_EUSAGE, name, NULL, "%s hold no page of %s",
                       lm_show_bytes((double)bytes, all), lm_show_bytes((double)page, one));
    return LM_OK;
}

lm_code lm_serve_choose(const lm_loaded *w, lm_dtype dtype, lm_backend *b,
                        const lm_serve_sizes *ask, lm_serve_room *r, lm_err *e)
{
    lm_paged_opts *o = &r->pages;
    const int64_t page = ask->kv ? ask->kv->page : PAGE;
    *r = (lm_serve_room){ .pages = { .rows = ROWS + ask->sequences,
                                     .sequences = ask->sequences,
                                     .context = ask->context,
                                     .page = page,
                                     .pages = 1,
                                     .kv = ask->kv } };
    if (lm_paged_measure(w, dtype, o, b, &r->size, e))
        return e->code;
    if (r->size.tail) /* sequences that make room keep their tails */
        o->slots = ask->sequences + (ask->host || ask->disk ? ask->sequences / 2 + 1 : 0);
    int64_t all = MOST, each = (ask->context + page - 1) / page;
    if (each < MOST / ask->sequences)
        all = each * ask->sequences;
    o->pages = pages_in(without_tails(r, ask->memory), r->size.page);
    if ((!ask->memory && default_pages(r, b, all, &o->pages, e)) || choose_context(ask, r, o, e) ||
        lower_tier("pages of the host", ask->host, r->size.page, &r->tiers.host, e))
        return e->code;
    return lower_tier("pages of the disk", ask->disk, r->size.page, &r->tiers.disk, e);
}
