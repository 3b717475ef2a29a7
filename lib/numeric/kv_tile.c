/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tile.c -- the place of each code in a page. */
#include <string.h>

#include "numeric/kv_impl.h"

/* Bytes from the beginning of the page to the tile of token t, and the code's line and byte in it. */
typedef struct {
    size_t tile;
    int64_t lines, line, byte;
} place;

static place place_of(const lm_kv_view *p, int64_t t, int64_t d)
{
    bool values = p->f->values;
    int64_t tokens = lm_kv_tile_tokens(values, p->T), in_tile = t % tokens;
    place x = { .tile = p->at.codes + (size_t)(t / tokens) * lm_kv_tile_bytes(p->f, p->T, p->D),
                .lines = lm_kv_tile_lines(values, p->T, p->D) };
    if (values) {
        x.line = d / 16 * (tokens / 4) + in_tile / 4;
        x.byte = d % 16 * 4 + in_tile % 4;
    } else {
        x.line = d / 4;
        x.byte = in_tile * 4 + d % 4;
    }
    return x;
}

/* The byte that holds the code in a plane of `bits` bits, and its shift there. */
static uint8_t *in_plane(const lm_kv_view *p, const place *x, size_t plane, int bits, int *shift)
{
    int64_t each = 8 / bits;
    *shift = bits * (int)(x->line % each);
    return (uint8_t *)p->data + x->tile + plane + (size_t)(x->line / each) * LM_KV_LINE + x->byte;
}

static unsigned get_bits(const lm_kv_view *p, const place *x, size_t plane, int bits)
{
    int shift;
    const uint8_t *byte = in_plane(p, x, plane, bits, &shift);
    return (unsigned)*byte >> shift & ((1u << bits) - 1);
}

static void put_bits(const lm_kv_view *p, const place *x, size_t plane, int bits, unsigned v)
{
    int shift;
    uint8_t *byte = in_plane(p, x, plane, bits, &shift);
    unsigned mask = ((1u << bits) - 1) << shift;
    *byte = (uint8_t)((*byte & ~mask) | (v << shift & mask));
}

unsigned lm_kv_get_code(const lm_kv_view *p, int64_t t, int64_t d)
{
    int bits = p->f->bits, low = lm_kv_low_bits(bits);
    place x = place_of(p, t, d);
    unsigned code = get_bits(p, &x, 0, low);
    if (bits > low)
        code |= get_bits(p, &x, lm_kv_plane_bytes(low, x.lines), bits - low) << low;
    return code;
}

void lm_kv_put_code(const lm_kv_view *p, int64_t t, int64_t d, unsigned code)
{
    int bits = p->f->bits, low = lm_kv_low_bits(bits);
    place x = place_of(p, t, d);
    put_bits(p, &x, 0, low, code);
    if (bits > low)
        put_bits(p, &x, lm_kv_plane_bytes(low, x.lines), bits - low, code >> low);
}

/* ---- all codes of a token ---- */

/* The lines that a token has codes in: line first + k step has `width` codes, `stride` bytes apart from `byte` on. */
typedef struct {
    int64_t first, step, width, stride, byte;
    uint8_t *tile;
} token_lines;

static token_lines lines_of(const lm_kv_view *p, int64_t t)
{
    bool values = p->f->values;
    int64_t tokens = lm_kv_tile_tokens(values, p->T), in_tile = t % tokens;
    token_lines x = { .step = 1, .width = 4, .stride = 1, .byte = in_tile * 4 };
    if (values)
        x = (token_lines){ in_tile / 4, tokens / 4, 16, 4, in_tile % 4, NULL };
    x.tile = (uint8_t *)p->data + p->at.codes +
             (size_t)(t / tokens) * lm_kv_tile_bytes(p->f, p->T, p->D);
    return x;
}

/* Bits `up` and on of the codes, from a plane of 2^log bits, or to it. */
static inline void walk_plane(const token_lines *x, uint8_t *plane, int log, int up, int64_t D,
                              uint8_t *code, bool put)
{
    int each = 3 - log; /* log of the lines of a unit */
    unsigned mask = (1u << (1 << log)) - 1;
    for (int64_t d = 0, line = x->first; d < D; line += x->step) {
        uint8_t *q = plane + (line >> each) * LM_KV_LINE + x->byte;
        int shift = (int)(line & ((1 << each) - 1)) << log;
        int64_t n = D - d < x->width ? D - d : x->width;
        for (int64_t i = 0; i < n && !put; i++)
            code[d + i] =
                (uint8_t)(code[d + i] | ((unsigned)q[i * x->stride] >> shift & mask) << up);
        for (int64_t i = 0; i < n && put; i++)
            q[i * x->stride] = (uint8_t)((q[i * x->stride] & ~(mask << shift)) |
                                         ((unsigned)code[d + i] >> up & mask) << shift);
        d += n;
    }
}

static void walk_planes(const lm_kv_view *p, int64_t t, uint8_t *code, bool put)
{
    static const int log_of[9] = { [1] = 0, [2] = 1, [4] = 2, [8] = 3 };
    int bits = p->f->bits, low = lm_kv_low_bits(bits);
    token_lines x = lines_of(p, t);
    walk_plane(&x, x.tile, log_of[low], 0, p->D, code, put);
    if (bits > low)
        walk_plane(&x, x.tile + lm_kv_plane_bytes(low, lm_kv_tile_lines(p->f->values, p->T, p->D)),
                   log_of[bits - low], low, p->D, code, put);
}

void lm_kv_get_token(const lm_kv_view *p, int64_t t, uint8_t *code)
{
    memset(code, 0, (size_t)p->D);
    walk_planes(p, t, code, false);
}

void lm_kv_put_token(const lm_kv_view *p, int64_t t, const uint8_t *code)
{
    walk_planes(p, t, (uint8_t *)(uintptr_t)code, true);
}
