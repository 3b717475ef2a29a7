/* SPDX-License-Identifier: Apache-2.0 */
/* attach_bottleneck.c -- bottleneck adapters: h + s (W_up f(W_down x + b) + b') behind attention,
 * the MLP, or both; of a model with an encoder in both stacks, and with `cross_adapter` behind the
 * decoder's attention to it.
 *
 * Houlsby's (arXiv:1902.00751) are behind both and read x = h; Pfeiffer's (arXiv:2005.00247) behind
 * the MLP, and read h with the residual stream added (original_ln_before).  Configurations and
 * names are those of AdapterHub's library:
 * {"config": {"mh_adapter", "output_adapter", "cross_adapter", "reduction_factor",
 *             "non_linearity", "original_ln_before", "scaling"},
 *  "name": NAME}, tensors
 *  LAYER.{attention,output}_adapters.adapters.NAME.{adapter_down.0,adapter_up}.{weight,bias},
 * of T5 BLOCK.layer.N.adapters.NAME..., as its branches have numbers.
 * W_down is drawn with deviation 0.02, W_up and the biases begin at zero, so that a new adapter
 * changes nothing. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/elementwise.h"
#include "op/ops.h"
#include "tune/attach_impl.h"

bool lm_attach_bottleneck_is(const json_t *adapter)
{
    const json_t *c = json_object_get(adapter, "config");
    return json_object_get(c, "reduction_factor") &&
           (json_object_get(c, "mh_adapter") || json_object_get(c, "output_adapter"));
}

/* ---- the place ---- */

enum { MODULE_NAME = 256 };

/* The module of a place, as files name it; in front of ".weight" and ".bias". */
static void module_name(const lm_attach *a, const lm_adapt_branch *place, const char *part,
                        char out[static MODULE_NAME])
{
    const lm_config *c = place->encoder ? a->config->encoder : a->config;
    const char *name = json_string_value(json_object_get(a->adapter, "name"));
    const int layer = (int)place->layer, branch = place->cross            ? 1
                                                  : !place->mlp           ? 0
                                                  : c->layer[layer].cross ? 2
                                                                          : 1;
    if (a->config->encoder)
        snprintf(out, MODULE_NAME, "%s%d.layer.%d.adapters.%s.%s", c->arch->layers, layer, branch,
                 name, part);
    else
        snprintf(out, MODULE_NAME, "%s%d.%s_adapters.adapters.%s.%s", c->arch->layers, layer,
                 place->mlp ? "output" : "attention", name, part);
}

/* A linear layer of the adapter on x. */
static lm_vid dense(const lm_attach *a, lm_builder *b, const lm_adapt_branch *place,
                    const char *part, bool drawn, lm_vid x, int64_t in, int64_t out)
{
    char module[MODULE_NAME];
    module_name(a, place, part, module);
    lm_vid w = lm_b_param(b, 2, (int64_t[]){ out, in }, "%s.weight", module);
    lm_b_slice(b, out, false, drawn ? LM_INIT_NORMAL : LM_INIT_ZEROS, drawn ? 0.02 : 0, "%s.weight",
               module);
    lm_vid bias = lm_b_param(b, 1, (int64_t[]){ out }, "%s.bias", module);
    lm_b_slice(b, out, false, LM_INIT_ZEROS, 0, "%s.bias", module);
    return lm_b_linear(b, x, w, bias);
}

static lm_vid activate(const lm_attach *a, lm_builder *b, lm_vid x)
{
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    lm_gelu_attr exact = { a->neck.act == NECK_GELU };
    lm_vid y = a->neck.act == NECK_RELU ? LM_R_MAP(&r, "y = max(x, 0)", LM_IS("x", x))
               : a->neck.act == NECK_SWISH
                   ? LM_R_MAP(&r, "y = x / " LM_SIGMOID_DIVISOR("x"), LM_IS("x", x))
                   : lm_b_append(b, &lm_op_gelu, &exact, &x);
    lm_rule_fini(&r);
    return y;
}

