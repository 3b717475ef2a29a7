/* SPDX-License-Identifier: Apache-2.0 */
/* generation.c -- defaults of sampling from a model's files. */
#include "model/generation.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"

enum { MOST_EOS = 4096 };

void lm_generation_fini(lm_generation *g)
{
    lm_free(g->eos);
    memset(g, 0, sizeof *g);
}

static lm_code bad(const char *where, const char *key, const char *what, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, where,
                   "correct the file, or leave the generation configuration out", "\"%s\": %s", key,
                   what);
}

static lm_code add_eos(lm_generation *g, int64_t id, int64_t vocab, lm_err *e)
{
    if (id < 0 || id >= vocab) /* -1 means "none"; ids beyond the vocabulary never occur */
        return LM_OK;
    for (int i = 0; i < g->n_eos; i++)
        if (g->eos[i] == id)
            return LM_OK;
    if (lm_realloc_n(&g->eos, (size_t)g->n_eos + 1, sizeof *g->eos, "end tokens", e))
        return e->code;
    g->eos[g->n_eos++] = id;
    return LM_OK;
}

static lm_code read_eos(lm_generation *g, const json_t *o, int64_t vocab, const char *where,
                        lm_err *e)
{
    const json_t *v = json_object_get(o, "eos_token_id");
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (!v || json_is_null(v))
        return LM_OK;
    if (n > MOST_EOS)
        return lm_fail(e, LM_EUSAGE, where, NULL, "\"eos_token_id\": more than %d ids", MOST_EOS);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id))
            return lm_fail(e, LM_EUSAGE, where, NULL, "\"eos_token_id\": is not a token id");
        if (add_eos(g, json_integer_value(id), vocab, e))
            return e->code;
    }
    return LM_OK;
}

/* Number under `key` in [least, most]; null and absence do not change *out. */
static lm_code read_number(const json_t *o, const char *key, double least, double most, double *out,
                           const char *where, lm_err *e)
{
    const json_t *v = json_object_get(o, key);
    if (!v || json_is_null(v))
        return LM_OK;
    double x = json_is_number(v) ? json_number_value(v) : NAN;
    if (!(x >= least && x <= most)) {
        char what[80];
        snprintf(what, sizeof what, "is not a number from %.15g to %.15g", least, most);
        return bad(where, key, what, e);
    }
    *out = x;
    return LM_OK;
}

static lm_code read_count(const json_t *o, const char *key, int64_t least, int64_t *out,
                          const char *where, lm_err *e)
{
    const json_t *v = json_object_get(o, key);
    if (!v || json_is_null(v))
        return LM_OK;
    if (!json_is_integer(v) || json_integer_value(v) < least)
        return bad(where, key, "is not a whole number in range", e);
    *out = json_integer_value(v);
    return LM_OK;
}

/* True for a key that affects generation, with a value that is not neutral. */
static void note_others(lm_generation *g, const json_t *o)
{
    static const struct {
        const char *key;
        double neutral;
    } known[] = { { "num_beams", 1 },
                  { "typical_p", 1 },
                  { "epsilon_cutoff", 0 },
                  { "eta_cutoff", 0 },
                  { "no_repeat_ngram_size", 0 },
                  { "penalty_alpha", 0 },
                  { "min_new_tokens", 0 },
                  { "min_length", 0 },
                  { "length_penalty", 1 },
                  { "guidance_scale", 1 },
                  { "forced_bos_token_id", NAN },
                  { "forced_eos_token_id", NAN },
                  { "suppress_tokens", NAN },
                  { "bad_words_ids", NAN },
                  { "stop_strings", NAN } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const json_t *v = json_object_get(o, known[i].key);
        if (!v || json_is_null(v) ||
            (json_is_number(v) && json_number_value(v) == known[i].neutral))
            continue;
        if (g->n_others < (int)(sizeof g->others / sizeof *g->others))
            g->others[g->n_others++] = known[i].key;
    }
}

static lm_code read_sampling(lm_generation *g, const json_t *o, const char *where, lm_err *e)
{
    const json_t *sample = json_object_get(o, "do_sample");
    int64_t top_k = -2;
    if (read_number(o, "temperature", 0, 100, &g->temperature, where, e) ||
        read_number(o, "top_p", 0, 1, &g->top_p, where, e) ||
        read_number(o, "min_p", 0, 1, &g->min_p, where, e) ||
        read_number(o, "repetition_penalty", 0.01, 100, &g->repetition_penalty, where, e) ||
        read_count(o, "top_k", -1, &top_k, where, e) ||
        read_count(o, "max_new_tokens", 1, &g->max_new, where, e))
        return e->code;
    if (sample && !json_is_null(sample) && !json_is_boolean(sample))
        return bad(where, "do_sample", "is neither true nor false", e);
    if (top_k >= -1)
        g->top_k = top_k > 0 ? top_k : 0; /* both 0 and -1 are used for "all" */
    if (json_is_false(sample))            /* the most likely token, regardless of other keys */
        g->temperature = 0;
    note_others(g, o);
    return LM_OK;
}

lm_code lm_generation_read(const lm_config *config, const json_t *generation, const char *where,
                           lm_generation *out, lm_err *e)
{
    lm_code rc = LM_OK;
    *out = (lm_generation){ .temperature = -1,
                            .top_p = -1,
                            .min_p = -1,
                            .repetition_penalty = -1,
                            .top_k = -1,
                            .max_new = -1 };
    for (int i = 0; !rc && i < config->n_eos; i++)
        rc = add_eos(out, config->eos[i], config->vocab, e);
    if (!rc && generation && !json_is_object(generation))
        rc = lm_fail(e, LM_EUSAGE, where, NULL, "generation_config.json is not an object");
    if (!rc && generation)
        rc = read_eos(out, generation, config->vocab, where, e);
    if (!rc && generation)
        rc = read_sampling(out, generation, where, e);
    if (rc)
        lm_generation_fini(out);
    return rc;
}
