/* SPDX-License-Identifier: Apache-2.0 */
/* err.c -- fill and extend an lm_err. */
#include "base/err.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

lm_code lm_fail(lm_err *e, lm_code code, const char *where, const char *todo, const char *what, ...)
{
    int sys = errno;
    va_list ap;

    if (!e || e->code)
        return code;
    e->code = code;
    e->sys = code == LM_EIO ? sys : 0;
    snprintf(e->where, sizeof e->where, "%s", where ? where : "");
    snprintf(e->todo, sizeof e->todo, "%s", todo ? todo : "");
    va_start(ap, what);
    vsnprintf(e->what, sizeof e->what, what, ap);
    va_end(ap);
    errno = sys;
    return code;
}

void lm_err_in(lm_err *e, const char *context, ...)
{
    char front[sizeof e->where], back[sizeof e->where];
    va_list ap;
    size_t n;

    if (!e || !e->code)
        return;
    va_start(ap, context);
    vsnprintf(front, sizeof front, context, ap);
    va_end(ap);
    memcpy(back, e->where, sizeof back);
    n = strlen(front);
    memcpy(e->where, front, n + 1);
    if (back[0] && n + 3 < sizeof e->where)
        snprintf(e->where + n, sizeof e->where - n, ": %.*s", (int)(sizeof back - n - 3), back);
}

lm_code lm_err_disobeyed(lm_err *e)
{
    if (e->code == LM_EFORMAT)
        e->code = LM_EUSAGE;
    return e->code;
}
