/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_run.h -- the folder of a run (folder_run.h) as a tar: read as its newest checkpoint, as
 * the folder itself is; private to lib/format.
 *
 * The checkpoint is the one that the link `latest` names; without that link, and if no configuration
 * of a model or an adapter lies beside the checkpoints, the one of the highest step with a
 * state.json.  Links into it are skipped. */
#ifndef LM_FORMAT_BUNDLE_RUN_H
#define LM_FORMAT_BUNDLE_RUN_H

#include "format/bundle_impl.h"

/* Files of checkpoints found so far.  Zero-initialise. */
typedef struct {
    char *latest; /* the target of the link; NULL: no link */
    struct lm_bundle_run_file {
        char *step, *name;
        uint64_t at, bytes;
    } * v;
    size_t n, cap;
} lm_bundle_run;

/* True if a run may have a link of this name and target. */
bool lm_bundle_run_link(const char *name, const char *target);
/* Record a link of the run. */
lm_code lm_bundle_run_note(lm_bundle_run *r, const char *name, const char *target, lm_err *e);
/* True if `path` ("step-000300/config.json") is a plain file of a checkpoint; and record that file,
 * which has the bytes [at, at + bytes) of the mapped tar. */
bool lm_bundle_run_is_file(const char *path);
bool lm_bundle_run_is_folder(const char *path); /* "step-000300/" */
lm_code lm_bundle_run_add(lm_bundle_run *r, const char *path, uint64_t at, uint64_t bytes,
                          lm_err *e);
/* After the last member: if they are a run, the entries of b become its newest checkpoint. */
lm_code lm_bundle_run_choose(lm_bundle_run *r, lm_bundle *b, lm_err *e);
void lm_bundle_run_fini(lm_bundle_run *r);

#endif
