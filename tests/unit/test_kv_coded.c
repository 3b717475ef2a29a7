/* SPDX-License-Identifier: Apache-2.0 */
/* Coded caches outside of a model: between plain rows, codes, the memory of kernels and kv-cache(5) nothing changes that
 * should not; every damage is refused. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kv/store.h"
#define KV_CASE_WIDTH 32
#include "tests/unit/kv_file_case.h"

/* Keys by ranges of channels with outliers, as a calibration of KVQuant gives them. */
static float lower[64], upper[64];

static lm_kv_format ranged = { .name = "ranged",
                               .bits = 3,
                               .axis = LM_KV_CHANNEL,
                               .levels = LM_KV_TABLE,
                               .zero = true,
                               .scale = LM_DTYPE_NONE,
                               .lower = lower,
                               .upper = upper,
                               .outliers = 1280,
                               .n_table = 8,
                               .table = { -1, -0.7f, -0.4f, -0.1f, 0.1f, 0.4f, 0.7f, 1 } };
static lm_kv_format spread = { .name = "spread",
                               .values = true,
                               .bits = 2,
                               .levels = LM_KV_TABLE,
                               .zero = true,
                               .scale = LM_DTYPE_F16,
                               .outliers = 1280,
                               .n_table = 4,
                               .table = { -1, -0.3f, 0.3f, 1 } };

static const char *const specs[] = {
    "int8",
    "int4",
    "int3:group=16,rotate=on",
    "int2:residual=40",
    "layers.1=int5;k=q8_0,v=iq4_nl",
    "fp8",
    "fp8_e5m2:scale=token",
    "kivi:bits=2,group=32,residual=64",
    "k4v3:first=0,last=0",
    "kvarn:first=0,last=0,group=64",
    "layers.1=int4;auto",
    "layers.1=auto;k=auto,v=q4_0",
    "ranged",
};
enum { SPECS = sizeof specs / sizeof *specs };

/* Sides of "ranged" for all layers. */
static lm_kv_side ranged_sides[PARTS];

static void bind(const char *text, lm_dtype act, lm_kv_plan **out)
{
    lm_kv_site site[LAYERS];
    lm_kv_spec *s;
    lm_err e = { 0 };
    for (int64_t i = 0; i < LAYERS; i++)
        site[i] = (lm_kv_site){ i, LAYERS, heads[i], width[i], 0, CONTEXT, act, true, 0 };
    if (lm_kv_spec_parse(*text == 'r' ? "auto" : text, &s, &e) ||
        lm_kv_spec_bind(s, site, LAYERS, NULL, out, &e))
        fail_msg("%s: %s: %s", text, e.where, e.what);
    lm_kv_spec_free(s);
    if (*text != 'r')
        return;
    for (int i = 0; i < 64; i++)
        lower[i] = -1.5f + (float)(i % 3), upper[i] = 2.5f + (float)(i % 4) / 3;
    for (int i = 0; i < PARTS; i++)
        ranged_sides[i] = (lm_kv_side){ .format = i % 2 ? &spread : &ranged,
                                        .sinks = 5,
                                        .outliers = i % 2 ? 0.05 : -1 };
    (*out)->side = ranged_sides;
    (*out)->text = "ranged";
}

static cache *coded(cache *plain, const char *text)
{
    plain->about.has_next = true; /* the token that follows is kept, too */
    plain->about.next = 47;
    lm_kv_plan *plan;
    cache *c;
    lm_err e = { 0 };
    bind(text, plain->about.act, &plan);
    if (lm_kv_image_convert(plain, plan, lm_cpu_detect(), NULL, &c, &e))
        fail_msg("%s: %s: %s", text, e.where, e.what);
    lm_kv_plan_free(plan);
    return c;
}

static cache *decoded(const cache *c)
{
    cache *out;
    lm_err e = { 0 };
    if (lm_kv_image_convert(c, NULL, lm_cpu_detect(), NULL, &out, &e))
        fail_msg("%s: %s", e.where, e.what);
    return out;
}

