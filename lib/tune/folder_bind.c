/* SPDX-License-Identifier: Apache-2.0 */
/* folder_bind.c -- the tensors of an adapter's file, each to its module of the base. */
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "format/safetensors_table.h"
#include "tune/folder_impl.h"

static const char all_prefix[] = "base_model.", prefix[] = "base_model.model.";

/* Where the method's part of a tensor's name begins, behind the last dot in front of its prefix;
 * NULL: nowhere. */
static const char *own_part(const lm_tune_method *t, const char *name)
{
    const char *found = NULL;
    size_t n = strlen(t->prefix);

    for (const char *p = strchr(name, '.'); p; p = strchr(p + 1, '.'))
        if (!strncmp(p + 1, t->prefix, n))
            found = p + 1;
    return found;
}

/* The part of a module, made at its first tensor. */
static lm_code part_of(lm_tune_folder *f, const lm_tune_base *b, const lm_tune_method *t,
                       lm_tune_part **out, lm_err *e)
{
    size_t *at = &f->part_at[t != f->method][b - f->bases->at];
    lm_tune_part *p;
    lm_code rc;

    if (*at) {
        *out = &f->part[*at - 1];
        return LM_OK;
    }
    rc = lm_grow(&f->part, &f->cap_parts, f->n_parts + 1, sizeof *f->part, "adapter", e);
    if (rc)
        return rc;
    p = *out = &f->part[f->n_parts];
    *p = (lm_tune_part){ .base = b, .method = t };
    *at = ++f->n_parts;
    p->module = (lm_tune_module){ .name = b->name,
                                  .out = b->out,
                                  .in = b->in,
                                  .layer = b->layer,
                                  .turned = b->turned || b->kind == LM_TUNE_EMBEDDING,
                                  .embedding = b->kind == LM_TUNE_EMBEDDING,
                                  .has_bias = b->bias != NULL,
                                  .config = f->config };
    return LM_OK;
}

/* "lm_head.modules_to_save.weight" -> "lm_head.weight" */
static lm_code add_whole(lm_tune_folder *f, const char *name, const lm_st_tensor *t, lm_err *e)
{
    static const char *const inner[] = { ".modules_to_save.", ".base_layer.", ".original_module." };
    size_t len = strlen(name);
    const char *rest = "";
    char *full = NULL;
    lm_code rc =
        lm_grow(&f->whole, &f->cap_wholes, f->n_wholes + 1, sizeof *f->whole, "adapter", e);

    for (int i = 0; i < 3; i++) {
        const char *at = strstr(name, inner[i]);

        if (at) {
            len = (size_t)(at - name);
            rest = at + strlen(inner[i]) - 1;
        }
    }
    rc = rc ? rc : lm_arena_alloc(f->arena, &full, len + strlen(rest) + 1, 1, e);
    if (rc)
        return rc;
    memcpy(full, name, len);
    memcpy(full + len, rest, strlen(rest));
    f->whole[f->n_wholes++] = (lm_tune_whole){ .name = full, .file = t };
    return LM_OK;
}

/* The indices that trainable_token_indices gives the module: a list, or a map of names and
 * lists. */
static const json_t *indices_of(const lm_tune_folder *f, const char *module)
{
    const json_t *all = json_object_get(f->config, "trainable_token_indices");
    const char *key;
    json_t *v;

    if (json_is_array(all))
        return all;
    json_object_foreach((json_t *)(uintptr_t)all, key, v)
    {
        size_t n = strlen(module), m = strlen(key);

        if (m <= n && !strcmp(module + n - m, key))
            return v;
    }
    return NULL;
}

/* Rows of an embedding that a LoRA trains beside its factors; `name` ends in this. */
static const char tokens_end[] = ".token_adapter.trainable_tokens_delta";

static lm_code sort_tokens(lm_tune_folder *f, size_t k, const char *name, size_t len, lm_err *e)
{
    const lm_tune_base *b = lm_tune_base_find(f->bases, name, len);
    json_t *config;
    lm_tune_part *p;

    if (!b)
        return lm_fail(e, LM_EUSAGE, f->path, "use the model on which it was trained",
                       "%.80s has no module for '%.100s'", f->bases->path, name);
    config = json_object();
    f->tokens = f->tokens ? f->tokens : json_array();
    if (!config || !f->tokens || json_array_append_new(f->tokens, config) ||
        json_object_set(config, "token_indices", (json_t *)(uintptr_t)indices_of(f, b->name)))
        return lm_fail(e, LM_EFORMAT, f->path, NULL,
                       "trainable_token_indices has no list for '%.100s'", b->name);
    f->of[k] = b;
    f->own[k] = name + len + sizeof ".token_adapter." - 1;
    if (part_of(f, b, lm_tune_method_of("TRAINABLE_TOKENS"), &p, e))
        return e->code;
    p->module.config = config;
    return LM_OK;
}

