/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_data.c -- files of calibrations: round trips, files that are refused, and the methods that read them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/rng.h"
#include "format/safetensors.h"
#include "kv/spec.h"
#include "kvquant_case.h"
#include "numeric/kv_impl.h"

enum { LAYERS = 3, HEADS = 2, D = 32, C = HEADS * D, N = 200 };

static char dir[64], path[128];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/lm-test-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof path, "%s/c.safetensors", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(dir);
}

/* ---- round trip ---- */

static float ends[2][C], tables[2][8], scales[2][HEADS], errors[2] = { 0, 0.25F };

static lm_kv_data *example(void)
{
    lm_kv_data *d;
    lm_err e = { 0 };
    assert_int_equal(lm_kv_data_new(LAYERS, path, &d, &e), LM_OK);
    for (int i = 0; i < C; i++) {
        ends[0][i] = -1 - (float)i / 7;
        ends[1][i] = 2 + (float)i / 9;
    }
    for (int i = 0; i < 8; i++) {
        tables[0][i] = (float)(i - 3) / 4;
        tables[1][i] = (float)(i * i - 20) / 30;
    }
    for (int i = 0; i < HEADS; i++) {
        scales[0][i] = 0.5F + (float)i;
        scales[1][i] = 3 - (float)i;
    }
    d->outliers = 0.01;
    d->weights = "0123456789abcdef0123456789abcdef";
    d->config = "fedcba9876543210fedcba9876543210";
    d->candidates = "int8;int4:group=16";
    for (int l = 0; l < LAYERS - 1; l++) { /* the last has keys only */
        d->side[2 * l + 1] = (lm_kv_numbers){
            .table = tables[1], .bits = 2, .scale = scales[1], .scales = l ? HEADS : 1
        };
    }
    for (int l = 0; l < LAYERS; l++)
        d->side[2 * l] = (lm_kv_numbers){ .lower = ends[0],
                                          .upper = ends[1],
                                          .kv_heads = HEADS,
                                          .head_dim = D,
                                          .table = tables[0],
                                          .bits = 3,
                                          .scale = scales[0],
                                          .scales = l ? HEADS : 1,
                                          .errors = errors,
                                          .candidates = 2 };
    return d;
}

static lm_kv_data *write_and_read(lm_kv_data *d)
{
    lm_kv_data *out;
    lm_err e = { 0 };
    assert_int_equal(lm_kv_data_write(d, path, true, &e), LM_OK);
    if (lm_kv_data_read(path, &out, &e))
        fail_msg("%s: %s", e.where, e.what);
    lm_kv_data_free(d);
    return out;
}

static void round_trip(void **state)
{
    (void)state;
    lm_kv_data *d = write_and_read(example());
    lm_err e = { 0 };
    assert_int_equal(d->layers, LAYERS);
    assert_true(d->outliers == 0.01);
    assert_string_equal(d->weights, "0123456789abcdef0123456789abcdef");
    assert_string_equal(d->config, "fedcba9876543210fedcba9876543210");
    assert_int_equal(lm_kv_data_check(d, d->weights, d->config, &e), LM_OK);
    assert_int_equal(lm_kv_data_check(d, d->weights, d->weights, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "config.json"));
    e = (lm_err){ 0 };
    assert_int_equal(lm_kv_data_check(d, d->config, d->config, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "weights"));
    e = (lm_err){ 0 };
    assert_string_equal(d->candidates, "int8;int4:group=16");
    assert_string_equal(d->path, path);
    for (int l = 0; l < LAYERS; l++) {
        const lm_kv_numbers *k = &d->side[2 * l], *v = k + 1;
        assert_int_equal(k->kv_heads, HEADS);
        assert_int_equal(k->head_dim, D);
        assert_memory_equal(k->lower, ends[0], sizeof ends[0]);
        assert_memory_equal(k->upper, ends[1], sizeof ends[1]);
        assert_int_equal(k->bits, 3);
        assert_memory_equal(k->table, tables[0], 8 * sizeof(float));
        assert_int_equal(k->scales, l ? HEADS : 1);
        assert_int_equal(k->candidates, 2);
        assert_memory_equal(k->errors, errors, sizeof errors);
        assert_null(v->lower);
        assert_null(v->errors);
        assert_int_equal(!v->table, l == 2);
        assert_int_equal(v->scales, l == 2 ? 0 : l ? HEADS : 1);
        if (v->table) {
            assert_int_equal(v->bits, 2);
            assert_memory_equal(v->table, tables[1], 4 * sizeof(float));
            assert_memory_equal(v->scale, scales[1], (size_t)v->scales * sizeof(float));
        }
    }
    lm_kv_data_free(d);
}

