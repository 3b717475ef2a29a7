/* SPDX-License-Identifier: Apache-2.0 */
/* temps.h -- shared by out.c and outdir.c: the registry of temporaries and their names.
 *
 * Registered temporaries are removed by lm_out_drop_all, also from a signal handler: the list
 * changes only under a lock that is held with all signals blocked, so a handler never waits for the
 * thread that it interrupted.  A temporary is on disk exactly while it is registered.
 *
 * A temporary is named after its process and locked by it (owner.h); temporaries of dead processes
 * in a folder are removed when the first output in that folder is opened.  Private to lib/base. */
#ifndef LM_BASE_TEMPS_H
#define LM_BASE_TEMPS_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/err.h"

/* Embedded in the owner of a temporary.  path NULL: there is nothing to remove. */
typedef struct lm_temp {
    struct lm_temp *next, **link;
    char *path;   /* the temporary                      */
    char *target; /* the final path, set by commit */
    char *folder; /* the folder of both; "." if the name has no folder */
    bool force;
    pid_t owner; /* a forked child must not remove it */
    bool held;   /* true: a descriptor of its own holds the lock; false: that of the opened file */
    int hold;
} lm_temp;

/* Resolve the target; refuse an existing one unless `force`, and a name that is too long. */
lm_code lm_temp_init(lm_temp *t, const char *path, bool force, lm_err *e);
/* Create, lock and register the temporary: a file that *fd is opened on for reading and writing, or
 * a folder (fd NULL).  It gets the permissions of the target that it will replace.  A folder is
 * always accessible to its owner until lm_temp_keep_modes, which also sets the modes of its files.
 * `name` is for the message. */
lm_code lm_temp_create(lm_temp *t, const char *name, int *fd, lm_err *e);
void lm_temp_keep_modes(const lm_temp *t);
/* Called before the file's descriptor is closed: keeps the lock until the temporary is
 * published. */
lm_code lm_temp_hold(lm_temp *t, int fd, lm_err *e);
/* Rename to the target; without force, a target that was created meanwhile is not overwritten; then
 * fsync the folder. */
lm_code lm_temp_publish(lm_temp *t, lm_err *e);
lm_code lm_temp_sync(const lm_temp *t, lm_err *e); /* fsync of the folder */
/* Remove the temporary if it was not published, unregister it, free its names; a zeroed t is
 * fine. */
void lm_temp_fini(lm_temp *t);

#endif
