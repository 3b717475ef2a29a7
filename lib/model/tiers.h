/* SPDX-License-Identifier: Apache-2.0 */
/* tiers.h -- performs the moves of a scheduler's pages (kv/pool.h) between the memory of a backend, the host and the
 * disk.
 *
 * With lm_paged_opts.down, pages are coded when they leave the device and decoded when they return to it.  A page of the
 * host is one piece of memory, a page of the disk one place of a file with a checksum
 * (kv/tier_file.h).  Moves that no row of the step waits for run beside its rows: on the CPU in a thread of their own,
 * on a device in the caller's while the device computes.  Pages for a sequence that enters are fetched in this way
 * beside a whole step, before its first row. */
#ifndef LM_MODEL_TIERS_H
#define LM_MODEL_TIERS_H

#include "kv/pool.h"
#include "model/paged.h"

typedef struct {
    int64_t host, disk; /* pages; 0: no such tier */
    const char *dir;    /* of the disk's file */
} lm_tiers_opts;

typedef struct {
    int64_t down, up;      /* pages moved from the device to the host, and back; */
    int64_t out, in;       /* to the disk, and from it; */
    int64_t copied;        /* within the device, because a shared page is written: no moves; */
    double copy_seconds;   /* rows wait for them */
    int64_t lost;          /* pages that the disk did not take, or gave back damaged */
    double bytes, saved;   /* of all moves; what they would have moved more without codes */
    double stalls;         /* seconds in which rows waited for moves */
    double rate[LM_TIERS]; /* bytes per second to and from a lower tier; 0: unknown */
} lm_tiers_stats;

typedef struct lm_tiers lm_tiers;

/* For the pages of g, borrowed.  Fails: LM_EIO if the folder takes no file. */
lm_code lm_tiers_new(lm_paged *g, const lm_tiers_opts *o, lm_tiers **out, lm_err *e);
void lm_tiers_free(lm_tiers *t); /* before g; NULL is fine */

size_t lm_tiers_below(const lm_tiers *t); /* bytes of a page below the device */
/* True if the moves that no row waits for take time beside the rows, not between them. */
bool lm_tiers_beside(const lm_tiers *t);
/* The moves of a step: the first `urgent` are complete when this returns, and the others begin. */
lm_code lm_tiers_begin(lm_tiers *t, const lm_kv_move *move, int64_t n, int64_t urgent, lm_err *e);
/* After the rows were given to the backend, if there are any: perform the other moves if no thread does. */
lm_code lm_tiers_work(lm_tiers *t, bool rows, lm_err *e);
/* Wait for all moves.  *lost: the n pages whose content was lost in them; borrowed until lm_tiers_begin.  A failing
 * disk is not an error here: it loses pages, and is closed. */
lm_code lm_tiers_end(lm_tiers *t, const int32_t **lost, int64_t *n, lm_err *e);

/* The failure that closed the disk; code LM_OK: there was none. */
lm_err lm_tiers_closed(const lm_tiers *t);
/* To be called between lm_tiers_end and lm_tiers_begin, as lm_tiers_closed. */
lm_tiers_stats lm_tiers_count(const lm_tiers *t);

#endif
