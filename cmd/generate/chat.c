/* SPDX-License-Identifier: Apache-2.0 */
/* chat.c -- messages as prompts: the template, and records with "messages". */
#include "generate/chat.h"

#include <string.h>

#include "base/mem.h"
#include "generate/chat_impl.h"

void generate_check_chat(void)
{
    bool talk = opt.chat.talk;
    const struct {
        bool wrong;
        const char *option, *why;
    } all[] = {
        { opt.prompt.n, "-p", "a talk reads standard input" },
        { tool.argc > 1, "FILE", "a talk reads standard input" },
        { tool.json, "--json", "a talk is text" },
        { opt.samples > 1, "--n", "a talk has one answer at a time" },
        { opt.serve.batch, "--serve-batch", "a talk is one text" },
        { opt.cache.save || opt.cache.load, "--save-cache and --load-cache",
          "a talk has its own cache" },
    };

    for (size_t i = 0; talk && i < sizeof all / sizeof *all; i++)
        if (all[i].wrong)
            lm_misuse(&tool, all[i].option, "leave it out", "cannot be combined with --chat: %s",
                      all[i].why);
    if (opt.chat.system && !talk)
        lm_misuse(&tool, "--system", "add --chat, or write a message of the system",
                  "has a meaning with --chat only");
    if ((opt.chat.template || opt.chat.vars) && opt.prompt.n)
        lm_misuse(&tool, opt.chat.template ? "--chat-template" : "--template-vars", "leave it out",
                  "cannot be combined with -p: its text is the prompt");
}

static lm_code read_vars(generate_chat *chat, lm_err *e)
{
    lm_code rc = opt.chat.vars ? lm_json_parse(opt.chat.vars, strlen(opt.chat.vars),
                                               "--template-vars", &chat->vars, e)
                               : LM_OK;

    if (!rc && chat->vars && !json_is_object(chat->vars))
        rc = lm_fail(e, LM_EUSAGE, "--template-vars", "write {\"NAME\": VALUE}",
                     "is not a JSON object");
    if (rc)
        e->code = LM_EUSAGE;
    return rc ? LM_EUSAGE : LM_OK;
}

/* What stands behind the text of an answer; nothing if the template has no such answer. */
static void find_close(generate_chat *chat, lm_buf *out)
{
    static const char answer[] = "Q7f";
    json_t *messages = json_pack("[{s:s,s:s},{s:s,s:s}]", "role", "user", "content", "Hi.", "role",
                                 "assistant", "content", answer);
    const lm_chat_request q = { .messages = messages, .vars = chat->vars };
    lm_text_spans spans = { 0 };
    lm_buf text = { 0 };
    lm_err ignored = { 0 };
    const char *p;

    if (!lm_chat_render_marked(chat->form, &q, LM_CHAT_ASSISTANT, &text, &spans, &ignored) &&
        spans.n) {
        const lm_text_span *s = &spans.v[spans.n - 1];

        p = memmem(text.data + s->from, s->to - s->from, answer, sizeof answer - 1);
        if (p)
            (void)lm_buf_add(out, p + sizeof answer - 1,
                             (size_t)(text.data + s->to - p) - (sizeof answer - 1), &ignored);
    }
    lm_text_spans_fini(&spans);
    lm_buf_fini(&text);
    json_decref(messages);
}

/* The special token at the beginning of what closes an answer, behind white space; -1 without one. */
static lm_code find_end(generate_work *w, lm_err *e)
{
    lm_buf close = { 0 };
    lm_ids ids = { 0 };
    size_t at = 0;
    lm_code rc = LM_OK;

    find_close(w->chat, &close);
    while (at < close.len && strchr(" \n", close.data[at]))
        at++;
    if (at < close.len)
        rc = lm_tokenizer_encode(w->tok, w->scratch, close.data + at, close.len - at, false, &ids,
                                 e);
    if (!rc && ids.n && !lm_tokenizer_id_bytes(w->tok, ids.v[0]))
        w->chat->end = ids.v[0];
    lm_ids_fini(&ids);
    lm_buf_fini(&close);
    return rc;
}

