/* SPDX-License-Identifier: Apache-2.0 */
/* adalora.c -- low-rank adaptation as a singular value decomposition, whose rank is distributed
 * among modules while training (tune/ada.h): W' = W + s B diag(E) A / (init_r + 1e-5),
 * s = lora_alpha (init_r where that is not positive).
 *
 * A [r,in], E [r,1], B [out,r].  rank_pattern of a file lists for each module which of its init_r
 * ranks were kept: r of them, which the file has. Sources: arXiv:2303.10512; huggingface/peft
 * tuners/adalora. */
#include <string.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = {
    { "init_r", 12, 0, 1e6, "rank of every module at the beginning", LM_WHOLE },
    { "lora_alpha", 8, -1e9, 1e9, "scale: alpha / r", NULL },
    { "lora_dropout", 0, 0, 1, "share of inputs dropped in training", NULL },
    { "target_r", 8, 0, 1e6, "mean rank of the modules at the end", LM_WHOLE },
    { "tinit", 0, 0, 1e12, "steps before ranks are taken away", LM_WHOLE },
    { "tfinal", 0, 0, 1e12, "steps at the end, in which the ranks stay", LM_WHOLE },
    { "deltaT", 1, 1, 1e12, "steps between two distributions", LM_WHOLE },
    { "beta1", 0.85, 0, 1, "decay of the averaged sensitivity", NULL },
    { "beta2", 0.85, 0, 1, "decay of its averaged uncertainty", NULL },
    { "orth_reg_weight", 0.5, 0, 1e9, "weight of |A A' - 1| and |B' B - 1| in the loss", NULL },
    { 0 },
};
enum { INIT_R, ALPHA };
enum { A, E, B };

static const char *const refused[] = { "use_dora", "use_rslora", "lora_bias", NULL };

int64_t lm_tune_adalora_rank(const lm_tune_module *m)
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
    int64_t r = lm_tune_adalora_rank(m);

    (void)e;
    *n = 0;
    if (r < 1) /* all were taken away: the module is that of the base */
        return LM_OK;
    lm_tune_tensor_add(out, n, "lora_A", r, m->in, LM_TUNE_NORMAL, LM_TUNE_ADALORA_STD);
    lm_tune_tensor_add(out, n, "lora_E", r, 1, LM_TUNE_ZEROS, 0);
    lm_tune_tensor_add(out, n, "lora_B", m->out, r, LM_TUNE_NORMAL, LM_TUNE_ADALORA_STD);
    return LM_OK;
}

double lm_tune_adalora_scale(const lm_tune_module *m)
{
    double r = m->hyper[INIT_R];

    return (m->hyper[ALPHA] > 0 ? m->hyper[ALPHA] : r) / (r + 1e-5);
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    lm_vid a = LM_R_MAP(r, "y = a * e", LM_IS("a", p[A]), LM_IS("e", p[E]));

    return lm_r_add(r, w, lm_tune_adalora_scale(m), lm_r_matmul(r, p[B], false, a, false));
}

static lm_code low_rank(const lm_tune_module *m, double *const *v, int64_t *rank, double *left,
                        double *right, lm_err *e)
{
    int64_t r = *rank = lm_tune_adalora_rank(m);

    (void)e;
    for (int64_t i = 0; left && i < m->out * r; i++)
        left[i] = lm_tune_adalora_scale(m) * v[B][i];
    for (int64_t i = 0; left && i < r * m->in; i++)
        right[i] = v[A][i] * v[E][i / m->in];
    return LM_OK;
}

const lm_tune_method lm_tune_adalora = {
    .peft_type = "ADALORA",
    .name = "adalora",
    .about = "low-rank adaptation by singular values, whose ranks are distributed",
    .prefix = "lora_",
    .hyper = hyper,
    .refused = refused,
    .extra = "{\"total_step\": null, \"rank_pattern\": null}",
    .tensors = tensors,
    .weight = weight,
    .low_rank = low_rank,
};
