/* SPDX-License-Identifier: Apache-2.0 */
/* spec_text.c -- the canonical text of a specification. */
#include <string.h>

#include "kv/methods/methods.h"
#include "kv/spec_impl.h"

/* True if key i has the value that it would have if it were not given. */
static bool is_implied(const lm_kv_use *u, int i)
{
    lm_kv_use without = *u;
    without.h[i] = u->method->hyper[i].value;
    without.given[i] = false;
    if (u->method->complete)
        u->method->complete(without.h, without.given);
    return without.h[i] == u->h[i];
}

lm_code lm_kv_add_use(const lm_kv_spec *s, const lm_kv_use *u, lm_buf *out, lm_err *e)
{
    const lm_hyper *h = u->method->hyper;
    char value[64], mark = ':';
    if (lm_buf_addf(out, e, "%s", u->method->name))
        return e->code;
    for (int i = 0; h[i].name; i++) {
        if (is_implied(u, i))
            continue;
        lm_hyper_show(&h[i], u->h[i], value);
        if (lm_buf_addf(out, e, "%c%s=%s", mark, h[i].name, value))
            return e->code;
        mark = ',';
    }
    return u->file && u->file != s->silent
               ? lm_buf_addf(out, e, "%cfile=%s", mark, s->file[u->file - 1])
               : LM_OK;
}

lm_code lm_kv_add_ranges(const lm_kv_item *it, lm_buf *out, lm_err *e)
{
    lm_code rc = lm_buf_addf(out, e, "layers.");
    for (int i = 0; i < it->n_ranges && !rc; i++) {
        const lm_kv_range *r = &it->range[i];
        rc = lm_buf_addf(out, e, "%s%d", i ? "|" : "", r->from);
        if (!rc && r->to != r->from)
            rc = lm_buf_addf(out, e, "-%d", r->to);
    }
    return rc;
}

bool lm_kv_use_is_same(const lm_kv_use *a, const lm_kv_use *b)
{
    if (a->method != b->method || a->file != b->file)
        return false;
    for (int i = 0; a->method && a->method->hyper[i].name; i++)
        if (a->h[i] != b->h[i])
            return false;
    return true;
}

/* The sides that are set. */
static lm_code add_sides(const lm_kv_spec *s, const lm_kv_use side[2], lm_buf *out, lm_err *e)
{
    static const char *const name[2] = { "k=", "v=" };
    if (lm_kv_use_is_same(&side[LM_KV_K], &side[LM_KV_V]))
        return lm_kv_add_use(s, &side[LM_KV_K], out, e);
    const char *comma = "";
    for (int k = 0; k < 2; k++) {
        if (!side[k].method)
            continue;
        if (lm_buf_addf(out, e, "%s%s", comma, name[k]) || lm_kv_add_use(s, &side[k], out, e))
            return e->code;
        comma = ",";
    }
    return LM_OK;
}

/* True: a method that is the same as no method. */
static bool is_plain(const lm_kv_use *u)
{
    return u->method == &lm_kv_auto && u->h[0] == 0 && !u->file;
}

/* The item of layers that no other names; nothing if they are plain. */
static lm_code add_rest(const lm_kv_spec *s, lm_buf *out, lm_err *e)
{
    lm_kv_use side[2] = { s->all[LM_KV_K], s->all[LM_KV_V] };
    for (int k = 0; k < 2; k++)
        if (is_plain(&side[k]))
            side[k].method = NULL;
    bool any = side[LM_KV_K].method || side[LM_KV_V].method;
    if (out->len && (any || s->policy.method) && lm_buf_addf(out, e, ";"))
        return e->code;
    if (s->policy.method &&
        (lm_kv_add_use(s, &s->policy, out, e) || (any && lm_buf_addf(out, e, "+"))))
        return e->code;
    return any ? add_sides(s, side, out, e) : LM_OK;
}

lm_code lm_kv_spec_write(lm_kv_spec *s, lm_err *e)
{
    s->text.len = 0;
    for (size_t i = 0; i < s->n_items; i++) {
        const lm_kv_item *it = &s->item[i];
        if ((i && lm_buf_addf(&s->text, e, ";")) || lm_kv_add_ranges(it, &s->text, e) ||
            lm_buf_addf(&s->text, e, "=") || add_sides(s, it->side, &s->text, e))
            return e->code;
    }
    if (add_rest(s, &s->text, e))
        return e->code;
    return s->text.len ? LM_OK : lm_buf_addf(&s->text, e, "auto");
}

const char *lm_kv_spec_text(const lm_kv_spec *s)
{
    return s->text.data;
}
