/* SPDX-License-Identifier: Apache-2.0 */
/* recipe_yaml.c -- a mergekit YAML file turned into a recipe: an unknown key is an error. */
#include <math.h>
#include <string.h>

#include "base/text.h"
#include "merge/recipe_impl.h"
#include "text/chat.h"

enum { MAX_GRADIENT = 4096 };

typedef struct {
    lm_merge_recipe *r;
    const char *where;
    lm_err *err;
} reader;

static lm_code wrong(const reader *x, const lm_yaml *y, const char *key, const char *need)
{
    return lm_yaml_wrong(y, x->where, key, need, x->err);
}

static lm_code check_keys(const reader *x, const lm_yaml *map, const char *what,
                          const char *const *known)
{
    return lm_yaml_check_keys(map, x->where, what, known, x->err);
}

/* A string; NULL if absent or null. */
static lm_code get_text(const reader *x, const lm_yaml *map, const char *key, const char **out)
{
    const lm_yaml *y = lm_yaml_get(map, key);

    *out = NULL;
    if (lm_yaml_is_null(y))
        return LM_OK;
    if (y->kind != LM_YAML_SCALAR)
        return wrong(x, y, key, "a string");
    return lm_recipe_text(x->r, y->text, strlen(y->text), out, x->err);
}

/* ---- Models ---- */

/* "path", "path+lora", or mergekit's long form of them. */
static lm_code model_name(const reader *x, const lm_yaml *y, const char *key, char **out)
{
    static const char *const long_keys[] = { "model", "lora", "override_architecture", NULL };
    static const char *const path_keys[] = { "path", "revision", NULL };
    const char *part[2] = { NULL, NULL };

    if (y->kind == LM_YAML_SCALAR && !lm_yaml_is_null(y))
        return lm_asprintf(out, x->err, "%s", y->text);
    if (y->kind != LM_YAML_MAP)
        return wrong(x, y, key, "a model's path");
    lm_code rc = check_keys(x, y, key, long_keys);
    for (int i = 0; i < 2 && !rc; i++) {
        const lm_yaml *v = lm_yaml_get(y, long_keys[i]);

        if (lm_yaml_is_null(v))
            continue;
        if (v->kind == LM_YAML_MAP) {
            rc = check_keys(x, v, long_keys[i], path_keys);
            if (!rc && !lm_yaml_is_null(lm_yaml_get(v, "revision")))
                rc = wrong(x, v, "revision", "a local folder, without revisions,");
            v = lm_yaml_get(v, "path");
        }
        if (!rc && (!v || v->kind != LM_YAML_SCALAR))
            rc = wrong(x, y, long_keys[i], "a path");
        if (!rc)
            part[i] = v->text;
    }
    if (!rc && !lm_yaml_is_null(lm_yaml_get(y, "override_architecture")))
        rc = wrong(x, y, "override_architecture", "a config.json of that architecture");
    if (!rc && !part[0])
        rc = wrong(x, y, key, "a model's path");
    return rc ? rc
              : lm_asprintf(out, x->err, "%s%s%s", part[0], part[1] ? "+" : "",
                            part[1] ? part[1] : "");
}

static lm_code get_input(const reader *x, const lm_yaml *map, const char *key, int *out)
{
    const lm_yaml *y = lm_yaml_get(map, key);
    char *name = NULL;
    lm_code rc;

    if (lm_yaml_is_null(y))
        return LM_OK;
    rc = model_name(x, y, key, &name);
    if (!rc && (rc = lm_recipe_input(x->r, name, out, x->err)))
        lm_err_in(x->err, "%s: line %d", x->where, y->line);
    lm_free(name);
    return rc;
}

/* ---- Parameters ---- */

static lm_code read_number(const reader *x, lm_merge_param p, const lm_yaml *y, double *out)
{
    char where[300];

    if (y->kind != LM_YAML_SCALAR || lm_yaml_is_null(y))
        return wrong(x, y, lm_merge_params[p].name, "a number");
    snprintf(where, sizeof where, "%.200s: line %d", x->where, y->line);
    return lm_recipe_number(p, y->text, where, out, x->err);
}

