/* SPDX-License-Identifier: Apache-2.0 */
/* adalora.c -- low-rank adaptation as a singular value decomposition, whose rank is distributed
 * among modules while training: W' = W + s B diag(E) A / (r + 1e-5), s = lora_alpha (r where that
 * is not positive), r the module's rank in the file.
 *
 * A [r,in], E [r,1], B [out,r].  rank_pattern of such a file lists for each module which of the
 * first ranks were kept. Sources: arXiv:2303.10512; huggingface/peft tuners/adalora. */
#include <string.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "init_r", 12, 0, 1e6, "rank of every module at the beginning", LM_WHOLE },
    { "lora_alpha", 8, -1e9, 1e9, "scale: alpha / r", NULL },
    { "lora_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { "target_r", 8, 0, 1e6, "of PEFT's training; kept in the file, not used here", LM_WHOLE },
    { "tinit", 0, 0, 1e12, "of PEFT's training; kept in the file, not used here", LM_WHOLE },
    { "tfinal", 0, 0, 1e12, "of PEFT's training; kept in the file, not used here", LM_WHOLE },
    { "deltaT", 1, 1, 1e12, "of PEFT's training; kept in the file, not used here", LM_WHOLE },
    { "beta1", 0.85, 0, 1, "of PEFT's training; kept in the file, not used here", NULL },
    { "beta2", 0.85, 0, 1, "of PEFT's training; kept in the file, not used here", NULL },
    { "orth_reg_weight", 0.5, 0, 1e9, "of PEFT's training; kept in the file, not used here", NULL },
    { 0 },
};
enum { INIT_R, ALPHA };
enum { A, E, B };

static const char *const refused[] = { "use_dora", "use_rslora", "lora_bias", NULL };

/* The rank that rank_pattern leaves the module: the number of entries that are true under a key
 * that names it. */
static int64_t rank_of(const lm_tune_module *m)
{
    const char *key;
    json_t *list, *v;
    size_t i;

    json_object_foreach(json_object_get(m->config, "rank_pattern"), key, list)
    {
        const char *end = strstr(key, ".lora_E"), *name = strstr(key, m->name);
        int64_t n = 0;

        if (!end || !name || name + strlen(m->name) != end || !json_is_array(list))
            continue;
        json_array_foreach(list, i, v) n += json_is_true(v);
        return n;
    }
    return (int64_t)m->hyper[INIT_R];
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t r = rank_of(m);

    if (r < 1)
        return lm_fail(e, LM_EUSAGE, m->name, "train it without this module",
                       "its rank is 0, of which no tensor can be kept");
    *n = 0;
    lm_tune_tensor_add(out, n, "lora_A", r, m->in, LM_TUNE_NORMAL, 0.02);
    lm_tune_tensor_add(out, n, "lora_E", r, 1, LM_TUNE_ZEROS, 0);
    lm_tune_tensor_add(out, n, "lora_B", m->out, r, LM_TUNE_NORMAL, 0.02);
    return LM_OK;
}

static double scale_of(const lm_tune_module *m, int64_t r)
{
    return (m->hyper[ALPHA] > 0 ? m->hyper[ALPHA] : (double)r) / ((double)r + 1e-5);
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    lm_vid a = LM_R_MAP(r, "y = a * e", LM_IS("a", p[A]), LM_IS("e", p[E]));

    return lm_r_add(r, w, scale_of(m, lm_r_dim(r, p[A], 0)), lm_r_matmul(r, p[B], false, a, false));
}

static lm_code low_rank(const lm_tune_module *m, double *const *v, int64_t *rank, double *left,
                        double *right, lm_err *e)
{
    int64_t r = *rank = rank_of(m);

    (void)e;
    for (int64_t i = 0; left && i < m->out * r; i++)
        left[i] = scale_of(m, r) * v[B][i];
    for (int64_t i = 0; left && i < r * m->in; i++)
        right[i] = v[A][i] * v[E][i / m->in];
    return LM_OK;
}

const lm_tune_method lm_tune_adalora = {
    .peft_type = "ADALORA",
    .name = "adalora",
    .about = "low-rank adaptation by singular values; its ranks stay",
    .prefix = "lora_",
    .hyper = hyper,
    .refused = refused,
    .extra = "{\"total_step\": 1}",
    .tensors = tensors,
    .weight = weight,
    .low_rank = low_rank,
};
