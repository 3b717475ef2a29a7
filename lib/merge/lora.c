/* SPDX-License-Identifier: Apache-2.0 */
/* lora.c -- PEFT adapters: their files, their configuration, and their tensors bound to those of the
 * base. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/safetensors_table.h"
#include "merge/lora_impl.h"
#include "model/arch.h"

bool lm_lora_is(const char *path, const lm_bundle_opts *o)
{
    return lm_tune_folder_is(path, o);
}

/* ---- Configuration ---- */

/* Starts whose change of W is made again (lib/tune/methods/lora.c). */
static bool starts_from_base(const lm_lora *l)
{
    const char *init = json_string_value(json_object_get(l->config, "init_lora_weights"));

    return init && (!strcmp(init, "pissa") || !strcmp(init, "olora") || !strcmp(init, "loftq"));
}

/* Starts of LoRA after which W is not that of the base. */
static lm_code check_start(const lm_lora *l, lm_err *e)
{
    const char *init = json_string_value(json_object_get(l->config, "init_lora_weights"));

    if (init && strcmp(init, "gaussian") != 0 && strcmp(init, "eva") != 0 &&
        strcmp(init, "orthogonal") != 0)
        return lm_fail(e, LM_EUSAGE, l->path, "convert it to a plain LoRA first",
                       "init_lora_weights '%.40s' changes the base", init);
    return LM_OK;
}

/* A pattern map is an object of numbers; ranks are integers. */
static lm_code check_pattern(const lm_lora *l, const char *map, bool whole, lm_err *e)
{
    const json_t *all = json_object_get(l->config, map);
    const char *key;
    json_t *v;

    if (!all || json_is_null(all))
        return LM_OK;
    if (!json_is_object(all))
        return lm_fail(e, LM_EFORMAT, l->path, "write {\"MODULE\": NUMBER, ...}",
                       "%s is not an object of modules and numbers", map);
    json_object_foreach((json_t *)(uintptr_t)all, key, v)
    {
        if (!json_is_number(v))
            return lm_fail(e, LM_EFORMAT, l->path, NULL, "%s: the value of '%.60s' is not a number",
                           map, key);
        if (whole &&
            (json_number_value(v) < 1 || json_number_value(v) != floor(json_number_value(v))))
            return lm_fail(e, LM_EFORMAT, l->path, NULL, "%s: '%.60s' is %g, which is not a rank",
                           map, key, json_number_value(v));
    }
    return LM_OK;
}

/* s of a module whose A has `rank` rows. */
static lm_code find_scale(const lm_lora *l, const char *module, int64_t rank, double *out,
                          lm_err *e)
{
    double r = 8, alpha = 8;
    bool root = false;
    lm_code rc = lm_json_f64_or(l->config, "r", 8, &r, l->path, e);

    rc = rc ? rc : lm_json_f64_or(l->config, "lora_alpha", 8, &alpha, l->path, e);
    rc = rc ? rc : lm_json_bool_or(l->config, "use_rslora", false, &root, l->path, e);
    rc = rc ? rc
            : lm_tune_pattern(json_object_get(l->config, "rank_pattern"), module, &r, l->path, e);
    rc = rc ? rc
            : lm_tune_pattern(json_object_get(l->config, "alpha_pattern"), module, &alpha, l->path,
                              e);
    if (!rc && r != (double)rank)
        rc = lm_fail(e, LM_EFORMAT, l->path, NULL,
                     "module '%.100s' has rank %lld, adapter_config.json says %g", module,
                     (long long)rank, r);
    *out = root ? alpha / sqrt(r) : alpha / r;
    return rc;
}

/* ---- Tensors of the adapter ---- */

static lm_lora_change *change_named(const lm_lora *l, const char *name)
{
    const json_t *at = json_object_get(l->names, name);

    return at ? &l->change[json_integer_value(at)] : NULL;
}

