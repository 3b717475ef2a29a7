/* SPDX-License-Identifier: Apache-2.0 */
/* example.c -- records to ids and loss marks. */
#include "text/example.h"

#include <string.h>

#include "base/mem.h"
#include "text/example_impl.h"

const char *const lm_loss_on_names[] = { "auto", "all", "assistant", "last", "completion", NULL };
const char *const lm_cut_names[] = { "start", "end", "drop", NULL };

void lm_text_example_fini(lm_text_example *x)
{
    lm_ids_fini(&x->ids);
    lm_buf_fini(&x->marks);
    *x = (lm_text_example){ 0 };
}

/* The special ids of an empty text, except for one that ends it. */
static lm_code read_lead(const lm_text_example_maker *m, lm_text_example_scratch *s, lm_err *e)
{
    int64_t eos = lm_tokenizer_eos(m->tok), bos = lm_tokenizer_bos(m->tok);
    if (lm_tokenizer_encode(m->tok, s->tok, "", 0, true, &s->lead, e))
        return e->code;
    if (s->lead.n && s->lead.v[s->lead.n - 1] == eos && (eos != bos || s->lead.n > 1))
        s->lead.n--;
    return LM_OK;
}

lm_code lm_text_example_scratch_new(const lm_text_example_maker *m, lm_text_example_scratch **out,
                                    lm_err *e)
{
    lm_text_example_scratch *s = NULL;
    lm_code rc = lm_alloc_n(&s, 1, sizeof *s, "scratch", e);
    rc = rc ? rc : lm_tok_scratch_new(m->tok, &s->tok, e);
    rc = rc ? rc : read_lead(m, s, e);
    if (rc)
        lm_text_example_scratch_free(s);
    *out = rc ? NULL : s;
    return rc;
}

void lm_text_example_scratch_free(lm_text_example_scratch *s)
{
    if (!s)
        return;
    lm_tok_scratch_free(s->tok);
    lm_ids_fini(&s->lead);
    lm_buf_fini(&s->text);
    lm_buf_fini(&s->before);
    lm_text_spans_fini(&s->spans);
    lm_free(s);
}

/* ---- ids ---- */

lm_code example_add_ids(lm_text_example *x, const uint32_t *ids, size_t n, uint8_t trains,
                        lm_err *e)
{
    if (lm_grow(&x->ids.v, &x->ids.cap, x->ids.n + n, sizeof *ids, "token ids", e) ||
        lm_buf_room(&x->marks, n, e))
        return e->code;
    memcpy(x->ids.v + x->ids.n, ids, n * sizeof *ids);
    memset(x->marks.data + x->marks.len, trains, n);
    x->ids.n += n;
    x->marks.len += n;
    return LM_OK;
}

lm_code example_add_virtual(const lm_text_example_maker *m, lm_text_example *x, lm_err *e)
{
    for (int64_t i = 0; i < m->virtuals; i++) {
        const uint32_t id = (uint32_t)(m->virtual_first + i);
        if (example_add_ids(x, &id, 1, 0, e))
            return e->code;
    }
    return LM_OK;
}

/* s->text as ids; marked: which of its bytes train (NULL: all).  plain: with what begins and ends a
 * text that no template made. */
static lm_code encode(const lm_text_example_maker *m, lm_text_example_scratch *s,
                      const lm_text_spans *marked, bool plain, lm_text_example *x, lm_err *e)
{
    x->ids.n = x->marks.len = 0;
    if (example_add_virtual(m, x, e))
        return e->code;
    if (plain && s->lead.n && example_add_ids(x, s->lead.v, s->lead.n, !marked, e))
        return e->code;
    if (lm_chat_encode(m->tok, s->tok, s->text.data ? s->text.data : "", s->text.len, marked,
                       &x->ids, &x->marks, e))
        return e->code;
    uint32_t eos = (uint32_t)m->eos;
    return plain && m->eos >= 0 ? example_add_ids(x, &eos, 1, 1, e) : LM_OK;
}

static size_t first_marked(const lm_text_example *x)
{
    size_t i = 0;
    while (i < x->ids.n && !x->marks.data[i])
        i++;
    return i;
}

void example_count_trained(lm_text_example *x)
{
    x->trains = (const uint8_t *)x->marks.data;
    x->trained = 0;
    for (size_t i = 0; i < x->ids.n; i++)
        x->trained += x->trains[i];
}

