/* SPDX-License-Identifier: Apache-2.0 */
/* chat_open.c -- where a chat template comes from: a model's files, a name, a file. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "text/chat_impl.h"

enum { MAX_TEMPLATE = 4 << 20, MAX_CONFIG = 64 << 20 };

/* ---- Special tokens ---- */

/* A token is its text, or an object with it. */
static const char *token_text(const json_t *v)
{
    return json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
}

static lm_code add_token(json_t *tokens, const char *name, const json_t *v, lm_err *e)
{
    const char *text = token_text(v);

    if (text && json_object_set_new(tokens, name, json_string(text)))
        return lm_fail(e, LM_ELIMIT, "memory", NULL, "the special tokens of a tokenizer");
    return LM_OK;
}

/* The tokens that tokenizer_config.json (or special_tokens_map.json) names. */
static lm_code add_tokens(json_t *tokens, const json_t *config, lm_err *e)
{
    static const char *const names[] = { "bos_token", "eos_token", "unk_token",  "sep_token",
                                         "pad_token", "cls_token", "mask_token", NULL };
    static const char *const more[] = { "extra_special_tokens", "model_specific_special_tokens",
                                        NULL };
    lm_code rc = LM_OK;

    for (int i = 0; !rc && names[i]; i++)
        if (!json_object_get(tokens, names[i]))
            rc = add_token(tokens, names[i], json_object_get(config, names[i]), e);
    for (int i = 0; more[i]; i++) {
        json_t *extra = json_object_get(config, more[i]);

        for (void *it = json_object_iter(extra); !rc && it; it = json_object_iter_next(extra, it))
            rc = add_token(tokens, json_object_iter_key(it), json_object_iter_value(it), e);
    }
    return rc;
}

/* A tokenizer without tokenizer_config.json: its ids by well-known names. */
static lm_code add_known(json_t *tokens, const lm_tokenizer *t, lm_err *e)
{
    const struct {
        const char *name;
        int64_t id;
    } known[] = { { "bos_token", lm_tokenizer_bos(t) }, { "eos_token", lm_tokenizer_eos(t) } };

    for (int i = 0; i < 2; i++) {
        size_t len;
        const char *s = known[i].id < 0 ? NULL : lm_tokenizer_token(t, (uint32_t)known[i].id, &len);

        if (s && json_object_set_new(tokens, known[i].name, json_stringn(s, len)))
            return lm_fail(e, LM_ELIMIT, "memory", NULL, "the special tokens of a tokenizer");
    }
    return LM_OK;
}

static lm_code collect_tokens(lm_model_source *m, const lm_tokenizer *t, json_t *tokens, lm_err *e)
{
    json_t *config = NULL;
    size_t len = 0;
    const char *text = t ? lm_tokenizer_config_json(t, &len) : NULL;
    lm_code rc = LM_OK;

    if (text && len)
        rc = lm_json_parse(text, len, "tokenizer_config.json", &config, e);
    else if (t)
        rc = add_known(tokens, t, e);
    else if (m)
        rc = lm_model_source_json(m, "tokenizer_config.json", &config, e);
    if (!rc && config)
        rc = add_tokens(tokens, config, e);
    json_decref(config);
    config = NULL;
    if (!rc && m && !json_object_size(tokens)) /* an older model */
        rc = lm_model_source_json(m, "special_tokens_map.json", &config, e);
    if (!rc && config)
        rc = add_tokens(tokens, config, e);
    json_decref(config);
    return rc;
}

/* ---- Templates of a model ---- */

/* The template `name` of the model's files, appended; *found = false: it has none.  Only a folder
 * has the further ones, which are in a folder of their own. */
static lm_code read_file(lm_model_source *m, const char *name, lm_buf *out, bool *found, lm_err *e)
{
    const char *dir = lm_model_source_dir(m);
    char *path = NULL;
    lm_code rc;

    *found = false;
    if (!strcmp(name, "default"))
        return lm_model_source_file_now(m, "chat_template.jinja", MAX_TEMPLATE, out, found, e);
    if (!dir || strchr(name, '/'))
        return LM_OK;
    rc = lm_asprintf(&path, e, "%s/additional_chat_templates/%s.jinja", dir, name);
    *found = !rc && lm_path_exists(path);
    if (*found)
        rc = lm_file_read(path, MAX_TEMPLATE, out, e);
    lm_free(path);
    return rc;
}

/* The same of tokenizer_config.json: one text, or a list of named ones. */
static const json_t *named_in_config(const json_t *config, const char *name)
{
    const json_t *all = json_object_get(config, "chat_template");

    if (json_is_string(all))
        return strcmp(name, "default") ? NULL : all;
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *one = json_array_get(all, i);
        const char *has = json_string_value(json_object_get(one, "name"));

        if (has && !strcmp(has, name))
            return json_object_get(one, "template");
    }
    return NULL;
}

