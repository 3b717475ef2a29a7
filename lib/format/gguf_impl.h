/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_impl.h -- shared by the parts of the GGUF reader.  Private to lib/format. */
#ifndef LM_FORMAT_GGUF_IMPL_H
#define LM_FORMAT_GGUF_IMPL_H

#include "base/file.h"
#include "base/mem.h"
#include "format/gguf.h"

struct lm_gguf {
    char *where;
    lm_map map; /* data NULL: the bytes are borrowed */
    const uint8_t *data;
    size_t size;
    uint32_t version;
    lm_arena *arena; /* keys and names */
    lm_gguf_value *pair;
    lm_gguf_tensor *tensor;
    size_t n_pairs, n_tensors;
    const lm_gguf_value **by_key; /* sorted */
    const lm_gguf_tensor **by_name;
    size_t start; /* of the data */
};

/* Bytes of one value; 0 for those without a fixed size. */
extern const uint8_t lm_gguf_kind_bytes[LM_GGUF_KINDS];
/* A little-endian number of 1 to 8 bytes. */
uint64_t lm_gguf_get(const uint8_t *p, int bytes);

#endif
