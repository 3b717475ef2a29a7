/* SPDX-License-Identifier: Apache-2.0 */
/* config.c -- options from a JSON file, and back: keys are the long names.
 *
 * A file of --print-config holds the value of every option, and under "given" the names of those
 * that the user gave: tools refuse given options without effect, but not defaults.  A value that
 * differs from the built-in one counts as given too, so that such a file can be edited.  In a file
 * without "given" every key counts as given. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/text.h"
#include "common/frame.h"

static lm_frame *const f = &lm_the_frame;
static json_t *tree, *plan; /* strings in them are borrowed by the options until the end */

/* Not part of a config: options that act at once, and files of options, whose options are. */
static bool takes_part(const lm_opt *o)
{
    return o->kind != LM_OPT_GROUP && o->dst && o->help && strcmp(o->name, "config") != 0 &&
           strcmp(o->name, "plan") != 0 && strcmp(o->name, "print-config") != 0;
}

static lm_code wrong(const lm_opt *o, const char *need, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, o->name, NULL, "%s is needed", need);
}

/* Write 3.7, not 3.7000000000000002, in messages and --print-config; integers without ".0", so that
 * a count may be written as 1e6. */
static void as_written(double v, char text[40])
{
    lm_json_real(v, text);
    if (lm_text_ends(text, ".0"))
        text[strlen(text) - 2] = 0;
}

static lm_code set_number(int i, const json_t *v, lm_err *e)
{
    char text[40];

    if (json_is_string(v))
        return lm_option_set(i, json_string_value(v), e);
    if (json_is_integer(v))
        snprintf(text, sizeof text, "%" PRId64, (int64_t)json_integer_value(v));
    else if (json_is_real(v))
        as_written(json_real_value(v), text);
    else
        return wrong(&f->opt[i], "a number, or a string with a suffix", e);
    return lm_option_set(i, text, e);
}

static bool is_text(const json_t *v)
{
    return json_is_string(v) && strlen(json_string_value(v)) == json_string_length(v);
}

static lm_code set_list(int i, const json_t *v, lm_err *e)
{
    size_t n;
    const json_t *one;
    lm_code rc = LM_OK;

    if (!json_is_array(v))
        return wrong(&f->opt[i], "an array of strings", e);
    ((lm_strs *)f->opt[i].dst)->n = 0;
    json_array_foreach(v, n, one)
    {
        if (!rc && !is_text(one))
            rc = wrong(&f->opt[i], "an array of strings without U+0000", e);
        rc = rc ? rc : lm_option_set(i, json_string_value(one), e);
    }
    return rc;
}

static lm_code set_json(int i, const json_t *v, lm_err *e)
{
    switch (f->opt[i].kind) {
    case LM_OPT_FLAG:
        if (!json_is_boolean(v))
            return wrong(&f->opt[i], "true or false", e);
        *(bool *)f->opt[i].dst = json_is_true(v);
        return LM_OK;
    case LM_OPT_LIST:
        return set_list(i, v, e);
    case LM_OPT_STR:
    case LM_OPT_CHOICE:
    case LM_OPT_DEVICE:
        if (!is_text(v))
            return wrong(&f->opt[i], "a string without U+0000", e);
        return lm_option_set(i, json_string_value(v), e);
    default:
        return set_number(i, v, e);
    }
}

static lm_code unknown_key(const char *key, lm_err *e)
{
    const char *names[LM_MOST_OPTS + 1], *near;
    char todo[128] = "";
    int n = 0;

    for (int i = 0; i < f->n; i++) {
        if (takes_part(&f->opt[i]))
            names[n++] = f->opt[i].name;
    }
    names[n] = NULL;
    near = lm_nearest(key, names);
    if (near)
        snprintf(todo, sizeof todo, "did you mean '%s'?", near);
    return lm_fail(e, LM_EUSAGE, key, todo, "no option of this name");
}

/* Find a name in a file: an option or an alias. */
static lm_code read_key(const char *key, int *index, const lm_alias **alias, lm_err *e)
{
    char folded[128];

    lm_option_fold(key, folded, sizeof folded);
    *alias = NULL;
    *index = lm_option_find(folded);
    if (*index < 0 && (*alias = lm_alias_find(folded)) != NULL) {
        if ((*alias)->instead)
            return lm_fail(e, LM_EUSAGE, key, (*alias)->instead, "no option of this name");
        *index = (*alias)->target;
    }
    return *index >= 0 && takes_part(&f->opt[*index]) ? LM_OK : unknown_key(key, e);
}

