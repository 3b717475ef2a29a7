/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_filters.c -- filters that make text, and the table of all filters. */
#include <string.h>
#include <utf8proc.h>

#include "base/text.h"
#include "text/jinja_run.h"

#define UNUSED (void)arg, (void)c

static lm_code text_of_buffer(lm_jrun *r, lm_code rc, lm_buf *text, lm_jval *out)
{
    if (!rc)
        rc = lm_jv_text(r, text->data, text->len, out);
    lm_buf_fini(text);
    return rc;
}

LM_JFILTER(do_upper)
{
    const lm_jstr *s;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    return rc ? rc : lm_jstr_case(r, s, true, out);
}

LM_JFILTER(do_lower)
{
    const lm_jstr *s;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    return rc ? rc : lm_jstr_case(r, s, false, out);
}

LM_JFILTER(do_capitalize)
{
    const lm_jstr *s;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    return rc ? rc : lm_jstr_capitalize(r, s, out);
}

static bool separates_words(uint32_t cp)
{
    return lm_jstr_blank(cp) || (cp < 0x80 && cp && strchr("-({[<", (int)cp));
}

/* Words begin behind white space, "-" and opening brackets. */
LM_JFILTER(do_title)
{
    const lm_jstr *s;
    lm_buf text = { 0 };
    bool first = true;
    size_t n;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    for (size_t i = 0; !rc && i < s->len; i += n) {
        uint32_t cp = lm_utf8_get(s->s + i, s->len - i, &n);
        lm_jstr one = { s->s + i, n, 1, false };
        lm_jval cased;

        rc = lm_jstr_case(r, &one, first, &cased);
        if (!rc)
            rc = lm_jrun_add(r, &text, cased.u.s->s, cased.u.s->len);
        first = separates_words(cp);
    }
    return text_of_buffer(r, rc, &text, out);
}

LM_JFILTER(do_trim)
{
    const lm_jstr *s, *chars = NULL;
    const char *p;
    size_t n;
    lm_code rc = lm_jv_to_str(r, v, &s);

    (void)c;
    if (!rc)
        rc = lm_jarg_str(r, &arg[0], "strip arg", &chars);
    if (!rc && chars)
        rc = lm_jrun_work(r, s->len / 64 * chars->len);
    if (rc)
        return rc;
    p = s->s;
    n = s->len;
    lm_jstr_strip(&p, &n, chars, LM_JSTRIP_LEFT | LM_JSTRIP_RIGHT);
    rc = lm_jrun_work(r, s->len - n);
    return rc ? rc : lm_jv_part(r, s, p, n, out);
}

LM_JFILTER(do_replace)
{
    const lm_jstr *s, *old, *new;
    int64_t count;
    lm_code rc = lm_jv_to_str(r, v, &s);

    (void)c;
    if (!rc)
        rc = lm_jv_to_str(r, &arg[0], &old);
    if (!rc)
        rc = lm_jv_to_str(r, &arg[1], &new);
    if (!rc)
        rc = lm_jarg_int(r, &arg[2], -1, &count);
    return rc ? rc : lm_jstr_replace(r, s, old, new, count, out);
}

LM_JFILTER(do_string)
{
    const lm_jstr *s;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    if (!rc)
        *out = (lm_jval){ LM_JV_STR, { .s = s } };
    return rc;
}

LM_JFILTER(do_escape)
{
    const lm_jstr *s;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    return rc ? rc : lm_jstr_escape(r, s, out);
}

LM_JFILTER(do_force_escape)
{
    const lm_jstr *s;
    lm_jstr plain;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    if (rc)
        return rc;
    plain = *s;
    plain.safe = false;
    return lm_jstr_escape(r, &plain, out);
}

LM_JFILTER(do_indent)
{
    const lm_jstr *s;
    lm_jval lines, unit = { 0 };
    lm_buf text = { 0 };
    int64_t width;
    lm_code rc = LM_OK;
    bool first = lm_jarg_truth(&arg[1], false), blank = lm_jarg_truth(&arg[2], false);

    (void)c;
    if (v->kind != LM_JV_STR)
        return lm_jrun_fail(r, "indent needs a text, not '%s'", lm_jv_type(v));
    s = v->u.s;
    if (arg[0].kind == LM_JV_STR) {
        unit = arg[0];
    } else {
        lm_jval space;

        rc = lm_jarg_int(r, &arg[0], 4, &width);
        if (!rc)
            rc = lm_jv_lend(r, " ", 1, &space);
        if (!rc)
            rc = lm_jrun_binary(r, LM_JOP_MUL, &space, &(lm_jval){ LM_JV_INT, { .i = width } },
                                &unit);
    }
    if (!rc)
        rc = lm_jstr_lines(r, s, false, &lines);
    /* jinja adds a newline before it splits, so that an end of line at the end gives one line
     * more */
    if (!rc && (!s->len || s->s[s->len - 1] == '\n' || s->s[s->len - 1] == '\r')) {
        lm_jval none;

        rc = lm_jv_lend(r, NULL, 0, &none);
        if (!rc && !(s->len && s->s[s->len - 1] == '\r'))
            rc = lm_jv_push(r, lines.u.seq, none);
    }
    for (size_t i = 0; !rc && i < lines.u.seq->n; i++) {
        const lm_jstr *line = lines.u.seq->v[i].u.s;

        if (i)
            rc = lm_jrun_add(r, &text, "\n", 1);
        if (!rc && (i ? blank || line->len : first))
            rc = lm_jrun_add(r, &text, unit.u.s->s, unit.u.s->len);
        if (!rc)
            rc = lm_jrun_add(r, &text, line->s, line->len);
    }
    return text_of_buffer(r, rc, &text, out);
}