/* Shorten the example and count what trains. */
static void finish(const lm_text_example_maker *m, lm_text_example *x)
{
    size_t n = x->ids.n, most = (size_t)m->most;
    x->cut = 0;
    x->dropped = false;
    if (m->most > 0 && n > most) {
        size_t from = m->cut == LM_CUT_END ? n - most : 0;
        size_t kept = (size_t)m->virtuals < most ? (size_t)m->virtuals : most; /* stay in front */
        x->dropped = m->cut == LM_CUT_DROP;
        x->ids.n = x->dropped ? 0 : most;
        x->cut = n - x->ids.n;
        memmove(x->ids.v + kept, x->ids.v + kept + from, (most - kept) * sizeof *x->ids.v);
        memmove(x->marks.data + kept, x->marks.data + kept + from, most - kept);
        x->prompt = x->prompt > from ? x->prompt - from : 0;
        if (x->prompt > x->ids.n)
            x->prompt = x->ids.n;
    }
    x->marks.len = x->ids.n;
    if (m->unseen && x->ids.n > (size_t)m->virtuals)
        x->marks.data[m->virtuals] = 0;
    example_count_trained(x);
}

/* ---- texts ---- */

static lm_code set_text(lm_buf *b, const json_t *a, const json_t *more, lm_err *e)
{
    b->len = 0;
    lm_code rc = lm_buf_add(b, json_string_value(a), json_string_length(a), e);
    if (!rc && more)
        rc = lm_buf_add(b, json_string_value(more), json_string_length(more), e);
    return rc;
}

/* A prompt and what follows it, both texts.  NULL: nothing follows, and nothing ends the text. */
static lm_code make_plain(const lm_text_example_maker *m, lm_text_example_scratch *s,
                          const json_t *prompt, const json_t *answer, lm_text_example *x, lm_err *e)
{
    size_t n = json_string_length(prompt);
    lm_text_example_maker open = *m;
    if (set_text(&s->text, prompt, answer, e))
        return e->code;
    if (!answer)
        open.eos = -1;
    s->spans.n = 0;
    if ((answer && s->text.len > n && lm_text_spans_add(&s->spans, n, s->text.len, e)) ||
        encode(&open, s, &s->spans, true, x, e))
        return e->code;
    x->prompt = first_marked(x);
    return LM_OK;
}

/* ---- messages ---- */

static lm_code need_template(const lm_text_example_maker *m, lm_err *e)
{
    return m->chat ? LM_OK
                   : lm_fail(e, LM_EUSAGE, "messages", "choose a chat template",
                             "records with messages need a chat template");
}

static lm_chat_request request(const lm_text_record *r, const json_t *messages)
{
    return (lm_chat_request){ .messages = messages, .tools = r->tools, .vars = r->variables };
}

/* A list of messages, of which the assistant's train. */
static lm_code make_turns(const lm_text_example_maker *m, lm_text_example_scratch *s,
                          const lm_text_record *r, const json_t *messages, lm_chat_turns turns,
                          lm_text_example *x, lm_err *e)
{
    lm_chat_request q = request(r, messages);
    s->text.len = s->spans.n = 0;
    if (need_template(m, e) || lm_chat_render_marked(m->chat, &q, turns, &s->text, &s->spans, e) ||
        encode(m, s, &s->spans, false, x, e))
        return e->code;
    x->prompt = first_marked(x);
    return LM_OK;
}

/* All of the messages train. */
static lm_code make_all(const lm_text_example_maker *m, lm_text_example_scratch *s,
                        const lm_text_record *r, const json_t *messages, lm_text_example *x,
                        lm_err *e)
{
    lm_chat_request q = request(r, messages);
    s->text.len = 0;
    if (need_template(m, e) || lm_chat_render(m->chat, &q, &s->text, e) ||
        encode(m, s, NULL, false, x, e))
        return e->code;
    x->prompt = 0;
    return LM_OK;
}

static lm_code join_lists(const json_t *a, const json_t *b, json_t **out, lm_err *e)
{
    *out = json_copy((json_t *)a);
    return *out && !json_array_extend(*out, (json_t *)b)
               ? LM_OK
               : lm_fail(e, LM_ELIMIT, "messages", NULL, "no memory");
}

lm_code example_render_reply(const lm_text_example_maker *m, lm_text_example_scratch *s,
                             const lm_text_record *r, const json_t *prompt, const json_t *answer,
                             json_t **all, bool *follows, lm_err *e)
{
    lm_chat_request q = request(r, prompt);
    q.add_generation_prompt = true;
    *all = NULL;
    s->before.len = s->text.len = s->spans.n = 0;
    if (need_template(m, e) || lm_chat_render(m->chat, &q, &s->before, e) ||
        join_lists(prompt, answer, all, e))
        return e->code;
    q = request(r, *all);
    if (lm_chat_render(m->chat, &q, &s->text, e))
        return e->code;
    const size_t n = s->before.len;
    *follows = n < s->text.len && !memcmp(s->text.data, s->before.data, n);
    return LM_OK;
}

