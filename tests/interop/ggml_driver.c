/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_driver -- the quantised blocks for test_ggml.py: F32 on standard input, blocks on standard
 * output; or, with -d, the other way.  With -w, the input is rows of as many numbers as FILE has, which
 * holds their importance as F32.
 *
 *   ggml_driver [-d | -w FILE] TYPE */
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "numeric/ggml.h"

static int fail(const char *what)
{
    fprintf(stderr, "ggml_driver: %s\n", what);
    return 1;
}

static int read_all(FILE *f, lm_buf *out)
{
    lm_err e = { 0 };
    char piece[65536];
    size_t n;

    while (f && (n = fread(piece, 1, sizeof piece, f)) > 0)
        if (lm_buf_add(out, piece, n, &e))
            return fail(e.what);
    return f ? 0 : fail("cannot open the file");
}

static void encode(const lm_ggml_type *g, const float *x, size_t numbers, const lm_buf *weight,
                   uint8_t *out)
{
    size_t row = weight->len / sizeof(float);

    if (!row || !g->encode_weighted) {
        g->encode(x, (int64_t)numbers, out);
        return;
    }
    for (size_t i = 0; i + row <= numbers; i += row)
        g->encode_weighted(x + i, (const float *)(const void *)weight->data, (int64_t)row,
                           out + i / (size_t)g->block * g->bytes);
}

int main(int argc, char **argv)
{
    bool back = argc == 3 && !strcmp(argv[1], "-d"), weighted = argc == 4 && !strcmp(argv[1], "-w");
    const lm_ggml_type *g;
    lm_buf in = { 0 }, weight = { 0 };
    lm_err e = { 0 };
    uint8_t *out;

    if (argc != (back ? 3 : weighted ? 4 : 2) || lm_ggml_find(argv[argc - 1], &g, &e))
        return fail("usage: ggml_driver [-d | -w FILE] TYPE");
    if (read_all(stdin, &in) || (weighted && read_all(fopen(argv[2], "rb"), &weight)))
        return 1;
    size_t numbers = back ? in.len / g->bytes * (size_t)g->block : in.len / sizeof(float);
    size_t bytes = back ? numbers * sizeof(float) : numbers / (size_t)g->block * g->bytes;
    if (lm_alloc_n(&out, bytes, 1, "result", &e))
        return fail(e.what);
    if (back)
        g->decode(in.data, (int64_t)numbers, (float *)(void *)out);
    else
        encode(g, (const float *)(const void *)in.data, numbers, &weight, out);
    if (fwrite(out, 1, bytes, stdout) != bytes || fflush(stdout))
        return fail("cannot write");
    lm_free(out);
    lm_buf_fini(&in);
    lm_buf_fini(&weight);
    return 0;
}
