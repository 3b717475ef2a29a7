/* SPDX-License-Identifier: Apache-2.0 */
/* recipe_streams.c -- a stream can be read once, so it can stand for one thing. */
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "merge/recipe_impl.h"

/* Pipes, sockets and terminals by any name; standard input also when it is a file. */
static bool is_stream(const char *path, struct stat *st)
{
    if (!path)
        return false;
    if (!strcmp(path, "-"))
        return !fstat(STDIN_FILENO, st);
    return !stat(path, st) &&
           (S_ISFIFO(st->st_mode) || S_ISSOCK(st->st_mode) || S_ISCHR(st->st_mode));
}

bool lm_merge_same_stream(const char *a, const char *b)
{
    struct stat x, y;

    return is_stream(a, &x) && is_stream(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

enum { USES = 4 }; /* of one input: model, adapter, and side data */

static const char *use_of(const lm_merge_input *in, int k)
{
    const char *const path[USES] = { in->path, in->lora, in->fisher, in->gram };

    return path[k];
}

static lm_code refuse(const char *path, lm_err *e)
{
    bool standard = !strcmp(path, "-");

    return lm_fail(e, LM_EUSAGE, path, "name it once, or write it to a file first",
                   "%s is given twice, and can be read once",
                   standard ? "standard input" : "this stream");
}

/* Use b of input k against all before; one model under several adapters is opened once. */
static lm_code check_use(const lm_merge_recipe *r, int k, int b, lm_err *e)
{
    const char *path = use_of(&r->input[k], b);

    for (int i = 0; path && i <= k; i++)
        for (int a = 0; a < (i < k ? USES : b); a++) {
            const char *other = use_of(&r->input[i], a);

            if (other && lm_merge_same_stream(other, path) && (a || b || strcmp(other, path) != 0))
                return refuse(path, e);
        }
    return LM_OK;
}

lm_code lm_recipe_streams(const lm_merge_recipe *r, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; i < r->n_inputs && !rc; i++)
        for (int k = 0; k < USES && !rc; k++)
            rc = check_use(r, i, k, e);
    for (int s = 0; s < r->n_slices && !rc; s++)
        for (int k = 0; k < r->slice[s].n && !rc; k++)
            for (int i = 0; i < k && !rc; i++) {
                int input = r->slice[s].source[k].input;
                const char *path = r->input[input].path;
                struct stat st;

                if (r->slice[s].source[i].input == input && is_stream(path, &st))
                    rc = refuse(path, e);
            }
    return rc;
}