/* A scalar, or a list of them. */
static lm_code read_gradient(const reader *x, lm_merge_param p, const lm_yaml *y, lm_merge_case *c)
{
    double *v = NULL;
    bool list = y->kind == LM_YAML_LIST;
    size_t n = list ? y->n : 1;
    lm_code rc;

    if (!n || n > MAX_GRADIENT)
        return wrong(x, y, lm_merge_params[p].name, "a list of 1 to 4096 numbers");
    rc = lm_arena_alloc(x->r->arena, &v, n, sizeof *v, x->err);
    for (size_t i = 0; !rc && i < n; i++)
        rc = read_number(x, p, list ? y->item[i] : y, &v[i]);
    c->v = v;
    c->n = (int)n;
    return rc;
}

static lm_code read_case(const reader *x, lm_merge_param p, const lm_yaml *y, lm_merge_case *c)
{
    static const char *const known[] = { "filter", "value", NULL };
    const lm_yaml *value;
    lm_code rc = check_keys(x, y, lm_merge_params[p].name, known);

    if (!rc)
        rc = get_text(x, y, "filter", &c->filter);
    value = rc ? NULL : lm_yaml_get(y, "value");
    if (!rc && lm_yaml_is_null(value))
        rc = wrong(x, y, lm_merge_params[p].name, "a value beside the filter");
    return rc ? rc : read_gradient(x, p, value, c);
}

static lm_code read_value(const reader *x, lm_merge_param p, const lm_yaml *y, lm_merge_value *out)
{
    bool cases = y->kind == LM_YAML_MAP ||
                 (y->kind == LM_YAML_LIST && y->n && y->item[0]->kind == LM_YAML_MAP);
    size_t n = y->kind == LM_YAML_LIST && cases ? y->n : 1;
    lm_merge_case *c = NULL;
    lm_code rc = lm_arena_alloc(x->r->arena, &c, n, sizeof *c, x->err);

    if (!rc && !cases)
        rc = read_gradient(x, p, y, c);
    for (size_t i = 0; !rc && cases && i < n; i++)
        rc = read_case(x, p, y->kind == LM_YAML_MAP ? y : y->item[i], &c[i]);
    *out = (lm_merge_value){ c, (int)n };
    return rc;
}

/* int8_mask saves memory in mergekit and changes no result: masks need no memory here. */
static lm_code check_mask(const reader *x, const lm_yaml *y)
{
    bool on;

    return lm_yaml_is_null(y) || lm_yaml_truth(y, &on) ? LM_OK
                                                       : wrong(x, y, "int8_mask", "true or false");
}

static lm_code read_settings(const reader *x, const lm_yaml *map, bool of_model,
                             lm_merge_settings *out)
{
    const lm_yaml *y = lm_yaml_get(map, "parameters");
    lm_code rc = LM_OK;

    if (lm_yaml_is_null(y))
        return LM_OK;
    if (y->kind != LM_YAML_MAP)
        return wrong(x, y, "parameters", "a mapping of names to values");
    for (size_t i = 0; i < y->n && !rc; i++) {
        char where[300];
        int p;

        if (!strcmp(y->key[i], "int8_mask")) {
            rc = check_mask(x, y->item[i]);
            continue;
        }
        snprintf(where, sizeof where, "%.200s: line %d", x->where, y->key_line[i]);
        rc = lm_recipe_takes(x->r, y->key[i], where, &p, x->err);
        if (!rc && of_model && !lm_merge_params[p].per_model)
            rc = lm_fail(x->err, LM_EUSAGE, where,
                         "write it under the parameters of the whole merge",
                         "%s is not a parameter of a single model", y->key[i]);
        if (!rc && !lm_yaml_is_null(y->item[i]))
            rc = read_value(x, (lm_merge_param)p, y->item[i], &out->param[p]);
    }
    return rc;
}

/* ---- Models and slices ---- */

