/* SPDX-License-Identifier: Apache-2.0 */
/* complete.c -- the loop around a generator. */
#include "model/complete.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "model/sample.h"

enum {
    AHEAD = 8
}; /* completions in flight for each slot: so many short texts may finish before a long one */

typedef struct {
    lm_generator *g;
    const lm_tokenizer *tok;
    const lm_complete_opts *o;
    const lm_complete_hooks *h;
    lm_complete_stats *st;
    lm_completion *ring; /* number i lives in ring[i % size] */
    int64_t size, head, tail;
    int64_t prompts;      /* number taken so far */
    lm_completion asked;  /* ids, prompt and max_new of the prompt with samples left */
    int64_t sample, left; /* its next sample; samples not begun yet */
    lm_completion **slot; /* NULL: free */
    int32_t *next;
    double *u; /* the draw of each slot */
    size_t longest_stop;
    bool ended;
} run;

/* Number of bytes at the end of the text that may become a stop string. */
static size_t held_back(const run *r, const lm_buf *text)
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
static bool cut_at_stop(const run *r, lm_buf *text, size_t from)
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

static lm_code finish_text(run *r, lm_completion *c, const char *why, size_t before, lm_err *e)
{
    c->finish = why;
    r->slot[c->slot] = NULL;
    r->next[c->slot] = -1;
    if (lm_tok_stream_end(&c->stream, r->tok, r->o->skip_special, &c->text, e))
        return e->code;
    cut_at_stop(r, &c->text, before > r->longest_stop ? before - r->longest_stop : 0);
    c->safe = c->text.len;
    return LM_OK;
}

static double draw_for(const run *r, const lm_completion *c)
{
    return lm_sample_draw(r->o->seed, c->index, c->sample, (int64_t)(c->ids.n - c->n_prompt));
}

static bool ends_text(const run *r, int32_t id)
{
    for (int i = 0; i < r->o->n_eos; i++)
        if (r->o->eos[i] == id)
            return true;
    return false;
}

/* Append the token `id` to c, and end c if it is the last one.  logprob: of this token; NULL: not
 * requested. */
static lm_code take_token(run *r, lm_completion *c, int32_t id, const double *logprob, lm_err *e)
{
    size_t made = c->ids.n - c->n_prompt, before = c->text.len;
    if (id < 0)
        return lm_fail(e, LM_ENUMERIC, "logits", "find the weights that are not finite",
                       "not a number behind token %zu of text %lld", c->ids.n,
                       (long long)c->index + 1);
    c->ids.v[c->ids.n++] = (uint32_t)id; /* reserved by make_room() */
    if (logprob)
        c->logprob[made] = (float)*logprob;
    made++;
    r->st->new_tokens++;
    r->next[c->slot] = id;
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
    if ((int64_t)c->ids.n > lm_generator_context(r->g))
        return finish_text(r, c, "context", before, e);
    return LM_OK;
}

/* ---- prompts and their samples ---- */

/* Reserve memory for the longest answer of c. */
static lm_code make_room(const run *r, lm_completion *c, lm_err *e)
{
    int64_t room = lm_generator_context(r->g) - (int64_t)c->ids.n + 1;
    size_t most = (size_t)(c->max_new < room ? c->max_new : room < 1 ? 1 : room);
    c->n_prompt = c->ids.n;
    if (lm_grow(&c->ids.v, &c->ids.cap, c->ids.n + most + 1, sizeof *c->ids.v, "tokens", e) ||
        lm_buf_room(&c->text, 8 * most, e) ||
        (r->o->logprobs && lm_grow(&c->logprob, &c->cap_logprob, most + 1, sizeof *c->logprob,
                                   "log-probabilities", e)))
        return e->code;
    return LM_OK;
}

static void clear(lm_completion *c)
{
    c->ids.n = c->text.len = c->prompt.len = c->safe = 0;
    c->finish = NULL;
    c->failed = false;
}

