/* SPDX-License-Identifier: Apache-2.0 */
/* recipe.c -- builds, checks and shows recipes from any source. */
#include "merge/recipe.h"

#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "merge/recipe_impl.h"

enum { MAX_SOURCES = 1024 }; /* in one slice */

/* ---- Building ---- */

lm_code lm_recipe_begin(const char *method, lm_merge_recipe **out, lm_err *e)
{
    const lm_merge_method *m = NULL;
    lm_arena *a = NULL;
    lm_merge_recipe *r = NULL;
    lm_code rc = lm_merge_method_find(method, &m, e);

    *out = NULL;
    if (!rc)
        rc = lm_arena_new(&a, 1 << 16, e);
    if (!rc)
        rc = lm_arena_alloc(a, &r, 1, sizeof *r, e);
    if (!rc) {
        r->arena = a;
        rc = lm_arena_alloc(a, &r->input, LM_MERGE_MAX_INPUTS, sizeof *r->input, e);
    }
    if (rc) {
        lm_arena_free(a);
        return rc;
    }
    r->method = m;
    r->base = -1;
    r->dtype = r->out_dtype = LM_DTYPE_NONE;
    *out = r;
    return LM_OK;
}

lm_code lm_merge_recipe_new(const char *method, lm_merge_recipe **out, lm_err *e)
{
    lm_merge_recipe *r = NULL;
    lm_code rc = lm_recipe_begin(method, &r, e);

    *out = NULL;
    if (rc)
        return rc;
    rc = lm_arena_alloc(r->arena, &r->slice, 1, sizeof *r->slice, e);
    if (!rc)
        rc = lm_arena_alloc(r->arena, &r->module, 1, sizeof *r->module, e);
    if (rc) {
        lm_merge_recipe_free(r);
        return rc;
    }
    r->slice->base = -1;
    r->n_slices = r->module->n = r->n_modules = 1;
    *out = r;
    return LM_OK;
}

void lm_merge_recipe_free(lm_merge_recipe *r)
{
    if (r)
        lm_arena_free(r->arena); /* the recipe itself is allocated in it */
}

lm_code lm_recipe_text(lm_merge_recipe *r, const char *s, size_t len, const char **out, lm_err *e)
{
    char *copy = NULL;
    lm_code rc = lm_arena_strdup(r->arena, &copy, s, len, e);

    *out = copy;
    return rc;
}

/* The '+' of "MODEL+LORA"; NULL: it is one path. */
static const char *lora_of(const char *name)
{
    const char *plus = strrchr(name, '+');

    return plus && plus > name && plus[1] && !lm_path_exists(name) ? plus : NULL;
}

lm_code lm_recipe_input(lm_merge_recipe *r, const char *name, int *out, lm_err *e)
{
    lm_merge_input *in;
    const char *plus = lora_of(name);
    lm_code rc;

    for (int i = 0; i < r->n_inputs; i++) {
        if (!strcmp(r->input[i].name, name)) {
            *out = i;
            return LM_OK;
        }
    }
    if (!*name)
        return lm_fail(e, LM_EUSAGE, "model", NULL, "its name is empty");
    if (r->n_inputs == LM_MERGE_MAX_INPUTS)
        return lm_fail(e, LM_EUSAGE, name, "merge in several steps", "more than %d models",
                       LM_MERGE_MAX_INPUTS);
    in = &r->input[r->n_inputs];
    rc = lm_recipe_text(r, name, strlen(name), &in->name, e);
    if (!rc)
        rc = lm_recipe_text(r, name, plus ? (size_t)(plus - name) : strlen(name), &in->path, e);
    if (!rc && plus)
        rc = lm_recipe_text(r, plus + 1, strlen(plus + 1), &in->lora, e);
    if (!rc)
        *out = r->n_inputs++;
    return rc;
}

lm_code lm_recipe_source(lm_merge_recipe *r, lm_merge_slice *s, int input, lm_merge_source **out,
                         lm_err *e)
{
    lm_merge_source *more = NULL;
    lm_code rc;

    if (s->n == MAX_SOURCES)
        return lm_fail(e, LM_EUSAGE, r->input[input].name, NULL, "more than %d sources",
                       MAX_SOURCES);
    if (s->n && (s->n & (s->n - 1))) { /* the capacity is the next power of two */
        more = s->source;
    } else {
        rc = lm_arena_alloc(r->arena, &more, s->n ? 2 * (size_t)s->n : 1, sizeof *more, e);
        if (rc)
            return rc;
        if (s->n)
            memcpy(more, s->source, (size_t)s->n * sizeof *more);
    }
    s->source = more;
    *out = &more[s->n++];
    memset(*out, 0, sizeof **out);
    (*out)->input = input;
    (*out)->from = (*out)->to = -1;
    return LM_OK;
}

