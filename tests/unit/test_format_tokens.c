/* SPDX-License-Identifier: Apache-2.0 */
/* Token datasets: round trips in every format, the exact Megatron bytes, and damage. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "format/tokens.h"
#include "format/tokens_layout.h"

static char dir[64], path[160];

static const char *in_dir(const char *name)
{
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void put_file(const char *name, const void *data, size_t len)
{
    FILE *f = fopen(in_dir(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    fclose(f);
}

static size_t get_file(const char *name, void *out, size_t cap)
{
    FILE *f = fopen(in_dir(name), "rb");
    assert_non_null(f);
    size_t n = fread(out, 1, cap, f);
    fclose(f);
    return n;
}

static const uint32_t A[] = { 1, 2, 3 }, B[] = { 7 }, C[] = { 4, 5, 6, 65000 };

/* Three documents A, empty, B+C (two sequences). */
static void write_three(const char *name, lm_tokens_writer_opts o)
{
    lm_tokens_writer *w = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_tokens_create(in_dir(name), &o, &w, &e), LM_OK);
    assert_int_equal(lm_tokens_put(w, A, 3, &e), LM_OK);
    assert_int_equal(lm_tokens_end_doc(w, &e), LM_OK);
    assert_int_equal(lm_tokens_end_doc(w, &e), LM_OK);
    assert_int_equal(lm_tokens_put(w, B, 1, &e), LM_OK);
    assert_int_equal(lm_tokens_put(w, C, 4, &e), LM_OK);
    assert_int_equal(lm_tokens_written(w), 8);
    assert_int_equal(lm_tokens_commit(w, &e), LM_OK);
}

static void check_ids(lm_tokens *t)
{
    static const uint32_t want[] = { 1, 2, 3, 7, 4, 5, 6, 65000 };
    uint32_t got[8];
    lm_err e = { 0 };
    assert_int_equal(lm_tokens_count(t), 8);
    for (int64_t at = 0; at <= 8; at++)
        for (int64_t n = 0; at + n <= 8; n++) {
            memset(got, 0xAB, sizeof got);
            assert_int_equal(lm_tokens_read(t, at, n, LM_ANY_ID, got, &e), LM_OK);
            assert_memory_equal(got, want + at, 4 * (size_t)n);
        }
    assert_int_equal(lm_tokens_read(t, 5, 4, LM_ANY_ID, got, &e), LM_EUSAGE);
    assert_int_equal(lm_tokens_max(t, NULL), 65000);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tokens_read(t, 4, 4, 65001, got, &e), LM_OK);
    assert_int_equal(lm_tokens_read(t, 4, 4, 65000, got, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "id 65000 at position 7"));
    assert_int_equal(lm_tokens_read(t, 0, 7, 8, got, &e), LM_OK);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tokens_check(t, 65001, NULL, &e), LM_OK);
    assert_int_equal(lm_tokens_check(t, 65000, NULL, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "id 65000 at position 7"));
}

static void megatron_bytes(void **st)
{
    (void)st;
    static const uint8_t want[] = {
        'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 8, 4, 0, 0, 0, 0,
        0,   0,   0,   4,   0,   0,   0,   0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0,
        4,   0,   0,   0,   0,   0,   0,   0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0,
        0,   0,   0,   0,   0,   8,   0,   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0,
        0,   0,   0,   0,   0,   0,   2,   0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0,
    };
    uint8_t got[512];
    write_three("m", (lm_tokens_writer_opts){ .vocab = 65001 });
    assert_int_equal(get_file("m.idx", got, sizeof got), sizeof want);
    assert_memory_equal(got, want, sizeof want);
    assert_int_equal(get_file("m.bin", got, sizeof got), 16);
}

