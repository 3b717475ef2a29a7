/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_methods_split.c -- the methods of str that make lists, and join. */
#include <string.h>

#include "base/text.h"
#include "text/jinja_run.h"

/* What a search from the right may cost. */
lm_code lm_jstr_work_of_last(lm_jrun *r, const lm_jstr *s, const lm_jstr *what)
{
    size_t rest = s->len > what->len ? s->len - what->len : 0;

    return lm_jrun_work(r, rest / 64 * (what->len + 1));
}

const char *lm_jstr_last(const lm_jstr *s, const lm_jstr *what)
{
    for (size_t i = s->len - what->len + 1; s->len >= what->len && i-- > 0;)
        if (!memcmp(s->s + i, what->s, what->len))
            return s->s + i;
    return NULL;
}

static lm_code push_part(lm_jrun *r, lm_jval *out, const char *s, size_t n)
{
    lm_jval one;
    lm_code rc = lm_jv_lend(r, s, n, &one);

    return rc ? rc : lm_jv_push(r, out->u.seq, one);
}

/* Words between white space, from the left. */
static lm_code split_blank(lm_jrun *r, const char *s, size_t n, int64_t most, lm_jval *out)
{
    lm_code rc = lm_jrun_work(r, n / 2);
    size_t at, k;

    while (!rc) {
        lm_jstr_strip(&s, &n, NULL, LM_JSTRIP_LEFT);
        if (!n)
            break;
        if (!most) {
            lm_jstr_strip(&s, &n, NULL, LM_JSTRIP_RIGHT);
            return push_part(r, out, s, n);
        }
        for (at = 0; at < n && !lm_jstr_blank(lm_utf8_get(s + at, n - at, &k)); at += k)
            ;
        rc = push_part(r, out, s, at);
        s += at;
        n -= at;
        most -= most > 0;
    }
    return rc;
}

/* From the right: parts are pushed in reverse, then turned round. */
static lm_code split_right(lm_jrun *r, const lm_jstr *s, const lm_jstr *sep, int64_t most,
                           lm_jval *out)
{
    lm_jstr rest = { s->s, s->len, -1, false };
    lm_jseq *list;
    lm_code rc = lm_jrun_work(r, sep ? 0 : s->len / 2);

    while (!rc) {
        const char *p = NULL;

        if (!sep)
            lm_jstr_strip(&rest.s, &rest.len, NULL, LM_JSTRIP_RIGHT);
        if (!sep && !rest.len)
            break;
        if (most && sep)
            p = lm_jstr_last(&rest, sep);
        if (most && !sep)
            for (size_t i = rest.len, k; i-- > 0;)
                if (((unsigned char)rest.s[i] & 0xC0) != 0x80 &&
                    lm_jstr_blank(lm_utf8_get(rest.s + i, rest.len - i, &k))) {
                    p = rest.s + i;
                    break;
                }
        if (!p) {
            if (!sep)
                lm_jstr_strip(&rest.s, &rest.len, NULL, LM_JSTRIP_LEFT);
            rc = push_part(r, out, rest.s, rest.len);
            break;
        }
        size_t n = sep ? sep->len : 1;
        if (!sep)
            lm_utf8_get(p, (size_t)(rest.s + rest.len - p), &n);
        rc = push_part(r, out, p + n, rest.len - (size_t)(p - rest.s) - n);
        rest.len = (size_t)(p - rest.s);
        most -= most > 0;
        if (!rc)
            rc = lm_jrun_work(r, 1 + rest.len / 64);
    }
    list = out->u.seq;
    for (size_t i = 0; i < list->n / 2; i++) {
        lm_jval v = list->v[i];

        list->v[i] = list->v[list->n - 1 - i];
        list->v[list->n - 1 - i] = v;
    }
    return rc;
}

