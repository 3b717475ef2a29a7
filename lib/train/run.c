/* SPDX-License-Identifier: Apache-2.0 */
/* run.c -- prepares a run folder before the first step. */
#include "train/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/owner.h"
#include "format/folder.h"
#include "format/folder_run.h"

static lm_code path_in(char **out, const char *run, const char *a, const char *b, lm_err *e)
{
    return lm_asprintf(out, e, "%s/%s%s%s", run, a, b ? "/" : "", b ? b : "");
}

/* A link of ours: `latest` and `best` to a checkpoint's name, any other into latest/. */
static bool is_our_link(const char *path, const char *name)
{
    char target[512];
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0)
        return false;
    target[n] = 0;
    if (strcmp(name, "latest") && strcmp(name, "best"))
        return !strncmp(target, "latest/", 7);
    return lm_run_step_of(target) >= 0;
}

/* True if a link or a checkpoint of this run may use this name. */
static bool is_wanted(const char *name)
{
    size_t n = strlen(name);
    if (!strcmp(name, LM_RUN_REFERENCE))
        return false;
    if (!strcmp(name, "latest") || !strcmp(name, "best") || !strcmp(name, "config.json") ||
        !strcmp(name, "generation_config.json") || lm_run_step_of(name) >= 0 ||
        (n > 12 && !strcmp(name + n - 12, ".safetensors")))
        return true;
    for (const char *const *t = lm_tokenizer_files; *t; t++)
        if (!strcmp(*t, name))
            return true;
    return false;
}

lm_code lm_run_newest(const char *run, char **out, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    int64_t best = -1;
    const char *name = NULL;
    *out = NULL;
    lm_code rc = lm_dir_list(run, &names, &n, e);
    if (!rc)
        rc = lm_run_without_replaced(run, names, &n, e);
    for (size_t i = 0; !rc && i < n; i++) {
        int64_t step;
        rc = lm_run_checkpoint(run, names[i], &step, e);
        if (!rc && step > best) {
            best = step;
            name = names[i];
        }
    }
    if (!rc && name)
        rc = lm_strdup(out, name, e);
    lm_names_free(names, n);
    return rc;
}

/* The folder holds a run, whose newest checkpoint is `name`. */
static lm_code fail_taken(const char *run, const char *name, lm_err *e)
{
    char todo[256];
    snprintf(todo, sizeof todo,
             "resume the run in %.120s, choose another folder, or allow replacing the run", run);
    return lm_fail(e, LM_EUSAGE, run, todo, "holds a run already (%s)", name);
}

static lm_code fail_further(const char *run, const char *name, int64_t from, lm_err *e)
{
    char todo[256], step[32];
    snprintf(
        todo, sizeof todo,
        "resume the run in %.100s, begin another run at %s in another folder, or allow losing the "
        "later checkpoints",
        run, lm_run_step_name(from, step));
    return lm_fail(e, LM_EUSAGE, run, todo, "the run has gone further (%s)", name);
}

/* Check that a checkpoint to be removed holds only its own files. */
static lm_code check_removal(const char *run, const char *name, lm_err *e)
{
    char *path = NULL;
    lm_code rc = path_in(&path, run, name, NULL, e);
    if (!rc && lm_path_is_dir(path))
        rc = lm_dir_check_own(path, lm_bundle_own_checkpoint, NULL, e);
    lm_free(path);
    return rc;
}

static lm_code check_name(const char *run, const char *name, int64_t from, bool force, lm_err *e)
{
    char *path = NULL;
    int64_t step;
    lm_code rc = lm_run_checkpoint(run, name, &step, e);
    if (rc)
        return rc;
    if (step >= 0) {
        if (step <= from || force)
            return step <= from ? LM_OK : check_removal(run, name, e);
        return from < 0 ? fail_taken(run, name, e) : fail_further(run, name, from, e);
    }
    rc = path_in(&path, run, name, NULL, e);
    if (!rc && is_wanted(name) && !is_our_link(path, name))
        rc = lm_fail(e, LM_EUSAGE, path, "choose another folder for the run",
                     "has a name that the run needs");
    lm_free(path);
    return rc;
}

/* No kept .lmz may be a delta against a checkpoint that is removed. */
static lm_code check_bases(const char *run, char *const *names, size_t n, int64_t from, lm_err *e)
{
    bool *keep = NULL;
    lm_code rc = lm_alloc_n(&keep, n + 1, sizeof *keep, "list of checkpoints", e);
    for (size_t i = 0; !rc && i < n; i++)
        keep[i] = lm_run_step_of(names[i]) <= from;
    if (!rc)
        rc = lm_run_keep_bases(run, names, n, keep, e);
    for (size_t i = 0; !rc && i < n; i++)
        if (keep[i] && lm_run_step_of(names[i]) > from)
            rc =
                lm_fail(e, LM_EUSAGE, run, "make that one whole first, or choose another folder",
                        "%s would be removed, and an earlier .lmz is a delta against it", names[i]);
    lm_free(keep);
    return rc;
}

static lm_code check_entries(const char *run, int64_t from, bool force, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    lm_code rc = lm_dir_list(run, &names, &n, e);
    if (!rc)
        rc = lm_run_without_replaced(run, names, &n, e);
    for (size_t i = n; !rc && i-- > 0;) /* newest first: the message names that one */
        rc = check_name(run, names[i], from, force, e);
    if (!rc && force)
        rc = check_bases(run, names, n, from, e);
    lm_names_free(names, n);
    return rc;
}

