/* SPDX-License-Identifier: Apache-2.0 */
/* Documents from files and archives: cutting, decoding, policies, damage. */
#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/hash.h"
#include "format/input.h"
#include "format/jsonl.h"

static char dir[64], path[128];

static const char *put_file(const char *name, const void *data, size_t len)
{
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    fclose(f);
    return path;
}

/* A tar (or raw) archive with a filter, holding n members. */
static size_t pack(char *out, size_t cap, bool tar, int filter, int n, const char *const *names,
                   const char *const *texts, const size_t *lens)
{
    size_t used = 0;
    struct archive *a = archive_write_new();
    if (tar)
        archive_write_set_format_pax_restricted(a);
    else
        archive_write_set_format_raw(a);
    if (filter)
        archive_write_add_filter(a, filter);
    assert_int_equal(archive_write_open_memory(a, out, cap, &used), ARCHIVE_OK);
    for (int i = 0; i < n; i++) {
        struct archive_entry *en = archive_entry_new();
        archive_entry_set_pathname(en, names[i]);
        archive_entry_set_size(en, (la_int64_t)lens[i]);
        archive_entry_set_filetype(en, AE_IFREG);
        archive_entry_set_perm(en, 0644);
        assert_int_equal(archive_write_header(a, en), ARCHIVE_OK);
        archive_write_data(a, texts[i], lens[i]);
        archive_entry_free(en);
    }
    archive_write_close(a);
    archive_write_free(a);
    return used;
}

/* All documents of one file as "text|text|", or the error. */
static lm_code slurp(const lm_input_opts *o, const char *p, char *out, size_t cap, lm_err *e)
{
    lm_input *in = NULL;
    lm_doc doc = { 0 };
    bool got = true;
    size_t n = 0;
    lm_code rc = lm_input_open(o, &p, 1, &in, e);
    out[0] = 0;
    while (!rc && got) {
        rc = lm_input_read(in, &doc, &got, e);
        if (!rc && got && n + doc.len + 2 < cap) {
            memcpy(out + n, doc.text, doc.len);
            n += doc.len;
            out[n++] = '|';
            out[n] = 0;
        }
    }
    if (!rc && cap > 900) { /* the digest is that of the file as stored */
        static char all[1 << 20];
        FILE *f = fopen(p, "rb");
        size_t len = fread(all, 1, sizeof all, f);
        fclose(f);
        assert_int_equal(lm_input_digest(in, 0), lm_hash64(all, len, 0));
    }
    lm_doc_fini(&doc);
    lm_input_close(in);
    return rc;
}

static void expect_opts(const lm_input_opts *o, const char *name, const char *data, size_t len,
                        const char *want)
{
    char out[4096];
    lm_err e = { 0 };
    assert_int_equal(slurp(o, put_file(name, data, len), out, sizeof out, &e), LM_OK);
    assert_string_equal(out, want);
}

static void expect_fail(const lm_input_opts *o, const char *name, const char *data, size_t len,
                        lm_code code, const char *part)
{
    char out[4096];
    lm_err e = { 0 };
    assert_int_equal(slurp(o, put_file(name, data, len), out, sizeof out, &e), code);
    if (!strstr(e.what, part) && !strstr(e.where, part))
        fail_msg("expected '%s' in '%s: %s'", part, e.where, e.what);
}

#define LIT(s) s, sizeof(s) - 1

static void jsonl_lines(void **st)
{
    (void)st;
    const lm_input_opts o = { 0 };
    expect_opts(&o, "a.jsonl",
                LIT("{\"text\":\"one\"}\n\n  \n{\"id\":99999999999999999999,\"text\""
                    ":\"a\\n\\u00e9\\ud83d\\ude00\"}\r\n{\"text\": \"\"}"),
                "one|a\n\xC3\xA9\xF0\x9F\x98\x80||");
    expect_opts(&o, "b", LIT("\xEF\xBB\xBF \n{\"te\\u0078t\":\"bom\"}"), "bom|");
    expect_fail(&o, "c.jsonl", LIT("{\"text\":\"x\"}\n{\"text\":1}\n"), LM_EFORMAT, "c.jsonl:2");
    expect_fail(&o, "c.jsonl", LIT("{\"txt\":\"x\"}\n"), LM_EFORMAT, "no field 'text'; it has");
    expect_fail(&o, "c.jsonl", LIT("{\"text\":\"x\",}\n"), LM_EFORMAT, "column 13");
    expect_fail(&o, "c.jsonl", LIT("{\"text\":\"x\"} x\n"), LM_EFORMAT, "bytes after");
    expect_fail(&o, "c.jsonl", LIT("{\"text\":\"x\",\"text\":\"y\"}\n"), LM_EFORMAT, "twice");
    expect_fail(&o, "c.jsonl", LIT("[1]\n"), LM_EFORMAT, "expected '{'");
    expect_fail(&o, "c.jsonl", LIT("{\"text\":\"x\n"), LM_EFORMAT, "c.jsonl:1");
    const char *const field[] = { "body" };
    const lm_input_opts body = { .field = field, .fields = 1 };
    expect_opts(&body, "d.ndjson", LIT("{\"text\":1,\"body\":\"b\",\"n\":{\"body\":2}}"), "b|");
}

