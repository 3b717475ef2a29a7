/* SPDX-License-Identifier: Apache-2.0 */
/* chat_compare.c -- the assistant's turns in the text of a template without generation blocks.
 *
 * A turn i begins behind what the messages before it give with add_generation_prompt, and ends
 * behind what the messages up to it give.  Both hold when these texts are prefixes of the whole.
 * Otherwise:
 *   begin: where the whole leaves the prompt's text, if it has the messages before it; else where
 *          the whole changes when a character is put before the turn's content;
 *   end:   the whole is rendered with a character behind the turn's content, so that the common end of both texts
 *          begins behind the content; what closes a turn is found likewise in the text that ends with it.
 *
 * The work grows with the square of the turns, and is limited. */
#include <string.h>

#include "text/chat_impl.h"

/* A private-use character that no text has and no template strips. */
static const char probe[] = "\xEF\xA3\xBF"; /* U+F8FF */

/* Messages that are rendered for one conversation: their number grows with the square of its
 * turns.  Some seconds. */
enum { MOST_MESSAGES = 5 * 1000 * 1000 };

typedef struct {
    const lm_chat *c;
    const lm_chat_request *q;
    const char *text;
    size_t len;
    size_t *rendered; /* messages so far */
} whole;

static bool begins(const whole *w, const lm_buf *with)
{
    return with->len <= w->len && (!with->len || !memcmp(w->text, with->data, with->len));
}

static size_t common_start(const char *a, size_t n, const char *b, size_t m)
{
    size_t k = 0;

    while (k < n && k < m && a[k] == b[k])
        k++;
    while (k && k < n && ((unsigned char)a[k] & 0xC0) == 0x80) /* whole characters */
        k--;
    return k;
}

static size_t common_end(const char *a, size_t n, const char *b, size_t m)
{
    size_t k = 0;

    while (k < n && k < m && a[n - 1 - k] == b[m - 1 - k])
        k++;
    while (k && ((unsigned char)a[n - k] & 0xC0) == 0x80)
        k--;
    return k;
}

/* The text of the first n messages; false: the template refuses them. */
static bool render_first(const whole *w, const json_t *messages, size_t n, bool prompt, lm_buf *out)
{
    lm_chat_request q = *w->q;
    json_t *some = json_array();
    lm_err ignored = { 0 };
    bool ok = n > 0 && (*w->rendered += n) <= MOST_MESSAGES;

    for (size_t i = 0; ok && i < n; i++)
        ok = !json_array_append(some, json_array_get(messages, i));
    q.messages = some;
    q.add_generation_prompt = prompt;
    out->len = 0;
    ok = ok && !lm_chat_text(w->c, &q, out, NULL, &ignored);
    json_decref(some);
    return ok;
}

/* Text with the probe before or behind it. */
static json_t *with_probe(const json_t *text, bool before)
{
    lm_buf all = { 0 };
    lm_err ignored = { 0 };
    json_t *made = NULL;
    bool ok = !before || !lm_buf_add(&all, probe, sizeof probe - 1, &ignored);

    ok = ok && !lm_buf_add(&all, json_string_value(text), json_string_length(text), &ignored);
    ok = ok && (before || !lm_buf_add(&all, probe, sizeof probe - 1, &ignored));
    if (ok)
        made = json_stringn(all.data, all.len);
    lm_buf_fini(&all);
    return made;
}

/* A copy of the messages with the probe in the content of message i; NULL: it has no text. */
static json_t *probe_message(const json_t *messages, size_t i, bool before)
{
    json_t *copy = json_deep_copy(messages), *message = json_array_get(copy, i);
    json_t *content = json_object_get(message, "content"), *part;
    size_t n = json_array_size(content);
    int failed = -1;

    if (json_is_string(content)) {
        failed = json_object_set_new(message, "content", with_probe(content, before));
    } else {
        for (size_t k = 0; failed && k < n; k++) {
            part = json_array_get(content, before ? k : n - 1 - k);
            if (json_is_string(json_object_get(part, "text")))
                failed = json_object_set_new(part, "text",
                                             with_probe(json_object_get(part, "text"), before));
        }
    }
    if (!failed)
        return copy;
    json_decref(copy);
    return NULL;
}

