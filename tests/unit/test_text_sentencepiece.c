/* SPDX-License-Identifier: Apache-2.0 */
/* test_text_sentencepiece.c -- tokenizer.model files: ids of `sentencepiece`, unsupported kinds,
 * and malformed files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "text/added_list.h"
#include "text/sentencepiece.h"
#include "text/tokenizer.h"

static void golden_path(const char *name, char *path, size_t size)
{
    const char *r = getenv("LM_TEST_ROOT");
    snprintf(path, size, "%s/tests/golden/sentencepiece/%s", r ? r : ".", name);
}

static void check_row(const lm_tokenizer *t, lm_tok_scratch *s, const json_t *row, const char *name)
{
    const json_t *text = json_object_get(row, "text"), *want = json_object_get(row, "ids");
    const json_t *decoded = json_object_get(row, "decoded");
    const char *x = json_string_value(text);
    lm_ids ids = { 0 };
    lm_buf back = { 0 };
    lm_err e = { 0 };
    bool same, unk = false;

    assert_int_equal(lm_tokenizer_encode(t, s, x, strlen(x), false, &ids, &e), 0);
    same = ids.n == json_array_size(want);
    for (size_t i = 0; same && i < ids.n; i++) {
        same = ids.v[i] == (uint32_t)json_integer_value(json_array_get(want, i));
        unk |= (int64_t)ids.v[i] == lm_tokenizer_unk(t);
    }
    if (!same)
        print_error("%s: other ids for \"%s\"\n", name, x);
    assert_true(same);
    if (!unk) {
        assert_int_equal(lm_tokenizer_decode(t, ids.v, ids.n, true, &back, &e), 0);
        assert_int_equal(back.len, json_string_length(decoded ? decoded : text));
        if (back.len)
            assert_memory_equal(back.data, json_string_value(decoded ? decoded : text), back.len);
    }
    ids.n = 0; /* without a configuration, <s> comes first */
    assert_int_equal(lm_tokenizer_encode(t, s, x, strlen(x), true, &ids, &e), 0);
    assert_int_equal(ids.n, json_array_size(want) + 1);
    assert_int_equal(ids.v[0], lm_tokenizer_bos(t));
    lm_ids_fini(&ids);
    lm_buf_fini(&back);
}