static lm_code lock(const char *run, lm_sink *sink, lm_lock **out, lm_err *e)
{
    char *path = NULL;
    bool sure = true;
    lm_code rc = path_in(&path, run, ".train.lock", NULL, e);
    if (!rc)
        rc = lm_lock_take(path, run, out, &sure, e);
    if (!rc && !sure)
        lm_log(sink, LM_LOG_WARN,
               "%s: the file system has no locks: a second train on this run would not be noticed",
               run);
    lm_free(path);
    return rc;
}

static lm_code check_is_folder(const char *run, lm_err *e)
{
    return lm_path_exists(run) && !lm_path_is_dir(run)
               ? lm_fail(e, LM_EUSAGE, run, "choose another name", "is a file, not a folder")
               : LM_OK;
}

lm_code lm_run_check(const char *run, int64_t from, bool force, lm_err *e)
{
    return check_is_folder(run, e) || !lm_path_is_dir(run) ? e->code
                                                           : check_entries(run, from, force, e);
}

lm_code lm_run_open(const char *run, int64_t from, bool force, lm_sink *sink, lm_lock **out,
                    lm_err *e)
{
    *out = NULL;
    if (check_is_folder(run, e) || lm_mkdir_p(run, e))
        return e->code;
    if (access(run, W_OK | X_OK))
        return lm_fail(e, LM_EIO, run, NULL, "cannot write into the folder");
    lm_code rc = lock(run, sink, out, e);
    if (!rc && (rc = check_entries(run, from, force, e))) {
        lm_lock_drop(*out);
        *out = NULL;
    }
    return rc;
}

/* Set `latest` to the checkpoint of step `from`, in its form. */
static lm_code go_back(const char *run, int64_t from, lm_err *e)
{
    char *name = NULL;
    lm_code rc = lm_run_find_step(run, from, &name, e);
    if (!rc)
        rc = name ? lm_run_publish(run, name, e)
                  : lm_fail(e, LM_EIO, run, NULL,
                            "the checkpoint of step %" PRId64 " no longer exists", from);
    lm_free(name);
    return rc;
}

/* `best` must not name a checkpoint that will be removed; the trainer links the one in the state of
 * step `from`. */
static lm_code drop_best(const char *run, int64_t from, lm_err *e)
{
    char *path = NULL;
    if (lm_run_best(run) <= from)
        return LM_OK;
    lm_code rc = path_in(&path, run, "best", NULL, e);
    if (!rc && unlink(path))
        rc = lm_fail(e, LM_EIO, path, NULL, "cannot remove the link");
    lm_free(path);
    return rc;
}

/* The same where checkpoint `from` may lie elsewhere: `latest` is set to the newest one up to it. */
static lm_code go_back_near(const char *run, char *const *names, size_t n, int64_t from, lm_err *e)
{
    char *path = NULL;
    int64_t step, best = -1;
    for (size_t i = 0; i < n; i++) {
        if (lm_run_checkpoint(run, names[i], &step, e))
            return e->code;
        best = step <= from && step > best ? step : best;
    }
    if (best >= 0)
        return go_back(run, best, e);
    if (path_in(&path, run, "latest", NULL, e))
        return e->code;
    unlink(path);
    lm_free(path);
    return LM_OK;
}

/* aside: checkpoint `from` may lie in another folder. */
static lm_code remove_after(const char *run, int64_t from, bool aside, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    lm_code rc = lm_dir_list(run, &names, &n, e);
    if (!rc)
        rc = aside ? go_back_near(run, names, n, from, e) : go_back(run, from, e);
    if (!rc)
        rc = drop_best(run, from, e);
    for (size_t i = 0; !rc && i < n; i++) {
        int64_t step;
        rc = lm_run_checkpoint(run, names[i], &step, e);
        if (!rc && step > from)
            rc = lm_run_remove(run, names[i], e);
    }
    lm_names_free(names, n);
    return rc;
}

static lm_code sweep(const char *run, lm_err *e)
{
    if (lm_mkdir_p(run, e))
        return e->code;
    lm_owner_sweep(run, true);
    return lm_run_remove_replaced(run, e);
}

lm_code lm_run_claim(const char *run, int64_t from, bool aside, lm_err *e)
{
    return sweep(run, e) || from < 0 ? e->code : remove_after(run, from, aside, e);
}

lm_code lm_run_claim_aside(const char *folder, int64_t from, lm_err *e)
{
    return sweep(folder, e) ? e->code : remove_after(folder, from, true, e);
}

lm_code lm_run_apart(const char *run, const char *model, lm_err *e)
{
    char *from = realpath(model, NULL), *to = realpath(run, NULL);
    size_t n = to ? strlen(to) : 0;
    bool inside = from && to && !strncmp(from, to, n) && (from[n] == '/' || from[n] == 0 || n == 1);
    free(from);
    free(to);
    return inside ? lm_fail(e, LM_EUSAGE, run, "choose another folder for the run",
                            "is the folder that %s comes from", model)
                  : LM_OK;
}

lm_code lm_run_keep_path(json_t *o, const char *key, const char *path, lm_err *e)
{
    char *cwd = NULL, *whole = NULL;
    if (!path)
        return LM_OK;
    if (!strcmp(path, "-")) { /* a stream has no path */
        json_object_set_new(o, key, json_string(path));
        return LM_OK;
    }
    if (!(cwd = realpath(".", NULL)))
        return lm_fail(e, LM_EIO, ".", NULL, "cannot determine the current folder");
    lm_code rc = lm_path_join(&whole, cwd, path, e);
    if (!rc)
        json_object_set_new(o, key, json_string(whole));
    free(cwd);
    lm_free(whole);
    return rc;
}
