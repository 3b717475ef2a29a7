/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.c -- one table of the element types and one rounding routine for every narrow float.
 *
 * The routine rounds a double once, on its bits, so that no value is ever rounded twice: a float is
 * a double, and float -> bf16 -> fp8 would not be float -> fp8. */
#include "numeric/dtype.h"

#include <math.h>

static const struct {
    const char *name, *st_name;
    const char *also[3]; /* other spellings: torch, common shorthand */
    unsigned char size;
    bool is_float;
} types[LM_DTYPE_COUNT] = {
    [LM_DTYPE_F64] = { "f64", "F64", { "float64", "double", "fp64" }, 8, true },
    [LM_DTYPE_F32] = { "f32", "F32", { "float32", "float", "fp32" }, 4, true },
    [LM_DTYPE_F16] = { "f16", "F16", { "float16", "half", "fp16" }, 2, true },
    [LM_DTYPE_BF16] = { "bf16", "BF16", { "bfloat16", NULL, NULL }, 2, true },
    [LM_DTYPE_F8E4M3] = { "f8e4m3", "F8_E4M3", { "float8_e4m3fn", "fp8_e4m3", "fp8" }, 1, true },
    [LM_DTYPE_F8E5M2] = { "f8e5m2", "F8_E5M2", { "float8_e5m2", "fp8_e5m2", NULL }, 1, true },
    [LM_DTYPE_I64] = { "i64", "I64", { "int64", "long", NULL }, 8, false },
    [LM_DTYPE_I32] = { "i32", "I32", { "int32", "int", NULL }, 4, false },
    [LM_DTYPE_I16] = { "i16", "I16", { "int16", "short", NULL }, 2, false },
    [LM_DTYPE_I8] = { "i8", "I8", { "int8", NULL, NULL }, 1, false },
    [LM_DTYPE_U64] = { "u64", "U64", { "uint64", NULL, NULL }, 8, false },
    [LM_DTYPE_U32] = { "u32", "U32", { "uint32", NULL, NULL }, 4, false },
    [LM_DTYPE_U16] = { "u16", "U16", { "uint16", NULL, NULL }, 2, false },
    [LM_DTYPE_U8] = { "u8", "U8", { "uint8", NULL, NULL }, 1, false },
    [LM_DTYPE_BOOL] = { "bool", "BOOL", { NULL, NULL, NULL }, 1, false },
};

static bool known(lm_dtype d)
{
    return d >= 0 && d < LM_DTYPE_COUNT;
}

size_t lm_dtype_size(lm_dtype d)
{
    return known(d) ? types[d].size : 0;
}

const char *lm_dtype_name(lm_dtype d)
{
    return known(d) ? types[d].name : "none";
}

const char *lm_dtype_st_name(lm_dtype d)
{
    return known(d) ? types[d].st_name : "none";
}

bool lm_dtype_is_float(lm_dtype d)
{
    return known(d) && types[d].is_float;
}

lm_dtype lm_dtype_parse(const char *name)
{
    if (!name)
        return LM_DTYPE_NONE;
    if (!strncmp(name, "torch.", 6))
        name += 6;
    for (int d = 0; d < LM_DTYPE_COUNT; d++) {
        if (!strcmp(name, types[d].name) || !strcmp(name, types[d].st_name))
            return (lm_dtype)d;
        for (int k = 0; k < 3; k++)
            if (types[d].also[k] && !strcmp(name, types[d].also[k]))
                return (lm_dtype)d;
    }
    return LM_DTYPE_NONE;
}

/* A binary float of 1 sign, `e` exponent and `m` mantissa bits.  `top` is the largest finite code.
 */
typedef struct {
    int e, m;
    uint32_t top;
    bool has_inf;
} float_bits;

static const float_bits f16_bits = { 5, 10, 0x7bff, true };
static const float_bits bf16_bits = { 8, 7, 0x7f7f, true };
static const float_bits e4m3_bits = { 4, 3, 0x7e, false };
static const float_bits e5m2_bits = { 5, 2, 0x7b, true };

