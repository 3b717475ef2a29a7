/* SPDX-License-Identifier: Apache-2.0 */
/* tuning.c -- see tuning.h. */
#include "common/tuning.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "numeric/format.h"

const char *const lm_tuning_base_formats[] = { "auto", "nf4", "nf4_dq", "q8_0", "q4_0", NULL };

/* ---- options ---- */

lm_code lm_tuning_find(const lm_tuning_args *a, const char *list, lm_tuning_recipe *out, lm_err *e)
{
    const char *near = lm_nearest(a->method, lm_tuning_recipe_names());
    char todo[80];
    if (lm_tuning_recipe_find(a->method, out))
        return LM_OK;
    if (near)
        snprintf(todo, sizeof todo, "did you mean '%s'?", near);
    return lm_fail(e, LM_EUSAGE, "--method", near ? todo : list, "no method '%s'", a->method);
}

lm_code lm_tuning_refuse_alone(const lm_tool *t, const lm_tuning_args *a,
                               const lm_tuning_option *list, bool adapts, bool resumed,
                               const char *todo, lm_err *e)
{
    char where[40];
    for (; list->name; list++) {
        if (!lm_given(t, list->name))
            continue;
        snprintf(where, sizeof where, "--%s", list->name);
        if (!adapts)
            return lm_fail(e, LM_EUSAGE, where, todo, "method '%s' has no adapter", a->method);
        if (list->saved && (a->init_adapter || resumed))
            return lm_fail(e, LM_EUSAGE, where, "leave it out",
                           "the configuration of the saved adapter determines it");
    }
    return LM_OK;
}

/* ---- the adapter ---- */

/* Ranks that share a base keep its weights in numbers.  codes: they were to be in codes. */
static lm_code check_numbers(const lm_tuning_recipe *r, bool codes, const lm_session *s, lm_err *e)
{
    for (size_t i = 0; i < lm_model_source_count(s->source) && !codes; i++) {
        bool turned;
        const lm_format *f =
            lm_model_source_format(s->source, lm_model_source_at(s->source, i), &turned);
        codes = f && f->element == LM_DTYPE_NONE;
    }
    return codes ? lm_fail(e, LM_EUSAGE, "--mesh", "share the batch (dp)",
                           "ranks that share a base keep it in numbers, and it %s in codes",
                           r->format ? "would be" : "is")
                 : LM_OK;
}

lm_code lm_tuning_encode(const lm_tuning_args *a, const lm_tuning_recipe *r, lm_session *s,
                         lm_err *e)
{
    const char *layers = strcmp(a->base_format, "auto") != 0 ? a->base_format : r->format;
    /* Q8_0, not NF4: 4-bit codes degrade the logits of the output head */
    const char *embed = strcmp(a->embed_format, "auto") != 0 ? a->embed_format
                        : r->format                          ? "q8_0"
                                                             : NULL;
    lm_build *b = &s->o.build;
    if (lm_mesh_along(&s->o.mesh, LM_AXIS_PP) * lm_mesh_inner(&s->o.mesh) > 1)
        return check_numbers(r, layers || embed, s, e);
    b->codes = s->source;
    b->recompute = r->format != NULL;
    if (layers && lm_format_find(layers, NULL, &b->frozen_format, e))
        lm_err_in(e, "--base-format");
    else if (embed && lm_format_find(embed, NULL, &b->frozen_embed, e))
        lm_err_in(e, "--embed-format");
    return e->code;
}

/* True if a parameter of the model is kept in that format. */
static bool keeps(const lm_model *m, const lm_format *f)
{
    lm_store_part part[LM_STORE_FORMATS];
    int n = lm_store_frozen(m, part), i = 0;
    while (i < n && part[i].format != f)
        i++;
    return i < n;
}

lm_code lm_tuning_check_formats(const lm_tuning_args *a, const lm_session *s, lm_err *e)
{
    const lm_build *b = &s->o.build;
    const struct {
        const char *option, *given;
        const lm_format *format;
    } all[] = { { "--base-format", a->base_format, b->frozen_format },
                { "--embed-format", a->embed_format, b->frozen_embed } };
    for (int i = 0; i < 2; i++)
        if (strcmp(all[i].given, "auto") != 0 && !keeps(s->program->train, all[i].format))
            return lm_fail(
                e, LM_EUSAGE, all[i].option, "leave it out",
                "nothing here can be kept in %s: what trains is not frozen, rows may not be "
                "whole blocks, and %s may have no kernels for it",
                all[i].given, s->backend->name);
    return LM_OK;
}

/* The place of failures of a new configuration as a whole; their text names the key. */
static const char new_config[] = "adapter";

/* True if text[at..at + n) is a whole word. */
static bool is_word(const char *text, size_t at, size_t n)
{
    const char before = at ? text[at - 1] : ' ', behind = text[at + n];
    return !isalnum((unsigned char)before) && before != '_' && !isalnum((unsigned char)behind) &&
           behind != '_';
}

static bool mentions(const char *text, const char *word, size_t n)
{
    for (size_t at = 0; strlen(text + at) >= n; at++)
        if (!memcmp(text + at, word, n) && is_word(text, at, n))
            return true;
    return false;
}

/* The key of a KEY=VALUE of --set that is `key`, or that the text names; NULL: none.  *n: its length. */
static const char *key_set(const lm_tuning_args *a, const char *key, const char *text, size_t *n)
{
    for (int i = 0; i < a->set.n; i++) {
        const char *word = a->set.v[i];
        *n = strcspn(word, "=");
        if (*n && word[*n] &&
            ((strlen(key) == *n && !memcmp(key, word, *n)) || (text && mentions(text, word, *n))))
            return word;
    }
    return NULL;
}

