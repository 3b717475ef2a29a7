/* SPDX-License-Identifier: Apache-2.0 */
/* modules.c -- the modules of a model, by its tensors' names. */
#include "tune/modules.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/arch.h"

/* The number behind the first name that a number follows: 3 of "model.layers.3.mlp.experts.0". */
static int64_t layer_of(const char *name)
{
    for (const char *p = strchr(name, '.'); p; p = strchr(p + 1, '.')) {
        size_t digits = strspn(p + 1, "0123456789");

        if (digits && digits < 10 && p[1 + digits] == '.')
            return atoll(p + 1);
    }
    return -1;
}

/* The part of a tensor's name in front of ".weight"; 0: it has no such end. */
static size_t stem_of(const char *name)
{
    size_t n = strlen(name);

    return n > 7 && !strcmp(name + n - 7, ".weight") ? n - 7 : 0;
}

/* The module's name: files of some architectures leave the root out, modules never do. */
static lm_code name_of(lm_tune_bases *b, const lm_arch *a, const char *name, size_t len, bool head,
                       char **out, lm_err *e)
{
    size_t root = a && a->rootless && !head && lm_arch_rootless(name) == name ? strlen(a->root) : 0;
    lm_code rc = lm_arena_alloc(b->arena, out, root + len + 1, 1, e);

    if (rc)
        return rc;
    memcpy(*out, a ? a->root : "", root);
    memcpy(*out + root, name, len);
    return LM_OK;
}

static lm_code add(lm_tune_bases *b, const lm_model_source *s, const lm_arch *a,
                   const lm_st_tensor *t, bool turned, lm_err *e)
{
    size_t len = stem_of(t->name);
    lm_tune_base *m;
    char *text = NULL;
    lm_code rc;

    if (!len || t->ndim < 1 || t->ndim > 2 || !lm_dtype_is_float(t->dtype) || !t->count)
        return LM_OK;
    rc = lm_grow(&b->at, &b->cap, b->n + 1, sizeof *b->at, "modules", e);
    if (rc)
        return rc;
    m = &b->at[b->n++];
    *m = (lm_tune_base){ .weight = t->name, .layer = layer_of(t->name) };
    m->head = lm_arch_names(LM_PART_OUTPUT, "weight", t->name);
    for (lm_part p = LM_PART_ROUTER; p <= LM_PART_EXPERT_DOWN; p++)
        m->routed = m->routed || lm_arch_names(p, "weight", t->name);
    m->kind = t->ndim == 1 ? LM_TUNE_NORM
              : lm_arch_names(LM_PART_EMBED, "weight", t->name) ||
                      lm_arch_names(LM_PART_POSITION, "weight", t->name) ||
                      lm_arch_names(LM_PART_RELATIVE, "weight", t->name)
                  ? LM_TUNE_EMBEDDING
                  : LM_TUNE_LINEAR_LAYER;
    if (m->kind == LM_TUNE_LINEAR_LAYER)
        m->turned = a && a->conv1d ? lm_arch_turns(a, t->name) : turned && !m->head;
    m->out = t->dim[m->turned || m->kind == LM_TUNE_EMBEDDING];
    m->in = t->ndim == 1 ? 0 : t->dim[!(m->turned || m->kind == LM_TUNE_EMBEDDING)];
    rc = name_of(b, a, t->name, len, m->head, &text, e);
    m->name = text;
    if (rc)
        return rc;
    rc = lm_arena_alloc(b->arena, &text, len + 6, 1, e);
    if (rc)
        return rc;
    memcpy(text, t->name, len);
    memcpy(text + len, ".bias", 5);
    const lm_st_tensor *bias = lm_model_source_find(s, text);
    m->bias = bias && bias->ndim == 1 && bias->count == m->out ? bias->name : NULL;
    return LM_OK;
}