/* The sign and, for NaN and infinity, the whole code.  Returns whether the code is complete. */
static inline bool encode_special(uint64_t u, float_bits t, bool saturate, uint32_t *code)
{
    uint32_t inf = t.has_inf ? ((1u << t.e) - 1u) << t.m : t.top + 1; /* else the NaN code */
    uint64_t mag = u & 0x7fffffffffffffffu;
    *code = (uint32_t)(u >> 63) << (t.e + t.m);
    if (mag < 0x7ff0000000000000u)
        return false;
    if (mag == 0x7ff0000000000000u)
        *code |= saturate ? t.top : inf;
    else if (!t.has_inf)
        *code |= t.top + 1;
    else /* NaN: quiet, upper payload bits kept */
        *code |= inf | ((uint32_t)(mag >> (52 - t.m)) & ((1u << t.m) - 1u)) | 1u << (t.m - 1);
    return true;
}

/* The code of `d` rounded to nearest, ties to even, or up with the probability of the discarded
 * fraction (r: random bits).  The significand is shifted to the target's last place (further for
 * subnormals); adding it, hidden bit included, to the biased exponent below lets a carry move into
 * the next binade without a special case. */
static inline uint32_t encode_with(double d, float_bits t, bool saturate, bool stochastic,
                                   uint32_t r)
{
    uint64_t u;
    uint32_t sign;
    memcpy(&u, &d, 8);
    if (encode_special(u, t, saturate, &sign))
        return sign;
    uint64_t mag = u & 0x7fffffffffffffffu;
    int bias = (1 << (t.e - 1)) - 1, emin = 1 - bias, e = (int)(mag >> 52) - 1023;
    uint64_t sig = (mag & 0xfffffffffffffu) | (e > -1023 ? 1ull << 52 : 0);
    int shift = 52 - t.m + (e < emin ? emin - e : 0);
    if (shift > 63) { /* far below the smallest subnormal: the bits dropped are below 2^-63 of it */
        sig = shift - 63 > 63 ? 0 : sig >> (shift - 63);
        shift = 63;
    }
    uint64_t q = sig >> shift, rest = sig & ((1ull << shift) - 1), half = 1ull << (shift - 1);
    if (stochastic)
        q += (rest + ((uint64_t)r << (shift - 32))) >> shift;
    else
        q += rest > half || (rest == half && (q & 1));
    uint32_t code = ((uint32_t)((e < emin ? emin : e) + bias - 1) << t.m) + (uint32_t)q;
    if (code > t.top) {
        uint32_t truncated = code - (uint32_t)(q - (sig >> shift));
        bool chance = stochastic && truncated == t.top; /* a finite number stays finite */
        code = saturate || chance ? t.top : t.has_inf ? ((1u << t.e) - 1u) << t.m : t.top + 1;
    }
    return sign | code;
}

static inline uint32_t encode(double d, float_bits t, bool saturate)
{
    return encode_with(d, t, saturate, false, 0);
}

uint16_t lm_f64_round_sr(lm_dtype to, double d, uint32_t r, bool saturate)
{
    switch (to) {
    case LM_DTYPE_F16:
        return (uint16_t)encode_with(d, f16_bits, saturate, true, r);
    case LM_DTYPE_BF16:
        return (uint16_t)encode_with(d, bf16_bits, saturate, true, r);
    case LM_DTYPE_F8E4M3:
        return (uint16_t)encode_with(d, e4m3_bits, saturate, true, r);
    default:
        return (uint16_t)encode_with(d, e5m2_bits, saturate, true, r);
    }
}

static inline float decode(uint32_t code, float_bits t)
{
    int bias = (1 << (t.e - 1)) - 1;
    uint32_t sign = code >> (t.e + t.m), mag = code & ((1u << (t.e + t.m)) - 1u);
    uint32_t mant = mag & ((1u << t.m) - 1u), u;
    int e = (int)(mag >> t.m);
    float f;
    if (mag > t.top) {
        bool nan = !t.has_inf || mant;
        u = 0x7f800000u | (nan ? 0x400000u | mant << (23 - t.m) : 0);
    } else if (e) {
        u = (uint32_t)(e - bias + 127) << 23 | mant << (23 - t.m);
    } else { /* a subnormal (or zero): mant units of the last place, exact in float */
        f = ldexpf((float)mant, 1 - bias - t.m);
        memcpy(&u, &f, 4);
    }
    u |= sign << 31;
    memcpy(&f, &u, 4);
    return f;
}

