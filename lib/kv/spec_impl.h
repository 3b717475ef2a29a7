/* SPDX-License-Identifier: Apache-2.0 */
/* spec_impl.h -- a parsed specification.  Private to lib/kv. */
#ifndef LM_KV_SPEC_IMPL_H
#define LM_KV_SPEC_IMPL_H

#include "base/buf.h"
#include "kv/spec.h"

enum { LM_KV_RANGES = 32, LM_KV_ITEMS = 256 }; /* at most */

#define LM_KV_WHERE "kv cache" /* the place of errors */

/* A method with its values. */
typedef struct {
    const lm_kv_method *method; /* NULL: not set */
    double h[LM_KV_HYPERS];
    bool given[LM_KV_HYPERS];
    int file; /* number of the calibration's file, from 1; 0: not given */
} lm_kv_use;

typedef struct {
    int32_t from, to;
} lm_kv_range;

typedef struct {
    lm_kv_range range[LM_KV_RANGES];
    int n_ranges;
    lm_kv_use side[2]; /* at least one is set */
} lm_kv_item;

struct lm_kv_spec {
    lm_kv_item *item; /* those with layers, in the order of the text */
    size_t n_items, cap_items;
    lm_kv_use all[2]; /* of layers that no item names */
    lm_kv_use policy;
    const char *file[LM_KV_FILES];
    int n_files;
    lm_arena *arena; /* of their names */
    lm_buf text;
};

/* Append the canonical text of a method, "int4:group=64"; of ranges, "layers.0-3|-1". */
lm_code lm_kv_add_use(const lm_kv_spec *s, const lm_kv_use *u, lm_buf *out, lm_err *e);
lm_code lm_kv_add_ranges(const lm_kv_item *it, lm_buf *out, lm_err *e);
/* Write the canonical text into s->text. */
lm_code lm_kv_spec_write(lm_kv_spec *s, lm_err *e);

#endif
