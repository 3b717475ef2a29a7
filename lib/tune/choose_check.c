/* SPDX-License-Identifier: Apache-2.0 */
/* choose_check.c -- the names and layers that a configuration asks for, one by one: PEFT ignores a
 * name that matches nothing beside one that does. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "model/arch.h"
#include "tune/choose_impl.h"

/* What an entry of a list of the configuration can mean. */
typedef struct {
    const char *key;
    bool (*matches)(const char *module, const char *entry);
    bool changed; /* only modules that the method can change */
    bool head;    /* a tied head is a name, too, though it is no module of its own */
} list_kind;

static const list_kind target_list = { "target_modules", lm_tune_ends_as, true, true };

/* Modules that PEFT adds to modules_to_save of every classifier. */
static bool is_automatic(const char *name)
{
    return !strcmp(name, "classifier") || !strcmp(name, "score");
}

/* As PEFT compares modules_to_save: whichever letter stands before the end. */
static bool ends_anywhere(const char *module, const char *entry)
{
    size_t k = strlen(entry), n = strlen(module);
    return is_automatic(entry) || (k && k <= n && !strcmp(module + n - k, entry));
}

static bool is_head(const lm_tune_bases *b, const char *entry)
{
    const lm_arch *arch = lm_arch_of(b->config);
    char name[LM_TENSOR_NAME];
    if (!arch)
        return false;
    lm_arch_head(arch, name);
    size_t n = strlen(name), end = strlen(".weight");
    name[n > end ? n - end : 0] = 0;
    return !strcmp(name, entry);
}

static bool is_name(const lm_tune_bases *b, const lm_tune_method *t, const list_kind *k,
                    const char *entry)
{
    for (size_t i = 0; i < b->n; i++)
        if ((!k->changed || (t && lm_tune_suits(t, &b->at[i]))) && k->matches(b->at[i].name, entry))
            return true;
    return k->head && is_head(b, entry);
}

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* The last parts of the names that an entry can mean, each once, NULL-terminated. */
enum { MOST_NAMES = 64 };
static void collect_names(const lm_tune_bases *b, const lm_tune_method *t, const list_kind *kind,
                          const char *names[MOST_NAMES + 1])
{
    size_t n = 0;
    for (size_t i = 0; i < b->n && n < MOST_NAMES; i++) {
        const char *last = last_part(b->at[i].name);
        bool seen = kind->changed && !(t && lm_tune_suits(t, &b->at[i]));
        for (size_t k = 0; k < n; k++)
            seen = seen || !strcmp(names[k], last);
        if (!seen)
            names[n++] = last;
    }
    names[n] = NULL;
}

/* Append 'text' to a list with commas, as far as there is room. */
static void add_quoted(char *list, size_t size, const char *text)
{
    size_t n = strlen(list), need = strlen(text) + 5;
    if (n + need < size)
        snprintf(list + n, size - n, "%s'%s'", n ? ", " : "", text);
}

/* "q_proj, k_proj" */
static void join_names(const char *const names[MOST_NAMES + 1], char *all, size_t size)
{
    size_t n = 0;
    *all = 0;
    for (int i = 0; names[i]; i++)
        if (n + strlen(names[i]) + 3 < size)
            n += (size_t)snprintf(all + n, size - n, "%s%s", n ? ", " : "", names[i]);
}

/* The names that are near to words of a name or a regular expression. */
static void add_near(const char *text, const char *const names[MOST_NAMES + 1], char *near,
                     size_t size)
{
    char word[64];
    while (*text) {
        size_t n = 0;
        while (isalnum((unsigned char)text[n]) || text[n] == '_')
            n++;
        snprintf(word, sizeof word, "%.*s", (int)n, text);
        const char *nearest = n > 1 ? lm_nearest(word, names) : NULL;
        if (nearest && !strstr(near, nearest))
            add_quoted(near, size, nearest);
        text += n + (text[n] != 0);
    }
}

static lm_code fail_names(const lm_tune_bases *b, const lm_tune_method *t, const list_kind *kind,
                          const json_t *list, lm_err *e)
{
    const char *names[MOST_NAMES + 1];
    char bad[160] = "", near[160] = "", all[200] = "", todo[420];
    const json_t *v;
    size_t i;
    collect_names(b, t, kind, names);
    json_array_foreach((json_t *)(uintptr_t)list, i, v)
    {
        const char *entry = json_string_value(v);
        if (!entry || is_name(b, t, kind, entry))
            continue;
        add_quoted(bad, sizeof bad, entry);
        add_near(last_part(entry), names, near, sizeof near);
    }
    join_names(names, all, sizeof all);
    if (*near)
        snprintf(todo, sizeof todo, "did you mean %s? it has %s", near, all);
    else
        snprintf(todo, sizeof todo, "it has %s", *all ? all : "none that this method can change");
    return lm_fail(e, LM_EUSAGE, kind->key, todo, "no module of %.100s matches %s", b->path, bad);
}

