/* SPDX-License-Identifier: Apache-2.0 */
/* example_pair.c -- records as the source and the target of a model with an encoder. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "text/example_impl.h"

/* ---- the two texts ---- */

/* A side of the pair: bytes, which a template rendered or which are plain. */
typedef struct {
    const char *text;
    size_t len;
    bool rendered;
} side;

/* A text, or the only message of a list that has one from `role`. */
static bool is_plain(const json_t *v, const char *role, side *out)
{
    if (json_is_array(v) && json_array_size(v) == 1) {
        const json_t *m = json_array_get(v, 0);
        const char *of = json_string_value(json_object_get(m, "role"));
        v = of && !strcmp(of, role) ? json_object_get(m, "content") : NULL;
    }
    *out = (side){ json_string_value(v), json_string_length(v), false };
    return json_is_string(v);
}

/* What stands before the last marked turn of s->text, and the turn. */
static lm_code part_by_turn(const lm_text_example_maker *m, lm_text_example_scratch *s,
                            const lm_text_record *r, const json_t *all, side *source, side *target,
                            lm_err *e)
{
    const lm_chat_request q = { .messages = all, .tools = r->tools, .vars = r->variables };
    s->text.len = s->spans.n = 0;
    if (lm_chat_render_marked(m->chat, &q, LM_CHAT_LAST, &s->text, &s->spans, e))
        return e->code;
    if (!s->spans.n)
        return lm_fail(e, LM_EFORMAT, "messages", "choose another chat template",
                       "the template renders no answer");
    const lm_text_span *last = &s->spans.v[s->spans.n - 1];
    *source = (side){ s->text.data, last->from, true };
    *target = (side){ s->text.data + last->from, last->to - last->from, true };
    return LM_OK;
}

static lm_code render(const lm_text_example_maker *m, lm_text_example_scratch *s,
                      const lm_text_record *r, const json_t *prompt, const json_t *answer,
                      side *source, side *target, lm_err *e)
{
    json_t *all = NULL;
    bool follows = false;
    if (!m->chat)
        return lm_fail(
            e, LM_EUSAGE, "messages", "choose a chat template",
            "records with tools, or other messages than one and its answer, need a chat template");
    lm_code rc = example_render_reply(m, s, r, prompt, answer, &all, &follows, e);
    if (!rc && follows) {
        const size_t n = s->before.len;
        *source = (side){ s->text.data, n, true };
        *target = (side){ s->text.data + n, s->text.len - n, true };
    } else if (!rc) {
        rc = part_by_turn(m, s, r, all, source, target, e);
    }
    json_decref(all);
    return rc;
}

/* ---- their ids ---- */

static lm_code end_text(const lm_text_example_maker *m, lm_text_example *x, size_t from,
                        uint8_t trains, lm_err *e)
{
    const uint32_t eos = (uint32_t)m->eos;
    if (x->ids.n > from && x->ids.v[x->ids.n - 1] == eos)
        return LM_OK;
    return example_add_ids(x, &eos, 1, trains, e);
}

/* Remove ids of the text that begins at `from` so that `most` remain, its last one among them. */
static void shorten(const lm_text_example_maker *m, lm_text_example *x, size_t from, size_t most)
{
    const size_t n = x->ids.n - from, more = n > most ? n - most : 0;
    const size_t at = m->cut == LM_CUT_END ? from : from + most - 1;
    if (!more)
        return;
    memmove(x->ids.v + at, x->ids.v + at + more, (x->ids.n - at - more) * sizeof *x->ids.v);
    memmove(x->marks.data + at, x->marks.data + at + more, x->ids.n - at - more);
    x->ids.n -= more;
    x->marks.len -= more;
    x->cut += more;
}

