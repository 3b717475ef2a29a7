/* SPDX-License-Identifier: Apache-2.0 */
/* lora.c -- PEFT adapters: their configuration, their tensors bound to those of the base, and the
 * sum W + s B A. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "merge/lora.h"

#include <math.h>
#include <pcre2.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/safetensors_table.h"

enum { MAX_CONFIG = 16 << 20, SPAN = 512 };

/* What happens to one tensor of the base. */
typedef struct {
    const lm_st_tensor *base; /* set by bind */
    const lm_st_tensor *a, *b, *bias, *whole;
    char *name; /* of the base's tensor, as the adapter has it */
    double scale;
    bool embedding;
} change;

struct lm_lora {
    char *path, *base;
    json_t *config;
    lm_st *st;
    change *change;
    size_t n, cap;
    bool transposed;
};

/* ---- Configuration ---- */

bool lm_lora_is(const char *path)
{
    lm_err ignored = { 0 };
    char *file = NULL;
    bool there = lm_path_is_dir(path) &&
                 !lm_path_join(&file, path, "adapter_config.json", &ignored) &&
                 lm_path_exists(file);

    lm_free(file);
    return there;
}

/* Present, and not null, false, or empty. */
static bool is_set(const json_t *c, const char *key)
{
    const json_t *v = json_object_get(c, key);

    return v && !json_is_null(v) && !json_is_false(v) &&
           !(json_is_object(v) && !json_object_size(v)) &&
           !(json_is_array(v) && !json_array_size(v));
}

/* Kinds whose effect is not W + s B A on the base as it is. */
static lm_code check_kind(const lm_lora *l, lm_err *e)
{
    static const char *const others[] = { "use_dora",
                                          "use_qalora",
                                          "layer_replication",
                                          "target_parameters",
                                          "alora_invocation_tokens",
                                          "megatron_config" };
    const char *type = NULL, *init;
    lm_code rc = lm_json_str_or(l->config, "peft_type", "", &type, l->path, e);

    if (rc)
        return rc;
    if (strcmp(type, "LORA") != 0)
        return lm_fail(e, LM_EUSAGE, l->path, "merge it with the program that made it",
                       "adapters of type '%.40s' cannot be merged, only LORA", type);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (is_set(l->config, others[i]))
            return lm_fail(e, LM_EUSAGE, l->path, "merge it with the program that made it",
                           "adapters with %s cannot be merged", others[i]);
    init = json_string_value(json_object_get(l->config, "init_lora_weights"));
    if (init && strcmp(init, "gaussian") != 0 && strcmp(init, "eva") != 0 &&
        strcmp(init, "orthogonal") != 0)
        return lm_fail(e, LM_EUSAGE, l->path, "convert it to a plain LoRA first",
                       "init_lora_weights '%.40s' changes the base", init);
    return LM_OK;
}

/* The entry of a pattern map whose key, a regular expression, is the end of the module's name. */
static lm_code pattern(const lm_lora *l, const char *map, const char *module, double *out,
                       lm_err *e)
{
    const char *key;
    json_t *v;

    json_object_foreach(json_object_get(l->config, map), key, v)
    {
        PCRE2_SIZE at;
        int code, hit;
        char *text = NULL;
        pcre2_code *re;
        pcre2_match_data *md;
        lm_code rc = lm_asprintf(&text, e, "^(?:.*\\.)?(?:%s)$", key);

        if (rc)
            return rc;
        re = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, 0, &code, &at, NULL);
        lm_free(text);
        if (!re)
            return lm_fail(e, LM_EFORMAT, l->path, NULL, "%s: '%.60s' is no regular expression",
                           map, key);
        md = pcre2_match_data_create_from_pattern(re, NULL);
        hit = md ? pcre2_match(re, (PCRE2_SPTR)module, strlen(module), 0, 0, md, NULL) : -1;
        pcre2_match_data_free(md);
        pcre2_code_free(re);
        if (hit < 0)
            continue;
        if (!json_is_number(v))
            return lm_fail(e, LM_EFORMAT, l->path, NULL, "%s: '%.60s' is no number", map, key);
        *out = json_number_value(v);
        return LM_OK;
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
    rc = rc ? rc : pattern(l, "rank_pattern", module, &r, e);
    rc = rc ? rc : pattern(l, "alpha_pattern", module, &alpha, e);
    if (!rc && r != (double)rank)
        rc = lm_fail(e, LM_EFORMAT, l->path, NULL,
                     "module '%.100s' has rank %lld, adapter_config.json says %g", module,
                     (long long)rank, r);
    *out = root ? alpha / sqrt(r) : alpha / r;
    return rc;
}

