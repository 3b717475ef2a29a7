/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_lmz -- any bytes as an .lmz: by index, forward, and salvaged; once unchanged, and once with
 * corrected checksums of header and records, so that the code after these checks is reached.  And
 * as the bytes of an index, which must be reproduced from its table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/hash.h"
#include "format/lmz_table.h"

enum { ROOM = 1 << 16 };
static uint8_t room[ROOM];
/* Files that an input names must not be opened. */
static const lm_bundle_opts opts = { .base = "/nonexistent/base" };

typedef struct {
    const uint8_t *p;
    size_t left;
} memory;

static lm_code read_memory(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    memory *m = ctx;
    size_t n = cap < m->left ? cap : m->left;

    (void)e;
    memcpy(dst, m->p, n);
    m->p += n;
    m->left -= n;
    *got = n;
    return LM_OK;
}

static void expect_told(lm_code rc, const lm_err *e)
{
    if (rc && (e->code != rc || !e->what[0]))
        abort();
}

/* Read forward; the data must have the sizes that the file announces. */
static bool stream(const uint8_t *data, size_t size)
{
    memory m = { data, size };
    const lm_bundle_file *f = NULL;
    lm_lmz *z = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_lmz_stream_open(read_memory, &m, "fuzz", &opts, &z, &e);

    do {
        uint64_t sum = 0;
        size_t got = 0;

        if (!rc)
            rc = lm_lmz_next(z, &f, &e);
        while (!rc && f && sum < f->bytes && !(rc = lm_lmz_read(z, room, 999, &got, &e)) && got)
            sum += got;
        if (!rc && f && sum != f->bytes)
            abort();
    } while (!rc && f);
    expect_told(rc, &e);
    lm_lmz_free(z);
    return !rc;
}

static void note(void *ctx, const lm_lmz_fault *f)
{
    if (!f->what || !f->what[0])
        abort();
    ++*(size_t *)ctx;
}

static bool use(lm_lmz *z)
{
    size_t faults = 0;
    lm_err e = { 0 };
    lm_code rc = lm_lmz_verify(z, note, &faults, NULL, &e);

    if (!rc != !faults)
        abort();
    expect_told(rc, &e);
    for (size_t i = 0; i < lm_lmz_files(z) && i < 20; i++) {
        uint64_t bytes = lm_lmz_file(z, i)->bytes;
        size_t n = bytes < ROOM ? (size_t)bytes : ROOM;
        lm_err why = { 0 };
        expect_told(lm_lmz_pread(z, i, 0, room, n, &why), &why);
        why = (lm_err){ 0 };
        expect_told(lm_lmz_pread(z, i, bytes - n, room, n, &why), &why);
    }
    for (size_t i = 0; i < lm_lmz_parts(z) && i < 20; i++) {
        lm_lmz_chunk_info info;
        lm_err why = { 0 };
        if (lm_lmz_part_at(z, i)->chunks < 100)
            expect_told(lm_lmz_part_planes(z, i, &info, &why), &why);
    }
    lm_lmz_free(z);
    return !faults;
}

/* By its index, and without. */
static bool whole(const char *path)
{
    lm_lmz *z = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_lmz_open_index(path, &opts, &z, &e);
    bool good = !rc && use(z);

    expect_told(rc, &e);
    e = (lm_err){ 0 };
    rc = lm_lmz_salvage(path, &opts, &z, &e);
    expect_told(rc, &e);
    if (!rc)
        use(z);
    return good;
}

static void file_and_stream(const uint8_t *data, size_t size)
{
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);

    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (whole(path) && !stream(data, size)) /* verify checks everything that a stream checks */
        abort();
    stream(data, size);
    close(fd);
}

/* Correct the checksums of all records. */
static void repair(uint8_t *p, size_t size)
{
    size_t n = size >= LMZ_HEADER ? lmz_header_size(p) : 0, at = n;

    if (!n || n > size)
        return;
    lmz_store(p + n - 8, lm_hash64(p, n - 8, 0), 8);
    while (size - at >= LMZ_HEAD && (n = lmz_record_size(p + at)) && n <= size - at) {
        uint8_t *r = p + at;
        char type = lmz_record_type(r);
        size_t coded = type == 'C'   ? (size_t)lmz_fetch(r + 28, 4)
                       : type == 'I' ? (size_t)lmz_fetch(r + 16, 8)
                                     : 0;
        if (coded > size - at - n)
            coded = 0;
        if (type == 'C')
            lmz_store(r + 44, lm_hash64(r + n, coded, 0), 8);
        if (type == 'I')
            lmz_store(r + 24, lm_hash64(r + n, coded, 0), 8);
        lmz_store(r + n - 8, lm_hash64(r, n - 8, 0), 8);
        at += n + coded;
    }
}

static void as_index(const uint8_t *data, size_t size)
{
    lmz_table t = { 0 };
    lm_err e = { 0 };
    lm_buf again = { 0 };
    uint64_t last = LMZ_HEADER;
    lm_code rc = lmz_table_from_index(&t, data, size, LMZ_HEADER, UINT64_MAX, "fuzz", &e);

    expect_told(rc, &e);
    if (t.files && t.file[t.files - 1].end) /* it is valid except for its end */
        last = t.file[t.files - 1].end + lmz_end_size(strlen(t.file[t.files - 1].pub->name));
    lmz_table_fini(&t);
    e = (lm_err){ 0 };
    rc = lmz_table_from_index(&t, data, size, LMZ_HEADER, last, "fuzz", &e);
    expect_told(rc, &e);
    if (!rc) {
        if (lmz_table_to_index(&t, &again, &e) || again.len != size ||
            memcmp(again.data, data, size) || size > last)
            abort();
        for (size_t f = 0; f < t.files; f++) {
            uint64_t bytes = t.file[f].pub->bytes;
            for (uint64_t at = 0; at < bytes && at < 1 << 24; at += 1 + bytes / 50) {
                const lmz_part *p = lmz_table_part_at(&t, f, at);
                uint64_t from = at - p->pub.offset;
                if (from >= p->pub.raw || !lmz_table_chunk_at(&t, f, at - from % LM_LMZ_CHUNK))
                    abort();
            }
        }
    }
    lm_buf_fini(&again);
    lmz_table_fini(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy = NULL;
    lm_err e = { 0 };

    as_index(data, size);
    file_and_stream(data, size);
    if (lm_realloc_n(&copy, size, 1, "a copy", &e))
        return 0;
    if (size)
        memcpy(copy, data, size);
    repair(copy, size);
    file_and_stream(copy, size);
    lm_free(copy);
    return 0;
}
