/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_lex.c -- a template cut into tokens, white space around tags removed on the way.
 *
 * trim_blocks: the newline behind "%}" and "#}" goes.  lstrip_blocks: blanks between the beginning
 * of a line and "{%" or "{#" go.  "-" inside a tag removes all white space on its side, "+" keeps
 * it. */
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "text/jinja_run.h"

typedef struct {
    lm_jinja *t;
    const char *s;
    size_t len, at;
    int line;
    size_t line_from; /* offset of the beginning of the line */
    size_t counted;   /* line and line_from hold for this offset */
    lm_jtoken *v;
    size_t n, cap;
    char bracket[256];
    size_t open;
    bool line_starting; /* the last tag ended with a newline */
    lm_err *err;
} lexer;

static void count_to(lexer *x, size_t at)
{
    for (; x->counted < at; x->counted++)
        if (x->s[x->counted] == '\n') {
            x->line++;
            x->line_from = x->counted + 1;
        }
}

static lm_code wrong_at(lexer *x, size_t at, const char *what)
{
    count_to(x, at);
    return lm_jinja_wrong(x->t, x->line, (int)(at - x->line_from) + 1, x->err, "%s", what);
}

static lm_code emit(lexer *x, lm_jtoken_kind kind, size_t at, const char *text, size_t len)
{
    lm_code rc = lm_grow(&x->v, &x->cap, x->n + 1, sizeof *x->v, "tokens of a template", x->err);
    lm_jtoken *k;

    if (rc)
        return rc;
    k = &x->v[x->n];
    memset(k, 0, sizeof *k);
    count_to(x, at);
    k->kind = kind;
    k->line = x->line;
    k->col = (int)(at - x->line_from) + 1;
    rc = lm_jinja_str(x->t, text, len, &k->text, x->err);
    x->n += !rc;
    return rc;
}

static bool starts(const lexer *x, size_t at, const char *what)
{
    size_t n = strlen(what);

    return x->len - at >= n && !memcmp(x->s + at, what, n);
}

static size_t skip_blank(const lexer *x, size_t at)
{
    size_t n;

    while (at < x->len && lm_jstr_blank(lm_utf8_get(x->s + at, x->len - at, &n)))
        at += n;
    return at;
}

/* The end of a tag at `at`, "+" or "-" before it included; 0: it is not here.  *next: behind what
 * it takes along. */
static bool ends_tag(const lexer *x, size_t at, const char *end, bool plus, bool trim, size_t *next)
{
    size_t n = strlen(end);

    if (at < x->len && x->s[at] == '-' && starts(x, at + 1, end)) {
        *next = skip_blank(x, at + 1 + n);
        return true;
    }
    if (plus && at < x->len && x->s[at] == '+' && starts(x, at + 1, end)) {
        *next = at + 1 + n;
        return true;
    }
    if (!starts(x, at, end))
        return false;
    *next = at + n + (trim && at + n < x->len && x->s[at + n] == '\n');
    return true;
}

/* Text before a tag: its end, after the sign of the tag and lstrip_blocks. */
static size_t end_of_text(const lexer *x, size_t from, size_t to, char sign, bool block)
{
    size_t at = to, begin;

    if (sign == '-') {
        const char *s = x->s + from;
        size_t n = to - from;

        lm_jstr_strip(&s, &n, NULL, LM_JSTRIP_RIGHT);
        return from + n;
    }
    if (sign == '+' || !block)
        return to;
    while (at > from && x->s[at - 1] != '\n')
        at--;
    begin = at;
    if ((begin > from || x->line_starting) && skip_blank(x, begin) >= to)
        return begin;
    return to;
}

/* Bytes of the newline that a string or a text holds are normalised already; escapes as Python
 * reads them. */
