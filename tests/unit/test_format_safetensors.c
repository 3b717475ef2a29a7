/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors: round trips, the reference library's order and bytes, streams, and everything that
 * must fail. */
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
#include "format/safetensors.h"

static char dir[64], path[128];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/lm-test-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/a.safetensors", dir);
    return 0;
}

static int drop_dir(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_rm_rf(dir, &e);
}

static void write_bytes(const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void add(lm_st_plan *p, const char *name, lm_dtype d, int64_t a, int64_t b)
{
    lm_err e = { 0 };
    int64_t dim[2] = { a, b };
    assert_int_equal(lm_st_plan_add(p, name, d, b < 0 ? (a < 0 ? 0 : 1) : 2, dim, &e), LM_OK);
}

/* What safetensors 0.8 writes for these tensors, byte for byte. */
static void test_reference_bytes(void **state)
{
    static const char expect[] =
        "{\"e\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[0,0]},"
        "\"a\\\"\\\\/\\u0007\xc3\xa9\xe2\x80\xa8\\n\\b\\f\\u001f<\":{\"dtype\":\"I8\",\"shape\":[],"
        "\"data_offsets\":[0,1]}}";
    lm_st_plan *p = NULL;
    lm_buf out = { 0 };
    lm_err e = { 0 };
    (void)state;

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    add(p, "a\"\\/\a\xc3\xa9\xe2\x80\xa8\n\b\f\x1f<", LM_DTYPE_I8, -1, -1);
    add(p, "e", LM_DTYPE_F32, 0, 3);
    lm_st_plan_sort(p);
    assert_int_equal(lm_st_plan_header(p, &out, &e), LM_OK);
    assert_int_equal(out.len % 8, 0);
    assert_int_equal((uint8_t)out.data[0], out.len - 8);
    assert_memory_equal(out.data + 8, expect, sizeof expect - 1);
    for (size_t i = 8 + sizeof expect - 1; i < out.len; i++)
        assert_int_equal(out.data[i], ' ');
    lm_buf_fini(&out);
    lm_st_plan_free(p);
}

/* The data starts at a multiple of 8 whatever the names. */
static void test_padding(void **state)
{
    (void)state;
    for (int i = 1; i <= 9; i++) {
        lm_st_plan *p = NULL;
        lm_buf out = { 0 };
        lm_err e = { 0 };
        assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
        add(p, &"abcdefghi"[9 - i], LM_DTYPE_F32, 1, -1);
        assert_int_equal(lm_st_plan_header(p, &out, &e), LM_OK);
        assert_int_equal(out.len % 8, 0);
        lm_buf_fini(&out);
        lm_st_plan_free(p);
    }
}

static void test_sort(void **state)
{
    static const char *const order[] = { "u", "i", "d", "a", "b", "h", "m", "z" };
    lm_st_plan *p = NULL;
    lm_err e = { 0 };
    (void)state;

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    add(p, "z", LM_DTYPE_BOOL, 3, -1);
    add(p, "m", LM_DTYPE_F16, 1, -1);
    add(p, "h", LM_DTYPE_BF16, 1, -1);
    add(p, "b", LM_DTYPE_F32, 1, -1);
    add(p, "a", LM_DTYPE_F32, 2, -1);
    add(p, "d", LM_DTYPE_F64, 1, -1);
    add(p, "i", LM_DTYPE_I64, 1, -1);
    add(p, "u", LM_DTYPE_U64, 1, -1);
    lm_st_plan_sort(p);
    uint64_t at = 0;
    for (size_t i = 0; i < 8; i++) {
        assert_string_equal(lm_st_plan_at(p, i)->name, order[i]);
        assert_int_equal(lm_st_plan_at(p, i)->offset, at);
        at += lm_st_plan_at(p, i)->bytes;
    }
    assert_int_equal(lm_st_plan_data_bytes(p), at);
    lm_st_plan_free(p);
}

static void test_plan_refuses(void **state)
{
    lm_st_plan *p = NULL;
    lm_err e = { 0 };
    int64_t big[] = { INT64_C(1) << 40, INT64_C(1) << 40 }, neg[] = { -1 };
    (void)state;

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    add(p, "a", LM_DTYPE_F32, 1, -1);
    assert_int_equal(lm_st_plan_add(p, "a", LM_DTYPE_F32, 0, NULL, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "twice"));
    e = (lm_err){ 0 };
    assert_int_equal(lm_st_plan_add(p, "", LM_DTYPE_F32, 0, NULL, &e), LM_EUSAGE);
    assert_int_equal(lm_st_plan_add(p, "__metadata__", LM_DTYPE_F32, 0, NULL, &e), LM_EUSAGE);
    assert_int_equal(lm_st_plan_add(p, "\xff", LM_DTYPE_F32, 0, NULL, &e), LM_EUSAGE);
    assert_int_equal(lm_st_plan_add(p, "b", LM_DTYPE_F32, 2, big, &e), LM_EUSAGE);
    assert_int_equal(lm_st_plan_add(p, "b", LM_DTYPE_F32, 1, neg, &e), LM_EUSAGE);
    assert_int_equal(lm_st_plan_add(p, "b", LM_DTYPE_NONE, 0, NULL, &e), LM_EUSAGE);
    assert_int_equal(lm_st_plan_count(p), 1);
    lm_st_plan_free(p);
}

/* Three tensors with known values and metadata at `path`. */
/* Bits of an element of every type of the published list. */
static void test_sizes_of_types(void **state)
{
    static const struct {
        const char *name;
        uint64_t bits;
    } type[] = { { "BOOL", 8 },    { "F4", 4 },          { "F6_E2M3", 6 },     { "F6_E3M2", 6 },
                 { "U8", 8 },      { "I8", 8 },          { "F8_E5M2", 8 },     { "F8_E4M3", 8 },
                 { "F8_E8M0", 8 }, { "F8_E4M3FNUZ", 8 }, { "F8_E5M2FNUZ", 8 }, { "I16", 16 },
                 { "U16", 16 },    { "F16", 16 },        { "BF16", 16 },       { "I32", 32 },
                 { "U32", 32 },    { "F32", 32 },        { "C64", 64 },        { "F64", 64 },
                 { "I64", 64 },    { "U64", 64 } };
    lm_st_plan *p = NULL;
    lm_err e = { 0 };
    (void)state;

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    for (size_t i = 0; i < sizeof type / sizeof *type; i++) {
        lm_st_tensor t = { .name = type[i].name, .dtype_name = type[i].name, .ndim = 2 };
        t.dim[0] = 4;
        t.dim[1] = 6;
        assert_int_equal(lm_st_plan_add_like(p, &t, &e), LM_OK);
        assert_int_equal(lm_st_plan_at(p, i)->bytes, 24 * type[i].bits / 8);
        assert_int_equal(lm_st_plan_at(p, i)->dtype, lm_dtype_parse(type[i].name));
        t.name = "odd";
        t.dim[0] = t.dim[1] = 3;
        if (type[i].bits < 8)
            assert_int_equal(lm_st_plan_add_like(p, &t, &e), LM_EUSAGE);
        e = (lm_err){ 0 };
    }
    lm_st_plan_free(p);
}

static void write_sample(void)
{
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_err e = { 0 };
    float x[6] = { 1, -2, 0.5f, 3, 65504, 1e-3f };
    int64_t ids[2] = { 7, -9 };

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_meta(p, "format", "np", &e), LM_OK);
    assert_int_equal(lm_st_plan_meta(p, "k", "v", &e), LM_OK);
    assert_int_equal(lm_st_plan_meta(p, "format", "pt", &e), LM_OK);
    add(p, "w", LM_DTYPE_F32, 2, 3);
    add(p, "empty", LM_DTYPE_F32, 0, -1);
    add(p, "h", LM_DTYPE_BF16, 6, -1);
    add(p, "ids", LM_DTYPE_I64, 2, -1);
    lm_st_plan_sort(p);
    assert_int_equal(lm_st_create(path, false, p, &w, &e), LM_OK);
    assert_string_equal(lm_st_next(w)->name, "ids");
    assert_int_equal(lm_st_write(w, ids, 5, &e), LM_OK); /* odd chunks */
    assert_int_equal(lm_st_write(w, (char *)ids + 5, 11, &e), LM_OK);
    assert_string_equal(lm_st_next(w)->name, "w"); /* the empty one needs nothing */
    assert_int_equal(lm_st_write_as(w, LM_DTYPE_F32, x, 6, &e), LM_OK);
    assert_string_equal(lm_st_next(w)->name, "h");
    assert_int_equal(lm_st_write_as(w, LM_DTYPE_F32, x, 4, &e), LM_OK);
    assert_int_equal(lm_st_write_as(w, LM_DTYPE_F32, x + 4, 2, &e), LM_OK);
    assert_null(lm_st_next(w));
    assert_false(lm_path_exists(path));
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
}