static void golden(void **state)
{
    static const char *const names[] = { "llama",          "no-fallback",       "strip",
                                         "user-no-prefix", "unigram-no-prefix", "unigram-strip" };
    char path[512], file[64];
    json_t *j = NULL;
    lm_err e = { 0 };

    (void)state;
    golden_path("ids.json", path, sizeof path);
    assert_int_equal(lm_json_load(path, 1 << 24, &j, &e), 0);
    for (int k = 0; k < 6; k++) {
        const json_t *rows = json_object_get(j, names[k]), *row;
        lm_tokenizer *t = NULL;
        lm_tok_scratch *s = NULL;
        size_t i;
        snprintf(file, sizeof file, "%s.model", names[k]);
        golden_path(file, path, sizeof path);
        if (lm_tokenizer_load(path, &t, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
        assert_true(json_array_size(rows) > 10);
        json_array_foreach(rows, i, row) check_row(t, s, row, names[k]);
        lm_tok_scratch_free(s);
        lm_tokenizer_free(t);
    }
    json_decref(j);
}

/* ---- Files made by hand ---- */

static void add_field(lm_buf *b, int number, const lm_buf *message)
{
    lm_err e = { 0 };
    char head[3] = { (char)(number << 3 | 2), (char)((message->len & 0x7F) | 0x80),
                     (char)(message->len >> 7) };
    assert_int_equal(lm_buf_add(b, head, 3, &e), 0);
    assert_int_equal(lm_buf_add(b, message->data, message->len, &e), 0);
}

static void add_piece(lm_buf *b, const char *text, float score, int type)
{
    lm_buf m = { 0 };
    lm_err e = { 0 };
    char head[2] = { 1 << 3 | 2, (char)strlen(text) }, tail[2] = { 3 << 3, (char)type };
    char mark = 2 << 3 | 5;
    lm_buf_add(&m, head, 2, &e);
    lm_buf_add(&m, text, strlen(text), &e);
    lm_buf_add(&m, &mark, 1, &e);
    lm_buf_add(&m, &score, 4, &e);
    lm_buf_add(&m, tail, 2, &e);
    add_field(b, 1, &m);
    lm_buf_fini(&m);
}

/* Field `number` of message `message` is `value`, one byte. */
static void add_setting(lm_buf *b, int message, int number, int value)
{
    lm_buf m = { 0 };
    lm_err e = { 0 };
    char text[3] = { (char)((number << 3 & 0x7F) | (number > 15 ? 0x80 : 0)), (char)(number >> 4),
                     (char)value };
    if (number > 15)
        lm_buf_add(&m, text, 3, &e);
    else
        lm_buf_add(&m, (char[]){ text[0], text[2] }, 2, &e);
    add_field(b, message, &m);
    lm_buf_fini(&m);
}

enum { TRAINER = 2, NORMAL = 3, KIND = 3, BPE = 2 };

/* <unk> <s> </s>, U+2581, a, b, ab: what most cases begin with. */
static void add_basis(lm_buf *b)
{
    add_piece(b, "<unk>", 0, 2);
    add_piece(b, "<s>", 0, 3);
    add_piece(b, "</s>", 0, 3);
    add_piece(b, "\xE2\x96\x81", -4, 1);
    add_piece(b, "a", -5, 1);
    add_piece(b, "b", -6, 1);
    add_piece(b, "ab", -1, 1);
    add_setting(b, TRAINER, KIND, BPE);
}

static void refused(lm_buf *b, const char *what)
{
    lm_buf json = { 0 }, config = { 0 };
    lm_err e = { 0 };
    assert_int_equal(
        lm_sentencepiece_json(b->data, b->len, "x/tokenizer.model", &json, &config, &e),
        LM_EFORMAT);
    assert_string_equal(e.where, "x/tokenizer.model");
    if (!strstr(e.what, what))
        fail_msg("'%s' does not say '%s'", e.what, what);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
    lm_buf_fini(b);
}

static void refusals(void **state)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };

    (void)state;
    add_basis(&b);
    add_setting(&b, TRAINER, KIND, 3);
    refused(&b, "a word SentencePiece model");
    add_basis(&b);
    add_setting(&b, TRAINER, KIND, 9);
    refused(&b, "unknown kind 9");
    add_basis(&b);
    add_setting(&b, TRAINER, 24, 1);
    refused(&b, "white space as a suffix");
    add_basis(&b);
    add_setting(&b, TRAINER, 35, 1);
    refused(&b, "needs 256 pieces of type byte, and 0 are there");
    add_basis(&b);
    add_piece(&b, "ba", -2, 5);
    refused(&b, "unused pieces that occur while words are merged");
    add_basis(&b);
    add_piece(&b, "<x>\xE2\x96\x81", -2, 4);
    refused(&b, "user-defined pieces that end in white space that the normaliser removes");
    add_basis(&b);
    add_piece(&b, "zz", -2, 7);
    refused(&b, "a piece of unknown type");
    add_basis(&b);
    add_piece(&b, "zz", -2, 6);
    refused(&b, "piece 7 is of type byte and not");
    add_basis(&b);
    add_piece(&b, "a\xff", -2, 1);
    refused(&b, "piece 7 is empty, not UTF-8");
    add_piece(&b, "a", -2, 1);
    add_setting(&b, TRAINER, KIND, BPE);
    refused(&b, "no unknown piece");
    lm_buf_add(&b, "IQ== 0\nIg== 1\n", 14, &e);
    refused(&b, "in tiktoken's format");
    lm_buf_add(&b, "{\"model\":{}}", 12, &e);
    refused(&b, "no SentencePiece model");
    lm_buf_add(&b, "", 0, &e);
    refused(&b, "no piece at byte 0");
    add_basis(&b);
    lm_buf_add(&b, "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 11, &e);
    refused(&b, "a field is longer than the rest of the file");
}

static void unused_pieces_that_no_word_meets(void **state)
{
    lm_buf b = { 0 }, config = { 0 };
    lm_tokenizer *t = NULL;
    lm_tok_scratch *s = NULL;
    lm_ids ids = { 0 };
    lm_err e = { 0 };

    (void)state;
    add_basis(&b);
    add_piece(&b, "<unused0>", 0, 5); /* 7 */
    add_piece(&b, "c", -7, 5);        /* a piece of one character is still found */
    assert_int_equal(lm_tokenizer_from_text(b.data, b.len, &config, "x.model", &t, &e), 0);
    assert_int_equal(lm_tokenizer_vocab_size(t), 9);
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    assert_int_equal(lm_tokenizer_encode(t, s, "  abc", 5, true, &ids, &e), 0);
    assert_int_equal(ids.n, 4); /* <s> U+2581 ab c: white space before a text is removed */
    assert_int_equal(ids.v[0] << 24 | ids.v[1] << 16 | ids.v[2] << 8 | ids.v[3], 0x01030608);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    lm_buf_fini(&b);
    lm_buf_fini(&config);
}

static void configuration_decides_about_bos(void **state)
{
    static const char text[] = "{\"add_bos_token\":false,\"add_eos_token\":true}";
    lm_buf b = { 0 }, config = { 0 };
    lm_tokenizer *t = NULL;
    lm_tok_scratch *s = NULL;
    lm_ids ids = { 0 };
    lm_err e = { 0 };

    (void)state;
    add_basis(&b);
    assert_int_equal(lm_buf_add(&config, text, sizeof text - 1, &e), 0);
    assert_int_equal(lm_tokenizer_from_text(b.data, b.len, &config, "x.model", &t, &e), 0);
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    assert_int_equal(lm_tokenizer_encode(t, s, "a", 1, true, &ids, &e), 0);
    assert_int_equal(ids.n, 3);
    assert_int_equal(ids.v[0] << 16 | ids.v[1] << 8 | ids.v[2], 0x030402);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    config.len = 0;
    assert_int_equal(lm_buf_add(&config, "{", 1, &e), 0);
    assert_int_equal(lm_tokenizer_from_text(b.data, b.len, &config, "x/y.model", &t, &e),
                     LM_EFORMAT);
    assert_string_equal(e.where, "x/tokenizer_config.json");
    lm_buf_fini(&b);
    lm_buf_fini(&config);
}

static lm_code with_config(const char *config, const char *added, lm_tokenizer **t, lm_err *e)
{
    lm_buf b = { 0 }, c = { 0 }, a = { 0 };
    lm_code rc = LM_OK;
    *e = (lm_err){ 0 };
    *t = NULL;
    add_basis(&b); /* seven pieces */
    lm_buf_add(&c, config, strlen(config), e);
    lm_buf_add(&a, added, strlen(added), e);
    if (a.len)
        rc = lm_added_list_take(&c, &a, "x/added_tokens.json", e);
    if (!rc)
        rc = lm_tokenizer_from_text(b.data, b.len, &c, "x/y.model", t, e);
    lm_buf_fini(&a);
    lm_buf_fini(&b);
    lm_buf_fini(&c);
    return rc;
}

static void added_tokens(void **state)
{
    static const char config[] =
        "{\"added_tokens_decoder\":{\"0\":{\"content\":\"<unk>\",\"special\":true},"
        "\"8\":{\"content\":\"<pad>\",\"special\":true},\"7\":{\"content\":\"<x>\"}}}";
    static const char *const bad[][3] = {
        { "{\"added_tokens_decoder\":[]}", "", "is not an object" },
        { "{\"added_tokens_decoder\":{\"7x\":{\"content\":\"a\"}}}", "", "is not a number" },
        { "{\"added_tokens_decoder\":{\"99999\":{\"content\":\"z\"}}}", "", "is not a number" },
        { "{\"added_tokens_decoder\":{\"7\":{}}}", "", "has no \"content\"" },
        { "{\"added_tokens_decoder\":{\"5\":{\"content\":\"q\"}}}", "",
          "is 'q', the model's piece 'b'" },
        { "", "{\"q\":5}", "is 'q', the model's piece 'b'" },
        { "", "{\"q\":\"5\"}", "\"q\" has no id" },
        { "", "{\"q\":7,\"r\":7}", "two added tokens have the id 7" },
        { "", "[]", "is not an object" },
    };
    lm_tokenizer *t;
    lm_tok_scratch *s;
    lm_ids ids = { 0 };
    lm_err e;

    (void)state;
    assert_int_equal(with_config(config, "{\"ignored\":9}", &t, &e), 0);
    assert_int_equal(lm_tokenizer_vocab_size(t), 9);
    assert_true(lm_tokenizer_is_special(t, 8) && !lm_tokenizer_is_special(t, 7));
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    assert_int_equal(lm_tokenizer_encode(t, s, "a<x>", 4, false, &ids, &e), 0);
    assert_int_equal(ids.n, 3);
    assert_int_equal(ids.v[2], 7);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    assert_int_equal(with_config("{\"pad_token\":\"<p>\"}", "{\"<p>\":7,\"<q>\":8}", &t, &e), 0);
    assert_int_equal(lm_tokenizer_pad(t), 7);
    assert_true(lm_tokenizer_is_special(t, 7) && !lm_tokenizer_is_special(t, 8));
    lm_tokenizer_free(t);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(with_config(bad[i][0], bad[i][1], &t, &e), LM_EFORMAT);
        if (!strstr(e.what, bad[i][2]) || strncmp(e.where, "x/", 2) != 0)
            fail_msg("%s: '%s' does not say '%s'", e.where, e.what, bad[i][2]);
    }
}