static lm_code unescape(lexer *x, size_t at, const char *s, size_t len, lm_buf *out)
{
    static const char plain[] = "abfnrtv\\'\"", means[] = "\a\b\f\n\r\t\v\\'\"";
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < len; i++) {
        const char *p;
        char byte[4];
        size_t digits = 0, most, used = 0;
        uint32_t cp = 0;

        if (s[i] != '\\' || i + 1 == len) {
            rc = lm_buf_add(out, s + i, 1, x->err);
            continue;
        }
        i++;
        p = memchr(plain, s[i], sizeof plain - 1);
        if (p) {
            rc = lm_buf_add(out, means + (p - plain), 1, x->err);
            continue;
        }
        if (s[i] == '\n')
            continue;
        if (s[i] >= '0' && s[i] <= '7') {
            for (; used < 3 && i + used < len && s[i + used] >= '0' && s[i + used] <= '7'; used++)
                cp = cp * 8 + (uint32_t)(s[i + used] - '0');
            i += used - 1;
        } else if (s[i] == 'x' || s[i] == 'u' || s[i] == 'U') {
            char hex[9] = "";

            most = s[i] == 'x' ? 2 : s[i] == 'u' ? 4 : 8;
            for (; digits < most && i + 1 + digits < len; digits++)
                hex[digits] = s[i + 1 + digits];
            if (strspn(hex, "0123456789abcdefABCDEF") != most)
                return wrong_at(x, at, "an escape sequence is cut short");
            cp = (uint32_t)strtoul(hex, NULL, 16);
            if (cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000))
                return wrong_at(x, at, "an escape sequence is no character");
            i += most;
        } else {
            if (s[i] == 'N')
                return wrong_at(x, at, "names of characters (\\N{...}) are not supported");
            rc = lm_buf_add(out, s + i - 1, 2, x->err); /* an unknown one stays */
            continue;
        }
        rc = lm_buf_add(out, byte, lm_utf8_put(cp, byte), x->err);
    }
    return rc;
}

static lm_code read_string(lexer *x)
{
    size_t from = x->at, at = from + 1;
    lm_buf text = { 0 };
    lm_code rc;

    while (at < x->len && x->s[at] != x->s[from])
        at += x->s[at] == '\\' ? 2 : 1;
    if (at >= x->len)
        return wrong_at(x, from, "a string has no end");
    rc = unescape(x, from, x->s + from + 1, at - from - 1, &text);
    if (!rc)
        rc = emit(x, LM_JT_STRING, from, text.data, text.len);
    lm_buf_fini(&text);
    x->at = at + 1;
    return rc;
}

static size_t skip_digits(const lexer *x, size_t at)
{
    while (at < x->len &&
           ((x->s[at] >= '0' && x->s[at] <= '9') ||
            (x->s[at] == '_' && at + 1 < x->len && x->s[at + 1] >= '0' && x->s[at + 1] <= '9')))
        at++;
    return at;
}

static bool is_digit(const lexer *x, size_t at)
{
    return at < x->len && x->s[at] >= '0' && x->s[at] <= '9';
}

/* The end of a number's fraction and exponent, `at` itself if it has neither. */
static size_t end_of_float(const lexer *x, size_t from, size_t at)
{
    size_t end = at, e;

    if (from && x->s[from - 1] == '.')
        return at;
    if (at < x->len && x->s[at] == '.' && is_digit(x, at + 1))
        end = skip_digits(x, at + 1);
    if (end < x->len && (x->s[end] | 0x20) == 'e') {
        e = end + 1;
        if (e < x->len && (x->s[e] == '+' || x->s[e] == '-'))
            e++;
        if (is_digit(x, e))
            end = skip_digits(x, e);
    }
    return end;
}

