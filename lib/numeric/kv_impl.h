/* SPDX-License-Identifier: Apache-2.0 */
/* kv_impl.h -- shared by the files of kv_format.h; private to lib/numeric. */
#ifndef LM_NUMERIC_KV_IMPL_H
#define LM_NUMERIC_KV_IMPL_H

#include "numeric/kv_format.h"

/* A page of one head that is encoded or decoded. */
typedef struct {
    const lm_kv_format *f;
    int64_t T, D, kv;
    lm_kv_sections at;
    char *data;
} lm_kv_view;

/* A code of a page (kv_tile.c). */
unsigned lm_kv_get_code(const lm_kv_view *p, int64_t t, int64_t d);
void lm_kv_put_code(const lm_kv_view *p, int64_t t, int64_t d, unsigned code);
/* All codes of a token, [D]. */
void lm_kv_get_token(const lm_kv_view *p, int64_t t, uint8_t *code);
void lm_kv_put_token(const lm_kv_view *p, int64_t t, const uint8_t *code);

static inline double lm_kv_limited(double v, double least, double most)
{
    return v < least ? least : v > most ? most : v;
}

/* kv_levels.c */
double lm_kv_level(const lm_kv_format *f, unsigned code);
/* The scale and minimum of a channel with fixed ranges. */
lm_kv_scale lm_kv_fixed(const lm_kv_format *f, int64_t kv, int64_t D, int64_t d);

/* kv_balance.c: encode tokens at .. at + n, a group or a span, with second scales. */
void lm_kv_encode_balanced(const lm_kv_view *p, const float *x, int64_t pitch, int64_t at,
                           int64_t n);

#endif
