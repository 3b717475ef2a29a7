/* SPDX-License-Identifier: Apache-2.0 */
/* .lmz: round trips by every way of reading; every damage is detected and located, and intact data
 * beside it are still read; differences to a base, and wrong bases. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/lmz.h"

static char dir[64];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/lm-test-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int drop_dir(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_rm_rf(dir, &e);
}

static const char *in_dir(const char *name)
{
    static char path[4][160];
    static int turn;

    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

/* ---- Contents to pack ---- */

typedef struct {
    const char *name;
    uint8_t *data;
    size_t bytes;
} member;

enum { MOST = 8 };
typedef struct {
    member m[MOST];
    size_t n;
} content;

static void add(content *c, const char *name, const void *data, size_t bytes)
{
    lm_err e = { 0 };
    member *m = &c->m[c->n++];

    m->name = name;
    m->bytes = bytes;
    assert_int_equal(lm_alloc_n(&m->data, bytes, 1, "test", &e), LM_OK);
    if (bytes)
        memcpy(m->data, data, bytes);
}

static void drop(content *c)
{
    for (size_t i = 0; i < c->n; i++)
        lm_free(c->m[i].data);
    c->n = 0;
}

static uint64_t mix(uint64_t x)
{
    x ^= x >> 31;
    x *= UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 29;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    return x ^ x >> 32;
}

/* Bits as weights have them for the floats (sign and mantissa noise, few exponents), noise else. */
static void fill(lm_dtype d, uint8_t *p, size_t bytes, uint64_t seed)
{
    size_t size = d == LM_DTYPE_NONE ? 1 : lm_dtype_size(d);

    for (size_t i = 0; i + size <= bytes; i += size) {
        uint64_t r = mix(seed + i);
        if (lm_dtype_is_float(d)) /* through r: p may lie anywhere */
            lm_set(d, &r, 0, ((double)(r >> 40) / (1 << 24) - 0.5) / (double)(1 + r % 7));
        memcpy(p + i, &r, size);
    }
}

typedef struct {
    const char *name, *dtype;
    int64_t rows, cols; /* cols < 0: one dimension; rows < 0: a scalar */
} tensor;

/* A .safetensors of these tensors in this order. */
static void add_tensors(content *c, const char *name, const tensor *t, size_t n, uint64_t seed)
{
    lm_st_plan *p = NULL;
    lm_buf out = { 0 };
    lm_err e = { 0 };

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    for (size_t i = 0; i < n; i++) {
        lm_st_tensor x = { .name = t[i].name,
                           .dtype_name = t[i].dtype,
                           .ndim = t[i].rows < 0   ? 0
                                   : t[i].cols < 0 ? 1
                                                   : 2,
                           .dim = { t[i].rows, t[i].cols } };
        assert_int_equal(lm_st_plan_add_like(p, &x, &e), LM_OK);
    }
    assert_int_equal(lm_st_plan_header(p, &out, &e), LM_OK);
    for (size_t i = 0; i < n; i++) {
        const lm_st_tensor *x = lm_st_plan_at(p, i);
        assert_int_equal(lm_buf_room(&out, x->bytes, &e), LM_OK);
        memset(out.data + out.len, 0, x->bytes);
        fill(x->dtype, (uint8_t *)out.data + out.len, x->bytes, mix(seed) + i);
        out.len += x->bytes;
    }
    add(c, name, out.data, out.len);
    lm_buf_fini(&out);
    lm_st_plan_free(p);
}

static const tensor all_types[] = {
    { "bool", "BOOL", 7, 3 },        { "f4", "F4", 10, -1 },
    { "f6", "F6_E2M3", 8, -1 },      { "u8", "U8", 1001, -1 },
    { "i8", "I8", 33, 31 },          { "e5m2", "F8_E5M2", 3000, -1 },
    { "e4m3", "F8_E4M3", 127, 129 }, { "e8m0", "F8_E8M0", 65, -1 },
    { "i16", "I16", 501, -1 },       { "u16", "U16", 77, 7 },
    { "f16", "F16", 255, 257 },      { "empty", "F32", 0, 5 },
    { "bf16", "BF16", 1100, 1000 },  { "i32", "I32", 999, -1 },
    { "u32", "U32", 1, -1 },         { "scalar", "F32", -1, -1 },
    { "f32", "F32", 700, 801 },      { "c64", "C64", 11, 13 },
    { "f64", "F64", 300, 500 },      { "i64", "I64", 44, -1 },
    { "u64", "U64", 5, 3 },          { "none at the end", "BF16", 0, -1 },
};

static void make_model(content *c, uint64_t seed)
{
    static const char config[] = "{\"model_type\": \"llama\", \"hidden_size\": 64}";

    *c = (content){ 0 };
    add(c, "config.json", config, sizeof config - 1);
    add(c, "empty.txt", "", 0);
    add_tensors(c, "model.safetensors", all_types, sizeof all_types / sizeof *all_types, seed);
    add(c, "notes.txt", "of no use", 9);
}

/* ---- Packing ---- */

static lm_code to_buf(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    return lm_buf_add(ctx, data, bytes, e);
}

/* Push in pieces of `piece` bytes (0: all at once). */
static void pack(const content *c, const lm_lmz_opts *o, size_t piece, lm_buf *out)
{
    lm_lmz_writer *w = NULL;
    lm_err e = { 0 };

    out->len = 0;
    assert_int_equal(lm_lmz_create_on(to_buf, out, "test.lmz", o, &w, &e), LM_OK);
    for (size_t i = 0; i < c->n; i++) {
        const member *m = &c->m[i];
        assert_int_equal(lm_lmz_begin(w, m->name, m->bytes, &e), LM_OK);
        for (size_t at = 0; at < m->bytes;) {
            size_t n = piece && piece < m->bytes - at ? piece : m->bytes - at;
            assert_int_equal(lm_lmz_write(w, m->data + at, n, &e), LM_OK);
            at += n;
        }
    }
    if (lm_lmz_close(w, &e))
        fail_msg("%s: %s", e.where, e.what);
}

static void store(const char *path, const lm_buf *b)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b->data, 1, b->len, f), b->len);
    fclose(f);
}

typedef struct {
    const uint8_t *p;
    size_t left, step;
} memory;