static lm_code read_range(const reader *x, const lm_yaml *map, lm_merge_source *s)
{
    const lm_yaml *y = lm_yaml_get(map, "layer_range");

    if (lm_yaml_is_null(y))
        return wrong(x, map, "layer_range", "a range of layers, [first, end],");
    if (y->kind != LM_YAML_LIST || y->n != 2 || !lm_yaml_integer(y->item[0], &s->from) ||
        !lm_yaml_integer(y->item[1], &s->to))
        return wrong(x, y, "layer_range", "a range of two whole numbers, [first, end],");
    if (s->from < 0 || s->to <= s->from || s->to > LM_MERGE_MAX_LAYERS)
        return lm_fail(x->err, LM_EUSAGE, x->where,
                       "the end is the first layer that is not included",
                       "line %d: [%lld, %lld] is not a range of layers", y->line,
                       (long long)s->from, (long long)s->to);
    return LM_OK;
}

static lm_code read_source(const reader *x, const lm_yaml *y, bool sliced, lm_merge_slice *out)
{
    static const char *const model_keys[] = { "model", "parameters", NULL };
    static const char *const slice_keys[] = { "model", "layer_range", "parameters", NULL };
    lm_merge_source *s = NULL;
    int input = -1;
    lm_code rc = check_keys(x, y, sliced ? "sources" : "models", sliced ? slice_keys : model_keys);

    if (!rc)
        rc = get_input(x, y, "model", &input);
    if (!rc && input < 0)
        rc = wrong(x, y, "model", "a model's path");
    if (!rc)
        rc = lm_recipe_source(x->r, out, input, &s, x->err);
    if (!rc && sliced)
        rc = read_range(x, y, s);
    return rc ? rc : read_settings(x, y, true, &s->set);
}

static lm_code read_sources(const reader *x, const lm_yaml *list, const char *what, bool sliced,
                            lm_merge_slice *out)
{
    lm_code rc = LM_OK;

    if (lm_yaml_is_null(list) || list->kind != LM_YAML_LIST || !list->n)
        return lm_fail(x->err, LM_EUSAGE, x->where, NULL, "line %d: %s: a list of models is needed",
                       list ? list->line : 1, what);
    for (size_t i = 0; i < list->n && !rc; i++)
        rc = read_source(x, list->item[i], sliced, out);
    return rc;
}

static lm_code read_slice(const reader *x, const lm_yaml *y, lm_merge_slice *s)
{
    static const char *const known[] = { "sources", "base_model", "residual_weight", "parameters",
                                         NULL };
    lm_code rc = check_keys(x, y, "slices", known);

    if (!rc && !lm_yaml_is_null(lm_yaml_get(y, "residual_weight")))
        rc = lm_fail(x->err, LM_EUSAGE, x->where, "leave it out",
                     "line %d: residual_weight is not supported",
                     lm_yaml_get(y, "residual_weight")->line);
    if (!rc)
        rc = get_input(x, y, "base_model", &s->base);
    if (!rc)
        rc = read_sources(x, lm_yaml_get(y, "sources"), "sources", true, s);
    return rc ? rc : read_settings(x, y, false, &s->set);
}

/* `models` or `slices` of `map` into a module, whose slices are appended to those of the recipe. */
static lm_code read_module(const reader *x, const lm_yaml *map, const lm_yaml *models,
                           const lm_yaml *slices, lm_merge_module *mod)
{
    lm_merge_recipe *r = x->r;
    lm_merge_slice *more = NULL;
    lm_code rc;

    mod->sliced = slices != NULL;
    if (mod->sliced && (slices->kind != LM_YAML_LIST || !slices->n))
        return wrong(x, slices, "slices", "a list of slices");
    mod->first = r->n_slices;
    mod->n = mod->sliced ? (int)slices->n : 1;
    rc = lm_arena_alloc(r->arena, &more, (size_t)(mod->first + mod->n), sizeof *more, x->err);
    if (rc)
        return rc;
    if (mod->first)
        memcpy(more, r->slice, (size_t)mod->first * sizeof *more);
    r->slice = more;
    r->n_slices += mod->n;
    r->sliced = r->sliced || mod->sliced;
    for (int i = 0; i < mod->n; i++) {
        more[mod->first + i].base = -1;
        more[mod->first + i].module = (int)(mod - r->module);
    }
    for (int i = 0; !rc && mod->sliced && i < mod->n; i++)
        rc = read_slice(x, slices->item[i], &more[mod->first + i]);
    if (!rc && !mod->sliced)
        rc = read_sources(x, models, "models", false, &more[mod->first]);
    return !rc && map ? read_settings(x, map, false, &mod->set) : rc;
}

