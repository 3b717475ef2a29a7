/* SPDX-License-Identifier: Apache-2.0 */
/* codec.c -- the registry of number formats, and the codecs whose codes are plain elements of a
 * dtype; block formats have files of their own. */
#include "numeric/codec.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "numeric/codec_dynamic.h"

static void encode_row(const lm_codec *c, const float *x, int64_t n, void *codes,
                       const lm_codec_mode *mode, uint64_t index)
{
    bool lossless = c->element == LM_DTYPE_F32, fp8 = c->bits == 8;
    for (int64_t j = 0; !lossless && mode->rounding == LM_ROUND_STOCHASTIC && j < n; j++) {
        uint32_t r = lm_rng_u32(mode->rng, index + (uint64_t)j);
        uint16_t code = lm_f64_round_sr(c->element, x[j], r, mode->saturate);
        if (fp8)
            ((uint8_t *)codes)[j] = (uint8_t)code;
        else
            ((uint16_t *)codes)[j] = code;
    }
    if (!lossless && mode->rounding == LM_ROUND_STOCHASTIC)
        return;
    if (!mode->saturate || lossless) {
        lm_convert(LM_DTYPE_F32, x, c->element, codes, n);
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        float top = (float)c->max, v = x[j] > top ? top : x[j] < -top ? -top : x[j];
        lm_set(c->element, codes, j, v);
    }
}

static void encode_plain(const lm_codec *c, const float *x, int64_t rows, int64_t cols,
                         int64_t pitch, void *codes, void *scales, const lm_codec_mode *mode)
{
    static const lm_codec_mode nearest;
    int64_t row_bytes = cols * c->bits / 8;
    (void)scales;
    mode = mode ? mode : &nearest;
    for (int64_t i = 0; i < rows; i++)
        encode_row(c, x + i * pitch, cols, (char *)codes + i * row_bytes, mode,
                   mode->index + (uint64_t)(i * cols));
}

static void decode_plain(const lm_codec *c, const void *codes, const void *scales, int64_t rows,
                         int64_t cols, float *y, int64_t pitch)
{
    int64_t row_bytes = cols * c->bits / 8;
    (void)scales;
    for (int64_t i = 0; i < rows; i++)
        lm_convert(c->element, (const char *)codes + i * row_bytes, LM_DTYPE_F32, y + i * pitch,
                   cols);
}

/* rel_: half a unit of the last bit; abs_: half the least denormal number */
#define PLAIN(name_, also_, about_, bits_, element_, max_, rel_, abs_)                   \
    {                                                                                    \
        .name = name_, .also = also_, .about = about_, .bits = bits_, .block_rows = 1,   \
        .block_cols = 1, .scale = LM_DTYPE_NONE, .element = element_, .max = max_,       \
        .err_rel = rel_, .err_abs = abs_, .encode = encode_plain, .decode = decode_plain \
    }

static const lm_codec codecs[] = {
    PLAIN("fp32", "f32", "IEEE binary32", 32, LM_DTYPE_F32, 0x1.fffffep127, 0, 0),
    PLAIN("fp16", "f16", "IEEE binary16: 5 exponent and 10 mantissa bits", 16, LM_DTYPE_F16, 65504,
          0x1p-11, 0x1p-25),
    PLAIN("bf16", "bfloat16", "the upper half of binary32: 8 exponent and 7 mantissa bits", 16,
          LM_DTYPE_BF16, 0x1.fep127, 0x1p-8, 0x1p-134),
    PLAIN("fp8_e4m3", "f8e4m3", "OCP FP8 for weights and activations: no infinities", 8,
          LM_DTYPE_F8E4M3, 448, 0x1p-4, 0x1p-10),
    PLAIN("fp8_e5m2", "f8e5m2", "OCP FP8 for gradients: a short binary16", 8, LM_DTYPE_F8E5M2,
          57344, 0x1p-3, 0x1p-17),
    { .name = "dynamic8",
      .also = "int8_dynamic",
      .about = "8 bits with steps that grow with the number, blocks of 256: optimiser states",
      .bits = 8,
      .block_rows = 1,
      .block_cols = LM_DYNAMIC_BLOCK,
      .scale = LM_DTYPE_F32,
      .element = LM_DTYPE_NONE,
      .max = 1,
      .err_abs = 0x1p-149,
      .err_block = LM_DYNAMIC_BOUND,
      .encode = lm_dynamic_encode,
      .decode = lm_dynamic_decode },
};
enum { N_CODECS = sizeof(codecs) / sizeof(codecs[0]) };

const lm_codec *lm_codec_at(int i)
{
    return i >= 0 && i < N_CODECS ? &codecs[i] : NULL;
}

/* "f32" and "float32" for "fp32", as data types are called. */
static bool is_other(const char *name, const char *full)
{
    size_t n = !strncasecmp(name, "float", 5) ? 5 : 1;

    return (name[0] == 'f' || name[0] == 'F') && !strncmp(full, "fp", 2) &&
           !strcasecmp(name + n, full + 2);
}

lm_code lm_codec_find(const char *name, const lm_codec **out, lm_err *e)
{
    char names[200] = "";
    size_t len = 0;
    for (int i = 0; i < N_CODECS; i++) {
        const lm_codec *c = &codecs[i];
        if (!strcasecmp(name, c->name) || (c->also && !strcasecmp(name, c->also)) ||
            is_other(name, c->name)) {
            *out = c;
            return LM_OK;
        }
        if (len < sizeof names)
            len +=
                (size_t)snprintf(names + len, sizeof names - len, "%s%s", i ? ", " : "", c->name);
    }
    return lm_fail(e, LM_EUSAGE, name, NULL, "no such number format; there are %s", names);
}

lm_code lm_codec_size(const lm_codec *c, int64_t rows, int64_t cols, size_t *codes, size_t *scales,
                      lm_err *e)
{
    size_t r = (size_t)rows, n = (size_t)cols, row_bits, blocks;
    size_t down = (r + (size_t)c->block_rows - 1) / (size_t)c->block_rows;
    size_t across = (n + (size_t)c->block_cols - 1) / (size_t)c->block_cols;
    *codes = *scales = 0;
    if (rows < 0 || cols < 0 || !lm_mul_ok(n, (size_t)c->bits, &row_bits) ||
        !lm_mul_ok(r, row_bits / 8 + (row_bits % 8 != 0), codes) ||
        !lm_mul_ok(down, across, &blocks) || !lm_mul_ok(blocks, lm_dtype_size(c->scale), scales))
        return lm_fail(e, LM_ELIMIT, c->name, NULL,
                       "a matrix of %lld x %lld is too large to encode", (long long)rows,
                       (long long)cols);
    return LM_OK;
}