/* Of chosen tokens: the same rows once more, as those of a head that is tied to the embedding. */
static bool is_again(const lm_tune_folder *f, const char *name)
{
    return !strcmp(name, "base_model.model.lm_head.trainable_tokens_delta") &&
           !lm_tune_base_find(f->bases, "lm_head", 7);
}

static lm_code sort_tensor(lm_tune_folder *f, size_t k, lm_err *e)
{
    const lm_st_tensor *t = lm_st_at(f->st, k);
    char show[LM_ST_SHOWN];
    const char *name = t->name, *own;
    const lm_tune_base *b;
    lm_tune_part *p;
    bool taken = false;

    if (!t->count || is_again(f, name)) /* no count: of a module that has no rank left */
        return LM_OK;
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) {
        /* shared by all modules: looked up by name */
        if (!strncmp(name, all_prefix, sizeof all_prefix - 1) &&
            !strncmp(name + sizeof all_prefix - 1, f->method->prefix, strlen(f->method->prefix)))
            return LM_OK;
        return lm_fail(e, LM_EFORMAT, f->path, NULL, "tensor '%s' does not begin with %s",
                       lm_st_show(name, show), prefix);
    }
    name += sizeof prefix - 1;
    own = own_part(f->method, name);
    size_t n = strlen(name), m = sizeof tokens_end - 1;
    if (n > m && !strcmp(name + n - m, tokens_end))
        return sort_tokens(f, k, name, n - m, e);
    if (!own)
        return add_whole(f, name, t, e);
    b = lm_tune_base_find(f->bases, name, (size_t)(own - 1 - name));
    if (!b && lm_tune_folder_level(f, t, name, (size_t)(own - 1 - name), own, &taken, e))
        return e->code;
    if (taken)
        return LM_OK;
    if (!b)
        return lm_fail(e, LM_EUSAGE, f->path, "use the model on which it was trained",
                       "%.80s has no module for '%s'", f->bases->path, lm_st_show(t->name, show));
    f->of[k] = b;
    f->own[k] = own;
    return part_of(f, b, f->method, &p, e);
}

/* The adapter's tensor of that name, with or without an old ".weight" at its end. */
static const lm_st_tensor *look_up(const lm_tune_folder *f, const char *name)
{
    char longer[600];
    const lm_st_tensor *t = lm_st_find(f->st, name);

    if (!t && snprintf(longer, sizeof longer, "%s.weight", name) < (int)sizeof longer)
        t = lm_st_find(f->st, longer);
    return t;
}

/* Names of modules in the file begin with the root, or do not. */
static const lm_st_tensor *tensor_of(const lm_tune_folder *f, const lm_tune_part *p, int i)
{
    const lm_tune_tensor *t = &p->tensor[i];
    char name[700];

    if (t->shared) {
        snprintf(name, sizeof name, "%s%s", all_prefix, t->suffix);
        return look_up(f, name);
    }
    size_t m = (size_t)(p->base - f->bases->at);
    for (size_t at = f->first[m]; at < f->first[m + 1]; at++) {
        size_t n = strlen(t->suffix), k = f->order[at];

        if (!strncmp(f->own[k], t->suffix, n) &&
            (!f->own[k][n] || !strcmp(f->own[k] + n, ".weight")))
            return lm_st_at(f->st, k);
    }
    return NULL;
}

static void show_shape(int ndim, const int64_t *dim, char out[96])
{
    size_t n = 0;

    out[0] = 0;
    for (int i = 0; i < ndim && n < 80; i++)
        n += (size_t)snprintf(out + n, 96 - n, "%s%lld", i ? "," : "", (long long)dim[i]);
}

static bool is_whole(lm_dtype d)
{
    return d == LM_DTYPE_I32 || d == LM_DTYPE_I64 || d == LM_DTYPE_I16 || d == LM_DTYPE_U8;
}

