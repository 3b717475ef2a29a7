/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_run.c -- see bundle_run.h. */
#include "format/bundle_run.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/folder.h"
#include "format/folder_run.h"

enum { MOST_FILES = 65536 }; /* of all checkpoints */

bool lm_bundle_run_link(const char *name, const char *target)
{
    if (!strcmp(name, "latest") || !strcmp(name, "best"))
        return lm_run_step_of(target) >= 0;
    return !strncmp(target, "latest/", 7) && !strcmp(target + 7, name);
}

lm_code lm_bundle_run_note(lm_bundle_run *r, const char *name, const char *target, lm_err *e)
{
    if (strcmp(name, "latest") || r->latest)
        return LM_OK;
    return lm_strdup(&r->latest, target, e);
}

bool lm_bundle_run_is_folder(const char *path)
{
    char step[64];
    size_t n = strcspn(path, "/");

    if (path[n] != '/' || n >= sizeof step)
        return false;
    memcpy(step, path, n);
    step[n] = '\0';
    return lm_run_step_of(step) >= 0;
}

bool lm_bundle_run_is_file(const char *path)
{
    const char *name = strchr(path, '/');

    return lm_bundle_run_is_folder(path) && name[1] != '.' && lm_name_ok(name + 1);
}

lm_code lm_bundle_run_add(lm_bundle_run *r, const char *path, uint64_t at, uint64_t bytes,
                          lm_err *e)
{
    size_t n = strcspn(path, "/");
    struct lm_bundle_run_file f = { .at = at, .bytes = bytes };
    lm_code rc = LM_OK;

    if (r->n >= MOST_FILES)
        return lm_fail(e, LM_EFORMAT, path, "make an archive of the newest checkpoint",
                       "the run has more than %d files in its checkpoints", MOST_FILES);
    rc = lm_grow(&r->v, &r->cap, r->n + 1, sizeof *r->v, "files of a run", e);
    if (!rc)
        rc = lm_asprintf(&f.step, e, "%.*s", (int)n, path);
    if (!rc && (rc = lm_strdup(&f.name, path + n + 1, e)))
        lm_free(f.step);
    if (!rc)
        r->v[r->n++] = f;
    return rc;
}

static bool has_config(const lm_bundle *b)
{
    for (size_t i = 0; i < b->n; i++)
        if (!strcmp(b->entry[i]->f.name, "config.json") ||
            !strcmp(b->entry[i]->f.name, "adapter_config.json"))
            return true;
    return false;
}

/* The checkpoint to read; NULL: the tar is not a run. */
static const char *newest(const lm_bundle_run *r, const lm_bundle *b)
{
    const char *step = r->latest;
    int64_t most = -1;

    if (step || has_config(b))
        return step;
    for (size_t i = 0; i < r->n; i++) {
        if (strcmp(r->v[i].name, "state.json") || lm_run_step_of(r->v[i].step) <= most)
            continue;
        step = r->v[i].step;
        most = lm_run_step_of(step);
    }
    return step;
}

/* The files beside the checkpoints do not belong to the one that is read. */
static lm_code drop_entries(lm_bundle *b, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < b->n; i++) {
        const char *name = b->entry[i]->f.name;
        if (!rc)
            rc = lm_bundle_pass(b, name, strlen(name), e);
        lm_free((char *)(uintptr_t)name);
        lm_free(b->entry[i]);
    }
    b->n = 0;
    return rc;
}

lm_code lm_bundle_run_choose(lm_bundle_run *r, lm_bundle *b, lm_err *e)
{
    const char *step = newest(r, b);
    lm_code rc = step ? drop_entries(b, e) : LM_OK;

    for (size_t i = 0; !rc && i < r->n; i++) {
        lm_bundle_entry *x;
        if (!step || strcmp(r->v[i].step, step)) {
            rc = lm_bundle_pass(b, r->v[i].step, strlen(r->v[i].step), e);
            continue;
        }
        rc = lm_bundle_add(b, r->v[i].name, r->v[i].bytes, &x, e);
        if (!rc)
            x->at = r->v[i].at;
    }
    if (!rc && step && !b->n)
        rc = lm_fail(e, LM_EUSAGE, b->path,
                     lm_text_ends(step, ".lmz") ? "extract that file from the archive, and name it"
                                                : "make the archive again from the complete run",
                     "is a run whose newest checkpoint is %.80s%s", step,
                     lm_text_ends(step, ".lmz") ? "" : ", which is missing");
    return rc;
}

void lm_bundle_run_fini(lm_bundle_run *r)
{
    for (size_t i = 0; i < r->n; i++) {
        lm_free(r->v[i].step);
        lm_free(r->v[i].name);
    }
    lm_free(r->v);
    lm_free(r->latest);
    *r = (lm_bundle_run){ 0 };
}
