/* SPDX-License-Identifier: Apache-2.0 */
/* jsonl.c -- see jsonl.h.  A recursive-descent scanner over one line. */
#include "format/jsonl.h"

#include <string.h>

#include "base/text.h"

enum { DEPTH_MAX = 512 };

typedef struct {
    const char *begin, *p, *end;
    const char *what; /* first fault */
    const char *at;
} scan;

static bool fault(scan *s, const char *what)
{
    if (!s->what) {
        s->what = what;
        s->at = s->p;
    }
    return false;
}

static void skip_space(scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r'))
        s->p++;
}

static int hex4(const char *p)
{
    int v = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

static bool scan_escape(scan *s)
{
    s->p++;
    if (s->p >= s->end)
        return fault(s, "a string that does not end");
    char c = *s->p;
    if (c == 'u') {
        if (s->end - s->p < 5 || hex4(s->p + 1) < 0)
            return fault(s, "\\u without four hexadecimal digits");
        s->p += 5;
        return true;
    }
    if (!c || !strchr("\"\\/bfnrt", c))
        return fault(s, "an unknown escape");
    s->p++;
    return true;
}

static bool scan_string(scan *s)
{
    if (s->p >= s->end || *s->p != '"')
        return fault(s, "expected a string");
    const char *start = s->p++;
    while (s->p < s->end) {
        unsigned char c = (unsigned char)*s->p;
        if (c == '"') {
            s->p++;
            return true;
        }
        if (c < 0x20)
            return fault(s, "a control character inside a string");
        if (c == '\\') {
            if (!scan_escape(s))
                return false;
        } else {
            s->p++;
        }
    }
    s->p = start;
    return fault(s, "a string that does not end");
}

static bool scan_digits(scan *s)
{
    const char *from = s->p;
    while (s->p < s->end && *s->p >= '0' && *s->p <= '9')
        s->p++;
    return s->p > from ? true : fault(s, "expected a digit");
}

static bool scan_number(scan *s)
{
    if (*s->p == '-')
        s->p++;
    if (s->p < s->end && *s->p == '0')
        s->p++;
    else if (!scan_digits(s))
        return false;
    if (s->p < s->end && *s->p == '.') {
        s->p++;
        if (!scan_digits(s))
            return false;
    }
    if (s->p < s->end && (*s->p == 'e' || *s->p == 'E')) {
        s->p++;
        if (s->p < s->end && (*s->p == '+' || *s->p == '-'))
            s->p++;
        return scan_digits(s);
    }
    return true;
}

static bool scan_word(scan *s, const char *word)
{
    size_t n = strlen(word);
    if ((size_t)(s->end - s->p) < n || memcmp(s->p, word, n) != 0)
        return fault(s, "expected a value");
    s->p += n;
    return true;
}

static bool scan_value(scan *s, int depth);

static bool scan_array(scan *s, int depth)
{
    s->p++;
    skip_space(s);
    if (s->p < s->end && *s->p == ']') {
        s->p++;
        return true;
    }
    for (;;) {
        if (!scan_value(s, depth + 1))
            return false;
        skip_space(s);
        if (s->p >= s->end || (*s->p != ',' && *s->p != ']'))
            return fault(s, "expected ',' or ']'");
        if (*s->p++ == ']')
            return true;
    }
}

bool lm_jsonl_is(const char *tok, size_t len, const char *field)
{
    if (!memchr(tok, '\\', len))
        return strlen(field) == len - 2 && memcmp(tok + 1, field, len - 2) == 0;
    lm_buf b = { 0 };
    lm_err ignored = { 0 };
    int64_t lone = 0;
    bool same = !lm_jsonl_unescape(tok, len, &b, &lone, &ignored) && b.len == strlen(field) &&
                memcmp(b.data ? b.data : "", field, b.len) == 0;
    lm_buf_fini(&b);
    return same;
}

/* An object; field != NULL only at the top level. */
static bool scan_object(scan *s, int depth, const char *field, const char **vb, const char **ve)
{
    s->p++;
    skip_space(s);
    if (s->p < s->end && *s->p == '}') {
        s->p++;
        return true;
    }
    for (;;) {
        skip_space(s);
        const char *key = s->p;
        if (!scan_string(s))
            return false;
        bool mine = field && lm_jsonl_is(key, (size_t)(s->p - key), field);
        skip_space(s);
        if (s->p >= s->end || *s->p != ':')
            return fault(s, "expected ':'");
        s->p++;
        skip_space(s);
        const char *value = s->p;
        if (mine && *vb)
            return fault(s, "the field occurs twice");
        if (!scan_value(s, depth + 1))
            return false;
        if (mine) {
            *vb = value;
            *ve = s->p;
        }
        skip_space(s);
        if (s->p >= s->end || (*s->p != ',' && *s->p != '}'))
            return fault(s, "expected ',' or '}'");
        if (*s->p++ == '}')
            return true;
    }
}

static bool scan_value(scan *s, int depth)
{
    skip_space(s);
    if (depth > DEPTH_MAX)
        return fault(s, "nested deeper than 512 levels");
    if (s->p >= s->end)
        return fault(s, "expected a value");
    switch (*s->p) {
    case '{':
        return scan_object(s, depth, NULL, NULL, NULL);
    case '[':
        return scan_array(s, depth);
    case '"':
        return scan_string(s);
    case 't':
        return scan_word(s, "true");
    case 'f':
        return scan_word(s, "false");
    case 'n':
        return scan_word(s, "null");
    default:
        if (*s->p == '-' || (*s->p >= '0' && *s->p <= '9'))
            return scan_number(s);
        return fault(s, "expected a value");
    }
}

lm_jsonl_fault lm_jsonl_find(const char *line, size_t len, const char *field, size_t *begin,
                             size_t *end)
{
    scan s = { .begin = line, .p = line, .end = line + len };
    const char *vb = NULL, *ve = NULL;
    int kind = LM_JSONL_MALFORMED;

    skip_space(&s);
    if (s.p >= s.end || *s.p != '{') {
        fault(&s, "expected '{': a line is one JSON object");
    } else if (scan_object(&s, 1, field, &vb, &ve)) {
        skip_space(&s);
        if (s.p < s.end) {
            fault(&s, "bytes after the object");
        } else if (!vb) {
            s.p = line;
            kind = LM_JSONL_ABSENT;
            fault(&s, "no such field");
        } else if (*vb != '"') {
            s.p = vb;
            kind = LM_JSONL_NO_STRING;
            fault(&s, "the field is not a string");
        }
    }
    if (!s.what) {
        *begin = (size_t)(vb - line);
        *end = (size_t)(ve - line);
    }
    return (
        lm_jsonl_fault){ .what = s.what, .at = s.what ? (size_t)(s.at - line) : 0, .kind = kind };
}

bool lm_jsonl_next(const char *line, size_t len, size_t *at, lm_jsonl_member *out)
{
    scan s = { .begin = line, .p = line + *at, .end = line + len };
    skip_space(&s);
    if (s.p >= s.end || (*s.p != '{' && *s.p != ','))
        return false; /* the closing bracket */
    s.p++;
    skip_space(&s);
    out->key = (size_t)(s.p - line);
    if (s.p >= s.end || *s.p != '"' || !scan_string(&s))
        return false;
    out->key_end = (size_t)(s.p - line);
    skip_space(&s);
    if (s.p >= s.end || *s.p++ != ':')
        return false;
    skip_space(&s);
    out->value = (size_t)(s.p - line);
    if (!scan_value(&s, 2))
        return false;
    out->value_end = *at = (size_t)(s.p - line);
    return true;
}

/* The code point of the \u escape at p (which points at the 'u'); *n = bytes after the backslash.
 * -1 for a lone surrogate, which has 5 bytes. */
static int32_t take_unicode(const char *p, const char *end, size_t *n)
{
    int32_t u = hex4(p + 1);
    *n = 5;
    if (u < 0xD800 || u > 0xDFFF)
        return u;
    if (u < 0xDC00 && end - p >= 11 && p[5] == '\\' && p[6] == 'u') {
        int32_t v = hex4(p + 7);
        if (v >= 0xDC00 && v <= 0xDFFF) {
            *n = 11;
            return 0x10000 + ((u - 0xD800) << 10) + (v - 0xDC00);
        }
    }
    return -1;
}

lm_code lm_jsonl_unescape(const char *s, size_t len, lm_buf *out, int64_t *lone, lm_err *e)
{
    const char *p = s + 1, *end = s + len - 1;
    lm_code rc = lm_buf_room(out, len, e); /* an escape is never shorter than its UTF-8 */
    if (rc)
        return rc;
    char *d = out->data + out->len;
    while (p < end) {
        const char *q = memchr(p, '\\', (size_t)(end - p));
        size_t run = (size_t)((q ? q : end) - p);
        memcpy(d, p, run);
        d += run;
        p += run;
        if (!q)
            break;
        p++;
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        if (*p == 'u') {
            size_t n;
            int32_t cp = take_unicode(p, end, &n);
            *lone += cp < 0;
            d += lm_utf8_put(cp < 0 ? 0xFFFD : (uint32_t)cp, d);
            p += n;
        } else {
            *d++ = to[strchr(from, *p) - from];
            p++;
        }
    }
    out->len = (size_t)(d - out->data);
    out->data[out->len] = 0;
    return LM_OK;
}

void lm_jsonl_mend(char *s, size_t len)
{
    char *p = s + 1, *end = s + len - 1;
    while (p < end && (p = memchr(p, '\\', (size_t)(end - p)))) {
        p++;
        if (*p == 'u') {
            size_t n;
            if (take_unicode(p, end, &n) < 0)
                memcpy(p + 1, "fffd", 4);
            p += n;
        } else {
            p++;
        }
    }
}

lm_code lm_jsonl_escape(const char *text, size_t len, lm_buf *out, lm_err *e)
{
    static const char hex[] = "0123456789abcdef";
    lm_code rc = lm_buf_add(out, "\"", 1, e);
    size_t from = 0;
    for (size_t i = 0; i <= len && !rc; i++) {
        unsigned char c = i < len ? (unsigned char)text[i] : 0;
        if (i < len && c >= 0x20 && c != '"' && c != '\\')
            continue;
        rc = lm_buf_add(out, text + from, i - from, e);
        from = i + 1;
        if (rc || i == len)
            continue;
        char esc[6] = { '\\', 'u', '0', '0', hex[c >> 4], hex[c & 15] };
        const char *shorts = "\b\f\n\r\t\"\\", *k = c ? strchr(shorts, c) : NULL;
        if (k)
            esc[1] = "bfnrt\"\\"[k - shorts];
        rc = lm_buf_add(out, esc, k ? 2 : 6, e);
    }
    return rc ? rc : lm_buf_add(out, "\"", 1, e);
}
