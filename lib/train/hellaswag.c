/* SPDX-License-Identifier: Apache-2.0 */
/* hellaswag.c -- cleaning of HellaSwag's text. */
#include "train/hellaswag.h"

#include <stdbool.h>
#include <string.h>
#include <utf8proc.h>

#include "base/text.h"

/* White space as Python's str.strip() knows it. */
static bool is_space(uint32_t c)
{
    if (c < 0x80)
        return c == ' ' || (c >= 9 && c <= 13) || (c >= 28 && c <= 31);
    return c == 0x85 || utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_ZS ||
           c == 0x2028 || c == 0x2029;
}

static void strip(const char **text, size_t *len)
{
    size_t n;
    while (*len && is_space(lm_utf8_get(*text, *len, &n)) && n) {
        *text += n;
        *len -= n;
    }
    while (*len) {
        size_t at = *len - 1;
        while (at && ((unsigned char)(*text)[at] & 0xC0) == 0x80)
            at--;
        if (!is_space(lm_utf8_get(*text + at, *len - at, &n)))
            break;
        *len = at;
    }
}

/* Bytes of a bracket that begins at p: through the first "]" on the same line; 0: none. */
static size_t bracketed(const char *p, const char *end)
{
    const char *q = p;
    while (q < end && *q != ']' && *q != '\n')
        q++;
    return q < end && *q == ']' ? (size_t)(q - p) + 1 : 0;
}

/* One of the harness's three replacements, in place (none makes text longer). */
static void replace_titles(lm_buf *b, size_t from)
{
    static const char title[] = " [title]";
    size_t to = from, n = sizeof title - 1;
    for (size_t at = from; at < b->len;) {
        if (b->len - at >= n && !memcmp(b->data + at, title, n)) {
            memcpy(b->data + to, ". ", 2);
            to += 2;
            at += n;
        } else {
            b->data[to++] = b->data[at++];
        }
    }
    b->len = to;
}

static void drop_brackets(lm_buf *b, size_t from)
{
    size_t to = from;
    for (size_t at = from; at < b->len;) {
        size_t n = b->data[at] == '[' ? bracketed(b->data + at, b->data + b->len) : 0;
        at += n;
        if (!n)
            b->data[to++] = b->data[at++];
    }
    b->len = to;
}

static void join_spaces(lm_buf *b, size_t from)
{
    size_t to = from;
    for (size_t at = from; at < b->len;) {
        bool two = b->len - at >= 2 && b->data[at] == ' ' && b->data[at + 1] == ' ';
        b->data[to++] = b->data[at];
        at += two ? 2 : 1;
    }
    b->len = to;
}

lm_code lm_hellaswag_clean(const char *text, size_t len, lm_buf *out, lm_err *e)
{
    size_t from = out->len;
    strip(&text, &len);
    if (lm_buf_add(out, text, len, e))
        return e->code;
    replace_titles(out, from);
    drop_brackets(out, from);
    join_spaces(out, from);
    out->data[out->len] = 0; /* there is space: no step makes the text longer */
    return LM_OK;
}

/* The first letter in title case, the rest in lower case. */
static lm_code add_capitalised(lm_buf *out, const char *text, lm_err *e)
{
    size_t len = strlen(text), n;
    for (size_t at = 0; at < len; at += n) {
        char put[4];
        utf8proc_int32_t c = (utf8proc_int32_t)lm_utf8_get(text + at, len - at, &n);
        c = at ? utf8proc_tolower(c) : utf8proc_totitle(c);
        if (lm_buf_add(out, put, lm_utf8_put((uint32_t)c, put), e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_hellaswag_context(const char *activity, const char *ctx_a, const char *ctx_b,
                             lm_buf *out, lm_err *e)
{
    lm_buf whole = { 0 };
    if (!lm_buf_add(&whole, activity, strlen(activity), e) && !lm_buf_add(&whole, ": ", 2, e) &&
        !lm_buf_add(&whole, ctx_a, strlen(ctx_a), e) && !lm_buf_add(&whole, " ", 1, e) &&
        !add_capitalised(&whole, ctx_b, e))
        lm_hellaswag_clean(whole.data, whole.len, out, e);
    lm_buf_fini(&whole);
    return e->code;
}