LM_JFILTER(do_truncate)
{
    const lm_jstr *s, *end;
    int64_t length, leeway, n, keep;
    size_t bytes;
    bool kill = lm_jarg_truth(&arg[1], false);
    lm_buf text = { 0 };
    lm_code rc = lm_jarg_int(r, &arg[0], 255, &length);

    (void)c;
    if (!rc)
        rc = lm_jarg_str(r, &arg[2], "end", &end);
    if (!rc)
        rc = lm_jarg_int(r, &arg[3], 5, &leeway);
    if (!rc && v->kind != LM_JV_STR)
        return lm_jrun_fail(r, "truncate needs a text, not '%s'", lm_jv_type(v));
    if (rc)
        return rc;
    s = v->u.s;
    n = end ? lm_jv_chars(end) : 3;
    if (length < n || leeway < 0)
        return lm_jrun_fail(r, "expected length >= %lld and leeway >= 0", (long long)n);
    if (lm_jv_chars(s) - length <= leeway) {
        *out = *v;
        return LM_OK;
    }
    keep = length - n;
    bytes = lm_jstr_offset(s, keep);
    if (!kill)
        for (size_t i = bytes; i-- > 0;)
            if (s->s[i] == ' ') {
                bytes = i;
                break;
            }
    rc = lm_jrun_add(r, &text, s->s, bytes);
    if (!rc)
        rc = end ? lm_jrun_add(r, &text, end->s, end->len) : lm_jrun_add(r, &text, "...", 3);
    return text_of_buffer(r, rc, &text, out);
}

LM_JFILTER(do_center)
{
    const lm_jstr *s;
    lm_jval self = *v, f;
    lm_jcall call = { 0 };
    bool found, unsafe;
    lm_jval width = arg[0].kind == LM_JV_MISSING ? lm_jv_int(80) : arg[0];
    lm_code rc = lm_jv_to_str(r, v, &s);

    (void)c;
    self = (lm_jval){ LM_JV_STR, { .s = s } };
    call.pos = &width;
    call.n = 1;
    if (!rc)
        rc = lm_jmethod_of(r, &self, &(lm_jstr){ "center", 6, 6, false }, &found, &unsafe, &f);
    return rc ? rc : lm_jrun_call(r, &f, &call, out);
}

LM_JFILTER(do_format)
{
    const lm_jstr *s;
    lm_jval args;
    lm_code rc = lm_jv_to_str(r, v, &s);

    (void)arg;
    if (!rc && c->n && c->n_kw)
        return lm_jrun_fail(r, "can't handle positional and keyword arguments at the same time");
    if (!rc && c->n_kw)
        rc = lm_jv_dict(r, LM_JV_DICT, c->n_kw, &args);
    else if (!rc)
        rc = lm_jv_seq(r, LM_JV_TUPLE, c->n, &args);
    for (size_t i = 0; !rc && i < c->n_kw; i++)
        rc = lm_jv_dict_set(r, args.u.dict, (lm_jval){ LM_JV_STR, { .s = c->name[i] } }, c->kw[i]);
    for (size_t i = 0; !rc && i < c->n; i++)
        rc = lm_jv_push(r, args.u.seq, c->pos[i]);
    return rc ? rc : lm_jformat_percent(r, s, &args, out);
}

LM_JFILTER(do_wordcount)
{
    const lm_jstr *s;
    bool inside = false;
    int64_t words = 0;
    size_t n;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    for (size_t i = 0; !rc && i < s->len; i += n) {
        uint32_t cp = lm_utf8_get(s->s + i, s->len - i, &n);
        utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)cp);
        bool word = cp == '_' || (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO) ||
                    (k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO);

        words += word && !inside;
        inside = word;
    }
    *out = lm_jv_int(words);
    return rc;
}

