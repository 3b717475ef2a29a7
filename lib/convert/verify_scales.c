/* SPDX-License-Identifier: Apache-2.0 */
/* verify_scales.c -- quantised weights and their scales, by their names in published formats:
 * compressed-tensors and ModelOpt (weight_scale ...), DeepSeek's FP8 (weight_scale_inv), GPTQ and
 * AWQ (qweight, scales, qzeros, g_idx), bitsandbytes (absmax ...), MXFP4 of gpt-oss (_blocks,
 * _scales), and our coded weights (codes, scales). */
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "convert/verify.h"

enum { NAME = 512 };

/* A tensor ending in `suffix` belongs to one with the same stem and one of the other endings. */
static const struct {
    const char *suffix, *owner[3]; /* up to the first NULL */
} scales[] = {
    { ".weight_scale_inv", { ".weight" } },
    { ".weight_scale_2", { ".weight", ".weight_packed" } },
    { ".weight_scale", { ".weight", ".weight_packed" } },
    { ".weight_global_scale", { ".weight_packed", ".weight" } },
    { ".weight_zero_point", { ".weight_packed", ".weight" } },
    { ".weight_shape", { ".weight_packed" } },
    { ".weight_g_idx", { ".weight_packed" } },
    { ".input_scale", { ".weight", ".weight_packed" } },
    { ".input_global_scale", { ".weight", ".weight_packed" } },
    { ".input_zero_point", { ".weight", ".weight_packed" } },
    { ".output_scale", { ".weight", ".weight_packed" } },
    { ".k_scale", { ".weight", ".weight_packed" } },
    { ".v_scale", { ".weight", ".weight_packed" } },
    { ".scales", { ".qweight", ".codes" } },
    { ".qzeros", { ".qweight" } },
    { ".g_idx", { ".qweight" } },
    { ".SCB", { ".weight" } },
    { ".weight_format", { ".weight" } },
    { ".nested_absmax", { "" } },
    { ".nested_quant_map", { "" } },
    { ".absmax", { "" } },
    { ".quant_map", { "" } },
    { ".quant_state.bitsandbytes__nf4", { "" } },
    { ".quant_state.bitsandbytes__fp4", { "" } },
    { "_scale_inv", { "" } },
    { "_scales", { "_blocks" } },
};

/* A weight in a form that cannot be read without one of these. */
static const struct {
    const char *suffix, *plain, *scale[3];
} packed[] = {
    { ".qweight", ".weight", { ".scales" } },
    { ".weight_packed", ".weight", { ".weight_scale" } },
    { ".codes", "", { ".scales" } },
    { "_blocks", "", { "_scales" } },
};

static const char *const of_weight[] = { ".weight_scale_inv", ".weight_scale", ".weight.absmax",
                                         ".SCB", ".weight.scales" };

/* The stem of `name` with another end; false if it is too long. */
static bool with_end(const char *name, const char *suffix, const char *end, char *out, size_t cap)
{
    size_t stem = strlen(name) - strlen(suffix);
    int n = snprintf(out, cap, "%.*s%s", (int)stem, name, end);
    return n > 0 && (size_t)n < cap;
}

static int scale_of(const char *name)
{
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
        if (lm_text_ends(name, scales[i].suffix) && strlen(name) > strlen(scales[i].suffix))
            return (int)i;
    return -1;
}

static int packed_of(const char *name)
{
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++)
        if (lm_text_ends(name, packed[i].suffix) && strlen(name) > strlen(packed[i].suffix))
            return (int)i;
    return -1;
}

bool lm_verify_is_scale(const char *name)
{
    return scale_of(name) >= 0;
}

bool lm_verify_is_packed(const char *name, char *plain, size_t cap)
{
    int k = packed_of(name);
    return k >= 0 && with_end(name, packed[k].suffix, packed[k].plain, plain, cap);
}

/* True if a tensor with the stem of `name` and one of these ends exists. */
static bool has_one(const lm_model_source *m, const char *name, const char *suffix,
                    const char *const *ends, int n)
{
    char other[NAME];
    for (int i = 0; i < n && ends[i]; i++)
        if (with_end(name, suffix, ends[i], other, sizeof other) && lm_model_source_find(m, other))
            return true;
    return false;
}

static bool weight_has_scale(const lm_model_source *m, const char *name)
{
    return has_one(m, name, ".weight", of_weight, sizeof of_weight / sizeof *of_weight);
}

/* Integers without a scale are not weights; FP8 may be, unless other FP8 weights of the model have
 * scales. */
static bool needs_scale(const lm_st_tensor *t, bool scaled_fp8)
{
    const char *d = t->dtype_name;
    if (!lm_text_ends(t->name, ".weight") || t->ndim < 2)
        return false;
    return !strcmp(d, "I8") || !strcmp(d, "U8") || !strcmp(d, "I32") || !strcmp(d, "F4") ||
           (scaled_fp8 && !strncmp(d, "F8_", 3));
}

const lm_st_tensor *lm_verify_scaled_fp8(const lm_model_source *m)
{
    for (size_t i = 0; i < lm_model_source_count(m); i++) {
        const lm_st_tensor *t = lm_model_source_at(m, i);
        if (!strncmp(t->dtype_name, "F8_", 3) && lm_text_ends(t->name, ".weight") &&
            weight_has_scale(m, t->name))
            return t;
    }
    return NULL;
}

void lm_verify_scales(const lm_model_source *m, lm_findings *f)
{
    bool fp8 = lm_verify_scaled_fp8(m);
    for (size_t i = 0; i < lm_model_source_count(m); i++) {
        const lm_st_tensor *t = lm_model_source_at(m, i);
        const char *file = lm_model_source_file_of(m, t);
        int s = scale_of(t->name), p = packed_of(t->name);
        if (s >= 0 && !has_one(m, t->name, scales[s].suffix, scales[s].owner, 3))
            lm_verify_say(f, true, file, t->name, "its weight is missing: no tensor '%.*s%s'",
                          (int)(strlen(t->name) - strlen(scales[s].suffix)), t->name,
                          scales[s].owner[0]);
        if (p >= 0 && !has_one(m, t->name, packed[p].suffix, packed[p].scale, 3))
            lm_verify_say(f, true, file, t->name, "its scale is missing: no tensor '%.*s%s'",
                          (int)(strlen(t->name) - strlen(packed[p].suffix)), t->name,
                          packed[p].scale[0]);
        if (needs_scale(t, fp8) && !weight_has_scale(m, t->name))
            lm_verify_say(f, true, file, t->name, "its scale is missing: it is %s, %s",
                          t->dtype_name,
                          t->dtype_name[0] == 'F' && t->dtype_name[1] == '8'
                              ? "and other such weights have one"
                              : "which is not a weight without it");
    }
}
