/* temps.h -- shared by out.c and outdir.c: the registry of temporaries and the naming of them. */
#ifndef LM_BASE_TEMPS_H
#define LM_BASE_TEMPS_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/err.h"

/* Embed first in what owns a temporary.  path NULL: nothing to remove. */
typedef struct lm_temp {
    struct lm_temp *next, **link;
    char *path;   /* the temporary              */
    char *target; /* where it goes on commit    */
    char *folder; /* that holds both; "." if none is named */
    bool force;
    pid_t owner; /* a forked child must not remove it */
} lm_temp;

/* Resolve the target, refuse an existing one unless `force`, and name the temporary for `attempt`
 * 0, 1, ... (another process may have left one behind). */
lm_code lm_temp_init(lm_temp *t, const char *path, bool force, lm_err *e);
lm_code lm_temp_name(lm_temp *t, int attempt, lm_err *e);
void lm_temp_register(lm_temp *t);
void lm_temp_unregister(lm_temp *t);
/* Rename to the target without overwriting what has appeared there meanwhile, unless force; then
 * fsync the folder. */
lm_code lm_temp_publish(lm_temp *t, lm_err *e);
lm_code lm_temp_sync(const lm_temp *t, lm_err *e); /* fsync of the folder */
void lm_temp_fini(lm_temp *t);

#endif