static lm_code from_memory(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    memory *m = ctx;
    size_t n = cap < m->left ? cap : m->left;

    (void)e;
    if (m->step && n > m->step)
        n = m->step;
    memcpy(dst, m->p, n);
    m->p += n;
    m->left -= n;
    *got = n;
    return LM_OK;
}

/* ---- Comparing ---- */

static void check_forward(lm_lmz *z, const content *c, size_t piece)
{
    const lm_bundle_file *f = NULL;
    uint8_t *room = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_alloc_n(&room, piece, 1, "test", &e), LM_OK);
    for (size_t i = 0; i < c->n; i++) {
        size_t at = 0, got = 0;
        if (lm_lmz_next(z, &f, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_non_null(f);
        assert_string_equal(f->name, c->m[i].name);
        assert_int_equal(f->bytes, c->m[i].bytes);
        do {
            if (lm_lmz_read(z, room, piece, &got, &e))
                fail_msg("%s: %s", e.where, e.what);
            assert_true(got <= c->m[i].bytes - at);
            assert_memory_equal(room, c->m[i].data + at, got);
            at += got;
        } while (got);
        assert_int_equal(at, c->m[i].bytes);
    }
    if (lm_lmz_next(z, &f, &e))
        fail_msg("%s: %s", e.where, e.what);
    assert_null(f);
    assert_int_equal(lm_lmz_next(z, &f, &e), LM_OK);
    assert_null(f);
    lm_free(room);
}

static void check_random(lm_lmz *z, const content *c)
{
    lm_err e = { 0 };
    uint8_t *room = NULL;

    assert_int_equal(lm_lmz_files(z), c->n);
    for (size_t i = 0; i < c->n; i++) {
        const member *m = &c->m[i];
        assert_string_equal(lm_lmz_file(z, i)->name, m->name);
        assert_int_equal(lm_alloc_n(&room, m->bytes, 1, "test", &e), LM_OK);
        if (lm_lmz_pread(z, i, 0, room, m->bytes, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_memory_equal(room, m->data, m->bytes);
        for (uint64_t k = 0; k < 60 && m->bytes; k++) {
            size_t from = mix(k) % m->bytes, n = mix(k + 99) % (m->bytes - from + 1);
            if (k % 3)
                n %= 5000;
            memset(room, 0xee, m->bytes);
            if (lm_lmz_pread(z, i, from, room, n, &e))
                fail_msg("%s: %s", e.where, e.what);
            assert_memory_equal(room, m->data + from, n);
        }
        assert_int_equal(lm_lmz_pread(z, i, m->bytes, room, 0, &e), LM_OK);
        assert_int_equal(lm_lmz_pread(z, i, m->bytes, room, 1, &e), LM_EUSAGE);
        e = (lm_err){ 0 };
        lm_free(room);
    }
}

static lm_lmz *open_whole(const char *path, const lm_bundle_opts *o)
{
    lm_lmz *z = NULL;
    lm_err e = { 0 };

    if (lm_lmz_open(path, o, &z, &e))
        fail_msg("%s: %s", e.where, e.what);
    return z;
}

static void check_stream(const lm_buf *b, const lm_bundle_opts *o, const content *c, size_t step,
                         size_t piece)
{
    memory m = { (const uint8_t *)b->data, b->len, step };
    lm_lmz *z = NULL;
    lm_err e = { 0 };

    if (lm_lmz_stream_open(from_memory, &m, "stream", o, &z, &e))
        fail_msg("%s: %s", e.where, e.what);
    check_forward(z, c, piece);
    lm_lmz_free(z);
}

static void test_round_trip(void **state)
{
    lm_buf one = { 0 }, other = { 0 };
    content c;
    lm_err e = { 0 };
    static const int threads[] = { 1, 2, 5 };
    static const size_t pieces[] = { 0, 7001, 1 << 20, 1999999 };
    (void)state;

    make_model(&c, 1);
    pack(&c, NULL, 0, &one);
    for (size_t t = 0; t < 3; t++) {
        lm_par *par = NULL;
        assert_int_equal(lm_par_new(&par, threads[t], &e), LM_OK);
        for (size_t k = 0; k < 4; k++) {
            pack(&c, &(lm_lmz_opts){ .par = par }, pieces[k], &other);
            assert_int_equal(other.len, one.len);
            assert_memory_equal(other.data, one.data, one.len);
        }
        lm_bundle_opts o = { .par = par };
        store(in_dir("a.lmz"), &one);
        lm_lmz *z = open_whole(in_dir("a.lmz"), &o);
        check_random(z, &c);
        check_forward(z, &c, 100001);
        lm_lmz_free(z);
        check_stream(&one, &o, &c, 0, 1 << 22);
        check_stream(&one, &o, &c, 1000, 3333);
        lm_par_free(par);
    }
    lm_buf_fini(&one);
    lm_buf_fini(&other);
    drop(&c);
}

/* ---- Damage ---- */

static void make_small(content *c)
{
    static const tensor t[] = { { "a.weight", "BF16", 30, 5 },
                                { "b.weight", "F32", 11, 3 },
                                { "c.bias", "U8", 9, -1 } };
    *c = (content){ 0 };
    add(c, "config.json", "{\"hidden_size\": 4}", 18);
    add_tensors(c, "model.safetensors", t, 3, 7);
}

typedef struct {
    size_t n, named;
} faults;

static void count_fault(void *ctx, const lm_lmz_fault *f)
{
    faults *n = ctx;

    n->n++;
    n->named += f->what && f->what[0];
}

/* All data of the small content that can still be read must be right; returns the number of whole
 * files. */
static size_t check_salvaged(const char *path, const content *c)
{
    lm_lmz *z = NULL;
    lm_err e = { 0 };
    faults n = { 0 };
    uint8_t room[2048];
    size_t whole = 0;

    if (lm_lmz_salvage(path, NULL, &z, &e)) {
        assert_int_equal(e.code, LM_EFORMAT);
        return 0;
    }
    assert_int_equal(lm_lmz_verify(z, count_fault, &n, NULL, &e), LM_EFORMAT);
    assert_true(n.n && n.named == n.n);
    for (size_t i = 0; i < lm_lmz_files(z); i++) {
        const lm_bundle_file *f = lm_lmz_file(z, i);
        for (size_t k = 0; k < c->n; k++) {
            e = (lm_err){ 0 };
            if (strcmp(f->name, c->m[k].name) || f->bytes != c->m[k].bytes)
                continue;
            if (lm_lmz_pread(z, i, 0, room, f->bytes, &e))
                continue;
            assert_memory_equal(room, c->m[k].data, f->bytes);
            whole++;
        }
    }
    for (size_t i = 0; i < lm_lmz_parts(z); i++) { /* nothing may crash */
        const lm_lmz_part *p = lm_lmz_part_at(z, i);
        lm_lmz_chunk_info info;
        for (size_t k = 0; k < lm_lmz_files(z); k++) {
            e = (lm_err){ 0 };
            if (!strcmp(lm_lmz_file(z, k)->name, p->file))
                (void)!lm_lmz_pread(z, k, p->offset, room, p->raw, &e);
        }
        e = (lm_err){ 0 };
        (void)!lm_lmz_part_planes(z, i, &info, &e);
    }
    lm_lmz_free(z);
    return whole;
}

static bool stream_accepts(const lm_buf *b, size_t bytes)
{
    memory m = { (const uint8_t *)b->data, bytes, 0 };
    const lm_bundle_file *f = NULL;
    lm_lmz *z = NULL;
    lm_err e = { 0 };
    lm_code rc = lm_lmz_stream_open(from_memory, &m, "stream", NULL, &z, &e);

    do {
        if (!rc)
            rc = lm_lmz_next(z, &f, &e);
    } while (!rc && f);
    lm_lmz_free(z);
    assert_int_equal(e.code, rc);
    assert_true(!rc || (e.where[0] && e.what[0]));
    return !rc;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STEP = 13 }; /* large blocks are slow to get there */
#else
enum { STEP = 1 };
#endif

static void test_every_bit(void **state)
{
    lm_buf b = { 0 };
    content c;
    size_t saved = 0, opened = 0;
    const char *path = in_dir("bits.lmz");
    (void)state;

    make_small(&c);
    pack(&c, NULL, 0, &b);
    store(path, &b);
    lm_lmz *z = open_whole(path, NULL);
    lm_err e = { 0 };
    assert_int_equal(lm_lmz_verify(z, NULL, NULL, NULL, &e), LM_OK);
    lm_lmz_free(z);
    int fd = open(path, O_RDWR);
    for (size_t i = 0; i < 8 * b.len; i += STEP) {
        char was = b.data[i / 8];

        b.data[i / 8] = (char)(was ^ 1 << i % 8);
        assert_int_equal(pwrite(fd, b.data + i / 8, 1, (off_t)(i / 8)), 1);
        e = (lm_err){ 0 };
        if (!lm_lmz_open(path, NULL, &z, &e)) {
            opened++;
            assert_int_equal(lm_lmz_verify(z, NULL, NULL, NULL, &e), LM_EFORMAT);
            lm_lmz_free(z);
        }
        assert_int_equal(e.code, LM_EFORMAT);
        if (!strstr(e.where, "bits.lmz") || !e.what[0])
            fail_msg("bit %zu: %s: %s", i, e.where, e.what);
        assert_false(stream_accepts(&b, b.len));
        if (i % 5 == 0)
            saved += check_salvaged(path, &c);
        b.data[i / 8] = was;
        assert_int_equal(pwrite(fd, b.data + i / 8, 1, (off_t)(i / 8)), 1);
    }
    close(fd);
    /* one bit costs one file at most, and some bits (of records, index, footer) none */
    assert_true(saved > 8 * b.len / 5 / STEP);
    assert_true(opened > 4 * b.len / STEP);
    lm_buf_fini(&b);
    drop(&c);
}

static void test_truncated(void **state)
{
    lm_buf b = { 0 };
    content c;
    const char *path = in_dir("short.lmz");
    size_t saved = 0;
    (void)state;

    make_small(&c);
    pack(&c, NULL, 0, &b);
    store(path, &b);
    for (size_t n = b.len; n-- > 0;) {
        lm_lmz *z = NULL;
        lm_err e = { 0 };
        assert_int_equal(truncate(path, (off_t)n), 0);
        assert_int_equal(lm_lmz_open(path, NULL, &z, &e), LM_EFORMAT);
        assert_false(stream_accepts(&b, n));
        size_t now = check_salvaged(path, &c);
        assert_true(n + 1 == b.len || now <= saved);
        if (n + 1 == b.len)
            assert_int_equal(now, 2);
        saved = now;
    }
    assert_true(lm_buf_add(&b, "x", 1, &(lm_err){ 0 }) == LM_OK);
    assert_false(stream_accepts(&b, b.len));
    lm_buf_fini(&b);
    drop(&c);
}

typedef struct {
    const char *file, *tensor;
    uint64_t chunk, chunks;
    size_t n;
} expected;

static void note_fault(void *ctx, const lm_lmz_fault *f)
{
    expected *x = ctx;

    if (!f->part || f->chunk == UINT64_MAX)
        return;
    x->n++;
    x->file = f->file;
    x->tensor = f->part->tensor;
    x->chunk = f->chunk;
    x->chunks = f->chunks;
}

/* Position of the k-th record of a type whose fields hold `text`. */
static size_t find_record(const lm_buf *b, char type, const char *text, size_t k)
{
    for (size_t i = 0; i + 20 < b->len; i++)
        if (!memcmp(b->data + i, (const char[]){ '\xf5', 'L', 'Z', type }, 4)) {
            uint32_t n;
            memcpy(&n, b->data + i + 4, 4);
            if ((!text || memmem(b->data + i, n + 8, text, strlen(text))) && !k--)
                return i;
        }
    fail_msg("no record %c", type);
    return 0;
}

/* The third chunk of a tensor is damaged: verify names it; without index its neighbours are still
 * read. */
static void test_chunk_lost(void **state)
{
    static const tensor t[] = { { "first", "BF16", 1 << 19, 3 }, /* 3 chunks */
                                { "second", "F16", 1 << 19, 5 },
                                { "third", "U8", 100, -1 } };
    lm_buf b = { 0 };
    content c = { 0 };
    lm_lmz *z = NULL;
    lm_err e = { 0 };
    uint8_t *room = NULL;
    (void)state;

    add_tensors(&c, "model.safetensors", t, 3, 3);
    pack(&c, NULL, 0, &b);
    size_t at = find_record(&b, 'C', NULL, 1 + 3 + 2); /* header, first, two of second */
    b.data[at + 5000] ^= 4;
    store(in_dir("hit.lmz"), &b);
    z = open_whole(in_dir("hit.lmz"), NULL);
    for (int walked = 0; walked < 2; walked++) {
        expected x = { 0 };
        assert_int_equal(lm_lmz_verify(z, note_fault, &x, NULL, &e), LM_EFORMAT);
        assert_int_equal(x.n, 1);
        assert_string_equal(x.file, "model.safetensors");
        assert_string_equal(x.tensor, "second");
        assert_int_equal(x.chunk, 2);
        if (!walked)
            assert_non_null(strstr(e.where, "model.safetensors: tensor 'second', chunk 2"));
        assert_int_equal(lm_alloc_n(&room, c.m[0].bytes, 1, "test", &e), LM_OK);
        for (size_t i = 0; i < lm_lmz_parts(z); i++) {
            const lm_lmz_part *p = lm_lmz_part_at(z, i);
            bool hit = p->tensor && !strcmp(p->tensor, "second");
            e = (lm_err){ 0 };
            assert_int_equal(lm_lmz_pread(z, 0, p->offset, room, p->raw, &e),
                             hit ? LM_EFORMAT : LM_OK);
            if (!hit)
                assert_memory_equal(room, c.m[0].data + p->offset, p->raw);
            else
                assert_int_equal(lm_lmz_pread(z, 0, p->offset, room, 2 << 20, &(lm_err){ 0 }),
                                 LM_OK);
        }
        lm_free(room);
        lm_lmz_free(z);
        z = NULL;
        if (walked)
            break;
        b.data[at + 9] ^= 1; /* now its record, too; and the record of the tensor; and no index */
        b.data[find_record(&b, 'P', "second", 0) + 20] ^= 1;
        b.len -= 30;
        store(in_dir("hit.lmz"), &b);
        e = (lm_err){ 0 };
        if (lm_lmz_salvage(in_dir("hit.lmz"), NULL, &z, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_int_equal(lm_lmz_parts(z), 4);
        assert_string_equal(lm_lmz_part_at(z, 2)->tensor, "second"); /* from the header */
    }
    lm_buf_fini(&b);
    drop(&c);
}

/* ---- Invalid .safetensors, and data that cannot be compressed ---- */

static void test_odd_headers(void **state)
{
    content c = { 0 };
    lm_buf b = { 0 };
    uint8_t noise[300];
    (void)state;

    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (uint8_t)mix(i);
    add(&c, "empty.safetensors", "", 0);
    add(&c, "short.safetensors", "abc", 3);
    add(&c, "lies.safetensors", "\xff\xff\xff\xff\xff\xff\xff\xff....", 12);
    add(&c, "long.safetensors", "\x40\0\0\0\0\0\0\0{\"a\":", 13);
    add(&c, "no.safetensors", "\x05\0\0\0\0\0\0\0{\"a\":more", 17);
    add(&c, "none.safetensors", "\x02\0\0\0\0\0\0\0{}", 10);
    add(&c, "noise.safetensors", noise, sizeof noise);
    pack(&c, NULL, 0, &b);
    store(in_dir("odd.lmz"), &b);
    lm_lmz *z = open_whole(in_dir("odd.lmz"), NULL);
    check_random(z, &c);
    lm_lmz_free(z);
    check_stream(&b, NULL, &c, 1, 5);
    lm_buf_fini(&b);
    drop(&c);
}

static void test_growth(void **state)
{
    static const size_t bytes = 24 << 20;
    content c = { 0 };
    lm_buf b = { 0 };
    uint64_t *noise = NULL;
    lm_err e = { 0 };
    (void)state;

    assert_int_equal(lm_alloc_n(&noise, bytes / 8, 8, "test", &e), LM_OK);
    for (size_t i = 0; i < bytes / 8; i++)
        noise[i] = mix(i + 77);
    add(&c, "noise.bin", noise, bytes);
    lm_free(noise);
    pack(&c, NULL, 0, &b);
    assert_true(b.len <= bytes + bytes / 1000);
    assert_true(b.len <= bytes + bytes / 10000);
    lm_buf_fini(&b);
    drop(&c);
}

/* A file of small tensors, many or few: as one part it hardly grows, however random they are; where
 * their numbers gain more than the records take, they are parts. */
static void test_small_tensors(void **state)
{
    enum { MANY = 2000 };
    static const struct {
        const char *dtype;
        int64_t rows;
        size_t n;
        bool parts;
    } cases[] = { { "U8", 4, MANY, false },     { "U8", 700, MANY, false },
                  { "I8", 9000, MANY, false },  { "F32", 1, MANY, false },
                  { "BF16", 300, MANY, false }, { "BF16", 4000, MANY, true },
                  { "F32", 2000, MANY, true },  { "U8", 300000, 70, true },
                  { "I8", 40000, 20, false },   { "U8", 300000, 3, true } };
    static char names[MANY][48];
    static tensor t[MANY];
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        size_t n = cases[k].n;
        content c = { 0 };
        lm_buf out = { 0 };
        lm_lmz *z;
        for (size_t i = 0; i < n; i++) {
            snprintf(names[i], sizeof names[i], "model.layers.%zu.mlp.scale", i);
            t[i] = (tensor){ names[i], cases[k].dtype, cases[k].rows, -1 };
        }
        add_tensors(&c, "model.safetensors", t, n, 5);
        pack(&c, NULL, 1 << 20, &out);
        assert_true(out.len <= c.m[0].bytes + c.m[0].bytes / 1000);
        store(in_dir("small.lmz"), &out);
        z = open_whole(in_dir("small.lmz"), NULL);
        check_random(z, &c);
        assert_int_equal(lm_lmz_parts(z), cases[k].parts ? n + 1 : 1);
        lm_lmz_free(z);
        check_stream(&out, NULL, &c, 100000, 70000);
        lm_buf_fini(&out);
        drop(&c);
    }
}

/* How tensor i of n is filled: with numbers as weights are, or with noise, which gains nothing. */
typedef enum { NOISE, WEIGHTS, NOISE_LAST, NOISE_FIRST, IN_TURN, ONE_IN_TEN, MIXES } mixture;

static bool is_noise(mixture m, size_t i, size_t n)
{
    return m == NOISE || (m == NOISE_LAST && i >= n * 2 / 5) ||
           (m == NOISE_FIRST && i < n * 2 / 5) || (m == IN_TURN && i % 2) ||
           (m == ONE_IN_TEN && i % 10);
}

/* `total` bytes of BF16 tensors of `bytes` each; the middle one has 1.5 MiB if `with_long`, and
 * empty ones and a few integers stand between them. */
static void add_mixture(content *c, mixture m, size_t bytes, size_t total, bool with_long)
{
    enum { MOST_TENSORS = 20000 };
    static char names[MOST_TENSORS][48];
    static tensor t[MOST_TENSORS];
    size_t n = total / bytes;

    assert_true(n <= MOST_TENSORS);
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "model.layers.%zu.mlp.scale", i);
        t[i] = (tensor){ names[i], "BF16", (int64_t)bytes / 2, -1 };
        if (i % 97 == 96)
            t[i] = (tensor){ names[i], i % 2 ? "F32" : "I8", i % 2 ? 0 : 5, -1 };
    }
    if (with_long)
        t[n / 2] = (tensor){ names[n / 2], "BF16", 3 << 18, -1 };
    add_tensors(c, "model.safetensors", t, n, 5);
    member *file = &c->m[c->n - 1];
    uint64_t head;
    memcpy(&head, file->data, 8);
    uint8_t *at = file->data + 8 + head;
    for (size_t i = 0; i < n; i++) {
        size_t size = (size_t)t[i].rows * (t[i].dtype[0] == 'B' ? 2 : t[i].dtype[0] == 'F' ? 4 : 1);
        for (size_t k = 0; k + 8 <= size && is_noise(m, i, n); k += 8) {
            uint64_t r = mix((uint64_t)(at - file->data) + k);
            memcpy(at + k, &r, 8);
        }
        at += size;
    }
    assert_true(at == file->data + file->bytes);
}

/* However small and random the tensors are, and however they are mixed with others: the file grows
 * by a thousandth at most, and compressible tensors are compressed. */
static void test_mixtures(void **state)
{
    static const struct {
        int level;
        size_t bytes;
        bool with_long;
    } cases[] = { { 1, 128, false },  { 3, 128, true },    { 10, 512, true },   { 1, 2048, true },
                  { 3, 2048, false }, { 10, 2048, false }, { 1, 16384, false }, { 3, 16384, true },
                  { 3, 65536, true }, { 10, 65536, true } };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        for (mixture m = 0; m < MIXES; m++) {
            content c = { 0 };
            lm_buf out = { 0 };
            lm_lmz_opts o = { .level = cases[k].level };
            add_mixture(&c, m, cases[k].bytes, cases[k].bytes < 1000 ? 1 << 20 : 5 << 19,
                        cases[k].with_long);
            pack(&c, &o, 100003, &out);
            if (out.len > c.m[0].bytes + c.m[0].bytes / 1000 + 600)
                fail_msg("level %d, tensors of %zu bytes, mixture %d: %zu bytes become %zu",
                         o.level, cases[k].bytes, (int)m, c.m[0].bytes, out.len);
            if (cases[k].bytes >= 2048 && m != NOISE && m != NOISE_FIRST) {
                size_t percent = m == WEIGHTS ? 80 : m == ONE_IN_TEN ? 99 : 96;
                if (out.len >= c.m[0].bytes / 100 * percent)
                    fail_msg("level %d, tensors of %zu bytes, mixture %d: %zu bytes become %zu",
                             o.level, cases[k].bytes, (int)m, c.m[0].bytes, out.len);
            }
            check_stream(&out, NULL, &c, 100000, 70000);
            store(in_dir("mixture.lmz"), &out);
            lm_lmz *z = open_whole(in_dir("mixture.lmz"), NULL);
            lm_err e = { 0 };
            assert_int_equal(lm_lmz_verify(z, NULL, NULL, NULL, &e), LM_OK);
            lm_lmz_free(z);
            lm_buf_fini(&out);
            drop(&c);
        }
    }
}

/* Normal numbers of 2 KiB, which is about the least that pays. */
static void test_small_normal(void **state)
{
    content c = { 0 };
    lm_buf out = { 0 };
    (void)state;
    enum { MANY = 2000 };
    static char names[MANY][48];
    static tensor t[MANY];
    uint64_t head;
    for (size_t i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "model.layers.%zu.mlp.scale", i);
        t[i] = (tensor){ names[i], "BF16", 1024, -1 };
    }
    add_tensors(&c, "model.safetensors", t, MANY, 5);
    memcpy(&head, c.m[0].data, 8);
    for (size_t i = 8 + head; i < c.m[0].bytes; i += 2) {
        uint64_t v = 0;
        lm_set(LM_DTYPE_BF16, &v, 0, 0.02 * lm_rng_normal(lm_rng_make(1, "small", 0), i % 65536));
        memcpy(c.m[0].data + i, &v, 2);
    }
    pack(&c, NULL, 0, &out);
    assert_true(out.len * 100 < 72 * c.m[0].bytes);
    lm_buf_fini(&out);
    drop(&c);
}

