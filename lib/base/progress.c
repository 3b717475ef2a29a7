/* SPDX-License-Identifier: Apache-2.0 */
/* progress.c -- format a line and pass it to the sink. */
#include "base/progress.h"

#include <stdarg.h>
#include <stdio.h>

void lm_log(lm_sink *s, lm_log_level level, const char *fmt, ...)
{
    char text[1024];
    va_list ap;

    if (!s || !s->log)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    s->log(s, level, text);
}

void lm_progress(lm_sink *s, const char *what, double done, double total, const char *unit,
                 const char *note)
{
    if (s && s->progress)
        s->progress(s, what, done, total, unit, note);
}
