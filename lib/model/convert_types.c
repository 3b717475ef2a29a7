/* SPDX-License-Identifier: Apache-2.0 */
/* convert_types.c -- llama.cpp's types of files, and its mixtures. */
#include "model/convert_types.h"

#include <string.h>
#include <strings.h>

#include "base/text.h"
#include "format/gguf.h"
#include "model/convert.h"
#include "numeric/ggml.h"

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };
enum { KEEP = -1 };

struct lm_gguf_recipe {
    const char *name;
    int type; /* of weights in general */
    uint32_t file_type;
    char mix; /* 0: all weights alike; 'S', 'M': llama.cpp's mixtures of that size */
};

static const lm_gguf_recipe recipes[] = {
    { "keep", KEEP, 0, 0 },
    { "f32", LM_GGUF_TYPE_F32, 0, 0 },
    { "f16", LM_GGUF_TYPE_F16, 1, 0 },
    { "bf16", LM_GGUF_TYPE_BF16, 32, 0 },
    { "q8_0", Q8_0, 7, 0 },
    { "q4_0", Q4_0, 2, 0 },
    { "q4_1", Q4_1, 3, 0 },
    { "q5_0", Q5_0, 8, 0 },
    { "q5_1", Q5_1, 9, 0 },
    { "q4_k", Q4_K, 14, 0 },
    { "q5_k", Q5_K, 16, 0 },
    { "q6_k", Q6_K, 18, 0 },
    { "q4_k_s", Q4_K, 14, 'S' },
    { "q4_k_m", Q4_K, 15, 'M' },
    { "q5_k_s", Q5_K, 16, 'S' },
    { "q5_k_m", Q5_K, 17, 'M' },
};

const char *const lm_gguf_types[] = { "keep",   "f32",    "f16",    "bf16",   "q8_0", "q4_0",
                                      "q4_1",   "q5_0",   "q5_1",   "q4_k",   "q5_k", "q6_k",
                                      "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", NULL };

lm_code lm_gguf_recipe_find(const char *name, const lm_gguf_recipe **out, lm_err *e)
{
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++)
        if (!strcasecmp(recipes[i].name, name ? name : "keep")) {
            *out = &recipes[i];
            return LM_OK;
        }
    return lm_fail(e, LM_EUSAGE, "--type", lm_nearest(name, lm_gguf_types),
                   "'%s' is no type of a GGUF file", name);
}

/* The layers whose matrices are worth more bits (llama.cpp, src/llama-quant.cpp). */
static bool more_bits(int64_t i, int64_t n)
{
    return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
}

/* llama.cpp's mixtures, without importance matrix. */
static int mix_type(const lm_gguf_recipe *r, const lm_slot *s, const lm_config *c, int64_t cols)
{
    bool m = r->mix == 'M';

    switch (s->role) {
    case LM_ROLE_OUTPUT:
        return cols % 256 ? Q8_0 : Q6_K;
    case LM_ROLE_EMBED:
        return !c->tied ? r->type : cols % 256 ? Q8_0 : Q6_K;
    case LM_ROLE_V:
    case LM_ROLE_QKV: {
        int type = m && more_bits(s->layer, c->layers)     ? Q6_K
                   : !m && r->type == Q4_K && s->layer < 4 ? Q5_K
                                                           : r->type;
        bool shared = c->arch == LM_ARCH_LLAMA && c->layers == 80 && c->heads != c->kv_heads;
        return shared && type == Q4_K ? Q5_K : type;
    }
    case LM_ROLE_DOWN:
        return m && more_bits(s->layer, c->layers)                 ? Q6_K
               : !m && r->type == Q4_K && s->layer < c->layers / 8 ? Q5_K
                                                                   : r->type;
    default:
        return r->type;
    }
}

/* A row that is no whole number of blocks takes the next larger type of smaller blocks, as
 * llama.cpp's does; no blocks at all, the source's type. */
static int fall_back(int type, int64_t cols, int own)
{
    const lm_ggml_type *t = lm_ggml_of((uint32_t)type);

    if (!t || cols % t->block == 0)
        return type;
    type = type == Q4_K ? Q5_0 : type == Q5_K ? Q5_1 : type == Q6_K ? Q8_0 : own;
    t = lm_ggml_of((uint32_t)type);
    return t && cols % t->block ? own : type;
}

static int plain_type(lm_dtype d)
{
    return d == LM_DTYPE_F16    ? LM_GGUF_TYPE_F16
           : d == LM_DTYPE_BF16 ? LM_GGUF_TYPE_BF16
                                : LM_GGUF_TYPE_F32;
}

uint32_t lm_gguf_recipe_type(const lm_gguf_recipe *r, const lm_config *c, const lm_slot *s,
                             lm_dtype dtype, bool *fell_back)
{
    int64_t dim[2];
    int own = plain_type(dtype), type, fits;

    *fell_back = false;
    if (s->ndim == 1 || s->role == LM_ROLE_POSITION)
        return LM_GGUF_TYPE_F32; /* llama.cpp computes with no other */
    if (r->type == KEEP)
        return (uint32_t)own;
    lm_slot_gguf_dim(s, dim);
    type = r->mix ? mix_type(r, s, c, dim[1]) : r->type;
    fits = fall_back(type, dim[1], own);
    *fell_back = fits != type;
    return (uint32_t)fits;
}

/* file_type of a file that keeps each tensor's own type: that of most bytes of its matrices. */
static uint32_t own_file_type(const lm_slot *s, size_t n, const lm_st_tensor *const *from)
{
    uint64_t bytes[3] = { 0 };
    static const uint32_t types[3] = { 0, 1, 32 };
    int most = 0;

    for (size_t i = 0; i < n; i++)
        if (s[i].ndim == 2) {
            lm_dtype d = from[i]->dtype;
            int k = d == LM_DTYPE_F16 ? 1 : d == LM_DTYPE_BF16 ? 2 : 0;
            if ((bytes[k] += from[i]->bytes) > bytes[most])
                most = k;
        }
    return types[most];
}

uint32_t lm_gguf_recipe_file_type(const lm_gguf_recipe *r, const lm_slot *s, size_t n,
                                  const lm_st_tensor *const *from)
{
    return r->type == KEEP ? own_file_type(s, n, from) : r->file_type;
}