/* Every prefix, and every byte changed: a tokenizer, or an error that says where. */
static void damage(void **state)
{
    lm_buf whole = { 0 }, json = { 0 }, config = { 0 };
    char path[512];
    lm_err e = { 0 };

    (void)state;
    golden_path("no-fallback.model", path, sizeof path);
    assert_int_equal(lm_file_read(path, 1 << 20, &whole, &e), 0);
    for (size_t i = 0; i < 2 * whole.len; i++) {
        size_t at = i / 2, len = i & 1 ? whole.len : at;
        char *copy = malloc(len + 1),
             keep = 0; /* its own block, so that a reader beyond it shows */
        assert_non_null(copy);
        memcpy(copy, whole.data, len);
        if (i & 1) {
            keep = copy[at];
            copy[at] = (char)(keep ^ (1 << (at % 8)));
        }
        json.len = config.len = 0;
        e = (lm_err){ 0 };
        if (lm_sentencepiece_json(copy, len, "damaged", &json, &config, &e))
            assert_true(e.code && e.what[0] && e.where[0]);
        free(copy);
    }
    lm_buf_fini(&whole);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
}

/* T5's model: no bos, </s> behind a text, and sentinels numbered down from the last id. */
static void t5(void **state)
{
    static const struct {
        const char *config;
        uint32_t ids[4];
    } rows[] = {
        { "", { 104, 4, 5, 1 } },
        { "{\"tokenizer_class\":\"T5Tokenizer\",\"extra_ids\":2}", { 6, 4, 5, 1 } },
    };
    lm_buf b = { 0 }, config = { 0 };
    lm_err e = { 0 };
    lm_tokenizer *t = NULL;

    (void)state;
    add_piece(&b, "<pad>", 0, 3);
    add_piece(&b, "</s>", 0, 3);
    add_piece(&b, "<unk>", 0, 2);
    add_piece(&b, "a", -3, 1);
    add_piece(&b, "\xe2\x96\x81", -2, 1);
    add_piece(&b, "ab", -5, 1);
    add_setting(&b, TRAINER, KIND, 1);
    add_setting(&b, TRAINER, 41, 127); /* no piece: there is no bos */
    add_setting(&b, TRAINER, 42, 1);
    for (int i = 0; i < 2; i++) {
        lm_tok_scratch *s = NULL;
        lm_ids ids = { 0 };
        config.len = 0;
        assert_int_equal(lm_buf_add(&config, rows[i].config, strlen(rows[i].config), &e), 0);
        if (lm_tokenizer_from_text(b.data, b.len, &config, "x/spiece.model", &t, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_string_equal(lm_tokenizer_model(t), "Unigram");
        assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
        assert_int_equal(lm_tokenizer_encode(t, s, "<extra_id_1>ab", 14, true, &ids, &e), 0);
        assert_int_equal(ids.n, 4);
        assert_memory_equal(ids.v, rows[i].ids, sizeof rows[i].ids);
        lm_ids_fini(&ids);
        lm_tok_scratch_free(s);
        lm_tokenizer_free(t);
    }
    config.len = 0;
    assert_int_equal(lm_buf_addf(&config, &e, "{\"tokenizer_class\":\"XLMRobertaTokenizer\"}"), 0);
    assert_int_equal(lm_tokenizer_from_text(b.data, b.len, &config, "x/spiece.model", &t, &e),
                     LM_EFORMAT);
    assert_non_null(strstr(e.what, "XLMRobertaTokenizer"));
    lm_buf_fini(&b);
    lm_buf_fini(&config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden),
        cmocka_unit_test(refusals),
        cmocka_unit_test(unused_pieces_that_no_word_meets),
        cmocka_unit_test(configuration_decides_about_bos),
        cmocka_unit_test(added_tokens),
        cmocka_unit_test(t5),
        cmocka_unit_test(damage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