/* "bf16": true */
static lm_code set_standing_for(const lm_alias *a, const json_t *v, lm_err *e)
{
    if (!json_is_boolean(v))
        return lm_fail(e, LM_EUSAGE, a->name, NULL, "true or false is needed");
    return json_is_true(v) ? lm_option_set(a->target, a->value, e) : LM_OK;
}

/* The value of "config": a file that the tool reads itself. */
static lm_code set_config(lm_tool *t, const json_t *v, lm_err *e)
{
    const char *path = json_string_value(v);

    if (!path || !t->takes_config(path))
        return lm_fail(e, LM_EUSAGE, "config", "name a file as --config takes it",
                       "is not such a file, or holds options");
    t->config = path;
    return LM_OK;
}

static bool lists(const json_t *given, const char *name)
{
    size_t n;
    const json_t *one;

    json_array_foreach(given, n, one)
    {
        if (!strcmp(json_string_value(one), name))
            return true;
    }
    return false;
}

static lm_code check_given(const json_t *given, lm_err *e)
{
    size_t n;
    const json_t *one;
    int index;
    const lm_alias *alias;
    lm_code rc = LM_OK;

    if (given && !json_is_array(given))
        return lm_fail(e, LM_EUSAGE, "given", NULL, "an array of names of options is needed");
    json_array_foreach(given, n, one)
    {
        if (!rc && !json_is_string(one))
            rc = lm_fail(e, LM_EUSAGE, "given", NULL, "an array of names of options is needed");
        rc = rc ? rc : read_key(json_string_value(one), &index, &alias, e);
    }
    return rc;
}

static lm_code read_pair(lm_tool *t, const char *key, const json_t *v, const json_t *given,
                         const json_t *built_in, lm_err *e)
{
    const lm_alias *alias;
    int i;

    if (!strcmp(key, "given"))
        return LM_OK;
    if (!strcmp(key, "config") && t->takes_config && !json_is_null(v))
        return set_config(t, v, e);
    if (read_key(key, &i, &alias, e))
        return e->code;
    if (json_is_null(v))
        return LM_OK;
    f->given[i] = !given || lists(given, f->opt[i].name) ||
                  !json_equal(v, json_object_get(built_in, f->opt[i].name));
    return alias && alias->value ? set_standing_for(alias, v, e) : set_json(i, v, e);
}

/* The parser rounds 1e-400 to 0 without an error. */
static lm_code load(const char *path, json_t **out, lm_err *e)
{
    const char *name = lm_path_shown(path);
    lm_buf text = { 0 };
    lm_code rc = lm_config_text(path, &text, e);

    if (!rc)
        rc = lm_json_parse(text.data ? text.data : "", text.len, name, out, e);
    if (!rc)
        rc = lm_json_check_numbers(text.data, name, e);
    lm_buf_fini(&text);
    return rc;
}

lm_code lm_options_read(lm_tool *t, const char *path, const json_t *built_in, lm_err *e)
{
    const char *key;
    json_t *v;
    lm_code rc = load(path, &tree, e);

    if (!rc && !json_is_object(tree))
        rc = lm_fail(e, LM_EUSAGE, lm_path_shown(path), NULL,
                     "a JSON object with options is needed");
    if (rc)
        return lm_err_disobeyed(e);
    const json_t *given = json_object_get(tree, "given");
    rc = check_given(given, e);
    json_object_foreach(tree, key, v)
    {
        if (!rc)
            rc = read_pair(t, key, v, given, built_in, e);
    }
    if (rc)
        lm_err_in(e, "%s", lm_path_shown(path));
    return rc;
}

/* ---- plans ---- */

static bool is_of_plans(const char *name)
{
    for (const char *const *p = f->plans; *p; p++)
        if (!strcmp(*p, name))
            return true;
    return false;
}

static lm_code read_planned(const char *key, const json_t *v, lm_err *e)
{
    const lm_alias *alias;
    int i;
    if (read_key(key, &i, &alias, e))
        return e->code;
    if (!is_of_plans(f->opt[i].name))
        return lm_fail(e, LM_EUSAGE, key, "give it on the command line or in --config",
                       "is not part of a plan");
    if (json_is_null(v))
        return LM_OK;
    f->given[i] = true;
    return alias && alias->value ? set_standing_for(alias, v, e) : set_json(i, v, e);
}

lm_code lm_options_read_plan(lm_tool *t, const char *path, lm_err *e)
{
    const char *key;
    json_t *v;
    (void)t;
    lm_code rc = load(path, &plan, e);
    if (rc)
        return lm_err_disobeyed(e);
    const json_t *options = json_object_get(plan, "plan");
    if (!json_is_object(options) || json_object_size(options) == 0)
        return lm_fail(e, LM_EUSAGE, lm_path_shown(path),
                       "train --dry-run --json writes one; see plan(5)",
                       "is not a plan: an object with options under \"plan\" is needed");
    json_object_foreach((json_t *)(uintptr_t)options, key, v)
    {
        if (!rc)
            rc = read_planned(key, v, e);
    }
    if (rc)
        lm_err_in(e, "%s: plan", lm_path_shown(path));
    return rc;
}

