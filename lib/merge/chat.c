/* SPDX-License-Identifier: Apache-2.0 */
/* chat.c -- the template of a merged model: by name, as text, or the one that most models have. */
#include "merge/chat.h"

#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "text/chat.h"

enum { MAX_TEMPLATE = 1 << 20 };

/* ---- The template of a model ---- */

/* tokenizer_config.json has one text, or a list of named ones of which one is called default. */
static const char *default_of(const json_t *config)
{
    const json_t *all = json_object_get(config, "chat_template");
    const char *text = json_string_value(all);

    for (size_t i = 0; !text && i < json_array_size(all); i++) {
        const json_t *one = json_array_get(all, i);
        const char *name = json_string_value(json_object_get(one, "name"));

        if (name && !strcmp(name, "default"))
            text = json_string_value(json_object_get(one, "template"));
    }
    return text;
}

/* Strip white space at both ends, so that the same text in two forms counts as one template. */
static lm_code add_trimmed(lm_buf *out, const char *text, size_t n, lm_err *e)
{
    static const char blank[] = " \t\r\n";

    while (n && memchr(blank, text[n - 1], sizeof blank - 1))
        n--;
    while (n && memchr(blank, *text, sizeof blank - 1)) {
        text++;
        n--;
    }
    return n ? lm_buf_add(out, text, n, e) : LM_OK;
}

/* The template of input i; *out stays empty when it has none. */
static lm_code template_of(const lm_merge_plan *p, int i, lm_buf *out, lm_err *e)
{
    lm_model_source *m = p->model[i].source;
    json_t *config = NULL;
    lm_buf text = { 0 };
    bool found = false;
    const char *in_config;
    lm_code rc = lm_model_source_file_now(m, "chat_template.jinja", MAX_TEMPLATE, &text, &found, e);

    if (!rc && found)
        rc = add_trimmed(out, text.data ? text.data : "", text.len, e);
    if (!rc && !out->len)
        rc = lm_model_source_json(m, "tokenizer_config.json", &config, e);
    in_config = rc ? NULL : default_of(config);
    if (in_config)
        rc = add_trimmed(out, in_config, strlen(in_config), e);
    json_decref(config);
    lm_buf_fini(&text);
    return rc;
}

static bool same(const lm_buf *a, const lm_buf *b)
{
    return a->len == b->len && (!a->len || !memcmp(a->data, b->data, a->len));
}

/* The input with the most frequent template; -1: no input has one. */
static int most_frequent(const lm_merge_plan *p, const lm_buf *of)
{
    int n = p->recipe->n_inputs, best = -1, most = 0;

    for (int k = -1; k < n; k++) { /* the base first, so that it wins a tie */
        int i = k < 0 ? p->lead : k, same_as_i = 0;

        for (int o = 0; of[i].len && o < n; o++)
            same_as_i += same(&of[o], &of[i]);
        if (same_as_i > most) {
            most = same_as_i;
            best = i;
        }
    }
    return best;
}

static lm_code automatic(const lm_merge_plan *p, lm_buf *out, bool *found, lm_err *e)
{
    int n = p->recipe->n_inputs, best;
    lm_buf *of = NULL;
    lm_code rc = lm_alloc_n(&of, (size_t)n, sizeof *of, "chat templates", e);

    for (int i = 0; !rc && i < n; i++)
        rc = template_of(p, i, &of[i], e);
    best = rc ? -1 : most_frequent(p, of);
    *found = best >= 0;
    if (*found)
        rc = lm_buf_add(out, of[best].data, of[best].len, e);
    for (int i = 0; of && i < n; i++)
        lm_buf_fini(&of[i]);
    lm_free(of);
    return rc;
}

lm_code lm_merge_chat(const lm_merge_plan *p, lm_buf *out, bool *found, lm_err *e)
{
    const char *want = p->recipe->chat_template, *text;

    *found = false;
    if (!want)
        return LM_OK;
    if (!strcmp(want, "auto"))
        return automatic(p, out, found, e);
    text = lm_chat_named(want);
    text = text ? text : want;
    *found = true;
    return lm_buf_add(out, text, strlen(text), e);
}