LM_JFILTER(do_urlencode)
{
    static const char safe[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~/";
    static const char hex[] = "0123456789ABCDEF";
    const lm_jstr *s;
    lm_buf text = { 0 };
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    if (!rc && (v->kind == LM_JV_DICT || lm_jv_is_seq(v)))
        return lm_jrun_fail(r, "urlencode of pairs is not supported");
    for (size_t i = 0; !rc && i < s->len; i++) {
        unsigned char byte = (unsigned char)s->s[i];
        char code[3] = { '%', hex[byte >> 4], hex[byte & 15] };

        rc = byte && strchr(safe, byte) ? lm_jrun_add(r, &text, s->s + i, 1)
                                        : lm_jrun_add(r, &text, code, 3);
    }
    return text_of_buffer(r, rc, &text, out);
}

LM_JFILTER(do_tojson)
{
    lm_jv_json_style style = { .indent = -1 };
    lm_buf text = { 0 };
    lm_jseq pair;
    lm_code rc = LM_OK;

    (void)c;
    style.ascii = lm_jarg_truth(&arg[0], false);
    if (arg[1].kind == LM_JV_STR)
        style.unit = arg[1].u.s;
    else
        rc = lm_jarg_int(r, &arg[1], -1, &style.indent);
    if (arg[1].kind == LM_JV_INT && style.indent < 0)
        style.indent = 0;
    if (!rc && arg[2].kind != LM_JV_MISSING && arg[2].kind != LM_JV_NONE) {
        rc = lm_jv_elements(r, &arg[2], &pair);
        if (!rc && (pair.n != 2 || pair.v[0].kind != LM_JV_STR || pair.v[1].kind != LM_JV_STR))
            return lm_jrun_fail(r, "separators of tojson are two texts");
        if (!rc) {
            style.comma = pair.v[0].u.s;
            style.colon = pair.v[1].u.s;
        }
    }
    style.sort = lm_jarg_truth(&arg[3], false);
    if (!rc)
        rc = lm_jv_json(r, v, &style, &text);
    return text_of_buffer(r, rc, &text, out);
}

/* ---- Others ---- */

LM_JFILTER(do_default)
{
    (void)c;
    if (v->kind == LM_JV_UNDEFINED || (lm_jarg_truth(&arg[1], false) && !lm_jv_truth(v))) {
        if (arg[0].kind == LM_JV_MISSING)
            return lm_jv_lend(r, NULL, 0, out);
        *out = arg[0];
        return LM_OK;
    }
    *out = *v;
    return LM_OK;
}

LM_JFILTER(do_safe)
{
    const lm_jstr *s;
    lm_code rc = lm_jv_to_str(r, v, &s);

    UNUSED;
    return rc ? rc : lm_jstr_trust(r, s, out);
}

const lm_jfilter lm_jfilters_text[] = {
    { "upper", "", do_upper },
    { "lower", "", do_lower },
    { "capitalize", "", do_capitalize },
    { "title", "", do_title },
    { "trim", "chars=", do_trim },
    { "replace", "old,new,count=", do_replace },
    { "string", "", do_string },
    { "safe", "", do_safe },
    { "e", "", do_escape },
    { "escape", "", do_escape },
    { "forceescape", "", do_force_escape },
    { "indent", "width=,first=,blank=", do_indent },
    { "truncate", "length=,killwords=,end=,leeway=", do_truncate },
    { "center", "width=", do_center },
    { "format", "*", do_format },
    { "wordcount", "", do_wordcount },
    { "urlencode", "", do_urlencode },
    { "tojson", "ensure_ascii=,indent=,separators=,sort_keys=", do_tojson },
    { "default", "default_value=,boolean=", do_default },
    { "d", "default_value=,boolean=", do_default },
    { NULL, NULL, NULL },
};

const lm_jfilter *lm_jfilter_named(const char *name, size_t len)
{
    const lm_jfilter *const tables[] = { lm_jfilters_text, lm_jfilters_number, lm_jfilters_seq,
                                         lm_jfilters_sort, lm_jfilters_pick };

    for (int t = 0; t < 5; t++)
        for (const lm_jfilter *f = tables[t]; f->name; f++)
            if (strlen(f->name) == len && !memcmp(f->name, name, len))
                return f;
    return NULL;
}

lm_code lm_jfilter_apply(lm_jrun *r, const lm_jfilter *f, const lm_jval *v, const lm_jcall *c,
                         lm_jval *out)
{
    lm_jval arg[LM_JARGS_MAX] = { { 0 } }, result = lm_jv_none();
    lm_code rc = LM_OK;

    if (strcmp(f->params, "*") != 0)
        rc = lm_jcall_bind(r, c, f->name, f->params, arg);
    if (!rc)
        rc = f->fn(r, v, arg, c, &result);
    *out = result;
    return rc;
}
