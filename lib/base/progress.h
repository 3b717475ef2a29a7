/* SPDX-License-Identifier: Apache-2.0 */
/* progress.h -- how lib/ reports long work without printing: through a sink that the tool provides.
 *
 * cmd/common draws it as a bar on a terminal; tests collect it; NULL drops it. */
#ifndef LM_BASE_PROGRESS_H
#define LM_BASE_PROGRESS_H

#include <stdint.h>

/* A notice is the closing summary of a tool that succeeded: how much was done. */
typedef enum {
    LM_LOG_ERROR = 1,
    LM_LOG_WARN,
    LM_LOG_NOTICE,
    LM_LOG_INFO,
    LM_LOG_DEBUG,
} lm_log_level;

typedef struct lm_sink {
    /* One message, without newline and without the tool's name. */
    void (*log)(struct lm_sink *s, lm_log_level level, const char *text);
    /* done of total (0 = unknown) in `unit` ("tokens", "bytes", "steps"); `note` may be NULL. */
    void (*progress)(struct lm_sink *s, const char *what, double done, double total,
                     const char *unit, const char *note);
    /* Seconds between two lines that report the progress of long work, for logs in which no bar is
     * drawn.  0: no such lines, because the bar is drawn, progress is off, or more detailed lines
     * are written. */
    double beat;
} lm_sink;

void lm_log(lm_sink *s, lm_log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void lm_progress(lm_sink *s, const char *what, double done, double total, const char *unit,
                 const char *note);

#endif
