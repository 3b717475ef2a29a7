/* SPDX-License-Identifier: Apache-2.0 */
/* tokens.c -- chosen rows of the embedding: row token_indices[k] of the table becomes row k of the
 * adapter's [n,H]. Source: huggingface/peft tuners/trainable_tokens. */
#include "tune/methods.h"

static const lm_hyper hyper[] = { { 0 } };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    const json_t *list = json_object_get(m->config, "token_indices"), *v;
    size_t i;

    *n = 0;
    json_array_foreach((json_t *)(uintptr_t)list, i, v)
    {
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= m->in)
            return lm_fail(e, LM_EFORMAT, m->name, NULL,
                           "token_indices[%zu] is not a token of the base, which has %lld", i,
                           (long long)m->in);
        for (size_t k = 0; k < i; k++)
            if (json_integer_value(json_array_get(list, k)) == json_integer_value(v))
                return lm_fail(e, LM_EFORMAT, m->name, NULL, "token_indices names %lld twice",
                               (long long)json_integer_value(v));
    }
    if (!json_array_size(list))
        return lm_fail(e, LM_EUSAGE, m->name, "list token_indices", "no tokens are chosen");
    lm_tune_tensor_add(out, n, "trainable_tokens_delta", (int64_t)json_array_size(list), m->out,
                       LM_TUNE_BASE, 0);
    return LM_OK;
}

/* W [H,V]: the columns of these tokens, by a product with rows that hold a 1 at the token's
 * place. */
static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    const json_t *list = json_object_get(m->config, "token_indices"), *v;
    int64_t n = (int64_t)json_array_size(list);
    double *at = NULL, *any = NULL;
    size_t i;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &at, (size_t)(n * m->in), sizeof *at, r->e) ||
        lm_arena_alloc(r->arena, &any, (size_t)m->in, sizeof *any, r->e))
        return LM_NONE;
    json_array_foreach((json_t *)(uintptr_t)list, i, v)
        at[(int64_t)i * m->in + json_integer_value(v)] = any[json_integer_value(v)] = 1;
    return LM_R_MAP(
        r, "y = where(t, d, w)", LM_IS("w", w), LM_IS("t", lm_r_const(r, LM_DIMS(1, m->in), any)),
        LM_IS("d", lm_r_matmul(r, p[0], true, lm_r_const(r, LM_DIMS(n, m->in), at), false)));
}

static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    const json_t *list = json_object_get(m->config, "token_indices"), *t;
    size_t i;

    (void)changed, (void)rng, (void)e;
    json_array_foreach((json_t *)(uintptr_t)list, i, t) for (int64_t h = 0; h < m->out; h++)
        v[0][(int64_t)i * m->out + h] = w[h * m->in + json_integer_value(t)];
    return LM_OK;
}

const lm_tune_method lm_tune_tokens = {
    .peft_type = "TRAINABLE_TOKENS",
    .name = "tokens",
    .about = "chosen rows of the embedding",
    .prefix = "trainable_tokens_",
    .is = LM_TUNE_EMBEDS,
    .hyper = hyper,
    .extra = "{\"token_indices\": []}",
    .tensors = tensors,
    .weight = weight,
    .start = start,
};