static void megatron_round_trip(void **st)
{
    (void)st;
    static const char *const spellings[] = { "m", "m.bin", "m.idx" };
    static const int64_t vocabs[] = { 65001, 65499, 65500, 200000 };
    for (int v = 0; v < 4; v++)
        for (int s = 0; s < 3; s++) {
            lm_tokens *t = NULL;
            lm_err e = { 0 };
            write_three("m", (lm_tokens_writer_opts){ .vocab = vocabs[v], .force = true });
            assert_int_equal(lm_tokens_open(in_dir(spellings[s]), 0, -1, &t, &e), LM_OK);
            check_ids(t);
            assert_int_equal(t->id_bytes, v < 2 ? 2 : 4);
            assert_int_equal(lm_tokens_index(t, NULL, &e), LM_OK);
            assert_int_equal(lm_tokens_docs(t), 3);
            assert_int_equal(lm_tokens_doc_start(t, 1), 3);
            assert_int_equal(lm_tokens_doc_start(t, 2), 3);
            assert_int_equal(lm_tokens_doc_start(t, 3), 8);
            assert_int_equal(lm_tokens_doc_of(t, 2), 0);
            assert_int_equal(lm_tokens_doc_of(t, 3), 2);
            assert_int_equal(lm_tokens_doc_of(t, 7), 2);
            lm_tokens_close(t);
        }
}

static void flat_round_trips(void **st)
{
    (void)st;
    static const struct {
        lm_tokens_kind kind;
        int64_t vocab, shard, eot;
        int64_t docs, second;
    } cases[] = {
        { LM_TOKENS_LLMC, 65001, 0, 7, 2, 3 },    { LM_TOKENS_LLMC, 100000, 3, 7, 2, 3 },
        { LM_TOKENS_LLMC, 65001, 0, -1, 1, 8 },   { LM_TOKENS_NANOGPT, 65001, 0, 7, 2, 4 },
        { LM_TOKENS_NANOGPT, 65001, 2, 3, 2, 3 }, { LM_TOKENS_NANOGPT, 65001, 0, -1, 1, 8 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[16];
        lm_tokens *t = NULL;
        lm_err e = { 0 };
        snprintf(name, sizeof name, "f%zu", i);
        write_three(name, (lm_tokens_writer_opts){ .kind = cases[i].kind,
                                                   .vocab = cases[i].vocab,
                                                   .shard_tokens = cases[i].shard });
        assert_int_equal(lm_tokens_open(in_dir(name), LM_TOKENS_AUTO, cases[i].eot, &t, &e), LM_OK);
        assert_int_equal(lm_tokens_format(t), cases[i].kind);
        check_ids(t);
        assert_int_equal(lm_tokens_index(t, NULL, &e), LM_OK);
        assert_int_equal(lm_tokens_docs(t), cases[i].docs);
        assert_int_equal(lm_tokens_doc_start(t, 1), cases[i].second);
        assert_int_equal(t->kind == LM_TOKENS_MEGATRON ? t->sequences : (int64_t)t->n_parts,
                         cases[i].shard == 3   ? 3
                         : cases[i].shard == 2 ? 4
                                               : 1);
        lm_tokens_close(t);
    }
}

/* Bare ids of 32 bits are distinguished from those of 16, also with a small vocabulary. */
static void wide_ids(void **st)
{
    (void)st;
    enum { N = 200 };
    uint32_t wide[N], back[N];
    uint16_t small[N];
    for (uint32_t i = 0; i < N; i++) {
        wide[i] = i * 640;
        small[i] = (uint16_t)(i * 7 % 11);
    }
    put_file("wide.bin", wide, sizeof wide);
    put_file("small.bin", small, sizeof small);
    for (int s = 0; s < 2; s++) {
        lm_tokens *t = NULL;
        lm_err e = { 0 };
        assert_int_equal(
            lm_tokens_open(in_dir(s ? "small.bin" : "wide.bin"), LM_TOKENS_AUTO, -1, &t, &e), 0);
        assert_int_equal(lm_tokens_format(t), LM_TOKENS_NANOGPT);
        assert_int_equal(t->id_bytes, s ? 2 : 4);
        assert_int_equal(lm_tokens_count(t), N);
        assert_int_equal(lm_tokens_read(t, 0, N, LM_ANY_ID, back, &e), 0);
        for (uint32_t i = 0; i < N; i++)
            assert_int_equal(back[i], s ? small[i] : wide[i]);
        lm_tokens_close(t);
    }
}

/* Document starts over many chunks and threads equal a plain loop. */
static void starts_in_parallel(void **st)
{
    (void)st;
    enum { N = 3 * 1048576 + 777 };
    static uint16_t ids[N];
    static int64_t want[N];
    int64_t docs = 0;
    lm_tokens *t = NULL;
    lm_par *p = NULL;
    lm_err e = { 0 };
    for (int64_t i = 0; i < N; i++)
        ids[i] = (uint16_t)((uint64_t)i * 2654435761u >> 7) % 97;
    ids[1048575] = ids[1048576] = 5;
    for (int64_t i = 0; i < N; i++)
        if (i == 0 || ids[i - 1] == 5)
            want[docs++] = i;
    put_file("big.bin", ids, sizeof ids);
    assert_int_equal(lm_par_new(&p, 2, &e), LM_OK);
    assert_int_equal(lm_tokens_open(in_dir("big.bin"), 0, 5, &t, &e), LM_OK);
    assert_int_equal(lm_tokens_index(t, p, &e), LM_OK);
    assert_int_equal(lm_tokens_docs(t), docs);
    for (int64_t d = 0; d < docs; d++)
        assert_int_equal(lm_tokens_doc_start(t, d), want[d]);
    assert_int_equal(lm_tokens_max(t, p), 96);
    lm_tokens_close(t);
    lm_par_free(p);
}

static void expect_bad(const char *name, lm_code code, const char *part)
{
    lm_tokens *t = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_tokens_open(in_dir(name), LM_TOKENS_AUTO, -1, &t, &e), code);
    if (!strstr(e.what, part))
        fail_msg("expected '%s' in '%s'", part, e.what);
}

