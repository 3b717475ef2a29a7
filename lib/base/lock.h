/* SPDX-License-Identifier: Apache-2.0 */
/* lock.h -- a file that one process holds at a time, and that says which one.
 *
 * The lock is the kernel's (flock): it ends with the process, however that ends.  The file that stays
 * behind then is taken over by the next process. */
#ifndef LM_BASE_LOCK_H
#define LM_BASE_LOCK_H

#include <stdbool.h>

#include "base/err.h"

typedef struct lm_lock lm_lock;

/* Make and lock the file `path`, which stands for `what` (named in messages).  *sure = false: the file
 * system has no locks, so that a second holder would not be noticed.
 * Fails: LM_EUSAGE when another process holds it (names the process, its machine, and since when);
 * LM_EIO. */
lm_code lm_lock_take(const char *path, const char *what, lm_lock **out, bool *sure, lm_err *e);
void lm_lock_drop(lm_lock *l); /* removes the file; NULL is fine */

#endif
