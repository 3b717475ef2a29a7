/* SPDX-License-Identifier: Apache-2.0 */
/* comm_impl.h -- what a transport provides.  Private to lib/comm. */
#ifndef LM_COMM_COMM_IMPL_H
#define LM_COMM_COMM_IMPL_H

#include <stdbool.h>

#include "comm/comm.h"

/* The calls of comm.h, with checked arguments. */
typedef struct {
    const char *name;
    lm_code (*barrier)(lm_comm *c, lm_err *e);
    lm_code (*all_reduce)(lm_comm *c, const void *in, void *out, size_t n, lm_dtype d,
                          lm_comm_op op, lm_err *e);
    lm_code (*reduce_scatter)(lm_comm *c, const void *in, void *out, const size_t *count,
                              lm_dtype d, lm_comm_op op, lm_err *e);
    lm_code (*all_gather)(lm_comm *c, const void *in, void *out, const size_t *bytes, lm_err *e);
    lm_code (*all_to_all)(lm_comm *c, const void *in, const size_t *give, void *out,
                          const size_t *take, lm_err *e);
    lm_code (*broadcast)(lm_comm *c, void *data, size_t bytes, int root, lm_err *e);
    lm_code (*send)(lm_comm *c, int to, const void *data, size_t bytes, lm_err *e);
    lm_code (*recv)(lm_comm *c, int from, void *data, size_t bytes, lm_err *e);
    lm_code (*split)(lm_comm *c, int color, int key, lm_comm **out, lm_err *e);
    void (*abort)(lm_comm *c, const lm_err *why);
    lm_code (*look)(lm_comm *c, lm_err *e);
    bool (*reports)(lm_comm *c);
    void (*free)(lm_comm *c);
} lm_transport;

struct lm_comm {
    const lm_transport *transport;
    int rank, size;
    double patience; /* lm_comm_patience */
    lm_comm_use use;
};

/* How long a call has waited, begun as zeros and added to at least once a second.  Time in which this process was itself
 * stopped hardly counts, as the others may have been stopped with it. */
typedef struct {
    double last, sum;
} lm_comm_wait;

bool lm_comm_wait_is_over(lm_comm_wait *w, double patience);

/* Elements first..first+n-1 of part[0..parts-1] combined in the order of comm.h, into out[0..n-1], which may be one of them. */
void lm_comm_tree(const void *const *part, int parts, size_t first, size_t n, lm_dtype d,
                  lm_comm_op op, void *out);
/* The same past the cache where that is faster, for a large result that is not read soon. */
void lm_comm_tree_past(const void *const *part, int parts, size_t first, size_t n, lm_dtype d,
                       lm_comm_op op, void *out);

/* A result of so many bytes does not stay in a cache of the second level until it is read. */
enum { LM_COMM_BIG = 4 << 20 };

/* A group of one rank. */
lm_code lm_comm_self(lm_comm **out, lm_err *e);

#endif