static void test_round_trip(void **state)
{
    lm_st *s = NULL;
    lm_err e = { 0 };
    const char *k, *v;
    double d[6];
    float f[2];
    (void)state;

    write_sample();
    assert_int_equal(lm_st_open(path, &s, &e), LM_OK);
    assert_int_equal(lm_st_count(s), 4);
    assert_string_equal(lm_st_meta(s, "format"), "pt");
    assert_null(lm_st_meta(s, "none"));
    assert_true(lm_st_meta_at(s, 1, &k, &v));
    assert_string_equal(k, "k");
    assert_false(lm_st_meta_at(s, 2, &k, &v));
    assert_null(lm_st_find(s, "no such"));
    const lm_st_tensor *t = lm_st_find(s, "h");
    assert_non_null(t);
    assert_int_equal(t->dtype, LM_DTYPE_BF16);
    assert_int_equal(t->count, 6);
    assert_int_equal((uintptr_t)lm_st_data(s, t) % 2, 0);
    assert_int_equal(lm_st_load(s, t, LM_DTYPE_F64, d, &e), LM_OK);
    assert_true(d[0] == 1 && d[1] == -2 && d[2] == 0.5 && d[3] == 3 && d[4] == 65536);
    t = lm_st_find(s, "w");
    assert_int_equal(t->ndim, 2);
    assert_int_equal(t->dim[1], 3);
    assert_true(((const float *)lm_st_data(s, t))[1] == -2);
    assert_int_equal(lm_st_read(s, t, 4, f, 8, &e), LM_OK);
    assert_true(f[0] == -2 && f[1] == 0.5f);
    assert_int_equal(lm_st_read(s, t, 20, f, 8, &e), LM_EUSAGE);
    lm_st_close(s);
}

