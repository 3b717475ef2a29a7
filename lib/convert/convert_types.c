/* SPDX-License-Identifier: Apache-2.0 */
/* convert_types.c -- llama.cpp's types of files, and its mixtures. */
#include "convert/convert_types.h"

#include <string.h>
#include <strings.h>

#include "base/text.h"
#include "convert/convert.h"
#include "format/gguf.h"
#include "numeric/format.h"

enum {
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23
};
enum { KEEP = -1 };
/* llama.cpp gives the attention of such mixtures more bits: it is small beside the experts. */
enum { EIGHT_EXPERTS = 8 };

/* llama.cpp's mixtures by name; ALIKE: all weights in one type. */
typedef enum {
    ALIKE,
    MIX_Q2,
    MIX_Q2_S,
    MIX_Q3_S,
    MIX_Q3_M,
    MIX_Q3_L,
    MIX_S,
    MIX_M,
    MIX_IQ4
} mixture;

struct lm_gguf_recipe {
    const char *name;
    int type; /* type of most weights */
    uint32_t file_type;
    mixture mix;
};

static const lm_gguf_recipe recipes[] = {
    { "keep", KEEP, 0, ALIKE },
    { "f32", LM_GGUF_TYPE_F32, 0, ALIKE },
    { "f16", LM_GGUF_TYPE_F16, 1, ALIKE },
    { "bf16", LM_GGUF_TYPE_BF16, 32, ALIKE },
    { "q8_0", Q8_0, 7, ALIKE },
    { "q4_0", Q4_0, 2, ALIKE },
    { "q4_1", Q4_1, 3, ALIKE },
    { "q5_0", Q5_0, 8, ALIKE },
    { "q5_1", Q5_1, 9, ALIKE },
    { "q4_k", Q4_K, 14, ALIKE },
    { "q5_k", Q5_K, 16, ALIKE },
    { "q6_k", Q6_K, 18, ALIKE },
    { "q2_k", Q2_K, 10, MIX_Q2 },
    { "q2_k_s", Q2_K, 21, MIX_Q2_S },
    { "q3_k_s", Q3_K, 11, MIX_Q3_S },
    { "q3_k_m", Q3_K, 12, MIX_Q3_M },
    { "q3_k_l", Q3_K, 13, MIX_Q3_L },
    { "q4_k_s", Q4_K, 14, MIX_S },
    { "q4_k_m", Q4_K, 15, MIX_M },
    { "q5_k_s", Q5_K, 16, MIX_S },
    { "q5_k_m", Q5_K, 17, MIX_M },
    { "iq4_nl", IQ4_NL, 25, MIX_IQ4 },
    { "iq4_xs", IQ4_XS, 30, MIX_IQ4 },
};

const char *const lm_gguf_types[] = { "keep",   "f32",    "f16",    "bf16",   "q8_0",   "q4_0",
                                      "q4_1",   "q5_0",   "q5_1",   "q4_k",   "q5_k",   "q6_k",
                                      "q2_k",   "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s",
                                      "q4_k_m", "q5_k_s", "q5_k_m", "iq4_nl", "iq4_xs", NULL };

lm_code lm_gguf_recipe_find(const char *name, const lm_gguf_recipe **out, lm_err *e)
{
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++)
        if (!strcasecmp(recipes[i].name, name ? name : "keep")) {
            *out = &recipes[i];
            return LM_OK;
        }
    return lm_fail(e, LM_EUSAGE, "matrix type", lm_nearest(name, lm_gguf_types),
                   "'%s' is not a type of a GGUF file", name);
}

/* The layers whose matrices get more bits (llama.cpp, src/llama-quant.cpp). */
static bool more_bits(int64_t i, int64_t n)
{
    return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
}

/* Attention's values, alone or with queries and keys. */
static int values_type(const lm_gguf_recipe *r, const lm_model_tensor *s, const lm_config *c)
{
    const lm_layer *y = &c->layer[s->layer];
    bool grouped = y->heads / y->kv_heads >= 4;
    /* llama.cpp's criterion for 70B: few values shared by many heads */
    bool shared = c->layers == 80 && (!strcmp(c->arch->gguf, "qwen2") ||
                                      (!strcmp(c->arch->gguf, "llama") && y->heads != y->kv_heads));
    int type = r->type;

    switch (r->mix) {
    case MIX_Q2:
        type = grouped ? Q4_K : Q3_K;
        break;
    case MIX_Q2_S:
        type = grouped ? Q4_K : r->type;
        break;
    case MIX_Q3_M:
        type = s->layer < 2 ? Q5_K : Q4_K;
        break;
    case MIX_Q3_L:
        type = Q5_K;
        break;
    case MIX_IQ4:
        type = grouped ? Q5_K : r->type;
        break;
    case MIX_M:
        type = more_bits(s->layer, c->layers) ? Q6_K : r->type;
        break;
    case MIX_S:
        type = r->type == Q4_K && s->layer < 4 ? Q5_K : r->type;
        break;
    default:
        break;
    }
    return shared && (type == Q3_K || type == Q4_K) ? Q5_K : type;
}

/* The second matrices of the MLP. */
static int down_type(const lm_gguf_recipe *r, const lm_model_tensor *s, const lm_config *c,
                     bool importance)
{
    bool early = s->layer < c->layers / 8;

    switch (r->mix) {
    case MIX_Q2:
        return Q3_K;
    case MIX_Q2_S:
        return early ? Q4_K : r->type;
    case MIX_Q3_M:
        return s->layer < c->layers / 16 ? Q5_K : Q4_K;
    case MIX_Q3_L:
        return Q5_K;
    case MIX_IQ4:
        return early && !importance ? Q5_K : r->type;
    case MIX_M:
        return more_bits(s->layer, c->layers) ? Q6_K : r->type;
    case MIX_S:
        return early && r->type == Q4_K ? Q5_K : r->type;
    default:
        return r->type;
    }
}