/* Every byte of the .idx, changed: refused, or read as another valid index; never a wild read. */
static void damaged_index(void **st)
{
    (void)st;
    uint8_t good[512], bad[512];
    write_three("d", (lm_tokens_writer_opts){ .vocab = 65001 });
    size_t n = get_file("d.idx", good, sizeof good);
    for (size_t cut = 0; cut < n; cut++) {
        put_file("d.idx", good, cut);
        expect_bad("d", LM_EFORMAT, "");
    }
    for (size_t i = 0; i < n * 8; i++) {
        lm_tokens *t = NULL;
        lm_err e = { 0 };
        memcpy(bad, good, n);
        bad[i / 8] ^= (uint8_t)(1 << i % 8);
        put_file("d.idx", bad, n);
        if (lm_tokens_open(in_dir("d"), LM_TOKENS_AUTO, -1, &t, &e))
            continue;
        for (int64_t d = 0; d <= lm_tokens_docs(t); d++)
            assert_in_range(lm_tokens_doc_start(t, d), 0, lm_tokens_count(t));
        lm_tokens_max(t, NULL);
        lm_tokens_close(t);
    }
    memcpy(bad, good, n);
    bad[17] = 7;
    put_file("d.idx", bad, n);
    expect_bad("d", LM_EFORMAT, "type code 7");
    put_file("d.idx", good, n);
    put_file("d.bin", good, 14);
    expect_bad("d", LM_EFORMAT, "the .bin has 14");
    unlink(in_dir("d.bin"));
    expect_bad("d", LM_EIO, "cannot open");
}

