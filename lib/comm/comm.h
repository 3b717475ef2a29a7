/* SPDX-License-Identifier: Apache-2.0 */
/* comm.h -- ranks that exchange data: the calls, whatever carries them.
 *
 * A communicator is one rank's view of a group of ranks.  Collective calls are made by every rank of the group, in the same order
 * and with sizes that fit; they return when this rank's result is complete and its operands may change.  Elements are aligned as
 * their type.  Transports (threads of one process: threads.h; processes: open.h) are tables of functions behind the same calls.
 *
 * Sums have a fixed order, which depends on the number of ranks only: a binary tree over the ranks, split behind the largest power
 * of two, so that a rank that adds its own 2^k leaves in such a tree gives the bits of 2^k ranks with one each.  Elements narrower
 * than 32 bits are added in F32 and rounded once.
 *
 * A call fails on every rank as soon as one rank has failed (lm_comm_abort, or its function returned an error), or when a rank
 * has not come within the patience of another: LM_EIO that names the rank and the call.  After a failure all calls fail. */
#ifndef LM_COMM_COMM_H
#define LM_COMM_COMM_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "numeric/dtype.h"

typedef struct lm_comm lm_comm;

typedef enum {
    LM_COMM_SUM,
    LM_COMM_MAX, /* NaN if any is */
    LM_COMM_MIN,
} lm_comm_op;

int lm_comm_rank(const lm_comm *c);
int lm_comm_size(const lm_comm *c);
/* What carries the calls: "self", "threads", "shm" or "mpi". */
const char *lm_comm_transport(const lm_comm *c);

lm_code lm_comm_barrier(lm_comm *c, lm_err *e);

/* out[i] = op over the ranks of in[i], n elements of type d: F64, F32, F16, BF16, I64 or I32.  out may be in. */
lm_code lm_comm_all_reduce(lm_comm *c, const void *in, void *out, size_t n, lm_dtype d,
                           lm_comm_op op, lm_err *e);

/* The same of one part for each rank: in has count[0] + ... elements, of which rank r gets the r-th part.  out may be that part
 * of in. */
lm_code lm_comm_reduce_scatter(lm_comm *c, const void *in, void *out, const size_t *count,
                               lm_dtype d, lm_comm_op op, lm_err *e);

/* out: bytes[0] bytes of rank 0, then those of rank 1, ...  in may be this rank's part of out. */
lm_code lm_comm_all_gather(lm_comm *c, const void *in, void *out, const size_t *bytes, lm_err *e);

/* *all: `bytes` bytes of each rank; the caller frees it with lm_free.  Fails as lm_comm_all_gather, with *all NULL. */
lm_code lm_comm_gather_each(lm_comm *c, const void *mine, size_t bytes, void **all, lm_err *e);

/* in: give[0] bytes for rank 0, then those for rank 1, ...; out: take[0] bytes from rank 0, ...  No overlap. */
lm_code lm_comm_all_to_all(lm_comm *c, const void *in, const size_t *give, void *out,
                           const size_t *take, lm_err *e);

/* data of `root` into everyone's. */
lm_code lm_comm_broadcast(lm_comm *c, void *data, size_t bytes, int root, lm_err *e);

/* One rank to another: returns when the other has taken it.  Messages of a pair arrive in their order; sizes are equal. */
lm_code lm_comm_send(lm_comm *c, int to, const void *data, size_t bytes, lm_err *e);
lm_code lm_comm_recv(lm_comm *c, int from, void *data, size_t bytes, lm_err *e);

/* Ranks of the same `color` become a group of their own, in the order of `key`, then of their ranks here; below 0: none, *out is
 * NULL.  Collective.  The caller owns *out: lm_comm_free. */
lm_code lm_comm_split(lm_comm *c, int color, int key, lm_comm **out, lm_err *e);

/* Make all calls of all ranks fail with this reason, those that wait already included.  The first reason stays; between processes
 * a call returns it with the rank and its host in front, also on the rank that has failed. */
void lm_comm_abort(lm_comm *c, const lm_err *why);

/* Fails as the next call would, when the group has failed or the process of another rank has ended; waits for no rank.  For work
 * that depends on the others, and makes no calls. */
lm_code lm_comm_look(lm_comm *c, lm_err *e);

/* After a failure: true for one rank of each host, that which should print it. */
bool lm_comm_reports(lm_comm *c);

/* Check that every rank has the same `text` as `what` ("version", "options", "data"), before work that needs it.  Collective.
 * Fails: LM_EUSAGE on every rank, naming a rank that differs from most, its host, and both texts (their beginnings); the group
 * has not failed and may go on. */
lm_code lm_comm_agree(lm_comm *c, const char *what, const char *text, lm_err *e);

/* Seconds that this rank waits in a call of this group, and of groups split from it later, for another one; 0: without bound.
 * An ended process is noticed whatever it is, where ranks share memory.  At first that of those that made the group. */
void lm_comm_patience(lm_comm *c, double seconds);

/* What the calls of this rank in this group have taken so far: seconds, in which it also waits for the others, and bytes that it
 * gave: its operands of sums, its parts and messages, and what it broadcasts. */
typedef struct {
    double seconds, bytes;
} lm_comm_use;
lm_comm_use lm_comm_used(const lm_comm *c);

/* NULL is fine.  Not collective, except for the last one of processes, which waits for the others'. */
void lm_comm_free(lm_comm *c);

#endif
