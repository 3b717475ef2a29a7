/* SPDX-License-Identifier: Apache-2.0 */
/* sched_impl.h -- the sequences of a scheduler.  Private to lib/kv. */
#ifndef LM_KV_SCHED_IMPL_H
#define LM_KV_SCHED_IMPL_H

#include "kv/prefix.h"
#include "kv/sched.h"

/* WAITING: without pages.  PARKED: with pages, none pinned.  LOADING: pages are pinned, and in place
 * from the next step on. */
typedef enum { UNUSED, WAITING, PARKED, LOADING, RUNNING } seq_status;

typedef struct {
    seq_status status;
    bool index;   /* its pages are added to the index of prefixes */
    bool stepped; /* has a part in this step */
    uint32_t *ids;
    int64_t known, prompt, most; /* tokens so far, of the prompt, at most */
    int64_t used;                /* rows computed */
    int64_t slot;                /* -1: none */
    int32_t *page, *place;       /* place: on the device, while LOADING or RUNNING */
    int64_t pages, indexed;
    lm_prefix_entry last;   /* of page indexed - 1 */
    int32_t older, younger; /* older also links unused sequences */
} lm_seq;

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
    bool copied; /* the copies were returned */
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
/* Free a slot, unpin: from active to PARKED. */
void sched_park(lm_sched *s, lm_seq *q);
/* From any status to WAITING, without pages and rows. */
void sched_drop(lm_sched *s, lm_seq *q);
/* Park or drop, by the estimates. */
void sched_pause(lm_sched *s, lm_seq *q);

#endif
