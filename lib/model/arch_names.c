/* SPDX-License-Identifier: Apache-2.0 */
/* arch_names.c -- what a tensor's name says without a config: its part, its place, its order of
 * elements.  All answers follow from the tables of the architectures. */
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "model/arch.h"
#include "model/arch_qwen3_next.h"

const lm_arch *lm_arch_of(const json_t *config)
{
    const char *type = json_string_value(json_object_get(config, "model_type"));
    return type ? lm_arch_find(type) : NULL;
}

/* Length of `name` without a suffix ".weight", "" being one; 0: it has none. */
static size_t stem_length(const char *name, const char *suffix)
{
    size_t n = strlen(name), k = strlen(suffix);
    if (!k)
        return n;
    bool ends = n > k + 1 && !strcmp(name + n - k, suffix) && name[n - k - 1] == '.';
    return ends ? n - k - 1 : 0;
}

/* True if `part` is the last of the n bytes at `name`, or several whole parts at their end; '#' in it stands for
 * digits. */
static bool ends_with(const char *name, size_t n, const char *part)
{
    size_t k = strlen(part);
    for (; k; k--) {
        if (part[k - 1] != '#' && (!n || part[k - 1] != name[n - 1]))
            return false;
        if (part[k - 1] != '#') {
            n--;
            continue;
        }
        if (!n || name[n - 1] < '0' || name[n - 1] > '9')
            return false;
        while (n && name[n - 1] >= '0' && name[n - 1] <= '9')
            n--;
    }
    return !n || name[n - 1] == '.';
}

bool lm_arch_names(lm_part part, const char *suffix, const char *name)
{
    size_t n = stem_length(name, suffix);

    for (int i = 0; n && lm_arch_at(i); i++) {
        const lm_tensor_name *t = lm_arch_part(lm_arch_at(i), part);
        if (t && ends_with(name, n, t->hf))
            return true;
    }
    return false;
}

bool lm_arch_resembles(lm_part part, const char *name)
{
    for (int i = 0; lm_arch_at(i); i++) {
        const lm_tensor_name *t = lm_arch_part(lm_arch_at(i), part);
        if (t && strstr(name, t->hf))
            return true;
    }
    return false;
}

const char *lm_arch_head(const lm_arch *a, char out[LM_TENSOR_NAME])
{
    return lm_tensor_hf_name(a ? a : lm_arch_at(0), LM_PART_OUTPUT, -1, false, out);
}

bool lm_arch_turns(const lm_arch *a, const char *name)
{
    size_t n = a && a->conv1d ? stem_length(name, "weight") : 0;

    for (const lm_tensor_name *t = n ? a->tensors : NULL; t && t->part; t++) {
        const char *dot = strrchr(t->hf, '.');
        if (t->part >= LM_PART_ATTN_NORM && !lm_part_is_norm(t->part) &&
            ends_with(name, n, dot ? dot + 1 : t->hf))
            return true;
    }
    return false;
}

const char *lm_arch_rootless(const char *name)
{
    for (int i = 0; lm_arch_at(i); i++) {
        const char *root = lm_arch_at(i)->root;
        if (!strncmp(name, root, strlen(root)))
            return name + strlen(root);
    }
    return name;
}

const char *lm_arch_present_name(const lm_arch *a, const char *name, char out[LM_TENSOR_NAME])
{
    bool gamma = lm_text_ends(name, ".gamma"), beta = lm_text_ends(name, ".beta");
    size_t n = strlen(name) - (gamma ? strlen("gamma") : strlen("beta"));
    if (!a || !a->old_norms || !(gamma || beta) || n + sizeof "weight" > LM_TENSOR_NAME)
        return name;
    memcpy(out, name, n);
    strcpy(out + n, gamma ? "weight" : "bias");
    return out;
}

static bool in_buffers(const lm_arch *a, const char *name)
{
    for (const char *const *b = a->buffers; b && *b; b++)
        if (lm_text_ends(name, *b))
            return true;
    return false;
}

bool lm_arch_is_buffer(const lm_arch *a, const char *name)
{
    bool is = lm_text_ends(name, "rotary_emb.inv_freq") || (a && in_buffers(a, name));

    for (int i = 0; !a && !is && lm_arch_at(i); i++)
        is = in_buffers(lm_arch_at(i), name);
    return is;
}

int lm_arch_kv_scale(const char *name, int64_t *layer)
{
    const char *at = strstr(name, "layers.");
    char *end;

    if (!at || at[7] < '0' || at[7] > '9' ||
        !(lm_text_ends(name, ".k_scale") || lm_text_ends(name, ".v_scale")))
        return 0;
    *layer = strtoll(at + 7, &end, 10);
    return *end == '.' ? name[strlen(name) - 7] : 0;
}