lm_code generate_open_chat(generate_work *w, lm_err *e)
{
    bool needed = opt.chat.talk || opt.chat.template || opt.chat.vars;
    generate_chat *chat = NULL;
    lm_code rc;

    if (!needed && !w->in)
        return LM_OK;
    rc = lm_alloc_n(&chat, 1, sizeof *chat, "a chat", e);
    if (rc)
        return rc;
    w->chat = chat;
    chat->end = -1;
    rc = read_vars(chat, e);
    if (!needed &&
        !lm_model_source_random(w->model.src)) { /* its other files may follow the weights */
        lm_fail(&chat->why, LM_EUSAGE, lm_model_source_path(w->model.src),
                "name one by --chat-template",
                "the template of a model that is a stream is read only on request");
        return rc;
    }
    if (!rc && lm_chat_open(w->model.src, w->tok, opt.chat.template, &chat->form, &chat->why))
        chat->form = NULL;
    if (!rc && !chat->form && needed) {
        *e = chat->why;
        rc = e->code;
    }
    if (!rc && chat->form)
        rc = find_end(w, e);
    return rc || !opt.chat.talk ? rc : generate_begin_talk(w, e);
}

void generate_close_chat(generate_work *w)
{
    generate_chat *chat = w->chat;

    if (!chat)
        return;
    lm_chat_free(chat->form);
    json_decref(chat->vars);
    json_decref(chat->messages);
    lm_ids_fini(&chat->held);
    lm_buf_fini(&chat->line);
    lm_free(chat->ends);
    lm_free(chat);
    w->chat = NULL;
}

lm_code generate_chat_ends(generate_work *w, const int64_t **ids, int *n, lm_err *e)
{
    generate_chat *chat = w->chat;
    lm_code rc;

    for (int i = 0; i < *n; i++)
        if ((*ids)[i] == chat->end)
            return LM_OK;
    if (chat->end < 0)
        return LM_OK;
    rc = lm_alloc_n(&chat->ends, (size_t)*n + 1, sizeof *chat->ends, "ids that end a text", e);
    if (rc)
        return rc;
    memcpy(chat->ends, *ids, (size_t)*n * sizeof **ids);
    chat->ends[*n] = chat->end;
    *ids = chat->ends;
    ++*n;
    return LM_OK;
}

lm_code generate_chat_encode(generate_work *w, const lm_chat_request *q, lm_ids *ids, lm_err *e)
{
    lm_buf text = { 0 };
    size_t before;
    lm_code rc = generate_add_virtual(w, ids, e);

    before = ids->n;
    if (!rc)
        rc = lm_chat_render(w->chat->form, q, &text, e);
    if (!rc)
        rc = lm_tokenizer_encode(w->tok, w->scratch, text.data ? text.data : "", text.len, false,
                                 ids, e);
    lm_buf_fini(&text);
    if (!rc && ids->n == before)
        rc = lm_fail(e, LM_EFORMAT, "chat template", NULL, "the template made an empty prompt");
    return rc;
}

/* A list of the record, or NULL; another type fails. */
static lm_code read_list(const json_t *record, const char *key, const char *where,
                         const json_t **out, lm_err *e)
{
    *out = json_object_get(record, key);
    if (json_is_null(*out))
        *out = NULL;
    if (*out && !json_is_array(*out))
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"%s\" is not a list", key);
    return LM_OK;
}

lm_code generate_chat_record(generate_work *w, const char *line, size_t len, const char *where,
                             lm_ids *ids, lm_err *e)
{
    lm_chat_request q = { 0 };
    json_t *record = NULL, *vars = NULL;
    const json_t *own;
    lm_code rc = LM_OK;

    if (!w->chat->form) {
        *e = w->chat->why;
        return e->code;
    }
    rc = lm_json_parse(line, len, where, &record, e);
    if (!rc)
        rc = read_list(record, "tools", where, &q.tools, e);
    if (!rc)
        rc = read_list(record, "documents", where, &q.documents, e);
    q.messages = json_object_get(record, "messages");
    q.continue_final = json_is_true(json_object_get(record, "continue_final_message"));
    q.add_generation_prompt = !q.continue_final;
    q.vars = w->chat->vars;
    own = json_object_get(record, "chat_template_kwargs");
    if (!rc && json_is_object(own)) {
        vars = w->chat->vars ? json_copy(w->chat->vars) : json_object();
        if (json_object_update(vars, (json_t *)(uintptr_t)own))
            rc = lm_fail(e, LM_ELIMIT, "memory", NULL, "the variables of a template");
        q.vars = vars;
    }
    if (!rc && generate_chat_encode(w, &q, ids, e)) {
        lm_err_in(e, "%s", where);
        rc = e->code;
    }
    json_decref(vars);
    json_decref(record);
    return rc;
}