/* Compile the model's template of this name; *out stays NULL when it has none. */
static lm_code compile_own(lm_model_source *m, const json_t *config, const char *name,
                           lm_jinja **out, lm_err *e)
{
    const json_t *text;
    lm_buf file = { 0 };
    char where[300];
    bool found = false;
    lm_code rc = read_file(m, name, &file, &found, e);

    text = rc || found ? NULL : named_in_config(config, name);
    snprintf(where, sizeof where, "%.120s: chat template '%.100s'", lm_model_source_path(m), name);
    if (!rc && found)
        rc = lm_jinja_compile(file.data ? file.data : "", file.len, where, out, e);
    else if (!rc && json_is_string(text))
        rc = lm_jinja_compile(json_string_value(text), json_string_length(text), where, out, e);
    lm_buf_fini(&file);
    return rc;
}

/* ---- Opening ---- */

static lm_code compile_path(const char *path, lm_jinja **out, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = lm_file_read(path, MAX_TEMPLATE, &text, e);

    if (!rc)
        rc = lm_jinja_compile(text.data ? text.data : "", text.len, path, out, e);
    lm_buf_fini(&text);
    return rc;
}

static lm_code list_names(const char *want, lm_model_source *m, lm_err *e)
{
    char todo[200] = "name a template: a file, or";
    size_t used = strlen(todo);

    for (int i = 0; lm_chat_names[i] && used < sizeof todo; i++)
        used += (size_t)snprintf(todo + used, sizeof todo - used, "%s %s", i ? "," : "",
                                 lm_chat_names[i]);
    if (want)
        return lm_fail(e, LM_EUSAGE, want, todo, "no chat template has this name");
    return lm_fail(e, LM_EUSAGE, lm_model_source_path(m), todo, "the model has no chat template");
}

static lm_code compile_any(lm_chat *c, lm_model_source *m, const char *want, lm_err *e)
{
    json_t *config = NULL;
    const char *text;
    lm_code rc = m ? lm_model_source_json(m, "tokenizer_config.json", &config, e) : LM_OK;

    if (!rc && m)
        rc = compile_own(m, config, want ? want : "default", &c->plain, e);
    if (!rc && m && !want)
        rc = compile_own(m, config, "tool_use", &c->with_tools, e);
    json_decref(config);
    text = want ? lm_chat_named(want) : NULL;
    if (rc || c->plain)
        return rc;
    if (text)
        return lm_jinja_compile(text, strlen(text), want, &c->plain, e);
    if (want && lm_path_exists(want))
        return compile_path(want, &c->plain, e);
    return list_names(want, m, e);
}

static lm_code make(lm_chat **out, const char *where, lm_err *e)
{
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "a chat template", e);

    if (!rc)
        rc = lm_strdup(&(*out)->where, where, e);
    if (!rc) {
        (*out)->tokens = json_object();
        if (!(*out)->tokens)
            rc = lm_fail(e, LM_ELIMIT, "memory", NULL, "a chat template");
    }
    return rc;
}

lm_code lm_chat_open(lm_model_source *m, const lm_tokenizer *t, const char *want, lm_chat **out,
                     lm_err *e)
{
    lm_chat *c = NULL;
    lm_code rc = make(&c, want ? want : lm_model_source_path(m), e);

    *out = NULL;
    if (!rc)
        rc = compile_any(c, m, want, e);
    if (!rc)
        rc = collect_tokens(m, t, c->tokens, e);
    if (rc) {
        lm_chat_free(c);
        return rc;
    }
    *out = c;
    return LM_OK;
}

lm_code lm_chat_new(const char *text, size_t len, const char *where, const json_t *tokens,
                    lm_chat **out, lm_err *e)
{
    lm_chat *c = NULL;
    lm_code rc = make(&c, where, e);

    *out = NULL;
    if (!rc)
        rc = lm_jinja_compile(text, len, where, &c->plain, e);
    if (!rc && tokens && json_object_update(c->tokens, (json_t *)(uintptr_t)tokens))
        rc = lm_fail(e, LM_ELIMIT, "memory", NULL, "the special tokens of a chat template");
    if (rc) {
        lm_chat_free(c);
        return rc;
    }
    *out = c;
    return LM_OK;
}

void lm_chat_free(lm_chat *c)
{
    if (!c)
        return;
    lm_jinja_free(c->plain);
    lm_jinja_free(c->with_tools);
    json_decref(c->tokens);
    lm_free(c->where);
    lm_free(c);
}
