/* SPDX-License-Identifier: Apache-2.0 */
/* format_dynamic.c -- the dynamic map: tables made once, codes found by the leading bits of a number. */
#include "numeric/format_dynamic.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static lm_dynamic_map maps[2]; /* unsigned, signed */
static pthread_once_t made = PTHREAD_ONCE_INIT;

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The cell of the magnitude of v in [-1, 1], and the least magnitude in a cell. */
static int cell_of(uint32_t bits)
{
    int i = (int)(bits >> LM_DYNAMIC_CELL_SHIFT) - LM_DYNAMIC_CELL_LEAST;
    return i < 0 ? 0 : i;
}

static float cell_from(int i)
{
    uint32_t u = (uint32_t)(i + LM_DYNAMIC_CELL_LEAST) << LM_DYNAMIC_CELL_SHIFT;
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

static uint8_t search(const lm_dynamic_map *m, float v)
{
    int k = 0;
    while (v > m->mid[k])
        k++;
    return (uint8_t)k;
}

static void make_map(lm_dynamic_map *m, bool with_sign)
{
    int n = 0;
    for (int d = 0; d < 7; d++) {
        int cells = with_sign ? 1 << d : 2 << d;
        for (int k = 0; k < cells; k++) {
            double v = pow(10, d - 6) * (0.1 + 0.9 * (k + 0.5) / cells);
            m->value[n++] = (float)v;
            if (with_sign)
                m->value[n++] = d ? -(float)v : -1;
        }
    }
    m->value[n++] = 0;
    m->value[n++] = 1;
    qsort(m->value, 256, sizeof *m->value, ascending);
    for (int k = 0; k < 255; k++) {
        m->mid[k] = (m->value[k] + m->value[k + 1]) / 2;
        if (m->value[k] == 0)
            m->zero = (uint8_t)k;
    }
    m->mid[255] = INFINITY;
    /* Codes grow with the number: for negative ones the search begins at the far end of the cell. */
    for (int i = 0; i < LM_DYNAMIC_CELLS; i++) {
        m->start[0][i] = i ? search(m, cell_from(i)) : m->zero;
        m->start[1][i] = search(m, -cell_from(i + 1));
    }
}

static void make_maps(void)
{
    make_map(&maps[0], false);
    make_map(&maps[1], true);
}

const lm_dynamic_map *lm_dynamic_maps(void)
{
    pthread_once(&made, make_maps);
    return maps;
}

/* The nearest entry to v in [-1, 1]; between two, the lower one. */
static uint8_t nearest(const lm_dynamic_map *m, float v)
{
    uint32_t u;
    memcpy(&u, &v, sizeof u);
    int k = m->start[u >> 31][cell_of(u & 0x7fffffffu)];
    return (uint8_t)(k + (v > m->mid[k]));
}

/* One of the two entries around v, drawn so that the mean is v. */
static uint8_t drawn(const lm_dynamic_map *m, float v, uint32_t r)
{
    int k = nearest(m, v);
    if (v < m->value[k])
        k--;
    if (k == 255 || v == m->value[k])
        return (uint8_t)k;
    double up = ((double)v - m->value[k]) / ((double)m->value[k + 1] - m->value[k]);
    return (uint8_t)(k + (r * 0x1p-32 < up));
}

/* The scale of n numbers, as format_dynamic.h defines it. */
static float scale_of(const float *x, int64_t n)
{
    float most = 0;
    bool negative = false, finite = true;
    for (int64_t j = 0; j < n; j++) {
        float a = fabsf(x[j]);
        most = a > most ? a : most;
        negative |= x[j] < 0;
        finite &= a <= 0x1.fffffep127f;
    }
    return !finite ? NAN : negative ? -most : most;
}

/* Encode one block and return its scale. */
static float encode_block(const float *x, int64_t n, uint8_t *code, const lm_encode_mode *mode,
                          uint64_t index)
{
    float s = scale_of(x, n), most = fabsf(s);
    const lm_dynamic_map *m = &maps[s < 0];
    for (int64_t j = 0; j < n; j++) {
        if (!(most > 0)) { /* all 0, or not finite */
            code[j] = m->zero;
            continue;
        }
        float v = x[j] / most;
        code[j] = mode && mode->rounding == LM_ROUND_STOCHASTIC
                      ? drawn(m, v, lm_rng_u32(mode->rng, index + (uint64_t)j))
                      : nearest(m, v);
        if (s > 0 && code[j] == m->zero && x[j] > 0)
            code[j]++;
    }
    return s;
}

void lm_dynamic_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols,
                       int64_t pitch, void *const *plane, const lm_encode_mode *mode)
{
    uint8_t *code = plane[0], *scale = plane[1];
    (void)f;
    pthread_once(&made, make_maps);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j += LM_DYNAMIC_BLOCK, scale += sizeof(float)) {
            int64_t n = cols - j < LM_DYNAMIC_BLOCK ? cols - j : LM_DYNAMIC_BLOCK;
            float s = encode_block(x + i * pitch + j, n, code + i * cols + j, mode,
                                   (mode ? mode->index : 0) + (uint64_t)(i * cols + j));
            memcpy(scale, &s, sizeof s);
        }
}

void lm_dynamic_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                       float *y, int64_t pitch)
{
    const uint8_t *code = plane[0], *scale = plane[1];
    (void)f;
    pthread_once(&made, make_maps);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j += LM_DYNAMIC_BLOCK, scale += sizeof(float)) {
            float s;
            memcpy(&s, scale, sizeof s);
            const lm_dynamic_map *m = &maps[s < 0];
            for (int64_t k = j; k < cols && k < j + LM_DYNAMIC_BLOCK; k++)
                y[i * pitch + k] = m->value[code[i * cols + k]] * fabsf(s);
        }
}
