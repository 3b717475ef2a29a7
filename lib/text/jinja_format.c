/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_format.c -- "%s" % values and "{}".format(values), as far as texts and numbers need
 * them. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "text/jinja_run.h"

/* How a value is laid out. */
typedef struct {
    const char *fill; /* one character */
    size_t fill_len;
    char align; /* < > ^ = or 0 */
    char sign;  /* + - or space */
    bool alternate, comma;
    int width, precision; /* precision -1: not given */
    char type;            /* 0: by the value */
} layout;

enum { MAX_WIDTH = 4096, MAX_PRECISION = 300 };

static lm_code fill(lm_jrun *r, const layout *f, int n, lm_buf *out)
{
    lm_code rc = LM_OK;

    for (; !rc && n > 0; n--)
        rc = lm_jrun_add(r, out, f->fill, f->fill_len);
    return rc;
}

/* A sign (or nothing) and the text behind it, padded to the width. */
static lm_code lay_out(lm_jrun *r, const layout *f, const char *sign, const char *s, size_t len,
                       char align, lm_buf *out)
{
    lm_jstr text = { s, len, -1, false };
    int pad = f->width - (int)strlen(sign) - (int)lm_jv_chars(&text), left = 0, right = 0,
        inner = 0;
    lm_code rc;

    align = f->align ? f->align : align;
    pad = pad > 0 ? pad : 0;
    if (align == '<')
        right = pad;
    else if (align == '=')
        inner = pad;
    else
        left = align == '^' ? pad / 2 : pad;
    right += align == '^' ? pad - left : 0;
    rc = fill(r, f, left, out);
    if (!rc)
        rc = lm_jrun_add(r, out, sign, strlen(sign));
    if (!rc)
        rc = fill(r, f, inner, out);
    if (!rc)
        rc = lm_jrun_add(r, out, s, len);
    return rc ? rc : fill(r, f, right, out);
}

/* Thousands in the digits at the front of text. */
static void add_commas(char *text, size_t size)
{
    size_t digits = strspn(text, "0123456789"), len = strlen(text);

    for (size_t i = digits; i > 3; i -= 3) {
        if (len + 2 > size)
            return;
        memmove(text + i - 2, text + i - 3, len + 1 - (i - 3));
        text[i - 3] = ',';
        len++;
    }
}

static lm_code format_real(lm_jrun *r, const layout *f, double v, lm_buf *out)
{
    char text[700], form[16];
    char type = f->type ? f->type : 'r';
    bool percent = type == '%';
    const char *sign = signbit(v) && !isnan(v) ? "-"
                       : f->sign == '+'        ? "+"
                       : f->sign == ' '        ? " "
                                               : "";

    v = fabs(percent ? v * 100 : v);
    if (!isfinite(v)) {
        snprintf(text, sizeof text, "%s", isnan(v) ? "nan" : "inf");
    } else if (type == 'r' && f->precision < 0) {
        lm_json_real(v, text);
    } else {
        snprintf(form, sizeof form, "%%%s.*%c", f->alternate ? "#" : "",
                 percent       ? 'f'
                 : type == 'r' ? 'g'
                               : type);
        snprintf(text, sizeof text - 2, form, f->precision < 0 ? 6 : f->precision, v);
        if (percent)
            strcat(text, "%");
    }
    if (f->comma)
        add_commas(text, sizeof text);
    lm_code rc = lm_jrun_work(r, strlen(text)); /* digits cost more than other characters */
    return rc ? rc : lay_out(r, f, sign, text, strlen(text), '>', out);
}

static lm_code format_int(lm_jrun *r, const layout *f, int64_t v, lm_buf *out)
{
    char text[160], form[16], sign[8];
    uint64_t size = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    const char *mark = !f->alternate    ? ""
                       : f->type == 'x' ? "0x"
                       : f->type == 'X' ? "0X"
                       : f->type == 'o' ? "0o"
                                        : "";
    size_t n = 0;

    snprintf(sign, sizeof sign, "%s%s",
             v < 0            ? "-"
             : f->sign == '+' ? "+"
             : f->sign == ' ' ? " "
                              : "",
             f->type == 'b' && f->alternate ? "0b" : mark);
    if (f->type == 'b') {
        for (int bit = 63; bit >= 0; bit--)
            if (n || bit == 0 || size >> bit & 1)
                text[n++] = (size >> bit & 1) ? '1' : '0';
        text[n] = 0;
    } else {
        snprintf(form, sizeof form, "%%ll%c",
                 f->type == 'x' || f->type == 'X' || f->type == 'o' ? f->type : 'u');
        snprintf(text, sizeof text, form, (unsigned long long)size);
    }
    if (f->comma)
        add_commas(text, sizeof text);
    return lay_out(r, f, sign, text, strlen(text), '>', out);
}

