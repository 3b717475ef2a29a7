/* SPDX-License-Identifier: Apache-2.0 */
/* talk.c -- generate --chat: lines in, answers out, with what was said before.
 *
 * Each line is one run of lm_complete_run over the whole conversation, rendered by the template.  The cache keeps the
 * tokens of the run before: as far as the new prompt begins with them, they are not computed again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "generate/cache.h"
#include "generate/chat.h"
#include "generate/chat_impl.h"

static lm_code append_message(generate_chat *chat, const char *role, const char *text, size_t len,
                              lm_err *e)
{
    json_t *message = json_object();

    if (json_object_set_new(message, "role", json_string(role)) ||
        json_object_set_new(message, "content", json_stringn(text, len)) ||
        json_array_append_new(chat->messages, message))
        return lm_fail(e, LM_ELIMIT, "memory", NULL, "the messages of a chat");
    return LM_OK;
}

/* Forget everything but the system's text. */
static lm_code restart(generate_chat *chat, lm_err *e)
{
    chat->asked = false;
    if (json_array_clear(chat->messages))
        return lm_fail(e, LM_ELIMIT, "memory", NULL, "the messages of a chat");
    return opt.chat.system && *opt.chat.system
               ? append_message(chat, "system", opt.chat.system, strlen(opt.chat.system), e)
               : LM_OK;
}

lm_code generate_begin_talk(generate_work *w, lm_err *e)
{
    generate_chat *chat = w->chat;

    opt.echo = false;
    chat->messages = json_array();
    if (opt.chat.system &&
        lm_utf8_valid(opt.chat.system, strlen(opt.chat.system)) < strlen(opt.chat.system))
        return lm_fail(e, LM_EUSAGE, "--system", NULL, "the text is not UTF-8");
    return chat->messages ? restart(chat, e)
                          : lm_fail(e, LM_ELIMIT, "memory", NULL, "the messages of a chat");
}

/* ---- Lines ---- */

/* One line of standard input into chat->line; a backslash at its end continues it.  *got = false: the end. */
static lm_code read_line(generate_chat *chat, bool terminal, bool *got, lm_err *e)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    bool more = true;
    lm_code rc = LM_OK;

    chat->line.len = 0;
    *got = false;
    while (!rc && more) {
        if (terminal && fputs(*got ? ". " : "> ", stderr) >= 0)
            fflush(stderr);
        n = getline(&line, &cap, stdin);
        if (n < 0)
            break;
        *got = true;
        while (n && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            n--;
        more = n && line[n - 1] == '\\';
        if (more)
            line[n - 1] = '\n';
        rc = lm_buf_add(&chat->line, line, (size_t)n, e);
    }
    if (!rc && ferror(stdin) && !lm_stopping())
        rc = lm_fail(e, LM_EIO, "standard input", NULL, "cannot read");
    free(line); /* getline's */
    return rc;
}

static bool is_command(const lm_buf *line, const char *name, const char **rest)
{
    size_t n = strlen(name);

    if (line->len < n || memcmp(line->data, name, n) != 0 ||
        (line->len > n && line->data[n] != ' '))
        return false;
    *rest = line->len > n ? line->data + n + 1 : "";
    return true;
}

/* The talk goes on with the adapter of that name; without a name, with the model alone. */
static lm_code change_adapter(generate_work *w, const char *name, lm_err *e)
{
    lm_err bad = { 0 };

    if (generate_want_adapter(w, name, strlen(name), &bad)) {
        lm_say(&tool, LM_LOG_WARN, "/adapter: %s: %s", bad.what, bad.todo);
        return LM_OK;
    }
    w->chat->held.n = 0; /* the caches of the other generator have older text */
    return generate_is_other(w) ? generate_turn_to(w, e) : LM_OK;
}

/* Obey a line that begins with "/"; *done: it was one. */
static lm_code obey(generate_work *w, bool *done, lm_err *e)
{
    generate_chat *chat = w->chat;
    static char *system; /* of /system, until the next one */
    const char *rest;

    *done = true;
    if (is_command(&chat->line, "/reset", &rest))
        return restart(chat, e);
    if (is_command(&chat->line, "/system", &rest)) {
        char *text = NULL;
        lm_code rc = lm_strdup(&text, rest, e);

        if (rc)
            return rc;
        opt.chat.system = text;
        lm_free(system);
        system = text;
        return restart(chat, e);
    }
    if (is_command(&chat->line, "/adapter", &rest))
        return change_adapter(w, rest, e);
    *done = chat->line.data[0] == '/' && chat->line.len > 1 && chat->line.data[1] != '/';
    if (*done)
        lm_say(&tool, LM_LOG_WARN,
               "%.40s: the commands are /reset, /system TEXT and /adapter NAME; begin with // for "
               "a text "
               "that begins with /",
               chat->line.data);
    return LM_OK;
}