/* ---- Tensors of the adapter ---- */

static lm_code change_of(lm_lora *l, const char *name, size_t len, const char *suffix, change **out,
                         lm_err *e)
{
    char *full = NULL;
    lm_code rc = lm_asprintf(&full, e, "%.*s%s", (int)len, name, suffix);

    for (size_t i = 0; !rc && i < l->n; i++) {
        if (!strcmp(l->change[i].name, full)) {
            *out = &l->change[i];
            lm_free(full);
            return LM_OK;
        }
    }
    if (!rc)
        rc = lm_grow(&l->change, &l->cap, l->n + 1, sizeof *l->change, "adapter", e);
    if (rc) {
        lm_free(full);
        return rc;
    }
    *out = &l->change[l->n++];
    **out = (change){ .name = full };
    return LM_OK;
}

/* If name ends with `end`, the length of what is before it. */
static bool cut(const char *name, const char *end, size_t *len)
{
    size_t n = strlen(name), k = strlen(end);

    if (n <= k || strcmp(name + n - k, end) != 0)
        return false;
    *len = n - k;
    return true;
}

/* "lm_head.modules_to_save.weight" -> "lm_head.weight" */
static lm_code replaced(lm_lora *l, const char *name, const lm_st_tensor *t, lm_err *e)
{
    static const char *const inner[] = { ".modules_to_save.", ".base_layer.", ".original_module." };
    size_t len = strlen(name);
    const char *rest = "";
    change *c = NULL;
    lm_code rc;

    for (int i = 0; i < 3; i++) {
        const char *at = strstr(name, inner[i]);

        if (at) {
            len = (size_t)(at - name);
            rest = at + strlen(inner[i]) - 1;
        }
    }
    rc = change_of(l, name, len, rest, &c, e);
    if (!rc)
        c->whole = t;
    return rc;
}

static lm_code sort_tensor(lm_lora *l, const lm_st_tensor *t, lm_err *e)
{
    static const char prefix[] = "base_model.model.";
    const char *name = t->name;
    char show[LM_ST_SHOWN];
    change *c = NULL;
    size_t len;
    lm_code rc;

    if (strncmp(name, prefix, sizeof prefix - 1) != 0)
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "tensor '%s' does not begin with %s",
                       lm_st_show(name, show), prefix);
    name += sizeof prefix - 1;
    if (!lm_dtype_is_float(t->dtype))
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "tensor '%s' is %s", lm_st_show(name, show),
                       t->dtype_name);
    if (strstr(name, "lora_magnitude_vector"))
        return lm_fail(e, LM_EUSAGE, l->path, "merge it with the program that made it",
                       "adapters with use_dora cannot be merged");
    if (cut(name, ".lora_A.weight", &len) || cut(name, ".lora_embedding_A", &len)) {
        rc = change_of(l, name, len, ".weight", &c, e);
        if (!rc) {
            c->a = t;
            c->embedding = name[len + 6] == 'e';
        }
        return rc;
    }
    if (cut(name, ".lora_B.weight", &len) || cut(name, ".lora_embedding_B", &len)) {
        rc = change_of(l, name, len, ".weight", &c, e);
        if (!rc)
            c->b = t;
        return rc;
    }
    if (cut(name, ".lora_B.bias", &len)) {
        rc = change_of(l, name, len, ".bias", &c, e);
        if (!rc)
            c->bias = t;
        return rc;
    }
    if (strstr(name, ".lora_"))
        return lm_fail(e, LM_EUSAGE, l->path, "merge it with the program that made it",
                       "tensor '%s' belongs to no plain LoRA", lm_st_show(name, show));
    return replaced(l, name, t, e);
}