static void damaged_shards(void **st)
{
    (void)st;
    uint8_t bytes[2048];
    write_three("s", (lm_tokens_writer_opts){ .kind = LM_TOKENS_LLMC, .vocab = 65001 });
    size_t n = get_file("s.bin", bytes, sizeof bytes);
    put_file("s.bin", bytes, n - 2);
    expect_bad("s", LM_EFORMAT, "declares 8 ids (1040 bytes), the file has 1038");
    bytes[4] = 9;
    put_file("s.bin", bytes, n);
    expect_bad("s", LM_EFORMAT, "version 9, supported is 1");
    put_file("short.bin", bytes, 5);
    expect_bad("short", LM_EFORMAT, "its header alone has 1024");
    put_file("odd.bin", "\1\0\2\0\3", 5);
    expect_bad("odd", LM_EFORMAT, "16-bit");
    expect_bad("nothing", LM_EIO, "nothing_000000.bin");
    write_three("h", (lm_tokens_writer_opts){
                         .kind = LM_TOKENS_NANOGPT, .vocab = 65001, .shard_tokens = 2 });
    unlink(in_dir("h_000002.bin"));
    expect_bad("h", LM_EFORMAT, "shard h_000002.bin is missing");
}

static void refusals(void **st)
{
    (void)st;
    lm_tokens_writer *w = NULL;
    lm_err e = { 0 };
    lm_tokens_writer_opts o = { .vocab = 10 };
    write_three("r", (lm_tokens_writer_opts){ .vocab = 65001 });
    assert_int_equal(lm_tokens_create(in_dir("r"), &o, &w, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_tokens_create(in_dir("r2"), &o, &w, &e), LM_OK);
    assert_int_equal(lm_tokens_put(w, C, 4, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "id 65000 does not fit a vocabulary of 10"));
    lm_tokens_drop(w);
    assert_int_not_equal(access(in_dir("r2.bin"), F_OK), 0);
    o = (lm_tokens_writer_opts){ .kind = LM_TOKENS_NANOGPT, .vocab = 65537 };
    e = (lm_err){ 0 };
    assert_int_equal(lm_tokens_create(in_dir("r3"), &o, &w, &e), LM_EUSAGE);
}

static void negative_and_wide_ids(void **st)
{
    (void)st;
    static const struct {
        uint8_t code, bytes;
        uint64_t value;
        uint32_t want;
    } cases[] = {
        { 1, 1, 200, 200 },      { 2, 1, 0xFF, UINT32_MAX },       { 3, 2, 0x8000, UINT32_MAX },
        { 4, 4, 70000, 70000 },  { 4, 4, 0xFFFFFFFF, UINT32_MAX }, { 5, 8, 1ull << 40, UINT32_MAX },
        { 5, 8, 123456, 123456 }
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t idx[62] = LM_IDX_MAGIC;
        uint32_t got;
        lm_tokens *t = NULL;
        lm_err e = { 0 };
        idx[9] = 1;
        idx[17] = cases[i].code;
        idx[18] = 1;
        idx[26] = 2;
        idx[34] = 1; /* length; offset 0 at 38; documents 0, 1 at 46 */
        idx[54] = 1;
        put_file("n.idx", idx, sizeof idx);
        put_file("n.bin", &cases[i].value, cases[i].bytes);
        assert_int_equal(lm_tokens_open(in_dir("n"), 0, -1, &t, &e), LM_OK);
        assert_int_equal(lm_tokens_read(t, 0, 1, LM_ANY_ID, &got, &e), LM_OK);
        assert_int_equal(got, cases[i].want);
        lm_tokens_close(t);
    }
}

static int setup(void **st)
{
    (void)st;
    snprintf(dir, sizeof dir, "/tmp/lm-tokens-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **st)
{
    (void)st;
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(megatron_bytes),
        cmocka_unit_test(megatron_round_trip),
        cmocka_unit_test(flat_round_trips),
        cmocka_unit_test(starts_in_parallel),
        cmocka_unit_test(wide_ids),
        cmocka_unit_test(damaged_index),
        cmocka_unit_test(damaged_shards),
        cmocka_unit_test(refusals),
        cmocka_unit_test(negative_and_wide_ids),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
