/* SPDX-License-Identifier: Apache-2.0 */
/* spec.c -- the grammar of specifications. */
#include "kv/spec.h"

#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "kv/list.h"
#include "kv/spec_impl.h"

static const char where[] = LM_KV_WHERE;

enum { MOST_PATH = 4095 };

/* 'k=' or 'v=' at s. */
static bool is_side(const char *s)
{
    return (*s == 'k' || *s == 'v') && s[1] == '=';
}

/* ---- a method ---- */

static lm_code fail_name(const lm_kv_spec *s, const char *name, lm_err *e)
{
    const char *near = lm_nearest(name, s->names);
    char todo[128] = "list the methods to see all";
    if (near && !strcmp(near, name)) /* LM_KV_CACHEGEN */
        return lm_fail(e, LM_EUSAGE, where, "give it alone", "%s codes whole files", name);
    if (near)
        snprintf(todo, sizeof todo, "did you mean %s? (list the methods to see all)", near);
    return lm_fail(e, LM_EUSAGE, where, todo, "there is no method '%.40s'", name);
}

/* typed: the keys of the text; NULL: the keys of a second name. */
static lm_code set_key(lm_kv_use *u, const lm_hyper_text *t, bool *typed, lm_err *e)
{
    const lm_kv_method *m = u->method;
    int i = lm_hyper_find(m->hyper, t->key);
    if (i < 0)
        return lm_hyper_fail(m->hyper, where, m->name, m->file ? " file" : "", t->key, e);
    if (typed && typed[i])
        return lm_fail(e, LM_EUSAGE, where, "write it once", "%s of %s is given twice", t->key,
                       m->name);
    if (typed)
        typed[i] = true;
    u->given[i] = true;
    return lm_hyper_set(&m->hyper[i], where, m->name, t->value, &u->h[i], e);
}

/* Method `name` with the values of its table, or those that its second name stands for. */
static lm_code begin_use(const lm_kv_spec *s, const char *name, lm_kv_use *u, lm_err *e)
{
    const char *keys;
    lm_hyper_text t;
    *u = (lm_kv_use){ .method = lm_kv_method_find(name, &keys) };
    if (!u->method)
        return fail_name(s, name, e);
    for (int i = 0; u->method->hyper[i].name; i++)
        u->h[i] = u->method->hyper[i].value;
    for (; *keys; keys += *keys == ',')
        if (lm_hyper_next(&keys, "", where, u->method->name, &t, e) || set_key(u, &t, NULL, e))
            return e->code;
    return LM_OK;
}

/* The number of a file, from 1. */
static lm_code find_file(lm_kv_spec *s, const char *path, size_t len, int *out, lm_err *e)
{
    char *own;
    for (int i = 0; i < s->n_files; i++)
        if (strlen(s->file[i]) == len && !memcmp(s->file[i], path, len)) {
            *out = i + 1;
            return LM_OK;
        }
    if (s->n_files == LM_KV_FILES)
        return lm_fail(e, LM_EUSAGE, where, "write one calibration for several methods",
                       "more than %d files", LM_KV_FILES);
    if ((!s->arena && lm_arena_new(&s->arena, 4096, e)) ||
        lm_arena_strdup(s->arena, &own, path, len, e))
        return e->code;
    s->file[s->n_files++] = own;
    *out = s->n_files;
    return LM_OK;
}

/* The path behind "file=" at *at. */
static lm_code set_file(lm_kv_spec *s, const char **at, lm_kv_use *u, lm_err *e)
{
    const char *path = *at + strlen("file=");
    size_t len = strcspn(path, ",;");
    *at = path + len;
    if (u->file)
        return lm_fail(e, LM_EUSAGE, where, "write it once", "file of %s is given twice",
                       u->method->name);
    if (!len || len > MOST_PATH)
        return lm_fail(e, LM_EUSAGE, where, "write file=PATH",
                       "file of %s is a path of 1 to %d characters", u->method->name, MOST_PATH);
    return find_file(s, path, len, &u->file, e);
}

