/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_lookup.c -- names, attributes, items and slices. */
#include <string.h>

#include "text/jinja_run.h"

lm_code lm_jrun_fail_undefined(lm_jrun *r, const lm_jval *v)
{
    char message[256];

    return lm_jrun_fail(r, "%s", lm_jv_undefined_message(v, message, sizeof message));
}

/* ---- Names, attributes, items ---- */

lm_code lm_jrun_name(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    bool found = false;
    lm_code rc;

    for (const lm_jscope *s = r->scope; s; s = s->up)
        for (size_t i = 0; i < s->n; i++)
            if (s->v[i].id == n->id) {
                *out = s->v[i].value;
                return LM_OK;
            }
    *out = r->root[n->id];
    if (out->kind != LM_JV_MISSING)
        return LM_OK;
    rc = lm_jrun_global(r, n->text, &found, out);
    if (rc || found)
        return rc;
    return lm_jv_undefined(r, &(lm_jundefined){ .name = n->text }, out);
}

/* Python's name of an object in messages about what it lacks. */
static const char *name_object(const lm_jval *v)
{
    static const char *const names[] = {
        [LM_JV_NONE] = "None",
        [LM_JV_BOOL] = "bool object",
        [LM_JV_INT] = "int object",
        [LM_JV_FLOAT] = "float object",
        [LM_JV_STR] = "str object",
        [LM_JV_LIST] = "list object",
        [LM_JV_TUPLE] = "tuple object",
        [LM_JV_RANGE] = "range object",
        [LM_JV_VIEW] = "dict view",
        [LM_JV_ITER] = "generator object",
        [LM_JV_DICT] = "dict object",
        [LM_JV_NAMESPACE] = "namespace object",
        [LM_JV_LOOP] = "loop object",
        [LM_JV_MACRO] = "macro object",
        [LM_JV_FUNC] = "function object",
    };

    return names[v->kind];
}

static lm_code lacks_name(lm_jrun *r, const lm_jval *of, const lm_jstr *name, lm_jval *out)
{
    return lm_jv_undefined(r, &(lm_jundefined){ .type = name_object(of), .name = name }, out);
}

/* A Python attribute: a method, or what loops and namespaces have. */
static lm_code attribute_of(lm_jrun *r, const lm_jval *of, const lm_jstr *name, bool *found,
                            lm_jval *out)
{
    bool unsafe = false;
    const lm_jval *v;
    lm_code rc;

    *found = false;
    if (name->len > 4 && !memcmp(name->s, "__", 2) && !memcmp(name->s + name->len - 2, "__", 2)) {
        *found = true;
        return lm_jv_undefined_hint(r, "access to attributes between double underscores is unsafe",
                                    out);
    }
    if (of->kind == LM_JV_NAMESPACE) {
        v = lm_jv_dict_at(of->u.dict, name->s, name->len);
        *found = v != NULL;
        if (v)
            *out = *v;
        return LM_OK;
    }
    if (of->kind == LM_JV_LOOP)
        return lm_jloop_attribute(r, of->u.loop, name, found, out);
    rc = lm_jmethod_of(r, of, name, found, &unsafe, out);
    if (rc || !unsafe)
        return rc;
    *found = true;
    return lm_jv_undefined_hint(r, "access to a method that would change its object is unsafe",
                                out);
}

/* The element of a sequence or text; false: none there. */
static bool element_of(const lm_jval *of, int64_t i, const lm_jval **out)
{
    int64_t n = (int64_t)of->u.seq->n;

    if (of->kind != LM_JV_LIST && of->kind != LM_JV_TUPLE && of->kind != LM_JV_RANGE)
        return false;
    if (i < 0)
        i += n;
    if (i < 0 || i >= n)
        return false;
    *out = &of->u.seq->v[i];
    return true;
}

static lm_code character_of(lm_jrun *r, const lm_jstr *s, int64_t i, bool *found, lm_jval *out)
{
    int64_t n = lm_jv_chars(s);
    size_t from, to;
    lm_code rc = lm_jrun_walk(r, s);

    if (i < 0)
        i += n;
    *found = i >= 0 && i < n;
    if (rc || !*found)
        return rc;
    from = lm_jstr_offset(s, i);
    for (to = from + 1; to < s->len && ((unsigned char)s->s[to] & 0xC0) == 0x80;)
        to++;
    return lm_jv_lend(r, s->s + from, to - from, out);
}

/* of[key], Python's; *found = false: a wrong key or type. */
static lm_code item_of(lm_jrun *r, const lm_jval *of, const lm_jval *key, bool *found, lm_jval *out)
{
    const lm_jval *v = NULL;
    lm_jval *value = NULL;
    int64_t i;

    *found = false;
    if (of->kind == LM_JV_DICT) {
        if (key->kind == LM_JV_LIST || key->kind == LM_JV_DICT)
            return LM_OK;
        lm_code rc = lm_jv_dict_get(r, of->u.dict, key, &value);

        *found = value != NULL;
        if (value)
            *out = *value;
        return rc;
    }
    if (!lm_jv_integer(key, &i))
        return LM_OK;
    if (of->kind == LM_JV_STR)
        return character_of(r, of->u.s, i, found, out);
    if (lm_jv_is_seq(of) && element_of(of, i, &v)) {
        *found = true;
        *out = *v;
    }
    return LM_OK;
}

