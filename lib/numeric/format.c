/* SPDX-License-Identifier: Apache-2.0 */
/* format.c -- the registry of number formats, and the sizes of tensors in them. */
#include "numeric/format.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "numeric/format_dynamic.h"
#include "numeric/format_normal.h"
#include "numeric/format_rows.h"
#include "numeric/format_scaled.h"
#include "numeric/ggml_blocks.h"

/* rel_: half a unit of the last bit; abs_: half the smallest subnormal number */
#define PLAIN(name_, also_, about_, bits_, element_, gguf_, max_, rel_, abs_)                    \
    {                                                                                            \
        .name = name_, .also = also_, .about = about_, .n_planes = 1,                            \
        .plane = { { LM_PLANE_CODES, element_, bits_, 1, 1 } }, .element = element_,             \
        .gguf = gguf_, .max = max_, .err_rel = rel_, .err_abs = abs_, .encode = lm_plain_encode, \
        .decode = lm_plain_decode                                                                \
    }

/* Element types to which no number is rounded here. */
#define SIZED(name_, about_, bits_, element_, gguf_)                                               \
    {                                                                                              \
        .name = name_, .about = about_, .n_planes = 1,                                             \
        .plane = { { LM_PLANE_CODES, element_, bits_, 1, 1 } }, .element = element_, .gguf = gguf_ \
    }

#define BLOCKS(name_, about_, gguf_, n_, bytes_)                          \
    .name = name_, .about = about_, .n_planes = 1,                        \
    .plane = { { LM_PLANE_BLOCKS, LM_DTYPE_NONE, 8 * (bytes_), 1, n_ } }, \
    .element = LM_DTYPE_NONE, .gguf = gguf_