/* Append the ids of a side, behind virtual tokens where this side has them; most 0: any number. */
static lm_code add_side(const lm_text_example_maker *m, lm_text_example_scratch *s, const side *t,
                        uint8_t trains, int64_t most, lm_text_example *x, lm_err *e)
{
    const int64_t virtuals = m->unseen == (trains != 0) ? m->virtuals : 0;
    const char *text = t->text ? t->text : "";
    if (most > 0 && most <= virtuals)
        return lm_fail(e, LM_EUSAGE, "virtual tokens", "use longer sequences, or fewer of them",
                       "%" PRId64 " leave no room in a %s of %" PRId64 " tokens", virtuals,
                       trains ? "target" : "source", most);
    if (virtuals && example_add_virtual(m, x, e))
        return e->code;
    const size_t from = x->ids.n;
    lm_code rc = t->rendered
                     ? lm_chat_encode(m->tok, s->tok, text, t->len, NULL, &x->ids, &x->marks, e)
                     : lm_tokenizer_encode(m->tok, s->tok, text, t->len, true, &x->ids, e);
    if (rc || lm_buf_room(&x->marks, x->ids.n - x->marks.len, e))
        return e->code;
    x->marks.len = x->ids.n;
    memset(x->marks.data + from, trains, x->ids.n - from);
    if (end_text(m, x, from, trains, e))
        return e->code;
    if (most > 0)
        shorten(m, x, from, (size_t)(most - virtuals));
    return LM_OK;
}

static lm_code make(const lm_text_example_maker *m, lm_text_example_scratch *s,
                    const lm_text_record *r, const json_t *prompt, const json_t *answer,
                    lm_text_example *x, lm_err *e)
{
    side source, target;
    const bool plain = is_plain(prompt, "user", &source), texts = json_is_string(prompt);
    const bool both = is_plain(answer, "assistant", &target) && plain && !r->tools;
    if (!(both && (texts || !m->chat)) && render(m, s, r, prompt, answer, &source, &target, e))
        return e->code;
    x->ids.n = x->marks.len = x->cut = 0;
    if (add_side(m, s, &source, 0, m->most, x, e))
        return e->code;
    x->prompt = x->ids.n;
    if (add_side(m, s, &target, 1, m->most_target, x, e))
        return e->code;
    x->dropped = m->cut == LM_CUT_DROP && x->cut > 0;
    if (x->dropped)
        x->ids.n = x->marks.len = x->prompt = 0;
    example_count_trained(x);
    return LM_OK;
}

/* ---- records ---- */

/* The answer as the record has it: a string or messages.  *out is the caller's. */
static lm_code answer_of(const lm_text_record *r, json_t **out, lm_err *e)
{
    if (r->kind == LM_RECORD_STEPWISE)
        return example_join_steps(r, out, e);
    if (r->kind != LM_RECORD_MESSAGES) {
        *out = json_incref(r->completion);
        return LM_OK;
    }
    const int64_t last = example_last_answer(r->messages);
    if (last < 0)
        return lm_fail(e, LM_EFORMAT, "messages", "end with an answer of the assistant",
                       "no message of the assistant's, which would be the target");
    *out = json_pack("[O]", json_array_get(r->messages, (size_t)last));
    return *out ? LM_OK : lm_fail(e, LM_ELIMIT, "messages", NULL, "no memory");
}

static bool has_answer(lm_text_record_kind k)
{
    return k == LM_RECORD_MESSAGES || k == LM_RECORD_COMPLETION || k == LM_RECORD_UNPAIRED ||
           k == LM_RECORD_STEPWISE;
}

lm_code example_make_pair(const lm_text_example_maker *m, lm_text_example_scratch *s,
                          const lm_text_record *r, lm_text_example *out, lm_err *e)
{
    json_t *asked = NULL, *given = NULL, *prompt = NULL, *answer = NULL;
    if (!has_answer(r->kind))
        return lm_fail(e, LM_EUSAGE, "records", "give prompt and completion, or messages",
                       "records of kind %s have no target beside a source",
                       lm_text_record_kind_name(r->kind));
    lm_code rc = answer_of(r, &given, e);
    rc = rc ? rc : lm_text_example_asked(r, &asked, e);
    rc = rc ? rc : example_wrap(m, "user", asked, &prompt, e);
    rc = rc ? rc : example_wrap(m, "assistant", given, &answer, e);
    rc = rc ? rc : make(m, s, r, prompt, answer, out, e);
    json_decref(asked);
    json_decref(given);
    json_decref(prompt);
    json_decref(answer);
    return rc;
}