static void test_writer_guards(void **state)
{
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_err e = { 0 };
    float x[3] = { 0 };
    (void)state;

    write_sample();
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    add(p, "w", LM_DTYPE_F32, 2, -1);
    assert_int_equal(lm_st_create(path, false, p, &w, &e), LM_EUSAGE); /* exists */
    e = (lm_err){ 0 };
    assert_int_equal(lm_st_create(path, true, p, &w, &e), LM_OK);
    assert_int_equal(lm_st_write(w, x, 12, &e), LM_EBUG);
    e = (lm_err){ 0 };
    assert_int_equal(lm_st_write_as(w, LM_DTYPE_F32, x, 3, &e), LM_EBUG);
    e = (lm_err){ 0 };
    assert_int_equal(lm_st_write(w, x, 4, &e), LM_OK);
    assert_int_equal(lm_st_commit(w, &e), LM_EBUG); /* half of it is missing */
    assert_non_null(strstr(e.what, "'w'"));
    lm_st_plan_free(p);
    e = (lm_err){ 0 };
    lm_st *s = NULL;
    assert_int_equal(lm_st_open(path, &s, &e), LM_OK); /* the old file stands */
    assert_int_equal(lm_st_count(s), 4);
    lm_st_close(s);
    char **names = NULL;
    size_t n = 0;
    assert_int_equal(lm_dir_list(dir, &names, &n, &e), LM_OK);
    assert_int_equal(n, 1); /* no temporary is left */
    lm_names_free(names, n);
}

typedef struct {
    const uint8_t *p;
    size_t left, step;
} memory;

static lm_code read_memory(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    memory *m = ctx;
    size_t n = cap < m->step ? cap : m->step;
    (void)e;
    n = n < m->left ? n : m->left;
    memcpy(dst, m->p, n);
    m->p += n;
    m->left -= n;
    *got = n;
    return LM_OK;
}