lm_code lm_lora_change_of(lm_lora *l, const char *name, size_t len, const char *suffix,
                          lm_lora_change **out, lm_err *e)
{
    char *full = NULL;
    lm_code rc = lm_asprintf(&full, e, "%.*s%s", (int)len, name, suffix);

    l->names = l->names ? l->names : json_object();
    if (!rc && (*out = change_named(l, full))) {
        lm_free(full);
        return LM_OK;
    }
    if (!rc && (!l->names || json_object_set_new(l->names, full, json_integer((json_int_t)l->n))))
        rc = lm_fail(e, LM_EFORMAT, l->path, NULL, "a name of a tensor is not UTF-8");
    if (!rc)
        rc = lm_grow(&l->change, &l->cap, l->n + 1, sizeof *l->change, "adapter", e);
    if (rc) {
        lm_free(full);
        return rc;
    }
    *out = &l->change[l->n++];
    **out = (lm_lora_change){ .name = full };
    return LM_OK;
}

/* If name ends with `end`, the length of the part before it. */
static bool cut(const char *name, const char *end, size_t *len)
{
    size_t n = strlen(name), k = strlen(end);

    if (n <= k || strcmp(name + n - k, end) != 0)
        return false;
    *len = n - k;
    return true;
}

static lm_code set_part(const lm_lora *l, const lm_st_tensor **place, const lm_st_tensor *t,
                        lm_err *e)
{
    char one[LM_ST_SHOWN], other[LM_ST_SHOWN];

    if (*place)
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "'%s' and '%s' are the same part of a module",
                       lm_st_show((*place)->name, one), lm_st_show(t->name, other));
    *place = t;
    return LM_OK;
}

/* "lm_head.modules_to_save.weight" -> "lm_head.weight" */
lm_code lm_lora_replace(lm_lora *l, const char *name, const lm_st_tensor *t, lm_err *e)
{
    static const char *const inner[] = { ".modules_to_save.", ".base_layer.", ".original_module." };
    size_t len = strlen(name);
    const char *rest = "";
    lm_lora_change *c = NULL;
    lm_code rc;

    for (int i = 0; i < 3; i++) {
        const char *at = strstr(name, inner[i]);

        if (at) {
            len = (size_t)(at - name);
            rest = at + strlen(inner[i]) - 1;
        }
    }
    rc = lm_lora_change_of(l, name, len, rest, &c, e);
    return rc ? rc : set_part(l, &c->whole, t, e);
}

static lm_code sort_tensor(lm_lora *l, const lm_st_tensor *t, lm_err *e)
{
    static const char prefix[] = "base_model.model.";
    const char *name = t->name;
    char show[LM_ST_SHOWN];
    lm_lora_change *c = NULL;
    size_t len;
    lm_code rc;

    if (strncmp(name, prefix, sizeof prefix - 1) != 0)
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "tensor '%s' does not begin with %s",
                       lm_st_show(name, show), prefix);
    name += sizeof prefix - 1;
    if (!lm_dtype_is_float(t->dtype))
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "tensor '%s' is %s", lm_st_show(name, show),
                       t->dtype_name);
    if (cut(name, ".lora_A.weight", &len) || cut(name, ".lora_embedding_A", &len)) {
        rc = lm_lora_change_of(l, name, len, ".weight", &c, e);
        if (!rc)
            c->embedding = name[len + 6] == 'e';
        return rc ? rc : set_part(l, &c->a, t, e);
    }
    if (cut(name, ".lora_B.weight", &len) || cut(name, ".lora_embedding_B", &len)) {
        rc = lm_lora_change_of(l, name, len, ".weight", &c, e);
        return rc ? rc : set_part(l, &c->b, t, e);
    }
    if (cut(name, ".lora_magnitude_vector", &len) ||
        cut(name, ".lora_magnitude_vector.weight", &len)) {
        rc = lm_lora_change_of(l, name, len, ".weight", &c, e);
        return rc ? rc : set_part(l, &c->magnitude, t, e);
    }
    if (cut(name, ".lora_B.bias", &len)) {
        rc = lm_lora_change_of(l, name, len, ".bias", &c, e);
        return rc ? rc : set_part(l, &c->bias, t, e);
    }
    if (strstr(name, ".lora_"))
        return lm_fail(e, LM_EUSAGE, l->path, "merge it with the program that made it",
                       "tensor '%s' does not belong to a plain LoRA", lm_st_show(name, show));
    return lm_lora_replace(l, name, t, e);
}