/* Windows depend on the bytes alone: neither pieces nor threads change a bit. */
static void test_windows(void **state)
{
    static const size_t pieces[] = { 1, 4099, 1 << 20 };
    (void)state;
    for (mixture m = 0; m < MIXES; m++) {
        content c = { 0 };
        lm_buf one = { 0 }, other = { 0 };
        lm_par *par = NULL;
        lm_err e = { 0 };
        add_mixture(&c, m, 1024, 3 << 19, m % 2);
        add(&c, "notes.txt", "of no use", 9);
        pack(&c, NULL, 0, &one);
        assert_int_equal(lm_par_new(&par, 3, &e), LM_OK);
        for (size_t k = 0; k < 3; k++) {
            pack(&c, &(lm_lmz_opts){ .par = k ? par : NULL }, pieces[k], &other);
            assert_int_equal(other.len, one.len);
            assert_memory_equal(other.data, one.data, one.len);
        }
        lm_par_free(par);
        lm_buf_fini(&one);
        lm_buf_fini(&other);
        drop(&c);
    }
}

/* Without its index and with a record lost, a tensor between joined ones gets its name back. */
static void test_joined_salvage(void **state)
{
    content c = { 0 };
    lm_buf b = { 0 };
    lm_lmz *z = NULL;
    lm_err e = { 0 };
    size_t named = 0, joined = 0, hit = 0;
    (void)state;
    add_mixture(&c, ONE_IN_TEN, 2048, 1 << 20, false);
    pack(&c, NULL, 0, &b);
    b.data[find_record(&b, 'P', "model.layers.40.mlp.scale", 0) + 20] ^= 1;
    b.len -= 30;
    store(in_dir("joined.lmz"), &b);
    if (lm_lmz_salvage(in_dir("joined.lmz"), NULL, &z, &e))
        fail_msg("%s: %s", e.where, e.what);
    for (size_t i = 0; i < lm_lmz_parts(z); i++) {
        const lm_lmz_part *p = lm_lmz_part_at(z, i);
        uint8_t room[1 << 16];
        named += p->tensor != NULL;
        joined += !p->tensor && p->offset;
        hit += p->tensor && !strcmp(p->tensor, "model.layers.40.mlp.scale") && p->raw == 2048;
        size_t n = p->raw < sizeof room ? p->raw : sizeof room;
        assert_int_equal(lm_lmz_pread(z, 0, p->offset, room, n, &e), LM_OK);
        assert_memory_equal(room, c.m[0].data + p->offset, n);
    }
    assert_true(named > 40 && joined > 40 && hit == 1);
    lm_lmz_free(z);
    lm_buf_fini(&b);
    drop(&c);
}