static lm_code read_number(lexer *x)
{
    size_t from = x->at, at = skip_digits(x, from), end, n = 0;
    char text[64], *stop;
    lm_code rc;
    int base = 10;

    end = end_of_float(x, from, at);
    if (end == at && x->s[from] == '0' && at == from + 1 && at < x->len &&
        strchr("xXoObB", x->s[at])) {
        base = (x->s[at] | 0x20) == 'x' ? 16 : (x->s[at] | 0x20) == 'o' ? 8 : 2;
        for (end = ++at;
             end < x->len && (x->s[end] == '_' || strchr("0123456789abcdefABCDEF", x->s[end]));)
            end++;
    }
    for (size_t i = base == 10 ? from : at; i < end && n + 1 < sizeof text; i++)
        if (x->s[i] != '_')
            text[n++] = x->s[i];
    text[n] = 0;
    if (n + 1 >= sizeof text || !n ||
        (end == at && base == 10 && *text == '0' && strspn(text, "0") < n))
        return wrong_at(x, from, "a malformed number");
    rc = emit(x, end == at || base != 10 ? LM_JT_INT : LM_JT_FLOAT, from, text, n);
    if (rc)
        return rc;
    x->at = end;
    if (x->v[x->n - 1].kind == LM_JT_FLOAT) {
        if (!lm_parse_double(text, &x->v[x->n - 1].f))
            return wrong_at(x, from, "a number that 64 bits cannot hold");
        return LM_OK;
    }
    unsigned long long value = strtoull(text, &stop, base);
    if (*stop || value > INT64_MAX || n > 63 || (base == 10 && n > 19))
        return wrong_at(x, from, "an integer that 64 bits cannot hold");
    x->v[x->n - 1].i = (int64_t)value;
    return LM_OK;
}

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (unsigned char)c >= 0x80;
}

static lm_code read_operator(lexer *x)
{
    static const char *const two[] = { "//", "**", "==", "!=", ">=", "<=" };
    static const char one[] = "+-*/%~[](){}<>=.:|,;", open[] = "([{", close[] = ")]}";
    size_t n = 0;
    const char *p;
    char c = x->s[x->at];

    for (size_t i = 0; i < sizeof two / sizeof *two; i++)
        if (starts(x, x->at, two[i]))
            n = 2;
    if (!n && !strchr(one, c))
        return wrong_at(x, x->at, "a character that has no meaning here");
    n = n ? n : 1;
    if (n == 1 && strchr(open, c)) {
        if (x->open == sizeof x->bracket)
            return wrong_at(x, x->at, "too many brackets inside each other");
        x->bracket[x->open++] = close[strchr(open, c) - open];
    }
    p = n == 1 ? strchr(close, c) : NULL;
    if (p && (!x->open || x->bracket[--x->open] != c))
        return wrong_at(x, x->at, "a bracket that does not belong to the one before");
    x->at += n;
    return emit(x, LM_JT_OP, x->at - n, x->s + x->at - n, n);
}

/* The inside of {{ }} or {% %}, to the end of the tag. */
static lm_code read_tag(lexer *x, bool block)
{
    const char *end = block ? "%}" : "}}";
    lm_code rc = LM_OK;
    size_t next, from;

    x->open = 0;
    while (!rc) {
        if (!x->open && ends_tag(x, x->at, end, block, block, &next)) {
            rc = emit(x, block ? LM_JT_BLOCK_END : LM_JT_PRINT_END, x->at, NULL, 0);
            x->line_starting = x->s[next - 1] == '\n';
            x->at = next;
            return rc;
        }
        x->at = skip_blank(x, x->at);
        if (x->at >= x->len)
            return wrong_at(x, x->len,
                            block ? "the template ends inside {% %}"
                                  : "the template ends inside {{ }}");
        if (!x->open && ends_tag(x, x->at, end, block, block, &next))
            continue;
        from = x->at;
        if (is_digit(x, from)) {
            rc = read_number(x);
        } else if (is_letter(x->s[from])) {
            while (x->at < x->len && (is_letter(x->s[x->at]) || is_digit(x, x->at)))
                x->at++;
            rc = emit(x, LM_JT_NAME, from, x->s + from, x->at - from);
        } else if (x->s[from] == '\'' || x->s[from] == '"') {
            rc = read_string(x);
        } else {
            rc = read_operator(x);
        }
    }
    return rc;
}