/* ---- Parameters ---- */

lm_code lm_recipe_takes(const lm_merge_recipe *r, const char *name, const char *where, int *p,
                        lm_err *e)
{
    const char *names[LM_MERGE_PARAMS + 1], *near;
    char todo[200];
    int n = 0;

    *p = lm_merge_param_find(r->method, name);
    if (*p >= 0 && r->method->takes >> *p & 1)
        return LM_OK;
    for (int i = 0; i < LM_MERGE_PARAMS; i++)
        if (r->method->takes >> i & 1)
            names[n++] = lm_merge_params[i].name;
    names[n] = NULL;
    near = *p < 0 ? lm_nearest(name, names) : NULL;
    if (near) {
        snprintf(todo, sizeof todo, "did you mean '%s'?", near);
    } else {
        int used = snprintf(todo, sizeof todo, n ? "it takes" : "it takes none");

        for (int i = 0; i < n && used < (int)sizeof todo; i++)
            used +=
                snprintf(todo + used, sizeof todo - (size_t)used, "%s %s", i ? "," : "", names[i]);
    }
    if (*p < 0)
        return lm_fail(e, LM_EUSAGE, where, todo, "unknown parameter '%.60s'", name);
    return lm_fail(e, LM_EUSAGE, where, todo, "method %s has no parameter '%s'", r->method->name,
                   name);
}

static bool truth_of(const char *text, double *out)
{
    static const char *const yes[] = { "true", "True", "TRUE", "yes", "on", "1", "1.0", NULL };
    static const char *const no[] = { "false", "False", "FALSE", "no", "off", "0", "0.0", NULL };

    for (int i = 0; yes[i]; i++) {
        *out = !strcmp(text, yes[i]);
        if (*out || !strcmp(text, no[i]))
            return true;
    }
    return false;
}

lm_code lm_recipe_number(lm_merge_param p, const char *text, const char *where, double *out,
                         lm_err *e)
{
    const lm_merge_param_info *info = &lm_merge_params[p];
    double truth;

    if (info->choices) {
        char todo[160] = "choose from";
        size_t used = strlen(todo);

        for (int i = 0; info->choices[i]; i++) {
            *out = i;
            if (!strcmp(info->choices[i], text))
                return LM_OK;
            if (used < sizeof todo)
                used += (size_t)snprintf(todo + used, sizeof todo - used, "%s %s", i ? "," : "",
                                         info->choices[i]);
        }
        if (p == LM_MERGE_RESCALE && truth_of(text, &truth)) { /* with mergekit's meaning */
            *out = truth > 0 ? LM_RESCALE_L1 : LM_RESCALE_NONE;
            return LM_OK;
        }
        return lm_fail(e, LM_EUSAGE, where, todo, "%s: unknown value '%.40s'", info->name, text);
    }
    if (info->truth) {
        if (truth_of(text, out))
            return LM_OK;
        return lm_fail(e, LM_EUSAGE, where, "give true or false", "%s: '%.40s' is neither",
                       info->name, text);
    }
    if (!lm_parse_double(text, out) || !isfinite(*out))
        return lm_fail(e, LM_EUSAGE, where, NULL, "%s: '%.40s' is not a number", info->name, text);
    if (*out < info->min || *out > info->max) {
        char todo[80];

        snprintf(todo, sizeof todo, "choose from %.6g to %.6g", info->min, info->max);
        return lm_fail(e, LM_EUSAGE, where, todo, "%s: %.40s is out of range", info->name, text);
    }
    return LM_OK;
}

lm_code lm_recipe_value(lm_merge_recipe *r, const double *v, int n, lm_merge_value *out, lm_err *e)
{
    lm_merge_case *c = NULL;
    double *copy = NULL;
    lm_code rc = lm_arena_alloc(r->arena, &c, 1, sizeof *c, e);

    if (!rc)
        rc = lm_arena_alloc(r->arena, &copy, (size_t)n, sizeof *copy, e);
    if (rc)
        return rc;
    memcpy(copy, v, (size_t)n * sizeof *v);
    *c = (lm_merge_case){ .v = copy, .n = n };
    *out = (lm_merge_value){ c, 1 };
    return LM_OK;
}