/* Every A has its B, of the same rank; the scale. */
static lm_code check_pair(lm_lora *l, change *c, lm_err *e)
{
    char module[512];
    size_t len = strlen(c->name);
    lm_code rc = LM_OK;

    if (c->bias) { /* of the module's scale: that of its weight */
        char *weight = NULL;

        rc = lm_asprintf(&weight, e, "%.*s.weight", (int)(len - 5), c->name);
        snprintf(module, sizeof module, "%.*s", (int)(len - 5 < 511 ? len - 5 : 511), c->name);
        for (size_t i = 0; !rc && i < l->n; i++)
            if (!strcmp(l->change[i].name, weight) && l->change[i].a)
                rc = find_scale(l, module, l->change[i].a->dim[0], &c->scale, e);
        lm_free(weight);
        return rc;
    }
    if (!c->a && !c->b)
        return LM_OK;
    if (!c->a || !c->b)
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "'%.150s' has lora_%c but no lora_%c", c->name,
                       c->a ? 'A' : 'B', c->a ? 'B' : 'A');
    if (c->a->ndim != 2 || c->b->ndim != 2 || c->a->dim[0] != c->b->dim[1] || !c->a->dim[0])
        return lm_fail(e, LM_EFORMAT, l->path, NULL, "lora_A and lora_B of '%.150s' do not fit",
                       c->name);
    snprintf(module, sizeof module, "%.*s", (int)(len - 7 < 511 ? len - 7 : 511), c->name);
    return find_scale(l, module, c->a->dim[0], &c->scale, e);
}

static lm_code read_all(lm_lora *l, lm_err *e)
{
    char *file = NULL, *weights = NULL;
    const char *base = NULL;
    lm_code rc = lm_path_join(&file, l->path, "adapter_config.json", e);

    if (!rc)
        rc = lm_json_load(file, MAX_CONFIG, &l->config, e);
    if (!rc && !json_is_object(l->config))
        rc = lm_fail(e, LM_EFORMAT, file, NULL, "it is not a JSON object");
    if (!rc)
        rc = check_kind(l, e);
    if (!rc)
        rc = lm_json_bool_or(l->config, "fan_in_fan_out", false, &l->transposed, l->path, e);
    if (!rc)
        rc = lm_json_str_or(l->config, "base_model_name_or_path", NULL, &base, l->path, e);
    if (!rc && base)
        rc = lm_strdup(&l->base, base, e);
    if (!rc)
        rc = lm_path_join(&weights, l->path, "adapter_model.safetensors", e);
    if (!rc)
        rc = lm_st_open(weights, &l->st, e);
    for (size_t i = 0; !rc && i < lm_st_count(l->st); i++)
        rc = sort_tensor(l, lm_st_at(l->st, i), e);
    for (size_t i = 0; !rc && i < l->n; i++)
        rc = check_pair(l, &l->change[i], e);
    lm_free(file);
    lm_free(weights);
    return rc;
}

lm_code lm_lora_open(const char *path, lm_lora **out, lm_err *e)
{
    lm_lora *l = NULL;
    lm_code rc = lm_alloc_n(&l, 1, sizeof *l, "adapter", e);

    *out = NULL;
    if (!rc)
        rc = lm_strdup(&l->path, path, e);
    if (!rc)
        rc = read_all(l, e);
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
    for (size_t i = 0; i < l->n; i++)
        lm_free(l->change[i].name);
    lm_free(l->change);
    lm_st_close(l->st);
    json_decref(l->config);
    lm_free(l->base);
    lm_free(l->path);
    lm_free(l);
}