lm_code lm_tune_fail_to_match(const lm_tune_bases *b, const lm_tune_method *t,
                              const json_t *targets, const json_t *config, const char *where,
                              lm_err *e)
{
    const json_t *first = json_is_array(targets) ? json_array_get(targets, 0) : targets;
    const char *text = json_is_string(first) ? json_string_value(first) : "target_modules",
               *names[MOST_NAMES + 1];
    char near[160] = "", all[160], layers[60] = "", question[180] = "", todo[420];
    int64_t last = -1;
    for (size_t i = 0; i < b->n; i++)
        last = b->at[i].layer > last ? b->at[i].layer : last;
    collect_names(b, t, &target_list, names);
    join_names(names, all, sizeof all);
    if (lm_tune_has_layers(config) && json_is_array(targets))
        snprintf(layers, sizeof layers, "its layers are 0 to %lld; ", (long long)last);
    else if (json_is_string(targets))
        add_near(text, names, near, sizeof near);
    if (*near)
        snprintf(question, sizeof question, "did you mean %s? ", near);
    snprintf(todo, sizeof todo, "%s%sit has %s", question, layers,
             *all ? all : "none that this method can change");
    return lm_fail(e, LM_EUSAGE, where, todo, "target_modules: no module of %.100s matches '%.60s'",
                   b->path, text);
}

static lm_code check_list(const lm_tune_bases *b, const lm_tune_method *t, const list_kind *kind,
                          const json_t *config, lm_err *e)
{
    const json_t *list = json_object_get(config, kind->key), *v;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)list, i, v)
    {
        const char *entry = json_string_value(v);
        if (entry && !is_name(b, t, kind, entry))
            return fail_names(b, t, kind, list, e);
    }
    return LM_OK;
}

/* Numbers of layers_to_transform that no module has. */
static lm_code check_layers(const lm_tune_bases *b, const json_t *config, lm_err *e)
{
    static const char key[] = "layers_to_transform";
    const json_t *layers = json_object_get(config, key);
    enum { SHOWN = 6 };
    char bad[24 * SHOWN] = "", todo[80];
    int64_t first = -1, last = -1, n_bad = 0;
    size_t n = json_is_integer(layers) ? 1 : json_array_size(layers);
    for (size_t k = 0; k < n; k++) {
        const json_t *v = json_is_integer(layers) ? layers : json_array_get(layers, k);
        size_t used = strlen(bad);
        bool there = !json_is_integer(v);
        for (size_t i = 0; i < b->n && !there; i++) {
            int64_t layer = -1;
            if (lm_tune_layer_of(config, b->at[i].name, key, &layer, e))
                return e->code;
            there = layer >= 0 && layer == json_integer_value(v);
            first = layer >= 0 && (first < 0 || layer < first) ? layer : first;
            last = layer > last ? layer : last;
        }
        if (!there && n_bad++ < SHOWN)
            snprintf(bad + used, sizeof bad - used, "%s%lld", used ? ", " : "",
                     (long long)json_integer_value(v));
    }
    if (!*bad)
        return LM_OK;
    snprintf(todo, sizeof todo, "its layers are %lld to %lld", (long long)first, (long long)last);
    return lm_fail(e, LM_EUSAGE, key, last < 0 ? "leave it out" : todo, "%.100s has no layer %s%s",
                   b->path, bad, n_bad > SHOWN ? ", ..." : "");
}

lm_code lm_tune_check_names(const lm_tune_bases *b, const lm_tune_method *t, const json_t *config,
                            bool asked, lm_err *e)
{
    static const list_kind saved = { "modules_to_save", ends_anywhere, false, false },
                           without = { "exclude_modules", lm_tune_ends_as, false, true };
    if (check_list(b, t, &saved, config, e) || !asked)
        return e->code;
    return check_list(b, t, &without, config, e) || check_layers(b, config, e) ||
                   check_list(b, t, &target_list, config, e)
               ? e->code
               : LM_OK;
}