/* Read the next prompt to r->asked; a failed one goes to the ring at once. */
static lm_code take_prompt(run *r, lm_err *e)
{
    lm_completion *c = &r->asked;
    bool got = true;
    clear(c);
    if (r->h->next(r->h->ctx, c, &got, e))
        return e->code;
    r->ended = !got;
    if (!got)
        return LM_OK;
    c->index = r->prompts++;
    if (!c->failed) {
        r->left = r->o->samples;
        r->sample = 0;
        return LM_OK;
    }
    lm_completion *place = &r->ring[r->tail++ % r->size];
    clear(place);
    place->index = c->index;
    place->failed = true;
    place->finish = "error";
    return lm_buf_add(&place->prompt, c->prompt.data ? c->prompt.data : "", c->prompt.len, e);
}

/* Add a sample of r->asked to the ring, with memory for its answer. */
static lm_code begin_sample(run *r, int64_t slot, lm_completion **out, lm_err *e)
{
    const lm_completion *a = &r->asked;
    lm_completion *c = &r->ring[r->tail % r->size];
    clear(c);
    c->index = a->index;
    c->sample = r->sample;
    c->max_new = a->max_new;
    c->slot = slot;
    if (lm_grow(&c->ids.v, &c->ids.cap, a->ids.n, sizeof *c->ids.v, "tokens", e) ||
        lm_buf_add(&c->prompt, a->prompt.data ? a->prompt.data : "", a->prompt.len, e))
        return e->code;
    memcpy(c->ids.v, a->ids.v, a->ids.n * sizeof *c->ids.v);
    c->ids.n = a->ids.n;
    if (make_room(r, c, e))
        return e->code;
    r->tail++;
    r->sample++;
    r->left--;
    *out = c;
    return LM_OK;
}

static int64_t free_slot(const run *r)
{
    int64_t s = 0;
    while (s < lm_generator_batch(r->g) && r->slot[s])
        s++;
    return s < lm_generator_batch(r->g) ? s : -1;
}

static bool may_begin(const run *r)
{
    return r->tail - r->head < r->size && free_slot(r) >= 0 && !lm_stopping();
}

/* Run the prompt in one slot, and begin as many of its samples as there are free slots, including
 * this one.  Every first token is drawn from the same logits. */
static lm_code begin_samples(run *r, lm_err *e)
{
    double start = lm_now();
    int64_t at = free_slot(r);
    if (lm_generator_prompt(r->g, at, r->asked.ids.v, (int64_t)r->asked.ids.n, NULL, e))
        return e->code;
    r->st->prompt_tokens += (int64_t)r->asked.ids.n;
    for (bool first = true; r->left && may_begin(r); first = false) {
        lm_completion *c = NULL;
        const int32_t *ids;
        const double *logprob = NULL;
        int64_t slot = first ? at : free_slot(r);
        if (begin_sample(r, slot, &c, e) || lm_generator_copy(r->g, at, slot, e))
            return e->code;
        r->u[at] = draw_for(r, c);
        if (lm_generator_choose(r->g, &r->o->sample, r->u, &ids, r->o->logprobs ? &logprob : NULL,
                                e))
            return e->code;
        r->slot[slot] = c;
        r->st->prompts++;
        if (take_token(r, c, ids[at], logprob ? &logprob[at] : NULL, e))
            return e->code;
    }
    r->st->prompt_seconds += lm_now() - start;
    return LM_OK;
}

static lm_code fill_slots(run *r, lm_err *e)
{
    while (may_begin(r) && (r->left || !r->ended)) {
        if (!r->left && take_prompt(r, e))
            return e->code;
        if (r->left && begin_samples(r, e))
            return e->code;
    }
    return LM_OK;
}

