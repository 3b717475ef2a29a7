/* SPDX-License-Identifier: Apache-2.0 */
/* kv-cache(5): written and read back, plain and at levels, as a file and as a stream; every damage and
 * every other model is refused. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "kv/file_report.h"
#include "tests/unit/kv_file_case.h"

/* ---- Round trips ---- */

static void test_plain(void **state)
{
    static const lm_dtype act[] = { LM_DTYPE_F32, LM_DTYPE_F16, LM_DTYPE_BF16 };
    (void)state;
    for (int i = 0; i < 6; i++) {
        cache *c = make(act[i / 2], 1 + 299 * (i / 2), true),
              *out = make(act[i / 2], c->about.tokens, false);
        lm_buf b = write_cache(c, 0);
        lm_err e = { 0 };
        lm_kv_reading r = reading(LM_KV_FILE_BEST);
        if (load(b.data, b.len, i % 2, &c->about, &r, out, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_true(same(c, out));
        lm_buf_fini(&b), drop(c), drop(out);
    }
}

static void test_about(void **state)
{
    cache *c = make(LM_DTYPE_F16, 300, true);
    lm_kv_file *f;
    lm_err e = { 0 };
    (void)state;
    c->about.history = "[{\"tool\":\"x\"}]";
    lm_buf b = write_cache(c, 6);
    put_file(b.data, b.len);
    assert_int_equal(lm_kv_file_open(path, &f, &e), 0);
    const lm_kv_about *a = lm_kv_file_about(f);
    assert_string_equal(a->model_type, "llama");
    assert_string_equal(a->history, c->about.history);
    assert_int_equal(a->tokens, 300);
    assert_int_equal(a->act, LM_DTYPE_F16);
    assert_int_equal(a->kv_heads[1], 1);
    assert_int_equal(a->head_dim[1], 20);
    assert_int_equal(lm_kv_file_levels(f), 6);
    assert_true(lm_kv_file_chunk_bytes(f, 0, 1) > lm_kv_file_chunk_bytes(f, 0, 2));
    assert_true(lm_kv_file_chunk_bytes(f, 1, 1) < lm_kv_file_chunk_bytes(f, 0, 1));
    lm_kv_file_close(f);
    lm_buf_fini(&b), drop(c);
}

/* Sum of squared differences. */
static double error_of(const cache *a, const cache *b)
{
    double sum = 0;
    for (int64_t p = 0; p < PARTS; p++)
        for (size_t i = 0; i < lm_kv_about_bytes(&a->about, p) / lm_dtype_size(a->about.act); i++)
            sum += pow(lm_get(a->about.act, a->content.part[p].data[LM_KV_PLAIN], (int64_t)i) -
                           lm_get(a->about.act, b->content.part[p].data[LM_KV_PLAIN], (int64_t)i),
                       2);
    return sum;
}

/* Each level is what a file of that level alone has; files and streams agree; errors rise. */
static void test_levels(void **state)
{
    cache *c = make(LM_DTYPE_BF16, 521, true);
    lm_buf all = write_cache(c, 15);
    double before = 0;
    (void)state;
    for (int l = 0; l < LM_CACHEGEN_LEVELS; l++) {
        cache *a = make(LM_DTYPE_BF16, 521, false), *b = make(LM_DTYPE_BF16, 521, false);
        lm_buf one = write_cache(c, 1u << l);
        lm_kv_reading r = reading(l), best = reading(LM_KV_FILE_BEST);
        lm_err e = { 0 };
        assert_int_equal(load(all.data, all.len, l % 2, &c->about, &r, a, &e), 0);
        assert_int_equal(load(one.data, one.len, false, &c->about, &best, b, &e), 0);
        assert_true(same(a, b));
        assert_int_equal(load(one.data, one.len, true, &c->about, &best, b, &e), 0);
        assert_true(same(a, b));
        assert_true(error_of(c, a) > 1.5 * before);
        before = error_of(c, a);
        assert_memory_equal(a->content.ids, c->content.ids, 4 * 521);
        lm_buf_fini(&one), drop(a), drop(b);
    }
    lm_buf_fini(&all), drop(c);
}

/* ---- Which level ---- */

static lm_code compute(void *ctx, int64_t first, int64_t n, lm_err *e)
{
    int64_t *rows = ctx;
    (void)e;
    assert_int_equal(first, *rows);
    *rows += n;
    return LM_OK;
}

static void test_choice(void **state)
{
    cache *c = make(LM_DTYPE_BF16, 700, true), *out = make(LM_DTYPE_BF16, 700, false);
    lm_buf b = write_cache(c, 13); /* 0, 2, 3 */
    lm_err e = { 0 };
    int chosen[3];
    int64_t rows = 0;
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    (void)state;
    r.chosen = chosen;
    assert_int_equal(load(b.data, b.len, false, &c->about, &r, out, &e), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(chosen[i], 0);
    r.deadline = 1e-9, r.begin = lm_now(); /* too late: the fastest, by what precedes chunks */
    assert_int_equal(load(b.data, b.len, false, &c->about, &r, out, &e), 0);
    assert_int_equal(chosen[0], 3);
    assert_int_equal(chosen[1], 3);
    assert_int_equal(chosen[2], 3);
    r.deadline = 1000;
    assert_int_equal(load(b.data, b.len, false, &c->about, &r, out, &e), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(chosen[i], 0);
    r.compute = compute, r.ctx = &rows, r.row_seconds = 1e-6;
    assert_int_equal(load(b.data, b.len, false, &c->about, &r, out, &e), 0);
    assert_int_equal(rows, 700);
    assert_int_equal(chosen[1], LM_KV_COMPUTE);
    memset(chosen, 9, sizeof chosen);
    assert_int_equal(load(b.data, b.len, true, &c->about, &r, out, &e), 0);
    assert_int_equal(chosen[2], 0); /* a stream: the best one passes anyway */
    lm_buf_fini(&b), drop(c), drop(out);
}

/* A stream that becomes slow behind its first chunk: 1000 bytes in 40 ms. */
typedef struct {
    span s;
    size_t slow; /* bytes that are left then */
} slowing;

static lm_code read_slowing(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    const struct timespec pause = { 0, 40 * 1000 * 1000 };
    slowing *x = ctx;
    if (x->s.len < x->slow)
        nanosleep(&pause, NULL);
    return read_span(&x->s, dst, cap, got, e);
}

/* The second chunk takes most of the time, so the third is computed; without that it is awaited. */
static void test_slow_stream(void **state)
{
    cache *c = make(LM_DTYPE_BF16, 700, true), *out = make(LM_DTYPE_BF16, 700, false);
    lm_buf b = write_cache(c, 1);
    lm_err e = { 0 };
    (void)state;
    for (int possible = 0; possible < 2; possible++) {
        int chosen[3] = { 9, 9, 9 };
        int64_t rows = 512;
        lm_kv_file *f;
        lm_kv_reading r = reading(LM_KV_FILE_BEST);
        r.chosen = chosen, r.begin = lm_now(), r.deadline = 1;
        r.compute = possible ? compute : NULL, r.ctx = &rows, r.row_seconds = 1e-6;
        slowing x = { { b.data, b.len }, 0 };
        assert_int_equal(lm_kv_file_open_on(read_slowing, &x, "slow", &f, &e), 0);
        x.slow = (size_t)(lm_kv_file_chunk_bytes(f, 1, 0) + lm_kv_file_chunk_bytes(f, 2, 0));
        assert_true(x.slow > 20000);
        if (lm_kv_file_read(f, &r, &out->content, lm_cpu_detect(), NULL, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_int_equal(chosen[0], 0);
        assert_int_equal(chosen[1], 0);
        assert_int_equal(chosen[2], possible ? LM_KV_COMPUTE : 0);
        assert_int_equal(rows, possible ? 700 : 512);
        lm_kv_file_close(f);
    }
    lm_buf_fini(&b), drop(c), drop(out);
}

static void test_absent_level(void **state)
{
    cache *c = make(LM_DTYPE_F32, 20, true), *out = make(LM_DTYPE_F32, 20, false);
    (void)state;
    for (int i = 0; i < 4; i++) {
        lm_buf b = write_cache(c, i / 2 ? 9 : 0);
        lm_err e = { 0 };
        lm_kv_reading r = reading(i == 3 ? 7 : 1);
        assert_int_equal(load(b.data, b.len, i % 2, &c->about, &r, out, &e), LM_EUSAGE);
        assert_non_null(strstr(e.what, i / 2 ? "it has 0, 3" : "not coded in levels"));
        lm_buf_fini(&b);
    }
    drop(c), drop(out);
}

static void test_bad_content(void **state)
{
    cache *c = make(LM_DTYPE_BF16, 20, true);
    lm_err e = { 0 };
    const lm_kv_out to = { .path = path, .force = true };
    (void)state;
    assert_int_equal(lm_kv_file_write(&to, &c->about, &c->content, 16, 0, NULL, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    lm_set(LM_DTYPE_BF16, c->content.part[3].data[LM_KV_PLAIN], 77, NAN);
    assert_int_equal(lm_kv_file_write(&to, &c->about, &c->content, 0, 0, NULL, &e), LM_ENUMERIC);
    assert_string_equal(e.where, "layers.1.v");
    e = (lm_err){ 0 };
    assert_int_equal(lm_kv_file_write(&to, &c->about, &c->content, 1, 0, NULL, &e), LM_ENUMERIC);
    c->about.tokens = 0, e = (lm_err){ 0 };
    assert_int_equal(lm_kv_file_write(&to, &c->about, &c->content, 0, 0, NULL, &e), LM_EUSAGE);
    c->about.tokens = 20;
    drop(c);
}

/* Kinds of layers and forms that contradict each other. */
static void test_bad_kinds(void **state)
{
    static const int64_t latent[] = { 0, 6, 0 }, rows[] = { 12, 12, 12 }, states[] = { 0, 0, 0 };
    cache *c = make(LM_DTYPE_BF16, 12, true);
    const lm_kv_about was = c->about;
    lm_kv_side form[6] = { [2] = { .pre_rope = true, .outliers = -1 } };
    lm_err e = { 0 };
    const lm_kv_out to = { .path = path, .force = true };
    (void)state;
    c->about.form = form;
    c->about.page = 16;
    c->about.latent = latent;
    assert_int_equal(lm_kv_file_write(&to, &c->about, &c->content, 0, 0, NULL, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "layer 1 has latents, which are not rotated by positions"));
    c->about = was;
    c->about.state = c->about.conv = states;
    c->about.rows = rows;
    e = (lm_err){ 0 };
    assert_int_equal(lm_kv_file_write(&to, &c->about, &c->content, 0, 0, NULL, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "\"state\" and \"rows\""));
    c->about = was;
    drop(c);
}

/* ---- Other models ---- */

static void test_other_models(void **state)
{
    static const int64_t more[LAYERS] = { 2, 2, 2 };
    cache *c = make(LM_DTYPE_BF16, 30, true), *out = make(LM_DTYPE_BF16, 30, false);
    lm_buf b = write_cache(c, 0);
    lm_kv_file *f;
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    (void)state;
    for (int i = 0; i < 6; i++) {
        static const char *const want[] = { "type 'llama', not 'qwen2'",
                                            "of weights 0123",
                                            "rotated with other settings",
                                            "heads differ",
                                            "heads differ",
                                            "other settings of norms" };
        lm_kv_about a = c->about;
        lm_err e = { 0 };
        if (i == 0)
            a.model_type = "qwen2";
        else if (i == 1)
            a.weights = "0123456789abcdef0123456789abcdee";
        else if (i == 2)
            a.rope = "{\"theta\":5e5}";
        else if (i == 3)
            a.kv_heads = more;
        else if (i == 4)
            a.layers = 2;
        else
            a.config = "fedcba9876543210fedcba9876543211";
        assert_int_equal(load(b.data, b.len, i % 2, &a, &r, out, &e), LM_EFORMAT);
        if (!strstr(e.what, want[i]) || !*e.todo)
            fail_msg("%s", e.what);
    }
    lm_err e = { 0 };
    put_file(b.data, b.len);
    assert_int_equal(lm_kv_file_open(path, &f, &e), 0);
    assert_int_equal(lm_kv_file_match(f, &c->about, 30, &e), 0);
    assert_int_equal(lm_kv_file_match(f, &c->about, 29, &e), LM_EFORMAT);
    lm_kv_file_close(f);
    lm_buf_fini(&b), drop(c), drop(out);
}

/* Names of a file are listed without what controls a terminal. */
static void test_report(void **state)
{
    cache *c = make(LM_DTYPE_BF16, 12, true);
    lm_buf text = { 0 };
    lm_kv_file *f;
    lm_err e = { 0 };
    (void)state;
    c->about.model_type = "\033[1mm";
    lm_buf b = write_cache(c, 0);
    span s = { b.data, b.len };
    assert_int_equal(lm_kv_file_open_on(read_span, &s, "m", &f, &e), 0);
    assert_int_equal(lm_kv_file_report(f, false, &text, &e), 0);
    assert_non_null(strstr(text.data, "[1mm"));
    assert_null(strchr(text.data, '\033'));
    lm_kv_file_close(f);
    lm_buf_fini(&text), lm_buf_fini(&b), drop(c);
}

/* ---- Damage ---- */

/* Every bit of a small file flipped: refused, or nothing of what is read has changed. */
static void check_flips(unsigned levels, bool stream)
{
    cache *c = make(LM_DTYPE_BF16, 12, true), *want = make(LM_DTYPE_BF16, 12, false);
    cache *out = make(LM_DTYPE_BF16, 12, false);
    lm_buf b = write_cache(c, levels);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    lm_err e = { 0 };
    int taken = 0;
    assert_int_equal(load(b.data, b.len, stream, &c->about, &r, want, &e), 0);
    for (size_t i = 0; i < 8 * b.len; i += stream ? 1 : 7) {
        char *copy = malloc(b.len);
        memcpy(copy, b.data, b.len);
        copy[i / 8] ^= (char)(1 << i % 8);
        e = (lm_err){ 0 };
        if (!load(copy, b.len, stream, &c->about, &r, out, &e)) {
            taken++;
            if (!same(want, out))
                fail_msg("bit %zu of byte %zu: read as other numbers", i % 8, i / 8);
        }
        free(copy);
    }
    assert_int_equal(taken, 0);
    lm_buf_fini(&b), drop(c), drop(want), drop(out);
}

static void test_flips(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++)
        check_flips(i / 2 ? 2 : 0, i % 2);
}

static void test_header_flips(void **state)
{
    cache *c = make(LM_DTYPE_BF16, 12, true);
    (void)state;
    c->about.has_next = true;
    c->about.next = 7;
    c->about.history = "[{\"tool\":\"generate\"}]";
    check_header_flips(c);
    c->about.history = NULL;
    drop(c);
}

static void test_cuts(void **state)
{
    cache *c = make(LM_DTYPE_BF16, 12, true), *out = make(LM_DTYPE_BF16, 12, false);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    (void)state;
    for (int i = 0; i < 4; i++) {
        lm_buf b = write_cache(c, i / 2 ? 5 : 0);
        for (size_t len = 0; len < b.len; len += 1 + 6 * !(i % 2)) {
            lm_err e = { 0 };
            assert_int_equal(load(b.data, len, i % 2, &c->about, &r, out, &e), LM_EFORMAT);
        }
        lm_buf_fini(&b);
    }
    drop(c), drop(out);
}

static void test_bad_numbers(void **state)
{
    static const struct {
        const char *tensor;
        size_t at;
        int32_t value;
        const char *want;
    } cases[] = {
        { "token_ids", 40, VOCAB, "vocabulary" }, { "token_ids", 0, -1, "vocabulary" },
        { "positions", 40, 19, "rise" },          { "positions", 0, -1, "rise" },
        { "positions", 44, CONTEXT, "rise" },     { "layers.1.k", 8, 0x7fc00000, "NaN" },
        { "layers.2.v", 0, 0x7f80, "NaN" },
    };
    (void)state;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        cache *c = make(LM_DTYPE_BF16, 12, true), *out = make(LM_DTYPE_BF16, 12, false);
        lm_buf b = write_cache(c, 0);
        lm_kv_reading r = reading(LM_KV_FILE_BEST);
        lm_err e = { 0 };
        patch(&b, cases[i / 2].tensor, cases[i / 2].at, &cases[i / 2].value, 4);
        assert_int_equal(load(b.data, b.len, i % 2, &c->about, &r, out, &e), LM_EFORMAT);
        if (!strstr(e.what, cases[i / 2].want) || !strstr(e.where, cases[i / 2].tensor))
            fail_msg("%s: %s", e.where, e.what);
        lm_buf_fini(&b), drop(c), drop(out);
    }
}

/* A damaged chunk with a right checksum. */
static void test_bad_chunks(void **state)
{
    cache *c = make(LM_DTYPE_BF16, 300, true), *out = make(LM_DTYPE_BF16, 300, false);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    static const char *const tensors[] = { "chunk.1.level.2", "tables.level.2", "chunk.0.level.2" };
    (void)state;
    for (int i = 0; i < 6; i++) {
        lm_buf b = write_cache(c, 4);
        lm_err e = { 0 };
        patch(&b, tensors[i / 2], i / 2 == 2 ? 4 : 0, "\377\377", 2);
        assert_int_equal(load(b.data, b.len, i % 2, &c->about, &r, out, &e), LM_EFORMAT);
        if (!strstr(e.what, "damaged") || !strstr(e.where, tensors[i / 2]))
            fail_msg("%s: %s", e.where, e.what);
        lm_buf_fini(&b);
    }
    drop(c), drop(out);
}

/* Texts of the header replaced by others of the same length; with SEALED its checksum is left as it was. */
#define SEALED "the checksum of its header is wrong"

static void test_bad_headers(void **state)
{
    static const struct {
        const char *from, *to, *want;
    } cases[] = {
        { "\"kv-cache\"", "\"kv-cachf\"", "it is not a cache" },
        { "\"version\":\"1\"", "\"version\":\"2\"", "version is '2'" },
        { "\"plain\"", "\"plaid\"", "coding is 'plaid'" },
        { "\"post_rope\"", "\"prae_rope\"", "k_state is" },
        { "\"model_type\"", "\"model_tipe\"", "no 'model_type'" },
        { "\"weights\"", "\"weightz\"", "no 'weights'" },
        { "89abcdef", "89ABCDEF", "weights is not a digest" },
        { "fedcba98", "fedcbag8", "config is not a digest" },
        { "\"config\"", "\"confih\"", "no 'config'" },
        { "\"layers\":\"3\"", "\"layers\":\"4\"", "list of 4" },
        { "\"layers\":\"3\"", "\"layers\":\"0\"", "layers is '0'" },
        { "\"tokens\":\"12\"", "\"tokens\":\"13\"", "does not belong" },
        { "\"tokens\":\"12\"", "\"tokens\":\"x2\"", "tokens is 'x2'" },
        { "[2,1,2]", "[2,1,3]", "does not belong" },
        { "[2,1,2]", "[2,-1]", "list of 3" },
        { "[8,20,8]", "[8,-2,8]", "heads of -2 numbers" },
        { "[8,20,8]", "[8,{},8]", "list of 3" },
        { "\"act\":\"bf16\"", "\"act\":\"bf15\"", "unknown type" },
        { "\"act\":\"bf16\"", "\"act\":\"i32\" ", "i32" },
        { "\"xxh3\"", "\"xxh4\"", "no 'xxh3'" },
        { "\"layers.0.k\":{\"dtype\"", "\"layers.0.q\":{\"dtype\"", "checksum" },
        { "\\\"layers.0.k\\\":", "\\\"layers.0.q\\\":", "checksum of tensor 'layers.0.k'" },
        { "\"header\"", "\"headex\"", "no 'header'" },
        { "\"next\"", "\"nexu\"", SEALED },
        { "\"next\":\"7\"", "\"next\":\"8\"", SEALED },
        { "\"llama\"", "\"gemma\"", SEALED },
        { "\"xxh3\"", "\"xxh4\"", SEALED },
    };
    cache *c = make(LM_DTYPE_BF16, 12, true), *out = make(LM_DTYPE_BF16, 12, false);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    (void)state;
    c->about.has_next = true;
    c->about.next = 7;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        const char *from = cases[i / 2].from, *to = cases[i / 2].to;
        lm_buf b = write_cache(c, 0);
        lm_err e = { 0 };
        char *where = memmem(b.data, b.len, from, strlen(from));
        if (!where)
            fail_msg("no %s in the header", from);
        memset(where, ' ', strlen(from));
        memcpy(where, to, strlen(to));
        if (strcmp(cases[i / 2].want, SEALED))
            reseal(b.data, b.len);
        assert_int_equal(load(b.data, b.len, i % 2, &c->about, &r, out, &e), LM_EFORMAT);
        if (!strstr(e.what, cases[i / 2].want))
            fail_msg("%s -> %s: %s", from, to, e.what);
        lm_buf_fini(&b);
    }
    drop(c), drop(out);
}

/* Names of tensors that only look right, and tensors that are missing. */
static void test_bad_tensors(void **state)
{
    static const struct {
        const char *from, *to, *want;
    } cases[] = {
        { "chunk.1.level.2", "chunk.2.level.2", "'chunk.2.level.2' does not belong" },
        { "chunk.1.level.2", "chunk.01.level2", "does not belong" },
        { "chunk.1.level.2", "chunk.1.level.0", "'tables.level.0' is missing" },
        { "chunk.1.level.2", "chunk.1.level.7", "does not belong" },
        { "tables.level.2", "layers.00000.k", "does not belong" },
        { "tables.level.2", "tables.level.1", "'chunk.0.level.1' is missing" },
        { "positions", "positionz", "does not belong" },
    };
    cache *c = make(LM_DTYPE_BF16, 300, true), *out = make(LM_DTYPE_BF16, 300, false);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_buf b = write_cache(c, 4);
        lm_err e = { 0 };
        size_t n = strlen(cases[i].from);
        for (char *p = b.data; (p = memmem(p, b.len - (size_t)(p - b.data), cases[i].from, n));
             p += n)
            memcpy(p, cases[i].to, n); /* both in xxh3 and as a tensor */
        reseal(b.data, b.len);
        assert_int_equal(load(b.data, b.len, i % 2, &c->about, &r, out, &e), LM_EFORMAT);
        if (!strstr(e.what, cases[i].want))
            fail_msg("%s -> %s: %s", cases[i].from, cases[i].to, e.what);
        lm_buf_fini(&b);
    }
    drop(c), drop(out);
}

/* The checksum of one tensor more than the file has; the header is right otherwise. */
static void test_bad_hashes(void **state)
{
    static const char next[] = "\\\"layers.0.k\\\":",
                      more[] = "\\\"layers.7.k\\\":\\\"0123456789abcdef\\\",    ";
    enum { MORE = sizeof more - 1 };
    cache *c = make(LM_DTYPE_BF16, 12, true), *out = make(LM_DTYPE_BF16, 12, false);
    lm_kv_reading r = reading(LM_KV_FILE_BEST);
    lm_buf b = write_cache(c, 0);
    char *file = malloc(b.len + MORE), *at = memmem(b.data, b.len, next, strlen(next));
    uint64_t header;
    (void)state;
    assert_non_null(at);
    memcpy(&header, b.data, 8);
    header += MORE; /* safetensors: of 8 bytes each */
    assert_int_equal(header % 8, 0);
    size_t before = (size_t)(at - b.data);
    memcpy(file, b.data, before);
    memcpy(file, &header, 8);
    memcpy(file + before, more, MORE);
    memcpy(file + before + MORE, at, b.len - before);
    reseal(file, b.len + MORE);
    for (int i = 0; i < 2; i++) {
        lm_err e = { 0 };
        assert_int_equal(load(file, b.len + MORE, i % 2, &c->about, &r, out, &e), LM_EFORMAT);
        assert_string_equal(e.what, "xxh3 has the checksum of a tensor that is not there");
    }
    free(file);
    lm_buf_fini(&b), drop(c), drop(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),        cmocka_unit_test(test_about),
        cmocka_unit_test(test_levels),       cmocka_unit_test(test_choice),
        cmocka_unit_test(test_absent_level), cmocka_unit_test(test_bad_content),
        cmocka_unit_test(test_bad_kinds),    cmocka_unit_test(test_other_models),
        cmocka_unit_test(test_flips),        cmocka_unit_test(test_report),
        cmocka_unit_test(test_header_flips), cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_bad_numbers),  cmocka_unit_test(test_bad_chunks),
        cmocka_unit_test(test_bad_headers),  cmocka_unit_test(test_bad_tensors),
        cmocka_unit_test(test_slow_stream),  cmocka_unit_test(test_bad_hashes),
    };
    return cmocka_run_group_tests_name("kv_file", tests, make_path, drop_path);
}