/* Decoded by bit operations, without a table: the plain forms of kernels call it once for each
 * factor of a product. */
float lm_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff, u;
    float f = (float)m * 0x1p-24f; /* of the subnormal numbers */
    memcpy(&u, &f, 4);
    if (e > 0)
        u = (e == 31 ? 255 : e + 112) << 23 | m << 13;
    if (e == 31 && m)
        u |= 0x400000;
    u |= sign;
    memcpy(&f, &u, 4);
    return f;
}

uint16_t lm_f32_to_f16(float f)
{
    return (uint16_t)encode(f, f16_bits, false);
}

float lm_f8e4m3_to_f32(uint8_t b)
{
    return decode(b, e4m3_bits);
}

uint8_t lm_f32_to_f8e4m3(float f, bool saturate)
{
    return (uint8_t)encode(f, e4m3_bits, saturate);
}

float lm_f8e5m2_to_f32(uint8_t b)
{
    return decode(b, e5m2_bits);
}

uint8_t lm_f32_to_f8e5m2(float f, bool saturate)
{
    return (uint8_t)encode(f, e5m2_bits, saturate);
}

uint16_t lm_f64_to_bf16(double d)
{
    return (uint16_t)encode(d, bf16_bits, false);
}

uint16_t lm_f64_to_f16(double d)
{
    return (uint16_t)encode(d, f16_bits, false);
}

/* Numbers at any address: tensors in files are not aligned. */
#define AT_ANY_ADDRESS(type, name) typedef type name __attribute__((aligned(1), may_alias))
AT_ANY_ADDRESS(double, double_at);
AT_ANY_ADDRESS(float, float_at);
AT_ANY_ADDRESS(int64_t, int64_at);
AT_ANY_ADDRESS(int32_t, int32_at);
AT_ANY_ADDRESS(int16_t, int16_at);
AT_ANY_ADDRESS(uint64_t, uint64_at);
AT_ANY_ADDRESS(uint32_t, uint32_at);
AT_ANY_ADDRESS(uint16_t, uint16_at);

double lm_get(lm_dtype d, const void *p, int64_t i)
{
    switch (d) {
    case LM_DTYPE_F64:
        return ((const double_at *)p)[i];
    case LM_DTYPE_F32:
        return ((const float_at *)p)[i];
    case LM_DTYPE_F16:
        return lm_f16_to_f32(((const uint16_at *)p)[i]);
    case LM_DTYPE_BF16:
        return lm_bf16_to_f32(((const uint16_at *)p)[i]);
    case LM_DTYPE_F8E4M3:
        return lm_f8e4m3_to_f32(((const uint8_t *)p)[i]);
    case LM_DTYPE_F8E5M2:
        return lm_f8e5m2_to_f32(((const uint8_t *)p)[i]);
    case LM_DTYPE_I64:
        return (double)((const int64_at *)p)[i];
    case LM_DTYPE_I32:
        return ((const int32_at *)p)[i];
    case LM_DTYPE_I16:
        return ((const int16_at *)p)[i];
    case LM_DTYPE_I8:
        return ((const int8_t *)p)[i];
    case LM_DTYPE_U64:
        return (double)((const uint64_at *)p)[i];
    case LM_DTYPE_U32:
        return ((const uint32_at *)p)[i];
    case LM_DTYPE_U16:
        return ((const uint16_at *)p)[i];
    case LM_DTYPE_U8:
    case LM_DTYPE_BOOL:
        return ((const uint8_t *)p)[i];
    case LM_DTYPE_COUNT:
    case LM_DTYPE_NONE:
        break;
    }
    return NAN;
}

/* v rounded to the nearest integer of [lo, hi]; hi is passed as the first double above the range,
 * so that 2^63 and 2^64 are exact.  NaN gives 0. */
static inline bool in_range(double v, double lo, double above)
{
    return v >= lo && v < above;
}

static int64_t to_signed(double v, int bits)
{
    double above = ldexp(1.0, bits - 1);
    int64_t top = (int64_t)(UINT64_MAX >> (65 - bits));
    v = rint(v);
    if (in_range(v, -above, above))
        return (int64_t)v;
    return isnan(v) ? 0 : v < 0 ? -top - 1 : top;
}

