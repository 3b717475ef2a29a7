/* SPDX-License-Identifier: Apache-2.0 */
/* wire.h -- messages between processes, as a library of messages provides them: the contract of the module libcore-mpi.so.
 * Private to lib/comm.
 *
 * No call waits for another rank, except for opening and closing.  Calls may come from any thread.  A failure of the library is
 * LM_EIO with its own reason. */
#ifndef LM_COMM_WIRE_H
#define LM_COMM_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/module.h"

typedef struct lm_wire lm_wire;

struct lm_wire {
    int rank, size;
    int tags;         /* messages have tags 0..tags-1 */
    size_t most;      /* bytes of a message at most */
    const char *name; /* "Open MPI v4.1.4" */

    /* Begin to send, or to receive: the data are in use until test says that the request is done.  Messages of a pair and tag are
     * matched in their order.  taken: a message is done when the other has begun to receive it. */
    lm_code (*send)(lm_wire *w, int to, int tag, const void *data, size_t bytes, bool taken,
                    uintptr_t *request, lm_err *e);
    lm_code (*recv)(lm_wire *w, int from, int tag, void *data, size_t bytes, uintptr_t *request,
                    lm_err *e);
    /* *at: an index of a request that is done, or -1: no one yet; that request is then 0, as those that are not tested.  *got: the
     * bytes of a message received; more than were asked for if it was longer. */
    lm_code (*test)(lm_wire *w, uintptr_t *requests, int n, int *at, size_t *got, lm_err *e);
    /* A message of this tag, of at most `bytes`, if one has come from any rank. */
    lm_code (*poll)(lm_wire *w, int tag, void *data, size_t bytes, bool *there, lm_err *e);
    /* From its return on no data of any request are touched, and all calls but close fail: for a group that has failed, whose
     * callers free what a missing rank might still send or take. */
    void (*stop)(lm_wire *w);
    /* failed: ranks may be missing, so no rank is waited for, and the process should end with a status that is not 0. */
    void (*close)(lm_wire *w, bool failed);
};

/* The symbol LM_WIRE_SYMBOL of a module. */
typedef struct {
    lm_module_head head; /* the size of lm_wire; a checksum of this header */
    /* Join the processes that were started together; once in a process. */
    lm_code (*open)(lm_wire **out, lm_err *e);
} lm_wire_module;
#define LM_WIRE_SYMBOL "lm_module_mpi"

#endif
