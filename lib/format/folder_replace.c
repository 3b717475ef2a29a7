/* SPDX-License-Identifier: Apache-2.0 */
/* folder_replace.c -- a run replaces an older one in the same folder.
 *
 * The rename of `latest` replaces the old run.  Before it, the file .replaced lists the old
 * checkpoints; while `latest` names one of them, the list is void.  A kill at any moment leaves the
 * old run, or the new one with a list of checkpoints to remove. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/folder_run.h"

static const char list_name[] = ".replaced";

enum { LIST_BYTES = 16 << 20 };

static bool is_listed(const lm_buf *list, const char *name)
{
    size_t n = strlen(name);

    for (const char *at = list->data; at && *at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : "")
        if (!strncmp(at, name, n) && at[n] == '\n')
            return true;
    return false;
}

/* Read the list; empty if it is missing or void. */
static lm_code read_list(const char *run_dir, lm_buf *list, lm_err *e)
{
    char *path = NULL, *link = NULL, target[256];
    lm_code rc = lm_path_join(&path, run_dir, list_name, e);

    if (!rc)
        rc = lm_path_join(&link, run_dir, "latest", e);
    if (!rc && lm_path_exists(path))
        rc = lm_file_read(path, LIST_BYTES, list, e);
    if (!rc && list->len) {
        ssize_t n = readlink(link, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        if (n <= 0 || is_listed(list, target))
            list->data[list->len = 0] = 0;
    }
    lm_free(path);
    lm_free(link);
    return rc;
}

lm_code lm_run_without_replaced(const char *run_dir, char **names, size_t *n, lm_err *e)
{
    lm_buf list = { 0 };
    size_t kept = 0;
    lm_code rc = read_list(run_dir, &list, e);

    for (size_t i = 0; !rc && i < *n; i++) {
        if (is_listed(&list, names[i]))
            lm_free(names[i]);
        else
            names[kept++] = names[i];
    }
    *n = rc ? *n : kept;
    lm_buf_fini(&list);
    return rc;
}

static lm_code remove_list(const char *run_dir, lm_err *e)
{
    char *path = NULL;
    lm_code rc = lm_path_join(&path, run_dir, list_name, e);

    if (!rc && unlink(path) && errno != ENOENT)
        rc = lm_fail(e, LM_EIO, path, NULL, "cannot remove");
    lm_free(path);
    return rc;
}

/* Remove `best` of the old run if it names a checkpoint of the list; with NULL in any case. */
static lm_code drop_best(const char *run_dir, const lm_buf *list, lm_err *e)
{
    char *link = NULL, target[256];
    lm_code rc = lm_path_join(&link, run_dir, "best", e);
    ssize_t n = rc ? -1 : readlink(link, target, sizeof target - 1);

    target[n > 0 ? n : 0] = 0;
    if (n > 0 && (!list || is_listed(list, target)) && unlink(link))
        rc = lm_fail(e, LM_EIO, link, NULL, "cannot remove the link");
    lm_free(link);
    return rc;
}

lm_code lm_run_remove_replaced(const char *run_dir, lm_err *e)
{
    lm_buf list = { 0 };
    char **names = NULL;
    size_t n = 0;
    lm_code rc = read_list(run_dir, &list, e);

    if (!rc && list.len)
        rc = drop_best(run_dir, &list, e);
    if (!rc && list.len)
        rc = lm_dir_list(run_dir, &names, &n, e);
    for (size_t i = 0; !rc && i < n; i++)
        if (lm_run_step_of(names[i]) >= 0 && is_listed(&list, names[i]))
            rc = lm_run_remove(run_dir, names[i], e);
    if (!rc)
        rc = remove_list(run_dir, e);
    lm_names_free(names, n);
    lm_buf_fini(&list);
    return rc;
}

/* Write the list of all checkpoints except `name`; nothing if there are no others. */
static lm_code write_list(const char *run_dir, const char *name, lm_err *e)
{
    char **names = NULL, *path = NULL;
    size_t n = 0;
    lm_buf list = { 0 };
    lm_out *out = NULL;
    lm_code rc = lm_dir_list(run_dir, &names, &n, e);

    for (size_t i = 0; !rc && i < n; i++) {
        int64_t step;
        rc = lm_run_checkpoint(run_dir, names[i], &step, e);
        if (!rc && step >= 0 && strcmp(names[i], name) != 0)
            rc = lm_buf_addf(&list, e, "%s\n", names[i]);
    }
    if (!rc && list.len && !(rc = lm_path_join(&path, run_dir, list_name, e)) &&
        !(rc = lm_out_open(path, true, &out, e))) {
        rc = lm_write_all(lm_out_fd(out), list.data, list.len, path, e);
        if (rc)
            lm_out_drop(out);
        else
            rc = lm_out_commit(out, e);
    }
    lm_names_free(names, n);
    lm_buf_fini(&list);
    lm_free(path);
    return rc;
}

lm_code lm_run_publish_first(const char *run_dir, const char *step_dir_name, lm_err *e)
{
    lm_code rc = write_list(run_dir, step_dir_name, e);

    if (!rc)
        rc = lm_run_publish(run_dir, step_dir_name, e);
    if (!rc) /* it may name the new checkpoint, if the old run had one of the same step */
        rc = drop_best(run_dir, NULL, e);
    return rc ? rc : lm_run_remove_replaced(run_dir, e);
}
