/* SPDX-License-Identifier: Apache-2.0 */
/* jsonw.c -- the streaming JSON writer. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"

static void write_text(lm_jw *w, const char *s, size_t len)
{
    if (!w->rc)
        w->rc = lm_buf_add(w->buf, s, len, w->err);
}

static void new_line(lm_jw *w)
{
    if (!w->indent)
        return;
    write_text(w, "\n", 1);
    for (int i = 0; i < w->depth * w->indent; i++)
        write_text(w, " ", 1);
}

static void escape(lm_jw *w, unsigned char c)
{
    static const char hex[] = "0123456789abcdef", from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *at = c ? strchr(from, c) : NULL;
    char out[6] = { '\\', 'u', '0', '0', hex[c >> 4], hex[c & 15] };

    if (at)
        out[1] = to[at - from];
    write_text(w, out, at ? 2 : 6);
}

static void quote(lm_jw *w, const char *s, size_t len)
{
    size_t start = 0, at = 0;

    write_text(w, "\"", 1);
    while (at < len) {
        unsigned char c = (unsigned char)s[at];

        if (c >= 0x80 && !lm_utf8_valid(s + at, len - at < 4 ? len - at : 4)) {
            write_text(w, s + start, at - start);
            write_text(w, "\xEF\xBF\xBD", 3); /* U+FFFD: the output is valid JSON for any input */
            start = ++at;
        } else if (c < 0x20 || c == '"' || c == '\\' || c == 0x7F) {
            write_text(w, s + start, at - start);
            escape(w, c);
            start = ++at;
        } else if (c < 0x80) {
            at++;
        } else {
            at += c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
        }
    }
    write_text(w, s + start, at - start);
    write_text(w, "\"", 1);
}

/* Write the comma, line break, indent and key that precede a value. */
static void lead(lm_jw *w, const char *key)
{
    if (w->comma)
        write_text(w, ",", 1);
    if (w->depth)
        new_line(w);
    if (key) {
        quote(w, key, strlen(key));
        write_text(w, ": ", w->indent ? 2 : 1);
    }
    w->comma = true;
}

void lm_jw_begin(lm_jw *w, lm_buf *buf, int indent, lm_err *e)
{
    *w = (lm_jw){ .buf = buf, .indent = indent, .err = e };
}

static void open_level(lm_jw *w, const char *key, const char *bracket)
{
    lead(w, key);
    write_text(w, bracket, 1);
    w->depth++;
    w->comma = false;
}

static void close_level(lm_jw *w, const char *bracket)
{
    w->depth--;
    if (w->comma)
        new_line(w);
    write_text(w, bracket, 1);
    w->comma = true;
}

void lm_jw_obj(lm_jw *w, const char *key)
{
    open_level(w, key, "{");
}

void lm_jw_arr(lm_jw *w, const char *key)
{
    open_level(w, key, "[");
}

void lm_jw_close_obj(lm_jw *w)
{
    close_level(w, "}");
}

void lm_jw_close_arr(lm_jw *w)
{
    close_level(w, "]");
}

void lm_jw_raw(lm_jw *w, const char *json, size_t len)
{
    lead(w, NULL);
    write_text(w, json, len);
}

void lm_jw_strn(lm_jw *w, const char *key, const char *s, size_t len)
{
    lead(w, key);
    quote(w, s, len);
}

void lm_jw_str(lm_jw *w, const char *key, const char *s)
{
    if (s) {
        lm_jw_strn(w, key, s, strlen(s));
    } else {
        lead(w, key);
        write_text(w, "null", 4);
    }
}

void lm_jw_int(lm_jw *w, const char *key, int64_t v)
{
    lead(w, key);
    if (!w->rc)
        w->rc = lm_buf_addf(w->buf, w->err, "%" PRId64, v);
}

/* The fewest of `least`..`most` digits that read back as the same number. */
static void real(lm_jw *w, const char *key, double v, int least, int most)
{
    char text[40];

    lead(w, key);
    if (!isfinite(v)) {
        write_text(w, "null", 4);
        return;
    }
    for (int digits = least; digits <= most; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if (most < 10 ? strtof(text, NULL) == (float)v : strtod(text, NULL) == v)
            break;
    }
    write_text(w, text, strlen(text));
}

void lm_jw_f32(lm_jw *w, const char *key, double v)
{
    real(w, key, v, 6, 9);
}

void lm_jw_f64(lm_jw *w, const char *key, double v)
{
    real(w, key, v, 15, 17);
}

void lm_jw_bool(lm_jw *w, const char *key, bool v)
{
    lead(w, key);
    write_text(w, v ? "true" : "false", v ? 4 : 5);
}

void lm_json_real(double v, char out[40])
{
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(out, 40, "%.*g", digits, v);
        if (strtod(out, NULL) == v)
            break;
    }
    const char *mark = strchr(out, 'e');
    int exponent = mark ? atoi(mark + 1) : 0;
    if (exponent > 0 && exponent < 16) /* 1e+06 is 1000000.0 */
        snprintf(out, 40, "%.1f", v);
    else if (!strpbrk(out, ".e"))
        strcat(out, ".0");
}

static void tree(lm_jw *w, const char *key, const json_t *v)
{
    const char *name;
    json_t *member;
    char number[40];

    switch (json_typeof(v)) {
    case JSON_OBJECT:
        lm_jw_obj(w, key);
        json_object_foreach((json_t *)(uintptr_t)v, name, member)
        {
            tree(w, name, member);
        }
        lm_jw_close_obj(w);
        break;
    case JSON_ARRAY:
        lm_jw_arr(w, key);
        for (size_t i = 0; i < json_array_size(v); i++)
            tree(w, NULL, json_array_get(v, i));
        lm_jw_close_arr(w);
        break;
    case JSON_STRING:
        lm_jw_strn(w, key, json_string_value(v), json_string_length(v));
        break;
    case JSON_INTEGER:
        lm_jw_int(w, key, json_integer_value(v));
        break;
    case JSON_REAL:
        lm_json_real(json_real_value(v), number);
        lead(w, key);
        write_text(w, number, strlen(number));
        break;
    case JSON_NULL:
        lm_jw_str(w, key, NULL);
        break;
    default:
        lm_jw_bool(w, key, json_is_true(v));
    }
}

void lm_jw_json(lm_jw *w, const char *key, const json_t *v)
{
    int indent = w->indent;

    lead(w, key); /* with the writer's own line breaks; a compact dump contains no others */
    w->comma = false;
    w->indent = 0;
    if (v)
        tree(w, NULL, v);
    else
        write_text(w, "null", 4);
    w->indent = indent;
    w->comma = true;
}

lm_code lm_jw_end(lm_jw *w)
{
    if (!w->rc && w->depth)
        w->rc = lm_fail(w->err, LM_EBUG, "JSON writer", NULL, "%d levels left open", w->depth);
    return w->rc;
}
