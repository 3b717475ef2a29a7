/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tile.c -- the place of each code in a page. */
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
