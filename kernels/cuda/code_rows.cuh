/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows.cuh -- weights that stay in the codes of their file (numeric/code_rows.h), on a device: where their rows are, and
 * eight numbers of a row at a time.
 *
 * Every format here has one plane of blocks whose numbers are whole eights.  The numbers are those of lib/numeric; only the
 * sign of a zero may differ.  Codes begin at a multiple of 4 bytes and are read by whole words, of which the last may end
 * up to 3 bytes behind them: the store allocates so. */
#ifndef LM_KERNELS_CUDA_CODE_ROWS_CUH
#define LM_KERNELS_CUDA_CODE_ROWS_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/cuda/code_kind.h"
#include "numeric/code_rows.h"
}

/* ---- where rows are ---- */

/* Rows [row, row + rows) of a matrix: runs of `each` rows in one format, `apart` bytes from one to the next, as the experts of
 * a layer are.  A launch reads one stretch. */
struct code_stretch {
    lm_code_kind kind;
    int64_t row, rows, each, apart;
    int64_t pitch; /* bytes of a row */
    const uint8_t *data;
};

/* Row i of the stretch. */
__device__ inline const uint8_t *code_row(const code_stretch &s, int64_t i)
{
    return s.each == s.rows ? s.data + i * s.pitch
                            : s.data + i / s.each * s.apart + i % s.each * s.pitch;
}

/* The stretch that begins with run *i of c, whose rows have `cols` numbers; *i becomes the run behind it.  False: there are no further runs. */
bool code_next(const lm_code_rows *c, int64_t cols, int *i, code_stretch *out);

/* ---- words of bytes at any address ---- */

__device__ inline const uint32_t *word_of(const uint8_t *p)
{
    return reinterpret_cast<const uint32_t *>(reinterpret_cast<uintptr_t>(p) & ~(uintptr_t)3);
}
/* Bytes from `skip` on of two neighbouring words. */
__device__ inline uint32_t joined_word(uint32_t low, uint32_t high, unsigned skip)
{
    return (uint32_t)(((uint64_t)high << 32 | low) >> (8 * skip));
}
__device__ inline uint32_t word_at(const uint8_t *p)
{
    unsigned skip = (unsigned)(reinterpret_cast<uintptr_t>(p) & 3);
    return joined_word(__ldg(word_of(p)), __ldg(word_of(p + 3)), skip);
}
/* Eight bytes. */
__device__ inline void words_at(const uint8_t *p, uint32_t out[2])
{
    unsigned skip = (unsigned)(reinterpret_cast<uintptr_t>(p) & 3);
    uint32_t middle = __ldg(word_of(p) + 1);
    out[0] = joined_word(__ldg(word_of(p)), middle, skip);
    out[1] = joined_word(middle, __ldg(word_of(p + 7)), skip);
}
/* At a multiple of 4 bytes. */
__device__ inline uint32_t whole_word(const uint8_t *p)
{
    return __ldg(reinterpret_cast<const uint32_t *>(p));
}
__device__ inline void whole_words(const uint8_t *p, uint32_t out[2])
{
    out[0] = whole_word(p);
    out[1] = whole_word(p + 4);
}
/* At a multiple of 2 bytes. */
__device__ inline uint32_t half_word(const uint8_t *p)
{
    return __ldg(reinterpret_cast<const uint16_t *>(p));
}

/* ---- codes as numbers ---- */