#define CODED(t, weigh_, about_, gguf_, n_, bytes_, rms_)                                   \
    {                                                                                       \
        BLOCKS(#t, about_, gguf_, n_, bytes_), .err_rms = rms_, .encode = lm_blocks_encode, \
                                               .decode = lm_blocks_decode,                  \
                                               .block = &(const lm_block_code)              \
        {                                                                                   \
            lm_##t##_encode, weigh_, lm_##t##_decode                                        \
        }                                                                                   \
    }
#define READ(t, about_, gguf_, n_, bytes_)                                     \
    {                                                                          \
        BLOCKS(#t, about_, gguf_, n_, bytes_), .decode = lm_blocks_decode,     \
                                               .block = &(const lm_block_code) \
        {                                                                      \
            NULL, NULL, lm_##t##_decode                                        \
        }                                                                      \
    }
/* Behind the plane of codes those of scales. */
#define NORMAL(name_, also_, about_, planes_, bound_, ...)                                      \
    {                                                                                           \
        .name = name_, .also = also_, .about = about_, .n_planes = planes_,                     \
        .plane = { { LM_PLANE_CODES, LM_DTYPE_NONE, 4, 1, 1 }, __VA_ARGS__ },                   \
        .element = LM_DTYPE_NONE, .gguf = LM_NO_GGUF, .err_abs = 0x1p-149, .err_block = bound_, \
        .encode = lm_normal_encode, .decode = lm_normal_decode                                  \
    }
/* Types of safetensors files whose tensors are copied, not decoded. */
#define FOREIGN(name_, about_, bits_)                                                          \
    {                                                                                          \
        .name = name_, .about = about_, .n_planes = 1,                                         \
        .plane = { { LM_PLANE_CODES, LM_DTYPE_NONE, bits_, 1, 1 } }, .element = LM_DTYPE_NONE, \
        .gguf = LM_NO_GGUF                                                                     \
    }
/* Types of GGUF files whose tensors are listed, not decoded. */
#define LISTED(t, gguf_, n_, bytes_)                      \
    {                                                     \
        BLOCKS(#t, "a type of ggml's", gguf_, n_, bytes_) \
    }

static const lm_format formats[] = {
    PLAIN("fp32", "f32", "IEEE binary32", 32, LM_DTYPE_F32, 0, 0x1.fffffep127, 0, 0),
    PLAIN("fp16", "f16", "IEEE binary16: 5 exponent and 10 mantissa bits", 16, LM_DTYPE_F16, 1,
          65504, 0x1p-11, 0x1p-25),
    PLAIN("bf16", "bfloat16", "the upper half of binary32: 8 exponent and 7 mantissa bits", 16,
          LM_DTYPE_BF16, 30, 0x1.fep127, 0x1p-8, 0x1p-134),
    PLAIN("fp8_e4m3", "f8e4m3", "OCP FP8 for weights and activations: no infinities", 8,
          LM_DTYPE_F8E4M3, LM_NO_GGUF, 448, 0x1p-4, 0x1p-10),
    PLAIN("fp8_e5m2", "f8e5m2", "OCP FP8 for gradients: a short binary16", 8, LM_DTYPE_F8E5M2,
          LM_NO_GGUF, 57344, 0x1p-3, 0x1p-17),
    { .name = "dynamic8",
      .also = "int8_dynamic",
      .about = "8 bits with steps that grow with the number, blocks of 256: optimiser states",
      .n_planes = 2,
      .plane = { { LM_PLANE_CODES, LM_DTYPE_U8, 8, 1, 1 },
                 { LM_PLANE_SCALE, LM_DTYPE_F32, 32, 1, LM_DYNAMIC_BLOCK } },
      .element = LM_DTYPE_NONE,
      .gguf = LM_NO_GGUF,
      .err_abs = 0x1p-149,
      .err_block = LM_DYNAMIC_BOUND,
      .encode = lm_dynamic_encode,
      .decode = lm_dynamic_decode },
    NORMAL("nf4", NULL, "quantiles of the normal distribution, blocks of 64: frozen weights", 2,
           LM_NORMAL_BOUND, { LM_PLANE_SCALE, LM_DTYPE_F32, 32, 1, LM_NORMAL_BLOCK }),
    NORMAL("nf4_dq", "nf4_double", "NF4 with scales in 8 bits (double quantisation)", 4,
           LM_NORMAL_DOUBLE_BOUND, { LM_PLANE_SCALE, LM_DTYPE_U8, 8, 1, LM_NORMAL_BLOCK },
           { LM_PLANE_SCALE, LM_DTYPE_F32, 32, 1, LM_NORMAL_GROUP },
           { LM_PLANE_SCALE, LM_DTYPE_F32, 32, 1, LM_NORMAL_GROUP }),
    CODED(q4_0, lm_q4_0_weigh, "4 bits, blocks of 32", 2, 32, 18, 0.1),
    CODED(q4_1, lm_q4_1_weigh, "4 bits and an offset, blocks of 32", 3, 32, 20, 0.1),
    CODED(q5_0, lm_q5_0_weigh, "5 bits, blocks of 32", 6, 32, 22, 0.05),
    CODED(q5_1, lm_q5_1_weigh, "5 bits and an offset, blocks of 32", 7, 32, 24, 0.05),
    CODED(q8_0, NULL, "8 bits, blocks of 32", 8, 32, 34, 0.01),
    CODED(q2_k, lm_q2_k_weigh, "2 bits and an offset, groups of 16", 10, 256, 84, 0.35),
    CODED(q3_k, lm_q3_k_weigh, "3 bits, groups of 16", 11, 256, 110, 0.2),
    CODED(q4_k, lm_q4_k_weigh, "4 bits and an offset, groups of 32", 12, 256, 144, 0.09),
    CODED(q5_k, lm_q5_k_weigh, "5 bits and an offset, groups of 32", 13, 256, 176, 0.05),
    CODED(q6_k, lm_q6_k_weigh, "6 bits, groups of 16", 14, 256, 210, 0.03),
    CODED(iq4_nl, lm_iq4_nl_weigh, "one of 16 uneven values, blocks of 32", 20, 32, 18, 0.1),
    CODED(iq4_xs, lm_iq4_xs_weigh, "one of 16 uneven values, groups of 32", 23, 256, 136, 0.1),
    { BLOCKS("fp8_e4m3_128", "E4M3 with a scale for 128 numbers of a row", LM_NO_GGUF,
             LM_SCALED_BLOCK, LM_SCALED_BYTES),
      .decode = lm_blocks_decode, .block = &(const lm_block_code){ NULL, NULL, lm_scaled_decode } },
    READ(mxfp4, "OCP MXFP4: E2M1, blocks of 32 with E8M0 scales", 39, 32, 17),
    READ(nvfp4, "NVFP4: E2M1, groups of 16 with E4M3 scales", 40, 64, 36),
    READ(q1_0, "signs, blocks of 128", 41, 128, 18),
    READ(q2_0, "-1 to 2, blocks of 64", 42, 64, 18),
    PLAIN("fp64", "f64", "IEEE binary64", 64, LM_DTYPE_F64, 28, 0x1.fffffffffffffp1023, 0, 0),
    SIZED("i64", "signed 64-bit integers", 64, LM_DTYPE_I64, 27),
    SIZED("i32", "signed 32-bit integers", 32, LM_DTYPE_I32, 26),
    SIZED("i16", "signed 16-bit integers", 16, LM_DTYPE_I16, 25),
    SIZED("i8", "signed 8-bit integers", 8, LM_DTYPE_I8, 24),
    SIZED("u64", "unsigned 64-bit integers", 64, LM_DTYPE_U64, LM_NO_GGUF),
    SIZED("u32", "unsigned 32-bit integers", 32, LM_DTYPE_U32, LM_NO_GGUF),
    SIZED("u16", "unsigned 16-bit integers", 16, LM_DTYPE_U16, LM_NO_GGUF),
    SIZED("u8", "unsigned 8-bit integers", 8, LM_DTYPE_U8, LM_NO_GGUF),
    SIZED("bool", "truth values, a byte each", 8, LM_DTYPE_BOOL, LM_NO_GGUF),
    FOREIGN("f4", "OCP E2M1", 4),
    FOREIGN("f6_e2m3", "OCP E2M3", 6),
    FOREIGN("f6_e3m2", "OCP E3M2", 6),
    FOREIGN("f8_e8m0", "OCP E8M0: powers of two", 8),
    FOREIGN("f8_e4m3fnuz", "E4M3 without infinities and negative zero", 8),
    FOREIGN("f8_e5m2fnuz", "E5M2 without infinities and negative zero", 8),
    FOREIGN("c64", "complex numbers of two binary32", 64),
    LISTED(q8_1, 9, 32, 40),
    LISTED(q8_k, 15, 256, 292),
    LISTED(iq2_xxs, 16, 256, 66),
    LISTED(iq2_xs, 17, 256, 74),
    LISTED(iq3_xxs, 18, 256, 98),
    LISTED(iq1_s, 19, 256, 50),
    LISTED(iq3_s, 21, 256, 110),
    LISTED(iq2_s, 22, 256, 82),
    LISTED(iq1_m, 29, 256, 56),
    LISTED(tq1_0, 34, 256, 54),
    LISTED(tq2_0, 35, 256, 66),
};
enum { N_FORMATS = sizeof(formats) / sizeof(formats[0]) };

const lm_format *lm_format_at(int i)
{
    return i >= 0 && i < N_FORMATS ? &formats[i] : NULL;
}

/* "f32" and "float32" for "fp32", as data types are called. */
static bool is_other(const char *name, const char *full)
{
    size_t n = !strncasecmp(name, "float", 5) ? 5 : 1;

    return (name[0] == 'f' || name[0] == 'F') && !strncmp(full, "fp", 2) &&
           !strcasecmp(name + n, full + 2);
}

static bool is_called(const lm_format *f, const char *name)
{
    return !strcasecmp(name, f->name) || (f->also && !strcasecmp(name, f->also)) ||
           is_other(name, f->name);
}

lm_code lm_format_find(const char *name, bool (*takes)(const lm_format *f), const lm_format **out,
                       lm_err *e)
{
    char names[400] = "";
    size_t len = 0;

    *out = NULL;
    for (int i = 0; i < N_FORMATS; i++) {
        const lm_format *f = &formats[i];
        if (takes && !takes(f))
            continue;
        if (is_called(f, name)) {
            *out = f;
            return LM_OK;
        }
        if (len < sizeof names)
            len +=
                (size_t)snprintf(names + len, sizeof names - len, "%s%s", len ? ", " : "", f->name);
    }
    return lm_fail(e, LM_EUSAGE, name, NULL, "no such number format; there are %s", names);
}

const lm_format *lm_format_of_dtype(lm_dtype d)
{
    for (int i = 0; i < N_FORMATS && d != LM_DTYPE_NONE; i++)
        if (formats[i].element == d)
            return &formats[i];
    return NULL;
}

const lm_format *lm_format_of_gguf(uint32_t number)
{
    for (int i = 0; i < N_FORMATS; i++)
        if (formats[i].gguf != LM_NO_GGUF && (uint32_t)formats[i].gguf == number)
            return &formats[i];
    return NULL;
}

const char *lm_format_show(const lm_format *f)
{
    return f->element != LM_DTYPE_NONE ? lm_dtype_name(f->element) : f->name;
}

bool lm_format_interleaved(const lm_format *f)
{
    return f->plane[0].kind == LM_PLANE_BLOCKS;
}

bool lm_format_weighs(const lm_format *f)
{
    return f->block && f->block->weigh;
}

int lm_format_group(const lm_format *f)
{
    int group = 1;

    for (int p = 0; p < f->n_planes; p++)
        group = f->plane[p].cols > group ? f->plane[p].cols : group;
    return group;
}

/* ---- Sizes ---- */

static bool plane_bytes(const lm_plane *p, size_t rows, size_t cols, size_t *out)
{
    size_t down = rows / (size_t)p->rows + (rows % (size_t)p->rows != 0), row;
    size_t across = cols / (size_t)p->cols + (cols % (size_t)p->cols != 0);
    bool whole = p->bits % 8 == 0;

    if (!lm_mul_ok(across, (size_t)(whole ? p->bits / 8 : p->bits), &row))
        return false;
    return lm_mul_ok(down, whole ? row : row / 8 + (row % 8 != 0), out);
}

/* Rows and columns; no blocks where a dimension is 0. */
static bool matrix_of(int ndim, const int64_t *dim, size_t *rows, size_t *cols)
{
    *rows = *cols = 1;
    for (int i = 0; i < ndim; i++) {
        if (dim[i] < 0 || (uint64_t)dim[i] > SIZE_MAX)
            return false;
        if (!dim[i])
            *rows = 0;
    }
    *cols = ndim > 0 ? (size_t)dim[ndim - 1] : 1;
    for (int i = 0; i < ndim - 1 && *rows; i++)
        if (!lm_mul_ok(*rows, (size_t)dim[i], rows))
            return false;
    return true;
}

static lm_code too_large(const lm_format *f, int ndim, const int64_t *dim, lm_err *e)
{
    char shape[200] = "";
    size_t len = 0;

    for (int i = 0; i < ndim && len < sizeof shape; i++)
        len +=
            (size_t)snprintf(shape + len, sizeof shape - len, "%s%" PRId64, i ? " x " : "", dim[i]);
    return lm_fail(e, LM_ELIMIT, f->name, NULL, "a tensor of %s is too large", shape);
}

lm_code lm_tensor_bytes(const lm_format *f, int ndim, const int64_t *dim, lm_tensor_size *out,
                        lm_err *e)
{
    lm_tensor_size s = { { 0 }, 0 };
    size_t rows, cols;
    bool fits = matrix_of(ndim, dim, &rows, &cols);

    *out = (lm_tensor_size){ { SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX }, SIZE_MAX };
    if (fits && lm_format_interleaved(f) && cols % (size_t)f->plane[0].cols)
        return lm_fail(e, LM_EUSAGE, f->name, NULL,
                       "rows of %zu numbers: their length must be a multiple of %d", cols,
                       f->plane[0].cols);
    for (int p = 0; fits && p < f->n_planes; p++)
        fits = plane_bytes(&f->plane[p], rows, cols, &s.plane[p]) &&
               lm_add_ok(s.all, s.plane[p], &s.all);
    if (!fits)
        return too_large(f, ndim, dim, e);
    *out = s;
    return LM_OK;
}

size_t lm_plane_bytes(const lm_plane *p, int64_t rows, int64_t cols)
{
    size_t bytes;
    bool fits = rows >= 0 && cols >= 0 && plane_bytes(p, (size_t)rows, (size_t)cols, &bytes);
    return fits ? bytes : SIZE_MAX;
}

size_t lm_plain_bytes(lm_dtype d, int64_t count)
{
    const lm_format *f = lm_format_of_dtype(d);
    lm_tensor_size size = { { 0 }, 0 };

    if (f)
        lm_tensor_bytes(f, 1, &count, &size, NULL);
    return size.all;
}
