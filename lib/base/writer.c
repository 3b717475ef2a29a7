/* SPDX-License-Identifier: Apache-2.0 */
/* writer.c -- a stream for output that keeps the reason of its first failed write. */
#include "base/writer.h"

#include <errno.h>
#include <stddef.h>
#include <sys/types.h>
#include <unistd.h>

/* Returns less than `bytes` after a failure. */
static ssize_t write_on(void *ctx, const char *data, size_t bytes)
{
    lm_writer *w = ctx;
    size_t done = 0;
    while (done < bytes && !w->error) {
        ssize_t put = write(w->fd, data + done, bytes - done);
        if (put >= 0)
            done += (size_t)put;
        else if (errno != EINTR)
            w->error = errno;
    }
    if (done < bytes)
        errno = w->error;
    return (ssize_t)done;
}

static int close_on(void *ctx)
{
    return close(((lm_writer *)ctx)->fd);
}

FILE *lm_writer_open(lm_writer *w)
{
    return fopencookie(w, "w", (cookie_io_functions_t){ .write = write_on, .close = close_on });
}

lm_writer *lm_writer_stdout(void)
{
    static lm_writer standard = { .fd = STDOUT_FILENO };
    return &standard;
}
