/* SPDX-License-Identifier: Apache-2.0 */
/* cachegen_impl.h -- the parts of the coder: codes of rows, and tables.  Private to lib/kv. */
#ifndef LM_KV_CACHEGEN_IMPL_H
#define LM_KV_CACHEGEN_IMPL_H

#include "base/mem.h"
#include "kernels/rans.h"
#include "kv/cachegen.h"

enum {
    CACHEGEN_ANCHOR_BINS = 256,
    CACHEGEN_ANCHORS = CACHEGEN_ANCHOR_BINS - 1, /* symbols of anchors, */
    CACHEGEN_MIDDLE = CACHEGEN_ANCHORS / 2,      /* of which this is 0 */
};

static inline int64_t cachegen_channels(const lm_cachegen_part *p)
{
    return p->heads * p->width;
}
static inline bool cachegen_is_anchor(int64_t token)
{
    return token % LM_CACHEGEN_GROUP == 0;
}
/* Symbols of differences: odd, the middle one is 0. */
static inline int cachegen_symbols(const lm_cachegen_part *p)
{
    return p->bins - 1;
}

/* ---- Codes (cachegen_rows.c) ---- */

/* Scratch of one thread for parts of up to `channels`. */
typedef struct {
    float *x, *anchor; /* [channels] */
    uint8_t *code;     /* [LM_CACHEGEN_CHUNK][channels]: codes + half, unsigned */
    uint16_t scale[LM_CACHEGEN_CHUNK];
    uint8_t kind[LM_CACHEGEN_CHUNK]; /* 0: anchor, 1: difference */
} cachegen_work;

/* Quantise n tokens from token `first` on to w->code, w->scale.  Returns -1, or the token with a
 * number that has no code. */
int64_t cachegen_code_rows(cachegen_work *w, const lm_cachegen_part *p,
                           const lm_cachegen_rows *rows, const void *data, int64_t first,
                           int64_t n);
/* The inverse. */
void cachegen_decode_rows(cachegen_work *w, const lm_cachegen_part *p, const lm_cachegen_rows *rows,
                          void *data, int64_t first, int64_t n);

/* ---- Tables (cachegen_tables.c) ---- */

/* How often each channel has each symbol; [channels][symbols]. */
typedef struct {
    uint32_t *anchor, *difference;
} cachegen_counts;

/* Tables of one part: set 0 for anchors, 1 for differences. */
typedef struct {
    lm_cachegen_part part;
    uint8_t *mean; /* [channels]: the mean code of anchors */
    int tables[2];
    uint16_t *start[2]; /* [tables][width] */
    uint32_t *at[2];    /* [channels]: table * width */
} cachegen_tables;

static inline int cachegen_table_symbols(const cachegen_tables *t, int set)
{
    return set ? cachegen_symbols(&t->part) : CACHEGEN_ANCHORS;
}
/* Choose the tables of t->part for these counts.  The counts of anchors become relative to the
 * mean. */
lm_code cachegen_fit(cachegen_tables *t, cachegen_counts *counts, lm_err *e);
lm_code cachegen_tables_write(const cachegen_tables *t, lm_buf *out, lm_err *e);
/* The tables of t->part. */
lm_code cachegen_tables_read(cachegen_tables *t, const uint8_t *p, size_t len, lm_err *e);
void cachegen_tables_fini(cachegen_tables *t);
/* Codes of n tokens, as cachegen_code_rows makes them, to the symbols that are coded, and back; in
 * place. */
void cachegen_to_symbols(const cachegen_tables *t, uint8_t *code, int64_t n);
void cachegen_from_symbols(const cachegen_tables *t, uint8_t *code, int64_t n);

#endif
