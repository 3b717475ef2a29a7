/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_ranks.h -- ranks that are threads with a device each: emulated ones, or with LM_TEST_CUDA=real GPUs of this machine. */
#ifndef LM_TESTS_CUDA_RANKS_H
#define LM_TESTS_CUDA_RANKS_H

#include <stdlib.h>

#include "comm/threads.h"
#include "cuda_open.h"
#include "graph/links.h"

enum { CUDA_RANKS = 4 };

/* Before the first call that opens a device: the emulation has this many. */
static inline void cuda_ranks_set(void)
{
    char n[8];
    snprintf(n, sizeof n, "%d", CUDA_RANKS);
    setenv("LM_EMU_DEVICES", n, 1);
}

/* Whether this machine has a device with this number; a test is not skipped for an emulated one that cannot be opened. */
static inline bool cuda_has(int index)
{
    lm_backend *b = NULL;
    lm_err e = { 0 };
    if (!cuda_is_real())
        return index < CUDA_RANKS;
    const bool has = !cuda_open_at(index, "plain", true, &b, &e);
    lm_backend_close(b);
    return has;
}

/* A rank, its device and the others, as cuda_ranks_run gives them to a case. */
typedef struct {
    void *ctx;
    lm_comm *c;
    lm_backend *b;
    lm_links *l; /* on the main stream of b */
} cuda_rank;
typedef lm_code cuda_rank_fn(const cuda_rank *r, lm_err *e);

typedef struct {
    cuda_rank_fn *fn;
    void *ctx;
    bool deterministic;
} cuda_rank_case;

static inline lm_code cuda_rank_watch(void *ctx, double waited, lm_err *e)
{
    const cuda_rank *r = ctx;
    if (waited > 60)
        return lm_fail(e, LM_EIO, "test", NULL, "rank %d has waited a minute", r->l->rank);
    return lm_comm_look(r->c, e);
}

static inline lm_code cuda_rank_run(void *ctx, lm_comm *c, lm_err *e)
{
    const cuda_rank_case *k = ctx;
    cuda_rank r = { .ctx = k->ctx, .c = c };
    if (!cuda_open_at(lm_comm_rank(c), "plain", k->deterministic, &r.b, e) &&
        !lm_links_new(r.b, c, NULL, &r.l, e)) {
        r.b->watch = cuda_rank_watch;
        r.b->watch_ctx = &r;
        k->fn(&r, e);
    }
    if (e->code)
        lm_comm_abort(c, e);
    if (r.l)
        lm_links_free(r.b, r.l);
    lm_backend_close(r.b);
    return e->code;
}

static inline lm_code cuda_ranks_run(int ranks, bool deterministic, cuda_rank_fn *fn, void *ctx,
                                     lm_err *e)
{
    cuda_rank_case k = { .fn = fn, .ctx = ctx, .deterministic = deterministic };
    return lm_threads_run(ranks, 60, cuda_rank_run, &k, e);
}

#endif