__device__ inline float half_float(uint32_t bits)
{
    return to_float(f16{ (uint16_t)bits });
}
/* Byte i of a pair of words. */
__device__ inline uint32_t byte_of(const uint32_t w[2], int i)
{
    return w[i / 4] >> (8 * (i % 4)) & 255;
}
/* code - zero, both below 2^23, without a conversion of integers. */
__device__ inline float code_less(uint32_t code, int zero)
{
    return __uint_as_float(0x4b000000u | code) - (float)(0x800000 + zero);
}
/* E2M1, doubled: its bits as those of a float have an exponent that is too small by 126, less one for the doubling. */
__device__ inline float doubled_e2m1(uint32_t code)
{
    return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p127f;
}
/* 2^(e - 128): half of the scale that E8M0 means, for doubled numbers; exact for every e. */
__device__ inline float half_e8m0(uint32_t e)
{
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}
/* NaN stays NaN; exact otherwise (fp8.cu). */
__device__ inline float e4m3_float(uint32_t code)
{
    float f = (code & 0x7f) == 0x7f ? NAN : __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
    return code & 0x80 ? -f : f;
}
/* Of iq4_nl. */
__device__ inline float uneven(uint32_t code)
{
    const uint64_t low = 0x766a5d4f3f2d1801ull, high = 0xf1d9c5b5a6998d81ull; /* value + 128 */
    return code_less((uint32_t)((code & 8 ? high : low) >> (8 * (code & 7))) & 255, 128);
}

/* ---- formats ----
 *
 * coder<kind> of a format with blocks of `block` numbers in `bytes` bytes:
 *   load     what the e-th eight of a block is made of, as words
 *   numbers  the eight
 *   first    the first eight of pair p of a block (which has block / 16 pairs), whose other is `apart` eights behind it: both
 *            are made of the same words where one byte holds codes of both */
struct code_words {
    uint32_t code[2], more[2], scale, of[3];
};
template <int KIND> struct coder;

/* Pairs of eights that follow each other. */
struct paired_neighbours {
    static const int apart = 1;
    __device__ static int first(int p)
    {
        return 2 * p;
    }
};
/* Blocks of 32 whose bytes hold number j low and number j + 16 high. */
struct paired_halves {
    static const int block = 32, apart = 2;
    __device__ static int first(int p)
    {
        return p;
    }
};
__device__ inline uint32_t nibble_of(const code_words &w, int e, int i)
{
    return byte_of(w.code, i) >> (e / 2 * 4) & 15;
}

