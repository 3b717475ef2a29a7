/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_text.c -- values as text: str(), repr() and json.dumps() of Python. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/text.h"
#include "text/jinja_run.h"

static lm_code add(lm_jrun *r, lm_buf *out, const char *s)
{
    return lm_jrun_add(r, out, s, strlen(s));
}

static void show_real(double f, const char *inf, const char *nan, char text[40])
{
    if (isnan(f))
        snprintf(text, 40, "%s", nan);
    else if (isinf(f))
        snprintf(text, 40, "%s%s", f < 0 ? "-" : "", inf);
    else
        lm_json_real(f, text);
}

/* ---- repr ---- */

static bool is_printable(uint32_t cp)
{
    utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);

    if (cp == ' ')
        return true;
    return c != UTF8PROC_CATEGORY_CN && c != UTF8PROC_CATEGORY_CC && c != UTF8PROC_CATEGORY_CF &&
           c != UTF8PROC_CATEGORY_CS && c != UTF8PROC_CATEGORY_CO && c != UTF8PROC_CATEGORY_ZS &&
           c != UTF8PROC_CATEGORY_ZL && c != UTF8PROC_CATEGORY_ZP;
}

static lm_code repr_text(lm_jrun *r, const lm_jstr *s, lm_buf *out)
{
    char quote = memchr(s->s, '\'', s->len) && !memchr(s->s, '"', s->len) ? '"' : '\'';
    lm_code rc = lm_jrun_add(r, out, &quote, 1);
    char text[16];
    size_t n;

    for (size_t i = 0; !rc && i < s->len; i += n) {
        uint32_t cp = lm_utf8_get(s->s + i, s->len - i, &n);

        if (cp == (uint32_t)quote || cp == '\\')
            snprintf(text, sizeof text, "\\%c", (char)cp);
        else if (cp == '\n' || cp == '\r' || cp == '\t')
            snprintf(text, sizeof text, "\\%c", cp == '\n' ? 'n' : cp == '\r' ? 'r' : 't');
        else if (is_printable(cp))
            snprintf(text, sizeof text, "%.*s", (int)n, s->s + i);
        else
            snprintf(text, sizeof text,
                     cp < 0x100     ? "\\x%02x"
                     : cp < 0x10000 ? "\\u%04x"
                                    : "\\U%08x",
                     cp);
        rc = add(r, out, text);
    }
    return rc ? rc : lm_jrun_add(r, out, &quote, 1);
}

static lm_code repr_seq(lm_jrun *r, const lm_jval *v, lm_buf *out)
{
    const lm_jseq *s = v->u.seq;
    char head[64] = "[";
    lm_code rc;

    if (v->kind == LM_JV_RANGE) {
        if (s->step == 1)
            snprintf(head, sizeof head, "range(%lld, %lld)", (long long)s->from, (long long)s->to);
        else
            snprintf(head, sizeof head, "range(%lld, %lld, %lld)", (long long)s->from,
                     (long long)s->to, (long long)s->step);
        return add(r, out, head);
    }
    if (v->kind == LM_JV_ITER)
        return add(r, out, "<generator object>");
    if (v->kind == LM_JV_VIEW)
        snprintf(head, sizeof head, "%s([", s->what);
    rc = add(r, out, v->kind == LM_JV_TUPLE ? "(" : head);
    for (size_t i = 0; !rc && i < s->n; i++) {
        if (i)
            rc = add(r, out, ", ");
        if (!rc)
            rc = lm_jv_repr(r, &s->v[i], out);
    }
    if (rc)
        return rc;
    if (v->kind == LM_JV_TUPLE)
        return add(r, out, s->n == 1 ? ",)" : ")");
    return add(r, out, v->kind == LM_JV_VIEW ? "])" : "]");
}

static lm_code repr_dict(lm_jrun *r, const lm_jval *v, lm_buf *out)
{
    const lm_jdict *d = v->u.dict;
    bool space = v->kind == LM_JV_NAMESPACE;
    lm_code rc = add(r, out, space ? "<TemplateNamespace {" : "{");

    for (size_t i = 0; !rc && i < d->n; i++) {
        if (i)
            rc = add(r, out, ", ");
        if (!rc)
            rc = lm_jv_repr(r, &d->v[i].key, out);
        if (!rc)
            rc = add(r, out, ": ");
        if (!rc)
            rc = lm_jv_repr(r, &d->v[i].value, out);
    }
    return rc ? rc : add(r, out, space ? "}>" : "}");
}

