/* SPDX-License-Identifier: Apache-2.0 */
/* lora.c -- low-rank adaptation: W' = W + s B A, s = alpha / r, or with use_rslora alpha / sqrt(r).
 * With use_dora each row o of W' is brought to its magnitude m_o: m_o W'_o / |W'_o|.
 *
 * A [r,in], B [out,r], m [out]; of an embedding A [r,V], B [H,r], where m has an entry for each of
 * H.  lora_bias adds s times lora_B.bias to the bias.  A starts uniform within 1/sqrt(in)
 * (Kaiming's with a = sqrt 5), B at 0. Sources: arXiv:2106.09685, 2312.03732 (rsLoRA), 2402.09353
 * (DoRA); huggingface/peft tuners/lora. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "r", 8, 1, 1e6, "rank", LM_WHOLE },
    { "lora_alpha", 8, -1e9, 1e9, "scale: alpha / r", NULL },
    { "lora_dropout", 0, 0, 1, "share of inputs of A dropped in training", NULL },
    { "use_rslora", 0, 0, 1, "scale by alpha / sqrt(r)", "false true" },
    { "use_dora", 0, 0, 1, "direction and magnitude apart", "false true" },
    { "lora_bias", 0, 0, 1, "B has a bias", "false true" },
    { 0 },
};
enum { R, ALPHA, DROPOUT, RSLORA, DORA, BIAS };
enum { A, B, B_BIAS, MAGNITUDE };

static const char *const refused[] = { "use_qalora",
                                       "layer_replication",
                                       "alora_invocation_tokens",
                                       "megatron_config",
                                       "kasa_config",
                                       "use_bdlora",
                                       NULL };

double lm_tune_lora_scale(const lm_tune_module *m)
{
    double r = m->hyper[R];

    return m->hyper[ALPHA] / (m->hyper[RSLORA] > 0 ? sqrt(r) : r);
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];
    bool other = json_is_string(json_object_get(m->config, "init_lora_weights"));
    lm_tune_tensor *t;

    (void)e;
    *n = 0;
    if (m->embedding) { /* as peft starts it: A at zero, B normal */
        lm_tune_tensor_add(out, n, "lora_embedding_A", r, m->in, LM_TUNE_ZEROS, 0);
        t = lm_tune_tensor_add(out, n, "lora_embedding_B", m->out, r, LM_TUNE_NORMAL, 1);
    } else {
        lm_tune_tensor_add(out, n, "lora_A.weight", r, m->in, LM_TUNE_UNIFORM,
                           1 / sqrt((double)m->in));
        t = lm_tune_tensor_add(out, n, "lora_B.weight", m->out, r, LM_TUNE_ZEROS, 0);
    }
    t->second = true;
    if (other && !m->embedding) /* lm_tune_lora_start gives both */
        out[A].init = out[B].init = LM_TUNE_BASE;
    t = lm_tune_tensor_add(out, n, "lora_B.bias", m->out, 0, LM_TUNE_ZEROS, 0);
    t->off = m->hyper[BIAS] <= 0 || m->embedding;
    t = lm_tune_tensor_add(out, n, "lora_magnitude_vector", m->out, 0, LM_TUNE_BASE, 0);
    t->off = m->hyper[DORA] <= 0;
    return LM_OK;
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    lm_vid sum = lm_r_add(r, w, lm_tune_lora_scale(m), lm_r_matmul(r, p[B], false, p[A], false));

    if (p[MAGNITUDE] < 0)
        return sum;
    /* A row without length has no direction: it remains zero. */
    return LM_R_MAP(r, "y = w * where(q, m / sqrt(max(q, 1e-37)), 0)", LM_IS("w", sum),
                    LM_IS("q", lm_r_stop(r, lm_r_sum(r, sum, true, false))),
                    LM_IS("m", lm_r_shape2(r, p[MAGNITUDE], m->out, 1)));
}

static lm_vid bias(lm_rule *r, const lm_tune_module *m, lm_vid w, lm_vid b, const lm_vid *p)
{
    (void)w;
    if (p[B_BIAS] < 0)
        return b;
    lm_vid added = lm_r_shape2(r, p[B_BIAS], 1, m->out);
    return b < 0 ? lm_r_scale(r, lm_tune_lora_scale(m), added)
                 : lm_r_add(r, b, lm_tune_lora_scale(m), added);
}

/* DoRA begins with the lengths of the base's rows, so that W' = W: before W itself may change. */
static lm_code start(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int64_t i = 0; v[MAGNITUDE] && i < m->out; i++) {
        double squares = 0;

        for (int64_t j = 0; j < m->in; j++)
            squares += w[i * m->in + j] * w[i * m->in + j];
        v[MAGNITUDE][i] = sqrt(squares);
    }
    if (v[A] && v[B])
        rc = lm_tune_lora_start(m, (int64_t)m->hyper[R], lm_tune_lora_scale(m), w, changed, v[A],
                                v[B], rng, e);
    return rc;
}

/* pissa and olora took the first B A out of W, loftq what its encoding lost. */
static bool changes_base(const lm_tune_module *m)
{
    const char *kind = json_string_value(json_object_get(m->config, "init_lora_weights"));

    return kind && !m->embedding &&
           (!strcmp(kind, "pissa") || !strcmp(kind, "olora") || !strcmp(kind, "loftq"));
}

static lm_code derive(const lm_tune_module *m, double *w, double *const *v, const bool *given,
                      lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];
    double *a = NULL, *b = NULL;
    bool changed = false;
    lm_rng none = lm_rng_make(0, "adapter", 0);
    lm_code rc;

    (void)v, (void)given;
    if (!changes_base(m))
        return LM_OK;
    rc = lm_alloc_n(&a, (size_t)(r * m->in), sizeof *a, "adapter", e);
    rc = rc ? rc : lm_alloc_n(&b, (size_t)(r * m->out), sizeof *b, "adapter", e);
    rc = rc ? rc : lm_tune_lora_start(m, r, lm_tune_lora_scale(m), w, &changed, a, b, none, e);
    lm_free(a);
    lm_free(b);
    return rc;
}

static lm_code low_rank(const lm_tune_module *m, double *const *v, int64_t *rank, double *left,
                        double *right, lm_err *e)
{
    int64_t r = (int64_t)m->hyper[R];

    (void)e;
    *rank = m->hyper[DORA] > 0 || changes_base(m) ? 0 : r;
    for (int64_t i = 0; left && i < m->out * *rank; i++)
        left[i] = lm_tune_lora_scale(m) * v[B][i];
    for (int64_t i = 0; left && i < *rank * m->in; i++)
        right[i] = v[A][i];
    return LM_OK;
}

const lm_tune_method lm_tune_lora = {
    .peft_type = "LORA",
    .name = "lora",
    .about = "W + s B A of low rank",
    .prefix = "lora_",
    .is = LM_TUNE_EMBEDS,
    .hyper = hyper,
    .extra = "{\"bias\": \"none\", \"fan_in_fan_out\": false, \"init_lora_weights\": true, "
             "\"loftq_config\": {}, \"trainable_token_indices\": null}",
    .refused = refused,
    .tensors = tensors,
    .weight = weight,
    .bias = bias,
    .start = start,
    .derive = derive,
    .low_rank = low_rank,
};