static void test_names(void **state)
{
    lm_lmz_writer *w = NULL;
    lm_buf b = { 0 };
    lm_err e = { 0 };
    static const char *const bad[] = { "", "a/b", "..", "same", "a\nb" };
    (void)state;

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        e = (lm_err){ 0 };
        assert_int_equal(lm_lmz_create_on(to_buf, &b, "test.lmz", NULL, &w, &e), LM_OK);
        assert_int_equal(lm_lmz_begin(w, "same", 0, &e), LM_OK);
        assert_int_equal(lm_lmz_begin(w, bad[i], 0, &e), LM_EUSAGE);
        e = (lm_err){ 0 };
        assert_int_equal(lm_lmz_close(w, &e), LM_EUSAGE); /* it is not forgotten */
        assert_true(e.what[0]);
    }
    e = (lm_err){ 0 };
    assert_int_equal(lm_lmz_create_on(to_buf, &b, "test.lmz", NULL, &w, &e), LM_OK);
    assert_int_equal(lm_lmz_begin(w, "x", 3, &e), LM_OK);
    assert_int_equal(lm_lmz_write(w, "1234", 4, &e), LM_EBUG);
    e = (lm_err){ 0 };
    assert_int_equal(lm_lmz_write(w, "12", 2, &e), LM_OK);
    assert_int_equal(lm_lmz_close(w, &e), LM_EBUG);
    lm_buf_fini(&b);
}

