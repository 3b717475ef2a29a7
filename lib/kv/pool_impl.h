/* SPDX-License-Identifier: Apache-2.0 */
/* pool_impl.h -- what a pool consists of.  Private to lib/kv. */
#ifndef LM_KV_POOL_IMPL_H
#define LM_KV_POOL_IMPL_H

#include "kv/pool.h"

typedef enum { FREE, CACHED, PARKED, PINNED } status;

/* PINNED: in no list, also for the time in which a page changes its list. */
typedef struct {
    int32_t refs, pins, place;
    int32_t prev, next; /* in the list of its status and tier; free numbers have next */
    uint8_t tier, status;
    bool keep;
} page_state;

typedef struct {
    int32_t first, last; /* released first, released last */
    int64_t n;
} page_list;

typedef struct {
    int32_t *free;                /* a stack of places */
    int64_t size, n_free, closed; /* closed: free places that no page may use */
    page_list list[PINNED];       /* CACHED and PARKED */
} tier_state;

struct lm_pool {
    tier_state tier[LM_TIERS];
    page_state *page;
    int64_t n;
    int32_t unused; /* the first of the list of free numbers */
    lm_kv_move *move;
    int64_t n_moves, most_moves;
    bool read; /* the moves were returned */
    void (*forget)(void *ctx, int32_t page);
    void *ctx;
};

#endif
