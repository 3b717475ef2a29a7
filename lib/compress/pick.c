/* SPDX-License-Identifier: Apache-2.0 */
/* pick.c -- see pick.h. */
#include "compress/pick.h"

#include <string.h>

#include "base/mem.h"
#include "compress/coded.h"

typedef struct {
    const lm_st *file;
    const lm_st_tensor *t;
} picked;

struct lm_pick {
    lm_st_plan *plan;
    json_t *described;
    picked *v;
    size_t n, cap;
    lm_buf header;
    size_t header_at, tensor; /* the tensors read */
    uint64_t at;              /* of the tensor */
};

lm_code lm_pick_new(lm_pick **out, lm_err *e)
{
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "a list of tensors", e);
    if (!rc)
        rc = lm_st_plan_new(&(*out)->plan, e);
    if (!rc && !((*out)->described = json_object()))
        rc = lm_fail(e, LM_ELIMIT, "metadata", NULL, "out of memory");
    return rc;
}

void lm_pick_free(lm_pick *p)
{
    if (!p)
        return;
    lm_st_plan_free(p->plan);
    json_decref(p->described);
    lm_buf_fini(&p->header);
    lm_free(p->v);
    lm_free(p);
}

lm_code lm_pick_described(const lm_st *file, json_t **out, lm_err *e)
{
    const char *text = lm_st_meta(file, LM_CODED_KEY);
    *out = NULL;
    if (!text || lm_json_parse(text, strlen(text), lm_st_path(file), out, e))
        return e->code;
    if (json_is_object(*out))
        return LM_OK;
    json_decref(*out);
    *out = NULL;
    return lm_fail(e, LM_EFORMAT, lm_st_path(file), NULL,
                   "\"" LM_CODED_KEY "\" is not a JSON object");
}

static const lm_st_tensor *find_with(const lm_st *file, const char *name, const char *suffix)
{
    lm_buf whole = { 0 };
    lm_err ignored = { 0 };
    const lm_st_tensor *t = NULL;
    if (!lm_buf_addf(&whole, &ignored, "%s%s", name, suffix))
        t = lm_st_find(file, whole.data);
    lm_buf_fini(&whole);
    return t;
}

void lm_pick_parts(const lm_st *file, const json_t *described, const char *name,
                   const lm_st_tensor *part[2], int *n)
{
    *n = 0;
    part[0] = lm_st_find(file, name);
    if (part[0]) {
        *n = 1;
        return;
    }
    if (!json_object_get(described, name))
        return;
    part[0] = find_with(file, name, ".scales");
    part[1] = find_with(file, name, ".codes");
    *n = part[0] && part[1] ? 2 : 0;
}

lm_code lm_pick_whole(const json_t *described, const lm_st_tensor *t, lm_buf *buf, lm_err *e)
{
    static const char *const tails[] = { ".scales", ".codes" };
    size_t n = strlen(t->name);
    buf->len = 0;
    if (lm_buf_add(buf, t->name, n, e))
        return e->code;
    for (size_t i = 0; described && i < 2; i++) {
        size_t k = strlen(tails[i]);
        if (n <= k || strcmp(t->name + n - k, tails[i]))
            continue;
        buf->data[n - k] = 0;
        if (json_object_get(described, buf->data)) {
            buf->len = n - k;
            return LM_OK;
        }
        buf->data[n - k] = '.';
    }
    return LM_OK;
}

lm_code lm_pick_add(lm_pick *p, const lm_st *file, const json_t *described, const char *name,
                    bool *found, lm_err *e)
{
    const lm_st_tensor *part[2];
    json_t *o = json_object_get(described, name);
    int n;
    lm_pick_parts(file, described, name, part, &n);
    *found = n > 0;
    for (int i = 0; i < n; i++) {
        if (lm_grow(&p->v, &p->cap, p->n + 1, sizeof *p->v, "a list of tensors", e) ||
            lm_st_plan_add_like(p->plan, part[i], e))
            return e->code;
        p->v[p->n++] = (picked){ file, part[i] };
    }
    if (n && o)
        json_object_set(p->described, name, o);
    return LM_OK;
}

lm_code lm_pick_meta(lm_pick *p, const lm_st *file, lm_err *e)
{
    const char *key, *value;
    for (size_t i = 0; lm_st_meta_at(file, i, &key, &value); i++)
        if (strcmp(key, LM_CODED_KEY) && lm_st_plan_meta(p->plan, key, value, e))
            return e->code;
    return LM_OK;
}

lm_code lm_pick_ready(lm_pick *p, uint64_t *bytes, lm_err *e)
{
    lm_buf text = { 0 };
    lm_jw w;
    lm_code rc = LM_OK;
    if (json_object_size(p->described)) {
        lm_jw_begin(&w, &text, 0, e);
        lm_jw_json(&w, NULL, p->described);
        rc = lm_jw_end(&w);
        if (!rc)
            rc = lm_st_plan_meta(p->plan, LM_CODED_KEY, text.data, e);
    }
    if (!rc)
        rc = lm_st_plan_header(p->plan, &p->header, e);
    *bytes = p->header.len + lm_st_plan_data_bytes(p->plan);
    lm_buf_fini(&text);
    return rc;
}

lm_code lm_pick_read(void *pick, void *dst, size_t cap, size_t *got, lm_err *e)
{
    lm_pick *p = pick;
    *got = 0;
    if (p->header_at < p->header.len) {
        *got = p->header.len - p->header_at < cap ? p->header.len - p->header_at : cap;
        memcpy(dst, p->header.data + p->header_at, *got);
        p->header_at += *got;
        return LM_OK;
    }
    while (p->tensor < p->n && p->at == p->v[p->tensor].t->bytes) {
        p->tensor++;
        p->at = 0;
    }
    if (p->tensor == p->n)
        return LM_OK;
    const picked *x = &p->v[p->tensor];
    size_t n = x->t->bytes - p->at < cap ? (size_t)(x->t->bytes - p->at) : cap;
    lm_code rc = lm_st_read(x->file, x->t, p->at, dst, n, e);
    if (!rc) {
        *got = n;
        p->at += n;
    }
    return rc;
}