static lm_vid branch(void *ctx, lm_builder *b, const lm_adapt_branch *place)
{
    const lm_attach *a = ctx;
    if (!(place->mlp ? a->neck.mlp : place->cross ? a->neck.cross : a->neck.attention))
        return LM_NONE;
    int64_t width = a->config->width;
    lm_vid x = a->neck.with_stream ? lm_b_add(b, place->h, place->stream) : place->h;
    x = dense(a, b, place, "adapter_down.0", true, x, width, a->neck.width);
    x = lm_b_ok(b) ? activate(a, b, x) : LM_NONE;
    x = dense(a, b, place, "adapter_up", false, x, a->neck.width, width);
    if (!lm_b_ok(b) || a->neck.scale == 1)
        return lm_b_add(b, place->h, x);
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    lm_vid y = lm_r_add(&r, place->h, a->neck.scale, x);
    lm_rule_fini(&r);
    return y;
}

/* ---- the configuration ---- */

static bool flag(const json_t *c, const char *key)
{
    return json_is_true(json_object_get(c, key));
}

/* Whether the configuration asks for it: not false, null, 0 or an empty list. */
static bool is_set(const json_t *v)
{
    return v && !json_is_false(v) && !json_is_null(v) &&
           !(json_is_array(v) && !json_array_size(v)) &&
           !(json_is_number(v) && json_number_value(v) == 0);
}

lm_code lm_attach_bottleneck_set(lm_attach *a, const char *where, lm_err *e)
{
    static const char *const names[] = { "relu", "gelu", "gelu_new", "swish" };
    static const char *const refused[] = { "is_parallel",
                                           "ln_before",
                                           "ln_after",
                                           "use_gating",
                                           "phm_layer",
                                           "inv_adapter",
                                           "adapter_residual_before_ln",
                                           "dropout",
                                           "stochastic_depth",
                                           "leave_out" };
    static const char *const needed[] = { "residual_before_ln", "original_ln_after" };
    const json_t *c = json_object_get(a->adapter, "config");
    const json_t *factor = json_object_get(c, "reduction_factor");
    const json_t *scaling = json_object_get(c, "scaling");
    const char *function = json_string_value(json_object_get(c, "non_linearity"));
    if (flag(c, "cross_adapter") && !a->config->encoder)
        return lm_fail(e, LM_EUSAGE, where, "set it to false",
                       "cross_adapter stands behind attention to an encoder, which the base lacks");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const json_t *v = json_object_get(c, refused[i]);
        if (is_set(v))
            return lm_fail(e, LM_EUSAGE, where, "use the program that made it",
                           "bottleneck adapters with %s are not served", refused[i]);
    }
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        const json_t *v = json_object_get(c, needed[i]);
        if (v && !json_is_true(v))
            return lm_fail(e, LM_EUSAGE, where, "use the program that made it",
                           "bottleneck adapters are served only with %s", needed[i]);
    }
    if (!json_is_string(json_object_get(a->adapter, "name")) || !json_is_number(factor) ||
        !(json_number_value(factor) > 0 && json_number_value(factor) <= 1e6) ||
        (scaling && !json_is_number(scaling)))
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "name, reduction_factor or scaling is missing or not of its type");
    a->neck.act = -1;
    for (int i = 0; function && i < NECK_FUNCTIONS; i++)
        if (!strcmp(function, names[i]))
            a->neck.act = i;
    if (a->neck.act < 0)
        return lm_fail(e, LM_EUSAGE, where, "choose relu, gelu, gelu_new or swish",
                       "the function %.20s is not known", function ? function : "(none)");
    a->neck.attention = flag(c, "mh_adapter");
    a->neck.mlp = flag(c, "output_adapter");
    a->neck.cross = flag(c, "cross_adapter");
    a->neck.with_stream = flag(c, "original_ln_before");
    a->neck.scale = scaling ? json_number_value(scaling) : 1;
    a->neck.width = (int64_t)((double)a->config->width / json_number_value(factor));
    a->neck.width += a->neck.width < 1;
    a->adapt.branch = branch;
    return LM_OK;
}