/* ---- writing ---- */

/* A number outside its own range means "not given": written as null, which --config ignores. */
static bool number_is_set(const lm_opt *o, double v)
{
    return v >= o->min && v <= o->max;
}

static void write_option(lm_jw *w, const lm_opt *o)
{
    switch (o->kind) {
    case LM_OPT_FLAG:
        lm_jw_bool(w, o->name, *(bool *)o->dst);
        break;
    case LM_OPT_LEVEL:
    case LM_OPT_COUNT:
    case LM_OPT_BYTES:
        if (number_is_set(o, (double)*(int64_t *)o->dst))
            lm_jw_int(w, o->name, *(int64_t *)o->dst);
        else
            lm_jw_str(w, o->name, NULL);
        break;
    case LM_OPT_TIME:
    case LM_OPT_REAL:
        lm_jw_f64(w, o->name, number_is_set(o, *(double *)o->dst) ? *(double *)o->dst : NAN);
        break;
    case LM_OPT_LIST:
        lm_jw_arr(w, o->name);
        for (int i = 0; i < ((lm_strs *)o->dst)->n; i++)
            lm_jw_str(w, NULL, ((lm_strs *)o->dst)->v[i]);
        lm_jw_close_arr(w);
        break;
    default:
        lm_jw_str(w, o->name, *(const char **)o->dst);
    }
}

static void write_options(lm_jw *w)
{
    for (int i = 0; i < f->n; i++) {
        if (takes_part(&f->opt[i]))
            write_option(w, &f->opt[i]);
    }
}

void lm_options_plan(lm_jw *w)
{
    lm_jw_obj(w, "plan");
    for (const char *const *p = f->plans; *p; p++)
        write_option(w, &f->opt[lm_option_find(*p)]);
    lm_jw_close_obj(w);
}

lm_code lm_options_save(lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    write_options(&w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

static lm_code check_text(const char *name, const char *text, lm_err *e)
{
    char where[64];

    if (!text || lm_utf8_valid(text, strlen(text)) == strlen(text))
        return LM_OK;
    snprintf(where, sizeof where, "--%s", name);
    return lm_fail(e, LM_EUSAGE, where, "give it on the command line only",
                   "is not UTF-8, which JSON needs");
}

/* The value written must be the one read back. */
static lm_code check_texts(const lm_tool *t, lm_err *e)
{
    lm_code rc = check_text("config", t->config, e);

    for (int i = 0; i < f->n && !rc; i++) {
        const lm_opt *o = &f->opt[i];

        if (takes_part(o) && (o->kind == LM_OPT_STR || o->kind == LM_OPT_CHOICE))
            rc = check_text(o->name, *(const char **)o->dst, e);
        for (int k = 0; !rc && o->kind == LM_OPT_LIST && k < ((lm_strs *)o->dst)->n; k++)
            rc = check_text(o->name, ((lm_strs *)o->dst)->v[k], e);
    }
    return rc;
}

lm_code lm_options_print(const lm_tool *t, lm_err *e)
{
    lm_buf text = { 0 };
    lm_jw w;
    lm_code rc = check_texts(t, e);

    if (rc)
        return rc;
    lm_jw_begin(&w, &text, 2, e);
    lm_jw_obj(&w, NULL);
    write_options(&w);
    if (t->config)
        lm_jw_str(&w, "config", t->config);
    lm_jw_arr(&w, "given");
    for (int i = 0; i < f->n; i++) {
        if (f->given[i] && takes_part(&f->opt[i]))
            lm_jw_str(&w, NULL, f->opt[i].name);
    }
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    rc = lm_jw_end(&w);
    if (!rc)
        printf("%s\n", text.data);
    lm_buf_fini(&text);
    return rc;
}

lm_code lm_options_resume(const json_t *saved, const char *const *except, const char *where,
                          lm_err *e)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)saved, key, v)
    {
        const lm_alias *was = lm_alias_find(key);
        int i = was && !was->value && !was->instead ? was->target : lm_option_find(key);
        bool skip = i < 0 || !takes_part(&f->opt[i]) || f->given[i] || json_is_null(v);
        for (const char *const *x = except; !skip && x && *x; x++)
            skip = !strcmp(*x, key);
        if (!skip && set_json(i, v, e)) {
            lm_err_in(e, "%s", where);
            return e->code;
        }
    }
    return LM_OK;
}
