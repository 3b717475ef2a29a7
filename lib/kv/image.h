/* SPDX-License-Identifier: Apache-2.0 */
/* image.h -- a whole cache in host memory, in the order of files: between a model and a file, or
 * two files.
 *
 * `about` and `content` are its own, with strings, forms and the calibrations that forms point
 * to. */
#ifndef LM_KV_IMAGE_H
#define LM_KV_IMAGE_H

#include "kv/file.h"
#include "kv/spec.h"

typedef struct {
    lm_kv_about about;
    lm_kv_content content;
    lm_arena *arena;
} lm_kv_image;

/* An empty image of a cache.  The caller frees *out with lm_kv_image_free.  Fails: LM_EUSAGE for
 * shapes and forms that do not exist, LM_ELIMIT. */
lm_code lm_kv_image_new(const lm_kv_about *a, lm_kv_image **out, lm_err *e);
void lm_kv_image_free(lm_kv_image *m);
size_t lm_kv_image_bytes(const lm_kv_image *m); /* of all sections */

/* All that is in a file, with lm_kv_file_read. */
lm_code lm_kv_image_read(lm_kv_file *f, const lm_kv_reading *r, lm_cpu_level cpu, lm_par *par,
                         lm_kv_image **out, lm_err *e);
/* The same cache in the forms of a plan (NULL: plain), by decoding what is coded and encoding it
 * anew.  Parts whose form is that of the plan are copied.  Fails: LM_EUSAGE if the layers differ,
 * for keys that would have to be rotated by their positions or back (model/cache_rope.h does that),
 * and for forms that do not fit; LM_ENUMERIC, LM_ELIMIT.  `cpu`: lm_kv_part_encode. */
lm_code lm_kv_image_convert(const lm_kv_image *m, const lm_kv_plan *plan, lm_cpu_level cpu,
                            lm_par *par, lm_kv_image **out, lm_err *e);
/* The same with a function that rotates a key by its position in place, or undoes it, for parts
 * that differ in it. */
typedef struct {
    void (*turn)(const void *ctx, int64_t layer, int32_t position, bool back, double *head);
    const void *ctx;
} lm_kv_turn;
lm_code lm_kv_image_convert_turned(const lm_kv_image *m, const lm_kv_plan *plan,
                                   const lm_kv_turn *turn, lm_cpu_level cpu, lm_par *par,
                                   lm_kv_image **out, lm_err *e);
/* True if both forms store the same numbers in the same bytes; formats may have different names. */
bool lm_kv_same_form(const lm_kv_side *a, const lm_kv_side *b, int64_t kv_heads, int64_t head_dim);

/* The relative error of a part that approximates rows [kv_heads, n, head_dim]: sqrt(sum of squares
 * of the differences / sum of squares). */
double lm_kv_rows_error(lm_dtype act, const void *rows, const void *again, size_t n);

#endif
