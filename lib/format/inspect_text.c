/* SPDX-License-Identifier: Apache-2.0 */
/* inspect_text.c -- see inspect_text.h. */
#include "format/inspect_text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void lm_text_add(lm_text *x, const char *s)
{
    if (!x->rc)
        x->rc = lm_buf_add(x->out, s, strlen(s), x->err);
}

void lm_text_addf(lm_text *x, const char *fmt, ...)
{
    char line[1024];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap); /* columns of bounded width only */
    va_end(ap);
    lm_text_add(x, line);
}

void lm_text_clean(lm_text *x, const char *s)
{
    size_t from = 0, i = 0;

    if (!s || x->rc)
        return;
    for (; s[i] && !x->rc; i++) {
        unsigned char c = (unsigned char)s[i];
        bool c1 = c == 0xc2 && (unsigned char)s[i + 1] >= 0x80 && (unsigned char)s[i + 1] < 0xa0;
        if (c >= 0x20 && c != 0x7f && !c1)
            continue;
        x->rc = lm_buf_add(x->out, s + from, i - from, x->err);
        lm_text_add(x, "?");
        i += c1;
        from = i + 1;
    }
    if (!x->rc)
        x->rc = lm_buf_add(x->out, s + from, i - from, x->err);
}

char *lm_text_shape(const lm_st_tensor *t, char buf[LM_SHAPE_TEXT])
{
    int n = snprintf(buf, LM_SHAPE_TEXT, "[");

    for (int i = 0; i < t->ndim; i++) /* 8 dimensions of 19 digits fit */
        n += snprintf(buf + n, LM_SHAPE_TEXT - (size_t)n, i ? ", %" PRId64 : "%" PRId64, t->dim[i]);
    snprintf(buf + n, LM_SHAPE_TEXT - (size_t)n, "]");
    return buf;
}

void lm_text_json_shape(lm_jw *w, const lm_st_tensor *t)
{
    lm_jw_arr(w, "shape");
    for (int i = 0; i < t->ndim; i++)
        lm_jw_int(w, NULL, t->dim[i]);
    lm_jw_close_arr(w);
}