lm_code lm_jv_repr(lm_jrun *r, const lm_jval *v, lm_buf *out)
{
    lm_code rc;
    char text[80];

    if (v->kind == LM_JV_STR)
        return repr_text(r, v->u.s, out);
    if (v->kind == LM_JV_UNDEFINED)
        return add(r, out, "Undefined");
    if (lm_jv_is_seq(v) || v->kind == LM_JV_DICT || v->kind == LM_JV_NAMESPACE) {
        rc = lm_jrun_enter(r);
        if (rc)
            return rc;
        rc = lm_jv_is_seq(v) ? repr_seq(r, v, out) : repr_dict(r, v, out);
        lm_jrun_leave(r);
        return rc;
    }
    switch (v->kind) {
    case LM_JV_NONE:
        return add(r, out, "None");
    case LM_JV_BOOL:
        return add(r, out, v->u.b ? "True" : "False");
    case LM_JV_INT:
        snprintf(text, sizeof text, "%lld", (long long)v->u.i);
        return add(r, out, text);
    case LM_JV_FLOAT:
        show_real(v->u.f, "inf", "nan", text);
        return add(r, out, text);
    default:
        snprintf(text, sizeof text, "<%s>", lm_jv_type(v));
        return add(r, out, text);
    }
}

lm_code lm_jv_str(lm_jrun *r, const lm_jval *v, lm_buf *out)
{
    if (v->kind == LM_JV_STR)
        return lm_jrun_add(r, out, v->u.s->s, v->u.s->len);
    if (v->kind == LM_JV_UNDEFINED)
        return LM_OK;
    return lm_jv_repr(r, v, out);
}

lm_code lm_jv_to_str(lm_jrun *r, const lm_jval *v, const lm_jstr **out)
{
    lm_buf text = { 0 };
    lm_jval made;
    lm_code rc;

    if (v->kind == LM_JV_STR) {
        *out = v->u.s;
        return LM_OK;
    }
    rc = lm_jv_str(r, v, &text);
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, &made);
    lm_buf_fini(&text);
    if (!rc)
        *out = made.u.s;
    return rc;
}

/* ---- JSON ---- */

static lm_code json_text(lm_jrun *r, const lm_jstr *s, bool ascii, lm_buf *out)
{
    static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    lm_code rc = add(r, out, "\"");
    size_t plain = 0, n;

    for (size_t i = 0; !rc && i < s->len; i += n) {
        uint32_t cp = lm_utf8_get(s->s + i, s->len - i, &n);
        const char *p = cp < 0x80 && cp ? strchr(from, (int)cp) : NULL;
        char text[16];

        if (!p && cp >= 0x20 && (cp < 0x80 || !ascii)) /* U+007F stays as it is, also for ASCII */
            continue;
        rc = lm_jrun_add(r, out, s->s + plain, i - plain);
        plain = i + n;
        if (p)
            snprintf(text, sizeof text, "\\%c", to[p - from]);
        else if (cp < 0x10000)
            snprintf(text, sizeof text, "\\u%04x", cp);
        else
            snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xD800 + ((cp - 0x10000) >> 10),
                     0xDC00 + ((cp - 0x10000) & 0x3FF));
        if (!rc)
            rc = add(r, out, text);
    }
    if (!rc)
        rc = lm_jrun_add(r, out, s->s + plain, s->len - plain);
    return rc ? rc : add(r, out, "\"");
}

typedef struct {
    lm_jrun *r;
    const lm_jv_json_style *style;
    lm_buf *out;
    int64_t depth;
} dumper;

static lm_code dump(dumper *d, const lm_jval *v);

/* A new line at the current depth; nothing without indentation. */
static lm_code break_line(dumper *d)
{
    const lm_jv_json_style *s = d->style;
    lm_code rc;

    if (s->indent < 0 && !s->unit)
        return LM_OK;
    rc = add(d->r, d->out, "\n");
    for (int64_t i = 0; !rc && s->unit && i < d->depth; i++)
        rc = lm_jrun_add(d->r, d->out, s->unit->s, s->unit->len);
    for (int64_t i = 0; !rc && !s->unit && i < d->depth * s->indent; i++)
        rc = add(d->r, d->out, " ");
    return rc;
}

static lm_code comma(dumper *d)
{
    const lm_jv_json_style *s = d->style;

    if (s->comma)
        return lm_jrun_add(d->r, d->out, s->comma->s, s->comma->len);
    return add(d->r, d->out, s->indent < 0 && !s->unit ? ", " : ",");
}