static lm_code skip_comment(lexer *x)
{
    size_t next;

    for (size_t at = x->at; at < x->len; at++)
        if (ends_tag(x, at, "#}", true, true, &next)) {
            x->line_starting = x->s[next - 1] == '\n';
            x->at = next;
            return LM_OK;
        }
    return wrong_at(x, x->at, "a comment has no end: #} is missing");
}

/* Behind "{%" and its sign: the end of "raw %}", 0 if this is another tag. */
static size_t raw_begins(const lexer *x, size_t at)
{
    size_t next;

    at = skip_blank(x, at);
    if (!starts(x, at, "raw"))
        return 0;
    at = skip_blank(x, at + 3);
    return ends_tag(x, at, "%}", false, false, &next) ? next : 0;
}

static lm_code read_raw(lexer *x)
{
    size_t from = x->at, next, inside;

    for (size_t at = from; at + 1 < x->len; at++) {
        char sign;

        if (!starts(x, at, "{%"))
            continue;
        sign = at + 2 < x->len ? x->s[at + 2] : 0;
        inside = skip_blank(x, at + 2 + (sign == '-' || sign == '+'));
        if (!starts(x, inside, "endraw"))
            continue;
        inside = skip_blank(x, inside + 6);
        if (!ends_tag(x, inside, "%}", true, true, &next))
            continue;
        inside = end_of_text(x, from, at, sign, true);
        x->line_starting = x->s[next - 1] == '\n';
        x->at = next;
        return inside > from ? emit(x, LM_JT_DATA, from, x->s + from, inside - from) : LM_OK;
    }
    return wrong_at(x, from, "raw text has no end: {% endraw %} is missing");
}

/* Text up to the next tag, and that tag's beginning. */
static lm_code read_text(lexer *x)
{
    size_t from = x->at, at = from, end, raw = 0;
    lm_code rc = LM_OK;
    char sign, kind;

    while (at < x->len && !(x->s[at] == '{' && at + 1 < x->len && strchr("{%#", x->s[at + 1])))
        at++;
    if (at >= x->len) {
        x->at = x->len;
        return emit(x, LM_JT_DATA, from, x->s + from, x->len - from);
    }
    kind = x->s[at + 1];
    sign = at + 2 < x->len ? x->s[at + 2] : 0;
    sign = sign == '-' || sign == '+' ? sign : 0;
    end = end_of_text(x, from, at, sign, kind != '{');
    if (end > from)
        rc = emit(x, LM_JT_DATA, from, x->s + from, end - from);
    x->at = at + 2 + (sign != 0);
    x->line_starting = false;
    if (rc || kind == '#')
        return rc ? rc : skip_comment(x);
    if (kind == '%')
        raw = raw_begins(x, x->at);
    if (raw) {
        x->line_starting = x->s[raw - 1] == '\n';
        x->at = raw;
        return read_raw(x);
    }
    rc = emit(x, kind == '%' ? LM_JT_BLOCK : LM_JT_PRINT, at, NULL, 0);
    return rc ? rc : read_tag(x, kind == '%');
}

lm_code lm_jinja_lex(lm_jinja *t, const char *text, size_t len, lm_jtoken **out, size_t *n,
                     lm_err *e)
{
    lexer x = { .t = t, .s = text, .len = len, .line = 1, .line_starting = true, .err = e };
    lm_code rc = LM_OK;

    while (!rc && x.at < len)
        rc = read_text(&x);
    if (!rc)
        rc = emit(&x, LM_JT_EOF, len, NULL, 0);
    if (rc) {
        lm_free(x.v);
        return rc;
    }
    *out = x.v;
    *n = x.n;
    return LM_OK;
}