static void deep_nesting_is_refused(void **st)
{
    (void)st;
    const lm_input_opts o = { 0 };
    static char deep[200000];
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"a\":", 5);
    expect_fail(&o, "deep.jsonl", deep, sizeof deep, LM_EFORMAT, "512 levels");
}

static void plain_text(void **st)
{
    (void)st;
    lm_input_opts o = { 0 };
    expect_opts(&o, "a.txt", LIT("{one\n\ntwo\n"), "{one\n\ntwo\n|");
    expect_opts(&o, "empty.txt", LIT(" \n\n"), "");
    expect_opts(&o, "zero.txt", LIT(""), "");
    o.split = LM_SPLIT_BLANK;
    expect_opts(&o, "a.txt", LIT("\n\none\nmore\n \ntwo\n\n\n"), "one\nmore|two|");
    o.split = LM_SPLIT_STRING;
    o.separator = "<|eot|>";
    expect_opts(&o, "a.txt", LIT("<|eot|>one\n<|eot|>\ntwo<|eo\n<|eot|><|eot|>three"),
                "one|two<|eo|three|");
}

/* A separator on every position around the borders of the blocks that a decoder hands out. */
static void separator_across_blocks(void **st)
{
    (void)st;
    static char big[300000], out[1 << 20];
    for (size_t cut = 262140; cut < 262148; cut++) {
        lm_err e = { 0 };
        memset(big, 'x', sizeof big);
        memcpy(big + cut, "<|sep|>", 7);
        const lm_input_opts o = { .split = LM_SPLIT_STRING, .separator = "<|sep|>" };
        assert_int_equal(slurp(&o, put_file("big.txt", big, sizeof big), out, sizeof out, &e), 0);
        assert_int_equal(strlen(out), sizeof big - 7 + 2);
        assert_int_equal(out[cut], '|');
    }
}

static void utf8_policies(void **st)
{
    (void)st;
    lm_input_opts o = { 0 };
    expect_fail(&o, "u.jsonl", LIT("{\"text\":\"ok\"}\n{\"text\":\"\xFF\"}\n"), LM_EFORMAT,
                "byte 23");
    expect_fail(&o, "u.txt", LIT("\xFF\xFEh\0"), LM_EFORMAT, "UTF-16");
    expect_fail(&o, "s.jsonl", LIT("{\"text\":\"\\ud800\"}"), LM_EFORMAT, "lone surrogates");
    o.utf8 = LM_UTF8_SKIP;
    expect_opts(&o, "u.jsonl",
                LIT("{\"text\":\"ok\"}\n{\"text\":\"\xFF\"}\n{\"text\":\"\\udc00\"}\n"), "ok|");
    o.utf8 = LM_UTF8_REPLACE;
    expect_opts(&o, "u.jsonl", LIT("{\"text\":\"\xF0\x9F\x98z\xC0\xAF\"}\n{\"text\":\"\\udc00\"}"),
                "\xEF\xBF\xBDz\xEF\xBF\xBD\xEF\xBF\xBD|\xEF\xBF\xBD|");
}

static void archives_and_filters(void **st)
{
    (void)st;
    static char inner[1 << 16], outer[1 << 16];
    const lm_input_opts o = { 0 };
    const char *text = "{\"text\":\"packed\"}\n";
    size_t len = strlen(text);
    static const int filters[] = { ARCHIVE_FILTER_ZSTD, ARCHIVE_FILTER_GZIP, ARCHIVE_FILTER_XZ,
                                   ARCHIVE_FILTER_BZIP2, ARCHIVE_FILTER_LZ4 };
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++) {
        const char *name = "x";
        size_t n = pack(outer, sizeof outer, false, filters[i], 1, &name, &text, &len);
        expect_opts(&o, "packed", outer, n, "packed|");
        n = n > 12 ? n - 6 : n;
        expect_fail(&o, "packed", outer, n, LM_EFORMAT, "damaged or truncated");
    }
    const char *one = "x";
    size_t zn = pack(inner, sizeof inner, false, ARCHIVE_FILTER_ZSTD, 1, &one, &text, &len);
    const char *names[] = { "a.jsonl.zst", "../../etc/b.txt", "empty", "c\x01.txt" };
    const char *texts[] = { inner, "plain", "", "last" };
    size_t lens[] = { zn, 5, 0, 4 };
    size_t n = pack(outer, sizeof outer, true, ARCHIVE_FILTER_GZIP, 4, names, texts, lens);
    expect_opts(&o, "t.tar.gz", outer, n, "packed|plain|last|");
}

