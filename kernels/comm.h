/* SPDX-License-Identifier: Apache-2.0 */
/* comm.h -- values that ranks exchange: what a kernel calls, and the operators of the exchange.
 *
 * A rank sees the ranks along an axis of the mesh (graph/layout.h) through an lm_links, which a run finds in its
 * lm_step; graph/links.h makes them of communicators.  Kernels cannot fail: the first failure of a call is kept in
 * lm_links.failure, later calls do nothing, and the executor reports it behind the run.
 *
 * A value `whole` [..,L,..] has parts along one dimension (numeric/portions.h), one for each rank; all numbers are of one type.
 *
 * all_reduce      in x whole (an addend)      out y whole = the sum over the ranks (or attr.op), the same bits on each
 * reduce_scatter  in x whole (an addend)      out y this rank's part of the sum
 * all_gather      in x this rank's part       out y whole; with attr.sum, elements that several ranks have are added
 * sum_shared      in x this rank's part       out y = x, where elements that several ranks have are added
 * all_to_all      in x this rank's part along attr.dim
 *                                             out y its part along attr.to_dim, which may be the same one in other pieces;
 *                                                 several ranks get what they share of it, and with attr.sum, elements that
 *                                                 several ranks have are added
 * part            in x whole                  out y this rank's part: nothing is sent
 * once            in x whole                  out y = x on rank 0, zeros elsewhere: addends whose sum is x; nothing is sent
 * collect         in x this rank's part       out y whole, on rank attr.owner; absent on the others
 * deal            in x whole, on rank attr.owner; absent on the others
 *                                             out y this rank's part
 * part_ids        in ids [N] I32              out y [N] I32: ids of the whole table as rows of this rank's part, which has
 *                                             rows `first` to first + count: count where another part has the row; negative
 *                                             ones stay.  real [N] F32 (optional): 0 where the id is negative, else 1
 *
 * gather_begin    in w, of whose elements each rank has a contiguous range, as of a block that ranks share: the first ones
 *                 rank 0, ... (attr.part elements each); the others are not read
 *                                             out y whole, complete behind its gather_end alone
 * gather_end      in y of the oldest gather_begin whose end has not run      out y, in place
 *
 * Sums are those of lib/comm: their order depends on the number of ranks only.  All else moves numbers, and is exact. */
#ifndef LM_KERNELS_COMM_H
#define LM_KERNELS_COMM_H

#include "base/err.h"
#include "kernels/kernel.h"
#include "numeric/portions.h"

typedef enum {
    LM_EXCHANGE_SUM,
    LM_EXCHANGE_MAX, /* NaN if any is */
    LM_EXCHANGE_MIN,
} lm_exchange_op;

/* The ranks along one axis.  Every rank makes the same calls in the same order.  Sizes as in lib/comm/comm.h: counts in
 * elements, all else in bytes. */
typedef struct lm_links lm_links;
struct lm_links {
    int rank, size;
    void (*all_reduce)(lm_links *l, const void *in, void *out, size_t n, lm_dtype d,
                       lm_exchange_op op);
    void (*reduce_scatter)(lm_links *l, const void *in, void *out, const size_t *count, lm_dtype d,
                           lm_exchange_op op);
    void (*all_gather)(lm_links *l, const void *in, void *out, const size_t *bytes);
    void (*all_to_all)(lm_links *l, const void *in, const size_t *give, void *out,
                       const size_t *take);
    void (*send)(lm_links *l, int to, const void *data, size_t bytes);
    void (*recv)(lm_links *l, int from, void *data, size_t bytes);
    /* Around the ring of the ranks: begin to send a copy of `out` to the next one, and to receive as many bytes from the one
     * before into `in` (either may be NULL); and wait until what comes into `in` is there, if anything does.  NULL: the links
     * have no ring. */
    void (*pass)(lm_links *l, const void *out, void *in, size_t bytes);
    void (*arrive)(lm_links *l, const void *in);
    /* An all_gather that goes on while the rank computes; wait for the oldest; and wait until nothing more comes into the
     * memory of those that have begun, whose gather_end still follows.  NULL: all_gather does it at once. */
    void (*gather_begin)(lm_links *l, const void *in, void *out, const size_t *bytes);
    void (*gather_end)(lm_links *l);
    void (*gather_settle)(lm_links *l);
    void *ctx, *ring, *gatherer;
    lm_err failure; /* the first one */
};

typedef struct {
    int axis;            /* lm_axis: of lm_step.links */
    int64_t ranks, rank; /* along it */
    lm_exchange_op op;
    int64_t dim, len; /* the split dimension, and its elements in the whole value */
    lm_portions pieces;
    bool sum;
    int64_t to_dim, to_len; /* all_to_all: of y */
    lm_portions to_pieces;
    int64_t owner; /* collect, deal */
} lm_exchange_attr;

typedef struct {
    int64_t first, count;
} lm_part_ids_attr;

typedef struct {
    int axis;            /* lm_axis: of lm_step.links */
    int64_t ranks, rank; /* along it */
    const int64_t *part; /* [ranks] elements of each; borrowed.  NULL: one rank has all */
} lm_gather_attr;

#endif