static uint64_t to_unsigned(double v, int bits)
{
    v = rint(v);
    if (in_range(v, 0, ldexp(1.0, bits)))
        return (uint64_t)v;
    return isnan(v) || v < 0 ? 0 : UINT64_MAX >> (64 - bits);
}

void lm_set(lm_dtype d, void *p, int64_t i, double v)
{
    switch (d) {
    case LM_DTYPE_F64:
        ((double_at *)p)[i] = v;
        break;
    case LM_DTYPE_F32:
        ((float_at *)p)[i] = (float)v;
        break;
    case LM_DTYPE_F16:
        ((uint16_at *)p)[i] = lm_f64_to_f16(v);
        break;
    case LM_DTYPE_BF16:
        ((uint16_at *)p)[i] = lm_f64_to_bf16(v);
        break;
    case LM_DTYPE_F8E4M3:
        ((uint8_t *)p)[i] = (uint8_t)encode(v, e4m3_bits, false);
        break;
    case LM_DTYPE_F8E5M2:
        ((uint8_t *)p)[i] = (uint8_t)encode(v, e5m2_bits, false);
        break;
    case LM_DTYPE_I64:
        ((int64_at *)p)[i] = to_signed(v, 64);
        break;
    case LM_DTYPE_I32:
        ((int32_at *)p)[i] = (int32_t)to_signed(v, 32);
        break;
    case LM_DTYPE_I16:
        ((int16_at *)p)[i] = (int16_t)to_signed(v, 16);
        break;
    case LM_DTYPE_I8:
        ((int8_t *)p)[i] = (int8_t)to_signed(v, 8);
        break;
    case LM_DTYPE_U64:
        ((uint64_at *)p)[i] = to_unsigned(v, 64);
        break;
    case LM_DTYPE_U32:
        ((uint32_at *)p)[i] = (uint32_t)to_unsigned(v, 32);
        break;
    case LM_DTYPE_U16:
        ((uint16_at *)p)[i] = (uint16_t)to_unsigned(v, 16);
        break;
    case LM_DTYPE_U8:
        ((uint8_t *)p)[i] = (uint8_t)to_unsigned(v, 8);
        break;
    case LM_DTYPE_BOOL:
        ((uint8_t *)p)[i] = v != 0;
        break;
    case LM_DTYPE_COUNT:
    case LM_DTYPE_NONE:
        break;
    }
}

/* Every code of FP8 decoded once for a whole array: a table of 256 fits the first-level cache. */
static void decode_bytes(float_bits t, const uint8_t *src, float_at *dst, int64_t n)
{
    float table[256];
    for (uint32_t b = 0; b < 256; b++)
        table[b] = decode(b, t);
    for (int64_t i = 0; i < n; i++)
        dst[i] = table[src[i]];
}

/* Binary16 to float without a branch, so that compilers make vectors of it: exponent and mantissa
 * moved to their places, the exponent corrected by an exact product with 2^112 (subnormals come out
 * normal), infinity and NaN, which the product brings to 2^16 and up, by their exponent. */
static void decode_halves(const uint16_at *src, float_at *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t h = src[i], u = (h & 0x7fffu) << 13, special;
        float f;
        memcpy(&f, &u, 4);
        f *= 0x1p112f;
        memcpy(&u, &f, 4);
        special = -(uint32_t)((h & 0x7fffu) >= 0x7c00u);
        u |= special & 0x7f800000u;
        u |= -(uint32_t)((h & 0x7fffu) > 0x7c00u) & 0x400000u; /* NaN: quiet */
        u |= (h & 0x8000u) << 16;
        memcpy(&dst[i], &u, 4);
    }
}

/* encode() of a float with a bias below 127 and no saturation, without a branch.  Normal results are
 * rounded on the bits; for subnormal ones the sum with a number whose last place is theirs rounds.
 */