/* Move the last texts to gaps before them, because a step has rows up to the last used slot. */
static lm_code close_gaps(run *r, lm_err *e)
{
    int64_t last = lm_generator_batch(r->g) - 1;
    for (int64_t gap = 0; gap < last; gap++) {
        if (r->slot[gap])
            continue;
        while (last > gap && !r->slot[last])
            last--;
        if (last == gap)
            break;
        if (lm_generator_copy(r->g, last, gap, e))
            return e->code;
        r->slot[gap] = r->slot[last];
        r->slot[gap]->slot = gap;
        r->next[gap] = r->next[last];
        r->slot[last] = NULL;
        r->next[last] = -1;
    }
    return LM_OK;
}

/* ---- the loop ---- */

static lm_code hand_back(run *r, lm_err *e)
{
    for (; r->head < r->tail; r->head++) {
        lm_completion *c = &r->ring[r->head % r->size];
        if (r->h->text && !c->failed && r->h->text(r->h->ctx, c, e))
            return e->code;
        if (!c->finish)
            return LM_OK;
        if (r->h->done(r->h->ctx, c, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code step(run *r, lm_err *e)
{
    const int32_t *ids;
    const double *logprob = NULL;
    double start = lm_now();
    if (close_gaps(r, e))
        return e->code;
    for (int64_t s = 0; s < lm_generator_batch(r->g); s++)
        if (r->slot[s])
            r->u[s] = draw_for(r, r->slot[s]);
    if (lm_generator_next(r->g, r->next, &r->o->sample, r->u, &ids,
                          r->o->logprobs ? &logprob : NULL, e))
        return e->code;
    for (int64_t s = 0; s < lm_generator_batch(r->g); s++)
        if (r->slot[s] && take_token(r, r->slot[s], ids[s], logprob ? &logprob[s] : NULL, e))
            return e->code;
    r->st->decode_seconds += lm_now() - start;
    return LM_OK;
}

static bool any_busy(const run *r)
{
    for (int64_t s = 0; s < lm_generator_batch(r->g); s++)
        if (r->slot[s])
            return true;
    return false;
}

static lm_code loop(run *r, lm_err *e)
{
    while (!lm_stopping()) {
        if (fill_slots(r, e) || hand_back(r, e))
            return e->code;
        if (any_busy(r)) {
            if (step(r, e))
                return e->code;
        } else if (r->ended && !r->left && r->head == r->tail) {
            break;
        }
    }
    return LM_OK;
}

static void completion_fini(lm_completion *c)
{
    lm_ids_fini(&c->ids);
    lm_buf_fini(&c->text);
    lm_buf_fini(&c->prompt);
    lm_tok_stream_fini(&c->stream);
    lm_free(c->logprob);
}

lm_code lm_complete_run(lm_generator *g, const lm_tokenizer *tok, const lm_complete_opts *o,
                        const lm_complete_hooks *h, lm_complete_stats *st, lm_err *e)
{
    int64_t batch = lm_generator_batch(g);
    run r = { .g = g, .tok = tok, .o = o, .h = h, .st = st, .size = AHEAD * batch };
    for (int i = 0; i < o->n_stop; i++)
        if (strlen(o->stop[i]) > r.longest_stop)
            r.longest_stop = strlen(o->stop[i]);
    lm_code rc = lm_alloc_n(&r.ring, (size_t)r.size, sizeof *r.ring, "completions", e);
    if (!rc)
        rc = lm_alloc_n(&r.slot, (size_t)batch, sizeof *r.slot, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.next, (size_t)batch, sizeof *r.next, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.u, (size_t)batch, sizeof *r.u, "slots", e);
    for (int64_t s = 0; !rc && s < batch; s++)
        r.next[s] = -1;
    if (!rc)
        rc = loop(&r, e);
    for (int64_t i = 0; r.ring && i < r.size; i++)
        completion_fini(&r.ring[i]);
    completion_fini(&r.asked);
    lm_free(r.ring);
    lm_free(r.slot);
    lm_free(r.next);
    lm_free(r.u);
    return rc;
}