double lm_merge_value_at(const lm_merge_value *v, lm_merge_param p, const char *tensor, double u)
{
    bool steps = lm_merge_params[p].truth || lm_merge_params[p].choices;

    for (int i = 0; i < v->n; i++) {
        const lm_merge_case *c = &v->at[i];
        double x = u * (c->n - 1), f;
        int lo = (int)x;

        if (c->filter && strcmp(c->filter, "*") != 0 && !strstr(tensor, c->filter))
            continue;
        if (steps || lo >= c->n - 1)
            return c->v[lo < c->n ? lo : c->n - 1];
        f = x - lo;
        return (1 - f) * c->v[lo] + f * c->v[lo + 1];
    }
    return NAN;
}

/* ---- Queries ---- */

/* True if input i is merged as a model (not as the base) somewhere. */
static bool is_model(const lm_merge_recipe *r, int i)
{
    for (int s = 0; s < r->n_slices; s++) {
        const lm_merge_slice *sl = &r->slice[s];
        int base = !r->method->base_allowed ? -1 : sl->base >= 0 ? sl->base : r->base;

        for (int k = 0; k < sl->n; k++)
            if (sl->source[k].input == i && i != base)
                return true;
    }
    return false;
}

int lm_merge_recipe_models(const lm_merge_recipe *r)
{
    int n = 0;

    for (int i = 0; i < r->n_inputs; i++)
        n += is_model(r, i);
    return n;
}

int lm_merge_recipe_nth(const lm_merge_recipe *r, int k)
{
    for (int i = 0; i < r->n_inputs; i++)
        if (is_model(r, i) && k-- == 0)
            return i;
    return -1;
}

lm_code lm_merge_recipe_weight(lm_merge_recipe *r, int input, double weight, lm_err *e)
{
    lm_code rc = LM_OK;

    if (!(r->method->takes >> LM_MERGE_WEIGHT & 1))
        return lm_fail(e, LM_EUSAGE, "merge method", NULL, "method %s has no weights",
                       r->method->name);
    for (int s = 0; s < r->n_slices; s++)
        for (int k = 0; k < r->slice[s].n && !rc; k++)
            if (r->slice[s].source[k].input == input)
                rc = lm_recipe_value(r, &weight, 1,
                                     &r->slice[s].source[k].set.param[LM_MERGE_WEIGHT], e);
    return rc;
}

/* ---- Checking ---- */

static lm_code check_count(const lm_merge_recipe *r, int models, const char *where, lm_err *e)
{
    const lm_merge_method *m = r->method;

    if (models < m->min_models || (m->max_models && models > m->max_models)) {
        const char *beside = m->base_required ? " beside the base" : "";

        if (m->min_models == m->max_models)
            return lm_fail(e, LM_EUSAGE, where, NULL, "method %s merges %d model%s%s, %d given",
                           m->name, m->min_models, lm_plural((uint64_t)m->min_models), beside,
                           models);
        if (models < m->min_models)
            return lm_fail(e, LM_EUSAGE, where, NULL,
                           "method %s needs at least %d model%s%s, %d given", m->name,
                           m->min_models, lm_plural((uint64_t)m->min_models), beside, models);
        return lm_fail(e, LM_EUSAGE, where, NULL, "method %s merges at most %d models%s, %d given",
                       m->name, m->max_models, beside, models);
    }
    return LM_OK;
}

/* Every required parameter of the slice's models must be given at some level; a missing weight is 1
 * for recipes from options. */
static lm_code check_required(const lm_merge_recipe *r, const lm_merge_slice *s, int base,
                              lm_err *e)
{
    for (int p = 0; p < LM_MERGE_PARAMS; p++) {
        if (!(r->method->required >> p & 1) || (p == LM_MERGE_WEIGHT && !r->mergekit) ||
            s->set.param[p].n || r->module[s->module].set.param[p].n || r->set.param[p].n)
            continue;
        if (!lm_merge_params[p].per_model)
            return lm_fail(e, LM_EUSAGE, "merge method", NULL, "method %s needs a value for %s",
                           r->method->name, lm_merge_params[p].name);
        for (int k = 0; k < s->n; k++)
            if (s->source[k].input != base && !s->source[k].set.param[p].n)
                return lm_fail(e, LM_EUSAGE, r->input[s->source[k].input].name,
                               r->mergekit ? "give it under parameters, of the model or of all"
                                           : "give it behind the model, or as an option for all",
                               "method %s needs a value for %s", r->method->name,
                               lm_merge_params[p].name);
    }
    return LM_OK;
}

