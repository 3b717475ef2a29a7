/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_base.h -- the base of a delta: its corresponding tensors, and their bytes;
 * private to lib/format. */
#ifndef LM_FORMAT_LMZ_BASE_H
#define LM_FORMAT_LMZ_BASE_H

#include "format/lmz_table.h"

/* ---- Writing: the tensors of a base by name ---- */

typedef struct lmz_bases lmz_bases;
/* Read the headers of its .safetensors files; a file that does not parse has no tensors. */
lm_code lmz_bases_new(lm_bundle *base, lmz_bases **out, lm_err *e);
void lmz_bases_free(lmz_bases *b);
/* The tensor of this name, dtype and size, searched in the file of the same name first; false if
 * there is none.  *file is borrowed from the bundle, *from counts from the start of the file. */
bool lmz_bases_find(const lmz_bases *b, const char *file, const char *tensor, const char *dtype,
                    uint64_t bytes, const char **base_file, uint64_t *from);

/* ---- Both ---- */

/* Bytes of a file of the base: *out points into the mapping, or to `room`, filled.  Any thread. */
lm_code lmz_base_bytes(const lm_bundle *base, const char *file, uint64_t from, size_t bytes,
                       uint8_t *room, const uint8_t **out, lm_err *e);
/* Drop them from the resident set after use. */
void lmz_base_forget(const lm_bundle *base, const char *file, uint64_t from, size_t bytes);

/* ---- Reading ---- */

/* Open the base that header h of the .lmz at `path` (NULL: a stream; `where` names it) requires and
 * compare digests.  A base that is itself an .lmz must have a shorter chain, so a cycle ends
 * here. */
lm_code lmz_base_open(const char *path, const char *where, const lmz_header *h,
                      const lm_bundle_opts *o, lm_bundle **out, lm_err *e);

#endif