/* A module's bias has the scale of its weight. */
static lm_code check_bias(lm_lora *l, lm_lora_change *c, lm_err *e)
{
    char *weight = NULL;
    int len = (int)strlen(c->name) - 5;
    bool found = false;
    lm_code rc = lm_asprintf(&weight, e, "%.*s.weight", len, c->name);
    const lm_lora_change *w = rc ? NULL : change_named(l, weight);

    if (w) {
        char module[512];

        found = w->a != NULL;
        snprintf(module, sizeof module, "%.*s", len < 511 ? len : 511, c->name);
        if (found)
            rc = find_scale(l, module, w->a->dim[0], &c->scale, e);
    }
    lm_free(weight);
    if (!rc && (!found || c->whole))
        rc = lm_fail(e, LM_EFORMAT, l->path, NULL, "'%.150s' has a lora_B.bias but %s", c->name,
                     found ? "is also replaced as a whole" : "its weight has no lora_A");
    return rc;
}

/* Check that every A has its B, of the same rank, and with DoRA its magnitude; set the scale. */
static lm_code check_pair(lm_lora *l, lm_lora_change *c, lm_err *e)
{
    char module[512];
    size_t len = strlen(c->name);

    if (c->bias)
        return check_bias(l, c, e);
    if (!c->a && !c->b && !c->magnitude)
        return LM_OK;
    if (!c->a || !c->b)
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "'%.150s' has %s but no lora_%c", c->name,
                       c->a   ? "lora_A"
                       : c->b ? "lora_B"
                              : "a magnitude",
                       c->a ? 'B' : 'A');
    if (!c->magnitude != !l->dora)
        return lm_fail(e, LM_EFORMAT, l->path, NULL,
                       l->dora ? "use_dora is set, but '%.150s' has no lora_magnitude_vector"
                               : "'%.150s' has a lora_magnitude_vector, but use_dora is not set",
                       c->name);
    if (c->a->ndim != 2 || c->b->ndim != 2 || c->a->dim[0] != c->b->dim[1] || !c->a->dim[0])
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "lora_A and lora_B of '%.150s' do not fit",
                       c->name);
    if (c->magnitude && (c->magnitude->ndim != 1 || c->magnitude->dim[0] != c->b->dim[0]))
        return lm_fail(e, LM_EFORMAT, l->path, NULL,
                       "the magnitude of '%.150s' has %lld number%s for %lld output%s", c->name,
                       (long long)c->magnitude->count, lm_plural(c->magnitude->count),
                       (long long)c->b->dim[0], lm_plural(c->b->dim[0]));
    snprintf(module, sizeof module, "%.*s", (int)(len - 7 < 511 ? len - 7 : 511), c->name);
    return find_scale(l, module, c->a->dim[0], &c->scale, e);
}

static lm_code read_config(lm_lora *l, lm_err *e)
{
    lm_code rc = check_start(l, e);

    if (!rc)
        rc = lm_json_bool_or(l->config, "fan_in_fan_out", false, &l->transposed, l->path, e);
    if (!rc)
        rc = lm_json_bool_or(l->config, "use_dora", false, &l->dora, l->path, e);
    if (!rc)
        rc = check_pattern(l, "rank_pattern", true, e);
    if (!rc)
        rc = check_pattern(l, "alpha_pattern", false, e);
    return rc;
}

/* Read tensors that replace the base's: those of an .lmz are not mapped. */
lm_code lm_lora_hold_whole(lm_lora *l, lm_lora_change *c, lm_err *e)
{
    lm_code rc;

    if (!c->whole)
        return LM_OK;
    c->whole_data = lm_st_data(l->st, c->whole);
    if (c->whole_data)
        return LM_OK;
    rc = lm_alloc_n(&c->kept, (size_t)c->whole->bytes, 1, "adapter", e);
    if (!rc)
        rc = lm_st_read(l->st, c->whole, 0, c->kept, (size_t)c->whole->bytes, e);
    c->whole_data = c->kept;
    return rc;
}

