/* .lmz: what goes in comes out by every way of reading; every damage is found, named, and what is
 * whole beside it still comes out; differences to a base, and bases that are not the right one. */
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
        if (lm_dtype_is_float(d))
            lm_set(d, p + i, 0, ((double)(r >> 40) / (1 << 24) - 0.5) / (double)(1 + r % 7));
        else
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
                           .ndim = t[i].rows < 0 ? 0 : t[i].cols < 0 ? 1 : 2,
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
    { "bool", "BOOL", 7, 3 },          { "f4", "F4", 10, -1 },
    { "f6", "F6_E2M3", 8, -1 },        { "u8", "U8", 1001, -1 },
    { "i8", "I8", 33, 31 },            { "e5m2", "F8_E5M2", 3000, -1 },
    { "e4m3", "F8_E4M3", 127, 129 },   { "e8m0", "F8_E8M0", 65, -1 },
    { "i16", "I16", 501, -1 },         { "u16", "U16", 77, 7 },
    { "f16", "F16", 255, 257 },        { "empty", "F32", 0, 5 },
    { "bf16", "BF16", 1100, 1000 },    { "i32", "I32", 999, -1 },
    { "u32", "U32", 1, -1 },           { "scalar", "F32", -1, -1 },
    { "f32", "F32", 700, 801 },        { "c64", "C64", 11, 13 },
    { "f64", "F64", 300, 500 },        { "i64", "I64", 44, -1 },
    { "u64", "U64", 5, 3 },            { "none at the end", "BF16", 0, -1 },
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
    };
    return cmocka_run_group_tests(tests, make_dir, drop_dir);
}
