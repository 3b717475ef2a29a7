/* SPDX-License-Identifier: Apache-2.0 */
/* sched_impl.h -- the sequences of a scheduler.  Private to lib/kv. */
#ifndef LM_KV_SCHED_IMPL_H
#define LM_KV_SCHED_IMPL_H

#include "kv/prefix.h"
#include "kv/sched.h"

/* WAITING: without pages.  PARKED: with pages, none pinned.  LOADING: pages are pinned, and in
 * place from the next step on. */
typedef enum { UNUSED, WAITING, PARKED, LOADING, RUNNING } seq_status;

typedef struct {
    seq_status status;
    bool index;   /* its pages are added to the index of prefixes */
    bool stepped; /* has a part in this step */
    int32_t group;
    uint32_t *ids;
    int64_t known, prompt, most; /* tokens so far, of the prompt, at most */
    int64_t used;                /* rows computed */
    int64_t slot;                /* -1: none */
    int32_t *page, *place;       /* place: on the device, while LOADING or RUNNING */
    int64_t pages, indexed;
    lm_prefix_entry last;   /* of page indexed - 1 */
    int32_t older, younger; /* older also links unused sequences */
} lm_seq;

/* The state after `rows` of a prompt, in slot o.slots + its number.  First its pages are not in the
 * index yet, because rows of a tail are written later. */
typedef struct {
    uint64_t used;      /* when it was last used; 0: no state */
    int32_t request;    /* whose pages are not in the index; -1: */
    lm_prefix_entry at; /* the last page of these rows */
    int64_t rows;
} lm_snapshot;

struct lm_sched {
    lm_sched_opts o;
    lm_pool *pool;
    lm_prefix *prefix; /* NULL: nothing is shared */
    lm_seq *seq;
    size_t n, cap;
    int32_t oldest, youngest, unused;
    int64_t active, kept; /* LOADING and RUNNING; PARKED with a slot */
    int64_t *slot, slots; /* free slots */
    lm_sched_part *part;
    lm_sched_copy *copy;
    int64_t copies;
    size_t copy_cap;
    lm_snapshot *snapshot; /* [o.snapshots] */
    int32_t *snapshot_at;  /* of each page of the index; may be out of date */
    uint64_t clock;        /* of uses */
    bool copied;           /* the copies were returned */
    double spare;          /* seconds for moves ahead of the need */
    lm_sched_stats count;
};

static inline bool sched_active(const lm_seq *q)
{
    return q->status >= LOADING;
}
static inline int64_t sched_pages_of(const lm_sched *s, int64_t rows)
{
    return (rows + s->o.page - 1) / s->o.page;
}

/* Pin and take all that the known rows need, and a slot; false: nothing has happened.  `more` pages
 * stay available. */
bool sched_enter(lm_sched *s, lm_seq *q, int64_t more);
/* Add pages of its prompt that were computed to the index of prefixes. */
void sched_index(lm_sched *s, lm_seq *q);
/* Append a copy of slots to the next step's. */
void sched_copy(lm_sched *s, int64_t from, int64_t to);
/* Free a slot, unpin: from active to PARKED. */
void sched_park(lm_sched *s, lm_seq *q);
/* From any status to WAITING, without pages and rows. */
void sched_drop(lm_sched *s, lm_seq *q);
/* Park or drop, by the estimates. */
void sched_pause(lm_sched *s, lm_seq *q);

/* ---- sched_state.c: states of prompts that others continue from ---- */

lm_code sched_open_states(lm_sched *s, lm_err *e);
/* The rows of q are computed, the last of them in this step: keep its state if it ends a chunk of
 * its prompt. */
void sched_keep_state(lm_sched *s, lm_seq *q);
/* Page q->indexed - 1 was added to the index. */
void sched_place_state(lm_sched *s, const lm_seq *q);
/* States of q whose pages are not in the index will not get there. */
void sched_forget_states(lm_sched *s, const lm_seq *q);
/* Of the first `rows` in q's pages of the index, those up to the last state that is kept. */
int64_t sched_state_rows(const lm_sched *s, const lm_seq *q, int64_t rows);
/* Give the state after q's rows, which sched_state_rows has returned, to its slot. */
void sched_take_state(lm_sched *s, const lm_seq *q);

#endif