/* Through a file, and read again from it and from a stream. */
static void test_files(void **state)
{
    static const int64_t tokens[] = { 1, 70, 300 };
    (void)state;
    for (int i = 0; i < 3 * SPECS; i++) {
        cache *plain = make(i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32, tokens[i / SPECS], true);
        cache *c = coded(plain, specs[i % SPECS]);
        lm_buf b = write_cache(c, 0);
        for (int k = 0; k < 2; k++) {
            lm_kv_reading r = reading(LM_KV_FILE_BEST);
            cache *out;
            lm_kv_file *f;
            span s = { b.data, b.len };
            lm_err e = { 0 };
            put_file(b.data, b.len);
            lm_code rc =
                k ? lm_kv_file_open_on(read_span, &s, "m", &f, &e) : lm_kv_file_open(path, &f, &e);
            if (rc || lm_kv_image_read(f, &r, lm_cpu_detect(), NULL, &out, &e))
                fail_msg("%s: %s: %s", specs[i % SPECS], e.where, e.what);
            lm_kv_file_close(f);
            assert_true(same(c, out));
            assert_true(out->about.has_next && out->about.next == 47);
            for (int p = 0; p < PARTS && c->about.form; p++)
                assert_true(lm_kv_same_form(&c->about.form[p], &out->about.form[p], heads[p / 2],
                                            width[p / 2]));
            cache *x = decoded(c), *y = decoded(out);
            assert_true(same(x, y));
            lm_buf again = write_cache(out, 0);
            assert_int_equal(again.len, b.len);
            assert_memory_equal(again.data, b.data, b.len);
            lm_buf_fini(&again);
            drop(out), drop(x), drop(y);
        }
        lm_buf_fini(&b), drop(c), drop(plain);
    }
}

/* Encoded and decoded rows are those of the plain definition (store.h), which knows no pages of its own. */
static void test_numbers(void **state)
{
    static float x[300 * 64], y[300 * 64];
    (void)state;
    for (int i = 0; i < SPECS; i++) {
        cache *plain = make(LM_DTYPE_F32, 300, true), *c = coded(plain, specs[i]);
        cache *out = decoded(c);
        for (int64_t p = 0; p < PARTS; p++) {
            const lm_kv_shape s = lm_kv_about_shape(&c->about, p);
            const float *in = plain->content.part[p].data[LM_KV_PLAIN];
            const float *got = out->content.part[p].data[LM_KV_PLAIN];
            int64_t D = s.head_dim, K = s.kv_heads, C = K * D;
            double most = 0;
            lm_err e = { 0 };
            for (int64_t k = 0; k < 300 * C; k++)
                x[k % C + k / C * C] = in[(k % C / D * 300 + k / C) * D + k % D];
            assert_int_equal(lm_kv_store(s.form, s.form->format ? s.page : 64, K, D, x, 300, y, &e),
                             0);
            for (int64_t k = 0; k < 300 * C; k++)
                most = fmax(
                    most, fabs((double)y[k] - (double)got[(k % C / D * 300 + k / C) * D + k % D]));
            if (most > 1e-5)
                fail_msg("%s: part %d: differs by %g", specs[i], (int)p, most);
        }
        drop(plain), drop(c), drop(out);
    }
}

/* Conversion between two forms goes through plain rows; the same form keeps its codes. */
static void test_conversion(void **state)
{
    cache *plain = make(LM_DTYPE_BF16, 150, true), *a = coded(plain, "int4");
    (void)state;
    cache *same_form = coded(a, "int4"), *b = coded(a, "int2"), *x = decoded(a),
          *y = coded(x, "int2");
    assert_true(same(a, same_form));
    assert_true(same(b, y));
    assert_false(same_part(plain, x, 0));
    size_t n = 150 * 64;
    double four = lm_kv_rows_error(LM_DTYPE_BF16, plain->content.part[0].data[LM_KV_PLAIN],
                                   x->content.part[0].data[LM_KV_PLAIN], n);
    assert_true(four > 0.005 && four < 0.12);
    drop(plain), drop(a), drop(same_form), drop(b), drop(x), drop(y);
}