static lm_code full_disk(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    size_t *left = ctx;
    (void)data;
    if (bytes > *left)
        return lm_fail(e, LM_EIO, "disk", NULL, "full");
    *left -= bytes;
    return LM_OK;
}

static void test_full_disk(void **state)
{
    content c;
    (void)state;

    make_model(&c, 1);
    for (size_t room = 10; room < 6000000; room = room * 5 + 1) {
        lm_lmz_writer *w = NULL;
        size_t left = room;
        lm_err e = { 0 };
        lm_code rc = lm_lmz_create_on(full_disk, &left, "test.lmz", NULL, &w, &e);
        for (size_t i = 0; i < c.n && !rc; i++) {
            rc = lm_lmz_begin(w, c.m[i].name, c.m[i].bytes, &e);
            rc = rc ? rc : lm_lmz_write(w, c.m[i].data, c.m[i].bytes, &e);
        }
        if (w && rc)
            lm_lmz_drop(w);
        else if (w)
            rc = lm_lmz_close(w, &e);
        assert_int_equal(rc, LM_EIO);
        assert_string_equal(e.where, "disk");
    }
    drop(&c);
}

/* ---- Differences ---- */

static void store_folder(const char *name, const content *c)
{
    assert_int_equal(mkdir(in_dir(name), 0777), 0);
    for (size_t i = 0; i < c->n; i++) {
        char path[300];
        snprintf(path, sizeof path, "%s/%s/%s", dir, name, c->m[i].name);
        store(path, &(lm_buf){ .data = (char *)c->m[i].data, .len = c->m[i].bytes });
    }
}