static lm_code check_slice(const lm_merge_recipe *r, const lm_merge_slice *s, lm_err *e)
{
    const lm_merge_method *m = r->method;
    int own = s->base >= 0 ? s->base : r->base, base = m->base_allowed ? own : -1, models = 0;
    bool listed = own < 0;
    lm_code rc;

    for (int k = 0; k < s->n; k++) {
        models += s->source[k].input != base;
        listed = listed || s->source[k].input == own;
        if (s->source[k].to - s->source[k].from != s->source[0].to - s->source[0].from)
            return lm_fail(e, LM_EUSAGE, r->input[s->source[k].input].name, NULL,
                           "%lld layer%s, but %lld of %s in the same slice",
                           (long long)(s->source[k].to - s->source[k].from),
                           lm_plural((s->source[k].to - s->source[k].from)),
                           (long long)(s->source[0].to - s->source[0].from),
                           r->input[s->source[0].input].name);
    }
    if (m->base_required && own < 0)
        return lm_fail(e, LM_EUSAGE, "base model", "name the model that the others were tuned from",
                       "method %s needs a base model", m->name);
    if (!m->base_allowed && !listed)
        return lm_fail(e, LM_EUSAGE, r->input[own].name, "list it among the models",
                       "method %s has no base", m->name);
    rc = check_count(r, models, r->module[s->module].sliced ? "slice" : "models", e);
    return rc ? rc : check_required(r, s, base, e);
}

/* A method with side data needs it for every model, and other methods do not use it. */
static lm_code check_extra(const lm_merge_recipe *r, int i, lm_err *e)
{
    const lm_merge_input *in = &r->input[i];
    bool fisher = r->method->extra == LM_EXTRA_FISHER, gram = r->method->extra == LM_EXTRA_GRAM;

    if (in->fisher && !fisher)
        return lm_fail(e, LM_EUSAGE, in->name, "use it with method fisher",
                       "method %s reads no Fisher information", r->method->name);
    if (in->gram && !gram)
        return lm_fail(e, LM_EUSAGE, in->name, "use it with method regmean",
                       "method %s reads no Gram matrices", r->method->name);
    if (fisher && !in->fisher && is_model(r, i))
        return lm_fail(e, LM_EUSAGE, in->name, "write MODEL:fisher=FILE on the command line",
                       "method fisher needs the importances of every model");
    if (gram && !in->gram && is_model(r, i))
        return lm_fail(e, LM_EUSAGE, in->name, "write MODEL:gram=FILE on the command line",
                       "method regmean needs the Gram matrices of every model");
    return LM_OK;
}

lm_code lm_merge_recipe_check(const lm_merge_recipe *r, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int s = 0; !rc && s < r->n_slices; s++)
        rc = check_slice(r, &r->slice[s], e);
    for (int i = 0; !rc && i < r->n_inputs; i++)
        rc = check_extra(r, i, e);
    return rc ? rc : lm_recipe_streams(r, e);
}

/* ---- Showing ---- */

static void show_number(lm_jw *w, const char *key, lm_merge_param p, double v)
{
    const lm_merge_param_info *info = &lm_merge_params[p];

    if (info->choices)
        lm_jw_str(w, key, info->choices[(int)v]);
    else if (info->truth)
        lm_jw_bool(w, key, v != 0);
    else
        lm_jw_f64(w, key, v);
}

static void show_gradient(lm_jw *w, const char *key, lm_merge_param p, const lm_merge_case *c)
{
    if (c->n == 1) {
        show_number(w, key, p, c->v[0]);
        return;
    }
    lm_jw_arr(w, key);
    for (int i = 0; i < c->n; i++)
        show_number(w, NULL, p, c->v[i]);
    lm_jw_close_arr(w);
}

