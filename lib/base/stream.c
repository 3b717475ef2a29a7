/* SPDX-License-Identifier: Apache-2.0 */
/* stream.c -- see stream.h. */
#include "base/stream.h"

#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

enum { MEMORY_DEVICES = 1 }; /* major number of /dev/null, /dev/zero, ... */

static bool identify(const char *path, struct stat *st)
{
    if (!path)
        return false;
    if (!strcmp(path, "-"))
        return !fstat(STDIN_FILENO, st);
    return !stat(path, st) && (S_ISFIFO(st->st_mode) || S_ISSOCK(st->st_mode) ||
                               (S_ISCHR(st->st_mode) && major(st->st_rdev) != MEMORY_DEVICES));
}

bool lm_stream_is(const char *path)
{
    struct stat st;
    return identify(path, &st);
}

bool lm_stream_same(const char *a, const char *b)
{
    struct stat x, y;
    return identify(a, &x) && identify(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

lm_code lm_stream_twice(const char *first, const char *second, lm_err *e)
{
    static const char todo[] = "name it once, or write it to a file first";

    if (!strcmp(first, second))
        return lm_fail(e, LM_EUSAGE, lm_path_shown(second), todo,
                       "is named for two inputs, and can be read only once");
    return lm_fail(e, LM_EUSAGE, lm_path_shown(second), todo,
                   "is the same stream as %s, which can be read only once", lm_path_shown(first));
}

lm_code lm_streams_once(const char *const *path, int n, lm_err *e)
{
    const char **stream = NULL; /* most inputs are files, so few names are kept */
    int n_streams = 0;
    lm_code rc = lm_alloc_n(&stream, (size_t)n + 1, sizeof *stream, "names of streams", e);

    for (int i = 0; i < n && !rc; i++) {
        if (!lm_stream_is(path[i]))
            continue;
        for (int k = 0; k < n_streams && !rc; k++)
            if (lm_stream_same(stream[k], path[i]))
                rc = lm_stream_twice(stream[k], path[i], e);
        stream[n_streams++] = path[i];
    }
    lm_free(stream);
    return rc;
}
