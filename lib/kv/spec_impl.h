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
    const char *const *names; /* for messages */
    lm_kv_item *item;         /* those with layers, in the order of the text */
    size_t n_items, cap_items;
    lm_kv_use all[2]; /* of layers that no item names */
    lm_kv_use policy;
    const char *file[LM_KV_FILES];
    int n_files;
    int silent;      /* number of the file that is not part of the text; 0: none */
    lm_arena *arena; /* of their names */
    lm_buf text;
};

/* A specification that is bound to a model. */
typedef struct {
    const lm_kv_spec *s;
    const lm_kv_site *site;
    const lm_kv_data *const *data;
    lm_kv_plan *p;
    lm_kv_side *side;      /* p->side */
    const lm_kv_use **use; /* of each side */
} lm_kv_binding;

/* The form of one side with a method (spec_bind.c). */
lm_code lm_kv_bind_side(const lm_kv_binding *b, const lm_kv_use *u, int side, const lm_kv_site *at,
                        lm_kv_side *out, lm_err *e);
/* The least multiple of `page` that holds whole groups of a format. */
int64_t lm_kv_common_page(int64_t page, const lm_kv_format *f);
/* True for auto with a budget of bits. */
bool lm_kv_has_budget(const lm_kv_use *u);
/* Put methods in its place (spec_auto.c); *any: there are some. */
lm_code lm_kv_bind_auto(lm_kv_binding *b, bool *any, lm_err *e);
/* The candidates of a calibration, "int8;int4": one method each, at most LM_KV_MAX_CANDIDATES.
 * from: its place in messages. */
lm_code lm_kv_read_candidates(const char *candidates, const char *from, lm_kv_use *out, int *n,
                              lm_err *e);
/* The canonical text of what is bound, layer by layer, into p->text. */
lm_code lm_kv_bound_text(const lm_kv_binding *b, lm_err *e);

/* True if two uses have the same method and values. */
bool lm_kv_use_is_same(const lm_kv_use *a, const lm_kv_use *b);
/* Append the canonical text of a method, "int4:group=64"; of ranges, "layers.0-3|-1". */
lm_code lm_kv_add_use(const lm_kv_spec *s, const lm_kv_use *u, lm_buf *out, lm_err *e);
lm_code lm_kv_add_ranges(const lm_kv_item *it, lm_buf *out, lm_err *e);
/* Write the canonical text into s->text. */
lm_code lm_kv_spec_write(lm_kv_spec *s, lm_err *e);

#endif
