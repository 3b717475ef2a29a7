/* SPDX-License-Identifier: Apache-2.0 */
/* kv_products.h -- exact products of rows in two planes of 8 bits with codes: by tiles, or by dot products of four bytes
 * (AVX512-VNNI).  A operands lie KV_A bytes apart: `half` rows of hi, then of lo, 64 bytes each, of which `rows` are used;
 * results as tiles lie, KV_A bytes apart. */
#ifndef LM_KERNELS_CPU_KV_PRODUCTS_H
#define LM_KERNELS_CPU_KV_PRODUCTS_H

#ifdef KV_TILES

/* Tiles 0 and 1 are results, 2 and 3 codes, 4 to 7 rows. */

/* Products of `parts` A operands with tiles [x0, x1) of codes: part i multiplies the tile at b[x] + from[i]. */
LM_INLINE void key_products(int parts, const int8_t *a, const uint8_t *const *b,
                            const int64_t *from, int64_t x0, int64_t x1, int64_t half, int64_t rows,
                            int32_t *c)
{
    (void)half;
    (void)rows;
    _tile_loadd(4, a, 64);
    if (parts > 1)
        _tile_loadd(5, a + KV_A, 64);
    if (parts > 2)
        _tile_loadd(6, a + 2 * KV_A, 64);
    if (parts > 3)
        _tile_loadd(7, a + 3 * KV_A, 64);
#define KV_PRODUCT(to, in, x)                \
    _tile_zero(to);                          \
    _tile_loadd(in, b[x] + from[0], 64);     \
    _tile_dpbsud(to, 4, in);                 \
    if (parts > 1) {                         \
        _tile_loadd(in, b[x] + from[1], 64); \
        _tile_dpbsud(to, 5, in);             \
    }                                        \
    if (parts > 2) {                         \
        _tile_loadd(in, b[x] + from[2], 64); \
        _tile_dpbsud(to, 6, in);             \
    }                                        \
    if (parts > 3) {                         \
        _tile_loadd(in, b[x] + from[3], 64); \
        _tile_dpbsud(to, 7, in);             \
    }                                        \
    _tile_stored(to, c + (x) * (KV_A / 4), 64)
    for (int64_t x = x0; x < x1; x += 2) {
        KV_PRODUCT(0, 2, x);
        if (x + 1 < x1) {
            KV_PRODUCT(1, 3, x + 1);
        }
    }
}

/* Products of rows with codes of 16 channels each, at b[x] + [from, to) KV_A; x counts 64 tokens in [x0, x1). */
LM_INLINE void value_products(int parts, const int8_t *a, const uint8_t *const *b, int64_t from,
                              int64_t to, int64_t half, int64_t rows, int32_t *c)
{
    (void)half;
    (void)rows;
    _tile_loadd(4, a, 64);
    if (parts > 1)
        _tile_loadd(5, a + KV_A, 64);
    if (parts > 2)
        _tile_loadd(6, a + 2 * KV_A, 64);
    if (parts > 3)
        _tile_loadd(7, a + 3 * KV_A, 64);
    for (int64_t i = from; i < to; i++) {
        _tile_zero(0);
        _tile_loadd(2, b[0] + i * KV_A, 64);
        _tile_dpbsud(0, 4, 2);
        if (parts > 1) {
            _tile_loadd(3, b[1] + i * KV_A, 64);
            _tile_dpbsud(0, 5, 3);
        }
        if (parts > 2) {
            _tile_loadd(2, b[2] + i * KV_A, 64);
            _tile_dpbsud(0, 6, 2);
        }
        if (parts > 3) {
            _tile_loadd(3, b[3] + i * KV_A, 64);
            _tile_dpbsud(0, 7, 3);
        }
        _tile_stored(0, c + i * (KV_A / 4), 64);
    }
}

#else

#define KV_VNNI __attribute__((target("avx512vnni")))

/* Rows r (hi) and half + r (lo) of `parts` operands with 16 lines at p[i] and at q[i]: c and d. */
KV_VNNI LM_INLINE void dots(int rows, int parts, const int8_t *a, int64_t half,
                            const uint8_t *const *p, const uint8_t *const *q, int32_t *c,
                            int32_t *d)
{
    __m512i x[8], y[8];
#pragma GCC unroll 8
    for (int r = 0; r < 2 * rows; r++)
        x[r] = y[r] = _mm512_setzero_si512();
    for (int i = 0; i < parts; i++, a += KV_A)
        for (int64_t l = 0; l < 64; l += 4) {
            __m512i u = _mm512_loadu_si512(p[i] + l * 16), v = _mm512_loadu_si512(q[i] + l * 16);
#pragma GCC unroll 8
            for (int r = 0; r < 2 * rows; r++) {
                int32_t four;
                memcpy(&four, a + (r < rows ? r : half + r - rows) * 64 + l, sizeof four);
                __m512i f = _mm512_set1_epi32(four);
                x[r] = _mm512_dpbusd_epi32(x[r], u, f);
                y[r] = _mm512_dpbusd_epi32(y[r], v, f);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < 2 * rows; r++) {
        int64_t at = (r < rows ? r : half + r - rows) * 16;
        _mm512_store_si512(c + at, x[r]);
        _mm512_store_si512(d + at, y[r]);
    }
}

/* The same for any rows up to 8: four at a time. */
KV_VNNI static void dots_of_rows(int64_t rows, int parts, const int8_t *a, int64_t half,
                                 const uint8_t *const *p, const uint8_t *const *q, int32_t *c,
                                 int32_t *d)
{
    if (rows == 1) {
        dots(1, parts, a, half, p, q, c, d);
        return;
    }
    if (rows == 2) {
        dots(2, parts, a, half, p, q, c, d);
        return;
    }
    dots(4, parts, a, half, p, q, c, d);
    if (rows > 4)
        dots(4, parts, a + 4 * 64, half, p, q, c + 4 * 16, d + 4 * 16);
}

/* Products of `parts` A operands with tiles [x0, x1) of codes: part i multiplies the tile at b[x] + from[i]. */
static void key_products(int parts, const int8_t *a, const uint8_t *const *b, const int64_t *from,
                         int64_t x0, int64_t x1, int64_t half, int64_t rows, int32_t *c)
{
    const uint8_t *p[4], *q[4];
    for (int64_t x = x0; x < x1; x += 2) {
        int64_t y = x + 1 < x1 ? x + 1 : x;
        for (int i = 0; i < parts; i++) {
            p[i] = b[x] + from[i];
            q[i] = b[y] + from[i];
        }
        dots_of_rows(rows, parts, a, half, p, q, c + x * (KV_A / 4), c + y * (KV_A / 4));
    }
}

/* Products of rows with codes of 16 channels each, number [from, to), at b[i] + number KV_A; i counts 64 tokens. */
static void value_products(int parts, const int8_t *a, const uint8_t *const *b, int64_t from,
                           int64_t to, int64_t half, int64_t rows, int32_t *c)
{
    const uint8_t *p[4], *q[4];
    for (int64_t x = from; x < to; x += 2) {
        int64_t y = x + 1 < to ? x + 1 : x;
        for (int i = 0; i < parts; i++) {
            p[i] = b[i] + x * KV_A;
            q[i] = b[i] + y * KV_A;
        }
        dots_of_rows(rows, parts, a, half, p, q, c + x * (KV_A / 4), c + y * (KV_A / 4));
    }
}
#endif

#endif
