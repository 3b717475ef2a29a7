/* SPDX-License-Identifier: Apache-2.0 */
/* pool_impl.h -- what a pool consists of.  Private to lib/kv. */
#ifndef LM_KV_POOL_IMPL_H
#define LM_KV_POOL_IMPL_H

#include "kv/pool.h"

/* The tables are lazy (lm_lazy_alloc): a number or a place costs memory from its first use on. */

typedef enum { FREE, CACHED, PARKED, PINNED } status;

/* PINNED: in no list, also for the time in which a page changes its list. */
typedef struct {
    int32_t refs, pins, place;
    /* in the list of its status and tier; free numbers have next, as lm_pool.reuse */
    int32_t prev, next;
    uint8_t tier, status;
    bool keep, hit;
} page_state;

typedef struct {
    int32_t first, last; /* released first, released last */
    int64_t n;
} page_list;

typedef struct {
    int32_t *free;           /* a stack of places that were used before, */
    int64_t n_stack, unused; /* their number; the places from here on were never used */
    int64_t size, closed;    /* closed: 1 + free places that no page may use; 0: open */
    page_list list[PINNED];  /* CACHED and PARKED */
} tier_state;

struct lm_pool {
    tier_state tier[LM_TIERS];
    page_state *page;
    int64_t n, unused; /* numbers in all; those from here on were never used */
    int32_t reuse;     /* 1 + the first of the list of free numbers that were; 0: none */
    lm_kv_move *move;
    int64_t n_moves, most_moves;
    bool read;   /* the moves were returned */
    bool tidies; /* in lm_pool_tidy: no page waits for the moves */
    void (*forget)(void *ctx, int32_t page);
    void *ctx;
};

/* Places that a page may take. */
static inline int64_t pool_free(const tier_state *t)
{
    return t->closed ? 0 : t->n_stack + t->size - t->unused;
}

#endif
