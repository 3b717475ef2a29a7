/* SPDX-License-Identifier: Apache-2.0 */
/* owner.h -- which process a temporary belongs to, and whether that process is still alive.
 *
 * A temporary of NAME is `.NAME.tmp.lmBOOT-PID-START`: 16 hexadecimal digits that stand for the
 * machine since its last start, the process, and when that started (clock ticks since the boot).
 * Its process holds an flock on it.  The kernel releases that lock in whatever way the process
 * ends; the lock therefore distinguishes PID 1 of a container from PID 1 of an earlier container,
 * which the number cannot.
 *
 * A free lock proves that the owner has ended only where this kernel sees all locks: when the name
 * holds the boot id of this kernel, or on a file system that only this machine writes.  Elsewhere
 * (the owner runs on another machine, a file system without locks, a symbolic link) a temporary is
 * kept until it has not changed for a day. */
#ifndef LM_BASE_OWNER_H
#define LM_BASE_OWNER_H

#include <stdbool.h>

enum { LM_OWNER_TAG = 64 }; /* bytes that hold a tag */

/* "lmBOOT-PID-START" of this process; returns `tag`. */
char *lm_owner_tag(char tag[LM_OWNER_TAG]);
/* Lock the open file or folder.  False: another process has locked it.  True also where the file
 * system has no locks. */
bool lm_owner_lock(int fd);
/* Remove the temporaries in `dir` whose processes are dead.  alone: the caller holds a lock that
 * keeps others from writing there, so symbolic links go at once.  Failures are ignored: the next
 * sweep tries again. */
void lm_owner_sweep(const char *dir, bool alone);

#endif
