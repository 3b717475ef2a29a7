/* SPDX-License-Identifier: Apache-2.0 */
/* chat_driver -- the driver of test_chat.py: renders chats from a pipe.
 *
 * One JSON object a line on standard input: "template", and either "vars" (the template's variables) or "messages",
 * "tokens", and further parts of a request (text/chat.h); "marked": true asks for spans, "now" is the time that
 * strftime_now sees.  Each is answered by one line: "text" and "spans" (pairs of bytes), or "error"; with "encode": true,
 * also "ids" and "trains" by the tokenizer whose path is the argument. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/chat.h"

static lm_code render_vars(const json_t *j, lm_buf *out, lm_text_spans *spans, lm_err *e)
{
    const json_t *text = json_object_get(j, "template");
    lm_jinja_limits l = { .now = json_integer_value(json_object_get(j, "now")),
                          .steps = json_integer_value(json_object_get(j, "steps")) };
    lm_jinja *t = NULL;
    lm_code rc =
        lm_jinja_compile(json_string_value(text), json_string_length(text), "template", &t, e);

    if (!rc)
        rc = lm_jinja_render(t, json_object_get(j, "vars"), &l, out, spans, e);
    lm_jinja_free(t);
    return rc;
}

static lm_code render_chat(const json_t *j, lm_buf *out, lm_text_spans *spans, lm_err *e)
{
    const json_t *text = json_object_get(j, "template");
    lm_chat_request q = { .messages = json_object_get(j, "messages"),
                          .tools = json_object_get(j, "tools"),
                          .documents = json_object_get(j, "documents"),
                          .vars = json_object_get(j, "chat_vars"),
                          .add_generation_prompt = json_is_true(json_object_get(j, "prompt")),
                          .continue_final = json_is_true(json_object_get(j, "continue")) };
    lm_chat *c = NULL;
    lm_code rc = lm_chat_new(json_string_value(text), json_string_length(text), "template",
                             json_object_get(j, "tokens"), &c, e);

    if (!rc && json_is_true(json_object_get(j, "marked")))
        rc = lm_chat_render_marked(c, &q, LM_CHAT_ASSISTANT, out, spans, e);
    else if (!rc)
        rc = lm_chat_render(c, &q, out, e);
    lm_chat_free(c);
    return rc;
}

static json_t *answer(lm_code rc, const lm_buf *out, const lm_text_spans *spans, const lm_err *e)
{
    json_t *made = json_object(), *list = json_array();
    char text[1000];

    for (size_t i = 0; i < spans->n; i++)
        json_array_append_new(
            list, json_pack("[I,I]", (json_int_t)spans->v[i].from, (json_int_t)spans->v[i].to));
    json_object_set_new(made, "spans", list);
    snprintf(text, sizeof text, "%s: %s", e->where, e->what);
    if (rc && json_object_set_new(made, "error", json_string(text)))
        json_object_set_new(made, "error", json_string("?")); /* a message cut inside a character */
    if (!rc)
        json_object_set_new(made, "text", json_stringn(out->data ? out->data : "", out->len));
    return made;
}

static lm_tokenizer *tok;

static lm_code add_ids(json_t *made, const lm_buf *out, const lm_text_spans *spans, lm_err *e)
{
    json_t *ids_of = json_array(), *trains = json_array();
    lm_tok_scratch *scratch = NULL;
    lm_buf flags = { 0 };
    lm_ids ids = { 0 };
    lm_code rc = lm_tok_scratch_new(tok, &scratch, e);

    if (!rc)
        rc = lm_chat_encode(tok, scratch, out->data ? out->data : "", out->len, spans, &ids, &flags,
                            e);
    for (size_t i = 0; !rc && i < ids.n; i++) {
        json_array_append_new(ids_of, json_integer(ids.v[i]));
        json_array_append_new(trains, json_integer(flags.data[i]));
    }
    json_object_set_new(made, "ids", ids_of);
    json_object_set_new(made, "trains", trains);
    lm_tok_scratch_free(scratch);
    lm_buf_fini(&flags);
    lm_ids_fini(&ids);
    return rc;
}

int main(int argc, char **argv)
{
    char *line = NULL, *text;
    size_t cap = 0;
    ssize_t n;
    lm_err first = { 0 };

    if (argc > 1 && lm_tokenizer_load(argv[1], &tok, &first)) {
        fprintf(stderr, "chat_driver: %s: %s\n", first.where, first.what);
        return 1;
    }
    while ((n = getline(&line, &cap, stdin)) > 0) {
        json_t *j = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, NULL), *made;
        lm_text_spans spans = { 0 };
        lm_buf out = { 0 };
        lm_err e = { 0 };
        lm_code rc;

        if (!json_is_string(json_object_get(j, "template")))
            return 1;
        rc = json_object_get(j, "messages") ? render_chat(j, &out, &spans, &e)
                                            : render_vars(j, &out, &spans, &e);
        made = answer(rc, &out, &spans, &e);
        if (!rc && tok && json_is_true(json_object_get(j, "encode")) &&
            add_ids(made, &out, &spans, &e))
            return 1;
        text = json_dumps(made, JSON_COMPACT);
        puts(text ? text : "{\"error\": \"text that is not UTF-8\"}");
        fflush(stdout);
        free(text);
        json_decref(made);
        json_decref(j);
        lm_text_spans_fini(&spans);
        lm_buf_fini(&out);
    }
    free(line);
    lm_tokenizer_free(tok);
    return 0;
}