/* METHOD, up to ';', '+' or a side. */
static lm_code parse_use(lm_kv_spec *s, const char **at, lm_kv_use *u, lm_err *e)
{
    char name[64];
    bool typed[LM_KV_HYPERS] = { false };
    lm_hyper_text t;
    if (!lm_text_until(at, ":,;+=", name, sizeof name))
        return fail_name(s, name, e);
    if (**at == '=')
        return lm_fail(e, LM_EUSAGE, where, "write k=, v=, *= or layers.N=",
                       "'%.40s=' names neither keys nor values nor layers", name);
    if (begin_use(s, name, u, e))
        return e->code;
    for (char next = ':'; **at == next && !is_side(*at + 1); next = ',') {
        ++*at;
        if (u->method->file && !strncmp(*at, "file=", 5)) {
            if (set_file(s, at, u, e))
                return e->code;
            continue;
        }
        if (lm_hyper_next(at, ";+", where, u->method->name, &t, e) || set_key(u, &t, typed, e))
            return e->code;
    }
    if (**at && !strchr(";+", **at) && !(**at == ',' && is_side(*at + 1)))
        return lm_fail(e, LM_EUSAGE, where, "write METHOD:KEY=VALUE,KEY=VALUE",
                       "'%.40s' does not belong to %s", *at, u->method->name);
    if (u->method->complete)
        u->method->complete(u->h, u->given);
    return LM_OK;
}

/* ---- a value ---- */

/* A method or sides into side[2], of which some may be set already (twice: NULL), up to ';'. */
static lm_code parse_sides(lm_kv_spec *s, const char **at, lm_kv_use side[2], lm_err *e)
{
    lm_kv_use u;
    bool both = !is_side(*at);
    do {
        *at += **at == ',';
        int k = !both && **at == 'v' ? LM_KV_V : LM_KV_K;
        *at += both ? 0 : 2;
        if (parse_use(s, at, &u, e))
            return e->code;
        if (u.method->policy)
            return lm_fail(e, LM_EUSAGE, where, "write it once, in front: POLICY+METHOD",
                           "%s is of keys and values of all layers", u.method->name);
        if (side[k].method || (both && side[LM_KV_V].method))
            return lm_fail(e, LM_EUSAGE, where, "write it once", "the method of %s is given twice",
                           k == LM_KV_K && side[k].method ? "keys" : "values");
        side[k] = u;
        if (both)
            side[LM_KV_V] = u;
    } while (**at == ',' && !both);
    if (**at == ',')
        return lm_fail(e, LM_EUSAGE, where, "write k=METHOD,v=METHOD",
                       "a method of both keys and values precedes '%.2s'", *at + 1);
    if (**at == '+')
        return lm_fail(e, LM_EUSAGE, where, "a policy precedes '+'", "%s is no policy",
                       u.method->name);
    return LM_OK;
}

/* True if the text begins with a policy. */
static bool begins_policy(const char *at)
{
    char name[64];
    const char *keys;
    const lm_kv_method *m =
        lm_text_until(&at, ":,;+=", name, sizeof name) ? lm_kv_method_find(name, &keys) : NULL;
    return m && m->policy;
}

static lm_code parse_policy(lm_kv_spec *s, const char **at, bool layers, lm_err *e)
{
    lm_kv_use u;
    if (parse_use(s, at, &u, e))
        return e->code;
    if (layers)
        return lm_fail(e, LM_EUSAGE, where, "write it in front of the method of all layers",
                       "%s is of keys and values of all layers", u.method->name);
    if (s->policy.method)
        return lm_fail(e, LM_EUSAGE, where, "leave one out",
                       "%s follows %s: one policy is possible", u.method->name,
                       s->policy.method->name);
    if (**at == ',')
        return lm_fail(e, LM_EUSAGE, where, "write POLICY+k=METHOD,v=METHOD",
                       "'%.2s' follows the policy %s", *at + 1, u.method->name);
    s->policy = u;
    return LM_OK;
}

/* ---- an item ---- */

/* [-]DIGITS, below a million. */
static bool parse_number(const char **at, int32_t *out)
{
    bool minus = **at == '-';
    const char *p = *at + minus;
    int32_t x = 0;
    int n = 0;
    for (; *p >= '0' && *p <= '9' && n < 7; p++, n++)
        x = x * 10 + (*p - '0');
    if (n == 0 || n == 7 || (minus && !x))
        return false;
    *at = p;
    *out = minus ? -x : x;
    return true;
}