/* Prompt and answer, both messages: what the rendered prompt, ended by the header of an answer,
 * does not have.  When the template renders the prompt differently in front of the answer, the
 * assistant's last turn is what the template says it is. */
static lm_code make_reply(const lm_text_example_maker *m, lm_text_example_scratch *s,
                          const lm_text_record *r, const json_t *prompt, const json_t *answer,
                          lm_text_example *x, lm_err *e)
{
    json_t *all = NULL;
    bool follows = false;
    lm_code rc = example_render_reply(m, s, r, prompt, answer, &all, &follows, e);
    if (!rc && follows) {
        rc = lm_text_spans_add(&s->spans, s->before.len, s->text.len, e);
        rc = rc ? rc : encode(m, s, &s->spans, false, x, e);
        x->prompt = rc ? 0 : first_marked(x);
    } else if (!rc) {
        rc = make_turns(m, s, r, all, LM_CHAT_LAST, x, e);
    }
    json_decref(all);
    return rc;
}

/* ---- records ---- */

lm_code example_wrap(const lm_text_example_maker *m, const char *role, const json_t *v,
                     json_t **out, lm_err *e)
{
    *out = m->wrap && m->chat && json_is_string(v)
               ? json_pack("[{s:s,s:O}]", "role", role, "content", v)
               : json_incref((json_t *)v);
    return *out || !v ? LM_OK : lm_fail(e, LM_ELIMIT, "messages", NULL, "no memory");
}

static lm_code reply(const lm_text_example_maker *m, lm_text_example_scratch *s,
                     const lm_text_record *r, const json_t *prompt, const json_t *answer,
                     lm_loss_on on, lm_text_example *x, lm_err *e)
{
    json_t *all = NULL;
    lm_code rc;
    if (json_is_string(prompt)) {
        rc = make_plain(m, s, prompt, answer, x, e);
        if (!rc && on == LM_LOSS_ALL)
            memset(x->marks.data, 1, x->ids.n);
        return rc;
    }
    if (on == LM_LOSS_AUTO || on == LM_LOSS_COMPLETION)
        return make_reply(m, s, r, prompt, answer, x, e);
    rc = join_lists(prompt, answer, &all, e);
    if (!rc)
        rc = on == LM_LOSS_ALL
                 ? make_all(m, s, r, all, x, e)
                 : make_turns(m, s, r, all, on == LM_LOSS_LAST ? LM_CHAT_LAST : LM_CHAT_ASSISTANT,
                              x, e);
    json_decref(all);
    return rc;
}

static lm_code answer_of(const lm_text_example_maker *m, lm_text_example_scratch *s,
                         const lm_text_record *r, const json_t *answer, lm_loss_on on,
                         lm_text_example *x, lm_err *e)
{
    json_t *a = NULL, *b = NULL;
    lm_code rc = example_wrap(m, "user", r->prompt, &a, e);
    rc = rc ? rc : example_wrap(m, "assistant", answer, &b, e);
    rc = rc ? rc : reply(m, s, r, a, b, on, x, e);
    json_decref(a);
    json_decref(b);
    if (!rc)
        finish(m, x);
    return rc;
}

lm_code lm_text_example_answer(const lm_text_example_maker *m, lm_text_example_scratch *s,
                               const lm_text_record *r, const json_t *answer, lm_text_example *out,
                               lm_err *e)
{
    return answer_of(m, s, r, answer, LM_LOSS_COMPLETION, out, e);
}

static lm_code make_text(const lm_text_example_maker *m, lm_text_example_scratch *s,
                         const lm_text_record *r, lm_text_example *x, lm_err *e)
{
    if (m->loss_on != LM_LOSS_AUTO && m->loss_on != LM_LOSS_ALL)
        return lm_fail(e, LM_EUSAGE, "text", "train on all of it",
                       "a plain text has no turns that could be chosen");
    if (set_text(&s->text, r->text, NULL, e) || encode(m, s, NULL, true, x, e))
        return e->code;
    x->prompt = 0;
    finish(m, x);
    return LM_OK;
}

