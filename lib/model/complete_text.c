/* SPDX-License-Identifier: Apache-2.0 */
/* complete_text.c -- the text of a completion: tokens, stop strings, ends. */
#include "model/complete_text.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "model/sample.h"

lm_text_rules lm_text_rules_of(const lm_tokenizer *tok, const lm_complete_opts *o, int64_t context)
{
    lm_text_rules r = { .tok = tok, .o = o, .context = context };
    for (int i = 0; i < o->n_stop; i++)
        if (strlen(o->stop[i]) > r.longest_stop)
            r.longest_stop = strlen(o->stop[i]);
    return r;
}

void lm_completion_clear(lm_completion *c)
{
    c->ids.n = c->text.len = c->prompt.len = c->safe = 0;
    c->finish = NULL;
    c->failed = false;
    c->model = 0;
    c->first_seconds = 0;
    c->drafted = c->accepted = 0;
}

void lm_completion_fini(lm_completion *c)
{
    lm_ids_fini(&c->ids);
    lm_buf_fini(&c->text);
    lm_buf_fini(&c->prompt);
    lm_tok_stream_fini(&c->stream);
    lm_free(c->logprob);
}

lm_code lm_completion_reserve(const lm_text_rules *r, lm_completion *c, lm_err *e)
{
    int64_t room = r->context - (int64_t)c->ids.n + 1;
    size_t most = (size_t)(c->max_new < room ? c->max_new : room < 1 ? 1 : room);
    c->n_prompt = c->ids.n;
    if (lm_grow(&c->ids.v, &c->ids.cap, c->ids.n + most + 1, sizeof *c->ids.v, "tokens", e) ||
        lm_buf_room(&c->text, 8 * most, e) ||
        (r->o->logprobs && lm_grow(&c->logprob, &c->cap_logprob, most + 1, sizeof *c->logprob,
                                   "log-probabilities", e)))
        return e->code;
    return LM_OK;
}

double lm_completion_draw(const lm_text_rules *r, const lm_completion *c)
{
    return lm_sample_draw(r->o->seed, c->index, c->sample, (int64_t)(c->ids.n - c->n_prompt));
}

double lm_completion_draw_for(const lm_text_rules *r, const lm_completion *c, const char *purpose,
                              int64_t ahead)
{
    return lm_sample_draw_for(purpose, r->o->seed, c->index, c->sample,
                              (int64_t)(c->ids.n - c->n_prompt) + ahead);
}

/* Number of bytes at the end of the text that may become a stop string. */
static size_t held_back(const lm_text_rules *r, const lm_buf *text)
{
    size_t most = 0;
    for (int i = 0; i < r->o->n_stop; i++) {
        size_t n = strlen(r->o->stop[i]);
        for (size_t k = n - 1 < text->len ? n - 1 : text->len; k > most; k--)
            if (!memcmp(text->data + text->len - k, r->o->stop[i], k))
                most = k;
    }
    return most;
}

/* The first stop string in text from byte `from` on: cut the text there. */
static bool cut_at_stop(const lm_text_rules *r, lm_buf *text, size_t from)
{
    char *first = NULL;
    for (int i = 0; i < r->o->n_stop && text->len > from; i++) {
        char *p = memmem(text->data + from, text->len - from, r->o->stop[i], strlen(r->o->stop[i]));
        if (p && (!first || p < first))
            first = p;
    }
    if (!first)
        return false;
    *first = 0;
    text->len = (size_t)(first - text->data);
    return true;
}

/* The text has `before` bytes that earlier tokens made. */
static lm_code finish_text(const lm_text_rules *r, lm_completion *c, const char *why, size_t before,
                           lm_err *e)
{
    c->finish = why;
    if (lm_tok_stream_end(&c->stream, r->tok, r->o->skip_special, &c->text, e))
        return e->code;
    cut_at_stop(r, &c->text, before > r->longest_stop ? before - r->longest_stop : 0);
    c->safe = c->text.len;
    return LM_OK;
}

static bool ends_text(const lm_text_rules *r, int32_t id)
{
    for (int i = 0; i < r->o->n_eos; i++)
        if (r->o->eos[i] == id)
            return true;
    return false;
}

lm_code lm_completion_take(const lm_text_rules *r, lm_completion *c, int32_t id,
                           const double *logprob, lm_err *e)
{
    size_t made = c->ids.n - c->n_prompt, before = c->text.len;
    if (id < 0)
        return lm_fail(e, LM_ENUMERIC, "logits", "find the weights that are not finite",
                       "not a number behind token %zu of text %lld", c->ids.n,
                       (long long)c->index + 1);
    c->ids.v[c->ids.n++] = (uint32_t)id; /* reserved by lm_completion_reserve */
    if (logprob)
        c->logprob[made] = (float)*logprob;
    if (!made)
        c->first_seconds = lm_now() - c->read_at;
    made++;
    if (ends_text(r, id))
        return finish_text(r, c, "stop", before, e);
    if (lm_tok_stream_push(&c->stream, r->tok, (uint32_t)id, r->o->skip_special, &c->text, e))
        return e->code;
    if (cut_at_stop(r, &c->text, before > r->longest_stop ? before - r->longest_stop : 0)) {
        size_t end = c->text.len;
        lm_code rc = finish_text(r, c, "stop", before, e);
        c->text.len = c->safe = end; /* the pending bytes follow the stop string */
        return rc;
    }
    c->safe = c->text.len - held_back(r, &c->text);
    if ((int64_t)made >= c->max_new)
        return finish_text(r, c, "length", before, e);
    if ((int64_t)c->ids.n > r->context)
        return finish_text(r, c, "context", before, e);
    return LM_OK;
}
