/* SPDX-License-Identifier: Apache-2.0 */
/* folder_prune.c -- removes old checkpoints of a run, but never the base of another .lmz in the
 * run. */
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/bundle.h"
#include "format/folder_run.h"
#include "format/lmz.h"

/* The path of the base that the file at `path` names; NULL if it is not an .lmz, or not a delta. */
static lm_code base_of(const char *path, char **out, lm_err *e)
{
    const char *slash = strrchr(path, '/');
    lm_err none = { 0 };
    lm_lmz *z = NULL;
    struct stat st;
    *out = NULL;
    if (stat(path, &st) || !S_ISREG(st.st_mode) || lm_lmz_open_index(path, NULL, &z, &none))
        return LM_OK;
    const lm_lmz_info *info = lm_lmz_about(z);
    lm_code rc = LM_OK;
    if (info->delta && info->base_name[0] != '/' && slash)
        rc = lm_asprintf(out, e, "%.*s/%s", (int)(slash - path), path, info->base_name);
    else if (info->delta)
        rc = lm_strdup(out, info->base_name, e);
    lm_lmz_free(z);
    return rc;
}

/* Mark the entry of the run at `path`. */
static lm_code mark(const char *run_dir, char *const *names, size_t n, const char *path, bool *keep,
                    lm_err *e)
{
    lm_code rc = LM_OK;
    for (size_t i = 0; !rc && i < n; i++) {
        char *entry = NULL;
        if (keep[i])
            continue;
        rc = lm_path_join(&entry, run_dir, names[i], e);
        keep[i] = !rc && lm_path_same(entry, path);
        lm_free(entry);
    }
    return rc;
}

lm_code lm_run_keep_bases(const char *run_dir, char *const *names, size_t n, bool *keep, lm_err *e)
{
    lm_code rc = LM_OK;
    for (size_t i = 0; !rc && i < n; i++) {
        char *path = NULL;
        if (!keep[i] || !lm_text_ends(names[i], ".lmz"))
            continue;
        rc = lm_path_join(&path, run_dir, names[i], e);
        for (int step = 0; !rc && path && step <= LM_LMZ_MAX_CHAIN; step++) {
            char *base = NULL;
            rc = base_of(path, &base, e);
            if (!rc && base)
                rc = mark(run_dir, names, n, base, keep, e);
            lm_free(path);
            path = base;
        }
        lm_free(path);
    }
    return rc;
}

/* The lowest of the newest `keep` steps from `step` down; -1: there are fewer. */
static int64_t oldest_kept(char *const *names, size_t n, int64_t step, int keep)
{
    for (int k = 1; k < keep && step >= 0; k++) {
        int64_t next = -1;
        for (size_t i = 0; i < n; i++) {
            int64_t s = lm_run_step_of(names[i]);
            next = s < step && s > next ? s : next;
        }
        step = next;
    }
    return step;
}

/* True if the checkpoint holds a file that no tool wrote: it is then not removed. */
static lm_code holds_more(const char *run_dir, const char *name, bool *more, lm_err *e)
{
    char *path = NULL;
    lm_err why = { 0 };
    lm_code rc = lm_path_join(&path, run_dir, name, e);
    *more = !rc && lm_path_is_dir(path) &&
            lm_dir_check_own(path, lm_bundle_own_checkpoint, NULL, &why) == LM_EUSAGE;
    if (!rc && why.code && !*more)
        *e = why;
    lm_free(path);
    return e->code;
}

static lm_code remove_before(const char *run_dir, char *const *names, size_t n, int64_t oldest,
                             lm_err *e)
{
    bool *keep = NULL, any = false;
    int64_t best = lm_run_best(run_dir);
    lm_code rc = lm_alloc_n(&keep, n + 1, sizeof *keep, "list of checkpoints", e);
    for (size_t i = 0; !rc && i < n; i++) {
        int64_t step = lm_run_step_of(names[i]);
        keep[i] = step < 0 || step >= oldest || step == best;
        any |= !keep[i];
    }
    if (!rc && any)
        rc = lm_run_keep_bases(run_dir, names, n, keep, e);
    for (size_t i = 0; !rc && i < n; i++) { /* a folder, an .lmz, or both */
        if (keep[i] || (rc = holds_more(run_dir, names[i], &keep[i], e)))
            continue;
        rc = keep[i] ? LM_OK : lm_run_remove(run_dir, names[i], e);
    }
    lm_free(keep);
    return rc;
}

lm_code lm_run_prune(const char *run_dir, int keep, lm_err *e)
{
    char **names = NULL, *latest = NULL;
    size_t n = 0;
    lm_code rc = lm_run_latest(run_dir, &latest, e);
    if (!rc && latest)
        rc = lm_dir_list(run_dir, &names, &n, e);
    int64_t oldest = latest ? oldest_kept(names, n, lm_run_step_of(latest), keep) : -1;
    if (!rc)
        rc = remove_before(run_dir, names, n, oldest, e);
    lm_names_free(names, n);
    lm_free(latest);
    return rc;
}
