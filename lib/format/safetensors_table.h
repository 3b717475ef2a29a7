/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_table.h -- the header of a safetensors file in memory: shared by its reader, stream,
 * plan and writer, and by code that reads tensors one by one. */
#ifndef LM_FORMAT_SAFETENSORS_TABLE_H
#define LM_FORMAT_SAFETENSORS_TABLE_H

#include "base/mem.h"
#include "format/safetensors.h"

typedef struct {
    lm_arena *arena;      /* all strings */
    lm_st_tensor *tensor; /* in the order of the data */
    size_t n, cap;
    const char **meta; /* key, value, key, value ... */
    size_t n_meta, meta_cap;
    uint32_t *cell; /* open addressing over names: index + 1, 0 = free; a power of two of cells */
    size_t n_cells;
    uint64_t data_bytes;
} lm_st_table; /* zero-initialise */

void lm_st_table_fini(lm_st_table *t);
const lm_st_tensor *lm_st_table_find(const lm_st_table *t, const char *name);
const char *lm_st_table_meta(const lm_st_table *t, const char *key);
bool lm_st_table_meta_at(const lm_st_table *t, size_t i, const char **key, const char **value);
lm_code lm_st_table_set_meta(lm_st_table *t, const char *key, const char *value, lm_err *e);
/* Append a tensor whose name, dtype_name, ndim and dim are given; strings are copied, count, bytes
 * and dtype are computed, offset is kept.  Fails (with `code`) for an unknown dtype, a duplicate
 * name, bad dimensions. */
lm_code lm_st_table_add(lm_st_table *t, const lm_st_tensor *given, const char *where, lm_code code,
                        lm_err *e);
/* Rebuild the index of names after the tensors were reordered. */
void lm_st_table_reindex(lm_st_table *t);
/* Rank of a dtype in the reference library's list, -1 if unknown. */
int lm_st_type_rank(const char *dtype_name);

/* Parse and check the JSON text of a header; data_bytes is the size of the data part, UINT64_MAX if
 * unknown (then it is taken from the last offset). */
lm_code lm_st_table_parse(lm_st_table *t, const char *text, size_t len, uint64_t data_bytes,
                          const char *where, lm_err *e);
/* The same without the check that the tensors cover the data: true if the header could be read in
 * one pass; otherwise *t is empty, and the header may be valid or not. */
bool lm_st_table_scan(lm_st_table *t, const char *text, size_t len);
/* __metadata__: the JSON text of its object. */
lm_code lm_st_table_read_meta(lm_st_table *t, const char *text, size_t len, const char *where,
                              lm_err *e);
/* The length field of a header: checked against the limit. */
lm_code lm_st_header_length(const uint8_t field[8], const char *where, uint64_t *out, lm_err *e);
/* LM_ELIMIT if the file system `fs` has fewer than `need` bytes free for this user. */
struct statvfs;
lm_code lm_st_check_room(const struct statvfs *fs, uint64_t need, const char *where, lm_err *e);
/* A name from a file, for messages: control bytes become '?', truncated to 80 bytes.  Returns
 * buf. */
#define LM_ST_SHOWN 96
const char *lm_st_show(const char *name, char buf[LM_ST_SHOWN]);
/* A shape for a message: "64,48".  Returns buf. */
#define LM_ST_SHAPE (21 * LM_ST_MAX_DIMS)
const char *lm_st_show_shape(int ndim, const int64_t *dim, char buf[LM_ST_SHAPE]);

#endif
