/* SPDX-License-Identifier: Apache-2.0 */
/* choose.c -- which modules a configuration means, and the values that it gives each of them. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <ctype.h>
#include <math.h>
#include <pcre2.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "tune/choose_impl.h"
#include "tune/methods.h"

/* Whether a regular expression, put in `frame` (with one %s), matches the text from its beginning.
 * *number: the group "idx". */
static lm_code match(const char *frame, const char *pattern, const char *text, const char *where,
                     bool *hit, int64_t *number, lm_err *e)
{
    PCRE2_SIZE at;
    int code, n;
    char *whole = NULL;
    lm_buf full = { 0 };
    pcre2_code *re;
    pcre2_match_data *md;
    const char *hole = strstr(frame, "%s");
    lm_code rc = lm_buf_add(&full, frame, (size_t)(hole - frame), e);

    rc = rc ? rc : lm_buf_add(&full, pattern, strlen(pattern), e);
    rc = rc ? rc : lm_buf_add(&full, hole + 2, strlen(hole + 2), e);
    whole = full.data;
    if (rc) {
        lm_buf_fini(&full);
        return rc;
    }
    re = pcre2_compile((PCRE2_SPTR)whole, full.len, PCRE2_UTF, &code, &at, NULL);
    lm_buf_fini(&full);
    if (!re)
        return lm_fail(e, LM_EFORMAT, where, NULL, "'%.60s' is not a valid regular expression",
                       pattern);
    md = pcre2_match_data_create_from_pattern(re, NULL);
    n = md ? pcre2_match(re, (PCRE2_SPTR)text, strlen(text), 0, PCRE2_ANCHORED, md, NULL) : -1;
    *hit = n > 0;
    if (*hit && number) {
        PCRE2_UCHAR *digits = NULL;
        PCRE2_SIZE len;

        if (!pcre2_substring_get_byname(md, (PCRE2_SPTR) "idx", &digits, &len)) {
            *number = len < 10 ? strtoll((const char *)digits, NULL, 10) : -1;
            pcre2_substring_free(digits);
        }
    }
    pcre2_match_data_free(md);
    pcre2_code_free(re);
    return LM_OK;
}

lm_code lm_tune_matches(const char *pattern, const char *text, bool *hit, lm_err *e)
{
    return match("(?:%s)$", pattern, text, "adapter_config.json", hit, NULL, e);
}

bool lm_tune_ends_as(const char *name, const char *part)
{
    size_t n = strlen(name), k = strlen(part);

    return k <= n && !strcmp(name + n - k, part) && (k == n || name[n - k - 1] == '.');
}

/* A list of names (or of their ends), or a regular expression. */
static lm_code is_listed(const json_t *list, const char *name, const char *where, bool *hit,
                         lm_err *e)
{
    const json_t *v;
    size_t i;

    *hit = false;
    if (json_is_string(list))
        return match("(?:%s)$", json_string_value(list), name, where, hit, NULL, e);
    json_array_foreach((json_t *)(uintptr_t)list, i, v)
    {
        if (!json_is_string(v))
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "a list of modules holds a value that is "
                           "not a name");
        *hit = *hit || lm_tune_ends_as(name, json_string_value(v));
    }
    return LM_OK;
}

static lm_code is_saved(const json_t *list, const char *name, const char *where, bool *hit,
                        lm_err *e)
{
    const json_t *v;
    size_t i;
    lm_code rc = LM_OK;

    json_array_foreach((json_t *)(uintptr_t)list, i, v)
    {
        if (!rc && !*hit && json_is_string(v))
            rc = match("(^|.*\\.)%s($|\\..*)", json_string_value(v), name, where, hit, NULL, e);
    }
    return rc;
}

static bool has_number(const json_t *list, int64_t n)
{
    const json_t *v;
    size_t i;

    if (json_is_integer(list))
        return json_integer_value(list) == n;
    json_array_foreach((json_t *)(uintptr_t)list, i, v)
    {
        if (json_is_integer(v) && json_integer_value(v) == n)
            return true;
    }
    return false;
}

bool lm_tune_has_layers(const json_t *config)
{
    const json_t *layers = json_object_get(config, "layers_to_transform");

    return layers && !json_is_null(layers) && !(json_is_array(layers) && !json_array_size(layers));
}

lm_code lm_tune_layer_of(const json_t *config, const char *name, const char *where, int64_t *out,
                         lm_err *e)
{
    const json_t *patterns = json_object_get(config, "layers_pattern"), *v;
    bool any = false;
    size_t i;
    lm_code rc = LM_OK;

    if (json_is_string(patterns) && *json_string_value(patterns))
        rc = match("(?:^|.*?\\.)%s\\.(?<idx>\\d+)\\.", json_string_value(patterns), name, where,
                   &any, out, e);
    else if (!json_array_size(patterns))
        rc = match("%s.*?\\.[^.]*\\.(?<idx>\\d+)\\.", "", name, where, &any, out, e);
    json_array_foreach((json_t *)(uintptr_t)patterns, i, v)
    {
        if (!rc && !any && json_is_string(v))
            rc = match("(?:^|.*?\\.)%s\\.(?<idx>\\d+)\\.", json_string_value(v), name, where, &any,
                       out, e);
    }
    return rc;
}

