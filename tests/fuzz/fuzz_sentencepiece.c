/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_sentencepiece.c -- a tokenizer.model: an accepted file must give a tokenizer.json that loads
 * and encodes a text; otherwise there must be a message. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] = " the <sep> \xE2\x96\x81 r\xC3\xA9sum\xC3\xA9 12";
    lm_buf config = { 0 };
    lm_tokenizer *t = NULL;
    lm_tok_scratch *s = NULL;
    lm_ids ids = { 0 };
    lm_err e = { 0 };

    if (lm_tokenizer_from_text((const char *)data, size, &config, "fuzz.model", &t, &e)) {
        if (!e.code || !e.what[0])
            abort();
    } else if (!lm_tok_scratch_new(t, &s, &e)) {
        int64_t n = lm_tokenizer_vocab_size(t);
        if (!lm_tokenizer_encode(t, s, text, sizeof text - 1, true, &ids, &e))
            for (size_t i = 0; i < ids.n; i++)
                if (ids.v[i] >= n)
                    abort();
    }
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    lm_buf_fini(&config);
    return 0;
}