/* The other option from which a key or a part of the configuration comes; NULL: not given. */
static const char *option_of(const lm_tuning_args *a, const char *key)
{
    const struct {
        const char *part, *key, *option;
        bool given;
    } all[] = { { "rank", "r", "--rank", a->rank >= 0 },
                { "rank", "init_r", "--rank", a->rank >= 0 },
                { "alpha", "lora_alpha", "--lora-alpha", a->alpha >= 0 },
                { "target", "target_modules", "--target", a->target != NULL },
                { "exclude", "exclude_modules", "--exclude", a->exclude != NULL },
                { "layers", "layers_to_transform", "--layers", a->layers != NULL },
                { "modules to save", "modules_to_save", "--modules-to-save", a->save != NULL },
                { "set", "set", "--set", a->set.n > 0 } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].given && (!strcmp(key, all[i].part) || !strcmp(key, all[i].key)))
            return all[i].option;
    const bool drops = lm_text_ends(key, "dropout") || !strcmp(key, "dropout");
    return drops && a->dropout >= 0 ? "--adapter-dropout" : NULL;
}

lm_code lm_tuning_name_option(const lm_tuning_args *a, lm_err *e)
{
    char key[sizeof e->where];
    bool whole = !strcmp(e->where, new_config);
    size_t n = whole ? strcspn(e->what, " :") : 0;
    if ((e->code != LM_EUSAGE && e->code != LM_EFORMAT) || n >= sizeof key)
        return e->code;
    snprintf(key, sizeof key, "%.*s", (int)(whole ? n : sizeof key - 1),
             whole ? e->what : e->where);
    size_t len;
    const char *set = key_set(a, key, whole ? e->what : NULL, &len), *option = option_of(a, key);
    if (!set && !option)
        return e->code;
    if (set)
        snprintf(e->where, sizeof e->where, "--set %.*s", (int)(len < 200 ? len : 200), set);
    else
        snprintf(e->where, sizeof e->where, "%s", option);
    if (whole && e->what[n] == ':')
        memmove(e->what, e->what + n + 2, strlen(e->what + n + 2) + 1);
    e->code = LM_EUSAGE;
    return e->code;
}

lm_code lm_tuning_read(const lm_tuning_args *a, const lm_tuning_recipe *r, const lm_session *s,
                       lm_bundle **files, lm_st **first, json_t **config, lm_err *e)
{
    const char *saved = s->ask.resume ? s->ask.resume : a->init_adapter;
    const lm_tuning_ask ask = { .recipe = *r,
                                .base = s->ask.model,
                                .model = &s->config,
                                .rank = a->rank,
                                .alpha = a->alpha,
                                .dropout = a->dropout,
                                .target = a->target,
                                .exclude = a->exclude,
                                .layers = a->layers,
                                .save = a->save,
                                .set = a->set.v,
                                .n_set = a->set.n };
    if (!saved && !lm_tuning_recipe_begins(r))
        return lm_fail(e, LM_EUSAGE, "--method",
                       "make it with PEFT, or choose another method (peft-tune --list-methods)",
                       "an adapter of '%s' cannot be begun here", r->name);
    if (!saved)
        return lm_tuning_config(&ask, config, e);
    if (lm_tuning_open(saved, &s->ask.how, files, first, config, e)) {
        json_decref(*config);
        *config = NULL;
        return e->code;
    }
    if (s->ask.resume)
        lm_tuning_resume(*config, *first);
    return LM_OK;
}

/* A method that the adapter of --init-adapter is not of. */
static lm_code refuse_method(const lm_tool *t, const lm_tuning_args *a, const json_t *config,
                             lm_err *e)
{
    lm_tuning_recipe r;
    return a->init_adapter && lm_given(t, "method") && lm_tuning_recipe_find(a->method, &r) &&
                   !lm_tuning_recipe_fits(&r, config)
               ? lm_fail(e, LM_EUSAGE, "--method", "leave it out",
                         "'%s' is not the method of the saved adapter, whose configuration says it",
                         a->method)
               : LM_OK;
}

lm_code lm_tuning_attach(const lm_tool *t, const lm_tuning_args *a, lm_session *s, json_t *config,
                         lm_st *first, lm_tuning *out, lm_err *e)
{
    const char *where = s->ask.resume     ? s->ask.resume
                        : a->init_adapter ? a->init_adapter
                                          : new_config;
    if (!s->ask.resume && refuse_method(t, a, config, e)) {
        json_decref(config);
        return e->code;
    }
    if (lm_tuning_new(config, where, !first, s->source, &s->config, out, e))
        return e->code;
    out->base = s->source;
    out->seed = (uint64_t)t->seed;
    out->first = s->ask.resume ? NULL : first;
    if (lm_tuning_ids(out, first, e) ||
        (out->first && lm_tuning_complete(out, a->init_adapter, &s->ask.how, s->source, e)))
        return e->code;
    lm_tuning_build(out, &s->o.build);
    s->adapter.config = out->text.data;
    s->adapter.start = lm_tuning_start;
    s->adapter.fold = lm_tuning_fold;
    s->adapter.ctx = out;
    s->o.adapt_room = lm_tuning_room(out, &s->o.adapt_keeps);
    return LM_OK;
}

void lm_tuning_say(lm_tool *t, const lm_tuning *tuning)
{
    lm_buf line = { 0 };
    lm_err unseen = { 0 };
    if (tuning->attach && !lm_tuning_line(tuning, &line, &unseen))
        lm_say(t, LM_LOG_NOTICE, "%s", line.data);
    lm_buf_fini(&line);
}
