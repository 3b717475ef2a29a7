/* SPDX-License-Identifier: Apache-2.0 */
/* run_find.c -- finds the checkpoint that a training resumes, or explains why there is none. */
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/folder_run.h"
#include "format/lmz.h"
#include "train/run.h"
#include "train/run_tiers.h"

/* ---- explanations ---- */

typedef struct {
    int checkpoints;
    int64_t newest[3]; /* steps, the last first; -1: fewer */
    char half[40];     /* named like a checkpoint, without being one */
    bool any, model, data, temporary, begun;
} folder_content;

static lm_code look_into(const char *path, folder_content *c, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    lm_code rc = lm_dir_list(path, &names, &n, e);
    *c = (folder_content){ .newest = { -1, -1, -1 } };
    for (size_t i = 0; !rc && i < n; i++) {
        int64_t step;
        rc = lm_run_checkpoint(path, names[i], &step, e);
        c->any = true;
        c->model |= !strcmp(names[i], "config.json");
        c->data |= !strcmp(names[i], "train.bin") || !strcmp(names[i], "train_000000.bin");
        c->temporary |= !strncmp(names[i], ".step-", 6);
        c->begun |= !strcmp(names[i], ".train.lock");
        if (step >= 0) {
            c->checkpoints++;
            for (int k = 0; k < 3 && step >= 0; k++)
                if (step > c->newest[k]) {
                    int64_t other = c->newest[k];
                    c->newest[k] = step;
                    step = other;
                }
        } else if (lm_run_step_of(names[i]) >= 0) {
            snprintf(c->half, sizeof c->half, "%.39s", names[i]);
        }
    }
    lm_names_free(names, n);
    return rc;
}

/* The folder holds no checkpoint. */
static lm_code fail_without(const char *name, lm_err *e)
{
    folder_content c;
    char todo[256];
    if (look_into(name, &c, e))
        return e->code;
    if (*c.half)
        return lm_fail(e, LM_EUSAGE, name, "train from the model in it",
                       "holds no checkpoint to resume from: %s has no state.json", c.half);
    if (c.begun && !c.model && !c.temporary)
        return lm_fail(e, LM_EUSAGE, name, "begin it again with the command that began it",
                       "holds no checkpoint to resume from: its run ended before the first one");
    snprintf(todo, sizeof todo, "start a run with %.100s %.100s in a new folder",
             c.model ? name : "MODEL", c.data ? name : "DATA");
    return lm_fail(e, LM_EUSAGE, name, todo, "holds no checkpoint to resume from: %s",
                   c.model       ? "it is a model without the state of a training"
                   : c.data      ? "it holds token shards"
                   : c.temporary ? "it holds only what a killed run had not finished writing"
                   : c.any       ? "it is not the folder of a run"
                                 : "it is empty");
}

/* No file has this name: list the checkpoints of the run to which it would belong. */
static lm_code fail_missing(const char *name, lm_err *e)
{
    char *copy = NULL, list[128] = "", step[32];
    folder_content c = { 0 };
    size_t len = 0;
    lm_err unseen = { 0 };
    int sys = errno; /* errno of the caller's realpath */
    if (lm_strdup(&copy, name, e))
        return e->code;
    const char *run = dirname(copy);
    if (lm_path_is_dir(run))
        look_into(run, &c, &unseen);
    if (c.checkpoints) {
        for (int k = 2; k >= 0; k--)
            if (c.newest[k] >= 0)
                len += (size_t)snprintf(list + len, sizeof list - len, "%s%s",
                                        len                 ? ", "
                                        : c.checkpoints > 3 ? "..., "
                                                            : "",
                                        lm_run_step_name(c.newest[k], step));
        lm_fail(e, LM_EUSAGE, name, "name one of these, or the run for its newest",
                "is not a checkpoint: %.100s holds %s", run, list);
    } else {
        errno = sys;
        lm_fail(e, LM_EIO, name, "name the folder of a run, or one of its checkpoints",
                "cannot open");
    }
    lm_free(copy);
    return e->code;
}

/* ---- the origin of a run ---- */

/* True if there is a checkpoint without the name of one in a run. */
static lm_code is_lone_checkpoint(const char *path, bool *is, lm_err *e)
{
    char *state = NULL;
    lm_code rc = lm_path_join(&state, path, "state.json", e);
    *is = !rc && (!lm_path_is_dir(path) || lm_path_exists(state));
    lm_free(state);
    return rc;
}

static bool is_lmz(const char *path)
{
    lm_lmz *z = NULL;
    lm_err unseen = { 0 };
    bool is = !lm_lmz_open_index(path, NULL, &z, &unseen);
    lm_lmz_free(z);
    return is;
}

/* Of a folder with checkpoints of a run besides its own, the run is the latter. */
static lm_code find_run(const char *folder, char **run, lm_err *e)
{
    if (lm_run_tiers_run_of(folder, run, e))
        return e->code;
    return *run ? LM_OK : lm_strdup(run, folder, e);
}

static lm_code find_newest(const char *name, char **step_dir, char **run, lm_err *e)
{
    if (find_run(name, run, e) || lm_run_tiers_newest(*run, step_dir, e))
        return e->code;
    return *step_dir ? LM_OK : fail_without(name, e);
}

/* `real`: `name` without links. */
static lm_code find_step(const char *name, char *real, const char *output, char **step_dir,
                         char **run, lm_err *e)
{
    bool lone = false, inside = lm_run_step_of(lm_path_base(real)) >= 0;
    if (!inside && is_lone_checkpoint(real, &lone, e))
        return e->code;
    if (!inside && !lone)
        return find_newest(name, step_dir, run, e);
    if (lone && !lm_path_is_dir(real) && !is_lmz(real))
        return lm_fail(e, LM_EUSAGE, name, "name the folder of a run, or one of its checkpoints",
                       "is not a checkpoint: neither a folder nor an .lmz");
    if (!inside && !output)
        return lm_fail(e, LM_EUSAGE, name, "name the folder of the new run",
                       "is a checkpoint outside a run");
    if (lm_strdup(step_dir, real, e))
        return e->code;
    return inside ? find_run(dirname(real), run, e) : lm_strdup(run, output, e);
}

lm_code lm_run_check_idle(const char *name, const char *output, lm_err *e)
{
    char *real = realpath(name, NULL), *path = NULL;
    lm_code rc = LM_OK;
    if (!real)
        return LM_OK; /* lm_run_find reports it */
    bool inside = lm_run_step_of(lm_path_base(real)) >= 0;
    const char *run = inside ? dirname(real) : real;
    if (!output || lm_path_same(output, run))
        rc = lm_path_join(&path, run, ".train.lock", e);
    if (path)
        rc = lm_lock_check(path, inside ? run : name, e);
    lm_free(path);
    free(real);
    return rc;
}

lm_code lm_run_find(const char *name, const char *output, char **step_dir, char **run, lm_err *e)
{
    char *real = realpath(name, NULL);
    *step_dir = *run = NULL;
    if (!real)
        return fail_missing(name, e);
    lm_code rc = find_step(name, real, output, step_dir, run, e);
    free(real);
    if (rc) {
        lm_free(*step_dir);
        lm_free(*run);
        *step_dir = *run = NULL;
    }
    return rc;
}