static bool has_eight(const lm_model_tensor *s, const lm_config *c)
{
    return s->layer >= 0 && c->layer[s->layer].moe.experts == EIGHT_EXPERTS;
}

/* The projection of the attention's result. */
static int output_type(const lm_gguf_recipe *r, bool eight)
{
    switch (r->mix) {
    case MIX_Q2:
        return eight ? Q5_K : Q3_K;
    case MIX_Q3_M:
        return eight ? Q5_K : Q4_K;
    case MIX_Q3_L:
        return eight ? r->type : Q5_K;
    case MIX_Q3_S:
    case MIX_IQ4:
        return eight ? Q5_K : r->type;
    case MIX_S:
    case MIX_M:
        return eight && r->type == Q4_K ? Q5_K : r->type;
    default:
        return r->type;
    }
}

static int mix_type(const lm_gguf_recipe *r, const lm_model_tensor *s, const lm_config *c,
                    bool importance, int64_t cols)
{
    switch (s->part) {
    case LM_PART_OUTPUT:
        return cols % 256 ? Q8_0 : Q6_K;
    case LM_PART_EMBED:
        return !c->tied ? r->type : cols % 256 ? Q8_0 : Q6_K;
    case LM_PART_V:
    case LM_PART_QKV:
        return has_eight(s, c) ? Q8_0 : values_type(r, s, c);
    case LM_PART_K:
        return has_eight(s, c) ? Q8_0 : r->type;
    case LM_PART_DOWN:
    case LM_PART_STACK_OUT:
    case LM_PART_EXPERT_DOWN:
    case LM_PART_SHARED_DOWN:
        return down_type(r, s, c, importance);
    case LM_PART_ATTN_OUT:
        return output_type(r, has_eight(s, c));
    default:
        return r->type;
    }
}

/* A row that is not a whole number of blocks gets the next larger type of smaller blocks, as
 * llama.cpp's does; no blocks at all, the source's type. */
static int fall_back(int type, int64_t cols, int own)
{
    if (cols % lm_format_group(lm_format_of_gguf((uint32_t)type)) == 0)
        return type;
    type = type == Q2_K || type == Q3_K ? Q4_0
           : type == Q4_K               ? Q5_0
           : type == Q5_K               ? Q5_1
           : type == Q6_K               ? Q8_0
           : type == IQ4_XS             ? IQ4_NL
                                        : own;
    return cols % lm_format_group(lm_format_of_gguf((uint32_t)type)) ? own : type;
}

static int plain_type(lm_dtype d)
{
    return d == LM_DTYPE_F16    ? LM_GGUF_TYPE_F16
           : d == LM_DTYPE_BF16 ? LM_GGUF_TYPE_BF16
                                : LM_GGUF_TYPE_F32;
}

uint32_t lm_gguf_recipe_type(const lm_gguf_rule *rule, const lm_config *c, const lm_model_tensor *s,
                             lm_dtype dtype, bool *fell_back)
{
    const lm_gguf_recipe *r = rule->recipe;
    int64_t dim[2];
    int own = plain_type(dtype), type, fits;

    *fell_back = false;
    c = lm_model_tensor_config(c, s);
    if (s->ndim == 1 || s->bias || s->part == LM_PART_POSITION || s->part == LM_PART_ROUTER ||
        s->part == LM_PART_SHARED_SWITCH || s->part == LM_PART_DELTA_CONV ||
        s->part == LM_PART_TYPES || s->part == LM_PART_RELATIVE)
        return LM_GGUF_TYPE_F32; /* llama.cpp computes with F32 only */
    if (r->type == KEEP)
        return (uint32_t)own;
    lm_model_tensor_gguf_dim(s, dim);
    type = r->mix && !rule->pure ? mix_type(r, s, c, rule->importance, dim[1]) : r->type;
    fits = fall_back(type, dim[1], own);
    *fell_back = fits != type;
    return (uint32_t)fits;
}

bool lm_gguf_type_mixes(const char *type)
{
    const lm_gguf_recipe *r = NULL;
    lm_err e = { 0 };

    return !lm_gguf_recipe_find(type, &r, &e) && r->mix != ALIKE;
}

bool lm_gguf_type_weighs(const char *type)
{
    const lm_gguf_recipe *r = NULL;
    lm_err e = { 0 };

    return !lm_gguf_recipe_find(type, &r, &e) && r->type != KEEP &&
           lm_format_weighs(lm_format_of_gguf((uint32_t)r->type));
}

/* file_type of a file that keeps each tensor's own type: that of most bytes of its matrices. */
static uint32_t own_file_type(const lm_model_tensor *s, size_t n, const lm_st_tensor *const *from)
{
    uint64_t bytes[3] = { 0 };
    static const uint32_t types[3] = { 0, 1, 32 };
    int most = 0;

    for (size_t i = 0; i < n; i++)
        if (s[i].ndim >= 2 && !s[i].bias) {
            lm_dtype d = from[i]->dtype;
            int k = d == LM_DTYPE_F16 ? 1 : d == LM_DTYPE_BF16 ? 2 : 0;
            if ((bytes[k] += from[i]->bytes) > bytes[most])
                most = k;
        }
    return types[most];
}

bool lm_gguf_recipe_keeps(const lm_gguf_recipe *r)
{
    return r->type == KEEP;
}

uint32_t lm_gguf_recipe_file_type(const lm_gguf_recipe *r, const lm_model_tensor *s, size_t n,
                                  const lm_st_tensor *const *from)
{
    return r->type == KEEP ? own_file_type(s, n, from) : r->file_type;
}
