/* SPDX-License-Identifier: Apache-2.0 */
/* chat.c -- a request rendered: its variables, and an end inside the last message. */
#include "text/chat.h"

#include <stdio.h>
#include <string.h>

#include "text/chat_impl.h"
#include "text/jinja_run.h"

/* Stands behind the last message while it is rendered, as in `transformers`: the blank shows
 * whether the template strips what follows a message. */
static const char mark[] = "CONTINUE_FINAL_MESSAGE_TAG ";

static lm_code no_memory(lm_err *e)
{
    return lm_fail(e, LM_ELIMIT, "memory", NULL, "the variables of a chat template");
}

/* ---- Messages ---- */

/* Reasoning goes by three names: "thinking" (first in the message) and "reasoning_content" are
 * filled. */
static int copy_message(const json_t *message, json_t *out)
{
    static const char *const names[] = { "reasoning_content", "thinking", "reasoning", NULL };
    json_t *from = (json_t *)(uintptr_t)message, *reasoning = NULL;
    int failed = 0;

    for (int i = 0; !reasoning && names[i]; i++) {
        reasoning = json_object_get(message, names[i]);
        if (json_is_null(reasoning))
            reasoning = NULL;
    }
    if (reasoning)
        failed |= json_object_set(out, "thinking", reasoning);
    for (void *it = json_object_iter(from); it; it = json_object_iter_next(from, it))
        if (!json_is_null(json_object_iter_value(it)))
            failed |= json_object_set(out, json_object_iter_key(it), json_object_iter_value(it));
    if (reasoning)
        failed |= json_object_set(out, "reasoning_content", reasoning);
    return failed;
}

static lm_code copy_messages(const lm_chat *c, const json_t *messages, json_t *out, lm_err *e)
{
    size_t n = json_array_size(messages);

    if (!json_is_array(messages) || !n)
        return lm_fail(e, LM_EUSAGE, c->where, NULL,
                       "messages must be a list with one message at least");
    for (size_t i = 0; i < n; i++) {
        const json_t *message = json_array_get(messages, i);
        json_t *copy;

        if (!json_is_object(message) || !json_is_string(json_object_get(message, "role")))
            return lm_fail(e, LM_EUSAGE, c->where, NULL,
                           "message %zu must be an object with a \"role\"", i + 1);
        copy = json_object();
        if (json_array_append_new(out, copy) || copy_message(message, copy))
            return no_memory(e);
    }
    return LM_OK;
}

/* ---- An end inside the last message ---- */

static json_t *with_mark(const char *text, size_t len)
{
    lm_buf all = { 0 };
    lm_err ignored = { 0 };
    json_t *made = NULL;

    if (!lm_buf_add(&all, text, len, &ignored) &&
        !lm_buf_add(&all, mark, sizeof mark - 1, &ignored))
        made = json_stringn(all.data, all.len);
    lm_buf_fini(&all);
    return made;
}

/* Append the mark to the content of the last message: text, or the last part that has text. */
static lm_code mark_last(const lm_chat *c, json_t *messages, lm_err *e)
{
    json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    json_t *content = json_object_get(last, "content"), *parts, *text;

    if (json_is_string(content)) {
        if (json_object_set_new(last, "content",
                                with_mark(json_string_value(content), json_string_length(content))))
            return no_memory(e);
        return LM_OK;
    }
    parts = json_deep_copy(content);
    for (size_t i = json_array_size(parts); i-- > 0;) {
        text = json_object_get(json_array_get(parts, i), "text");
        if (!json_is_string(text))
            continue;
        if (json_object_set_new(json_array_get(parts, i), "text",
                                with_mark(json_string_value(text), json_string_length(text))) ||
            json_object_set_new(last, "content", parts))
            return no_memory(e);
        return LM_OK;
    }
    json_decref(parts);
    return lm_fail(e, LM_EUSAGE, c->where, NULL, "the last message has no text to continue");
}

/* Cut the text behind `from` at the last mark; a template that strips its messages loses the blanks
 * before it. */