static lm_code read_all(lm_lora *l, const lm_bundle_opts *o, lm_err *e)
{
    const char *base = NULL;
    const json_t *tokens, *params;
    lm_code rc = lm_tune_folder_open(l->path, o, &l->folder, e);

    if (rc)
        return rc;
    l->config = lm_tune_folder_config(l->folder);
    l->files = lm_tune_folder_files(l->folder);
    l->st = lm_tune_folder_tensors(l->folder);
    tokens = json_object_get(l->config, "trainable_token_indices");
    params = json_object_get(l->config, "target_parameters");
    l->tuned =
        strcmp(lm_tune_folder_method(l->folder)->peft_type, "LORA") != 0 || starts_from_base(l) ||
        json_array_size(tokens) || json_object_size(tokens) ||
        (params && !json_is_null(params) && !(json_is_array(params) && !json_array_size(params)));
    rc = lm_json_str_or(l->config, "base_model_name_or_path", NULL, &base, l->path, e);
    if (!rc && base)
        rc = lm_strdup(&l->base, base, e);
    if (rc || l->tuned)
        return rc;
    rc = read_config(l, e);
    for (size_t i = 0; !rc && i < lm_st_count(l->st); i++)
        rc = sort_tensor(l, lm_st_at(l->st, i), e);
    for (size_t i = 0; !rc && i < l->n; i++)
        rc = check_pair(l, &l->change[i], e);
    for (size_t i = 0; !rc && i < l->n; i++)
        rc = lm_lora_hold_whole(l, &l->change[i], e);
    return rc;
}

lm_code lm_lora_open(const char *path, const lm_bundle_opts *o, lm_lora **out, lm_err *e)
{
    lm_lora *l = NULL;
    lm_code rc = lm_alloc_n(&l, 1, sizeof *l, "adapter", e);

    *out = NULL;
    if (!rc)
        rc = lm_strdup(&l->path, path, e);
    if (!rc)
        rc = read_all(l, o, e);
    if (rc) {
        lm_lora_close(l);
        return rc;
    }
    *out = l;
    return LM_OK;
}

void lm_lora_close(lm_lora *l)
{
    if (!l)
        return;
    for (size_t i = 0; i < l->n; i++) {
        lm_free(l->change[i].name);
        lm_free(l->change[i].kept);
    }
    lm_free(l->change);
    lm_free(l->sorted);
    json_decref(l->names);
    lm_tune_folder_close(l->folder);
    lm_tune_bases_fini(&l->bases);
    lm_free(l->base);
    lm_free(l->path);
    lm_free(l);
}

lm_code lm_lora_file(const lm_lora *l, const char *name, size_t limit, lm_buf *out, bool *found,
                     lm_err *e)
{
    *found = lm_bundle_find(l->files, name) != NULL;
    return *found ? lm_bundle_load(l->files, name, limit, out, e) : LM_OK;
}

const char *lm_lora_base(const lm_lora *l)
{
    return l->base;
}

/* ---- The base ---- */

/* True if the base's matrix is [in, out].  Where a known architecture has such matrices, it depends
 * on the module, as in PEFT: GPT-2's Conv1D is, its head is not, regardless of fan_in_fan_out. */
static bool is_turned(const lm_lora *l, const lm_lora_change *c, const lm_model_source *base)
{
    const lm_arch *a = lm_arch_of(lm_model_source_config(base));

    return c->embedding || (a && a->conv1d ? lm_arch_turns(a, c->base->name) : l->transposed);
}

