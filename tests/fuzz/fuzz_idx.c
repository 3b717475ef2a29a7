/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_idx.c -- a Megatron index: every document of an accepted index must be inside the ids.
 *
 * The first two bytes are the size of the .bin, the rest is the .idx. */
#include <stdint.h>
#include <stdlib.h>

#include "format/tokens_layout.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lm_tokens t = { .kind = LM_TOKENS_MEGATRON };
    lm_err e = { 0 };
    if (size < 2)
        return 0;
    uint64_t bin = data[0] | (uint64_t)data[1] << 8;
    uint8_t *copy = malloc(size - 1); /* ASan detects reads beyond it */
    memcpy(copy, data + 2, size - 2);
    if (!lm_tokens_parse_idx(&t, copy, size - 2, bin, "fuzz", &e)) {
        int64_t before = 0;
        if (t.count < 0 || (uint64_t)t.count * (uint64_t)t.id_bytes != bin)
            abort();
        for (int64_t d = 0; d <= lm_tokens_docs(&t); d++) {
            int64_t at = lm_tokens_doc_start(&t, d);
            if (at < before || at > t.count)
                abort();
            before = at;
        }
        for (int64_t at = 0; at < t.count && t.docs; at += 1 + t.count / 16)
            if (lm_tokens_doc_start(&t, lm_tokens_doc_of(&t, at)) > at)
                abort();
    } else if (!e.what[0]) {
        abort(); /* a refusal must have a message */
    }
    free(copy);
    return 0;
}