enum { MAX_MODULES = 64 };

/* {NAME: {models: or slices:, parameters: }, ...} */
static lm_code read_modules(const reader *x, const lm_yaml *y)
{
    static const char *const known[] = { "models", "slices", "parameters", NULL };
    lm_merge_recipe *r = x->r;
    lm_code rc = LM_OK;

    if (y->kind != LM_YAML_MAP || !y->n || y->n > MAX_MODULES)
        return wrong(x, y, "modules", "a mapping of 1 to 64 names to modules");
    rc = lm_arena_alloc(r->arena, &r->module, y->n, sizeof *r->module, x->err);
    for (size_t i = 0; i < y->n && !rc; i++) {
        const lm_yaml *one = y->item[i];
        lm_merge_module *mod = &r->module[i];

        rc = lm_recipe_text(r, y->key[i], strlen(y->key[i]), &mod->name, x->err);
        if (!rc)
            rc = check_keys(x, one, y->key[i], known);
        if (!rc && !lm_yaml_given(one, "models") == !lm_yaml_given(one, "slices"))
            rc = wrong(x, one, y->key[i], "exactly one of models: and slices:");
        if (!rc)
            rc = read_module(x, one, lm_yaml_given(one, "models"), lm_yaml_given(one, "slices"),
                             mod);
    }
    r->n_modules = (int)y->n;
    return rc;
}

static lm_code read_parts(const reader *x, const lm_yaml *root)
{
    const lm_yaml *models = lm_yaml_given(root, "models"), *slices = lm_yaml_given(root, "slices"),
                  *modules = lm_yaml_given(root, "modules");
    lm_merge_recipe *r = x->r;
    int n = !!models + !!slices + !!modules;
    lm_code rc;

    if (n != 1)
        return lm_fail(x->err, LM_EUSAGE, x->where, NULL,
                       "exactly one of models:, slices: and modules: is needed, %d are given", n);
    if (modules)
        return read_modules(x, modules);
    rc = lm_arena_alloc(r->arena, &r->module, 1, sizeof *r->module, x->err);
    r->n_modules = 1;
    return rc ? rc : read_module(x, NULL, models, slices, r->module);
}

/* ---- Tokenizer ---- */

static lm_code read_policy(const reader *x, const lm_yaml *y)
{
    lm_vocab_spec *v = &x->r->vocab;
    char *name = NULL;
    int input;
    lm_code rc;

    if (y->kind == LM_YAML_SCALAR && !strcmp(y->text, "union")) {
        v->policy = LM_VOCAB_UNION;
        return LM_OK;
    }
    if (y->kind == LM_YAML_SCALAR && !strcmp(y->text, "base")) {
        v->policy = LM_VOCAB_BASE;
        return LM_OK;
    }
    rc = model_name(x, y, "tokenizer", &name);
    if (!rc)
        rc = lm_recipe_input(x->r, name, &input, x->err);
    if (!rc) {
        v->policy = LM_VOCAB_MODEL;
        v->model = x->r->input[input].name;
    }
    lm_free(name);
    return rc;
}