const char *lm_lora_base(const lm_lora *l)
{
    return l->base;
}

/* ---- The base ---- */

/* The base's tensor; files may leave out the first part of names, or have one more. */
static const lm_st_tensor *find(const lm_model_source *base, const char *name)
{
    static const char *const parts[] = { "model.", "transformer." };
    const lm_st_tensor *t = lm_model_source_find(base, name);

    for (int i = 0; i < 2 && !t; i++) {
        size_t n = strlen(parts[i]);
        char longer[600];

        if (!strncmp(name, parts[i], n))
            t = lm_model_source_find(base, name + n);
        else if (snprintf(longer, sizeof longer, "%s%s", parts[i], name) < (int)sizeof longer)
            t = lm_model_source_find(base, longer);
    }
    return t;
}

static bool fits(const lm_lora *l, const change *c)
{
    const lm_st_tensor *t = c->base;
    bool turned = c->embedding || l->transposed;

    if (!lm_dtype_is_float(t->dtype))
        return false;
    if (c->bias)
        return t->ndim == 1 && c->bias->count == t->count;
    if (c->whole) { /* rows may have been added, unless there is a sum as well */
        bool same = c->whole->ndim == t->ndim;

        for (int i = c->a ? 0 : 1; same && i < t->ndim; i++)
            same = c->whole->dim[i] == t->dim[i];
        if (!same || !c->a)
            return same;
    }
    return t->ndim == 2 && t->dim[turned ? 1 : 0] == c->b->dim[0] &&
           t->dim[turned ? 0 : 1] == c->a->dim[1];
}

lm_code lm_lora_bind(lm_lora *l, const lm_model_source *base, lm_err *e)
{
    for (size_t i = 0; i < l->n; i++) {
        change *c = &l->change[i];
        char show[LM_ST_SHOWN];

        c->base = find(base, c->name);
        if (!c->base)
            return lm_fail(e, LM_EUSAGE, l->path, "merge it into the model it was trained on",
                           "%.80s has no tensor '%s'", lm_model_source_path(base),
                           lm_st_show(c->name, show));
        if (!fits(l, c))
            return lm_fail(e, LM_EUSAGE, l->path, "merge it into the model it was trained on",
                           "it does not fit the shape of '%s' in %.80s", lm_st_show(c->name, show),
                           lm_model_source_path(base));
    }
    return LM_OK;
}

static const change *change_on(const lm_lora *l, const lm_st_tensor *t)
{
    for (size_t i = 0; i < l->n; i++)
        if (l->change[i].base == t)
            return &l->change[i];
    return NULL;
}

lm_lora_effect lm_lora_effect_on(const lm_lora *l, const lm_st_tensor *t)
{
    const change *c = change_on(l, t);

    return !c ? LM_LORA_UNTOUCHED : c->whole && !c->a ? LM_LORA_REPLACED : LM_LORA_ADDED;
}

const lm_st_tensor *lm_lora_replacement(const lm_lora *l, const lm_st_tensor *t, const void **data)
{
    const change *c = change_on(l, t);

    *data = lm_st_data(l->st, c->whole);
    return c->whole;
}

/* ---- The sum ---- */

lm_dtype lm_lora_dtype(lm_dtype of)
{
    return of == LM_DTYPE_F64 ? LM_DTYPE_F64 : LM_DTYPE_F32;
}

/* W' [n,m] = W + s L R, L [n,r], R [r,m]. */
typedef struct {
    const double *l, *r;
    int64_t m, rank;
    double scale;
    const char *w;
    lm_dtype from, into; /* of w, of the base's tensor */
    char *out;
} sum;

/* To F32 so that a later rounding to fewer bits sees which side of a tie the sum was on: what is
 * not exact gets an odd last bit (Boldo and Melquiond, "Emulation of FMA and correctly rounded
 * sums", 2008). */