/* The same model after some training: every sixteenth element is changed by one. */
static void move_on(content *c, uint64_t seed)
{
    member *m = &c->m[2];
    uint64_t head;

    memcpy(&head, m->data, 8);
    for (size_t i = 8 + head; i < m->bytes; i += 2)
        if (mix(seed + i) % 16 == 0)
            m->data[i] ^= 1;
}

static void pack_delta(const content *c, const char *base, const char *path)
{
    lm_bundle *b = NULL;
    lm_buf out = { 0 };
    lm_err e = { 0 };

    if (lm_bundle_open(base, NULL, &b, &e))
        fail_msg("%s: %s", e.where, e.what);
    pack(c, &(lm_lmz_opts){ .base = b, .base_name = lm_path_base(base) }, 0, &out);
    store(path, &out);
    lm_bundle_close(b);
    lm_buf_fini(&out);
}

static void check_delta(const char *path, const content *c)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    char base[200];
    lm_lmz *z = open_whole(path, NULL);

    check_random(z, c);
    assert_true(lm_lmz_about(z)->delta);
    snprintf(base, sizeof base, "%s/%s", dir, lm_lmz_about(z)->base_name);
    assert_int_equal(lm_lmz_verify(z, NULL, NULL, NULL, &e), LM_OK);
    lm_lmz_free(z);
    assert_int_equal(lm_file_read(path, 1 << 28, &b, &e), LM_OK);
    check_stream(&b, &(lm_bundle_opts){ .base = base }, c, 0, 99999);
    lm_buf_fini(&b);
}

