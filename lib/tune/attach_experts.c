/* SPDX-License-Identifier: Apache-2.0 */
/* attach_experts.c -- LoRA of the experts of a mixture (target_parameters of PEFT; experts.h): y += s (x A_e^T) B_e^T for
 * the rows of each expert, two grouped products.  lora_A [E r,in] has the rows of one expert below those of another, as grouped
 * products read them; lora_B [out,r E] is turned from the order of PEFT, in which an expert's columns are E apart.  Where
 * both parameters of a layer are changed, that of gate and up is wrapped first, and its tensors have ".base_layer" in
 * their names. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/grouped.h"
#include "op/ops.h"
#include "tune/attach_impl.h"
#include "tune/experts.h"
#include "tune/methods.h"

static const char gate_up[] = "gate_up_proj", down[] = "down_proj";

/* PEFT compares whole ends of names. */
static bool is_target(const lm_attach *a, const char *module, const char *name)
{
    const json_t *all = json_object_get(a->adapter, "target_parameters"), *v;
    char key[2 * LM_TENSOR_NAME];
    size_t i, n = (size_t)snprintf(key, sizeof key, "%s.%s", module, name);

    json_array_foreach((json_t *)(uintptr_t)all, i, v)
    {
        const char *t = json_string_value(v);
        size_t k = t ? strlen(t) : 0;
        if (k && k <= n && !strcmp(key + n - k, t) && (k == n || key[n - k - 1] == '.'))
            return true;
    }
    return false;
}

static lm_vid grouped(lm_builder *b, lm_vid x, lm_vid w, lm_vid offsets, int64_t experts)
{
    if (!lm_b_ok(b))
        return LM_NONE;
    const lm_grouped_attr attr = { experts, lm_b_graph(b)->value[w].t.dim[0] / experts,
                                   LM_ACC_FIRST };
    return lm_b_append(b, &lm_op_grouped_linear, &attr, (lm_vid[]){ x, w, offsets });
}

static lm_vid experts(void *ctx, lm_builder *b, const lm_adapt_experts *place)
{
    lm_attach *a = ctx;
    const char *name = place->down ? down : gate_up;
    const bool inner = !place->down && is_target(a, place->module, down);
    const int64_t count = place->experts;
    char key[2 * LM_TENSOR_NAME];
    double values[64];

    if (!is_target(a, place->module, name))
        return LM_NONE;
    snprintf(key, sizeof key, "%s.%s", place->module, name);
    const lm_tune_module m = { .name = key, .hyper = values, .config = a->adapter };
    if (!lm_b_ok(b) ||
        lm_tune_read_hyper(a->method, a->adapter, key, "adapter_config.json", values, lm_b_err(b)))
        return LM_NONE;
    const lm_value *v = lm_b_graph(b)->value;
    const int64_t in = v[place->w].t.dim[1], out = v[place->w].t.dim[0] / count;
    const int64_t rank = (int64_t)lm_tune_value(a->method, &m, "r");
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    lm_vid left = lm_b_param(b, 2, (int64_t[]){ count * rank, in }, "%s.lora_A", key);
    lm_b_slice(b, count * rank, false, LM_INIT_UNIFORM, 1 / sqrt((double)in),
               "base_model.model.%s%s.lora_A.weight", place->module, inner ? ".base_layer" : "");
    lm_vid h = grouped(b, place->x, left, place->offsets, count);
    lm_vid y = grouped(b, place->x, place->w, place->offsets, count);
    lm_vid right = lm_b_param(b, 2, (int64_t[]){ out, rank * count }, "%s.lora_B", key);
    lm_b_slice(b, out, false, LM_INIT_ZEROS, 0, "base_model.model.%s%s.lora_B.weight",
               place->module, inner ? ".base_layer" : "");
    if (lm_b_ok(b)) {
        right = lm_r_permute(&r, right, 3, (int64_t[]){ out, rank, count }, (int[]){ 2, 0, 1 }, 2,
                             (int64_t[]){ count * out, rank });
        y = lm_r_add(&r, y, lm_tune_lora_scale(&m), grouped(b, h, right, place->offsets, count));
    }
    lm_rule_fini(&r);
    return y;
}

bool lm_attach_names_experts(const json_t *adapter)
{
    return json_array_size(json_object_get(adapter, "target_parameters")) > 0;
}

/* What PEFT does not do with parameters. */
static lm_code check_config(const lm_attach *a, const char *where, lm_err *e)
{
    static const char *const keys[] = { "use_dora", "lora_bias" };
    const char *start = json_string_value(json_object_get(a->adapter, "init_lora_weights"));
    const json_t *all = json_object_get(a->adapter, "target_parameters"), *v;
    size_t i;

    if (a->method != &lm_tune_lora)
        return lm_fail(e, LM_EUSAGE, where, "choose lora",
                       "target_parameters is of LoRA alone, not of %s", a->method->name);
    for (i = 0; i < 2; i++)
        if (json_is_true(json_object_get(a->adapter, keys[i])))
            return lm_fail(e, LM_EUSAGE, where, "leave it out",
                           "%s is set, which target_parameters do not have in PEFT", keys[i]);
    if (json_number_value(json_object_get(a->adapter, "lora_dropout")) > 0)
        return lm_fail(e, LM_EUSAGE, where, "leave it out",
                       "lora_dropout is set, which target_parameters do not have in PEFT");
    if (start && strcmp(start, "gaussian") && strcmp(start, "orthogonal") && strcmp(start, "eva"))
        return lm_fail(e, LM_EUSAGE, where, "choose lora",
                       "init_lora_weights '%.40s' changes the base, which with target_parameters "
                       "is not served",
                       start);
    json_array_foreach((json_t *)(uintptr_t)all, i, v)
    {
        char module[2 * LM_TENSOR_NAME];
        const char *t = json_string_value(v), *dot = t ? strrchr(t, '.') : NULL;
        const char *name = dot ? dot + 1 : t;
        bool known = t && (!strcmp(name, gate_up) || !strcmp(name, down));
        bool any = false;
        for (int64_t l = 0; known && l < a->config->layers; l++) {
            snprintf(module, sizeof module, "%s%lld.mlp.experts", a->config->arch->layers,
                     (long long)l);
            any = any || (a->config->layer[l].moe.experts && is_target(a, module, name));
        }
        if (!any)
            return lm_fail(e, LM_EUSAGE, where,
                           "name mlp.experts.gate_up_proj or mlp.experts.down_proj",
                           "'%.80s' is no parameter of the experts of this model", t ? t : "");
    }
    return LM_OK;
}

lm_code lm_attach_experts_set(lm_attach *a, const char *where, lm_err *e)
{
    if (!lm_attach_names_experts(a->adapter))
        return LM_OK;
    a->adapt.experts = experts;
    return check_config(a, where, e);
}