template <> struct coder<LM_CODE_MXFP4> : paired_halves {
    static const int bytes = 17;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = {};
        w.scale = __ldg(p);
        words_at(p + 1 + e % 2 * 8, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        const float s = half_e8m0(w.scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = doubled_e2m1(nibble_of(w, e, i)) * s;
    }
};

template <> struct coder<LM_CODE_FP8_128> : paired_neighbours {
    static const int block = 128, bytes = 132;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = {};
        w.scale = whole_word(p);
        whole_words(p + 4 + 8 * e, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int, float *v)
    {
        const float s = __uint_as_float(w.scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = e4m3_float(byte_of(w.code, i)) * s;
    }
};

template <> struct coder<LM_CODE_Q8_0> : paired_neighbours {
    static const int block = 32, bytes = 34;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = {};
        w.scale = half_word(p);
        words_at(p + 2 + 8 * e, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int, float *v)
    {
        const float s = half_float(w.scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = code_less(byte_of(w.code, i) ^ 128, 128) * s;
    }
};

template <> struct coder<LM_CODE_Q4_0> : paired_halves {
    static const int bytes = 18;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = {};
        w.scale = half_word(p);
        words_at(p + 2 + e % 2 * 8, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        const float s = half_float(w.scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = code_less(nibble_of(w, e, i), 8) * s;
    }
};

template <> struct coder<LM_CODE_IQ4_NL> : coder<LM_CODE_Q4_0> {
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        const float s = half_float(w.scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = uneven(nibble_of(w, e, i)) * s;
    }
};

template <> struct coder<LM_CODE_Q4_1> : paired_halves {
    static const int bytes = 20;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = {};
        w.scale = whole_word(p);
        whole_words(p + 4 + e % 2 * 8, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        const float s = half_float(w.scale), m = half_float(w.scale >> 16);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = __fadd_rn(__fmul_rn(code_less(nibble_of(w, e, i), 0), s), m);
    }
};

/* A code of five bits: bit 8 e + i of `fifths` is the upper one. */
__device__ inline uint32_t five_bits(const code_words &w, uint32_t fifths, int e, int i)
{
    return nibble_of(w, e, i) | (fifths >> (8 * e + i) & 1) << 4;
}

template <> struct coder<LM_CODE_Q5_0> : paired_halves {
    static const int bytes = 22;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = {};
        w.scale = half_word(p);
        w.more[0] = word_at(p + 2);
        words_at(p + 6 + e % 2 * 8, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        const float s = half_float(w.scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = code_less(five_bits(w, w.more[0], e, i), 16) * s;
    }
};

template <> struct coder<LM_CODE_Q5_1> : paired_halves {
    static const int bytes = 24;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = {};
        w.scale = whole_word(p);
        w.more[0] = whole_word(p + 4);
        whole_words(p + 8 + e % 2 * 8, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        const float s = half_float(w.scale), m = half_float(w.scale >> 16);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = __fadd_rn(__fmul_rn(code_less(five_bits(w, w.more[0], e, i), 0), s), m);
    }
};

/* Blocks of 256 in groups of 32; two groups share 32 bytes, the first of them low. */
struct paired_groups {
    static const int block = 256, apart = 4;
    __device__ static int first(int p)
    {
        return p / 4 * 8 + p % 4;
    }
    /* Scale and offset of the group of eight e: 6 bits of each in the three words (lib/numeric/ggml_super.c). */
    __device__ static void scales(const code_words &w, int e, float *d, float *m)
    {
        const int j = e / 4, at = j % 4 * 8;
        uint32_t sc = w.of[0] >> at, mn = w.of[1] >> at;
        if (j >= 4) {
            const uint32_t low = w.of[2] >> at;
            sc = (low & 15) | (sc >> 6 & 3) << 4;
            mn = (low >> 4 & 15) | (mn >> 6 & 3) << 4;
        }
        *d = half_float(w.scale) * code_less(sc & 63, 0);
        *m = half_float(w.scale >> 16) * code_less(mn & 63, 0);
    }
    __device__ static code_words head(const uint8_t *p)
    {
        code_words w = {};
        w.scale = whole_word(p);
#pragma unroll
        for (int i = 0; i < 3; i++)
            w.of[i] = whole_word(p + 4 + 4 * i);
        return w;
    }
};

template <> struct coder<LM_CODE_Q4_K> : paired_groups {
    static const int bytes = 144;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = head(p);
        whole_words(p + 16 + e / 8 * 32 + e % 4 * 8, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        float d, m;
        scales(w, e, &d, &m);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t q = byte_of(w.code, i) >> (e / 4 % 2 * 4) & 15;
            v[i] = __fsub_rn(__fmul_rn(d, code_less(q, 0)), m);
        }
    }
};

template <> struct coder<LM_CODE_Q5_K> : paired_groups {
    static const int bytes = 176;
    __device__ static code_words load(const uint8_t *p, int e)
    {
        code_words w = head(p);
        whole_words(p + 16 + e % 4 * 8, w.more);
        whole_words(p + 48 + e / 8 * 32 + e % 4 * 8, w.code);
        return w;
    }
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        float d, m;
        scales(w, e, &d, &m);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t q = (byte_of(w.code, i) >> (e / 4 % 2 * 4) & 15) |
                               (byte_of(w.more, i) >> (e / 4) & 1) << 4;
            v[i] = __fsub_rn(__fmul_rn(d, code_less(q, 0)), m);
        }
    }
};

/* 256 numbers in 16 groups of 16: low fours of 128 numbers in 64 bytes, upper twos in 32, a signed scale for each group. */
template <> struct coder<LM_CODE_Q6_K> {
    static const int block = 256, bytes = 210, apart = 8;
    __device__ static int first(int p)
    {
        return p / 8 * 16 + p % 8;
    }
    __device__ static code_words load(const uint8_t *p, int e)
    {
        const int half = e / 16, quarter = e / 4 % 4, at = e % 4 * 8;
        code_words w = {};
        words_at(p + half * 64 + quarter % 2 * 32 + at, w.code);
        words_at(p + 128 + half * 32 + at, w.more);
        w.of[0] = __ldg(p + 192 + e / 2);
        w.scale = half_word(p + 208);
        return w;
    }
    __device__ static void numbers(const code_words &w, int e, float *v)
    {
        const int quarter = e / 4 % 4;
        const float s = half_float(w.scale) * code_less(w.of[0] ^ 128, 128);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t q = (byte_of(w.code, i) >> (quarter / 2 * 4) & 15) |
                               (byte_of(w.more, i) >> (2 * quarter) & 3) << 4;
            v[i] = code_less(q, 32) * s;
        }
    }
};

/* ---- any format ---- */

#define LM_EACH_CODE(X) \
    X(LM_CODE_MXFP4)    \
    X(LM_CODE_FP8_128)  \
    X(LM_CODE_Q8_0)     \
    X(LM_CODE_Q4_0)     \
    X(LM_CODE_Q4_1)     \
    X(LM_CODE_Q5_0)     \
    X(LM_CODE_Q5_1) X(LM_CODE_IQ4_NL) X(LM_CODE_Q4_K) X(LM_CODE_Q5_K) X(LM_CODE_Q6_K)

template <int KIND> __device__ inline code_words load_eight_of(const uint8_t *row, int64_t eight)
{
    typedef coder<KIND> C;
    const int eights = C::block / 8;
    return C::load(row + eight / eights * C::bytes, (int)(eight % eights));
}

/* What numbers 8 `eight` on of a row are made of, and these numbers.  All threads of a warp have one format. */
__device__ inline code_words load_eight(lm_code_kind kind, const uint8_t *row, int64_t eight)
{
    switch (kind) {
#define LM_CASE(k) \
    case k:        \
        return load_eight_of<k>(row, eight);
        LM_EACH_CODE(LM_CASE)
#undef LM_CASE
    default:
        return code_words{};
    }
}
__device__ inline void eight_numbers(lm_code_kind kind, const code_words &w, int64_t eight,
                                     float *v)
{
    switch (kind) {
#define LM_CASE(k)                                                     \
    case k:                                                            \
        coder<k>::numbers(w, (int)(eight % (coder<k>::block / 8)), v); \
        break;
        LM_EACH_CODE(LM_CASE)
#undef LM_CASE
    default:
        break;
    }
}

/* Eight numbers rounded to T. */
template <class T>
__device__ inline void rounded_eight(lm_code_kind kind, const code_words &w, int64_t eight,
                                     T out[8])
{
    float v[8];
    eight_numbers(kind, w, eight, v);
#pragma unroll
    for (int i = 0; i < 8; i++)
        out[i] = from_float<T>(v[i]);
}

/* Eight elements, as packs where they are aligned. */
template <class T> __device__ inline void get_eight(const T *from, bool packed, T out[8])
{
    const int P = wide<T>::n;
#pragma unroll
    for (int i = 0; i < 8; i += P) {
        pack<T, P> v;
        if (packed) {
            v = *(const pack<T, P> *)(from + i);
        } else {
#pragma unroll
            for (int j = 0; j < P; j++)
                v.v[j] = from[i + j];
        }
#pragma unroll
        for (int j = 0; j < P; j++)
            out[i + j] = v.v[j];
    }
}
template <class T> __device__ inline void put_eight(T *to, bool packed, const T v[8])
{
    const int P = wide<T>::n;
#pragma unroll
    for (int i = 0; i < 8; i += P) {
        pack<T, P> x;
#pragma unroll
        for (int j = 0; j < P; j++)
            x.v[j] = v[i + j];
        if (packed) {
            *(pack<T, P> *)(to + i) = x;
        } else {
#pragma unroll
            for (int j = 0; j < P; j++)
                to[i + j] = x.v[j];
        }
    }
}

/* ---- on the host ---- */

/* Columns [col, col + cols) of rows [0, rows) of c, whose rows have `width` numbers, rounded to T and stored as Y, rows
 * without gaps; col and cols are multiples of 8. */
template <class T, class Y>
void code_numbers(const lm_code_rows *c, int64_t width, int64_t row, int64_t rows, int64_t col,
                  int64_t cols, Y *out, const lm_stream *s);

#endif
