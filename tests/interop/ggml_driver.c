/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_driver -- the quantised blocks for test_ggml.py: F32 on standard input, blocks on standard
 * output; or, with -d, the other way.
 *
 *   ggml_driver [-d] TYPE */
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

int main(int argc, char **argv)
{
    bool back = argc == 3 && !strcmp(argv[1], "-d");
    const lm_ggml_type *g;
    lm_buf in = { 0 };
    lm_err e = { 0 };
    uint8_t *out;
    char piece[65536];
    size_t n;

    if (argc != (back ? 3 : 2) || lm_ggml_find(argv[argc - 1], &g, &e))
        return fail("usage: ggml_driver [-d] TYPE");
    while ((n = fread(piece, 1, sizeof piece, stdin)) > 0)
        if (lm_buf_add(&in, piece, n, &e))
            return fail(e.what);
    size_t numbers = back ? in.len / g->bytes * (size_t)g->block : in.len / sizeof(float);
    size_t bytes = back ? numbers * sizeof(float) : numbers / (size_t)g->block * g->bytes;
    if (lm_alloc_n(&out, bytes, 1, "result", &e))
        return fail(e.what);
    if (back)
        g->decode(in.data, (int64_t)numbers, (float *)(void *)out);
    else
        g->encode((const float *)(const void *)in.data, (int64_t)numbers, out);
    if (fwrite(out, 1, bytes, stdout) != bytes || fflush(stdout))
        return fail("cannot write");
    lm_free(out);
    lm_buf_fini(&in);
    return 0;
}
