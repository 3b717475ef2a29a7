/* SPDX-License-Identifier: Apache-2.0 */
/* folder_run.c -- the links that make a run folder a model, each replaced by rename, so that it
 * exists at all times. */
#include "format/folder_run.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/owner.h"

char *lm_run_step_name(int64_t step, char *buf)
{
    snprintf(buf, 32, "step-%06" PRId64, step);
    return buf;
}

int64_t lm_run_step_of(const char *name)
{
    int64_t step = 0;
    size_t n = 0;

    if (strncmp(name, "step-", 5))
        return -1;
    for (name += 5; name[n]; n++) {
        if (n >= 6 && !strcmp(name + n, ".lmz"))
            return step;
        if (name[n] < '0' || name[n] > '9' || n >= 18)
            return -1;
        step = 10 * step + (name[n] - '0');
    }
    return n >= 6 ? step : -1;
}

/* Make or replace the symbolic link dir/name -> target. */
static lm_code put_link(const char *dir, const char *name, const char *target, lm_err *e)
{
    char *path = NULL, *temp = NULL, old[512], tag[LM_OWNER_TAG];
    lm_code rc = lm_path_join(&path, dir, name, e);

    if (!rc) {
        ssize_t n = readlink(path, old, sizeof old - 1);
        struct stat st;
        if (n >= 0 && (size_t)n == strlen(target) && !memcmp(old, target, (size_t)n)) {
            lm_free(path);
            return LM_OK;
        }
        if (n < 0 && !lstat(path, &st))
            rc = lm_fail(e, LM_EUSAGE, path, "move it away",
                         "its name is needed for a link to the newest checkpoint");
    }
    if (!rc)
        rc = lm_asprintf(&temp, e, "%s/.%s.tmp.%s", dir, name, lm_owner_tag(tag));
    if (!rc) {
        unlink(temp); /* errno of the failed symlink */
        if (symlink(target, temp) || rename(temp, path)) {
            rc = lm_fail(e, LM_EIO, path, NULL, "cannot make a link to %s", target);
            unlink(temp);
        }
    }
    lm_free(temp);
    lm_free(path);
    return rc;
}

/* Files that only training uses get no link: the run folder looks like a model folder. */
static bool is_model_file(const char *name)
{
    return strncmp(name, "optimizer", 9) && strcmp(name, "state.json") && name[0] != '.';
}

/* Remove links of an older checkpoint that had more files. */
static lm_code drop_stale(const char *run_dir, lm_err *e)
{
    char **names = NULL, target[512];
    size_t n = 0;
    lm_code rc = lm_dir_list(run_dir, &names, &n, e);

    for (size_t i = 0; !rc && i < n; i++) {
        char *path = NULL;
        rc = lm_path_join(&path, run_dir, names[i], e);
        ssize_t len = rc ? -1 : readlink(path, target, sizeof target - 1);
        if (len > 7 && !memcmp(target, "latest/", 7) && !lm_path_exists(path) && unlink(path))
            rc = lm_fail(e, LM_EIO, path, NULL, "cannot remove a stale link");
        lm_free(path);
    }
    lm_names_free(names, n);
    return rc;
}

static lm_code sync_dir(const char *dir, lm_err *e)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    lm_code rc = LM_OK;

    if (fd < 0 || fsync(fd))
        rc = lm_fail(e, LM_EIO, dir, NULL, "cannot sync the folder");
    if (fd >= 0)
        close(fd);
    return rc;
}

lm_code lm_run_publish(const char *run_dir, const char *step_dir_name, lm_err *e)
{
    char *step = NULL, **names = NULL;
    size_t n = 0;
    lm_code rc;

    if (lm_run_step_of(step_dir_name) < 0)
        return lm_fail(e, LM_EBUG, run_dir, NULL, "'%s' is not the name of a checkpoint",
                       step_dir_name);
    rc = lm_path_join(&step, run_dir, step_dir_name, e);
    if (!rc && lm_path_is_dir(step))
        rc = lm_dir_list(step, &names, &n, e);
    if (!rc)
        rc = put_link(run_dir, "latest", step_dir_name, e);
    for (size_t i = 0; !rc && i < n; i++) {
        char *target = NULL;
        if (!is_model_file(names[i]))
            continue;
        rc = lm_asprintf(&target, e, "latest/%s", names[i]);
        if (!rc)
            rc = put_link(run_dir, names[i], target, e);
        lm_free(target);
    }
    if (!rc)
        rc = drop_stale(run_dir, e);
    if (!rc)
        rc = sync_dir(run_dir, e);
    lm_names_free(names, n);
    lm_free(step);
    return rc;
}

lm_code lm_run_publish_best(const char *run_dir, const char *step_dir_name, lm_err *e)
{
    if (lm_run_step_of(step_dir_name) < 0)
        return lm_fail(e, LM_EBUG, run_dir, NULL, "'%s' is not the name of a checkpoint",
                       step_dir_name);
    return put_link(run_dir, "best", step_dir_name, e) ? e->code : sync_dir(run_dir, e);
}

int64_t lm_run_best(const char *run_dir)
{
    char target[64], *link = NULL;
    lm_err ignored = { 0 };
    ssize_t n = -1;
    if (!lm_path_join(&link, run_dir, "best", &ignored))
        n = readlink(link, target, sizeof target - 1);
    lm_free(link);
    if (n < 0)
        return -1;
    target[n] = 0;
    return lm_run_step_of(target);
}

