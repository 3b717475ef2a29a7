/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_vec.h -- the vector operations of gemm_simd.c, for the width for which it is compiled.
 *
 * *_n forms touch only the first n numbers (n may exceed the width, or be <= 0) and read zeros
 * beyond. vload_n with bf reads BF16; stores to BF16 round to nearest even and keep NaN a NaN. */
#ifndef LM_KERNELS_CPU_GEMM_VEC_H
#define LM_KERNELS_CPU_GEMM_VEC_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/gemm_transpose.h"
#include "numeric/dtype.h"

#define VINLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
typedef __m512 vec;
enum { VW = 16, VMR = 14, VKC = 256, SMALL_J = 4 };

VINLINE vec vzero(void)
{
    return _mm512_setzero_ps();
}
VINLINE vec vset1(float x)
{
    return _mm512_set1_ps(x);
}
VINLINE vec vload(const float *p)
{
    return _mm512_loadu_ps(p);
}
VINLINE void vstore(float *p, vec v)
{
    _mm512_storeu_ps(p, v);
}
VINLINE void vstream(float *p, vec v)
{
    _mm512_stream_ps(p, v);
}
VINLINE vec vadd(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}
VINLINE vec vfma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}
VINLINE float vsum(vec v)
{
    return _mm512_reduce_add_ps(v);
}
VINLINE __mmask16 vmask(int64_t n)
{
    return n >= VW ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}
VINLINE vec vload_n(const void *p, bool bf, int64_t n)
{
    if (!bf)
        return n >= VW ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(vmask(n), p);
    __m256i h = n >= VW ? _mm256_loadu_si256(p) : _mm256_maskz_loadu_epi16(vmask(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
VINLINE void vstore_n(float *p, vec v, int64_t n)
{
    if (n >= VW)
        _mm512_storeu_ps(p, v);
    else
        _mm512_mask_storeu_ps(p, vmask(n), v);
}
VINLINE __m256i vround(vec v)
{
    __m512i u = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);

    r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
VINLINE void vstore_bf16_n(uint16_t *p, vec v, int64_t n)
{
    _mm256_mask_storeu_epi16(p, vmask(n), vround(v));
}
VINLINE void vstream_bf16(uint16_t *p, vec v, vec w)
{
    __m512i both = _mm512_castsi256_si512(vround(v));
    _mm512_stream_si512((__m512i *)p, _mm512_inserti64x4(both, vround(w), 1));
}
VINLINE void vturn(vec v[VW])
{
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = _mm512_castps_si512(v[i]);
    transpose_16x16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        v[i] = _mm512_castsi512_ps(r[i]);
}
#else
typedef __m256 vec;
enum { VW = 8, VMR = 6, VKC = 384, SMALL_J = 2 };

VINLINE vec vzero(void)
{
    return _mm256_setzero_ps();
}
VINLINE vec vset1(float x)
{
    return _mm256_set1_ps(x);
}
VINLINE vec vload(const float *p)
{
    return _mm256_loadu_ps(p);
}
VINLINE void vstore(float *p, vec v)
{
    _mm256_storeu_ps(p, v);
}
VINLINE void vstream(float *p, vec v)
{
    _mm256_stream_ps(p, v);
}
VINLINE vec vadd(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}
VINLINE vec vfma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}
VINLINE float vsum(vec v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
VINLINE __m256i vmask(int64_t n)
{
    int m = n >= VW ? VW : n <= 0 ? 0 : (int)n;
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(m), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
VINLINE vec vload_n(const void *p, bool bf, int64_t n)
{
    if (!bf)
        return n >= VW ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, vmask(n));
    __m128i h = _mm_setzero_si128();
    if (n >= VW)
        h = _mm_loadu_si128(p);
    else if (n > 0)
        memcpy(&h, p, (size_t)n * 2);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
VINLINE void vstore_n(float *p, vec v, int64_t n)
{
    if (n >= VW) {
        _mm256_storeu_ps(p, v);
        return;
    }
    if (n <= 0)
        return;
    /* In pieces: a masked store of 32 bytes takes more than ten cycles on processors of AMD. */
    __m128 half = _mm256_castps256_ps128(v);
    if (n & 4) {
        _mm_storeu_ps(p, half);
        half = _mm256_extractf128_ps(v, 1);
        p += 4;
    }
    if (n & 2) {
        _mm_storel_pi((__m64 *)p, half);
        half = _mm_movehl_ps(half, half);
        p += 2;
    }
    if (n & 1)
        _mm_store_ss(p, half);
}
VINLINE __m128i vround(vec v)
{
    __m256i u = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), one);
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));

    r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
    r = _mm256_srli_epi32(r, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
VINLINE void vstore_bf16_n(uint16_t *p, vec v, int64_t n)
{
    __m128i h = vround(v);
    if (n >= VW)
        _mm_storeu_si128((__m128i *)p, h);
    else if (n > 0)
        memcpy(p, &h, (size_t)n * 2);
}
VINLINE void vstream_bf16(uint16_t *p, vec v, vec w)
{
    _mm_stream_si128((__m128i *)p, vround(v));
    _mm_stream_si128((__m128i *)(p + VW), vround(w));
}
VINLINE void vturn(vec v[VW])
{
    transpose_8x8(v);
}
#endif

#endif