/* RANGE {'|' RANGE} '='; the word "layers." may be repeated. */
static lm_code parse_ranges(const char **at, lm_kv_item *it, lm_err *e)
{
    const char *start = *at;
    do {
        *at += **at == '|';
        if (!strncmp(*at, "layers.", 7))
            *at += 7;
        if (it->n_ranges == LM_KV_RANGES)
            return lm_fail(e, LM_EUSAGE, where, "write several items",
                           "more than %d ranges of layers in an item", LM_KV_RANGES);
        lm_kv_range *r = &it->range[it->n_ranges++];
        bool good = parse_number(at, &r->from);
        r->to = r->from;
        if (good && **at == '-') {
            ++*at;
            good = parse_number(at, &r->to);
        }
        if (!good || !strchr("|=", **at) || !**at)
            return lm_fail(e, LM_EUSAGE, where, "write layers.0-3|-1=METHOD",
                           "'%.40s' does not name layers", start);
        if ((r->from < 0) == (r->to < 0) && r->from > r->to)
            return lm_fail(e, LM_EUSAGE, where, "write the smaller one first",
                           "layers %d-%d: the first is above the last", r->from, r->to);
    } while (**at == '|');
    ++*at;
    return LM_OK;
}

static lm_code parse_item(lm_kv_spec *s, const char **at, lm_err *e)
{
    lm_kv_item it = { .n_ranges = 0 };
    bool layers = !strncmp(*at, "layers.", 7);
    if (layers && parse_ranges(at, &it, e))
        return e->code;
    if (!strncmp(*at, "*=", 2) && !layers)
        *at += 2;
    if (begins_policy(*at)) {
        if (parse_policy(s, at, layers, e))
            return e->code;
        if (**at != '+')
            return LM_OK;
        ++*at;
    }
    if (!layers)
        return parse_sides(s, at, s->all, e);
    if (s->n_items == LM_KV_ITEMS)
        return lm_fail(e, LM_EUSAGE, where, "join layers of one method by |",
                       "more than %d items with layers", LM_KV_ITEMS);
    if (parse_sides(s, at, it.side, e) ||
        lm_grow(&s->item, &s->cap_items, s->n_items + 1, sizeof *s->item, "kv cache items", e))
        return e->code;
    s->item[s->n_items++] = it;
    return LM_OK;
}

lm_code lm_kv_spec_parse(const char *text, lm_kv_spec **out, lm_err *e)
{
    return lm_kv_spec_parse_of(text, lm_kv_names, out, e);
}

lm_code lm_kv_spec_parse_of(const char *text, const char *const *names, lm_kv_spec **out, lm_err *e)
{
    lm_kv_spec *s;
    const char *at = text;
    *out = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "kv cache specification", e))
        return e->code;
    s->names = names;
    lm_code rc = parse_item(s, &at, e);
    while (!rc && *at == ';' && at[1]) { /* a separator at the end is ignored */
        at++;
        rc = parse_item(s, &at, e);
    }
    if (!rc)
        rc = lm_kv_spec_write(s, e);
    if (rc) {
        lm_kv_spec_free(s);
        return rc;
    }
    *out = s;
    return LM_OK;
}

void lm_kv_spec_free(lm_kv_spec *s)
{
    if (!s)
        return;
    lm_free(s->item);
    lm_buf_fini(&s->text);
    lm_arena_free(s->arena);
    lm_free(s);
}

const char *lm_kv_spec_file(const lm_kv_spec *s, int i)
{
    return i >= 0 && i < s->n_files ? s->file[i] : NULL;
}

/* The i-th method of the text; NULL past the last. */
static lm_kv_use *use_at(const lm_kv_spec *s, size_t i)
{
    lm_kv_spec *own = (lm_kv_spec *)(uintptr_t)s;
    if (i < 2)
        return &own->all[i];
    return i - 2 < 2 * s->n_items ? &own->item[(i - 2) / 2].side[i % 2] : NULL;
}

static bool is_uncalibrated(const lm_kv_use *u)
{
    return u->method && !u->file && u->method->calibrated && u->method->calibrated(u->h);
}

const char *lm_kv_spec_uncalibrated(const lm_kv_spec *s)
{
    const lm_kv_use *u;
    for (size_t i = 0; (u = use_at(s, i)); i++)
        if (is_uncalibrated(u))
            return u->method->name;
    return NULL;
}

lm_code lm_kv_spec_default_file(lm_kv_spec *s, const char *path, bool *any, lm_err *e)
{
    lm_kv_use *u;
    *any = lm_kv_spec_uncalibrated(s) != NULL;
    if (!*any)
        return LM_OK;
    int named = s->n_files, file;
    if (find_file(s, path, strlen(path), &file, e))
        return e->code;
    s->silent = s->n_files > named ? file : 0;
    for (size_t i = 0; (u = use_at(s, i)); i++)
        if (is_uncalibrated(u))
            u->file = file;
    return LM_OK;
}