static lm_code format_text(lm_jrun *r, const layout *f, const lm_jstr *s, char align, lm_buf *out)
{
    size_t len = f->precision >= 0 ? lm_jstr_offset(s, f->precision) : s->len;

    return lay_out(r, f, "", s->s, len, align, out);
}

/* ---- % ---- */

typedef struct {
    lm_jrun *r;
    const lm_jval *args;
    size_t next;
    bool named;
} supply;

static lm_code next_value(supply *s, const lm_jval **out)
{
    const lm_jval *a = s->args;

    if (a->kind == LM_JV_TUPLE) {
        if (s->next >= a->u.seq->n)
            return lm_jrun_fail(s->r, "not enough arguments for format string");
        *out = &a->u.seq->v[s->next++];
        return LM_OK;
    }
    if (s->next++)
        return lm_jrun_fail(s->r, "not enough arguments for format string");
    *out = a;
    return LM_OK;
}

static lm_code read_count(supply *s, const char **p, int most, int *out)
{
    const lm_jval *v;
    int64_t n = 0;
    lm_code rc = LM_OK;

    if (**p == '*') {
        ++*p;
        rc = next_value(s, &v);
        if (!rc && !lm_jv_integer(v, &n))
            return lm_jrun_fail(s->r, "* wants int");
    } else {
        for (; **p >= '0' && **p <= '9' && n <= most; ++*p)
            n = n * 10 + (**p - '0');
    }
    if (!rc && (n > most || n < -most))
        return lm_jrun_fail(s->r, "a width or precision of more than %d", most);
    *out = (int)n;
    return rc;
}

static lm_code percent_value(lm_jrun *r, layout *f, const lm_jval *v, lm_buf *out)
{
    const lm_jstr *text;
    lm_buf repr = { 0 };
    int64_t i;
    lm_code rc;

    if (f->type == 's') {
        rc = lm_jv_to_str(r, v, &text);
        return rc ? rc : format_text(r, f, text, '>', out);
    }
    if (f->type == 'r' || f->type == 'a') {
        rc = lm_jv_repr(r, v, &repr);
        lm_jstr made = { repr.data ? repr.data : "", repr.len, -1, false };
        if (!rc)
            rc = format_text(r, f, &made, '>', out);
        lm_buf_fini(&repr);
        return rc;
    }
    if (f->type == 'c') {
        char byte[4];

        if (v->kind == LM_JV_STR && lm_jv_chars(v->u.s) == 1)
            return format_text(r, f, v->u.s, '>', out);
        if (!lm_jv_integer(v, &i) || i < 0 || i > 0x10FFFF)
            return lm_jrun_fail(r, "%%c requires int or char");
        return lay_out(r, f, "", byte, lm_utf8_put((uint32_t)i, byte), '>', out);
    }
    if (!lm_jv_is_number(v))
        return lm_jrun_fail(r, "%%%c format: a real number is required, not %s", f->type,
                            lm_jv_type(v));
    if (strchr("diuxXo", f->type)) {
        if (!lm_jv_integer(v, &i)) {
            if (!(fabs(v->u.f) < 9e18))
                return lm_jrun_fail(r, "an integer beyond 64 bits");
            i = (int64_t)v->u.f;
        }
        f->precision = -1;
        return format_int(r, f, i, out);
    }
    f->precision = f->precision < 0 ? 6 : f->precision;
    return format_real(r, f, lm_jv_real(v), out);
}