static lm_code is_in_layers(const json_t *config, const char *name, const char *where, bool *hit,
                            lm_err *e)
{
    int64_t n = -1;

    if (!lm_tune_has_layers(config))
        return LM_OK;
    lm_code rc = lm_tune_layer_of(config, name, where, &n, e);
    *hit = n >= 0 && has_number(json_object_get(config, "layers_to_transform"), n);
    return rc;
}

static bool names_all(const json_t *targets)
{
    return json_is_string(targets) && !strcasecmp(json_string_value(targets), "all-linear");
}

bool lm_tune_suits(const lm_tune_method *t, const lm_tune_base *m)
{
    return m->kind == LM_TUNE_LINEAR_LAYER ? !(t->is & LM_TUNE_VECTORS)
           : m->kind == LM_TUNE_EMBEDDING  ? (t->is & LM_TUNE_EMBEDS) != 0
                                           : (t->is & LM_TUNE_VECTORS) != 0;
}

static lm_code choose_one(const lm_tune_method *t, const json_t *targets, const json_t *config,
                          const lm_tune_base *m, const char *where, bool *hit, lm_err *e)
{
    const json_t *without = json_object_get(config, "exclude_modules");
    bool out = false;
    lm_code rc = LM_OK;

    *hit = false;
    if (!lm_tune_suits(t, m))
        return LM_OK;
    if (json_is_string(without) ? *json_string_value(without) : json_array_size(without) > 0)
        rc = is_listed(without, m->name, where, &out, e);
    if (!rc && !out)
        rc = is_saved(json_object_get(config, "modules_to_save"), m->name, where, &out, e);
    if (rc || out)
        return rc;
    if (names_all(targets)) {
        *hit = m->kind == LM_TUNE_LINEAR_LAYER && !m->head && !m->routed;
        return LM_OK;
    }
    rc = is_listed(targets, m->name, where, hit, e);
    if (!rc && *hit && !json_is_string(targets))
        rc = is_in_layers(config, m->name, where, hit, e);
    return rc;
}

/* The targets of the configuration, or the usual ones as a list; the caller releases them. */
static lm_code targets_of(const lm_tune_bases *b, const lm_tune_method *t, const json_t *config,
                          const char *where, json_t **out, lm_err *e)
{
    const json_t *named = json_object_get(config, "target_modules");
    const char *type = json_string_value(json_object_get(b->config, "model_type"));
    const char *const *usual = type ? lm_tune_usual_modules(t, type) : NULL;

    if (named && !json_is_null(named)) {
        if (!json_is_string(named) && !json_is_array(named))
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "target_modules is neither a list nor a string");
        *out = json_incref((json_t *)(uintptr_t)named);
        return LM_OK;
    }
    if (!usual)
        return lm_fail(e, LM_EUSAGE, where, "name target_modules, or all-linear",
                       "the usual modules of %s for models of type %.40s are not known", t->name,
                       type ? type : "(none)");
    *out = json_array();
    for (int i = 0; *out && usual[i]; i++)
        json_array_append_new(*out, json_string(usual[i]));
    return *out ? LM_OK : lm_fail(e, LM_ELIMIT, where, NULL, "out of memory");
}

lm_code lm_tune_choose(const lm_tune_bases *b, const lm_tune_method *t, const json_t *config,
                       const char *where, bool *chosen, lm_err *e)
{
    json_t *targets = NULL;
    size_t n = 0;
    lm_code rc = targets_of(b, t, config, where, &targets, e);

    for (size_t i = 0; !rc && i < b->n; i++) {
        rc = choose_one(t, targets, config, &b->at[i], where, &chosen[i], e);
        n += chosen[i];
    }
    if (!rc && !n)
        rc = lm_tune_fail_to_match(b, t, targets, config, where, e);
    json_decref(targets);
    return rc;
}

/* ---- Values ---- */

/* For a pattern of letters, digits, ".", "_" and "-" only (a dot matches any character): *hit is
 * true if `name` equals it or ends with a dot and it.  Returns false for other patterns. */
static bool plain_end(const char *pattern, const char *name, bool *hit)
{
    size_t n = strlen(name), k = strlen(pattern);

    for (size_t i = 0; i < k; i++)
        if (!isalnum((unsigned char)pattern[i]) && !strchr("._-", pattern[i]))
            return false;
    *hit = k && k <= n && (k == n || name[n - k - 1] == '.');
    for (size_t i = 0; *hit && i < k; i++)
        *hit = pattern[i] == '.' || pattern[i] == name[n - k + i];
    return k != 0;
}

