/* SPDX-License-Identifier: Apache-2.0 */
/* open.h -- the group of all processes that were started together.
 *
 * Its transport follows from how the process was started:
 *
 *   self    started alone: a group of one, without any library
 *   shm     ranks of one machine: shared memory
 *   shm     ranks that a tool has started itself, on this machine: without MPI
 *   mpi     ranks of several machines, or a rank cannot map the others' memory: messages of Open MPI
 *
 * For several ranks the module libcore-mpi.so is loaded; it needs Open MPI on this machine.  With all ranks on one machine, MPI is
 * used for the start and the end only.
 *
 * Reductions have the order of comm.h on every transport, so their bits are equal.  MPI is never called by a thread while another
 * one calls it; the calls of comm.h may come from several threads if they use different communicators. */
#ifndef LM_COMM_OPEN_H
#define LM_COMM_OPEN_H

#include <stdbool.h>

#include "comm/comm.h"
#include "comm/launch.h"

typedef struct {
    lm_launch launch;           /* how this process was started (lm_launched) */
    const char *transport;      /* NULL: the best; "mpi": messages also on one machine; "self" */
    const char *const *modules; /* folders in which the module is searched, NULL-terminated */
    double
        timeout; /* seconds that a rank waits for another one before all fail; 0: without bound */
    bool
        unmapped; /* for tests: as if this rank could not map the memory of the others, as in some containers */
} lm_comm_opts;

/* Collective.  The communicator is freed last of all groups split from it, by the thread that has opened it.  If the group has
 * failed by then, the process should end with a status that is not 0: the launcher then ends those that hang.
 *
 * Fails: LM_EIO when a launcher has started several and there is no module, or it does not see those that the launcher has
 * started; the work of one must not be done n times.  Rank 0 returns at once, and should print it; the others a moment later. */
lm_code lm_comm_open(const lm_comm_opts *o, lm_comm **out, lm_err *e);

/* The memory in which a process lets others, which it starts, become ranks: their variables of the environment say the rank, how
 * many there are, and this text (launch.h).  The parent keeps it until they have ended. */
typedef struct lm_comm_memory lm_comm_memory;
enum { LM_MEMORY_TEXT = 80 };
lm_code lm_comm_memory_new(int ranks, lm_comm_memory **out, lm_err *e);
void lm_comm_memory_text(const lm_comm_memory *m, char out[LM_MEMORY_TEXT]);
/* In the process of rank `rank`, before it becomes another program: the others notice when it ends. */
void lm_comm_memory_enter(lm_comm_memory *m, int rank);
void lm_comm_memory_free(lm_comm_memory *m); /* NULL is fine */

#endif