/* True if the target of the link run_dir/name is `target`. */
static bool link_says(const char *run_dir, const char *name, const char *target)
{
    char text[64] = "", *link = NULL;
    lm_err ignored = { 0 };
    ssize_t n = -1;
    if (!lm_path_join(&link, run_dir, name, &ignored))
        n = readlink(link, text, sizeof text);
    lm_free(link);
    return n >= 0 && (size_t)n == strlen(target) && !memcmp(text, target, (size_t)n);
}

lm_code lm_run_replace(const char *from, const char *to, lm_err *e)
{
    char *a = realpath(from, NULL), *b = realpath(to, NULL);
    char *old = a ? strrchr(a, '/') : NULL, *now = b ? strrchr(b, '/') : NULL;
    lm_code rc = LM_OK;
    if (old && now && old - a == now - b && !memcmp(a, b, (size_t)(old - a)) &&
        lm_run_step_of(old + 1) >= 0 && lm_run_step_of(old + 1) == lm_run_step_of(now + 1)) {
        *old++ = *now++ = 0;
        if (link_says(a, "latest", old))
            rc = lm_run_publish(a, now, e);
        if (!rc && link_says(a, "best", old))
            rc = lm_run_publish_best(a, now, e);
    }
    free(a);
    free(b);
    return rc;
}

lm_code lm_run_find_step(const char *run_dir, int64_t step, char **out, lm_err *e)
{
    char name[40];
    int64_t found;
    *out = NULL;
    lm_code rc = lm_run_checkpoint(run_dir, lm_run_step_name(step, name), &found, e);
    if (!rc && found < 0)
        rc = lm_run_checkpoint(run_dir, strcat(name, ".lmz"), &found, e);
    return rc || found < 0 ? rc : lm_strdup(out, name, e);
}

lm_code lm_run_checkpoint(const char *run_dir, const char *name, int64_t *step, lm_err *e)
{
    char *path = NULL;
    struct stat st;
    bool whole = false;
    *step = lm_run_step_of(name);
    if (*step < 0)
        return LM_OK;
    lm_code rc = lm_path_join(&path, run_dir, name, e);
    if (!rc && strchr(name, '.')) {
        whole = !stat(path, &st) && S_ISREG(st.st_mode);
    } else if (!rc) {
        lm_free(path);
        path = NULL;
        rc = lm_asprintf(&path, e, "%s/%s/state.json", run_dir, name);
        whole = !rc && lm_path_exists(path);
    }
    if (!whole)
        *step = -1;
    lm_free(path);
    return rc;
}

/* True if a, of step `step`, is better than the best so far. */
static bool is_newer(const char *a, int64_t step, const char *best)
{
    int64_t of_best = best ? lm_run_step_of(best) : -1;
    return step > of_best || (step == of_best && strchr(best, '.') && !strchr(a, '.'));
}

lm_code lm_run_latest(const char *run_dir, char **out, lm_err *e)
{
    char *link = NULL, *best = NULL, target[64], **names = NULL;
    int64_t step = -1;
    size_t n = 0;
    lm_code rc = lm_path_join(&link, run_dir, "latest", e);

    *out = NULL;
    if (rc)
        return rc;
    ssize_t len = readlink(link, target, sizeof target - 1);
    lm_free(link);
    if (len > 0) {
        target[len] = '\0';
        if (!(rc = lm_run_checkpoint(run_dir, target, &step, e)) && step >= 0)
            return lm_strdup(out, target, e);
    }
    if (!rc)
        rc = lm_dir_list(run_dir, &names, &n, e);
    for (size_t i = 0; !rc && i < n; i++) {
        rc = lm_run_checkpoint(run_dir, names[i], &step, e);
        if (!rc && step >= 0 && is_newer(names[i], step, best))
            best = names[i];
    }
    if (!rc && best)
        rc = lm_strdup(out, best, e);
    lm_names_free(names, n);
    return rc;
}

lm_code lm_run_resolve(const char *path, char **out, lm_err *e)
{
    char *config = NULL, *link = NULL, *latest = NULL;
    struct stat st;
    *out = NULL;
    if (!lm_path_is_dir(path))
        return lm_strdup(out, path, e);
    lm_code rc = lm_path_join(&config, path, "config.json", e);
    if (!rc)
        rc = lm_path_join(&link, path, "latest", e);
    if (!rc && (!lstat(link, &st) || !lm_path_exists(config)))
        rc = lm_run_latest(path, &latest, e);
    if (!rc)
        rc = latest ? lm_path_join(out, path, latest, e) : lm_strdup(out, path, e);
    lm_free(config);
    lm_free(link);
    lm_free(latest);
    return rc;
}

lm_code lm_run_remove(const char *run_dir, const char *step_dir_name, lm_err *e)
{
    char *dir = NULL, *temp = NULL, tag[LM_OWNER_TAG];
    lm_code rc = lm_path_join(&dir, run_dir, step_dir_name, e);

    if (!rc)
        rc = lm_asprintf(&temp, e, "%s/.%s.tmp.%s", run_dir, step_dir_name, lm_owner_tag(tag));
    if (!rc && rename(dir, temp))
        rc = lm_fail(e, LM_EIO, dir, NULL, "cannot remove");
    if (!rc)
        rc = lm_rm_rf(temp, e);
    lm_free(dir);
    lm_free(temp);
    return rc;
}