static lm_code cut_mark(const lm_chat *c, lm_buf *out, size_t from, lm_err *e)
{
    size_t n = sizeof mark - 2, at = out->len;
    const char *s;

    while (at > from && !(out->len - at >= n && !memcmp(out->data + at, mark, n)))
        at--;
    if (out->len - at < n || memcmp(out->data + at, mark, n) != 0)
        return lm_fail(e, LM_EFORMAT, c->where, NULL,
                       "the template does not show the message that is to be continued");
    s = out->data + from;
    if (out->len - at <= n || out->data[at + n] != ' ') {
        n = at - from;
        lm_jstr_strip(&s, &n, NULL, LM_JSTRIP_RIGHT);
        at = from + n;
    }
    out->len = at;
    out->data[at] = 0;
    return LM_OK;
}

/* ---- A request ---- */

static int set_list(json_t *vars, const char *name, const json_t *list)
{
    return json_object_set_new(vars, name,
                               list ? json_incref((json_t *)(uintptr_t)list) : json_null());
}

static lm_code gather(const lm_chat *c, const lm_chat_request *q, json_t *vars, lm_err *e)
{
    json_t *messages = json_array();
    int failed = json_object_update(vars, c->tokens);
    lm_code rc;

    if (q->vars && !json_is_object(q->vars))
        rc = lm_fail(e, LM_EUSAGE, c->where, NULL, "the variables of a template must be an object");
    else
        rc = copy_messages(c, q->messages, messages, e);
    if (!rc && q->continue_final)
        rc = mark_last(c, messages, e);
    if (!rc && q->vars)
        failed |= json_object_update(vars, (json_t *)(uintptr_t)q->vars);
    failed |= json_object_set_new(vars, "messages", messages);
    failed |= set_list(vars, "tools", q->tools);
    failed |= set_list(vars, "documents", q->documents);
    failed |=
        json_object_set_new(vars, "add_generation_prompt", json_boolean(q->add_generation_prompt));
    return rc || !failed ? rc : no_memory(e);
}

const lm_jinja *lm_chat_template(const lm_chat *c, const lm_chat_request *q)
{
    return q->tools && c->with_tools ? c->with_tools : c->plain;
}

lm_code lm_chat_text(const lm_chat *c, const lm_chat_request *q, lm_buf *out, lm_text_spans *marked,
                     lm_err *e)
{
    json_t *vars = json_object();
    size_t from = out->len;
    lm_code rc = vars ? gather(c, q, vars, e) : no_memory(e);

    if (!rc)
        rc = lm_jinja_render(lm_chat_template(c, q), vars, NULL, out, marked, e);
    if (!rc && q->continue_final)
        rc = cut_mark(c, out, from, e);
    json_decref(vars);
    return rc;
}

lm_code lm_chat_render(const lm_chat *c, const lm_chat_request *q, lm_buf *out, lm_err *e)
{
    if (q->add_generation_prompt && q->continue_final)
        return lm_fail(e, LM_EUSAGE, c->where, NULL,
                       "the last message cannot be continued behind the header of a new answer");
    return lm_chat_text(c, q, out, NULL, e);
}

lm_code lm_chat_render_marked(const lm_chat *c, const lm_chat_request *q, lm_chat_turns turns,
                              lm_buf *out, lm_text_spans *marked, lm_err *e)
{
    size_t from = out->len, had = marked->n;
    bool marks = lm_jinja_marks(lm_chat_template(c, q));
    lm_code rc;

    if (q->continue_final)
        return lm_fail(e, LM_EUSAGE, c->where, NULL,
                       "a message that is to be continued is not marked");
    rc = lm_chat_text(c, q, out, marks ? marked : NULL, e);
    if (rc)
        return rc;
    if (!marks)
        return lm_chat_compare(c, q, turns, out->data ? out->data + from : "", out->len - from,
                               from, marked, e);
    if (turns == LM_CHAT_LAST && marked->n > had + 1) {
        marked->v[had] = marked->v[marked->n - 1];
        marked->n = had + 1;
    }
    return LM_OK;
}