static void show_value(lm_jw *w, lm_merge_param p, const lm_merge_value *v)
{
    const char *key = lm_merge_params[p].name;

    if (v->n == 1 && !v->at[0].filter) {
        show_gradient(w, key, p, &v->at[0]);
        return;
    }
    lm_jw_arr(w, key);
    for (int i = 0; i < v->n; i++) {
        lm_jw_obj(w, NULL);
        if (v->at[i].filter)
            lm_jw_str(w, "filter", v->at[i].filter);
        show_gradient(w, "value", p, &v->at[i]);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
}

static void show_set(lm_jw *w, const lm_merge_settings *s)
{
    for (int p = 0; p < LM_MERGE_PARAMS; p++)
        if (s->param[p].n)
            show_value(w, (lm_merge_param)p, &s->param[p]);
}

/* The global level, with the method's defaults where neither it nor a slice sets a parameter. */
static void show_global(lm_jw *w, const lm_merge_recipe *r)
{
    lm_jw_obj(w, "parameters");
    for (int p = 0; p < LM_MERGE_PARAMS; p++) {
        double def = lm_merge_recipe_default(r, (lm_merge_param)p);

        if (r->set.param[p].n)
            show_value(w, (lm_merge_param)p, &r->set.param[p]);
        else if (r->method->takes >> p & 1 && !isnan(def))
            show_number(w, lm_merge_params[p].name, (lm_merge_param)p, def);
    }
    lm_jw_close_obj(w);
}

double lm_merge_recipe_default(const lm_merge_recipe *r, lm_merge_param p)
{
    double def = r->method->defaults >> p & 1 ? r->method->def[p] : NAN;

    if (p == LM_MERGE_RESCALE && r->mergekit && def == LM_RESCALE_EXPECTED)
        return LM_RESCALE_L1;
    if (p == LM_MERGE_WEIGHT && isnan(def) && !r->mergekit &&
        r->method->required >> LM_MERGE_WEIGHT & 1)
        return 1;
    return def;
}

static const char *shown(const char *path, bool hide)
{
    size_t n = path ? strlen(path) : 0;

    while (hide && n && path[n - 1] == '/') /* "a/b/" keeps "b/" */
        n--;
    while (hide && n && path[n - 1] != '/')
        n--;
    return hide && path ? path + n : path;
}

static void show_source(lm_jw *w, const lm_merge_recipe *r, const lm_merge_source *s, bool hide)
{
    const lm_merge_input *in = &r->input[s->input];

    lm_jw_obj(w, NULL);
    lm_jw_str(w, "model", shown(in->name, hide));
    if (s->from >= 0) {
        lm_jw_arr(w, "layer_range");
        lm_jw_int(w, NULL, s->from);
        lm_jw_int(w, NULL, s->to);
        lm_jw_close_arr(w);
    }
    if (in->fisher)
        lm_jw_str(w, "fisher", shown(in->fisher, hide));
    if (in->gram)
        lm_jw_str(w, "gram", shown(in->gram, hide));
    show_set(w, &s->set);
    lm_jw_close_obj(w);
}

static void show_slice(lm_jw *w, const lm_merge_recipe *r, const lm_merge_slice *s,
                       const char *name, bool hide)
{
    lm_jw_arr(w, name);
    for (int k = 0; k < s->n; k++)
        show_source(w, r, &s->source[k], hide);
    lm_jw_close_arr(w);
}

static void show_module(lm_jw *w, const lm_merge_recipe *r, const lm_merge_module *mod, bool hide)
{
    if (!mod->sliced) {
        show_slice(w, r, &r->slice[mod->first], "models", hide);
        return;
    }
    lm_jw_arr(w, "slices");
    for (int s = mod->first; s < mod->first + mod->n; s++) {
        lm_jw_obj(w, NULL);
        if (r->slice[s].base >= 0)
            lm_jw_str(w, "base", shown(r->input[r->slice[s].base].name, hide));
        show_slice(w, r, &r->slice[s], "sources", hide);
        show_set(w, &r->slice[s].set);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
}

static void show_modules(lm_jw *w, const lm_merge_recipe *r, bool hide)
{
    lm_jw_obj(w, "modules");
    for (int m = 0; m < r->n_modules; m++) {
        lm_jw_obj(w, r->module[m].name);
        show_module(w, r, &r->module[m], hide);
        show_set(w, &r->module[m].set);
        lm_jw_close_obj(w);
    }
    lm_jw_close_obj(w);
}

lm_code lm_merge_recipe_json(const lm_merge_recipe *r, bool hide_paths, lm_buf *out, lm_err *e)
{
    static const char *const policy[] = { NULL, "union", "base" };
    lm_dtype to = r->out_dtype != LM_DTYPE_NONE ? r->out_dtype : r->dtype;
    lm_jw w;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "method", r->method->name);
    if (r->base >= 0)
        lm_jw_str(&w, "base", shown(r->input[r->base].name, hide_paths));
    if (r->n_modules == 1 && !r->module->name)
        show_module(&w, r, r->module, hide_paths);
    else
        show_modules(&w, r, hide_paths);
    show_global(&w, r);
    if (to != LM_DTYPE_NONE)
        lm_jw_str(&w, "dtype", lm_dtype_name(to));
    if (r->vocab.policy)
        lm_jw_str(&w, "tokenizer",
                  r->vocab.policy == LM_VOCAB_MODEL ? shown(r->vocab.model, hide_paths)
                                                    : policy[r->vocab.policy]);
    lm_jw_int(&w, "seed", (int64_t)r->seed);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}
