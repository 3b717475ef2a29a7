/* SPDX-License-Identifier: Apache-2.0 */
/* config.c -- options from a JSON file, and back: keys are the long names. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/text.h"
#include "common/frame.h"

static lm_frame *const f = &lm_the_frame;
static json_t *tree; /* strings in it are borrowed by the options until the end */

/* Not part of a config: what acts at once, and the file itself. */
static bool takes_part(const lm_opt *o)
{
    return o->kind != LM_OPT_GROUP && o->dst && o->help && strcmp(o->name, "config") != 0 &&
           strcmp(o->name, "print-config") != 0;
}

static lm_code wrong(const lm_opt *o, const char *need, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, o->name, NULL, "%s is needed", need);
}

/* 3.7, which messages and --print-config then show, not 3.7000000000000002; whole numbers without
 * ".0", so that a count may be written as 1e6. */
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
        if (!rc && !json_is_string(one))
            rc = wrong(&f->opt[i], "an array of strings", e);
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
        if (!json_is_string(v))
            return wrong(&f->opt[i], "a string", e);
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

lm_code lm_options_read(const char *path, lm_err *e)
{
    const char *key;
    json_t *v;
    lm_code rc = lm_json_load(path, 16 << 20, &tree, e);

    if (!rc && !json_is_object(tree))
        rc = lm_fail(e, LM_EUSAGE, path, NULL, "a JSON object with options is needed");
    if (rc) {
        if (e->code == LM_EFORMAT)
            e->code = LM_EUSAGE; /* a config that cannot be obeyed: exit 2 */
        return rc;
    }
    json_object_foreach(tree, key, v)
    {
        int i = lm_option_find(key);

        if (i < 0 || !takes_part(&f->opt[i]))
            rc = unknown_key(key, e);
        else if (!json_is_null(v))
            rc = set_json(i, v, e);
        if (rc) {
            lm_err_in(e, "%s", path);
            return rc;
        }
        if (!json_is_null(v))
            f->given[i] = true;
    }
    return LM_OK;
}

/* A number outside its own range says "not given": null, which --config passes over. */
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

lm_code lm_options_save(lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    for (int i = 0; i < f->n; i++) {
        if (takes_part(&f->opt[i]))
            write_option(&w, &f->opt[i]);
    }
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

lm_code lm_options_print(lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = lm_options_save(&text, e);
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
        int i = lm_option_find(key);
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