lm_code lm_jrun_attribute(lm_jrun *r, const lm_jval *of, const lm_jstr *name, lm_jval *out)
{
    lm_jval key = { LM_JV_STR, { .s = name } };
    bool found;
    lm_code rc;

    if (of->kind == LM_JV_UNDEFINED)
        return lm_jrun_fail_undefined(r, of);
    rc = attribute_of(r, of, name, &found, out);
    if (!rc && !found)
        rc = item_of(r, of, &key, &found, out);
    if (rc || found)
        return rc;
    return lacks_name(r, of, name, out);
}

lm_code lm_jrun_item(lm_jrun *r, const lm_jval *of, const lm_jval *key, lm_jval *out)
{
    bool found;
    lm_jundefined u = { .type = name_object(of) };
    lm_code rc;

    if (of->kind == LM_JV_UNDEFINED)
        return lm_jrun_fail_undefined(r, of);
    rc = item_of(r, of, key, &found, out);
    if (!rc && !found && key->kind == LM_JV_STR)
        rc = attribute_of(r, of, key->u.s, &found, out);
    if (rc || found)
        return rc;
    if (key->kind == LM_JV_STR)
        u.name = key->u.s;
    else if (!lm_jv_integer(key, &u.index))
        u.hint = "an object has no element of this key";
    return lm_jv_undefined(r, &u, out);
}

/* ---- Slices ---- */

/* Bounds of [from:to:step] over n elements, as Python's slice.indices. */
static void clip_slice(int64_t n, const lm_jval part[3], int64_t *from, int64_t *to, int64_t step)
{
    int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    int64_t *bound[2] = { from, to };

    *from = step < 0 ? high : low;
    *to = step < 0 ? low : high;
    for (int i = 0; i < 2; i++) {
        int64_t v;

        if (!lm_jv_integer(&part[i], &v))
            continue;
        if (v < 0)
            v = v < -n ? -1 - n : v; /* no overflow below */
        v = v < 0 ? v + n : v;
        *bound[i] = v < low ? low : v > high ? high : v;
    }
}

static lm_code slice_text(lm_jrun *r, const lm_jstr *s, int64_t from, int64_t to, int64_t step,
                          lm_jval *out)
{
    lm_buf text = { 0 };
    lm_code rc = lm_jrun_walk(r, s);

    if (rc)
        return rc;
    if (step == 1) {
        size_t a = lm_jstr_offset(s, from), b = to > from ? lm_jstr_offset(s, to) : a;

        return lm_jv_part(r, s, s->s + a, b - a, out);
    }
    for (int64_t i = from; !rc && (step > 0 ? i < to : i > to); i += step) {
        bool found;
        lm_jval one;

        rc = character_of(r, s, i, &found, &one);
        if (!rc)
            rc = lm_jrun_add(r, &text, one.u.s->s, one.u.s->len);
    }
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

static lm_code slice_seq(lm_jrun *r, const lm_jval *of, int64_t from, int64_t to, int64_t step,
                         lm_jval *out)
{
    lm_jkind kind = of->kind == LM_JV_TUPLE ? LM_JV_TUPLE : LM_JV_LIST;
    lm_code rc = lm_jv_seq(r, kind, 0, out);

    for (int64_t i = from; !rc && (step > 0 ? i < to : i > to); i += step)
        rc = lm_jv_push(r, out->u.seq, of->u.seq->v[i]);
    return rc;
}

lm_code lm_jrun_slice(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval of, part[3];
    int64_t count, from, to, step = 1;
    lm_code rc = lm_jrun_eval(r, n->a, &of);

    for (size_t i = 0; !rc && i < 3; i++) {
        part[i] = lm_jv_none();
        if (n->item[i])
            rc = lm_jrun_eval(r, n->item[i], &part[i]);
    }
    r->at = n;
    if (rc)
        return rc;
    if (of.kind == LM_JV_UNDEFINED)
        return lm_jrun_fail_undefined(r, &of);
    for (int i = 0; i < 3; i++)
        if (part[i].kind != LM_JV_NONE && part[i].kind != LM_JV_INT && part[i].kind != LM_JV_BOOL) {
            return lm_jrun_fail(r, "slice indices must be integers or None");
        }
    if (of.kind != LM_JV_STR && of.kind != LM_JV_LIST && of.kind != LM_JV_TUPLE &&
        of.kind != LM_JV_RANGE)
        return lm_jrun_fail(r, "'%s' object is not subscriptable", lm_jv_type(&of));
    lm_jv_integer(&part[2], &step);
    if (!step)
        return lm_jrun_fail(r, "slice step cannot be zero");
    rc = lm_jv_length(r, &of, &count);
    if (rc)
        return rc;
    if (step > count + 1 || step < -count - 1)
        step = step > 0 ? count + 1 : -count - 1;
    clip_slice(count, part, &from, &to, step);
    return of.kind == LM_JV_STR ? slice_text(r, of.u.s, from, to, step, out)
                                : slice_seq(r, &of, from, to, step, out);
}
