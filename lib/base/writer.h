/* SPDX-License-Identifier: Apache-2.0 */
/* writer.h -- a stream for output that keeps the reason of its first failed write.
 *
 * A stream of stdio loses it: when a write inside fwrite or printf has failed, a later fflush has nothing left to
 * write and succeeds. */
#ifndef LM_BASE_WRITER_H
#define LM_BASE_WRITER_H

#include <stdio.h>

typedef struct {
    int fd;
    int error; /* errno of the first failed write, of which all later ones fail too; 0: none */
} lm_writer;

/* A buffered stream on w->fd, which fclose closes.  NULL: it failed, with errno.  w must live as long as the
 * stream. */
FILE *lm_writer_open(lm_writer *w);

/* Standard output.  A program that replaces `stdout` by a stream on it learns the reason here. */
lm_writer *lm_writer_stdout(void);

#endif
