/* SPDX-License-Identifier: Apache-2.0 */
/* prompts.c -- what generate reads: prompts of -p, or of lines of JSONL. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "generate/cache.h"
#include "generate/chat.h"
#include "model/answer.h"

static lm_code add_virtual(const generate_work *w, int64_t n, lm_ids *ids, lm_err *e)
{
    if (lm_grow(&ids->v, &ids->cap, ids->n + (size_t)n, sizeof *ids->v, "tokens", e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        ids->v[ids->n++] = (uint32_t)(w->model.config.vocab + i);
    return LM_OK;
}

/* Virtual tokens in front of what a decoder beside an encoder reads: those that are keys and values alone. */
static int64_t in_decoder(const lm_loaded *m)
{
    return m->adapter && m->config.encoder && !m->adapter->predicts ? m->adapter->virtual_tokens
                                                                    : 0;
}

/* The most of any adapter. */
static int64_t most_in_decoder(const generate_work *w)
{
    int64_t most = in_decoder(&w->model);
    for (int i = 0; i < w->n_named; i++)
        if (in_decoder(&w->named[i].model) > most)
            most = in_decoder(&w->named[i].model);
    return most;
}

/* The source of a slot, and the tokens with which the decoder begins. */
lm_code generate_begin_source(void *ctx, lm_generator *g, int64_t slot, const uint32_t *ids,
                              int64_t n, lm_err *e)
{
    generate_work *w = ctx;
    w->start.n = 0;
    if (lm_generator_encode(g, slot, ids, n, e) ||
        add_virtual(w, in_decoder(w->now), &w->start, e) ||
        lm_grow(&w->start.v, &w->start.cap, w->start.n + 1, sizeof *w->start.v, "tokens", e))
        return e->code;
    w->start.v[w->start.n++] = (uint32_t)w->model.config.start;
    return lm_generator_prompt(g, slot, w->start.v, (int64_t)w->start.n, NULL, e);
}

lm_code generate_add_virtual(const generate_work *w, lm_ids *ids, lm_err *e)
{
    const lm_loaded *m = generate_model(w);
    return add_virtual(w, m->adapter && !in_decoder(m) ? m->adapter->virtual_tokens : 0, ids, e);
}

/* What an encoder reads ends with the end token, whether the tokenizer's post-processor adds it or not. */
static lm_code end_source(lm_ids *ids, int64_t eos, lm_err *e)
{
    if (eos < 0 || (ids->n && ids->v[ids->n - 1] == (uint32_t)eos))
        return LM_OK;
    if (lm_grow(&ids->v, &ids->cap, ids->n + 1, sizeof *ids->v, "tokens", e))
        return e->code;
    ids->v[ids->n++] = (uint32_t)eos;
    return LM_OK;
}

static lm_code encode(generate_work *w, const char *text, size_t len, lm_ids *ids, lm_err *e)
{
    const lm_config *c = &w->model.config;
    int64_t eos = lm_config_eos(c);
    int64_t first = c->bos >= 0 ? c->bos : eos >= 0 ? eos : lm_tokenizer_eos(w->tok);
    bool special = opt.special && (!opt.cache.load || lm_given(&tool, "add-special"));
    if (generate_add_virtual(w, ids, e))
        return e->code;
    size_t before = ids->n;
    if (lm_tokenizer_encode(w->tok, w->scratch, text, len, special, ids, e) ||
        (c->encoder && special && end_source(ids, eos, e)))
        return e->code;
    if (ids->n > before || opt.cache.load) /* nothing may follow a cache */
        return LM_OK;
    if (first < 0)
        return lm_fail(e, LM_EUSAGE, "prompt", "give some text",
                       "is empty, and the model has no token with which to begin");
    if (lm_grow(&ids->v, &ids->cap, 1, sizeof *ids->v, "tokens", e))
        return e->code;
    ids->v[ids->n++] = (uint32_t)first;
    return LM_OK;
}

/* A context beyond the model's positions is possible: a policy numbers what it keeps, or no position is numbered. */
static bool goes_further(const generate_work *w)
{
    const lm_kv_policy *p = w->caches.plan ? w->caches.plan->policy : NULL;
    return (p && p->ranked) || w->model.config.layer[0].alibi;
}

static lm_code fits(const generate_work *w, const lm_completion *c, const char *where, lm_err *e)
{
    if ((int64_t)c->ids.n <= w->context)
        return LM_OK;
    const char *option = w->room.pages.context && !opt.context ? "shorten it, or raise --kv-memory"
                                                               : "shorten it, or raise --context";
    return lm_fail(e, LM_EUSAGE, where,
                   goes_further(w) || w->context < w->model.config.max_positions ? option
                                                                                 : "shorten it",
                   "the prompt has %zu token%s, the context holds %lld", c->ids.n,
                   lm_plural(c->ids.n), (long long)w->context);
}

const char *const *generate_files(int *n)
{
    static const char *const standard_input[] = { "-" };
    bool files = tool.argc > 1;
    *n = opt.prompt.n || opt.chat.talk ? 0 : files ? tool.argc - 1 : 1;
    return files ? (const char *const *)tool.argv + 1 : standard_input;
}