static lm_code dump_key(dumper *d, const lm_jval *key)
{
    lm_jstr text = { 0 };
    char number[40];

    if (key->kind == LM_JV_STR)
        return json_text(d->r, key->u.s, d->style->ascii, d->out);
    switch (key->kind) {
    case LM_JV_NONE:
        text.s = "null";
        break;
    case LM_JV_BOOL:
        text.s = key->u.b ? "true" : "false";
        break;
    case LM_JV_INT:
        snprintf(number, sizeof number, "%lld", (long long)key->u.i);
        text.s = number;
        break;
    case LM_JV_FLOAT:
        show_real(key->u.f, "Infinity", "NaN", number);
        text.s = number;
        break;
    default:
        return lm_jrun_fail(d->r, "keys must be str, int, float, bool or None, not %s",
                            lm_jv_type(key));
    }
    text.len = strlen(text.s);
    return json_text(d->r, &text, false, d->out);
}

/* Pairs by their keys, stable. */
static lm_code sort_pairs(lm_jrun *r, const lm_jdict *d, lm_jpair **out)
{
    lm_jpair *v = NULL;
    lm_code rc = lm_jrun_alloc(r, &v, d->n + 1, sizeof *v);

    for (size_t i = 0; !rc && i < d->n; i++) {
        size_t at = i;
        int order = 1;

        while (!rc && at) {
            rc = lm_jv_order(r, &v[at - 1].key, &d->v[i].key, "<", &order);
            if (rc || order <= 0)
                break;
            v[at] = v[at - 1];
            at--;
        }
        v[at] = d->v[i];
    }
    *out = v;
    return rc;
}

static lm_code dump_dict(dumper *d, const lm_jdict *dict)
{
    const lm_jstr *colon = d->style->colon;
    lm_jpair *v = dict->v;
    lm_code rc = add(d->r, d->out, "{");

    if (!rc && d->style->sort)
        rc = sort_pairs(d->r, dict, &v);
    d->depth++;
    for (size_t i = 0; !rc && i < dict->n; i++) {
        if (i)
            rc = comma(d);
        if (!rc)
            rc = break_line(d);
        if (!rc)
            rc = dump_key(d, &v[i].key);
        if (!rc)
            rc = colon ? lm_jrun_add(d->r, d->out, colon->s, colon->len) : add(d->r, d->out, ": ");
        if (!rc)
            rc = dump(d, &v[i].value);
    }
    d->depth--;
    if (!rc && dict->n)
        rc = break_line(d);
    return rc ? rc : add(d->r, d->out, "}");
}

static lm_code dump_seq(dumper *d, const lm_jseq *s)
{
    lm_code rc = add(d->r, d->out, "[");

    d->depth++;
    for (size_t i = 0; !rc && i < s->n; i++) {
        if (i)
            rc = comma(d);
        if (!rc)
            rc = break_line(d);
        if (!rc)
            rc = dump(d, &s->v[i]);
    }
    d->depth--;
    if (!rc && s->n)
        rc = break_line(d);
    return rc ? rc : add(d->r, d->out, "]");
}

static lm_code dump(dumper *d, const lm_jval *v)
{
    char text[40];
    lm_code rc = lm_jrun_work(d->r, 1);

    if (rc)
        return rc;
    switch (v->kind) {
    case LM_JV_NONE:
        return add(d->r, d->out, "null");
    case LM_JV_BOOL:
        return add(d->r, d->out, v->u.b ? "true" : "false");
    case LM_JV_FLOAT:
        show_real(v->u.f, "Infinity", "NaN", text);
        return add(d->r, d->out, text);
    case LM_JV_STR:
        return json_text(d->r, v->u.s, d->style->ascii, d->out);
    case LM_JV_INT:
        return lm_jv_repr(d->r, v, d->out);
    case LM_JV_LIST:
    case LM_JV_TUPLE:
    case LM_JV_DICT:
        rc = lm_jrun_enter(d->r);
        if (rc)
            return rc;
        rc = v->kind == LM_JV_DICT ? dump_dict(d, v->u.dict) : dump_seq(d, v->u.seq);
        lm_jrun_leave(d->r);
        return rc;
    default:
        return lm_jrun_fail(d->r, "Object of type %s is not JSON serializable", lm_jv_type(v));
    }
}

lm_code lm_jv_json(lm_jrun *r, const lm_jval *v, const lm_jv_json_style *style, lm_buf *out)
{
    dumper d = { .r = r, .style = style, .out = out };

    return dump(&d, v);
}