/* ---- One answer ---- */

lm_code generate_chat_next(generate_work *w, lm_completion *c, bool *got, lm_err *e)
{
    const lm_chat_request q = { .messages = w->chat->messages,
                                .vars = w->chat->vars,
                                .add_generation_prompt = true };

    *got = w->chat->asked;
    w->chat->asked = false;
    return *got ? generate_chat_encode(w, &q, &c->ids, e) : LM_OK;
}

lm_code generate_chat_begin(void *ctx, lm_generator *g, int64_t slot, const uint32_t *ids,
                            int64_t n, lm_err *e)
{
    generate_work *w = ctx;
    const lm_ids *held = &w->chat->held;
    int64_t used = lm_generator_used(g, slot);
    bool policy = w->caches.plan && w->caches.plan->policy;

    if (policy || used < 1 || used >= n || (size_t)used > held->n ||
        memcmp(held->v, ids, (size_t)used * sizeof *ids) != 0)
        return lm_generator_prompt(g, slot, ids, n, NULL, e);
    w->st.prompt_tokens -= used;
    return lm_generator_extend(g, slot, ids + used, n - used, NULL, e);
}

lm_code generate_chat_keep(generate_work *w, const lm_completion *c, lm_err *e)
{
    generate_chat *chat = w->chat;
    lm_code rc;

    chat->held.n = 0;
    rc = lm_grow(&chat->held.v, &chat->held.cap, c->ids.n, sizeof *chat->held.v, "tokens", e);
    if (rc)
        return rc;
    memcpy(chat->held.v, c->ids.v, c->ids.n * sizeof *chat->held.v);
    chat->held.n = c->ids.n;
    return append_message(chat, "assistant", c->text.data ? c->text.data : "", c->text.len, e);
}

/* A prompt that the template refuses, or that does not fit, is reported; the talk goes on without its line. */
static lm_code answer(generate_work *w, const lm_complete_opts *o, const lm_complete_hooks *h,
                      lm_err *e)
{
    generate_chat *chat = w->chat;
    lm_ids ids = { 0 };
    lm_err bad = { 0 };
    size_t skip = chat->line.len > 1 && chat->line.data[0] == '/';
    lm_code rc = append_message(chat, "user", chat->line.data + skip, chat->line.len - skip, e);
    const lm_chat_request q = { .messages = chat->messages,
                                .vars = chat->vars,
                                .add_generation_prompt = true };

    if (rc)
        return rc;
    rc = generate_chat_encode(w, &q, &ids, &bad);
    if (!rc && (int64_t)ids.n >= w->context)
        rc = lm_fail(&bad, LM_EUSAGE, "chat", "write /reset, or start with a larger --context",
                     "the talk has %zu tokens, the context holds %lld", ids.n,
                     (long long)w->context);
    lm_ids_fini(&ids);
    if (rc) {
        json_array_remove(chat->messages, json_array_size(chat->messages) - 1);
        bad.code = LM_EFORMAT; /* status 1 */
        lm_complain(&tool, &bad);
        return LM_OK;
    }
    chat->asked = true;
    return lm_complete_run(w->gen, w->tok, o, h, &w->st, e);
}

lm_code generate_talk(generate_work *w, const lm_complete_opts *o, const lm_complete_hooks *h,
                      lm_err *e)
{
    bool terminal = isatty(STDIN_FILENO), got = true, command;
    lm_complete_opts turn = *o;
    lm_code rc = LM_OK;

    while (!rc && !lm_stopping()) {
        rc = read_line(w->chat, terminal, &got, e);
        if (rc || !got || lm_stopping())
            break;
        if (!w->chat->line.len)
            continue;
        if (lm_utf8_valid(w->chat->line.data, w->chat->line.len) < w->chat->line.len) {
            lm_say(&tool, LM_LOG_WARN, "the line is not UTF-8, and was skipped");
            continue;
        }
        rc = obey(w, &command, e);
        if (!rc && !command)
            rc = answer(w, &turn, h, e);
        turn.seed++; /* the same question draws another answer */
    }
    if (!rc && terminal && !got)
        fputc('\n', stderr);
    return rc;
}
