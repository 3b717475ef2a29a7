/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_driver -- the quantised blocks for test_ggml.py: F32 on standard input, blocks on standard
 * output; or, with -d, the reverse.  With -w, FILE has the importance of the numbers of a row as
 * F32; the input consists of rows of that length.
 *
 *   ggml_driver [-d | -w FILE] TYPE */
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "numeric/format.h"

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

static void encode(const lm_format *f, const float *x, int64_t numbers, const lm_buf *weight,
                   void *out)
{
    int64_t row = weight->len ? (int64_t)(weight->len / sizeof(float)) : numbers;
    const lm_encode_mode mode = { .importance = (const void *)weight->data };

    if (row)
        f->encode(f, x, numbers / row, row, row, &out, &mode);
}

int main(int argc, char **argv)
{
    bool back = argc == 3 && !strcmp(argv[1], "-d"), weighted = argc == 4 && !strcmp(argv[1], "-w");
    const lm_format *f;
    lm_buf in = { 0 }, weight = { 0 };
    lm_err e = { 0 };
    void *out;

    if (argc != (back       ? 3
                 : weighted ? 4
                            : 2) ||
        lm_format_find(argv[argc - 1], lm_format_interleaved, &f, &e))
        return fail("usage: ggml_driver [-d | -w FILE] TYPE");
    if (read_all(stdin, &in) || (weighted && read_all(fopen(argv[2], "rb"), &weight)))
        return 1;
    const lm_plane *p = &f->plane[0];
    int64_t numbers =
        back ? (int64_t)in.len / (p->bits / 8) * p->cols : (int64_t)(in.len / sizeof(float));
    lm_tensor_size size;
    if (lm_tensor_bytes(back ? lm_format_of_dtype(LM_DTYPE_F32) : f, 1, &numbers, &size, &e))
        return fail(e.what);
    size_t bytes = size.all;
    if (lm_alloc_n(&out, bytes, 1, "result", &e))
        return fail(e.what);
    if (back)
        f->decode(f, &(const void *){ in.data }, 1, numbers, out, numbers);
    else
        encode(f, (const float *)(const void *)in.data, numbers, &weight, out);
    if (fwrite(out, 1, bytes, stdout) != bytes || fflush(stdout))
        return fail("cannot write");
    lm_free(out);
    lm_buf_fini(&in);
    lm_buf_fini(&weight);
    return 0;
}