static lm_code check_shape(const lm_tune_folder *f, const lm_tune_tensor *t, const lm_st_tensor *s,
                           lm_err *e)
{
    char have[96], want[96], show[LM_ST_SHOWN];
    bool same = s->ndim == t->ndim;

    for (int i = 0; same && i < t->ndim; i++)
        same = s->dim[i] == t->dim[i];
    if (same && (t->ids ? is_whole(s->dtype) : lm_dtype_is_float(s->dtype)))
        return LM_OK;
    if (same)
        return lm_fail(e, LM_EFORMAT, f->path, NULL, "tensor '%s' is %s", lm_st_show(s->name, show),
                       s->dtype_name);
    show_shape(s->ndim, s->dim, have);
    show_shape(t->ndim, t->dim, want);
    return lm_fail(e, LM_EUSAGE, f->path, "use the model on which it was trained",
                   "'%s' is [%s], where the base and adapter_config.json have [%s]",
                   lm_st_show(s->name, show), have, want);
}

/* Of a part: its values, its tensors, and those of the file; used[k] is set for tensor k of the
 * file. */
static lm_code bind_part(lm_tune_folder *f, lm_tune_part *p, lm_tune_tensor *room, bool *used,
                         lm_err *e)
{
    double *values = NULL;
    int n_values = 0;
    char key[600];
    lm_code rc;

    while (p->method->hyper[n_values].name)
        n_values++;
    rc = lm_arena_alloc(f->arena, &values, (size_t)n_values + 1, sizeof *values, e);
    rc = rc ? rc
            : lm_tune_read_hyper(p->method, p->module.config, lm_tune_folder_key(f, p, key),
                                 f->path, values, e);
    p->module.hyper = values;
    memset(room, 0, LM_TUNE_TENSORS * sizeof *room);
    rc = rc ? rc : p->method->tensors(&p->module, room, &p->n, e);
    rc = rc ? rc : lm_arena_alloc(f->arena, &p->tensor, (size_t)p->n + 1, sizeof *p->tensor, e);
    rc = rc ? rc : lm_arena_alloc(f->arena, &p->file, (size_t)p->n + 1, sizeof *p->file, e);
    if (!rc)
        memcpy(p->tensor, room, (size_t)p->n * sizeof *room);
    for (int i = 0; !rc && i < p->n; i++) {
        const lm_tune_tensor *t = &p->tensor[i];

        p->file[i] = t->off ? NULL : tensor_of(f, p, i);
        if (t->off)
            continue;
        if (!p->file[i] && !t->absent)
            return lm_fail(e, LM_EFORMAT, f->path, "copy all files of the adapter",
                           "%s '%.150s' has no %s", t->shared ? "the adapter of" : "module",
                           p->module.name, t->suffix);
        if (!p->file[i])
            continue;
        for (int k = 0; k < t->ndim && k < p->file[i]->ndim; k++)
            if (t->dim[k] == LM_TUNE_ANY)
                p->tensor[i].dim[k] = p->file[i]->dim[k];
        rc = check_shape(f, t, p->file[i], e);
        used[p->file[i] - lm_st_at(f->st, 0)] = true;
    }
    return rc;
}

/* The widest of the modules, and the place of each: in the base's order. */
static void place_parts(lm_tune_folder *f)
{
    int64_t out = 0, in = 0, place = 0;

    for (size_t i = 0; i < f->n_parts; i++) {
        out = f->part[i].module.out > out ? f->part[i].module.out : out;
        in = f->part[i].module.in > in ? f->part[i].module.in : in;
    }
    for (size_t k = 0; k < f->bases->n; k++)
        for (int i = 0; i < 2; i++)
            if (f->part_at[i][k]) {
                lm_tune_module *m = &f->part[f->part_at[i][k] - 1].module;

                m->most_out = out;
                m->most_in = in;
                m->place = place++;
                m->places = (int64_t)f->n_parts;
            }
}

/* Tensors by their modules, those of a module in the order of the file. */
static void order_tensors(lm_tune_folder *f)
{
    size_t n = lm_st_count(f->st), m = f->bases->n;

    for (size_t k = 0; k < n; k++)
        if (f->of[k])
            f->first[f->of[k] - f->bases->at + 1]++;
    for (size_t i = 0; i < m; i++)
        f->first[i + 1] += f->first[i];
    size_t all = f->first[m];
    for (size_t k = n; k-- > 0;) /* from its end, each module fills its own */
        if (f->of[k])
            f->order[--f->first[f->of[k] - f->bases->at + 1]] = k;
    for (size_t i = 0; i < m; i++) /* the beginnings are one place too far */
        f->first[i] = f->first[i + 1];
    f->first[m] = all;
}