int64_t lm_config_named_layer(const lm_config *c, int64_t layer)
{
    return c->arch->ahead && layer >= c->layers ? LM_LAYER_AHEAD : layer;
}

int64_t lm_ahead_layer(const lm_config *c, const char *name)
{
    const size_t n = strlen(c->arch->layers);
    char *end;
    if (c->arch->ahead)
        return c->ahead && !strncmp(name, c->arch->ahead, strlen(c->arch->ahead)) ? c->layers : -1;
    if (strncmp(name, c->arch->layers, n) != 0 || name[n] < '0' || name[n] > '9')
        return -1;
    const int64_t layer = strtoll(name + n, &end, 10);
    return *end == '.' && layer >= c->layers && layer < lm_config_depth(c) ? layer : -1;
}

bool lm_config_is_ahead(const lm_config *c, const char *name)
{
    return lm_ahead_layer(c, name) >= 0 || (c->arch->passed_over == lm_mtp_passed_over &&
                                            !strncmp(name, *lm_mtp_passed_over, strlen("mtp.")));
}

bool lm_arch_is_noise(const lm_arch *a, const char *name)
{
    const lm_tensor_name *row = lm_arch_part(a, LM_PART_ROUTER_NOISE);
    const size_t n = row ? stem_length(name, "weight") : 0;
    return n && ends_with(name, n, row->hf);
}

lm_code lm_config_drop_noise(json_t *config, lm_err *e)
{
    static const char key[] = "gate_add_noise";
    return json_is_true(json_object_get(config, key)) &&
                   json_object_set_new(config, key, json_false())
               ? lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for '%s'", key)
               : LM_OK;
}

lm_code lm_config_drop_ahead(json_t *config, lm_err *e)
{
    static const char key[] = "num_nextn_predict_layers";
    return json_integer_value(json_object_get(config, key)) &&
                   json_object_set_new(config, key, json_integer(0))
               ? lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for '%s'", key)
               : LM_OK;
}

bool lm_ahead_is_copy(const lm_config *c, const char *name, lm_part *of)
{
    static const lm_part copies[2] = { LM_PART_AHEAD_EMBED, LM_PART_AHEAD_HEAD };
    const int64_t layer = lm_ahead_layer(c, name);
    char copy[LM_TENSOR_NAME];
    for (int i = 0; layer >= 0 && !c->arch->ahead && i < 2; i++)
        if (!strcmp(name, lm_tensor_hf_name(c->arch, copies[i], layer, false, copy))) {
            *of = i && !c->tied ? LM_PART_OUTPUT : LM_PART_EMBED;
            return true;
        }
    return false;
}

bool lm_config_passes_over(const lm_config *c, const char *name)
{
    const char *const *over = c->arch->passed_over;
    for (; over && *over; over++)
        if (!strncmp(name, *over, strlen(*over)))
            return true;
    return lm_ahead_layer(c, name) >= 0 || lm_arch_is_noise(c->arch, name);
}

/* The config has the module's layer, whether it has the module or not. */
static void find_module(lm_config *c, const lm_model_source *src)
{
    static const char *const keys[] = { "num_nextn_predict_layers", "mtp_num_hidden_layers" };
    const json_t *config = lm_model_source_config(src);
    char name[LM_TENSOR_NAME];
    bool said = c->ahead || !c->arch->ahead;
    for (int i = 0; i < 2; i++)
        said = said || json_object_get(config, keys[i]);
    if (said)
        return;
    lm_tensor_hf_name(c->arch, LM_PART_AHEAD_JOIN, LM_LAYER_AHEAD, false, name);
    c->ahead = lm_model_source_find(src, name) != NULL;
}

void lm_config_see(lm_config *c, const lm_model_source *src)
{
    const json_t *config = lm_model_source_config(src);
    char head[LM_TENSOR_NAME];
    if (c->encoder && !json_is_false(json_object_get(config, "tie_word_embeddings")) &&
        !lm_model_source_find(src, lm_arch_head(c->arch, head)))
        c->tied = true;
    find_module(c, src);
}

bool lm_config_ties(const lm_config *c, const char *name)
{
    char head[LM_TENSOR_NAME];
    if (!c->tied)
        return false;
    return !strcmp(name, lm_arch_head(c->arch, head)) ||
           (c->head_transform &&
            !strcmp(name, lm_tensor_hf_name(c->arch, LM_PART_OUTPUT, -1, true, head)));
}