static float round_odd(double d)
{
    float f = (float)d;
    uint32_t u;

    if (isnan(d) || (double)f == d)
        return f;
    memcpy(&u, &f, 4);
    return u & 1 ? f : nextafterf(f, (double)f < d ? INFINITY : -INFINITY);
}

static void store(const sum *s, int64_t at, int64_t n, const double *v)
{
    double *d = (double *)(void *)s->out + at;
    float *f = (float *)(void *)s->out + at;

    for (int64_t j = 0; j < n; j++) {
        if (s->into == LM_DTYPE_F64)
            d[j] = v[j];
        else
            f[j] = s->into == LM_DTYPE_F32 ? (float)v[j] : round_odd(v[j]);
    }
}

static void rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const sum *s = ctx;
    double w[SPAN], acc[SPAN];
    size_t size = lm_dtype_size(s->from);

    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        for (int64_t j = 0; j < s->m; j += SPAN) {
            int64_t n = s->m - j < SPAN ? s->m - j : SPAN, at = i * s->m + j;

            memset(acc, 0, sizeof acc);
            for (int64_t k = 0; k < s->rank; k++) {
                const double *r = s->r + k * s->m + j;
                double c = s->l[i * s->rank + k];

                for (int64_t x = 0; x < n; x++)
                    acc[x] += c * r[x];
            }
            lm_convert(s->from, s->w + (size_t)at * size, LM_DTYPE_F64, w, n);
            for (int64_t x = 0; x < n; x++)
                acc[x] = w[x] + s->scale * acc[x];
            store(s, at, n, acc);
        }
    }
}

/* A tensor [rows, cols] of the adapter as doubles, turned when asked. */
static lm_code load(const lm_lora *l, const lm_st_tensor *t, bool turn, double **out, lm_err *e)
{
    double *v = NULL, *turned = NULL;
    lm_code rc = lm_alloc_n(&v, (size_t)t->count, sizeof *v, "adapter", e);

    if (!rc)
        rc = lm_st_load(l->st, t, LM_DTYPE_F64, v, e);
    if (!rc && turn) {
        rc = lm_alloc_n(&turned, (size_t)t->count, sizeof *v, "adapter", e);
        for (int64_t i = 0; !rc && i < t->dim[0]; i++)
            for (int64_t j = 0; j < t->dim[1]; j++)
                turned[j * t->dim[0] + i] = v[i * t->dim[1] + j];
        lm_free(v);
        v = turned;
    }
    if (rc) {
        lm_free(v);
        v = NULL;
    }
    *out = v;
    return rc;
}

lm_code lm_lora_add(const lm_lora *l, const lm_st_tensor *t, const void *w, void *out, lm_par *par,
                    lm_err *e)
{
    const change *c = change_on(l, t);
    bool turned = c->embedding || l->transposed;
    double *left = NULL, *right = NULL, one = 1;
    sum s = { .scale = c->scale, .w = w, .from = t->dtype, .into = t->dtype, .out = out };
    lm_code rc;

    if (c->whole) { /* peft saves the embedding that it adapts */
        s.w = lm_st_data(l->st, c->whole);
        s.from = c->whole->dtype;
    }

    if (c->bias) { /* one row: 1 x bias */
        rc = load(l, c->bias, false, &right, e);
        s.l = &one;
        s.rank = 1;
        s.m = t->count;
    } else {
        rc = load(l, turned ? c->a : c->b, turned, &left, e);
        if (!rc)
            rc = load(l, turned ? c->b : c->a, turned, &right, e);
        s.l = left;
        s.rank = c->a->dim[0];
        s.m = t->dim[1];
    }
    s.r = right;
    if (!rc && t->count)
        lm_par_for(par, t->count / s.m, s.m < 65536 ? 65536 / s.m : 1, rows, &s);
    lm_free(left);
    lm_free(right);
    return rc;
}