static bool find_begin(const whole *w, size_t i, lm_buf *text, size_t *out)
{
    const json_t *messages = w->q->messages;
    size_t n = json_array_size(messages), prompt;
    json_t *probed;
    bool ok;

    if (render_first(w, messages, i, true, text)) {
        *out = prompt = common_start(w->text, w->len, text->data, text->len);
        if (prompt == text->len)
            return true;
        if (render_first(w, messages, i, false, text) && begins(w, text) && prompt > text->len) {
            *out = prompt;
            return true;
        }
    }
    probed = probe_message(messages, i, true);
    ok = probed && render_first(w, probed, n, w->q->add_generation_prompt, text) &&
         memmem(text->data, text->len, probe, sizeof probe - 1);
    if (ok)
        *out = common_start(w->text, w->len, text->data, text->len);
    json_decref(probed);
    return ok;
}

/* What closes turn i in the text that ends with it. */
static bool find_close(const whole *w, size_t i, const json_t *probed, lm_buf *text, lm_buf *close)
{
    lm_err ignored = { 0 };
    lm_buf other = { 0 };
    size_t n;
    bool ok = render_first(w, w->q->messages, i + 1, false, text) &&
              render_first(w, probed, i + 1, false, &other) &&
              memmem(other.data, other.len, probe, sizeof probe - 1);

    if (ok) {
        n = common_end(text->data, text->len, other.data, other.len);
        ok = n && !lm_buf_add(close, text->data + text->len - n, n, &ignored);
    }
    lm_buf_fini(&other);
    return ok;
}

/* Some templates end every text with eos_token: it closes the last message only. */
static void drop_last_token(const whole *w, lm_buf *close)
{
    const json_t *eos = json_object_get(w->c->tokens, "eos_token");
    size_t n = json_string_length(eos);

    if (n && close->len > n && !memcmp(close->data + close->len - n, json_string_value(eos), n))
        close->len -= n;
}

static bool closes(const whole *w, size_t rest, const lm_buf *close)
{
    return rest >= close->len && !memcmp(w->text + w->len - rest, close->data, close->len);
}

static bool find_end(const whole *w, size_t i, lm_buf *text, size_t *out)
{
    size_t n = json_array_size(w->q->messages), rest;
    lm_buf close = { 0 };
    json_t *probed;
    bool ok;

    if (render_first(w, w->q->messages, i + 1, false, text) && begins(w, text)) {
        *out = text->len;
        return true;
    }
    probed = probe_message(w->q->messages, i, false);
    ok = probed && find_close(w, i, probed, text, &close) &&
         render_first(w, probed, n, w->q->add_generation_prompt, text) &&
         memmem(text->data, text->len, probe, sizeof probe - 1);
    if (ok) {
        rest = common_end(w->text, w->len, text->data, text->len);
        if (!closes(w, rest, &close))
            drop_last_token(w, &close);
        ok = closes(w, rest, &close);
        *out = w->len - rest + close.len;
    }
    lm_buf_fini(&close);
    json_decref(probed);
    return ok;
}

static bool is_assistant(const json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));

    return role && !strcmp(role, "assistant");
}

lm_code lm_chat_compare(const lm_chat *c, const lm_chat_request *q, lm_chat_turns turns,
                        const char *text, size_t len, size_t offset, lm_text_spans *marked,
                        lm_err *e)
{
    size_t rendered = 0;
    whole w = { .c = c, .q = q, .text = text, .len = len, .rendered = &rendered };
    size_t n = json_array_size(q->messages), first = 0, before = 0;
    lm_buf other = { 0 };
    lm_code rc = LM_OK;

    for (size_t i = 0; turns == LM_CHAT_LAST && i < n; i++)
        if (is_assistant(json_array_get(q->messages, i)))
            first = i;
    for (size_t i = first; !rc && i < n; i++) {
        size_t from = 0, to = 0;

        if (!is_assistant(json_array_get(q->messages, i)))
            continue;
        if (!find_begin(&w, i, &other, &from) || !find_end(&w, i, &other, &to) || from > to ||
            from < before)
            rc = lm_fail(e, LM_EFORMAT, c->where,
                         "use a template that marks answers with {% generation %}",
                         rendered > MOST_MESSAGES
                             ? "message %zu: too many turns to find this answer by comparison"
                             : "message %zu: the text of this answer cannot be told from the rest",
                         i + 1);
        else if (to > from)
            rc = lm_text_spans_add(marked, offset + from, offset + to, e);
        before = rc ? before : to;
    }
    lm_buf_fini(&other);
    return rc;
}
