/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_layout.h -- shared by the files tokens*.c: the bytes of token datasets.  The layouts are
 * described in tokens.h.  Private to lib/format. */
#ifndef LM_FORMAT_TOKENS_LAYOUT_H
#define LM_FORMAT_TOKENS_LAYOUT_H

#include <stdint.h>
#include <string.h>

#include "base/file.h"
#include "format/tokens.h"
#include "format/tokens_meta.h"

#define LM_IDX_MAGIC "MMIDIDX\0" /* 9 bytes with the terminator */

enum {
    LM_IDX_HEADER = 34,
    LM_IDX_U16_BELOW = 65500, /* Megatron's limit between u16 and i32 */
    LM_LLMC_HEADER = 1024,
    LM_LLMC_GPT2 = 20240520,
    LM_LLMC_GPT2_VERSION = 1,
    LM_LLMC_LLAMA3 = 20240801,
    LM_LLMC_LLAMA3_VERSION = 7,
};

typedef enum {
    LM_ID_TYPE_U8,
    LM_ID_TYPE_I8,
    LM_ID_TYPE_I16,
    LM_ID_TYPE_U16,
    LM_ID_TYPE_I32,
    LM_ID_TYPE_U32,
    LM_ID_TYPE_I64,
} lm_id_type;

typedef struct {
    lm_map map;
    const uint8_t *ids;   /* in map */
    int64_t start, count; /* position in the flat stream */
} lm_tokens_part;

struct lm_tokens {
    char *path;
    lm_tokens_kind kind;
    lm_id_type type;
    int id_bytes;
    int64_t eot, count, docs;
    lm_tokens_meta meta;
    lm_tokens_part *parts;
    size_t n_parts, cap_parts;

    lm_map idx;  /* Megatron */
    lm_map mask; /* the same; no data: there are no loss marks */
    int64_t sequences;
    const uint8_t *offsets, *doc_seqs; /* unaligned i64 arrays in idx */

    int64_t *starts; /* llm.c, nanoGPT: made by lm_tokens_index */
    bool max_known;
    uint32_t max;
};

/* Element i of an unaligned array. */
static inline int64_t lm_idx_i64(const uint8_t *a, int64_t i)
{
    int64_t v;
    memcpy(&v, a + 8 * i, 8);
    return v;
}
static inline int32_t lm_idx_i32(const uint8_t *a, int64_t i)
{
    int32_t v;
    memcpy(&v, a + 4 * i, 4);
    return v;
}

/* True if base + suffix names a file (not a folder). */
bool lm_tokens_is_file(const char *base, const char *suffix);
/* Map the file `path` as the next part of t; the caller fills in its ids and their count. */
lm_code lm_tokens_add_part(lm_tokens *t, const char *path, lm_err *e);
/* Map and check the file `path` if it is one, otherwise base.bin, otherwise base_nnnnnn.bin into t.
 * AUTO: the kind is unknown. */
lm_code lm_tokens_open_flat(lm_tokens *t, lm_tokens_kind kind, const char *path, const char *base,
                            lm_err *e);
/* Check an .idx in memory against the size of its .bin; fills type, id_bytes, sequences, docs,
 * count, offsets and doc_seqs of t, which point into data. */
lm_code lm_tokens_parse_idx(lm_tokens *t, const uint8_t *data, size_t size, uint64_t bin_size,
                            const char *where, lm_err *e);

#endif