/* ---- files that are refused ---- */

/* Every bit of a file counts. */
static void every_flipped_bit_is_refused(void **state)
{
    static char bytes[1 << 16];
    lm_kv_data *d = example(), *out;
    lm_err e = { 0 };
    (void)state;
    d->layers = 1;
    assert_int_equal(lm_kv_data_write(d, path, true, &e), LM_OK);
    lm_kv_data_free(d);
    FILE *f = fopen(path, "r+b");
    size_t n = fread(bytes, 1, sizeof bytes, f);
    assert_in_range(n, 100, sizeof bytes - 1);
    for (size_t at = 0; at < n; at++)
        for (int bit = 0; bit < 8; bit++) {
            bytes[at] ^= (char)(1 << bit);
            assert_int_equal(fseek(f, (long)at, SEEK_SET), 0);
            assert_int_equal(fwrite(&bytes[at], 1, 1, f), 1);
            fflush(f);
            e = (lm_err){ 0 };
            if (!lm_kv_data_read(path, &out, &e))
                fail_msg("bit %d of byte %zu of %zu is taken", bit, at, n);
            assert_true(e.code == LM_EFORMAT || e.code == LM_ELIMIT);
            bytes[at] ^= (char)(1 << bit);
            assert_int_equal(fseek(f, (long)at, SEEK_SET), 0);
            assert_int_equal(fwrite(&bytes[at], 1, 1, f), 1);
        }
    fclose(f);
    assert_int_equal(lm_kv_data_read(path, &out, &e), LM_OK);
    lm_kv_data_free(out);
}

static void write_tensor(const char *format, const char *outliers, const char *name, lm_dtype dtype,
                         int ndim, const int64_t *dim, const float *x)
{
    lm_st_plan *p;
    lm_st_writer *w;
    lm_err e = { 0 };
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    lm_st_plan_meta(p, "format", format, &e);
    lm_st_plan_meta(p, "version", "1", &e);
    lm_st_plan_meta(p, "outliers", outliers, &e);
    lm_st_plan_add(p, name, dtype, ndim, dim, &e);
    assert_int_equal(lm_st_create(path, true, p, &w, &e), LM_OK);
    if (lm_st_next(w)) /* not of an empty tensor */
        assert_int_equal(lm_st_write_as(w, LM_DTYPE_F32, x, lm_st_next(w)->count, &e), LM_OK);
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
}