static void test_delta(void **state)
{
    content c;
    lm_buf whole = { 0 };
    struct stat delta;
    lm_lmz *z = NULL;
    lm_err e = { 0 };
    (void)state;

    make_model(&c, 5);
    store_folder("step0", &c);
    move_on(&c, 1);
    pack_delta(&c, in_dir("step0"), in_dir("step1.lmz"));
    pack(&c, NULL, 0, &whole);
    assert_int_equal(stat(in_dir("step1.lmz"), &delta), 0);
    assert_true((size_t)delta.st_size < whole.len / 2);
    check_delta(in_dir("step1.lmz"), &c);

    /* the same base as a tar would be, renamed; another one; none; none needed for a table */
    assert_int_equal(rename(in_dir("step0"), in_dir("moved")), 0);
    assert_int_equal(lm_lmz_open(in_dir("step1.lmz"), NULL, &z, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "step0"));
    e = (lm_err){ 0 };
    z = open_whole(in_dir("step1.lmz"), &(lm_bundle_opts){ .base = in_dir("moved") });
    check_random(z, &c);
    lm_lmz_free(z);
    assert_int_equal(lm_lmz_open_index(in_dir("step1.lmz"), NULL, &z, &e), LM_OK);
    assert_int_equal(lm_lmz_about(z)->chain, 1);
    assert_string_equal(lm_lmz_about(z)->base_name, "step0");
    uint8_t room[9];
    assert_int_equal(lm_lmz_pread(z, 3, 0, room, 9, &e), LM_OK); /* a plain file */
    assert_int_equal(lm_lmz_pread(z, 2, c.m[2].bytes / 2, room, 9, &e), LM_EUSAGE);
    lm_lmz_free(z);
    e = (lm_err){ 0 };
    store_folder("step0", &c);
    assert_int_equal(lm_lmz_open(in_dir("step1.lmz"), NULL, &z, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "content"));
    lm_buf_fini(&whole);
    drop(&c);
}

/* A file that is moved together with its base can be opened; from elsewhere, with an explicit
 * path. */
static void test_moved(void **state)
{
    static const struct {
        const char *base, *lmz, *name;
    } where[] = { { "run/step1", "run/step2.lmz", "step1" },
                  { "run/step1", "run/deep/step2.lmz", "../step1" },
                  { "run/step1", "run/step1/step2.lmz", "." },
                  { "run/step1", "other/step2.lmz", "../run/step1" },
                  { "run/step1", "ru/step2.lmz", "../run/step1" },
                  { "run/step1", "run/step/step2.lmz", "../step1" } };
    char base[160], path[160];
    content c;
    lm_err e = { 0 };
    (void)state;

    make_small(&c);
    for (size_t i = 0; i < sizeof where / sizeof *where; i++) {
        lm_bundle_out *out = NULL;
        lm_lmz *z = NULL;

        assert_int_equal(mkdir(in_dir("here"), 0777), 0);
        for (const char *const *p =
                 (const char *const[]){ "run", "run/deep", "run/step", "other", "ru", NULL };
             *p; p++) {
            snprintf(path, sizeof path, "%s/here/%s", dir, *p);
            assert_int_equal(mkdir(path, 0777), 0);
        }
        snprintf(base, sizeof base, "here/%s", where[i].base);
        store_folder(base, &c);
        snprintf(base, sizeof base, "%s/here/%s", dir, where[i].base);
        snprintf(path, sizeof path, "%s/here/%s", dir, where[i].lmz);
        if (lm_bundle_create(path, false, &(lm_bundle_opts){ .base = base }, &out, &e))
            fail_msg("%s: %s", e.where, e.what);
        for (size_t k = 0; k < c.n; k++)
            assert_int_equal(lm_bundle_put(out, c.m[k].name, c.m[k].data, c.m[k].bytes, &e), LM_OK);
        assert_int_equal(lm_bundle_commit(out, &e), LM_OK);
        assert_int_equal(rename(in_dir("here"), in_dir("there")), 0);
        snprintf(path, sizeof path, "%s/there/%s", dir, where[i].lmz);
        assert_int_equal(lm_lmz_open_index(path, NULL, &z, &e), LM_OK);
        assert_string_equal(lm_lmz_about(z)->base_name, where[i].name);
        lm_lmz_free(z);
        if (strcmp(where[i].name, ".")) { /* that base has one file more by now */
            z = open_whole(path, NULL);
            check_random(z, &c);
            lm_lmz_free(z);
        }
        assert_int_equal(lm_rm_rf(in_dir("there"), &e), LM_OK);
    }
    drop(&c);
}

/* Deltas of deltas up to the limit; and a file that names itself as its base. */
static void test_chain(void **state)
{
    content c;
    lm_bundle *b = NULL;
    lm_lmz_writer *w = NULL;
    lm_buf out = { 0 };
    lm_err e = { 0 };
    (void)state;

    make_model(&c, 6);
    pack(&c, NULL, 0, &out);
    store(in_dir("c0.lmz"), &out);
    for (int i = 1; i <= LM_LMZ_MAX_CHAIN; i++) {
        char path[100], base[100];
        snprintf(path, sizeof path, "%s/c%d.lmz", dir, i);
        snprintf(base, sizeof base, "%s/c%d.lmz", dir, i - 1);
        move_on(&c, (uint64_t)i);
        pack_delta(&c, base, path);
    }
    check_delta(in_dir("c8.lmz"), &c);
    assert_int_equal(lm_bundle_open(in_dir("c8.lmz"), NULL, &b, &e), LM_OK);
    assert_int_equal(lm_lmz_create_on(to_buf, &out, "test.lmz",
                                      &(lm_lmz_opts){ .base = b, .base_name = "c8.lmz" }, &w, &e),
                     LM_EUSAGE);
    assert_non_null(strstr(e.todo, "rebase"));
    lm_bundle_close(b);
    e = (lm_err){ 0 };
    assert_int_equal(lm_file_read(in_dir("c1.lmz"), 1 << 28, &out, &e), LM_OK);
    store(in_dir("c0.lmz"), &out);
    lm_lmz *z = NULL;
    assert_int_equal(lm_lmz_open(in_dir("c1.lmz"), NULL, &z, &e), LM_EFORMAT);
    assert_int_equal(lm_lmz_open(in_dir("c2.lmz"), NULL, &z, &(lm_err){ 0 }), LM_EFORMAT);
    lm_buf_fini(&out);
    drop(&c);
}

