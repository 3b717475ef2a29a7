/* SPDX-License-Identifier: Apache-2.0 */
/* process.h -- which process a number means, and whether it still runs, by /proc.
 *
 * The kernel gives the number of an ended process to another one; the number and the time of its start name a process of this
 * machine until the next boot. */
#ifndef LM_BASE_PROCESS_H
#define LM_BASE_PROCESS_H

#include <stdint.h>

typedef enum {
    LM_PROCESS_RUNS,
    LM_PROCESS_STOPPED, /* by a signal, or by a debugger */
    LM_PROCESS_ENDED,   /* also one that its parent has not waited for */
} lm_process_state;

/* Clock ticks from the boot to the start of the process; 0: there is no such process, or it cannot be told. */
uint64_t lm_process_start(int64_t pid);
/* The state of process `pid` that started at `start` (0: unknown).  One that cannot be looked at, for lack of file descriptors
 * for example, runs. */
lm_process_state lm_process_look(int64_t pid, uint64_t start);

/* A number of this machine since its last boot: equal in processes that see the same kernel. */
uint64_t lm_boot_hash(void);

#endif