static void test_stream(void **state)
{
    lm_map map;
    lm_err e = { 0 };
    (void)state;

    write_sample();
    assert_int_equal(lm_map_open(path, &map, &e), LM_OK);
    for (size_t step = 1; step < 40; step += 6) {
        memory m = { map.data, map.size, step };
        lm_st_stream *s = NULL;
        const lm_st_tensor *t;
        int64_t ids[2];
        assert_int_equal(lm_st_stream_open(read_memory, &m, "pipe", &s, &e), LM_OK);
        assert_int_equal(lm_st_stream_count(s), 4);
        assert_int_equal(lm_st_stream_next(s, &t, &e), LM_OK);
        assert_string_equal(t->name, "ids");
        assert_int_equal(lm_st_stream_read(s, ids, 16, &e), LM_OK);
        assert_int_equal(ids[1], -9);
        for (int i = 0; i < 3; i++) { /* skipped over */
            assert_int_equal(lm_st_stream_next(s, &t, &e), LM_OK);
            assert_non_null(t);
        }
        assert_string_equal(t->name, "h");
        assert_int_equal(lm_st_stream_read(s, ids, 13, &e), LM_EUSAGE);
        e = (lm_err){ 0 };
        assert_int_equal(lm_st_stream_next(s, &t, &e), LM_OK);
        assert_null(t);
        lm_st_stream_close(s);
    }
    /* Every truncation is noticed, and so is a byte too many. */
    uint8_t *copy = NULL;
    assert_int_equal(lm_alloc_n(&copy, map.size + 1, 1, "test", &e), LM_OK);
    memcpy(copy, map.data, map.size);
    for (size_t len = 0; len <= map.size + 1; len++) {
        memory m = { copy, len, 64 };
        lm_st_stream *s = NULL;
        const lm_st_tensor *t = NULL;
        lm_code rc = lm_st_stream_open(read_memory, &m, "pipe", &s, &e);
        do {
            if (!rc)
                rc = lm_st_stream_next(s, &t, &e);
        } while (!rc && t);
        assert_int_equal(rc, len == map.size ? LM_OK : LM_EFORMAT);
        lm_st_stream_close(s);
        e = (lm_err){ 0 };
    }
    lm_free(copy);
    lm_map_close(&map);
}

static void test_truncated(void **state)
{
    lm_buf all = { 0 };
    lm_err e = { 0 };
    (void)state;

    write_sample();
    assert_int_equal(lm_file_read(path, 1 << 20, &all, &e), LM_OK);
    for (size_t len = 0; len < all.len; len++) {
        lm_st *s = NULL;
        write_bytes(all.data, len);
        assert_int_equal(lm_st_open(path, &s, &e), LM_EFORMAT);
        assert_null(s);
        e = (lm_err){ 0 };
    }
    lm_buf_fini(&all);
}

/* tests/golden/bad: each file names what its message must contain. */
static void test_bad_files(void **state)
{
    char line[512], file[512];
    FILE *list = fopen("tests/golden/bad/safetensors.list", "r");
    int n = 0;
    (void)state;

    if (!list)
        skip(); /* not run from the root of the project */
    while (fgets(line, sizeof line, list)) {
        char *tab = strchr(line, '\t');
        lm_st *s = NULL;
        lm_err e = { 0 };
        assert_non_null(tab);
        *tab = '\0';
        tab[strcspn(tab + 1, "\n") + 1] = '\0';
        snprintf(file, sizeof file, "tests/golden/bad/%.200s", line);
        lm_code rc = lm_st_open(file, &s, &e);
        if ((rc != LM_EFORMAT && rc != LM_ELIMIT) || !strstr(e.what, tab + 1))
            fail_msg("%s: code %d, '%s' should contain '%s'", line, rc, e.what, tab + 1);
        assert_null(s);
        n++;
    }
    fclose(list);
    assert_true(n > 30);
}

/* A tensor beyond 4 GiB: the file is sparse, nothing is really written. */
static void test_over_4_gib(void **state)
{
    lm_st_plan *p = NULL;
    lm_buf header = { 0 };
    lm_err e = { 0 };
    lm_st *s = NULL;
    uint8_t last = 42, seen = 0;
    (void)state;

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    add(p, "big", LM_DTYPE_F32, 5 << 10, 1 << 18); /* 5 GiB */
    add(p, "z", LM_DTYPE_U8, 1, -1);
    assert_int_equal(lm_st_plan_header(p, &header, &e), LM_OK);
    write_bytes(header.data, header.len);
    off_t end = (off_t)(header.len + lm_st_plan_data_bytes(p));
    if (truncate(path, end))
        skip();
    FILE *f = fopen(path, "r+b");
    fseeko(f, end - 1, SEEK_SET);
    fwrite(&last, 1, 1, f);
    fclose(f);
    assert_int_equal(lm_st_open(path, &s, &e), LM_OK);
    assert_int_equal(lm_st_find(s, "big")->bytes, UINT64_C(5) << 30);
    assert_int_equal(lm_st_read(s, lm_st_find(s, "z"), 0, &seen, 1, &e), LM_OK);
    assert_int_equal(seen, 42);
    assert_int_equal(*(const uint8_t *)lm_st_data(s, lm_st_find(s, "z")), 42);
    lm_st_close(s);
    lm_st_plan_free(p);
    lm_buf_fini(&header);
}

