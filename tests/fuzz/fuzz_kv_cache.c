/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_kv_cache.c -- cache files (kv-cache(5)), and the tables and chunks of streamed caches.
 *
 * Byte 0: even, the rest is a file, which is read as it is, and with a corrected checksum of its header, as a
 * stream and through its path with the same outcome; odd, bytes 1 and 2 are the length of tables, which follow with a chunk
 * behind them: numbers that are decoded are finite. */
#include <math.h>
#include <sanitizer/allocator_interface.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kv/image.h"
#include "tests/unit/kv_header.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* 1: read; 0: refused.  What is read decodes. */
static int read_cache(lm_kv_file *f)
{
    enum { MOST = 1 << 22 };
    const lm_kv_about *a = lm_kv_file_about(f);
    const lm_kv_reading r = { .vocab = 100, .context = 1 << 20, .level = LM_KV_FILE_BEST };
    size_t bytes = 8 * (size_t)a->tokens, one;
    lm_kv_image *m, *plain;
    lm_err e = { 0 };
    for (int64_t i = 0; i < 2 * a->layers; i++) {
        const lm_kv_shape s = lm_kv_about_shape(a, i);
        if (lm_kv_part_bytes(&s, &one, &e) || one > MOST)
            return 0;
        bytes += one + lm_kv_about_bytes(a, i);
    }
    if (bytes > MOST)
        return 0;
    lm_code rc = lm_kv_image_read(f, &r, lm_cpu_detect(), NULL, &m, &e);
    if (rc && !e.what[0])
        abort();
    if (!rc && lm_kv_image_convert(m, NULL, lm_cpu_detect(), NULL, &plain,
                                   &e)) { /* keys before their rotation only */
        if (e.code != LM_EUSAGE)
            abort();
    } else if (!rc) {
        lm_kv_image_free(plain);
    }
    lm_kv_image_free(m);
    return !rc;
}

/* What an open file has allocated is bounded by its bytes, and so is the time of opening it. */
static void check_cost(size_t size, size_t before, clock_t begin)
{
    size_t now = __sanitizer_get_current_allocated_bytes();
    if (now > before && now - before > 100 * size + (1 << 20))
        abort();
    if (clock() - begin > 2 * CLOCKS_PER_SEC)
        abort();
}

static int take(lm_code rc, lm_kv_file *f, const lm_err *e)
{
    if (!rc != (f != NULL) || (rc && !e->what[0]))
        abort();
    int good = f ? 1 + read_cache(f) : 0;
    lm_kv_file_close(f);
    return good;
}

static void file(const uint8_t *data, size_t size)
{
    static int fd = -1;
    char path[32];
    span s = { data, size };
    lm_kv_file *f = NULL;
    lm_err e = { 0 };
    size_t before = __sanitizer_get_current_allocated_bytes();
    clock_t begin = clock();
    lm_code rc = lm_kv_file_open_on(read_span, &s, "fuzz", &f, &e);
    check_cost(size, before, begin);
    int streamed = take(rc, f, &e);
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (ftruncate(fd, 0) || pwrite(fd, data, size, 0) != (ssize_t)size)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    e = (lm_err){ 0 };
    int seen = take(lm_kv_file_open(path, &f, &e), f, &e);
    /* a stream is not seen to be cut, or too long, before its end; it needs the tables first */
    if (seen > streamed + 1 || (streamed == 2 && seen != 2))
        abort();
}

static void coded(const uint8_t *data, size_t size)
{
    static const lm_cachegen_part part[2] = { { 1, 10, 16 }, { 3, 3, 4 } };
    static float a[13 * 10], b[13 * 9];
    void *rows[2] = { a, b };
    const lm_cachegen_rows to = { LM_DTYPE_F32, 13, rows };
    size_t n = data[0] | (size_t)data[1] << 8;
    lm_cachegen *g = NULL;
    lm_err e = { 0 };
    data += 2, size -= 2;
    n = n < size ? n : size;
    uint8_t *tables = malloc(n + !n), *chunk = malloc(size - n + 1);
    memcpy(tables, data, n);
    memcpy(chunk, data + n, size - n);
    if (!lm_cachegen_read(part, 2, tables, n, &g, &e))
        lm_cachegen_decode(g, chunk, size - n, &to, 0, lm_cpu_detect(), NULL, &e);
    for (int i = 0; i < 130; i++)
        if (!isfinite(a[i]) || !isfinite(b[i % 117]))
            abort();
    lm_cachegen_free(g);
    free(tables), free(chunk);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3)
        return 0;
    if (data[0] % 2) {
        coded(data + 1, size - 1);
        return 0;
    }
    char *copy = malloc(size);
    memcpy(copy, data + 1, size - 1);
    file(data + 1, size - 1);
    reseal(copy, size - 1);
    file((const uint8_t *)copy, size - 1);
    free(copy);
    return 0;
}
