/* SPDX-License-Identifier: Apache-2.0 */
/* convert_flat.h -- formats of a header and all tensors in a fixed order: llm.c's checkpoints and
 * llama2.c's .bin.  Private to lib/convert.
 *
 * llm.c (train_gpt2.c, train_gpt2.py), GPT-2 alone:
 *   256 i32: 20240326, version (3: F32, 5: BF16), positions, vocabulary, layers, heads, width,
 *   padded vocabulary (a multiple of 128); then each tensor of all layers together, linear weights
 *   as [out, in], the embedding with rows of zeros up to the padded vocabulary
 * llama2.c (run.c, export.py), Llama alone, all F32:
 *   version 0: 7 i32: width, ffn, layers, heads, kv heads, vocabulary (negative: the head is a separate tensor),
 *   positions; the tensors; two tables of the rotation behind the last norm
 *   version 1: "ak42" as u32 0x616b3432, i32 1, the 7 i32, u8 1 when the head is the embedding,
 *   zeros up to 256 bytes; norms first
 * Orders of elements are those of GGUF (names.h). */
#ifndef LM_CONVERT_CONVERT_FLAT_H
#define LM_CONVERT_CONVERT_FLAT_H

#include "convert/convert_impl.h"

/* The tensors of a part, of all layers together, or the tables of the rotation. */
typedef struct {
    lm_part part;
    bool bias, tables;
} lm_flat_item;

typedef struct {
    const lm_flat_item *order; /* ended by an item without either */
    size_t header;             /* bytes before the first tensor */
    lm_dtype dtype;            /* bytes of the file */
    int64_t pad_rows;          /* rows of the embedding; 0: unchanged */
} lm_flat_file;

extern const lm_flat_item lm_llmc_order[], lm_llama2c_order[], lm_llama2c_order1[];

/* Import from a map, which the import owns from now on; m->tree and m->config must be set.  Fails:
 * LM_EFORMAT when the file is longer or shorter. */
lm_code lm_flat_import(lm_import *m, lm_map *map, const lm_flat_file *f, lm_err *e);
/* Write the header and all tensors to `path`. */
lm_code lm_flat_export(lm_import *m, const char *path, const lm_flat_file *f, const void *header,
                       const lm_export_opts *o, lm_err *e);

#endif