lm_code lm_tune_pattern(const json_t *map, const char *module, double *out, const char *where,
                        lm_err *e)
{
    const char *key;
    json_t *v;

    json_object_foreach((json_t *)(uintptr_t)map, key, v)
    {
        bool hit = false;
        lm_code rc = plain_end(key, module, &hit)
                         ? LM_OK
                         : match("(?:.*\\.)?(?:%s)$", key, module, where, &hit, NULL, e);

        if (rc)
            return rc;
        if (!hit)
            continue;
        if (!json_is_number(v))
            return lm_fail(e, LM_EFORMAT, where, NULL, "the value of '%.60s' is not a number", key);
        *out = json_number_value(v);
        return LM_OK;
    }
    return LM_OK;
}

bool lm_tune_pattern_value(const lm_tune_module *m, const char *map, double *out)
{
    lm_err ignored = { 0 };
    double before = *out;
    const json_t *all = json_object_get(m->config, map);

    return json_is_object(all) &&
           !lm_tune_pattern(all, m->name, out, "adapter_config.json", &ignored) && *out != before;
}

static lm_code read_one(const lm_hyper *h, const json_t *v, const char *where, const char *who,
                        double *out, lm_err *e)
{
    char todo[80];
    *out = h->value;
    if (!v || json_is_null(v))
        return LM_OK;
    if (json_is_boolean(v))
        return lm_hyper_set(h, where, who, json_is_true(v) ? "true" : "false", out, e);
    if (json_is_string(v))
        return lm_hyper_set(h, where, who, json_string_value(v), out, e);
    if (!json_is_number(v))
        return lm_fail(e, LM_EFORMAT, where, NULL, "%s is not a number", h->name);
    *out = json_number_value(v);
    bool inside = *out >= h->least && *out <= h->most,
         whole = !h->words || strcmp(h->words, LM_WHOLE) != 0 || *out == floor(*out);
    if (inside && whole)
        return LM_OK;
    snprintf(todo, sizeof todo, "choose from %.10g to %.10g", h->least, h->most);
    return lm_fail(e, LM_EFORMAT, where, todo, "%s is %.10g, %s", h->name, *out,
                   inside ? "not a whole number" : "out of range");
}

/* Present, and not null, false, or empty. */
static bool is_set(const json_t *c, const char *key)
{
    const json_t *v = json_object_get(c, key);

    return v && !json_is_null(v) && !json_is_false(v) &&
           !(json_is_object(v) && !json_object_size(v)) &&
           !(json_is_array(v) && !json_array_size(v));
}

/* "none", "all", or "lora_only" with the method's own word. */
static lm_code check_bias(const json_t *config, const char *where, lm_err *e)
{
    const char *bias = json_string_value(json_object_get(config, "bias"));
    size_t n = bias ? strlen(bias) : 0;

    if (!bias || !strcmp(bias, "none") || !strcmp(bias, "all") ||
        (n > 5 && !strcmp(bias + n - 5, "_only")))
        return LM_OK;
    return lm_fail(e, LM_EFORMAT, where, "write none, all or lora_only",
                   "bias is '%.40s', which names no set of biases", bias);
}

lm_code lm_tune_check_config(const lm_tune_method *t, const json_t *config, const char *where,
                             lm_err *e)
{
    for (int i = 0; t->refused && t->refused[i]; i++)
        if (is_set(config, t->refused[i]))
            return lm_fail(e, LM_EUSAGE, where, "leave it out, or use PEFT",
                           "adapters with %s are not served", t->refused[i]);
    return check_bias(config, where, e);
}

lm_code lm_tune_read_hyper(const lm_tune_method *t, const json_t *config, const char *module,
                           const char *where, double *out, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; !rc && t->hyper[i].name; i++) {
        const lm_hyper *h = &t->hyper[i];
        const char *map = !strcmp(h->name, "r") ? "rank_pattern"
                          : !strcmp(h->name, "alpha") || !strcmp(h->name, "lora_alpha")
                              ? "alpha_pattern"
                              : NULL;
        const json_t *m = map ? json_object_get(config, map) : NULL;

        rc = read_one(h, json_object_get(config, h->name), where, t->name, &out[i], e);
        if (rc || !m || json_is_null(m))
            continue;
        if (!json_is_object(m))
            return lm_fail(e, LM_EFORMAT, where, "write {\"MODULE\": NUMBER, ...}",
                           "%s is not an object of modules and numbers", map);
        if (module)
            rc = lm_tune_pattern(m, module, &out[i], where, e);
        if (!rc && !(out[i] >= h->least && out[i] <= h->most))
            rc = lm_fail(e, LM_EFORMAT, where, NULL, "%s gives '%.100s' %g, outside %g to %g", map,
                         module, out[i], h->least, h->most);
    }
    return rc;
}