static lm_code make_messages(const lm_text_example_maker *m, lm_text_example_scratch *s,
                             const lm_text_record *r, lm_text_example *x, lm_err *e)
{
    bool all = m->loss_on == LM_LOSS_ALL,
         last = m->loss_on == LM_LOSS_LAST || m->loss_on == LM_LOSS_COMPLETION;
    lm_code rc =
        all ? make_all(m, s, r, r->messages, x, e)
            : make_turns(m, s, r, r->messages, last ? LM_CHAT_LAST : LM_CHAT_ASSISTANT, x, e);
    if (!rc)
        finish(m, x);
    return rc;
}

lm_code example_join_steps(const lm_text_record *r, json_t **out, lm_err *e)
{
    lm_buf b = { 0 };
    size_t i;
    json_t *step;
    lm_code rc = LM_OK;
    json_array_foreach(r->steps, i, step) if (!rc) rc =
        lm_buf_addf(&b, e, "%s%s", i ? "\n" : "", json_string_value(step));
    *out = rc ? NULL : json_stringn(b.data ? b.data : "", b.len);
    lm_buf_fini(&b);
    return rc || *out ? rc : lm_fail(e, LM_ELIMIT, "steps", NULL, "no memory");
}

lm_code lm_text_example_make(const lm_text_example_maker *m, lm_text_example_scratch *s,
                             const lm_text_record *r, lm_text_example *out, lm_err *e)
{
    json_t *steps = NULL;
    lm_code rc;
    if (m->pair)
        return example_make_pair(m, s, r, out, e);
    switch (r->kind) {
    case LM_RECORD_TEXT:
        return make_text(m, s, r, out, e);
    case LM_RECORD_MESSAGES:
        return make_messages(m, s, r, out, e);
    case LM_RECORD_COMPLETION:
    case LM_RECORD_UNPAIRED:
        return answer_of(m, s, r, r->completion, m->loss_on, out, e);
    case LM_RECORD_STEPWISE:
        rc = example_join_steps(r, &steps, e);
        rc = rc ? rc : answer_of(m, s, r, steps, m->loss_on, out, e);
        json_decref(steps);
        return rc;
    default:
        return lm_fail(e, LM_EUSAGE, "records", "give messages, prompt and completion, or text",
                       "records of kind %s have no answer to train on",
                       lm_text_record_kind_name(r->kind));
    }
}

int64_t example_last_answer(const json_t *messages)
{
    size_t n = json_array_size(messages);
    while (n && strcmp(json_string_value(json_object_get(json_array_get(messages, n - 1), "role")),
                       "assistant") != 0)
        n--;
    return (int64_t)n - 1;
}

/* The messages before the assistant's last turn. */
static lm_code before_last(const json_t *messages, json_t **out, lm_err *e)
{
    const int64_t last = example_last_answer(messages);
    const size_t n = last < 0 ? json_array_size(messages) : (size_t)last;
    *out = json_array();
    for (size_t i = 0; *out && i < n; i++)
        json_array_append(*out, json_array_get(messages, i));
    if (!*out)
        return lm_fail(e, LM_ELIMIT, "messages", NULL, "no memory");
    return n ? LM_OK
             : lm_fail(e, LM_EFORMAT, "messages", "begin with a user's message",
                       "no message before the assistant's");
}

lm_code lm_text_example_asked(const lm_text_record *r, json_t **out, lm_err *e)
{
    *out = NULL;
    if (r->messages)
        return before_last(r->messages, out, e);
    *out = json_incref(r->kind == LM_RECORD_TEXT ? r->text : r->prompt);
    return LM_OK;
}

lm_code lm_text_example_prompt(const lm_text_example_maker *m, lm_text_example_scratch *s,
                               const lm_text_record *r, lm_text_example *out, lm_err *e)
{
    json_t *prompt = NULL;
    lm_code rc = r->messages || r->kind == LM_RECORD_TEXT
                     ? lm_text_example_asked(r, &prompt, e)
                     : example_wrap(m, "user", r->prompt, &prompt, e);
    if (!rc && json_is_string(prompt)) {
        rc = make_plain(m, s, prompt, NULL, out, e);
    } else if (!rc) {
        lm_chat_request q = request(r, prompt);
        q.add_generation_prompt = true;
        s->text.len = s->spans.n = 0;
        rc = need_template(m, e);
        rc = rc ? rc : lm_chat_render(m->chat, &q, &s->text, e);
        rc = rc ? rc : encode(m, s, &s->spans, false, out, e);
    }
    json_decref(prompt);
    if (rc)
        return rc;
    out->prompt = out->ids.n;
    finish(m, out);
    return LM_OK;
}