/* Models' modules are in the order of their architecture's table, whatever that of the file is. */
static int part_of(const lm_arch *a, const char *name)
{
    int i = 0;

    for (; a && a->tensors[i].part; i++)
        if (lm_arch_names(a->tensors[i].part, "weight", name) &&
            lm_arch_part(a, a->tensors[i].part) == &a->tensors[i] && strstr(name, a->tensors[i].hf))
            break;
    return i;
}

static int by_place(const void *x, const void *y)
{
    const lm_tune_base *a = x, *b = y;
    int64_t la = a->head ? INT64_MAX : a->layer, lb = b->head ? INT64_MAX : b->layer;

    if (la != lb)
        return la < lb ? -1 : 1;
    return a->part != b->part ? (a->part < b->part ? -1 : 1) : strcmp(a->name, b->name);
}

static int by_name(const void *x, const void *y)
{
    const lm_tune_base *a = *(const lm_tune_base *const *)x, *b = *(const lm_tune_base *const *)y;
    int c = strcmp(lm_arch_rootless(a->name), lm_arch_rootless(b->name));

    return c ? c : a < b ? -1 : 1;
}

static lm_code index_names(lm_tune_bases *b, lm_err *e)
{
    lm_code rc = lm_alloc_n(&b->by_name, b->n, sizeof *b->by_name, "modules", e);

    for (size_t i = 0; !rc && i < b->n; i++)
        b->by_name[i] = &b->at[i];
    if (!rc && b->n)
        qsort(b->by_name, b->n, sizeof *b->by_name, by_name);
    return rc;
}

lm_code lm_tune_bases_read(const lm_model_source *base, bool turned, lm_tune_bases *out, lm_err *e)
{
    const lm_arch *a = lm_arch_of(lm_model_source_config(base));
    lm_code rc;

    *out = (lm_tune_bases){ .config = lm_model_source_config(base), .source = base };
    rc = lm_arena_new(&out->arena, 1 << 16, e);
    rc = rc ? rc : lm_strdup(&out->path, lm_model_source_path(base), e);
    for (size_t i = 0; !rc && i < lm_model_source_count(base); i++)
        rc = add(out, base, a, lm_model_source_at(base, i), turned, e);
    for (size_t i = 0; !rc && i < out->n; i++)
        out->at[i].part = part_of(a, out->at[i].weight);
    if (!rc && a)
        qsort(out->at, out->n, sizeof *out->at, by_place);
    rc = rc ? rc : index_names(out, e);
    if (rc)
        lm_tune_bases_fini(out);
    return rc;
}

void lm_tune_bases_fini(lm_tune_bases *b)
{
    lm_free(b->at);
    lm_free(b->by_name);
    lm_free(b->path);
    lm_arena_free(b->arena);
    *b = (lm_tune_bases){ 0 };
}

const lm_tune_base *lm_tune_base_find(const lm_tune_bases *b, const char *name, size_t len)
{
    const char *rest = lm_arch_rootless(name);
    size_t cut = (size_t)(rest - name), n = len > cut ? len - cut : 0, low = 0, high = b->n;

    while (n && low < high) { /* the first that is not less */
        size_t mid = low + (high - low) / 2;

        if (strncmp(lm_arch_rootless(b->by_name[mid]->name), rest, n) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    if (!n || low == b->n)
        return NULL;
    const char *mine = lm_arch_rootless(b->by_name[low]->name);
    return !strncmp(mine, rest, n) && !mine[n] ? b->by_name[low] : NULL;
}

const lm_st_tensor *lm_tune_tensor_find(const lm_model_source *base, const char *name)
{
    const char *rest = lm_arch_rootless(name);
    const lm_st_tensor *t = lm_model_source_find(base, name);

    if (!t && rest != name)
        t = lm_model_source_find(base, rest);
    for (int i = 0; !t && lm_arch_at(i); i++) {
        char longer[600];
        int n = snprintf(longer, sizeof longer, "%s%s", lm_arch_at(i)->root, name);
        if (n < (int)sizeof longer)
            t = lm_model_source_find(base, longer);
    }
    return t;
}
