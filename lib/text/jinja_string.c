/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_string.c -- Python's operations on text, in code points; and JSON as values. */
#include <string.h>
#include <utf8proc.h>

#include "base/text.h"
#include "text/jinja_run.h"

size_t lm_jstr_offset(const lm_jstr *s, int64_t chars)
{
    size_t at = 0;

    if (s->chars == (int64_t)s->len) /* ASCII */
        return chars > (int64_t)s->len ? s->len : (size_t)chars;
    for (; at < s->len; at++)
        if (((unsigned char)s->s[at] & 0xC0) != 0x80 && chars-- == 0)
            break;
    return at;
}

bool lm_jstr_blank(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 0x1C && cp <= 0x20) || cp == 0x85 || cp == 0xA0 ||
           cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 ||
           cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

static bool is_stripped(const char *s, size_t n, const lm_jstr *chars)
{
    size_t k;

    if (!chars)
        return lm_jstr_blank(lm_utf8_get(s, n, &k));
    for (size_t i = 0; i < chars->len; i += k) {
        lm_utf8_get(chars->s + i, chars->len - i, &k);
        if (k == n && !memcmp(chars->s + i, s, n))
            return true;
    }
    return false;
}

void lm_jstr_strip(const char **s, size_t *len, const lm_jstr *chars, unsigned sides)
{
    const char *p = *s, *end = p + *len;
    size_t n;

    while ((sides & LM_JSTRIP_LEFT) && p < end) {
        lm_utf8_get(p, (size_t)(end - p), &n);
        if (!is_stripped(p, n, chars))
            break;
        p += n;
    }
    while ((sides & LM_JSTRIP_RIGHT) && p < end) {
        for (n = 1; n < (size_t)(end - p) && ((unsigned char)end[-(ptrdiff_t)n] & 0xC0) == 0x80;)
            n++;
        if (!is_stripped(end - n, n, chars))
            break;
        end -= n;
    }
    *s = p;
    *len = (size_t)(end - p);
}

/* ---- Case ---- */

/* The few characters whose other case is several characters, or depends on their place. */
static lm_code add_case(lm_jrun *r, const lm_jstr *s, size_t at, size_t n, bool upper, lm_buf *out)
{
    uint32_t cp = lm_utf8_get(s->s + at, s->len - at, &n), next;
    bool before = false, after = false;
    char text[4];
    size_t k;

    if (upper && cp == 0xDF)
        return lm_jrun_add(r, out, "SS", 2);
    if (!upper && cp == 0x130)
        return lm_jrun_add(r, out, "i\xCC\x87", 3);
    if (!upper && cp == 0x3A3) { /* sigma at the end of a word */
        for (k = at; k && ((unsigned char)s->s[--k] & 0xC0) == 0x80;)
            ;
        before = at && utf8proc_category((utf8proc_int32_t)lm_utf8_get(s->s + k, s->len - k, &k)) <=
                           UTF8PROC_CATEGORY_LO;
        next = at + n < s->len ? lm_utf8_get(s->s + at + n, s->len - at - n, &k) : ' ';
        after = utf8proc_category((utf8proc_int32_t)next) >= UTF8PROC_CATEGORY_LU &&
                utf8proc_category((utf8proc_int32_t)next) <= UTF8PROC_CATEGORY_LO;
        if (before && !after)
            return lm_jrun_add(r, out, "\xCF\x82", 2);
    }
    cp = (uint32_t)(upper ? utf8proc_toupper((utf8proc_int32_t)cp)
                          : utf8proc_tolower((utf8proc_int32_t)cp));
    return lm_jrun_add(r, out, text, lm_utf8_put(cp, text));
}

static lm_code add_cased(lm_jrun *r, const lm_jstr *s, size_t from, size_t to, bool upper,
                         lm_buf *out)
{
    lm_code rc = LM_OK;
    size_t n;

    for (size_t i = from; !rc && i < to; i += n) {
        lm_utf8_get(s->s + i, s->len - i, &n);
        rc = add_case(r, s, i, n, upper, out);
    }
    return rc;
}

lm_code lm_jstr_case(lm_jrun *r, const lm_jstr *s, bool upper, lm_jval *out)
{
    lm_buf text = { 0 };
    lm_code rc = add_cased(r, s, 0, s->len, upper, &text);

    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc || !s->safe ? rc : lm_jstr_trust(r, out->u.s, out);
}