static lm_code make_room(lm_tune_folder *f, lm_err *e)
{
    size_t n = lm_st_count(f->st), m = f->bases->n;
    lm_code rc = lm_arena_alloc(f->arena, &f->of, n, sizeof *f->of, e);

    rc = rc ? rc : lm_arena_alloc(f->arena, &f->own, n, sizeof *f->own, e);
    rc = rc ? rc : lm_arena_alloc(f->arena, &f->order, n + 1, sizeof *f->order, e);
    rc = rc ? rc : lm_arena_alloc(f->arena, &f->first, m + 1, sizeof *f->first, e);
    for (int i = 0; !rc && i < 2; i++)
        rc = lm_arena_alloc(f->arena, &f->part_at[i], m + 1, sizeof *f->part_at[i], e);
    return rc;
}

lm_code lm_tune_folder_bind(lm_tune_folder *f, const lm_tune_bases *bases, lm_err *e)
{
    size_t n = lm_st_count(f->st);
    bool *used = NULL;
    lm_tune_tensor *room = NULL;
    char show[LM_ST_SHOWN];
    lm_code rc = lm_alloc_n(&used, n, sizeof *used, "adapter", e);

    rc = rc ? rc : lm_alloc_n(&room, LM_TUNE_TENSORS, sizeof *room, "adapter", e);
    f->bases = bases;
    rc = rc ? rc : make_room(f, e);
    rc = rc ? rc : lm_tune_folder_check_targets(f, e);
    for (size_t i = 0; !rc && i < n; i++)
        rc = sort_tensor(f, i, e);
    rc = rc ? rc : lm_tune_folder_bind_params(f, e);
    if (!rc && !f->n_parts && !f->n_wholes && !f->n_params)
        rc = lm_fail(e, LM_EUSAGE, f->path, "save it again with its indices",
                     "%s holds no tensors of modules: they are drawn from a seed, in a way that is "
                     "not reproduced",
                     lm_tune_weights_file);
    if (!rc) {
        order_tensors(f);
        place_parts(f);
    }
    for (size_t i = 0; !rc && i < f->n_parts; i++)
        rc = bind_part(f, &f->part[i], room, used, e);
    for (size_t i = 0; !rc && i < f->n_wholes; i++)
        used[f->whole[i].file - lm_st_at(f->st, 0)] = true;
    for (size_t i = 0; !rc && i < f->n_params; i++)
        used[f->param[i].a - lm_st_at(f->st, 0)] = used[f->param[i].b - lm_st_at(f->st, 0)] = true;
    for (size_t k = 0; !rc && k < n; k++)
        if (!used[k] && lm_st_at(f->st, k)->count && !is_again(f, lm_st_at(f->st, k)->name))
            rc = lm_fail(e, LM_EFORMAT, f->path, "use the program that made it",
                         "tensor '%s' is not one of %s", lm_st_show(lm_st_at(f->st, k)->name, show),
                         f->method->peft_type);
    lm_free(used);
    lm_free(room);
    return rc;
}

const lm_tune_part *lm_tune_folder_rows(const lm_tune_folder *f)
{
    for (size_t i = 0; i < lm_tune_folder_parts(f); i++)
        if (lm_tune_folder_part(f, i)->method != lm_tune_folder_method(f))
            return lm_tune_folder_part(f, i);
    return NULL;
}

lm_code lm_tune_folder_refuse_rows(const lm_tune_folder *f, const char *todo, lm_err *e)
{
    const lm_tune_part *p = lm_tune_folder_rows(f);

    return p ? lm_fail(e, LM_EUSAGE, lm_tune_folder_path(f), todo,
                       "it trains rows of '%.100s', for which factors have no place",
                       p->module.name)
             : LM_OK;
}

const lm_tune_part *lm_tune_folder_part_of(const lm_tune_folder *f, const char *module)
{
    const lm_tune_base *b = lm_tune_base_find(f->bases, module, strlen(module));
    size_t at = b ? f->part_at[0][b - f->bases->at] : 0;

    return at ? &f->part[at - 1] : NULL;
}

lm_code lm_tune_folder_load(const lm_tune_folder *f, const lm_tune_part *p, int i, double *out,
                            lm_err *e)
{
    const lm_tune_tensor *t = &p->tensor[i];
    int64_t n = 1;

    if (p->file[i])
        return lm_st_load(f->st, p->file[i], LM_DTYPE_F64, out, e);
    if (p->method->draw)
        return p->method->draw(&p->module, i, out, e);
    for (int k = 0; k < t->ndim; k++)
        n *= t->dim[k];
    for (int64_t k = 0; k < n; k++)
        out[k] = t->init == LM_TUNE_ONES ? 1 : t->init == LM_TUNE_FULL ? t->scale : 0;
    return LM_OK;
}
