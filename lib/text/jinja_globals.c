/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_globals.c -- the functions that every template has. */
#include <string.h>
#include <time.h>

#include "text/jinja_run.h"

static lm_code call_raise(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_jval arg[LM_JARGS_MAX];
    const lm_jstr *text = NULL;
    lm_code rc = lm_jcall_bind(r, c, "raise_exception", "message", arg);

    (void)self;
    (void)out;
    if (!rc)
        rc = lm_jv_to_str(r, &arg[0], &text);
    return rc ? rc : lm_jrun_fail(r, "the template refuses: %.200s", text->s);
}

static lm_code call_strftime(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_jval arg[LM_JARGS_MAX];
    const lm_jstr *format = NULL;
    char text[512];
    struct tm local;
    time_t now = (time_t)r->now;
    lm_code rc = lm_jcall_bind(r, c, "strftime_now", "format", arg);

    (void)self;
    if (!rc)
        rc = lm_jarg_str(r, &arg[0], "the format", &format);
    if (rc)
        return rc;
    if (!format || format->len > 100 || memchr(format->s, 0, format->len) ||
        !localtime_r(&now, &local))
        return lm_jrun_fail(r, "strftime_now needs a format of at most 100 bytes");
    text[0] = 0;
    return lm_jv_text(r, text, strftime(text, sizeof text, format->s, &local), out);
}

static lm_code call_range(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    enum { MAX_RANGE = 100000 };
    int64_t v[3] = { 0, 0, 1 }, count;
    lm_code rc = LM_OK;

    (void)self;
    if (!c->n || c->n > 3 || c->n_kw)
        return lm_jrun_fail(r, "range() needs 1 to 3 arguments");
    for (size_t i = 0; i < c->n; i++)
        if (!lm_jv_integer(&c->pos[i], &v[c->n == 1 ? 1 : i]))
            return lm_jrun_fail(r, "'%s' object cannot be interpreted as an integer",
                                lm_jv_type(&c->pos[i]));
    if (!v[2])
        return lm_jrun_fail(r, "range() arg 3 must not be zero");
    if (v[0] > INT32_MAX || v[0] < INT32_MIN || v[1] > INT32_MAX || v[1] < INT32_MIN ||
        v[2] > INT32_MAX || v[2] < INT32_MIN)
        return lm_jrun_fail(r, "range too big");
    count = v[2] > 0 ? (v[1] - v[0] + v[2] - 1) / v[2] : (v[0] - v[1] - v[2] - 1) / -v[2];
    count = (v[2] > 0 ? v[1] > v[0] : v[1] < v[0]) ? count : 0;
    if (count > MAX_RANGE)
        return lm_jrun_fail(r, "Range too big. The sandbox blocks ranges larger than %d",
                            MAX_RANGE);
    rc = lm_jv_seq(r, LM_JV_RANGE, (size_t)count, out);
    for (int64_t i = 0; !rc && i < count; i++)
        rc = lm_jv_push(r, out->u.seq, lm_jv_int(v[0] + i * v[2]));
    if (!rc) {
        out->u.seq->from = v[0];
        out->u.seq->to = v[1];
        out->u.seq->step = v[2];
    }
    return rc;
}

/* dict(...) and namespace(...): pairs or a mapping, then keywords. */
static lm_code fill_dict(lm_jrun *r, const lm_jcall *c, lm_jkind kind, lm_jval *out)
{
    lm_jseq all = { 0 }, pair;
    lm_code rc = lm_jv_dict(r, kind, 0, out);

    if (c->n > 1)
        return lm_jrun_fail(r, "dict expected at most 1 argument, got %zu", c->n);
    if (!rc && c->n && c->pos[0].kind == LM_JV_DICT) {
        const lm_jdict *d = c->pos[0].u.dict;

        for (size_t i = 0; !rc && i < d->n; i++)
            rc = lm_jv_dict_set(r, out->u.dict, d->v[i].key, d->v[i].value);
    } else if (!rc && c->n) {
        rc = lm_jv_elements(r, &c->pos[0], &all);
    }
    for (size_t i = 0; !rc && i < all.n; i++) {
        rc = lm_jv_elements(r, &all.v[i], &pair);
        if (!rc && pair.n != 2)
            return lm_jrun_fail(
                r, "dictionary update sequence element #%zu has length %zu; 2 is required", i,
                pair.n);
        if (!rc)
            rc = lm_jv_dict_set(r, out->u.dict, pair.v[0], pair.v[1]);
    }
    for (size_t i = 0; !rc && i < c->n_kw; i++)
        rc = lm_jv_dict_set(r, out->u.dict, (lm_jval){ LM_JV_STR, { .s = c->name[i] } }, c->kw[i]);
    return rc;
}

static lm_code call_dict(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    (void)self;
    return fill_dict(r, c, LM_JV_DICT, out);
}

static lm_code call_namespace(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_code rc = fill_dict(r, c, LM_JV_NAMESPACE, out);

    (void)self;
    for (size_t i = 0; !rc && i < out->u.dict->n; i++) {
        const lm_jval *key = &out->u.dict->v[i].key;

        if (key->kind == LM_JV_STR && key->u.s->len && key->u.s->s[0] == '_')
            return lm_jrun_fail(r, "names in a namespace must not begin with an underscore");
    }
    return rc;
}

/* joiner(sep): nothing at the first call, then sep. */
static lm_code call_joint(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_jseq *state = self->u.seq;

    (void)c;
    if (state->at++)
        *out = state->v[0];
    else
        return lm_jv_text(r, NULL, 0, out);
    return LM_OK;
}

static lm_code call_joiner(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_jval arg[LM_JARGS_MAX], state;
    lm_code rc = lm_jcall_bind(r, c, "joiner", "sep=", arg);

    (void)self;
    if (!rc && arg[0].kind == LM_JV_MISSING)
        rc = lm_jv_text(r, ", ", 2, &arg[0]);
    if (!rc)
        rc = lm_jv_seq(r, LM_JV_ITER, 1, &state);
    if (!rc)
        rc = lm_jv_push(r, state.u.seq, arg[0]);
    return rc ? rc : lm_jv_func(r, "joiner", call_joint, &state, out);
}

lm_code lm_jrun_global(lm_jrun *r, const lm_jstr *name, bool *found, lm_jval *out)
{
    static const struct {
        const char *name;
        lm_jfn *fn;
    } all[] = {
        { "range", call_range },
        { "namespace", call_namespace },
        { "dict", call_dict },
        { "raise_exception", call_raise },
        { "strftime_now", call_strftime },
        { "joiner", call_joiner },
    };

    *found = false;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strlen(all[i].name) == name->len && !memcmp(all[i].name, name->s, name->len)) {
            *found = true;
            return lm_jv_func(r, all[i].name, all[i].fn, NULL, out);
        }
    return LM_OK;
}