lm_code generate_open_prompts(generate_work *w, lm_err *e)
{
    const lm_input_opts o = { .kind = LM_INPUT_JSONL };
    int n;
    const char *const *files = generate_files(&n);
    return n ? lm_input_open(&o, files, n, &w->in, e) : LM_OK;
}

lm_code generate_choose_context(generate_work *w, lm_err *e)
{
    const lm_kv_policy *p = w->caches.plan ? w->caches.plan->policy : NULL;
    int64_t need = opt.chat.talk ? GENERATE_CHAT_CONTEXT : w->in ? 2048 : 0;
    const int64_t made = w->model.config.max_positions;
    const int64_t most = goes_further(w) ? INT32_MAX : made, usual = p && p->ranked ? most : made;
    for (int i = 0; i < opt.prompt.n && !w->in; i++) {
        w->ids.n = 0;
        if (encode(w, opt.prompt.v[i], strlen(opt.prompt.v[i]), &w->ids, e)) {
            lm_err_in(e, "-p");
            return e->code;
        }
        if (!i)
            w->first_tokens = (int64_t)w->ids.n;
        if ((int64_t)w->ids.n + opt.max_new > need)
            need = (int64_t)w->ids.n + opt.max_new;
    }
    need += generate_cache_tokens(w);
    if (opt.context > most)
        return lm_fail(e, LM_EUSAGE, "--context", "give at most as much",
                       "%lld, but the model was made for %lld position%s", (long long)opt.context,
                       (long long)most, lm_plural(most));
    w->context = opt.context ? opt.context : need < usual ? need : usual;
    if (w->context < usual) /* they take no room of a source's text and its answer */
        w->context += most_in_decoder(w);
    if (w->context > made && w->model.config.layer[0].alibi)
        lm_say(&tool, LM_LOG_WARN,
               "--context: the model was trained on texts of %lld token%s at most, and "
               "extrapolates to %lld",
               (long long)made, lm_plural(made), (long long)w->context);
    if (opt.chat.talk && !lm_given(&tool, "max-new-tokens") && w->generation.max_new < 0)
        opt.max_new = w->context; /* to the end of the answer */
    if (generate_cache_tokens(w) > w->context)
        return lm_fail(e, LM_EUSAGE, "--context",
                       w->context < most ? "raise it" : "load a cache of a shorter text",
                       "%lld, and %s has %lld tokens", (long long)w->context, opt.cache.load,
                       (long long)generate_cache_tokens(w));
    return LM_OK;
}

/* One line of JSONL. */
static lm_code next_line(generate_work *w, lm_completion *c, bool *got, lm_err *e)
{
    char where[300];
    bool object = false;
    lm_err bad = { 0 };
    if (!w->held && (lm_input_next(w->in, &w->doc, got, e) || !*got))
        return e->code;
    const lm_buf *raw = &w->doc.raw;
    w->held = false;
    if (generate_asks_adapter(w, raw->data, raw->len, &bad))
        return generate_refuse_line(w, c, true, &bad, e);
    c->model = w->wanted ? w->wanted->number : 0;
    if (generate_is_other(w)) { /* after those that run */
        w->held = true;
        *got = false;
        return LM_OK;
    }
    snprintf(where, sizeof where, "%.250s:%lld", w->doc.source, (long long)w->doc.line);
    w->text_of.len = 0;
    if (lm_answer_has_messages(raw->data, raw->len)) {
        object = true;
        if (generate_chat_record(w, raw->data, raw->len, where, &c->ids, &bad) ||
            generate_add_cache(w, &c->ids, &bad) || fits(w, c, where, &bad))
            return generate_refuse_line(w, c, object, &bad, e);
        return lm_buf_add(&c->prompt, raw->data, raw->len, e);
    }
    if (lm_answer_prompt(raw->data, raw->len, where, &w->text_of, &object, &bad) ||
        encode(w, w->text_of.data ? w->text_of.data : "", w->text_of.len, &c->ids, &bad) ||
        generate_add_cache(w, &c->ids, &bad) || fits(w, c, where, &bad))
        return generate_refuse_line(w, c, object, &bad, e);
    return lm_buf_add(&c->prompt, raw->data, raw->len, e);
}

lm_code generate_next(void *ctx, lm_completion *c, bool *got, lm_err *e)
{
    generate_work *w = ctx;
    c->max_new = opt.max_new;
    if (opt.chat.talk)
        return generate_chat_next(w, c, got, e);
    if (!w->in) {
        *got = w->at < opt.prompt.n;
        if (!*got)
            return LM_OK;
        const char *text = opt.prompt.v[w->at++];
        c->model = w->wanted ? w->wanted->number : 0;
        if (encode(w, text, strlen(text), &c->ids, e) || generate_add_cache(w, &c->ids, e) ||
            fits(w, c, "-p", e))
            return e->code;
        return lm_buf_add(&c->prompt, text, strlen(text), e);
    }
    *got = !lm_stopping();
    if (!*got || next_line(w, c, got, e))
        return e->code;
    w->asked += *got;
    return LM_OK;
}
