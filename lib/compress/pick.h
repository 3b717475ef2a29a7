/* SPDX-License-Identifier: Apache-2.0 */
/* pick.h -- some tensors of safetensors files as one safetensors file that is read forward: what
 * `--tensor` takes out and what is left of a damaged file.
 *
 * A tensor that is stored coded (coded.h) is picked by the name of the whole: its codes and scales
 * come with their description.  Private to lib/compress. */
#ifndef LM_COMPRESS_PICK_H
#define LM_COMPRESS_PICK_H

#include "base/json.h"
#include "format/safetensors.h"

typedef struct lm_pick lm_pick;
lm_code lm_pick_new(lm_pick **out, lm_err *e);
void lm_pick_free(lm_pick *p);

/* The descriptions of the coded tensors of a file; *out = NULL if there are none.  Yours
 * (json_decref). */
lm_code lm_pick_described(const lm_st *file, json_t **out, lm_err *e);
/* The stored tensors, one or two, that make up the tensor `name`; *n = 0 when the file has it not. */
void lm_pick_parts(const lm_st *file, const json_t *described, const char *name,
                   const lm_st_tensor *part[2], int *n);
/* The name of the whole tensor that stored tensor `t` is (a part of), in buf (grown; reset first). */
lm_code lm_pick_whole(const json_t *described, const lm_st_tensor *t, lm_buf *buf, lm_err *e);

/* Take over tensor `name` of `file` (borrowed until p is freed); *found = false if it has it not.
 * Fails: LM_EUSAGE for a name taken twice. */
lm_code lm_pick_add(lm_pick *p, const lm_st *file, const json_t *described, const char *name,
                    bool *found, lm_err *e);
/* All metadata of `file` but the descriptions. */
lm_code lm_pick_meta(lm_pick *p, const lm_st *file, lm_err *e);
/* No more to come: make the header.  *bytes: of the whole file. */
lm_code lm_pick_ready(lm_pick *p, uint64_t *bytes, lm_err *e);
lm_code lm_pick_read(void *pick, void *dst, size_t cap, size_t *got, lm_err *e); /* lm_read_fn */

#endif