/* A change of any member of a form that determines its bits makes it another one; names do not. */
static void test_same_form(void **state)
{
    static float other[64], head[2] = { 1, 2 }, ahead[2] = { 1, 3 };
    const lm_kv_format table = ranged;
    lm_kv_format sym = { .name = "a", .bits = 4, .scale = LM_DTYPE_F16, .group = 32 };
    (void)state;
    memcpy(other, lower, sizeof other);
    other[63] += 1;
    sym.head = head;
#define DIFFERS(base, change)                                                 \
    do {                                                                      \
        lm_kv_format x = (base), y = x;                                       \
        lm_kv_side p = { .format = &x }, q = { .format = &y };                \
        assert_true(lm_kv_same_form(&p, &q, 2, 32));                          \
        y.change;                                                             \
        if (lm_kv_same_form(&p, &q, 2, 32) || lm_kv_same_form(&q, &p, 2, 32)) \
            fail_msg("formats are the same after " #change);                  \
    } while (0)
    DIFFERS(sym, values = true);
    DIFFERS(sym, bits = 3);
    DIFFERS(sym, axis = LM_KV_CHANNEL);
    DIFFERS(sym, levels = LM_KV_ASYM);
    DIFFERS(sym, group = 16);
    DIFFERS(sym, scale = LM_DTYPE_F32);
    DIFFERS(sym, ggml = true);
    DIFFERS(sym, norm = true);
    DIFFERS(sym, renorm = true);
    DIFFERS(sym, zero = true);
    DIFFERS(sym, second = true);
    DIFFERS(sym, span = 64);
    DIFFERS(sym, outliers = 3);
    DIFFERS(sym, head = ahead);
    DIFFERS(sym, head = NULL);
    DIFFERS(table, constant = 2);
    DIFFERS(table, n_table = 4);
    DIFFERS(table, table[7] = 2);
    DIFFERS(table, lower = other);
    DIFFERS(table, upper = other);
    sym.levels = LM_KV_FLOAT8;
    DIFFERS(sym, float8 = LM_DTYPE_F8E5M2);
#define SIDE_DIFFERS(change)                                                  \
    do {                                                                      \
        lm_kv_side p = { .format = &sym, .outliers = -1 }, q = p;             \
        q.change;                                                             \
        if (lm_kv_same_form(&p, &q, 2, 32) || lm_kv_same_form(&q, &p, 2, 32)) \
            fail_msg("sides are the same after " #change);                    \
    } while (0)
    SIDE_DIFFERS(format = NULL);
    SIDE_DIFFERS(rotate = true);
    SIDE_DIFFERS(pre_rope = true);
    SIDE_DIFFERS(residual = 32);
    SIDE_DIFFERS(sinks = 4);
    SIDE_DIFFERS(outliers = 0.01);
    lm_kv_format named = sym;
    named.name = "b";
    lm_kv_side p = { .format = &sym }, q = { .format = &named };
    assert_true(lm_kv_same_form(&p, &q, 2, 32));
}

/* To the memory of kernels and back: the same sections; that memory holds what the layouts say. */
static void test_memory(void **state)
{
    (void)state;
    for (int i = 0; i < SPECS; i++) {
        cache *plain = make(LM_DTYPE_BF16, 203, true), *c = coded(plain, specs[i]);
        for (int64_t p = 0; p < PARTS; p++) {
            lm_kv_shape s = lm_kv_about_shape(&c->about, p);
            lm_kv_part back;
            lm_err e = { 0 };
            s.page = c->about.form ? c->about.page : 64;
            size_t row = 2 * (size_t)s.head_dim, pages = 1 + 203 / (size_t)s.page;
            size_t bytes = s.form->format ? lm_kv_page_bytes(s.form->format, s.page, s.head_dim)
                                          : (size_t)s.page * row;
            size_t rows = (size_t)(s.form->sinks + s.form->residual);
            lm_kv_memory m = { calloc(pages * (size_t)s.kv_heads, bytes),
                               calloc((size_t)s.kv_heads * rows + 1, row), 0 };
            memset(m.pages, 0xa5, pages * (size_t)s.kv_heads * bytes); /* of another sequence */
            assert_int_equal(lm_kv_part_put(&s, &c->content.part[p], &m, lm_cpu_detect(), NULL, &e),
                             0);
            assert_int_equal(lm_kv_part_init(&s, &back, &e), 0);
            assert_int_equal(lm_kv_part_get(&s, &m, &back, lm_cpu_detect(), NULL, &e), 0);
            for (int k = 0; k < LM_KV_SECTIONS; k++) {
                lm_kv_section_size z;
                assert_int_equal(lm_kv_section_size_of(&s, (lm_kv_section)k, &z, &e), 0);
                if (k == LM_KV_SP_INDEX || k == LM_KV_SP_VALUE)
                    z.bytes = 2 * (size_t)lm_kv_part_outliers(&s, &back);
                if (z.bytes)
                    assert_memory_equal(back.data[k], c->content.part[p].data[k], z.bytes);
            }
            const char *tail = back.data[LM_KV_TAIL];
            int64_t from, to;
            lm_kv_part_range(&s, &from, &to);
            if (tail && s.form->format) /* the newest token of head 0 */
                assert_memory_equal((char *)m.tail +
                                        (size_t)(s.form->sinks + 202 % s.form->residual) * row,
                                    tail + (size_t)(202 - to) * row, row);
            lm_kv_part_fini(&back);
            free(m.pages), free(m.tail);
        }
        drop(plain), drop(c);
    }
}

/* ---- Dropped tokens ---- */

static cache *make_dropped(bool filled)
{
    static const int64_t rows[LAYERS] = { 12, 20, 7 };
    lm_kv_about a = about_all;
    a.tokens = 40;
    a.rows = rows;
    return make_of(&a, filled);
}

static void test_dropped(void **state)
{
    cache *c = make_dropped(true), *out = make_dropped(false);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    (void)state;
    for (int i = 0; i < 2; i++) {
        lm_err e = { 0 };
        lm_buf b = write_cache(c, 0);
        if (load(b.data, b.len, i, &c->about, &r, out, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_true(same(c, out));
        int32_t at = c->content.at[1][3]; /* as the one before */
        patch(&b, "layers.1.positions", 16, &at, 4);
        assert_int_equal(load(b.data, b.len, i, &c->about, &r, out, &e), LM_EFORMAT);
        assert_non_null(strstr(e.what, "rise"));
        assert_non_null(strstr(e.where, "layers.1.positions"));
        lm_buf_fini(&b);
        cache *four = coded(c, "int4");
        b = write_cache(four, 0);
        cache *again = make_of(&four->about, false);
        e = (lm_err){ 0 };
        assert_int_equal(load(b.data, b.len, i, &c->about, &r, again, &e), 0);
        assert_true(same(four, again));
        lm_buf_fini(&b), drop(four), drop(again);
    }
    const lm_kv_out to = { .path = path, .force = true };
    lm_err e = { 0 };
    assert_int_equal(lm_kv_file_write(&to, &c->about, &c->content, 1, 0, NULL, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "dropped tokens"));
    drop(c), drop(out);
}

/* ---- Damage ---- */

/* Bits flipped in the whole file: refused, or nothing of what is read has changed. */
static void check_flips(const char *text, bool stream)
{
    cache *plain = make(LM_DTYPE_BF16, 70, true), *c = coded(plain, text);
    cache *want = make_of(&c->about, false), *out = make_of(&c->about, false);
    lm_buf b = write_cache(c, 0);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    lm_err e = { 0 };
    int accepted = 0;
    assert_int_equal(load(b.data, b.len, stream, &c->about, &r, want, &e), 0);
    for (size_t i = 3; i < 8 * b.len; i += stream ? 37 : 311) {
        lm_kv_file *f = NULL;
        char *copy = malloc(b.len);
        span s = { copy, b.len };
        memcpy(copy, b.data, b.len);
        copy[i / 8] ^= (char)(1 << i % 8);
        e = (lm_err){ 0 };
        if (!lm_kv_file_open_on(read_span, &s, "m", &f, &e) &&
            (lm_kv_file_about(f)->tokens != 70 || lm_kv_file_about(f)->layers != LAYERS ||
             !lm_kv_file_about(f)->form || lm_kv_file_about(f)->next != 47))
            fail_msg("bit %zu of byte %zu: another cache", i % 8, i / 8);
        for (int p = 0; p < PARTS && f; p++)
            if (!lm_kv_same_form(&lm_kv_file_about(f)->form[p], &c->about.form[p], heads[p / 2],
                                 width[p / 2]))
                fail_msg("bit %zu of byte %zu: other forms", i % 8, i / 8);
        if (f && !load(copy, b.len, stream, &c->about, &r, out, &e)) {
            accepted++;
            if (!same(want, out))
                fail_msg("bit %zu of byte %zu: read as other numbers", i % 8, i / 8);
        }
        lm_kv_file_close(f);
        free(copy);
    }
    assert_int_equal(accepted, 0);
    lm_buf_fini(&b), drop(plain), drop(c), drop(want), drop(out);
}

/* Of coded caches, of one with dropped tokens, with the token that follows. */
static void test_header_flips(void **state)
{
    static const int64_t rows[LAYERS] = { 12, 20, 7 };
    lm_kv_about a = about_all;
    (void)state;
    a.tokens = 20, a.rows = rows;
    cache *all = make(LM_DTYPE_BF16, 20, true), *some = make_of(&a, true);
    cache *c = coded(all, "kivi"), *d = coded(some, "k=int4,v=int2:residual=0");
    check_header_flips(c);
    check_header_flips(d);
    drop(all), drop(some), drop(c), drop(d);
}

static void test_flips(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        check_flips("int4", i);
        check_flips("kivi", i);
        check_flips("ranged", i);
    }
}

/* Sections whose checksum is right and whose numbers are not. */
static void test_bad_sections(void **state)
{
    static const struct {
        const char *spec, *tensor;
        size_t at;
        uint32_t value, bytes;
        const char *where, *want;
    } cases[] = {
        { "int4", "layers.1.k.scale", 6, 0x7e00, 2, "layers.1.k.scale", "NaN" },
        { "int4", "layers.2.v.min", 0, 0x7c00, 2, "layers.2.v.min", "infinite" },
        { "kvarn:first=0,last=0,group=64,sinks=0", "layers.0.k.scale2", 2, 0xfc00, 2,
          "layers.0.k.scale2", "NaN" },
        { "kivi", "layers.0.v.tail", 4, 0x7f80, 2, "layers.0.v.tail", "infinite" },
        { "ranged", "layers.0.k.first", 0, 0xff81, 2, "layers.0.k.first", "NaN" },
        { "int3:group=16", "layers.1.v.q", 7, 0xf0, 1, "layers.1.v", "bits behind" },
        { "ranged", "layers.0.k.sp_ptr", 0, 1, 4, "layers.0.k", "outliers" },
        { "ranged", "layers.0.k.sp_ptr", 4, 1u << 31, 4, "layers.0.k", "outliers" },
        { "ranged", "layers.0.k.sp_ptr", 8, 0, 4, "layers.0.k", "outliers" },
        { "ranged", "layers.2.v.sp_idx", 2, 0, 2, "layers.2.v", "outliers" },
        { "ranged", "layers.2.v.sp_idx", 0, 0xffff, 2, "layers.2.v", "outliers" },
        { "ranged", "layers.0.v.sp_val", 2, 0x7c00, 2, "layers.0.v.sp_val", "NaN" },
    };
    (void)state;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        cache *plain = make(LM_DTYPE_BF16, 100, true), *c = coded(plain, cases[i / 2].spec);
        cache *out = make_of(&c->about, false);
        lm_kv_reading r = reading(LM_KV_FILE_BEST);
        lm_buf b = write_cache(c, 0);
        lm_err e = { 0 };
        patch(&b, cases[i / 2].tensor, cases[i / 2].at, &cases[i / 2].value, cases[i / 2].bytes);
        assert_int_equal(load(b.data, b.len, i % 2, &c->about, &r, out, &e), LM_EFORMAT);
        if (!strstr(e.what, cases[i / 2].want) || !strstr(e.where, cases[i / 2].where))
            fail_msg("%s: %s: %s", cases[i / 2].tensor, e.where, e.what);
        lm_buf_fini(&b), drop(plain), drop(c), drop(out);
    }
}

/* Replace a text in forms, which keeps its length, and the checksum of the header. */
static void patch_forms(lm_buf *b, const char *from, const char *to)
{
    char *begin = memmem(b->data, b->len, "\"forms\":\"", 9);
    assert_non_null(begin);
    char *at = memmem(begin, b->len - (size_t)(begin - b->data), from, strlen(from));
    if (!at || strlen(from) != strlen(to))
        fail_msg("no %s in forms, or %s is of another length", from, to);
    memcpy(at, to, strlen(to));
    reseal(b->data, b->len);
}

/* Where keys are rotated is what the forms say; tensors have as many outliers as their heads count. */
static void test_contradictions(void **state)
{
    cache *plain = make(LM_DTYPE_BF16, 100, true), *c = coded(plain, "ranged");
    cache *out = make_of(&c->about, false);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    const lm_kv_shape shape = lm_kv_about_shape(&c->about, 0);
    lm_kv_section_size z;
    lm_err e = { 0 };
    lm_buf b = write_cache(c, 0);
    (void)state;
    char *at = memmem(b.data, b.len, "\"post_rope\"", 11);
    assert_non_null(at);
    memcpy(at, "\"pre_rope\" ", 11);
    reseal(b.data, b.len);
    assert_int_equal(load(b.data, b.len, false, &c->about, &r, out, &e), LM_EFORMAT);
    assert_string_equal(e.what, "k_state and forms differ");
    lm_buf_fini(&b);

    assert_int_equal(lm_kv_section_size_of(&shape, LM_KV_SP_BEGIN, &z, &e), 0);
    uint32_t last, before;
    const char *begin = c->content.part[0].data[LM_KV_SP_BEGIN];
    memcpy(&last, begin + z.bytes - 4, 4), memcpy(&before, begin + z.bytes - 8, 4);
    assert_true(last > before);
    last--;
    b = write_cache(c, 0);
    patch(&b, "layers.0.k.sp_ptr", z.bytes - 4, &last, 4);
    e = (lm_err){ 0 };
    assert_int_equal(load(b.data, b.len, false, &c->about, &r, out, &e), LM_EFORMAT);
    if (!strstr(e.what, "another number of outliers"))
        fail_msg("%s: %s", e.where, e.what);
    lm_buf_fini(&b), drop(plain), drop(c), drop(out);
}

static void test_bad_forms(void **state)
{
    static const struct {
        const char *spec, *from, *to, *want;
    } cases[] = {
        { "int4", "\\\"bits\\\":4", "\\\"bits\\\":7", "bits of a code" },
        { "int4", "\\\"bits\\\":4", "\\\"bits\\\":-", "JSON" },
        { "int4", "\\\"asym\\\"", "\\\"asyn\\\"", "levels is 'asyn'" },
        { "int4", "\\\"group\\\":32", "\\\"group\\\":33", "multiples of 16" },
        { "int4", "\\\"scale\\\":\\\"f16\\\"", "\\\"scale\\\":\\\"i16\\\"", "scale is 'i16'" },
        { "int4", "\\\"page\\\":64", "\\\"page\\\":65", "a page has" },
        { "int4", "[0,0,", "[0,9,", "has no form" },
        { "int4", "[0,0,0,0,0,0]", "[0,0,0,0,0,0 ", "JSON" },
        { "int4", "[0,0,0,0,0,0]", "[0,0,0,0,0  ]", "forms" },
        { "int2:residual=40", "\\\"residual\\\":40", "\\\"residual\\\":41", "does not belong" },
        { "kivi", "\\\"residual\\\":128", "\\\"residual\\\":129", "coded together" },
        { "kivi", "\\\"residual\\\":128", "\\\"residual\\\": -1", "residual" },
        { "ranged", "\\\"table\\\":[-1,", "\\\"table\\\":[ 2,", "rise" },
        { "ranged", "\\\"table\\\":[-1,", "\\\"tabel\\\":[-1,", "table is not" },
        { "ranged", "\\\"lower\\\"", "\\\"lowet\\\"", "forms" },
        { "ranged", "\\\"share\\\":0.05", "\\\"share\\\":1.05", "not below 1" },
        { "ranged", "\\\"share\\\":0.05", "\\\"share\\\":-0.5", "from 0 to 1" },
        { "ranged", "\\\"share\\\":0.05", "\\\"shara\\\":0.05", "no ranges" },
        { "int4", "\\\"name\\\":\\\"int4\\\"", "\\\"share\\\":0.50000", "levels of a table" },
        { "int4", "\\\"rotate\\\":true", "\\\"pre_rope\\\":1 ", "'pre_rope'" },
        { "ranged", "\\\"sinks\\\":5", "\\\"sinks\\\":6", "does not belong" },
        { "kvarn:first=0,last=0,group=64,sinks=64", "\\\"sinks\\\":64", "\\\"sinks\\\":65",
          "coded together" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cache *plain = make(LM_DTYPE_BF16, 300, true), *c = coded(plain, cases[i].spec);
        cache *out = make_of(&c->about, false);
        lm_kv_reading r = reading(LM_KV_FILE_BEST);
        lm_buf b = write_cache(c, 0);
        lm_err e = { 0 };
        patch_forms(&b, cases[i].from, cases[i].to);
        assert_int_equal(load(b.data, b.len, true, &c->about, &r, out, &e), LM_EFORMAT);
        if (!strstr(e.what, cases[i].want) && !strstr(e.where, cases[i].want))
            fail_msg("%s -> %s: %s: %s", cases[i].from, cases[i].to, e.where, e.what);
        assert_int_equal(strncmp(e.where, "memory", 6), 0);
        lm_buf_fini(&b), drop(plain), drop(c), drop(out);
    }
}

/* Parts of one shape that name a form share its numbers. */
static void test_shared_forms(void **state)
{
    cache *plain = make(LM_DTYPE_BF16, 40, true), *c = coded(plain, "ranged");
    lm_buf b = write_cache(c, 0);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    span s = { b.data, b.len };
    lm_kv_file *f;
    cache *m;
    lm_err e = { 0 };
    (void)state;
    assert_int_equal(lm_kv_file_open_on(read_span, &s, "m", &f, &e), 0);
    assert_int_equal(lm_kv_image_read(f, &r, lm_cpu_detect(), NULL, &m, &e), 0);
    for (int i = 0; i < 2; i++) {
        const lm_kv_side *form = i ? m->about.form : lm_kv_file_about(f)->form;
        assert_ptr_equal(form[0].format, form[4].format); /* layers 0 and 2 are alike */
        assert_ptr_equal(form[0].format->lower, form[4].format->lower);
        assert_ptr_not_equal(form[0].format, form[2].format);
        assert_ptr_not_equal(form[0].format, form[1].format);
    }
    lm_kv_file_close(f);
    lm_buf_fini(&b), drop(m), drop(plain), drop(c);
}

/* A form that many parts name is not read for layers that have no tensors. */
static void test_forms_without_tensors(void **state)
{
    lm_buf b = { 0 }, text = { 0 };
    lm_kv_file *f;
    lm_err e = { 0 };
    (void)state;
    lm_buf_addf(&text, &e,
                "{\"__metadata__\":{\"format\":\"kv-cache\",\"version\":\"1\",\"coding\":"
                "\"coded\",\"model_type\":\"m\",\"weights\":\"%s\",\"config\":\"%s\","
                "\"rope\":\"{}\",\"k_state\":\"post_rope\",\"layers\":\"9000\",\"tokens\":"
                "\"1\",\"act\":\"bf16\",\"xxh3\":\"{\\\"token_ids\\\":\\\"%016d\\\"}\","
                "\"header\":\"%032d\",\"forms\":\"{\\\"page\\\":64,\\\"forms\\\":[{}],"
                "\\\"parts\\\":[0",
                about_all.weights, about_all.config, 0, 0);
    for (int i = 1; i < 2 * 9000; i++)
        lm_buf_add(&text, ",0", 2, &e);
    lm_buf_addf(&text, &e, "]}\"");
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 9000; i++)
            lm_buf_addf(&text, &e, "%s%s",
                        i   ? ""
                        : k ? ",\"head_dim\":\"["
                            : ",\"kv_heads\":\"[",
                        i == 8999 ? "1]\"" : "1,");
    lm_buf_addf(&text, &e,
                "},\"token_ids\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":"
                "[0,4]}}");
    while (text.len % 8)
        lm_buf_add(&text, " ", 1, &e);
    uint64_t header = text.len;
    lm_buf_add(&b, &header, 8, &e);
    lm_buf_add(&b, text.data, text.len, &e);
    lm_buf_add(&b, "\1\0\0\0", 4, &e);
    reseal(b.data, b.len);
    span s = { b.data, b.len };
    assert_int_equal(lm_kv_file_open_on(read_span, &s, "m", &f, &e), LM_EFORMAT);
    if (!strstr(e.what, "it has 1 tensor, 9000 layers have 18002 or more"))
        fail_msg("%s: %s", e.where, e.what);
    lm_buf_fini(&b), lm_buf_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_conversion),
        cmocka_unit_test(test_same_form),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_dropped),
        cmocka_unit_test(test_flips),
        cmocka_unit_test(test_header_flips),
        cmocka_unit_test(test_bad_sections),
        cmocka_unit_test(test_bad_forms),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_shared_forms),
        cmocka_unit_test(test_forms_without_tensors),
    };
    return cmocka_run_group_tests_name("kv_coded", tests, make_path, drop_path);
}