static bool fits(const lm_lora_change *c)
{
    const lm_st_tensor *t = c->base;
    bool turned = c->turned;

    if ((c->part || c->param) && !c->whole) /* lm_tune_folder_bind has checked it */
        return true;
    if (!lm_dtype_is_float(t->dtype))
        return false;
    if (c->bias)
        return t->ndim == 1 && c->bias->count == t->count;
    if (c->whole) { /* rows may have been added, unless there is a sum as well */
        bool same = c->whole->ndim == t->ndim;

        for (int i = lm_lora_adds(c) ? 0 : 1; same && i < t->ndim; i++)
            same = c->whole->dim[i] == t->dim[i];
        if (!same || !c->a)
            return same; /* of a part the rest is checked */
    }
    return t->ndim == 2 && t->dim[turned ? 1 : 0] == c->b->dim[0] &&
           t->dim[turned ? 0 : 1] == c->a->dim[1];
}

static int compare(const void *x, const void *y)
{
    return (uintptr_t)x < (uintptr_t)y ? -1 : x != y;
}

static int by_tensor(const void *x, const void *y)
{
    return compare((*(const lm_lora_change *const *)x)->base,
                   (*(const lm_lora_change *const *)y)->base);
}

static int to_tensor(const void *t, const void *y)
{
    return compare(t, (*(const lm_lora_change *const *)y)->base);
}

static lm_code sort_changes(lm_lora *l, lm_err *e)
{
    lm_code rc = lm_alloc_n(&l->sorted, l->n, sizeof *l->sorted, "adapter", e);

    for (size_t i = 0; !rc && i < l->n; i++)
        l->sorted[i] = &l->change[i];
    if (!rc && l->n)
        qsort(l->sorted, l->n, sizeof *l->sorted, by_tensor);
    for (size_t i = 1; !rc && i < l->n; i++)
        if (l->sorted[i]->base && l->sorted[i]->base == l->sorted[i - 1]->base)
            rc = lm_fail(e, LM_EFORMAT, l->path, NULL, "'%.100s' and '%.100s' are the same tensor",
                         l->sorted[i - 1]->name, l->sorted[i]->name);
    return rc;
}

lm_code lm_lora_bind(lm_lora *l, const lm_model_source *base, const lm_st_tensor *tied, lm_err *e)
{
    lm_code rc = l->tuned ? lm_lora_bind_parts(l, base, e) : LM_OK;

    if (!rc && tied)
        rc = lm_lora_untie(l, base, tied, e);
    if (rc)
        return rc;
    for (size_t i = 0; i < l->n; i++) {
        lm_lora_change *c = &l->change[i];
        char show[LM_ST_SHOWN];

        if ((c->own && !lm_lora_adds(c)) || c->skipped)
            continue;
        if (!c->own)
            c->base = lm_tune_tensor_find(base, c->name);
        if (!c->base)
            return lm_fail(e, LM_EUSAGE, l->path, "merge it into the model on which it was trained",
                           "%.80s has no tensor '%s'", lm_model_source_path(base),
                           lm_st_show(c->name, show));
        c->turned = is_turned(l, c, base);
        if (!fits(c))
            return lm_fail(e, LM_EUSAGE, l->path, "merge it into the model it was trained on",
                           "it does not fit the shape of '%s' in %.80s", lm_st_show(c->name, show),
                           lm_model_source_path(base));
    }
    return sort_changes(l, e);
}

const lm_lora_change *lm_lora_change_on(const lm_lora *l, const lm_st_tensor *t)
{
    const lm_lora_change **at =
        l->sorted ? bsearch(t, l->sorted, l->n, sizeof *l->sorted, to_tensor) : NULL;

    return at ? *at : NULL;
}

lm_lora_effect lm_lora_effect_on(const lm_lora *l, const lm_st_tensor *t)
{
    const lm_lora_change *c = lm_lora_change_on(l, t);

    return !c ? LM_LORA_UNTOUCHED : c->whole && !lm_lora_adds(c) ? LM_LORA_REPLACED : LM_LORA_ADDED;
}

const lm_st_tensor *lm_lora_replacement(const lm_lora *l, const lm_st_tensor *t, const void **data)
{
    const lm_lora_change *c = lm_lora_change_on(l, t);

    *data = c->whole_data;
    return c->whole;
}
