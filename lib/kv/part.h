/* SPDX-License-Identifier: Apache-2.0 */
/* part.h -- the keys, or the values, of a layer outside of a model: in host memory, in the order of
 * files.
 *
 * A part holds n tokens of K key/value heads of D numbers in a form (method.h).  Without a format
 * it is plain: one section, [K, n, D] in the type of the activations.  With a format the tokens
 * from .. to - 1 (lm_kv_part_range) are coded, in the order of numeric/kv_rows.h, one head behind
 * another; those before and after them are plain rows.  All rows are as they are in a cache: of a
 * form with `rotate`, plain rows are rotated too. */
#ifndef LM_KV_PART_H
#define LM_KV_PART_H

#include "base/cpu.h"
#include "base/par.h"
#include "kv/method.h"

/* The sections, in the order of files.  Of a token axis, groups are those of a token. */
typedef enum {
    LM_KV_PLAIN, /* act [K, n, D] */
    LM_KV_CODES, /* U8, LM_KV_TOKEN [K, coded, bytes of a token], LM_KV_CHANNEL [K, D, bytes of a channel] */
    LM_KV_SCALES, /* the format's type, LM_KV_TOKEN [K, coded, groups], LM_KV_CHANNEL [K, groups, D] */
    LM_KV_MINIMA,   /* as scales */
    LM_KV_SECONDS,  /* the format's type, LM_KV_TOKEN [K, spans, D], LM_KV_CHANNEL [K, coded] */
    LM_KV_SP_BEGIN, /* U32 [K, pages + 1]: outliers of the head before each page */
    LM_KV_SP_INDEX, /* U16 [outliers of all heads]: within a page t D + d, rising */
    LM_KV_SP_VALUE, /* F16 [outliers of all heads] */
    LM_KV_FIRST,    /* act [K, from, D] */
    LM_KV_TAIL,     /* act [K, n - to, D] */
    LM_KV_SECTIONS,
} lm_kv_section;

typedef struct {
    const lm_kv_side *form;
    lm_dtype act;
    int64_t page; /* tokens; coded parts only */
    int64_t kv_heads, head_dim, n;
} lm_kv_shape;

typedef struct {
    void *data[LM_KV_SECTIONS]; /* NULL: absent */
} lm_kv_part;

/* A section; bytes 0: absent.  Of outliers: the most that are possible, see lm_kv_part_outliers. */
typedef struct {
    lm_dtype dtype;
    int ndim;
    int64_t dim[3];
    size_t bytes;
} lm_kv_section_size;

static inline void lm_kv_part_range(const lm_kv_shape *s, int64_t *from, int64_t *to)
{
    int64_t coded = lm_kv_side_coded(s->form, s->n);
    *from = s->form->format && s->form->sinks < s->n ? s->form->sinks : s->form->format ? s->n : 0;
    *to = coded > *from ? coded : *from;
}

/* What a name of a tensor ends with: "", ".q", ".scale", ".min", ".scale2", ".sp_ptr", ".sp_idx",
 * ".sp_val", ".first", ".tail". */
const char *lm_kv_section_suffix(lm_kv_section i);

/* Check a shape.  Fails: LM_EUSAGE naming the format for what lm_kv_page refuses, for counts of
 * plain tokens that do not fit its groups, and for outliers and rotations that kernels do not
 * have. */
lm_code lm_kv_shape_check(const lm_kv_shape *s, lm_err *e);
/* The sections of a shape that was checked.  Fails: LM_ELIMIT. */
lm_code lm_kv_section_size_of(const lm_kv_shape *s, lm_kv_section i, lm_kv_section_size *out,
                              lm_err *e);
/* Bytes of all sections. */
lm_code lm_kv_part_bytes(const lm_kv_shape *s, size_t *out, lm_err *e);
/* Outliers of all heads, by LM_KV_SP_BEGIN. */
int64_t lm_kv_part_outliers(const lm_kv_shape *s, const lm_kv_part *p);

/* Allocate the sections, zeroed.  Release with lm_kv_part_fini, also after a failure. */
lm_code lm_kv_part_init(const lm_kv_shape *s, lm_kv_part *out, lm_err *e);
void lm_kv_part_fini(lm_kv_part *p);

/* True if a section has numbers of a type, all of which must be finite. */
bool lm_kv_section_is_float(lm_kv_section i);
/* NULL, or what is wrong with sections of any content, all numbers of which are finite. */
const char *lm_kv_part_wrong(const lm_kv_shape *s, const lm_kv_part *p);

/* Encode rows [K, n, D] in the type of the activations to a form that was allocated; rows of a form
 * with `pre_rope` are keys before the rotation by positions.  Heads run side by side, on the
 * kernels of `cpu` (kernels/kv_code.h), which gives the same bits at every level.  Fails:
 * LM_ELIMIT. */
lm_code lm_kv_part_encode(const lm_kv_shape *s, const void *rows, lm_kv_part *out, lm_cpu_level cpu,
                          lm_par *par, lm_err *e);
/* Decode to such rows. */
lm_code lm_kv_part_decode(const lm_kv_shape *s, const lm_kv_part *p, void *rows, lm_cpu_level cpu,
                          lm_par *par, lm_err *e);

/* Rows of a part of single tokens without plain ones beside its codes, in another order, to another
 * part of the shape: row i of head h comes from row order[h n + i]; back: it goes there.  Fails:
 * LM_EUSAGE for parts that code several tokens together. */
lm_code lm_kv_part_reorder(const lm_kv_shape *s, const lm_kv_part *from, const int32_t *order,
                           bool back, const lm_kv_part *to, lm_err *e);

/* Between a part and the cache of one sequence as kernels/kv.h has it: pages [ceil(n / page), K] of
 * lm_kv_page_bytes, in the order of their tokens, and the tail [K, sinks + residual, D].  A plain
 * part: pages of rows [page, D]; or with page 0 rows [K, room, D], `room` of them for each head.
 * tail NULL: codes alone. */
typedef struct {
    void *pages, *tail;
    int64_t room;
} lm_kv_memory;
lm_code lm_kv_part_get(const lm_kv_shape *s, const lm_kv_memory *from, const lm_kv_part *to,
                       lm_cpu_level cpu, lm_par *par, lm_err *e);
/* Clears the pages that have codes first. */
lm_code lm_kv_part_put(const lm_kv_shape *s, const lm_kv_part *from, const lm_kv_memory *to,
                       lm_cpu_level cpu, lm_par *par, lm_err *e);

#endif