/* Too short for its magic number, or something else: not taken for text. */
static void packed_by_name_alone(void **st)
{
    (void)st;
    static char tar[1 << 16];
    const lm_input_opts o = { 0 };
    const char *names[] = { "in.txt.gz", "good.txt" }, *texts[] = { "x", "y" };
    size_t lens[] = { 1, 1 }, n = pack(tar, sizeof tar, true, 0, 2, names, texts, lens);
    expect_fail(&o, "a.jsonl.zst", LIT("("), LM_EFORMAT, "its name ends in .zst");
    expect_fail(&o, "a.txt.gz", LIT(""), LM_EFORMAT, "its name ends in .gz");
    expect_fail(&o, "a.tar", LIT("some text\n"), LM_EFORMAT, "its name ends in .tar");
    expect_fail(&o, "b.tar", tar, n, LM_EFORMAT, "its name ends in .gz");
}

static void places_are_counted(void **st)
{
    (void)st;
    const lm_input_opts o = { 0 };
    lm_input *in = NULL;
    lm_doc doc = { 0 };
    lm_err e = { 0 };
    bool got;
    char a[128], b[128];
    snprintf(a, sizeof a, "%s", put_file("a.jsonl", LIT("\n{\"text\":\"1\"}\n")));
    snprintf(b, sizeof b, "%s", put_file("b.jsonl", LIT("{\"text\":\"2\"}\n{\"text\":\"3\"}\n")));
    const char *paths[] = { a, b };
    assert_int_equal(lm_input_open(&o, paths, 2, &in, &e), LM_OK);
    assert_int_equal(lm_input_read(in, &doc, &got, &e), LM_OK);
    assert_true(got && doc.line == 2 && doc.offset == 1 && doc.operand == 0 && doc.index == 0);
    assert_int_equal(lm_input_read(in, &doc, &got, &e), LM_OK);
    assert_int_equal(lm_input_read(in, &doc, &got, &e), LM_OK);
    assert_true(got && doc.line == 2 && doc.offset == 13 && doc.operand == 1 && doc.index == 2);
    assert_string_equal(doc.source, b);
    assert_int_equal(lm_input_read(in, &doc, &got, &e), LM_OK);
    assert_false(got);
    assert_int_equal(lm_input_stat(in).bytes, lm_input_stat(in).total);
    lm_doc_fini(&doc);
    lm_input_close(in);
}

static void lines_are_written_back_whole(void **st)
{
    (void)st;
    const lm_input_opts o = { 0 };
    lm_input *in = NULL;
    lm_doc doc = { 0 };
    lm_err e = { 0 };
    lm_buf out = { 0 };
    bool got;
    const char *p = put_file("w.jsonl", LIT("{\"id\": 1e400, \"text\": \"a\\/b\", \"z\":[]}\r\n"));
    assert_int_equal(lm_input_open(&o, &p, 1, &in, &e), LM_OK);
    assert_int_equal(lm_input_read(in, &doc, &got, &e), LM_OK);
    assert_int_equal(lm_doc_write(&o, &doc, doc.text, doc.len, &out, &e), LM_OK);
    assert_int_equal(lm_doc_write(&o, &doc, LIT("q\"\n\x01"), &out, &e), LM_OK);
    assert_string_equal(out.data, "{\"id\": 1e400, \"text\": \"a\\/b\", \"z\":[]}\n"
                                  "{\"id\": 1e400, \"text\": \"q\\\"\\n\\u0001\", \"z\":[]}\n");
    lm_buf_fini(&out);
    lm_doc_fini(&doc);
    lm_input_close(in);
}

static void bad_requests(void **st)
{
    (void)st;
    char out[1024];
    lm_input_opts o = { 0 };
    lm_err e = { 0 };
    assert_int_equal(slurp(&o, "/nonexistent/x", out, 100, &e), LM_EIO);
    e = (lm_err){ 0 };
    char folder[100];
    snprintf(folder, sizeof folder, "%s/folder", dir);
    assert_int_equal(mkdir(folder, 0777), 0);
    assert_int_equal(slurp(&o, folder, out, 100, &e), LM_EUSAGE);
    o.max_doc = 10;
    expect_fail(&o, "long.txt", LIT("more than ten bytes"), LM_ELIMIT, "limit of 10");
    o = (lm_input_opts){ .split = LM_SPLIT_STRING, .separator = "" };
    expect_fail(&o, "x.txt", LIT("x"), LM_EUSAGE, "empty");
}

static int setup(void **st)
{
    (void)st;
    snprintf(dir, sizeof dir, "/tmp/lm-input-XXXXXX");
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
        cmocka_unit_test(jsonl_lines),        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(plain_text),         cmocka_unit_test(separator_across_blocks),
        cmocka_unit_test(utf8_policies),      cmocka_unit_test(archives_and_filters),
        cmocka_unit_test(places_are_counted), cmocka_unit_test(lines_are_written_back_whole),
        cmocka_unit_test(bad_requests),       cmocka_unit_test(packed_by_name_alone),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