/* Files of other writers need no alignment, and a header without tensors is a file. */
static void test_odd_files(void **state)
{
    lm_st *s = NULL;
    lm_err e = { 0 };
    (void)state;

    write_bytes("\2\0\0\0\0\0\0\0{}", 10);
    assert_int_equal(lm_st_open(path, &s, &e), LM_OK);
    assert_int_equal(lm_st_count(s), 0);
    assert_null(lm_st_find(s, "a"));
    lm_st_close(s);

    char buf[80];
    int n =
        snprintf(buf + 8, 70, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}} ");
    memset(buf, 0, 8);
    n += n % 2 == 0; /* an odd length: snprintf's NUL becomes the blank below */
    buf[8 + n - 1] = ' ';
    buf[0] = (char)n;
    float x = 2.5f, y = 0;
    memcpy(buf + 8 + n, &x, 4);
    write_bytes(buf, (size_t)n + 12);
    assert_int_equal(lm_st_open(path, &s, &e), LM_OK);
    assert_int_not_equal((uintptr_t)lm_st_data(s, lm_st_find(s, "a")) % 4, 0);
    assert_int_equal(lm_st_load(s, lm_st_find(s, "a"), LM_DTYPE_F32, &y, &e), LM_OK);
    assert_true(y == 2.5f);
    lm_st_close(s);
}

/* A header of many tensors is read without memory for each of them. */
static void test_many(void **state)
{
    enum { MANY = 20000 };
    lm_st_plan *p = NULL;
    lm_buf out = { 0 };
    lm_st *s = NULL;
    lm_err e = { 0 };
    char name[40];
    (void)state;

    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_meta(p, "lmutils.history", "[{\"tool\":\"a\"}]", &e), LM_OK);
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "experts.%d.weight", i);
        add(p, name, LM_DTYPE_BF16, 0, 3);
    }
    assert_int_equal(lm_st_plan_header(p, &out, &e), LM_OK);
    write_bytes(out.data, out.len);
    uint64_t before = lm_alloc_count();
    assert_int_equal(lm_st_open(path, &s, &e), LM_OK);
    assert_true(lm_alloc_count() - before < MANY / 10);
    assert_int_equal(lm_st_count(s), MANY);
    assert_string_equal(lm_st_meta(s, "lmutils.history"), "[{\"tool\":\"a\"}]");
    assert_int_equal(lm_st_find(s, "experts.19999.weight")->dim[1], 3);
    lm_st_close(s);
    lm_buf_fini(&out);
    lm_st_plan_free(p);
}

/* All valid forms of JSON are read, in one pass or as a tree, with the same result. */
static void test_spellings(void **state)
{
    static const char *const spelled[] = {
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        " {\n\"a\" :\t{ \"shape\" : [ 1 ] , \"data_offsets\":[ 0 , 4 ],\r\"dtype\":\"F32\"} } \n",
        "{\"\\u0061\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"more\":{}}}",
        "{\"__metadata__\":{\"k\":\"}\\\"{\"},\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_"
        "offsets\":[0,4]}}",
    };
    (void)state;
    for (size_t i = 0; i < sizeof spelled / sizeof *spelled; i++) {
        char buf[160] = { 0 };
        lm_st *s = NULL;
        lm_err e = { 0 };
        size_t n = strlen(spelled[i]);
        buf[0] = (char)n;
        memcpy(buf + 8, spelled[i], n);
        write_bytes(buf, n + 12);
        assert_int_equal(lm_st_open(path, &s, &e), LM_OK);
        assert_int_equal(lm_st_count(s), 1);
        assert_int_equal(lm_st_find(s, "a")->bytes, 4);
        assert_int_equal(lm_st_find(s, "a")->ndim, 1);
        if (i == 4)
            assert_string_equal(lm_st_meta(s, "k"), "}\"{");
        lm_st_close(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_many, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_spellings, make_dir, drop_dir),
        cmocka_unit_test(test_reference_bytes),
        cmocka_unit_test(test_padding),
        cmocka_unit_test(test_sort),
        cmocka_unit_test(test_plan_refuses),
        cmocka_unit_test(test_sizes_of_types),
        cmocka_unit_test_setup_teardown(test_round_trip, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_writer_guards, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_stream, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_truncated, make_dir, drop_dir),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test_setup_teardown(test_over_4_gib, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_odd_files, make_dir, drop_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