lm_code lm_jstr_capitalize(lm_jrun *r, const lm_jstr *s, lm_jval *out)
{
    lm_buf text = { 0 };
    size_t n = 0;
    lm_code rc;

    if (s->len)
        lm_utf8_get(s->s, s->len, &n);
    rc = add_cased(r, s, 0, n, true, &text);
    if (!rc)
        rc = add_cased(r, s, n, s->len, false, &text);
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

bool lm_jstr_cased(const lm_jstr *s, bool upper)
{
    bool any = false;
    size_t n;

    for (size_t i = 0; i < s->len; i += n) {
        utf8proc_category_t c =
            utf8proc_category((utf8proc_int32_t)lm_utf8_get(s->s + i, s->len - i, &n));

        if (c == (upper ? UTF8PROC_CATEGORY_LL : UTF8PROC_CATEGORY_LU) || c == UTF8PROC_CATEGORY_LT)
            return false;
        any |= c == (upper ? UTF8PROC_CATEGORY_LU : UTF8PROC_CATEGORY_LL);
    }
    return any;
}

/* ---- HTML ---- */

lm_code lm_jstr_trust(lm_jrun *r, const lm_jstr *s, lm_jval *out)
{
    lm_jstr safe = { .safe = true };

    return lm_jv_part(r, &safe, s->s, s->len, out);
}

lm_code lm_jstr_escape(lm_jrun *r, const lm_jstr *s, lm_jval *out)
{
    static const char from[] = "&<>\"'";
    static const char *const to[] = { "&amp;", "&lt;", "&gt;", "&#34;", "&#39;" };
    lm_buf text = { 0 };
    lm_code rc = LM_OK;

    if (s->safe) {
        *out = (lm_jval){ LM_JV_STR, { .s = s } };
        return LM_OK;
    }
    for (size_t i = 0; !rc && i < s->len; i++) {
        const char *p = s->s[i] ? strchr(from, s->s[i]) : NULL;

        rc = p ? lm_jrun_add(r, &text, to[p - from], strlen(to[p - from]))
               : lm_jrun_add(r, &text, s->s + i, 1);
    }
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc ? rc : lm_jstr_trust(r, out->u.s, out);
}

/* ---- Lines, replacement ---- */

static bool ends_line(uint32_t cp)
{
    return (cp >= 10 && cp <= 13) || (cp >= 0x1C && cp <= 0x1E) || cp == 0x85 || cp == 0x2028 ||
           cp == 0x2029;
}

lm_code lm_jstr_lines(lm_jrun *r, const lm_jstr *s, bool keep, lm_jval *out)
{
    size_t from = 0, n;
    lm_jval one;
    lm_code rc = lm_jrun_work(r, s->len / 2);

    rc = rc ? rc : lm_jv_seq(r, LM_JV_LIST, 0, out);

    for (size_t i = 0; !rc && i < s->len;) {
        uint32_t cp = lm_utf8_get(s->s + i, s->len - i, &n);

        i += n;
        if (!ends_line(cp))
            continue;
        if (cp == '\r' && i < s->len && s->s[i] == '\n') {
            i++;
            n++;
        }
        rc = lm_jv_lend(r, s->s + from, i - from - (keep ? 0 : n), &one);
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, one);
        from = i;
    }
    if (!rc && from < s->len) {
        rc = lm_jv_lend(r, s->s + from, s->len - from, &one);
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, one);
    }
    return rc;
}

lm_code lm_jstr_replace(lm_jrun *r, const lm_jstr *s, const lm_jstr *old, const lm_jstr *new,
                        int64_t most, lm_jval *out)
{
    lm_buf text = { 0 };
    size_t at = 0, n;
    lm_code rc = LM_OK;

    while (!rc && most && at <= s->len) {
        const char *p = old->len ? memmem(s->s + at, s->len - at, old->s, old->len) : s->s + at;

        if (!p)
            break;
        rc = lm_jrun_add(r, &text, s->s + at, (size_t)(p - s->s) - at);
        if (!rc)
            rc = lm_jrun_add(r, &text, new->s, new->len);
        if (!rc)
            rc = lm_jrun_work(r, 1);
        at = (size_t)(p - s->s) + old->len;
        most -= most > 0;
        if (!old->len) { /* between all characters */
            if (at >= s->len) {
                at = s->len;
                break;
            }
            lm_utf8_get(s->s + at, s->len - at, &n);
            rc = rc ? rc : lm_jrun_add(r, &text, s->s + at, n);
            at += n;
        }
    }
    if (!rc && at < s->len)
        rc = lm_jrun_add(r, &text, s->s + at, s->len - at);
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

/* ---- JSON ---- */

static lm_code of_array(lm_jrun *r, const json_t *j, lm_jval *out)
{
    lm_code rc = lm_jv_seq(r, LM_JV_LIST, json_array_size(j), out);

    for (size_t i = 0; !rc && i < json_array_size(j); i++) {
        rc = lm_jv_of_json(r, json_array_get(j, i), &out->u.seq->v[i]);
        out->u.seq->n = i + 1;
    }
    return rc;
}

static lm_code of_object(lm_jrun *r, const json_t *j, lm_jval *out)
{
    json_t *object = (json_t *)(uintptr_t)j; /* jansson's iterators want it so; nothing changes */
    lm_code rc = lm_jv_dict(r, LM_JV_DICT, json_object_size(j), out);

    for (void *it = json_object_iter(object); !rc && it; it = json_object_iter_next(object, it)) {
        lm_jpair *p = &out->u.dict->v[out->u.dict->n];

        rc = lm_jv_lend(r, json_object_iter_key(it), json_object_iter_key_len(it), &p->key);
        if (!rc)
            rc = lm_jv_of_json(r, json_object_iter_value(it), &p->value);
        out->u.dict->n++;
    }
    return rc;
}

/* Text is borrowed: the tree outlives the rendering. */
lm_code lm_jv_of_json(lm_jrun *r, const json_t *j, lm_jval *out)
{
    lm_code rc = lm_jrun_enter(r);

    if (rc)
        return rc;
    switch (json_typeof(j)) {
    case JSON_NULL:
        *out = lm_jv_none();
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        *out = lm_jv_bool(json_is_true(j));
        break;
    case JSON_INTEGER:
        *out = lm_jv_int(json_integer_value(j));
        break;
    case JSON_REAL:
        *out = lm_jv_float(json_real_value(j));
        break;
    case JSON_STRING:
        rc = lm_jv_lend(r, json_string_value(j), json_string_length(j), out);
        break;
    case JSON_ARRAY:
        rc = of_array(r, j, out);
        break;
    case JSON_OBJECT:
        rc = of_object(r, j, out);
        break;
    }
    lm_jrun_leave(r);
    return rc;
}
