/* SPDX-License-Identifier: Apache-2.0 */
/* ia3.c -- scales of outputs, y' = l o (W x + b), or of the inputs of feed-forward modules, y = W
 * (l o x) + b. l [out,1], or [1,in] for a module that feedforward_modules names.
 * Sources: arXiv:2205.05638; huggingface/peft tuners/ia3. */
#include <string.h>

#include "tune/methods.h"

static const lm_hyper hyper[] = { { 0 } };

/* feedforward_modules is a list of ends of names, or a regular expression. */
static bool scales_input(const lm_tune_module *m, lm_err *e)
{
    /* PEFT's usual ones of decoders and T5 */
    static const char *const usual[] = { ".down_proj", "mlp.c_proj",    ".w2", ".fc2",
                                         ".fc_out",    "dense_4h_to_h", ".wo", NULL };
    const json_t *list = json_object_get(m->config, "feedforward_modules"), *v;
    size_t i, n = strlen(m->name);
    bool hit = false;

    for (int k = 0; (!list || json_is_null(list)) && usual[k]; k++) {
        size_t len = strlen(usual[k]);

        hit = hit || (len < n && !strcmp(m->name + n - len, usual[k]));
    }
    if (json_is_string(list)) {
        lm_tune_matches(json_string_value(list), m->name, &hit, e);
        return hit;
    }
    json_array_foreach((json_t *)(uintptr_t)list, i, v)
    {
        const char *end = json_is_string(v) ? json_string_value(v) : "";
        size_t k = strlen(end);

        hit = hit || (k && k <= n && !strcmp(m->name + n - k, end));
    }
    return hit;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    bool inputs = scales_input(m, e);

    *n = 0;
    lm_tune_tensor_add(out, n, "ia3_l", inputs ? 1 : m->out, inputs ? m->in : 1, LM_TUNE_ONES, 0);
    return e->code;
}

static lm_vid product(lm_rule *r, lm_vid a, lm_vid b)
{
    return LM_R_MAP(r, "y = a * b", LM_IS("a", a), LM_IS("b", b));
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    (void)m;
    return product(r, w, p[0]);
}

static bool of_input(lm_rule *r, const lm_vid *p)
{
    return lm_r_dim(r, p[0], 0) == 1 && lm_r_dim(r, p[0], 1) != 1;
}

static lm_vid bias(lm_rule *r, const lm_tune_module *m, lm_vid w, lm_vid b, const lm_vid *p)
{
    (void)w;
    return b < 0 || of_input(r, p) ? b : product(r, b, lm_r_shape2(r, p[0], 1, m->out));
}

static lm_vid input(lm_rule *r, const lm_tune_module *m, lm_vid x, const lm_vid *p)
{
    (void)m;
    return of_input(r, p) ? product(r, x, p[0]) : x;
}

static lm_vid output(lm_rule *r, const lm_tune_module *m, lm_vid x, lm_vid y, const lm_vid *p)
{
    (void)x;
    return of_input(r, p) ? y : product(r, y, lm_r_shape2(r, p[0], 1, m->out));
}

const lm_tune_method lm_tune_ia3 = {
    .peft_type = "IA3",
    .name = "ia3",
    .about = "scales of outputs and inputs",
    .prefix = "ia3_",
    .hyper = hyper,
    .extra = "{\"feedforward_modules\": null, \"fan_in_fan_out\": false}",
    .tensors = tensors,
    .weight = weight,
    .bias = bias,
    .input = input,
    .output = output,
};
