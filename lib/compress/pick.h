/* SPDX-License-Identifier: Apache-2.0 */
/* pick.h -- selected tensors of safetensors files as one safetensors file that is read forward:
 * single tensors that were requested, or the intact tensors of a damaged file.
 *
 * A tensor that is stored coded (coded.h) is picked by its own name: its codes and scales follow,
 * with their description.  Private to lib/compress. */
#ifndef LM_COMPRESS_PICK_H
#define LM_COMPRESS_PICK_H

#include "base/json.h"
#include "format/safetensors.h"

typedef struct lm_pick lm_pick;
lm_code lm_pick_new(lm_pick **out, lm_err *e);
void lm_pick_free(lm_pick *p);

/* The descriptions of the coded tensors of a file; *out = NULL if there are none.  The caller frees
 * it (json_decref). */
lm_code lm_pick_described(const lm_st *file, json_t **out, lm_err *e);
/* The stored tensors, one or two, that make up the tensor `name`; *n = 0 when the file does not
 * have it. */
void lm_pick_parts(const lm_st *file, const json_t *described, const char *name,
                   const lm_st_tensor *part[2], int *n);
/* The name of the tensor that stored tensor `t` is, or is a part of, in buf (reset first). */
lm_code lm_pick_whole(const json_t *described, const lm_st_tensor *t, lm_buf *buf, lm_err *e);

/* Add tensor `name` of `file` (borrowed until p is freed); *found = false if the file does not have
 * it.  Fails: LM_EUSAGE for a name added twice. */
lm_code lm_pick_add(lm_pick *p, const lm_st *file, const json_t *described, const char *name,
                    bool *found, lm_err *e);
/* Copy all metadata of `file` except the descriptions. */
lm_code lm_pick_meta(lm_pick *p, const lm_st *file, lm_err *e);
/* All tensors are added: make the header.  *bytes: size of the file. */
lm_code lm_pick_ready(lm_pick *p, uint64_t *bytes, lm_err *e);
lm_code lm_pick_read(void *pick, void *dst, size_t cap, size_t *got, lm_err *e); /* lm_read_fn */

#endif
