/* SPDX-License-Identifier: Apache-2.0 */
/* span.c -- span corruption; see span.h. */
#include "train/span.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/tokenizer_source.h"

/* Numbers of a window of n ids, rounded as the published code rounds them, half to even. */
static void count(int64_t n, double density, double mean, lm_span *s)
{
    double noise = rint((double)n * density);
    noise = fmin(fmax(noise, 1), (double)n - 1);
    double spans = fmax(rint(noise / mean), 1);
    s->window = n;
    s->noise = (int64_t)noise;
    s->spans = (int64_t)spans;
    if (s->spans > n - s->noise) /* text between them has an id each */
        s->spans = n - s->noise;
    s->source = n - s->noise + s->spans + 1;
    s->target = s->noise + s->spans + 1;
}

lm_code lm_span_fit(int64_t source, double density, double mean, lm_span *out, lm_err *e)
{
    lm_span next = { 0 };
    count(2, density, mean, out);
    if (out->source > source)
        return lm_fail(e, LM_EUSAGE, "spans", "use longer sequences",
                       "%" PRId64 " token%s have no room for a span", source,
                       lm_plural((uint64_t)source));
    for (count(3, density, mean, &next); next.source <= source;
         count(next.window + 1, density, mean, &next)) {
        *out = next;
        if (out->window > 64 * source)
            return lm_fail(e, LM_EUSAGE, "spans", "cut out less, or in shorter spans",
                           "windows of more than %" PRId64 " tokens would leave %" PRId64,
                           64 * source, source);
    }
    return LM_OK;
}

/* The sentinel of span k: the tokenizer's, or without such tokens an id that it does not have. */
static lm_code find_sentinel(const lm_tokenizer *tok, int64_t vocab, int64_t k, int64_t *id,
                             lm_err *e)
{
    char name[40];
    snprintf(name, sizeof name, "<extra_id_%" PRId64 ">", k);
    const bool has = tok && lm_tokenizer_id(tok, "<extra_id_0>", strlen("<extra_id_0>")) >= 0;
    const int64_t last = tok && !has ? lm_tokenizer_vocab_size(tok) : 0;
    *id = has ? lm_tokenizer_id(tok, name, strlen(name)) : vocab - 1 - k;
    if (*id >= last && *id < vocab)
        return LM_OK;
    if (has)
        return lm_fail(e, LM_EUSAGE, "spans", "use shorter sequences, or cut out less",
                       "the tokenizer has no %s: a window has more spans than there are sentinels",
                       name);
    return lm_fail(e, LM_EUSAGE, "spans",
                   "give the tokenizer tokens <extra_id_0> and so on, or the model a larger "
                   "vocabulary",
                   "the tokenizer has no <extra_id_0>, and the model %" PRId64
                   " ids above the tokenizer's",
                   vocab - last);
}

lm_code lm_span_ids(const lm_config *c, lm_model_source *m, lm_span *s, lm_err *e)
{
    lm_tokenizer *tok = NULL;
    int64_t id;
    if (!c->encoder)
        return lm_fail(e, LM_EUSAGE, "spans", "use a model with an encoder, as T5",
                       "a %s model has no encoder to read text with gaps", lm_arch_name(c->arch));
    s->eos = lm_config_eos(c);
    s->start = c->start;
    if (s->eos < 0)
        return lm_fail(e, LM_EUSAGE, "spans", "set eos_token_id in its config.json",
                       "the model has no end token");
    if (m && lm_tokenizer_of(m, &tok, e))
        return e->code;
    if (m && !tok)
        return lm_fail(e, LM_EUSAGE, lm_model_source_path(m), "copy its tokenizer into the folder",
                       "has no tokenizer, which names the sentinels");
    lm_alloc_n(&s->sentinel, (size_t)s->spans, sizeof *s->sentinel, "sentinels", e);
    for (int64_t k = 0; !e->code && k < s->spans; k++)
        if (!find_sentinel(tok, c->vocab, k, &id, e))
            s->sentinel[k] = (int32_t)id;
    lm_tokenizer_free(tok);
    return e->code;
}

void lm_span_fini(lm_span *s)
{
    lm_free(s->sentinel);
    s->sentinel = NULL;
}

/* Draws in a counted order: whether one of the next `left` places is among the `wanted` that are still to be chosen, each
 * choice of places with the same probability. */
typedef struct {
    lm_rng r;
    uint64_t at;
    int64_t left, wanted;
} chooser;

static bool chosen(chooser *c)
{
    bool is = (int64_t)lm_rng_below(c->r, c->at++, (uint64_t)c->left) < c->wanted;
    c->left--;
    c->wanted -= is;
    return is;
}

/* Length of the next part, of which the chooser's marks are the borders. */
static int64_t part(chooser *c)
{
    int64_t n = 1;
    while (c->left && !chosen(c))
        n++;
    return n;
}

void lm_span_cut(const lm_span *s, lm_rng r, const uint32_t *ids, int32_t *source, int32_t *tokens,
                 int32_t *target)
{
    chooser text = { r, 0, s->window - s->noise - 1, s->spans - 1 };
    chooser noise = { r, (uint64_t)s->window, s->noise - 1, s->spans - 1 };
    int64_t a = 0, b = 0;
    for (int64_t k = 0; k < s->spans; k++) {
        for (int64_t n = part(&text); n > 0; n--)
            source[a++] = (int32_t)*ids++;
        source[a++] = target[b++] = s->sentinel[k];
        for (int64_t n = part(&noise); n > 0; n--)
            target[b++] = (int32_t)*ids++;
    }
    source[a] = target[b] = (int32_t)s->eos;
    tokens[0] = (int32_t)s->start;
    for (int64_t i = 1; i < s->target; i++)
        tokens[i] = target[i - 1];
}
