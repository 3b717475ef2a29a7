/* SPDX-License-Identifier: Apache-2.0 */
/* shm.h -- ranks that are processes of one machine.  Private to lib/comm.
 *
 * A group has a segment of shared memory without a name in the file system, so a killed process leaves nothing.  Every rank has a
 * few buffers there that fit into the cache.  A collective call goes in steps: each rank writes a piece of its operands into its
 * next buffer, counts it, and reads the same piece of all others; it writes the next piece before it reads, so that ranks need
 * not keep pace with each other.  Counters are the only synchronisation: a killed process holds no lock.
 *
 * A rank that waits reads the state of the other's process (/proc) some times a second, so that an ended one is noticed at once and
 * a stopped one is called so when the time is over.
 *
 * The ranks of one segment may also be threads of one process. */
#ifndef LM_COMM_SHM_H
#define LM_COMM_SHM_H

#include <stdint.h>

#include "comm/comm.h"

enum { LM_SHM_RANKS = 256 };

typedef struct lm_shm lm_shm; /* a segment, mapped into this process */

/* How another process of this machine finds a segment. */
typedef struct {
    int64_t pid; /* 0: there is none */
    int64_t fd;  /* of that process */
    uint64_t token;
} lm_shm_name;

/* A segment for `ranks`, of which none has joined.  timeout: seconds that a rank waits for another one before all fail; 0: without
 * bound.  piece: bytes of a buffer; 0: by measurement.  Forked processes have it too. */
lm_code lm_shm_new(int ranks, double timeout, size_t piece, lm_shm **out, lm_err *e);
lm_shm_name lm_shm_name_of(const lm_shm *s);
/* Map the segment of another process, which must hold it until this returns.  Fails: LM_EIO if this process may not. */
lm_code lm_shm_find(const lm_shm_name *name, lm_shm **out, lm_err *e);
/* NULL is fine. */
void lm_shm_drop(lm_shm *s);

/* Tell the others which process is rank `rank`, so that they notice if it ends before it joins. */
void lm_shm_enter(lm_shm *s, int rank);
/* Become rank `rank`; the communicator holds the segment.  A failure is that of all ranks. */
lm_code lm_shm_join(lm_shm *s, int rank, lm_comm **out, lm_err *e);

/* When the last communicator of segment s, and of groups split from it, is freed, call fn: whether ranks failed is in `failed`. */
void lm_shm_at_end(lm_shm *s, void (*fn)(void *ctx, bool failed), void *ctx);

#endif