static lm_code split_at(lm_jrun *r, const lm_jstr *s, const lm_jstr *sep, int64_t most,
                        lm_jval *out)
{
    size_t at = 0;
    lm_code rc = LM_OK;

    while (!rc && most) {
        const char *p = memmem(s->s + at, s->len - at, sep->s, sep->len);

        if (!p)
            break;
        rc = push_part(r, out, s->s + at, (size_t)(p - s->s) - at);
        at = (size_t)(p - s->s) + sep->len;
        most -= most > 0;
    }
    return rc ? rc : push_part(r, out, s->s + at, s->len - at);
}

static lm_code split(lm_jrun *r, const lm_jval *self, const lm_jcall *c, bool right, lm_jval *out)
{
    const lm_jstr *s = self->u.s, *sep;
    int64_t most;
    LM_JBIND("split", "sep=,maxsplit=");

    rc = lm_jarg_str(r, &arg[0], "the separator", &sep);
    if (!rc)
        rc = lm_jarg_int(r, &arg[1], -1, &most);
    if (!rc && sep && !sep->len)
        return lm_jrun_fail(r, "empty separator");
    if (!rc)
        rc = lm_jv_seq(r, LM_JV_LIST, 0, out);
    if (!rc)
        rc = lm_jrun_work(r, s->len / 16);
    if (rc)
        return rc;
    if (right && sep)
        rc = lm_jstr_work_of_last(r, s, sep);
    if (rc)
        return rc;
    if (right)
        return split_right(r, s, sep, most, out);
    return sep ? split_at(r, s, sep, most, out) : split_blank(r, s->s, s->len, most, out);
}
static lm_code do_split(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return split(r, self, c, false, out);
}
static lm_code do_rsplit(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return split(r, self, c, true, out);
}

static lm_code do_splitlines(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    LM_JBIND("splitlines", "keepends=");
    return lm_jstr_lines(r, self->u.s, lm_jarg_truth(&arg[0], false), out);
}

static lm_code part(lm_jrun *r, const lm_jval *self, const lm_jcall *c, bool last, lm_jval *out)
{
    const lm_jstr *s = self->u.s, *sep;
    const char *p;
    size_t at;
    LM_JBIND("partition", "sep");

    rc = lm_jarg_str(r, &arg[0], "the separator", &sep);
    if (!rc && (!sep || !sep->len))
        return lm_jrun_fail(r, "empty separator");
    if (!rc)
        rc = lm_jv_seq(r, LM_JV_TUPLE, 3, out);
    if (rc)
        return rc;
    rc = last ? lm_jstr_work_of_last(r, s, sep) : LM_OK;
    if (rc)
        return rc;
    p = last ? lm_jstr_last(s, sep) : memmem(s->s, s->len, sep->s, sep->len);
    at = p ? (size_t)(p - s->s) : last ? 0 : s->len;
    rc = push_part(r, out, s->s, at);
    if (!rc)
        rc = push_part(r, out, sep->s, p ? sep->len : 0);
    at += p ? sep->len : 0;
    return rc ? rc : push_part(r, out, s->s + at, s->len - at);
}
static lm_code do_partition(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return part(r, self, c, false, out);
}
static lm_code do_rpartition(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return part(r, self, c, true, out);
}

static lm_code do_join(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_buf text = { 0 };
    lm_jseq all = { 0 };
    LM_JBIND("join", "iterable");

    rc = lm_jv_elements(r, &arg[0], &all);
    for (size_t i = 0; !rc && i < all.n; i++) {
        if (all.v[i].kind != LM_JV_STR)
            rc = lm_jrun_fail(r, "sequence item %zu: expected str instance, %s found", i,
                              lm_jv_type(&all.v[i]));
        if (!rc && i)
            rc = lm_jrun_add(r, &text, self->u.s->s, self->u.s->len);
        if (!rc)
            rc = lm_jrun_add(r, &text, all.v[i].u.s->s, all.v[i].u.s->len);
    }
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

const lm_jmethod lm_jmethods_split[] = {
    { "split", do_split },
    { "rsplit", do_rsplit },
    { "splitlines", do_splitlines },
    { "partition", do_partition },
    { "rpartition", do_rpartition },
    { "join", do_join },
    { NULL, NULL },
};