/* {kind: zero}, {kind: model_token, model, token | token_id}, or a model. */
static lm_code read_token_source(const reader *x, const lm_yaml *y, lm_vocab_rule *rule)
{
    static const char *const known[] = { "kind", "model", "token", "token_id", NULL };
    const char *kind = NULL;
    const lm_yaml *id;
    char *name = NULL;
    int input = -1;
    lm_code rc = LM_OK;

    if (y->kind == LM_YAML_MAP && lm_yaml_get(y, "kind")) {
        rc = check_keys(x, y, "source", known);
        if (!rc)
            rc = get_text(x, y, "kind", &kind);
        if (!rc && kind && !strcmp(kind, "zero")) {
            rule->from = LM_VOCAB_FROM_ZERO;
            return LM_OK;
        }
        if (!rc && (!kind || strcmp(kind, "model_token") != 0))
            rc = wrong(x, y, "kind", "zero or model_token");
        if (!rc)
            rc = get_input(x, y, "model", &input);
        if (!rc)
            rc = get_text(x, y, "token", &rule->source);
        id = rc ? NULL : lm_yaml_get(y, "token_id");
        if (!rc && !lm_yaml_is_null(id) &&
            !(lm_yaml_integer(id, &rule->source_id) && rule->source_id >= 0))
            rc = wrong(x, id, "token_id", "a whole number");
        if (!rc && (input < 0 || lm_yaml_is_null(id) == !rule->source))
            rc = wrong(x, y, "model_token", "a model and one of token and token_id");
    } else {
        rc = model_name(x, y, "source", &name);
        if (!rc)
            rc = lm_recipe_input(x->r, name, &input, x->err);
        lm_free(name);
    }
    if (!rc) {
        rule->from = LM_VOCAB_FROM_MODEL;
        rule->model = x->r->input[input].name;
    }
    return rc;
}

static lm_code read_token(const reader *x, const char *token, const lm_yaml *y, lm_vocab_rule *rule)
{
    static const char *const known[] = { "source", "force", NULL };
    const lm_yaml *v;
    lm_code rc;

    rule->token = token;
    rule->source_id = -1;
    if (lm_yaml_is_null(y))
        return LM_OK;
    rc = check_keys(x, y, "tokens", known);
    v = rc ? NULL : lm_yaml_get(y, "source");
    if (!rc && !lm_yaml_is_null(v))
        rc = read_token_source(x, v, rule);
    v = rc ? NULL : lm_yaml_get(y, "force");
    if (!rc && !lm_yaml_is_null(v) && !lm_yaml_truth(v, &rule->force))
        rc = wrong(x, v, "force", "true or false");
    return rc;
}

static lm_code read_tokens(const reader *x, const lm_yaml *y)
{
    lm_vocab_rule *rules = NULL;
    lm_code rc;

    if (lm_yaml_is_null(y))
        return LM_OK;
    if (y->kind != LM_YAML_MAP)
        return wrong(x, y, "tokens", "a mapping of tokens to rules");
    rc = lm_arena_alloc(x->r->arena, &rules, y->n, sizeof *rules, x->err);
    for (size_t i = 0; i < y->n && !rc; i++) {
        const char *token = NULL;

        rc = lm_recipe_text(x->r, y->key[i], strlen(y->key[i]), &token, x->err);
        if (!rc)
            rc = read_token(x, token, y->item[i], &rules[i]);
    }
    x->r->vocab.rules = rules;
    x->r->vocab.n_rules = (int)y->n;
    return rc;
}

static lm_code read_tokenizer(const reader *x, const lm_yaml *root)
{
    static const char *const known[] = { "source", "tokens", "pad_to_multiple_of", NULL };
    const lm_yaml *y = lm_yaml_get(root, "tokenizer"), *v;
    const lm_yaml *source = lm_yaml_get(root, "tokenizer_source");
    lm_code rc;

    if (!lm_yaml_is_null(y) && !lm_yaml_is_null(source))
        return wrong(x, source, "tokenizer_source", "only one of it and tokenizer");
    if (lm_yaml_is_null(y))
        return lm_yaml_is_null(source) ? LM_OK : read_policy(x, source);
    rc = check_keys(x, y, "tokenizer", known);
    if (rc)
        return rc;
    x->r->vocab.policy = LM_VOCAB_UNION; /* mergekit's default */
    v = lm_yaml_get(y, "source");
    if (!lm_yaml_is_null(v))
        rc = read_policy(x, v);
    v = rc ? NULL : lm_yaml_get(y, "pad_to_multiple_of");
    if (!rc && !lm_yaml_is_null(v) &&
        !(lm_yaml_integer(v, &x->r->vocab.pad_to) && x->r->vocab.pad_to > 0 &&
          x->r->vocab.pad_to <= 1 << 20))
        rc = wrong(x, v, "pad_to_multiple_of", "a whole number from 1 to 1048576");
    return rc ? rc : read_tokens(x, lm_yaml_get(y, "tokens"));
}

