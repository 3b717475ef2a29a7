/* SPDX-License-Identifier: Apache-2.0 */
/* sched.h -- continuous batching: which rows of which sequences each step computes, and where their
 * pages are.
 *
 * Requests enter in the order in which they were added.  A step has one row of each sequence that
 * generates, and then rows of prompts in that order.  A request that does not fit waits.  When the
 * cache is full, the youngest sequence is paused: its pages go to the host or the disk when room is
 * needed, or are dropped and computed again, whichever is estimated to be faster.  The oldest
 * sequence never waits for a younger one, so each request ends, and no request fails for lack of
 * memory: a request that is larger than the device's pages is refused when it is added.
 *
 * Every row of a sequence is computed by the same kind of rows (kernels/attention.h) however often
 * it is paused: rows of the prompt as LM_ROWS_PROMPT, each generated token as one row
 * LM_ROWS_TOKEN, also when it is computed again.  Only pages of prompts are shared.
 *
 * Pure logic: no backend, no tensors, no clock; times and rates are numbers of the caller.  Steps
 * do not allocate memory. */
#ifndef LM_KV_SCHED_H
#define LM_KV_SCHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "kv/pool.h"

typedef struct {
    int64_t page; /* tokens of a page */
    /* Of a step, at most; with the rows of sequences that generate, at most rows + sequences. */
    int64_t rows;
    int64_t sequences; /* that run at the same time */
    int64_t slots;     /* states of sequences; 0: as many as sequences */
    int64_t context;   /* rows of a sequence, at most */
    /* 1: prompts are cut anywhere.  More, for coded caches: prompts are cut at multiples of this position
     * only; with `share` it is a multiple of page. */
    int64_t chunk;
    /* Rows before the new ones whose pages are written with them, too: those of a tail that are coded later.
     * Only with state. */
    int64_t lag;
    bool state; /* a slot has rows of its sequence, which forks copy and paused sequences keep */
    bool share; /* prompts with the same beginning share its pages; with state only together with */
    /* so many slots behind the others, which keep the states of prompts after chunks: a prompt that begins alike
     * continues from the last of them. */
    int64_t snapshots;
    /* Estimates for the choice between moving and computing; 0: unknown, pages are moved. */
    double row_seconds, step_seconds; /* a row of a prompt; a step */
    double rate[LM_TIERS];            /* bytes per second between the device and a lower tier */
    size_t page_bytes;
    /* Moves that no row waits for run beside the rows: pages are moved ahead of the need in a small part of the time. */
    bool beside;
} lm_sched_opts;

/* n rows of one sequence, at positions used, used + 1, ...  The pointers are valid until the next
 * call with the scheduler. */
typedef struct {
    int64_t request, slot, used, n;
    lm_rows_kind kind;
    bool last;            /* the logits of its last row are wanted: lm_sched_token follows */
    const uint32_t *ids;  /* n tokens */
    const int32_t *table; /* places on the device of the pages of positions 0 to used + n */
    int64_t pages;
} lm_sched_part;

typedef struct {
    int64_t from, to; /* slots */
} lm_sched_copy;

/* To do in this order: copies of slots, one after the other, the first `urgent` moves, the rows.
 * The other moves touch no page of these rows: they may be done at the same time, and must be done
 * before the next step. */
typedef struct {
    const lm_sched_part *part;
    int64_t n, rows, bucket; /* bucket: rows rounded up to one of few sizes */
    const lm_kv_move *move;
    int64_t moves, urgent;
    const lm_sched_copy *copy;
    int64_t copies;
} lm_sched_step;

typedef struct {
    int64_t steps, rows, padding; /* padding: rows of buckets beyond the rows of their steps */
    int64_t pages, hits;          /* of prompts that entered: all, and those found in the cache */
    int64_t waits;                /* steps in which the next request had to wait */
    int64_t paused, dropped;      /* sequences: pages kept, pages dropped to be computed again */
    int64_t dropped_rows;
    int64_t running, waiting; /* requests at the time of the call: in steps; the others */
} lm_sched_stats;

typedef struct lm_sched lm_sched;

/* Bytes of memory that a page of `tokens` tokens costs here while it is in use, in any tier. */
size_t lm_sched_page_cost(int64_t tokens);
/* `pages` of the device, the host and the disk. */
lm_code lm_sched_new(const lm_sched_opts *o, const int64_t pages[LM_TIERS], lm_sched **out,
                     lm_err *e);
void lm_sched_free(lm_sched *s); /* NULL is fine */

/* A prompt of n tokens, copied, and at most most_new tokens after it, fewer where the context ends.  Only requests of one
 * `group`, a number from 0 on, share pages: those whose rows are computed by the same model.
 * *request is its number, used again after its end.  LM_ELIMIT if the device has too few pages for
 * it alone. */
lm_code lm_sched_add(lm_sched *s, const uint32_t *ids, int64_t n, int64_t most_new, int32_t group,
                     int64_t *request, lm_err *e);
/* A sequence in the same state as `parent`, with the same tokens so far: if the parent's next token
 * is wanted, the fork's is, too.  most_new counts from the end of the prompt.  Pages are shared
 * until they are written. */
lm_code lm_sched_fork(lm_sched *s, int64_t parent, int64_t most_new, int64_t *request, lm_err *e);
/* The next step.  False: no request is left that could run.  A step may have moves and no rows. */
bool lm_sched_next(lm_sched *s, lm_sched_step *out);
/* The token after a part with `last`.  False if the request has ended with it: `ends`, or the limit
 * of new tokens. */
bool lm_sched_token(lm_sched *s, int64_t request, uint32_t id, bool ends);
void lm_sched_end(lm_sched *s, int64_t request);
/* The content of a page is lost, because a move failed: its sequences compute their rows again.  To
 * be called between the moves and the next step. */
void lm_sched_lost(lm_sched *s, int32_t page);

/* Other estimates (lm_sched_opts) from the next step on. */
void lm_sched_estimate(lm_sched *s, double row_seconds, double step_seconds,
                       const double rate[LM_TIERS]);

lm_sched_stats lm_sched_count(const lm_sched *s);
lm_pool *lm_sched_pool(lm_sched *s); /* for counts, and for lm_pool_close */
/* Recount of pages and states, for tests: LM_EBUG. */
lm_code lm_sched_check(const lm_sched *s, lm_err *e);

#endif
