/* SPDX-License-Identifier: Apache-2.0 */
/* owner.h -- which process a temporary belongs to, and whether that process is still alive.
 *
 * A temporary of NAME is `.NAME.tmp.lmBOOT-PID-START`: 16 hexadecimal digits that stand for the
 * machine since its last start, the process, and when that started (clock ticks since the boot).
 * Its process holds an flock on it.  The kernel gives that lock back however the process ends, so it
 * tells PID 1 of a container from PID 1 of the container before, as a number alone cannot.
 *
 * A lock that is free proves the end of the owner only where this kernel sees all locks: when the
 * name says that it is the owner's kernel, too, or on a file system of this machine alone.  Elsewhere
 * (the owner runs on another machine, a file system without locks, a symbolic link) a temporary is
 * left alone until nothing in it has changed for a day. */
#ifndef LM_BASE_OWNER_H
#define LM_BASE_OWNER_H

#include <stdbool.h>

enum { LM_OWNER_TAG = 64 }; /* bytes that hold a tag */

/* "lmBOOT-PID-START" of this process; returns `tag`. */
char *lm_owner_tag(char tag[LM_OWNER_TAG]);
/* Lock the open file or folder.  False: it is locked already.  True as well where there are no
 * locks. */
bool lm_owner_lock(int fd);
/* Remove the temporaries in `dir` whose processes are dead.  alone: the caller holds a lock that keeps
 * others from writing there, so symbolic links go at once.  Failures are ignored: what stays is met again
 * by the next sweep. */
void lm_owner_sweep(const char *dir, bool alone);

#endif
