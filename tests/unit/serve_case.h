/* SPDX-License-Identifier: Apache-2.0 */
/* serve_case.h -- prompts and answers of continuous batching, for tests that compare the answers of different sizes.  Behind
 * a header with err and ok. */
#ifndef LM_TESTS_SERVE_CASE_H
#define LM_TESTS_SERVE_CASE_H

#include "base/rng.h"
#include "loaded_case.h"
#include "model/paged.h"
#include "model/serve.h"

enum { SERVE_VOCAB = 96, LONG = 700, PROMPTS = 24, SAMPLES = 3 };

/* ---- prompts and answers ---- */

static inline uint32_t token_at(int64_t s, int64_t i)
{
    return (uint32_t)lm_rng_below(lm_rng_make(4, "tokens", (uint64_t)s), (uint64_t)i, SERVE_VOCAB);
}

/* What was answered, by prompt and sample. */
typedef struct {
    int64_t asked, done, samples, late; /* late: answers that came after one of a later prompt */
    int64_t last;
    bool any_order;
    uint32_t ids[PROMPTS][SAMPLES][LONG];
    float logprob[PROMPTS][SAMPLES][LONG];
    size_t n[PROMPTS][SAMPLES];
    const char *finish[PROMPTS][SAMPLES];
} answers;

static int64_t stretch = 1;   /* of prompts, and of what some share */
static int64_t longest = 500; /* tokens of each fifth answer */

static inline int64_t prompt_length(int64_t i)
{
    return 1 + (i * 37) % 90 * stretch;
}

/* Prompts of many lengths, the later ones with a beginning that some share. */
static inline lm_code next_prompt(void *ctx, lm_completion *c, bool *got, lm_err *e)
{
    answers *a = ctx;
    int64_t i = a->asked++, n = prompt_length(i);
    *got = i < PROMPTS;
    if (!*got)
        return LM_OK;
    c->failed = i == 7;
    if (lm_grow(&c->ids.v, &c->ids.cap, (size_t)n, sizeof *c->ids.v, "tokens", e))
        return e->code;
    for (int64_t k = 0; k < n; k++)
        c->ids.v[k] = token_at(i % 3 && k < 50 * stretch ? 100 : i, k);
    c->ids.n = (size_t)n;
    c->max_new = i % 5 ? 1 + (i * 29) % 90 : longest;
    return LM_OK;
}

static inline lm_code take_answer(void *ctx, lm_completion *c, lm_err *e)
{
    answers *a = ctx;
    int64_t number = c->index * a->samples + c->sample - (c->index > 7 ? a->samples - 1 : 0);
    (void)e;
    if (!a->any_order)
        assert_int_equal(number, a->done);
    a->late += number < a->last;
    a->last = number;
    a->done++;
    assert_int_equal(c->failed, c->index == 7);
    if (c->failed)
        return LM_OK;
    assert_true(c->first_seconds > 0 && c->first_seconds < 1000);
    size_t n = a->n[c->index][c->sample] = c->ids.n - c->n_prompt;
    memcpy(a->ids[c->index][c->sample], c->ids.v + c->n_prompt, n * sizeof *c->ids.v);
    memcpy(a->logprob[c->index][c->sample], c->logprob, n * sizeof *c->logprob);
    a->finish[c->index][c->sample] = c->finish;
    return LM_OK;
}

/* A tokenizer with a letter for each id. */
static inline lm_tokenizer *letters(void)
{
    lm_tokenizer *tok = NULL;
    lm_buf json = { 0 };
    char word[64];
    const char *head = "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{",
               *tail = "}},\"decoder\":{\"type\":\"ByteLevel\"}}";
    ok(lm_buf_add(&json, head, strlen(head), &err));
    for (int i = 0; i < SERVE_VOCAB; i++) {
        int n = snprintf(word, sizeof word, "%s\"w%d\":%d", i ? "," : "", i, i);
        ok(lm_buf_add(&json, word, (size_t)n, &err));
    }
    ok(lm_buf_add(&json, tail, strlen(tail), &err));
    ok(lm_tokenizer_from_json(json.data, json.len, NULL, 0, "test", &tok, &err));
    lm_buf_fini(&json);
    return tok;
}

/* ---- runs ---- */

static lm_tokenizer *tok; /* letters() */
static int warnings;

static inline void take_warning(void *ctx, const lm_err *why)
{
    (void)ctx;
    assert_true(why->code == LM_EIO || why->code == LM_EFORMAT);
    warnings++;
}

typedef struct {
    lm_paged_opts pages;
    int64_t host, disk;
    bool any_order;
} setting;

static inline lm_complete_opts serve_how(int64_t samples, bool any_order)
{
    static const int64_t eos = 11;
    static const char *const stop[] = { "w5w7" };
    return (lm_complete_opts){ .sample = { 1, 0, 0.9, 0, samples > 1 ? 1.2 : 1 },
                               .seed = 3,
                               .samples = samples,
                               .eos = &eos,
                               .n_eos = 1,
                               .stop = stop,
                               .n_stop = 1,
                               .logprobs = true,
                               .any_order = any_order };
}

static inline void serve(lm_loaded *w, lm_dtype type, lm_backend *b, const setting *o,
                         int64_t samples, answers *out, lm_serve_stats *kv)
{
    const lm_complete_opts how = serve_how(samples, o->any_order);
    const char *dir = getenv("TMPDIR");
    const lm_serve_opts s = { .tiers = { o->host, o->disk, dir ? dir : "/tmp" },
                              .warn = take_warning };
    const lm_complete_hooks h = { .next = next_prompt, .done = take_answer, .ctx = out };
    lm_complete_stats st = { 0 };
    lm_paged *g = NULL;
    *out = (answers){ .samples = samples, .last = -1, .any_order = o->any_order };
    warnings = 0;
    ok(lm_paged_new(w, type, &o->pages, b, &g, &err));
    ok(lm_serve_run(g, &s, tok, &how, &h, &st, kv, &err));
    lm_paged_free(g);
    assert_int_equal(out->done, PROMPTS * samples - (samples - 1));
    assert_int_equal(st.prompts, (PROMPTS - 1) * samples);
    assert_true(o->any_order == (out->late > 0));
}

static inline void check_same(const answers *got, const answers *want)
{
    assert_memory_equal(got->ids, want->ids, sizeof want->ids);
    assert_memory_equal(got->logprob, want->logprob, sizeof want->logprob);
    assert_memory_equal(got->n, want->n, sizeof want->n);
    assert_memory_equal(got->finish, want->finish, sizeof want->finish);
}

#endif