/* Behind "%". */
static lm_code percent_one(supply *s, const char **at, lm_buf *out)
{
    static const char flags[] = "-+ 0#";
    layout f = { .fill = " ", .fill_len = 1, .precision = -1 };
    const lm_jval *v = NULL;
    const char *p = *at, *end;
    lm_code rc = LM_OK;

    if (*p == '(') {
        end = strchr(p, ')');
        if (!end)
            return lm_jrun_fail(s->r, "incomplete format key");
        if (s->args->kind != LM_JV_DICT)
            return lm_jrun_fail(s->r, "format requires a mapping");
        v = lm_jv_dict_at(s->args->u.dict, p + 1, (size_t)(end - p - 1));
        if (!v)
            return lm_jrun_fail(s->r, "the mapping has no key '%.*s'", (int)(end - p - 1), p + 1);
        s->named = true;
        p = end + 1;
    }
    for (; *p && strchr(flags, *p); p++) {
        if (*p == '-')
            f.align = '<';
        else if (*p == '0' && f.align != '<') {
            f.align = '=';
            f.fill = "0";
        } else if (*p == '#')
            f.alternate = true;
        else if (*p == '+' || (*p == ' ' && !f.sign))
            f.sign = *p;
    }
    rc = read_count(s, &p, MAX_WIDTH, &f.width);
    if (!rc && *p == '.') {
        p++;
        rc = read_count(s, &p, MAX_PRECISION, &f.precision);
    }
    while (!rc && *p && strchr("hlL", *p))
        p++;
    if (rc)
        return rc;
    if (*p == '%') {
        *at = p + 1;
        return lm_jrun_add(s->r, out, "%", 1);
    }
    if (!*p || !strchr("diuxXoeEfFgGcrsa", *p))
        return lm_jrun_fail(s->r, "unsupported format character '%c'", *p ? *p : ' ');
    if (f.width < 0) {
        f.align = '<';
        f.width = -f.width;
    }
    f.type = *p;
    if (strchr("srac", f.type) && f.align == '=') {
        f.align = '>';
        f.fill = " ";
    }
    *at = p + 1;
    if (!v)
        rc = next_value(s, &v);
    return rc ? rc : percent_value(s->r, &f, v, out);
}