static void test_digest(void **state)
{
    content c;
    lm_buf out = { 0 };
    lm_err e = { 0 };
    lm_bundle *b = NULL;
    lm_bundle_out *tar = NULL;
    char folder[33], lmz[33], of_tar[33];
    (void)state;

    make_model(&c, 9);
    store_folder("digest", &c);
    pack(&c, NULL, 0, &out);
    store(in_dir("digest.lmz"), &out);
    assert_int_equal(lm_bundle_open(in_dir("digest"), NULL, &b, &e), LM_OK);
    assert_int_equal(lm_bundle_digest(b, folder, NULL, &e), LM_OK);
    lm_bundle_close(b);
    lm_lmz *z = open_whole(in_dir("digest.lmz"), NULL);
    memcpy(lmz, lm_lmz_about(z)->digest, 33);
    lm_lmz_free(z);
    assert_string_equal(folder, lmz);
    for (int packed = 0; packed < 2; packed++) { /* by its map; forward, in another order */
        const char *path = in_dir(packed ? "digest.tar.zst" : "digest.tar");
        assert_int_equal(lm_bundle_create(path, false, NULL, &tar, &e), LM_OK);
        for (size_t i = 0; i < c.n; i++) {
            const member *m = &c.m[packed ? c.n - 1 - i : i];
            assert_int_equal(lm_bundle_put(tar, m->name, m->data, m->bytes, &e), LM_OK);
        }
        assert_int_equal(lm_bundle_commit(tar, &e), LM_OK);
        assert_int_equal(lm_bundle_open(path, NULL, &b, &e), LM_OK);
        assert_int_equal(lm_bundle_random(b), !packed);
        assert_int_equal(lm_bundle_digest(b, of_tar, NULL, &e), LM_OK);
        assert_string_equal(folder, of_tar);
        lm_bundle_close(b);
    }
    c.m[0].data[c.m[0].bytes - 1] ^= 1;
    store_folder("changed", &c);
    assert_int_equal(lm_bundle_open(in_dir("changed"), NULL, &b, &e), LM_OK);
    assert_int_equal(lm_bundle_digest(b, of_tar, NULL, &e), LM_OK);
    assert_string_not_equal(folder, of_tar);
    lm_bundle_close(b);
    lm_buf_fini(&out);
    drop(&c);
}

/* ---- More than 32 bits ---- */

typedef struct {
    uint64_t bytes; /* written so far */
    int fd;
} sink_file;

static lm_code to_file(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    sink_file *s = ctx;
    s->bytes += bytes;
    return lm_write_all(s->fd, data, bytes, "test.lmz", e);
}

/* A file of 5 GiB, all zero but for marks behind 4 GiB. */
static void test_large(void **state)
{
    enum { PIECE = 16 << 20 };
    const uint64_t bytes = UINT64_C(5) << 30, mark = (UINT64_C(4) << 30) + 12345;
    const char *path = in_dir("large.lmz");
    sink_file s = { 0, open(path, O_CREAT | O_RDWR | O_TRUNC, 0666) };
    lm_lmz_writer *w = NULL;
    uint8_t *zeros = NULL, room[64];
    lm_err e = { 0 };
    lm_par *par = NULL;
    (void)state;

    assert_int_equal(lm_alloc_n(&zeros, PIECE, 1, "test", &e), LM_OK);
    assert_int_equal(lm_par_new(&par, 2, &e), LM_OK);
    assert_int_equal(
        lm_lmz_create_on(to_file, &s, "test.lmz", &(lm_lmz_opts){ .par = par }, &w, &e), LM_OK);
    assert_int_equal(lm_lmz_begin(w, "large.bin", bytes, &e), LM_OK);
    for (uint64_t at = 0; at < bytes; at += PIECE) {
        if (at == mark / PIECE * PIECE)
            memcpy(zeros + mark % PIECE, "here it is", 10);
        assert_int_equal(lm_lmz_write(w, zeros, PIECE, &e), LM_OK);
        memset(zeros + mark % PIECE, 0, 10);
    }
    assert_int_equal(lm_lmz_close(w, &e), LM_OK);
    assert_true(s.bytes < bytes / 10000);
    close(s.fd);
    lm_lmz *z = open_whole(path, &(lm_bundle_opts){ .par = par });
    assert_true(lm_lmz_about(z)->raw == bytes && lm_lmz_about(z)->coded == s.bytes);
    assert_true(lm_lmz_part_at(z, 0)->chunks == bytes / LM_LMZ_CHUNK);
    assert_int_equal(lm_lmz_pread(z, 0, mark - 20, room, 40, &e), LM_OK);
    assert_memory_equal(room + 20, "here it is", 10);
    assert_int_equal(room[19] | room[30], 0);
    assert_int_equal(lm_lmz_pread(z, 0, mark - (UINT64_C(4) << 30), room, 40, &e), LM_OK);
    assert_int_equal(room[0], 0); /* not what is 4 GiB further on */
    assert_int_equal(lm_lmz_pread(z, 0, bytes - 1, room, 1, &e), LM_OK);
    assert_int_equal(lm_lmz_pread(z, 0, bytes - 1, room, 2, &e), LM_EUSAGE);
    lm_lmz_free(z);
    lm_par_free(par);
    lm_free(zeros);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),     cmocka_unit_test(test_every_bit),
        cmocka_unit_test(test_truncated),      cmocka_unit_test(test_chunk_lost),
        cmocka_unit_test(test_odd_headers),    cmocka_unit_test(test_growth),
        cmocka_unit_test(test_small_tensors),  cmocka_unit_test(test_mixtures),
        cmocka_unit_test(test_small_normal),   cmocka_unit_test(test_windows),
        cmocka_unit_test(test_joined_salvage), cmocka_unit_test(test_names),
        cmocka_unit_test(test_full_disk),      cmocka_unit_test(test_delta),
        cmocka_unit_test(test_digest),         cmocka_unit_test(test_moved),
        cmocka_unit_test(test_chain),          cmocka_unit_test(test_large),
    };
    return cmocka_run_group_tests(tests, make_dir, drop_dir);
}
