/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizers_driver -- the driver of test_tokenizers.py: encodes and decodes records from a pipe.
 *
 * tokenizers_driver TOKENIZER: records on standard input, each answered at once on standard output.
 * 'e' or 's' (with special tokens) + u32 length + text -> u32 count + u32 ids;
 * 'p' or 'q' (with special tokens) + u32 length + two texts with a NUL between them -> u32 count + u32
 * ids + u32 types;
 * 'd' + u32 count + u32 ids -> u32 length + text.  'D' is 'd' through the stream decoder. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "text/tokenizer.h"

static void die(const lm_err *e)
{
    fprintf(stderr, "tokenizers_driver: %s: %s\n", e->where, e->what);
    exit(1);
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    lm_tokenizer *t;
    lm_tok_scratch *s;
    lm_ids ids = { 0 }, types = { 0 };
    lm_buf in = { 0 }, text = { 0 };
    uint32_t n;
    int kind;

    if (argc != 2 || lm_tokenizer_load(argv[1], &t, &e) || lm_tok_scratch_new(t, &s, &e))
        die(&e);
    while ((kind = getchar()) != EOF && fread(&n, 4, 1, stdin) == 1) {
        size_t bytes = strchr("espq", kind) ? n : (size_t)n * 4;
        in.len = text.len = ids.n = types.n = 0;
        if (lm_buf_room(&in, bytes, &e))
            die(&e);
        if (fread(in.data, 1, bytes, stdin) != bytes)
            return 1;
        if (kind == 'e' || kind == 's') {
            if (lm_tokenizer_encode(t, s, in.data, n, kind == 's', &ids, &e))
                die(&e);
            n = (uint32_t)ids.n;
            fwrite(&n, 4, 1, stdout);
            fwrite(ids.v, 4, n, stdout);
        } else if (kind == 'p' || kind == 'q') {
            const char *b = memchr(in.data, 0, n);
            size_t len = b ? (size_t)(b - in.data) : n;
            if (!b || lm_tokenizer_encode_pair(t, s, in.data, len, b + 1, n - len - 1, kind == 'q',
                                               &ids, &types, &e))
                die(&e);
            n = (uint32_t)ids.n;
            fwrite(&n, 4, 1, stdout);
            fwrite(ids.v, 4, n, stdout);
            fwrite(types.v, 4, n, stdout);
        } else {
            const uint32_t *v = (const uint32_t *)(void *)in.data;
            lm_tok_stream st = { 0 };
            lm_code rc = LM_OK;
            if (kind == 'd')
                rc = lm_tokenizer_decode(t, v, n, true, &text, &e);
            for (uint32_t i = 0; kind == 'D' && i < n && !rc; i++)
                rc = lm_tok_stream_push(&st, t, v[i], true, &text, &e);
            if (kind == 'D' && !rc)
                rc = lm_tok_stream_end(&st, t, true, &text, &e);
            lm_tok_stream_fini(&st);
            if (rc)
                die(&e);
            n = (uint32_t)text.len;
            fwrite(&n, 4, 1, stdout);
            fwrite(text.data, 1, n, stdout);
        }
        fflush(stdout);
    }
    lm_buf_fini(&in);
    lm_buf_fini(&text);
    lm_ids_fini(&ids);
    lm_ids_fini(&types);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    return 0;
}
