/* SPDX-License-Identifier: Apache-2.0 */
/* lock.h -- a file that one process holds at a time; its text names that process.
 *
 * The lock is the kernel's (flock): it is released when the process ends, in whatever way.  A file
 * left behind is reused by the next process. */
#ifndef LM_BASE_LOCK_H
#define LM_BASE_LOCK_H

#include <stdbool.h>

#include "base/err.h"

typedef struct lm_lock lm_lock;

/* Create and lock the file `path`; messages call it `what`.  *sure = false: the file system has no
 * locks, so that a second holder would not be noticed.  Fails: LM_EUSAGE when another process holds
 * it (names the process, its machine, and since when); LM_EIO. */
lm_code lm_lock_take(const char *path, const char *what, lm_lock **out, bool *sure, lm_err *e);
/* LM_EUSAGE, as above, if a process holds the lock now; creates no file and keeps no lock. */
lm_code lm_lock_check(const char *path, const char *what, lm_err *e);
void lm_lock_drop(lm_lock *l); /* removes the file; NULL is fine */

#endif
