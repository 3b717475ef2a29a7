/* SPDX-License-Identifier: Apache-2.0 */
/* recipe_options.c -- operands "MODEL:weight=0.4,density=0.5" and options turned into a recipe. */
#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/text.h"
#include "merge/recipe_impl.h"

enum { MAX_GRADIENT = 256 };

/* "0,0.5,1", a number, a name or a truth value. */
static lm_code read_value(lm_merge_recipe *r, lm_merge_param p, const char *text, size_t len,
                          const char *where, lm_merge_value *out, lm_err *e)
{
    double v[MAX_GRADIENT];
    int n = 0;
    lm_code rc = LM_OK;

    for (size_t at = 0; !rc && at <= len;) {
        const char *comma = memchr(text + at, ',', len - at);
        size_t end = comma ? (size_t)(comma - text) : len;
        char one[64];

        if (n == MAX_GRADIENT)
            return lm_fail(e, LM_EUSAGE, where, NULL, "%s: more than %d values",
                           lm_merge_params[p].name, MAX_GRADIENT);
        snprintf(one, sizeof one, "%.*s", end - at < 63 ? (int)(end - at) : 63, text + at);
        rc = lm_recipe_number(p, one, where, &v[n++], e);
        at = end + 1;
    }
    return rc ? rc : lm_recipe_value(r, v, n, out, e);
}

lm_code lm_merge_recipe_param(lm_merge_recipe *r, const char *name, const char *value, lm_err *e)
{
    char where[80];
    int p;
    lm_code rc;

    snprintf(where, sizeof where, "--%.70s", name);
    for (char *c = where; *c; c++) /* as the option is spelled */
        *c = *c == '_' ? '-' : *c;
    rc = lm_recipe_takes(r, name, where, &p, e);
    return rc ? rc
              : read_value(r, (lm_merge_param)p, value, strlen(value), where, &r->set.param[p], e);
}

static bool begins_key(const char *s)
{
    size_t n = strspn(s, "abcdefghijklmnopqrstuvwxyz_0123456789");

    return n && s[n] == '=';
}

/* True if this may follow "MODEL:". */
static bool is_settings(const char *s)
{
    double d;

    return lm_parse_double(s, &d) || begins_key(s);
}

/* The beginning of an operand's settings (behind the colon); NULL: none. */
static const char *settings_of(const char *operand)
{
    if (lm_path_exists(operand))
        return NULL;
    for (const char *c = operand; (c = strchr(c, ':')) != NULL; c++)
        if (is_settings(c + 1))
            return c + 1;
    return NULL;
}

static lm_code twice(const char *name, const char *operand, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, operand, "give it once", "%s is given twice for this model", name);
}

/* One "key=value" of an operand. */
static lm_code read_setting(lm_merge_recipe *r, lm_merge_source *s, const char *key, size_t key_len,
                            const char *value, size_t len, const char *operand, lm_err *e)
{
    char name[40];
    int p;
    lm_code rc;

    snprintf(name, sizeof name, "%.*s", key_len < 39 ? (int)key_len : 39, key);
    if (!len)
        return lm_fail(e, LM_EUSAGE, operand, NULL, "%s: a value is missing", name);
    if (!strcmp(name, "fisher") || !strcmp(name, "gram")) {
        lm_merge_input *in = &r->input[s->input];
        const char **file = *name == 'f' ? &in->fisher : &in->gram;

        return *file ? twice(name, operand, e) : lm_recipe_text(r, value, len, file, e);
    }
    rc = lm_recipe_takes(r, name, operand, &p, e);
    if (!rc && s->set.param[p].n)
        return twice(name, operand, e);
    if (!rc && !lm_merge_params[p].per_model)
        rc = lm_fail(e, LM_EUSAGE, operand, "give it as an option",
                     "%s is not a parameter of a single model", name);
    return rc ? rc : read_value(r, (lm_merge_param)p, value, len, operand, &s->set.param[p], e);
}

/* "0.4" or "weight=0.4,density=1,0.5": a comma before a key ends a value. */
static lm_code read_settings(lm_merge_recipe *r, lm_merge_source *s, const char *text,
                             const char *operand, lm_err *e)
{
    double d;
    lm_code rc = LM_OK;

    if (lm_parse_double(text, &d)) {
        int p;

        rc = lm_recipe_takes(r, "weight", operand, &p, e);
        return rc ? rc
                  : read_value(r, LM_MERGE_WEIGHT, text, strlen(text), operand,
                               &s->set.param[LM_MERGE_WEIGHT], e);
    }
    while (!rc && *text) {
        const char *eq = strchr(text, '='), *end;

        if (!begins_key(text))
            return lm_fail(e, LM_EUSAGE, operand, "write MODEL:weight=0.4,density=0.5",
                           "'%.40s' is not a setting of a model", text);
        for (end = eq + 1; *end && !(*end == ',' && begins_key(end + 1)); end++)
            ;
        rc = read_setting(r, s, text, (size_t)(eq - text), eq + 1, (size_t)(end - eq - 1), operand,
                          e);
        text = *end ? end + 1 : end;
    }
    return rc;
}

/* Report an operand such as "math/:0,5": an existing model, but no valid weight or settings behind
 * the colon. */
static lm_code check_operand(const char *operand, const char *name, lm_err *e)
{
    const char *colon = lm_path_exists(name) ? NULL : strchr(name, ':');
    char *path = NULL;
    lm_code rc = LM_OK;

    for (; colon && !rc; colon = strchr(colon + 1, ':')) {
        rc = lm_asprintf(&path, e, "%.*s", (int)(colon - name), name);
        if (!rc && lm_path_exists(path))
            rc = lm_fail(e, LM_EUSAGE, operand, "write MODEL:0.4 or MODEL:weight=0.4,density=0.5",
                         "'%.60s' is neither a weight nor a setting", colon + 1);
        lm_free(path);
        path = NULL;
    }
    return rc;
}

lm_code lm_merge_recipe_model(lm_merge_recipe *r, const char *operand, lm_err *e)
{
    const char *settings = settings_of(operand), *name = NULL;
    lm_merge_source *s = NULL;
    int input = 0;
    size_t len = settings ? (size_t)(settings - operand) - 1 : strlen(operand);
    lm_code rc = lm_recipe_text(r, operand, len, &name, e);

    if (!rc)
        rc = check_operand(operand, name, e);
    if (!rc)
        rc = lm_recipe_input(r, name, &input, e);
    if (!rc)
        rc = lm_recipe_source(r, &r->slice[0], input, &s, e);
    if (!rc && settings)
        rc = read_settings(r, s, settings, operand, e);
    return rc;
}

lm_code lm_merge_recipe_base(lm_merge_recipe *r, const char *path, lm_err *e)
{
    return lm_recipe_input(r, path, &r->base, e);
}
