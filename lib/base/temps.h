/* SPDX-License-Identifier: Apache-2.0 */
/* temps.h -- shared by out.c and outdir.c: the registry of temporaries and the naming of them.
 *
 * What is registered is removed by lm_out_drop_all, also from a signal handler: the list changes
 * only under a lock that is held with all signals blocked, so a handler never waits for the thread
 * that it interrupted.  Nothing is on disk that is not registered, nor the other way round.
 *
 * A temporary is named after its process and locked by it (owner.h); what dead processes have left in
 * a folder is removed when the first output in that folder is opened.  Private to lib/base. */
#ifndef LM_BASE_TEMPS_H
#define LM_BASE_TEMPS_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/err.h"

/* Embed in what owns a temporary.  path NULL: nothing to remove. */
typedef struct lm_temp {
    struct lm_temp *next, **link;
    char *path;   /* the temporary                      */
    char *target; /* where it goes on commit            */
    char *folder; /* that holds both; "." if none is named */
    bool force;
    pid_t owner; /* a forked child must not remove it */
    bool held;   /* by a descriptor of its own; else the lock is the opened file's */
    int hold;
} lm_temp;

/* Resolve the target; refuse an existing one unless `force`, and a name that is too long. */
lm_code lm_temp_init(lm_temp *t, const char *path, bool force, lm_err *e);
/* Create, lock and register the temporary: a file that *fd is opened on for reading and writing, or a
 * folder (fd NULL).  It gets the permissions of the target that it will replace; a folder lets its owner in
 * whatever those are, until lm_temp_keep_modes, which gives its files theirs, too.  `name` is for the message. */
lm_code lm_temp_create(lm_temp *t, const char *name, int *fd, lm_err *e);
void lm_temp_keep_modes(const lm_temp *t);
/* Before the file's descriptor is closed: the lock is kept until it is published. */
lm_code lm_temp_hold(lm_temp *t, int fd, lm_err *e);
/* Rename to the target without overwriting what has appeared there meanwhile, unless force; then
 * fsync the folder. */
lm_code lm_temp_publish(lm_temp *t, lm_err *e);
lm_code lm_temp_sync(const lm_temp *t, lm_err *e); /* fsync of the folder */
/* Remove what was not published, unregister, free the names; a zeroed t is fine. */
void lm_temp_fini(lm_temp *t);

#endif