static void bad_files(void **state)
{
    static const float up[6] = { 1, 2, 3, 4, 5, 6 }, flat[4] = { 1, 2, 2, 3 },
                       bad[4] = { 1, NAN, 2, 3 }, low[2] = { 1, 0 }, minus[2] = { 1, -1 };
    static const struct {
        const char *format, *outliers, *name;
        lm_dtype dtype;
        int ndim;
        int64_t dim[2];
        const float *x;
        const char *what;
    } cases[] = {
        { "kv-cache",
          "0",
          "layers.0.k.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "it is not a calibration of version 1" },
        { "kv-calibration",
          "1",
          "layers.0.k.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "outliers are a share from 0 to 1, not '1'" },
        { "kv-calibration",
          "nan",
          "layers.0.k.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "outliers are a share from 0 to 1, not 'nan'" },
        { "kv-calibration",
          "0",
          "layers.0.q.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "'layers.0.q.table' of F32 is no part of a calibration" },
        { "kv-calibration",
          "0",
          "layers.00.k.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "'layers.00.k.table' of F32 is no part of a calibration" },
        { "kv-calibration",
          "0",
          "layers.100000.k.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "'layers.100000.k.table' of F32 is no part of a calibration" },
        { "kv-calibration",
          "0",
          "layers.99999999999999999999.k.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "'layers.99999999999999999999.k.table' of F32 is no part of a calibration" },
        { "kv-calibration",
          "0",
          "layers.0.k.tables",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "'layers.0.k.tables' of F32 is no part of a calibration" },
        { "kv-calibration",
          "0",
          "layers.0.v.lower",
          LM_DTYPE_F32,
          2,
          { 2, 2 },
          up,
          "'layers.0.v.lower' of F32 is no part of a calibration" },
        { "kv-calibration",
          "0",
          "layers.0.k.table",
          LM_DTYPE_F16,
          1,
          { 4 },
          up,
          "'layers.0.k.table' of F16 is no part of a calibration" },
        { "kv-calibration",
          "0",
          "layers.0.k.table",
          LM_DTYPE_F32,
          1,
          { 3 },
          up,
          "'layers.0.k.table': a table has 2, 4, 8, 16 or 32 levels" },
        { "kv-calibration",
          "0",
          "layers.0.k.table",
          LM_DTYPE_F32,
          2,
          { 2, 2 },
          up,
          "'layers.0.k.table': the shape is not a list" },
        { "kv-calibration",
          "0",
          "layers.0.k.table",
          LM_DTYPE_F32,
          1,
          { 0 },
          up,
          "'layers.0.k.table': the shape is not a list" },
        { "kv-calibration",
          "0",
          "layers.0.v.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          flat,
          "'layers.0.v.table': the levels do not rise" },
        { "kv-calibration",
          "0",
          "layers.0.v.table",
          LM_DTYPE_F32,
          1,
          { 4 },
          bad,
          "'layers.0.v.table': a number is not finite" },
        { "kv-calibration",
          "0",
          "layers.0.v.scale",
          LM_DTYPE_F32,
          1,
          { 2 },
          low,
          "'layers.0.v.scale': a scale is not above 0" },
        { "kv-calibration",
          "0",
          "layers.0.v.outliers",
          LM_DTYPE_F32,
          1,
          { 2 },
          minus,
          "'layers.0.v.outliers': a share is not between 0 and 1" },
        { "kv-calibration",
          "0",
          "layers.0.v.errors",
          LM_DTYPE_F32,
          1,
          { 2 },
          minus,
          "'layers.0.v.errors': an error is negative" },
        { "kv-calibration",
          "0",
          "layers.0.k.upper",
          LM_DTYPE_F32,
          1,
          { 4 },
          up,
          "'layers.0.k.upper': the shape is not [heads, numbers of a head]" },
        { "kv-calibration",
          "0",
          "layers.0.k.upper",
          LM_DTYPE_F32,
          2,
          { 2, 2 },
          up,
          "layer 0 has one end of its ranges" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_err e = { 0 };
        lm_kv_data *d;
        write_tensor(cases[i].format, cases[i].outliers, cases[i].name, cases[i].dtype,
                     cases[i].ndim, cases[i].dim, cases[i].x);
        assert_int_equal(lm_kv_data_read(path, &d, &e), LM_EFORMAT);
        assert_string_equal(e.what, cases[i].what);
        assert_true(*e.todo);
        assert_string_equal(e.where, path);
        assert_null(d);
    }
    /* Ranges that end before they begin. */
    for (int k = 0; k < 2; k++) {
        lm_err e = { 0 };
        lm_kv_data *d = example(), *back;
        float least[C];
        memcpy(least, ends[0], sizeof least);
        least[5] = 100;
        d->side[2].lower = least;
        if (k)
            d->side[2].table = NULL;
        assert_int_equal(lm_kv_data_write(d, path, true, &e), LM_OK);
        assert_int_equal(lm_kv_data_read(path, &back, &e), LM_EFORMAT);
        assert_string_equal(e.what, "layer 1: the range of channel 5 ends before it begins");
        lm_kv_data_free(d);
    }
}

/* A file with flipped bits, or cut: an error that names it, or numbers that hold what the header promises. */
static void damaged_files(void **state)
{
    lm_rng r = lm_rng_make(31, "kv data", 0);
    lm_kv_data *d = example();
    lm_err e = { 0 };
    static char all[1 << 16], copy[1 << 16];
    (void)state;
    assert_int_equal(lm_kv_data_write(d, path, true, &e), LM_OK);
    lm_kv_data_free(d);
    FILE *f = fopen(path, "rb");
    size_t n = fread(all, 1, sizeof all, f);
    fclose(f);
    assert_true(n > 1000 && n < sizeof all);
    for (uint64_t trial = 0; trial < 500; trial++) {
        size_t size = trial % 10 ? n : lm_rng_below(r, 10 * trial + 1, n);
        memcpy(copy, all, n);
        for (uint64_t k = 0; k < 1 + trial % 3; k++) {
            uint64_t bit = lm_rng_below(r, 10 * trial + 2 + k, 8 * (trial % 2 ? n : 1200));
            copy[bit / 8] = (char)(copy[bit / 8] ^ 1 << bit % 8);
        }
        f = fopen(path, "wb");
        assert_int_equal(fwrite(copy, 1, size, f), size);
        fclose(f);
        e = (lm_err){ 0 };
        if (lm_kv_data_read(path, &d, &e)) {
            assert_non_null(strstr(e.where, path));
            continue;
        }
        lm_kv_data_free(d);
        assert_true(size == n && !memcmp(copy, all, n)); /* a bit was flipped twice */
    }
}

/* ---- methods ---- */

static lm_code bind_text(const char *text, const lm_kv_data *const *data, lm_kv_plan **out,
                         lm_err *e)
{
    lm_kv_site site[LAYERS];
    lm_kv_spec *s;
    for (int l = 0; l < LAYERS; l++)
        site[l] = (lm_kv_site){ .layer = l,
                                .layers = LAYERS,
                                .kv_heads = HEADS,
                                .head_dim = D,
                                .max_positions = 512,
                                .act = LM_DTYPE_BF16,
                                .rope = true };
    assert_int_equal(lm_kv_spec_parse(text, &s, e), LM_OK);
    lm_code rc = lm_kv_spec_bind(s, site, LAYERS, data, out, e);
    lm_kv_spec_free(s);
    return rc;
}

static void names_of_files(void **state)
{
    static const struct {
        const char *text, *canonical, *refused;
    } cases[] = {
        { "kvquant:file=a b.st,sinks=5", "kvquant:sinks=5,file=a b.st", NULL },
        { "kvquant:sinks=1,file=x+y=z:1", "kvquant:file=x+y=z:1", NULL },
        { "k=kvquant:file=x,v=fp8:file=y,scale=head",
          "k=kvquant:file=x,v=fp8_e4m3:scale=head,file=y", NULL },
        { "k=kvquant:file=x,v=kvquant:file=x", "kvquant:file=x", NULL },
        { "k=kvquant:file=x,v=kvquant:file=y", "k=kvquant:file=x,v=kvquant:file=y", NULL },
        { "layers.0=kvquant:file=x;kvquant:file=y", "layers.0=kvquant:file=x;kvquant:file=y",
          NULL },
        { "h2o+kvquant:file=a+b", "h2o+kvquant:file=a+b", NULL },
        { "kvquant:file=", NULL, "file of kvquant is a path of 1 to 4095 characters" },
        { "kvquant:file=a,file=a", NULL, "file of kvquant is given twice" },
        { "kvquant:files=a", NULL, "kvquant has no 'files'" },
        { "int8:file=a", NULL, "int8 has no 'file'" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_err e = { 0 };
        lm_kv_spec *s;
        lm_code rc = lm_kv_spec_parse(cases[i].text, &s, &e);
        assert_int_equal(rc, cases[i].refused ? LM_EUSAGE : LM_OK);
        assert_string_equal(e.what, cases[i].refused ? cases[i].refused : "");
        if (!rc) {
            lm_kv_spec *again;
            assert_string_equal(lm_kv_spec_text(s), cases[i].canonical);
            assert_int_equal(lm_kv_spec_parse(cases[i].canonical, &again, &e), LM_OK);
            assert_string_equal(lm_kv_spec_text(again), cases[i].canonical);
            lm_kv_spec_free(again);
        }
        lm_kv_spec_free(s);
    }
    lm_err e = { 0 };
    lm_kv_spec *s;
    assert_int_equal(lm_kv_spec_parse("layers.0=kvquant:file=x;layers.1=k=kvquant:file=y;"
                                      "kvquant:file=x",
                                      &s, &e),
                     LM_OK);
    assert_string_equal(lm_kv_spec_file(s, 0), "x");
    assert_string_equal(lm_kv_spec_file(s, 1), "y");
    assert_null(lm_kv_spec_file(s, 2));
    lm_kv_spec_free(s);
    /* Paths that are too long, and files that are too many. */
    char text[8192];
    snprintf(text, sizeof text, "kvquant:file=%04100d", 0);
    assert_int_equal(lm_kv_spec_parse(text, &s, &e), LM_EUSAGE);
    size_t n = 0;
    for (int i = 0; i < 17; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "layers.%d=kvquant:file=%d;", i, i);
    e = (lm_err){ 0 };
    assert_int_equal(lm_kv_spec_parse(text, &s, &e), LM_EUSAGE);
    assert_string_equal(e.what, "more than 16 files");
}

static void forms(void **state)
{
    (void)state;
    lm_kv_data *d = write_and_read(example());
    const lm_kv_data *data[2] = { d, d };
    lm_err e = { 0 };
    lm_kv_plan *p;
    assert_int_equal(bind_text("kvquant:file=x,last=1", data, &p, &e), LM_OK);
    const lm_kv_side *k = &p->side[2], *v = k + 1;
    assert_true(k->pre_rope && !v->pre_rope && !k->rotate);
    assert_int_equal(k->sinks, 1);
    assert_int_equal(k->format->bits, 3);
    assert_ptr_equal(k->format->lower, d->side[2].lower);
    assert_int_equal(v->format->bits, 2);
    assert_int_equal(k->format->outliers, 31); /* 1.5 * 0.01 * 64 * 32, rounded up */
    assert_int_equal(v->format->outliers, 96); /* 1.5 * 2 / 64 * 64 * 32 */
    assert_null(p->side[4].format);
    lm_kv_plan_free(p);
    /* Of values the head with most outliers counts. */
    d->side[3].outside = (const float[]){ 0.01f, 0.25f };
    d->side[3].heads = HEADS;
    d = write_and_read(d);
    const lm_kv_data *const heads[2] = { d, d };
    assert_int_equal(d->side[3].heads, HEADS);
    assert_null(d->side[1].outside);
    assert_int_equal(bind_text("kvquant:file=x,last=1", heads, &p, &e), LM_OK);
    assert_int_equal(p->side[3].format->outliers, 768); /* 1.5 * 0.25 * 64 * 32 */
    assert_int_equal(p->side[1].format->outliers, 96);
    lm_kv_plan_free(p);
    d->side[3].outside = NULL;
    d = write_and_read(d);
    data[0] = data[1] = d;
    /* Longer pages have room for more. */
    assert_int_equal(
        bind_text("k=int4:axis=channel,group=128,v=kvquant:file=x,last=1", data, &p, &e), LM_OK);
    assert_int_equal(p->page, 128);
    assert_int_equal(p->side[1].format->outliers, 192);
    lm_kv_plan_free(p);

    assert_int_equal(
        bind_text("layers.0=fp8:scale=layer,file=x;layers.1=k=fp8:scale=head,file=x", data, &p, &e),
        LM_OK);
    assert_true(p->side[0].format->constant == 0.5 && !p->side[0].format->head);
    assert_true(p->side[1].format->constant == 3);
    assert_ptr_equal(p->side[2].format->head, d->side[2].scale);
    lm_kv_plan_free(p);

    static const struct {
        const char *text, *what;
        bool none;
    } refused[] = {
        { "kvquant", "a calibration is needed", true },
        { "kvquant:file=x", "a calibration is needed", true },
        { "fp8:scale=head", "scales of layers and heads need a calibration", true },
        { "fp8:file=x", "no calibration is read", false },
        { "layers.0=fp8:scale=head,file=x", "%s has 1 scale for this layer, not 2", false },
        { "kvquant:file=x", "%s has no levels for this layer", false },
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char what[256];
        e = (lm_err){ 0 };
        assert_int_equal(bind_text(refused[i].text, refused[i].none ? NULL : data, &p, &e),
                         LM_EUSAGE);
        const char *at = strstr(refused[i].what, "%s");
        snprintf(what, sizeof what, "%s%s", at ? path : "", at ? at + 2 : refused[i].what);
        assert_string_equal(e.what, what);
    }
    /* Another model's calibration. */
    e = (lm_err){ 0 };
    d->side[0].head_dim = D / 2;
    assert_int_equal(bind_text("k=kvquant:file=x", data, &p, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "has ranges of 2 heads of 16 numbers, the layer has 2 of 32"));
    lm_kv_data_free(d);
}

/* A calibration of numbers, through its file, decodes these numbers. */
static void calibrate_and_decode(void **state)
{
    static float x[N * C], lower[C], upper[C], y[64 * D];
    static uint64_t page[4096];
    float table[32], vtable[32];
    lm_rng r = lm_rng_make(8, "kv data", 0);
    const lm_kvquant_opts o = { .bits = 4, .outliers = 0.02 };
    lm_err e = { 0 };
    lm_kv_plan *p;
    (void)state;
    for (int64_t i = 0; i < N * C; i++)
        x[i] = (float)(lm_rng_normal(r, (uint64_t)i) * (double)(1 + i % C % 5) + (double)(i % C));
    assert_int_equal(kvquant_keys(&o, x, NULL, N, C, lower, upper, table, &e), LM_OK);
    assert_int_equal(kvquant_values(&o, x, NULL, N, C, vtable, &e), LM_OK);
    lm_kv_data *d = example();
    d->outliers = o.outliers;
    for (int l = 0; l < LAYERS; l++) {
        d->side[2 * l] = (lm_kv_numbers){ .lower = lower,
                                          .upper = upper,
                                          .kv_heads = HEADS,
                                          .head_dim = D,
                                          .table = table,
                                          .bits = 4 };
        d->side[2 * l + 1] = (lm_kv_numbers){ .table = vtable, .bits = 4 };
    }
    d = write_and_read(d);
    const lm_kv_data *const data[1] = { d };
    assert_int_equal(bind_text("kvquant:file=x", data, &p, &e), LM_OK);
    for (int k = 0; k < 2; k++)
        for (int h = 0; h < HEADS; h++) {
            float range[2 * 64], work[C];
            double error = 0, all = 0;
            const lm_kv_format *f = p->side[k].format;
            for (int t = 0; t < 64; t++)
                lm_kv_token_range(d->outliers, x + t * C, C, range + 2 * t, work);
            memset(page, 0, sizeof page);
            assert_true(lm_kv_page_bytes(f, 64, D) <= sizeof page);
            lm_kv_encode(f, 64, D, h, x + h * D, C, 0, 64, k ? range : NULL, page);
            lm_kv_decode(f, 64, D, h, page, 0, 64, y, D);
            for (int i = 0; i < 64 * D; i++) {
                double want = (double)x[i / D * C + h * D + i % D];
                error += ((double)y[i] - want) * ((double)y[i] - want);
                all += (want - i % D - h * D) * (want - i % D - h * D);
            }
            assert_true(error <
                        (k ? 0.5 : 0.02) * all); /* values share a range over all channels */
        }
    lm_kv_plan_free(p);
    lm_kv_data_free(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(every_flipped_bit_is_refused),
        cmocka_unit_test(bad_files),
        cmocka_unit_test(damaged_files),
        cmocka_unit_test(names_of_files),
        cmocka_unit_test(forms),
        cmocka_unit_test(calibrate_and_decode),
    };

    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
