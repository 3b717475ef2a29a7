/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_run.h -- the folder of a run (folder_run.h) as a tar: what the tar is read as is its newest
 * checkpoint, as of the folder itself; private to lib/format.
 *
 * The checkpoint is the one that the link `latest` names, else, where no config.json lies beside the
 * checkpoints, the one of the highest step that has a state.json.  Links into it are passed over. */
#ifndef LM_FORMAT_BUNDLE_RUN_H
#define LM_FORMAT_BUNDLE_RUN_H

#include "format/archive.h"
#include "format/bundle_impl.h"

/* Files of checkpoints met so far.  Zero-initialise. */
typedef struct {
    char *latest; /* what the link names; NULL: there is none */
    struct lm_bundle_run_file {
        char *step, *name;
        uint64_t at, bytes;
    } * v;
    size_t n, cap;
} lm_bundle_run;

/* Does a run have a link of this name and target? */
bool lm_bundle_run_link(const char *name, const char *target);
/* A link that a run has. */
lm_code lm_bundle_run_note(lm_bundle_run *r, const char *name, const char *target, lm_err *e);
/* Is `path` ("step-000300/config.json") a plain file of a checkpoint?  And the current member of `a`
 * is that one, of `bytes` bytes, of the tar that is mapped at `map`. */
bool lm_bundle_run_is_file(const char *path);
bool lm_bundle_run_is_folder(const char *path); /* "step-000300/" */
lm_code lm_bundle_run_add(lm_bundle_run *r, lm_ar *a, const uint8_t *map, const char *path,
                          uint64_t bytes, lm_err *e);
/* All members were met: if they are a run, its newest checkpoint becomes all that b has. */
lm_code lm_bundle_run_choose(lm_bundle_run *r, lm_bundle *b, lm_err *e);
void lm_bundle_run_fini(lm_bundle_run *r);

#endif