lm_code lm_jformat_percent(lm_jrun *r, const lm_jstr *format, const lm_jval *args, lm_jval *out)
{
    supply s = { .r = r, .args = args };
    lm_buf text = { 0 };
    const char *p = format->s, *end = p + format->len;
    lm_code rc = LM_OK;
    lm_jval copy;
    bool one;

    if (memchr(p, 0, format->len) || *end) /* a slice of a longer text: make it end */
        rc = lm_jv_text(r, format->s, format->len, &copy);
    else
        copy = (lm_jval){ LM_JV_STR, { .s = format } };
    if (rc)
        return rc;
    p = copy.u.s->s;
    end = p + strlen(p);
    while (!rc && p < end) {
        const char *mark = strchr(p, '%');

        rc = lm_jrun_add(r, &text, p, (size_t)((mark ? mark : end) - p));
        if (!mark)
            break;
        p = mark + 1;
        if (!rc)
            rc = percent_one(&s, &p, &text);
    }
    one = args->kind != LM_JV_DICT && args->kind != LM_JV_LIST && args->kind != LM_JV_RANGE &&
          args->kind != LM_JV_UNDEFINED; /* Python takes what has items for a mapping */
    if (!rc && !s.named && s.next < (args->kind == LM_JV_TUPLE ? args->u.seq->n : one))
        rc = lm_jrun_fail(r, "not all arguments converted during string formatting");
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

/* ---- {} ---- */

static const char *read_number(const char *p, const char *end, int *out)
{
    for (*out = 0; p < end && *p >= '0' && *p <= '9' && *out <= MAX_WIDTH; p++)
        *out = *out * 10 + (*p - '0');
    return p;
}

static lm_code read_layout(lm_jrun *r, const char *p, const char *end, layout *f)
{
    static const char aligns[] = "<>^=";
    size_t n = 1;

    *f = (layout){ .fill = " ", .fill_len = 1, .precision = -1 };
    if (p < end)
        lm_utf8_get(p, (size_t)(end - p), &n);
    if (p + n < end && strchr(aligns, p[n])) {
        f->fill = p;
        f->fill_len = n;
        f->align = p[n];
        p += n + 1;
    } else if (p < end && strchr(aligns, *p)) {
        f->align = *p++;
    }
    if (p < end && strchr("+- ", *p))
        f->sign = *p++;
    if (p < end && *p == '#') {
        f->alternate = true;
        p++;
    }
    if (p < end && *p == '0') {
        if (!f->align) {
            f->align = '=';
            f->fill = "0";
            f->fill_len = 1;
        }
        p++;
    }
    p = read_number(p, end, &f->width);
    if (p < end && *p == ',') {
        f->comma = true;
        p++;
    }
    if (p < end && *p == '.')
        p = read_number(p + 1, end, &f->precision);
    if (p < end && strchr("sdbxXoeEfFgG%", *p))
        f->type = *p++;
    if (p < end || f->width > MAX_WIDTH || f->precision > MAX_PRECISION)
        return lm_jrun_fail(r, "a format that is not supported");
    return LM_OK;
}

static lm_code brace_value(lm_jrun *r, const lm_jval *v, const char *spec, const char *end,
                           lm_buf *out)
{
    const lm_jstr *text;
    layout f;
    int64_t i;
    lm_code rc = read_layout(r, spec, end, &f);

    if (rc)
        return rc;
    if (v->kind == LM_JV_FLOAT || (f.type && strchr("eEfFgG%", f.type) && lm_jv_is_number(v)))
        return format_real(r, &f, lm_jv_real(v), out);
    if (lm_jv_integer(v, &i) && (v->kind == LM_JV_INT || f.type) && f.type != 's')
        return format_int(r, &f, i, out);
    if (f.type && f.type != 's')
        return lm_jrun_fail(r, "Unknown format code '%c' for object of type '%s'", f.type,
                            lm_jv_type(v));
    rc = lm_jv_to_str(r, v, &text);
    return rc ? rc : format_text(r, &f, text, '<', out);
}

/* The value that "0", "name", "0.name[key]" or "" names. */
static lm_code brace_field(lm_jrun *r, const char *p, const char *end, const lm_jcall *c,
                           size_t *next, lm_jval *out)
{
    const char *stop = p;
    int index = -1;

    while (stop < end && *stop != '.' && *stop != '[')
        stop++;
    if (stop == p)
        index = (int)(*next)++;
    else if (*p >= '0' && *p <= '9')
        read_number(p, stop, &index);
    if (index >= 0) {
        if ((size_t)index >= c->n)
            return lm_jrun_fail(r, "Replacement index %d out of range for positional args tuple",
                                index);
        *out = c->pos[index];
    } else {
        size_t k = 0;

        while (k < c->n_kw && (c->name[k]->len != (size_t)(stop - p) ||
                               memcmp(c->name[k]->s, p, c->name[k]->len) != 0))
            k++;
        if (k == c->n_kw)
            return lm_jrun_fail(r, "format() has no argument '%.*s'", (int)(stop - p), p);
        *out = c->kw[k];
    }
    while (stop < end) {
        bool item = *stop == '[';
        const char *from = stop + 1;
        lm_jval key, got;
        lm_code rc;
        int number;

        for (stop = from; stop < end && (item ? *stop != ']' : *stop != '.' && *stop != '[');)
            stop++;
        rc = lm_jv_text(r, from, (size_t)(stop - from), &key);
        if (!rc && item && stop > from && read_number(from, stop, &number) == stop)
            key = lm_jv_int(number);
        if (!rc)
            rc = key.kind == LM_JV_INT || item ? lm_jrun_item(r, out, &key, &got)
                                               : lm_jrun_attribute(r, out, key.u.s, &got);
        if (rc)
            return rc;
        *out = got;
        stop += item && stop < end;
    }
    return LM_OK;
}

/* Between the braces. */
static lm_code brace_one(lm_jrun *r, const char *p, const char *end, const lm_jcall *c,
                         size_t *next, lm_buf *out)
{
    const char *spec = memchr(p, ':', (size_t)(end - p)), *stop = spec ? spec : end, *bang;
    lm_buf repr = { 0 };
    lm_jval v;
    lm_code rc;

    bang = memchr(p, '!', (size_t)(stop - p));
    rc = brace_field(r, p, bang ? bang : stop, c, next, &v);
    if (rc)
        return rc;
    if (bang && (bang + 2 != stop || !strchr("rs", bang[1])))
        return lm_jrun_fail(r, "a conversion that is not supported");
    if (bang) {
        rc = bang[1] == 'r' ? lm_jv_repr(r, &v, &repr) : lm_jv_str(r, &v, &repr);
        if (!rc)
            rc = lm_jv_text(r, repr.data, repr.len, &v);
        lm_buf_fini(&repr);
    }
    return rc ? rc : brace_value(r, &v, spec ? spec + 1 : end, end, out);
}

lm_code lm_jformat_braces(lm_jrun *r, const lm_jstr *format, const lm_jcall *c, lm_jval *out)
{
    const char *p = format->s, *end = p + format->len;
    lm_buf text = { 0 };
    size_t next = 0;
    lm_code rc = LM_OK;

    while (!rc && p < end) {
        const char *from = p, *close;

        while (p < end && *p != '{' && *p != '}')
            p++;
        rc = lm_jrun_add(r, &text, from, (size_t)(p - from));
        if (rc || p == end)
            break;
        if (p + 1 < end && p[1] == *p) { /* {{ and }} */
            rc = lm_jrun_add(r, &text, p, 1);
            p += 2;
            continue;
        }
        close = *p == '{' ? memchr(p, '}', (size_t)(end - p)) : NULL;
        if (!close || memchr(p + 1, '{', (size_t)(close - p - 1)))
            rc = lm_jrun_fail(r, "a format with braces that do not match");
        else
            rc = brace_one(r, p + 1, close, c, &next, &text);
        p = close ? close + 1 : end;
    }
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}