static inline uint32_t encode_narrow(float x, float_bits t)
{
    int bias = (1 << (t.e - 1)) - 1, shift = 23 - t.m;
    uint32_t least = (uint32_t)(128 - bias) << 23, unit = (uint32_t)(128 - bias - t.m + 23) << 23;
    uint32_t inf = t.has_inf ? ((1u << t.e) - 1u) << t.m : t.top + 1, u, mag, normal, nan, small;
    float f, g;
    memcpy(&u, &x, 4);
    mag = u & 0x7fffffffu;
    normal = mag + (1u << (shift - 1)) - 1u + (mag >> shift & 1u);
    normal = (normal - (least - (1u << 23))) >> shift;
    normal = normal > t.top ? inf : normal;
    nan = t.has_inf ? inf | 1u << (t.m - 1) | (mag >> shift & ((1u << t.m) - 1u)) : inf;
    memcpy(&f, &mag, 4);
    memcpy(&g, &unit, 4);
    f += g;
    memcpy(&small, &f, 4);
    normal = mag < least ? small - unit : normal;
    normal = mag > 0x7f800000u ? nan : normal;
    return normal | u >> 31 << (t.e + t.m);
}

static void encode_halves(const float_at *src, uint16_at *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = (uint16_t)encode_narrow(src[i], f16_bits);
}

static void encode_e4m3(const float_at *src, uint8_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = (uint8_t)encode_narrow(src[i], e4m3_bits);
}

static void encode_e5m2(const float_at *src, uint8_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = (uint8_t)encode_narrow(src[i], e5m2_bits);
}

/* The pairs of types that occur for whole tensors. */
static bool convert_fast(lm_dtype from, const void *src, lm_dtype to, void *dst, int64_t n)
{
    if (from == LM_DTYPE_F32 && to == LM_DTYPE_BF16) {
        for (int64_t i = 0; i < n; i++)
            ((uint16_at *)dst)[i] = lm_f32_to_bf16(((const float_at *)src)[i]);
    } else if (from == LM_DTYPE_BF16 && to == LM_DTYPE_F32) {
        for (int64_t i = 0; i < n; i++)
            ((float_at *)dst)[i] = lm_bf16_to_f32(((const uint16_at *)src)[i]);
    } else if (from == LM_DTYPE_F16 && to == LM_DTYPE_F32) {
        decode_halves(src, dst, n);
    } else if (from == LM_DTYPE_F32 && to == LM_DTYPE_F16) {
        encode_halves(src, dst, n);
    } else if (from == LM_DTYPE_F32 && to == LM_DTYPE_F8E4M3) {
        encode_e4m3(src, dst, n);
    } else if (from == LM_DTYPE_F32 && to == LM_DTYPE_F8E5M2) {
        encode_e5m2(src, dst, n);
    } else if (from == LM_DTYPE_F8E4M3 && to == LM_DTYPE_F32) {
        decode_bytes(e4m3_bits, src, dst, n);
    } else if (from == LM_DTYPE_F8E5M2 && to == LM_DTYPE_F32) {
        decode_bytes(e5m2_bits, src, dst, n);
    } else {
        return false;
    }
    return true;
}

/* 64-bit integers do not fit a double, so one is converted to another without it. */
static bool convert_wide(lm_dtype from, const void *src, lm_dtype to, void *dst, int64_t n)
{
    if (from == LM_DTYPE_I64 && to == LM_DTYPE_U64) {
        const int64_at *s = src;
        uint64_at *d = dst;
        for (int64_t i = 0; i < n; i++)
            d[i] = s[i] < 0 ? 0 : (uint64_t)s[i];
        return true;
    }
    if (from == LM_DTYPE_U64 && to == LM_DTYPE_I64) {
        const uint64_at *s = src;
        int64_at *d = dst;
        for (int64_t i = 0; i < n; i++)
            d[i] = s[i] > INT64_MAX ? INT64_MAX : (int64_t)s[i];
        return true;
    }
    return false;
}

void lm_convert(lm_dtype from, const void *src, lm_dtype to, void *dst, int64_t n)
{
    if (n <= 0)
        return;
    if (from == to) {
        memcpy(dst, src, (size_t)n * lm_dtype_size(from));
    } else if (!convert_fast(from, src, to, dst, n) && !convert_wide(from, src, to, dst, n)) {
        for (int64_t i = 0; i < n; i++)
            lm_set(to, dst, i, lm_get(from, src, i));
    }
}
