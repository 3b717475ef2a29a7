/* SPDX-License-Identifier: Apache-2.0 */
/* peak_amx.c -- tile products from the first-level cache, with one tile load for each, as in a
 * product with 2x2 register blocking. */
#include <immintrin.h>

#include "kernels/peak.h"

static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} config __attribute__((aligned(64))) = {
    .palette = 1,
    .column_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
    .rows = { 16, 16, 16, 16, 16, 16, 16, 16 },
};

enum { GROUPS = 4, TILE = 512 }; /* 16 KiB of operands; BF16 numbers in a tile */

#define GROUP(q)                                 \
    do {                                         \
        const uint16_t *t = data + (q)*4 * TILE; \
        _tile_loadd(4, t, 64);                   \
        _tile_loadd(6, t + TILE, 64);            \
        _tile_loadd(7, t + 2 * TILE, 64);        \
        _tile_loadd(5, t + 3 * TILE, 64);        \
        _tile_dpbf16ps(0, 4, 6);                 \
        _tile_dpbf16ps(1, 4, 7);                 \
        _tile_dpbf16ps(2, 5, 6);                 \
        _tile_dpbf16ps(3, 5, 7);                 \
    } while (0)

double lm_peak_amx(int64_t rounds, const uint16_t *data)
{
    _Static_assert(GROUPS * 4 * TILE == LM_PEAK_DATA, "four groups of four tiles");
    _tile_loadconfig(&config);
    for (int64_t i = 0; i < rounds; i++) {
        GROUP(0);
        GROUP(1);
        GROUP(2);
        GROUP(3);
    }
    _tile_release();
    return 16.0 * 16384 * (double)rounds;
}