/* ---- The file ---- */

static lm_code read_dtype(const reader *x, const lm_yaml *root, const char *key, lm_dtype *out)
{
    const lm_yaml *y = lm_yaml_get(root, key);

    if (lm_yaml_is_null(y))
        return LM_OK;
    *out = y->kind == LM_YAML_SCALAR ? lm_dtype_parse(y->text) : LM_DTYPE_NONE;
    if (*out == LM_DTYPE_NONE || !lm_dtype_is_float(*out))
        return wrong(x, y, key, "float32, float16, bfloat16 or another type of floating point");
    return LM_OK;
}

/* "auto", a name, or Jinja text (which has a brace). */
static bool is_template(const char *want)
{
    return strchr(want, '{') || !strcmp(want, "auto") || lm_chat_named(want);
}

static lm_code read_template(const reader *x, const lm_yaml *root)
{
    const char **want = &x->r->chat_template;
    lm_code rc = get_text(x, root, "chat_template", want);
    char todo[120] = "give auto, Jinja text, or";
    size_t used = strlen(todo);

    if (!rc && *want && !**want)
        *want = NULL;
    if (rc || !*want || is_template(*want))
        return rc;
    for (int i = 0; lm_chat_names[i] && used < sizeof todo; i++)
        used += (size_t)snprintf(todo + used, sizeof todo - used, "%s %s", i ? "," : "",
                                 lm_chat_names[i]);
    return lm_fail(x->err, LM_EUSAGE, x->where, todo,
                   "line %d: chat_template: no template is named '%.40s'",
                   lm_yaml_get(root, "chat_template")->line, *want);
}

static lm_code read_all(const reader *x, const lm_yaml *root)
{
    lm_merge_recipe *r = x->r;
    lm_code rc = get_input(x, root, "base_model", &r->base);

    if (!rc)
        rc = read_parts(x, root);
    if (!rc)
        rc = read_settings(x, root, false, &r->set);
    if (!rc)
        rc = read_dtype(x, root, "dtype", &r->dtype);
    if (!rc)
        rc = read_dtype(x, root, "out_dtype", &r->out_dtype);
    if (!rc)
        rc = read_tokenizer(x, root);
    if (!rc)
        rc = read_template(x, root);
    if (!rc && (rc = lm_merge_recipe_check(r, x->err)))
        lm_err_in(x->err, "%s", x->where);
    return rc;
}

static lm_code read_root(const lm_yaml *root, const char *where, lm_merge_recipe **out, lm_err *e)
{
    static const char *const known[] = {
        "merge_method", "base_model",       "models",        "slices",
        "modules",      "parameters",       "dtype",         "out_dtype",
        "tokenizer",    "tokenizer_source", "chat_template", NULL
    };
    reader x = { NULL, where, e };
    const lm_yaml *method;
    lm_code rc = check_keys(&x, root, "the file", known);

    method = rc ? NULL : lm_yaml_get(root, "merge_method");
    if (!rc && (lm_yaml_is_null(method) || method->kind != LM_YAML_SCALAR))
        rc = wrong(&x, root, "merge_method", "the name of a method");
    if (!rc && (rc = lm_recipe_begin(method->text, &x.r, e)))
        lm_err_in(e, "%s: line %d", where, method->line);
    if (rc)
        return rc;
    x.r->mergekit = true;
    rc = read_all(&x, root);
    if (rc) {
        lm_merge_recipe_free(x.r);
        return rc;
    }
    *out = x.r;
    return LM_OK;
}

lm_code lm_merge_recipe_parse(const char *text, size_t len, const char *where,
                              lm_merge_recipe **out, lm_err *e)
{
    const lm_yaml *root = NULL;
    lm_arena *a = NULL;
    lm_code rc = lm_arena_new(&a, 1 << 16, e);

    *out = NULL;
    if (!rc)
        rc = lm_yaml_parse(text, len, where, a, &root, e);
    if (!rc)
        rc = read_root(root, where, out, e);
    lm_arena_free(a);
    return rc;
}
