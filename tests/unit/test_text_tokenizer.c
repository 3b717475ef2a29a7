/* SPDX-License-Identifier: Apache-2.0 */
/* test_text_tokenizer.c -- golden vectors of `tokenizers`, round trips, look-ups, and malformed
 * files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/text.h"
#include "text/tokenizer.h"

#define GPT2 "../shared/data/gpt2-tokenizer"

static const char *root(void)
{
    const char *r = getenv("LM_TEST_ROOT");
    return r ? r : ".";
}

static void check_ids(const lm_ids *got, const json_t *want, const char *name, const char *text)
{
    bool same = got->n == json_array_size(want);

    for (size_t i = 0; same && i < got->n; i++)
        same = got->v[i] == (uint32_t)json_integer_value(json_array_get(want, i));
    if (!same)
        print_error("%s: other ids for \"%s\"\n", name, text);
    assert_true(same);
}

/* One vector: text -> ids, and with special tokens; ids -> text, whole and as a stream. */
static void check_vector(const lm_tokenizer *t, lm_tok_scratch *s, const json_t *v,
                         const char *name)
{
    const json_t *text = json_object_get(v, "text"), *special = json_object_get(v, "special");
    const json_t *want = json_object_get(v, "ids"), *decoded = json_object_get(v, "decoded");
    lm_err e = { 0 };
    lm_ids ids = { 0 };
    lm_buf whole = { 0 }, parts = { 0 };
    lm_tok_stream st = { 0 };

    if (text) {
        const char *x = json_string_value(text);
        size_t len = json_string_length(text);
        assert_int_equal(lm_tokenizer_encode(t, s, x, len, false, &ids, &e), 0);
        check_ids(&ids, want, name, x);
        ids.n = 0;
        assert_int_equal(lm_tokenizer_encode(t, s, x, len, true, &ids, &e), 0);
        check_ids(&ids, special ? special : want, name, x);
    } else {
        for (size_t i = 0; i < json_array_size(want); i++) {
            assert_int_equal(lm_grow(&ids.v, &ids.cap, ids.n + 1, 4, "ids", &e), 0);
            ids.v[ids.n++] = (uint32_t)json_integer_value(json_array_get(want, i));
        }
    }
    if (!decoded)
        decoded = text;
    assert_int_equal(lm_tokenizer_decode(t, ids.v, ids.n, true, &whole, &e), 0);
    assert_int_equal(whole.len, json_string_length(decoded));
    assert_memory_equal(whole.data, json_string_value(decoded), whole.len);
    for (size_t i = 0; i < ids.n; i++) {
        assert_int_equal(lm_tok_stream_push(&st, t, ids.v[i], true, &parts, &e), 0);
        assert_int_equal(lm_utf8_valid(parts.data, parts.len), parts.len);
    }
    assert_int_equal(lm_tok_stream_end(&st, t, true, &parts, &e), 0);
    assert_int_equal(parts.len, whole.len);
    assert_memory_equal(parts.data, whole.data, whole.len);
    lm_tok_stream_fini(&st);
    lm_ids_fini(&ids);
    lm_buf_fini(&whole);
    lm_buf_fini(&parts);
}

static json_t *load_golden(void)
{
    char path[512];
    json_t *j = NULL;
    lm_err e = { 0 };

    snprintf(path, sizeof path, "%s/tests/golden/tokenizers.json", root());
    assert_int_equal(lm_json_load(path, 1 << 24, &j, &e), 0);
    return j;
}

static void check_vectors(const lm_tokenizer *t, const json_t *list, const char *name)
{
    lm_tok_scratch *s;
    lm_err e = { 0 };
    const json_t *v;
    size_t i;

    assert_true(json_array_size(list) > 20);
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    for (int twice = 0; twice < 2; twice++) /* the second time from the cache */
        json_array_foreach(list, i, v) check_vector(t, s, v, name);
    lm_tok_scratch_free(s);
}

static void golden(void **state)
{
    json_t *j = load_golden(), *c;
    size_t i;

    (void)state;
    json_array_foreach(json_object_get(j, "cases"), i, c)
    {
        const char *name = json_string_value(json_object_get(c, "name"));
        char *text = json_dumps(json_object_get(c, "tokenizer"), JSON_COMPACT);
        lm_tokenizer *t = NULL;
        lm_err e = { 0 };
        if (lm_tokenizer_from_json(text, strlen(text), NULL, 0, name, &t, &e))
            fail_msg("%s: %s: %s", name, e.where, e.what);
        check_vectors(t, json_object_get(c, "vectors"), name);
        lm_tokenizer_free(t);
        free(text);
    }
    json_decref(j);
}

static void gpt2(void **state)
{
    json_t *j;
    lm_tokenizer *t;
    lm_err e = { 0 };

    (void)state;
    if (!lm_path_exists(GPT2)) {
        print_message("no " GPT2 "\n");
        skip();
    }
    j = load_golden();
    assert_int_equal(lm_tokenizer_load(GPT2, &t, &e), 0);
    check_vectors(t, json_object_get(j, "gpt2"), "gpt2");
    assert_int_equal(lm_tokenizer_vocab_size(t), 50257);
    assert_int_equal(lm_tokenizer_eos(t), 50256);
    assert_true(lm_tokenizer_is_special(t, 50256));
    assert_int_equal(lm_tokenizer_id_bytes(t, 50256), 0);
    assert_int_equal(lm_tokenizer_id_bytes(t, (uint32_t)lm_tokenizer_id(t, "\u0120the", 5)), 4);
    lm_tokenizer_free(t);
    json_decref(j);
}

/* A byte-level tokenizer of 256 bytes, some merges and <e>. */
static lm_tokenizer *make_bytes(const char *pre)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    lm_tokenizer *t = NULL;
    lm_jw w;

    lm_jw_begin(&w, &b, 0, &e);
    lm_jw_obj(&w, NULL);
    lm_jw_arr(&w, "added_tokens");
    lm_jw_obj(&w, NULL);
    lm_jw_int(&w, "id", 260);
    lm_jw_str(&w, "content", "<e>");
    lm_jw_bool(&w, "special", true);
    lm_jw_close_obj(&w);
    lm_jw_close_arr(&w);
    lm_jw_obj(&w, "decoder");
    lm_jw_str(&w, "type", "ByteLevel");
    lm_jw_close_obj(&w);
    lm_jw_obj(&w, "model");
    lm_jw_obj(&w, "vocab");
    for (int i = 0, extra = 0; i < 256; i++) {
        bool own = (i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i <= 0xAC) || i >= 0xAE;
        char c[5] = "";
        c[lm_utf8_put(own ? (uint32_t)i : 0x100u + (uint32_t)extra++, c)] = 0;
        lm_jw_int(&w, c, i);
    }
    lm_jw_int(&w, "aa", 256);
    lm_jw_int(&w, "aaaa", 257);
    lm_jw_int(&w, "ab", 258);
    lm_jw_int(&w, "aab", 259);
    lm_jw_close_obj(&w);
    lm_jw_arr(&w, "merges");
    lm_jw_str(&w, NULL, "a a");
    lm_jw_str(&w, NULL, "aa aa");
    lm_jw_str(&w, NULL, "a b");
    lm_jw_str(&w, NULL, "a ab");
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    lm_jw_close_obj(&w);
    assert_int_equal(lm_jw_end(&w), 0);
    b.len--; /* the closing brace */
    assert_int_equal(lm_buf_addf(&b, &e, ",\"pre_tokenizer\":%s}", pre), 0);
    if (lm_tokenizer_from_json(b.data, b.len, NULL, 0, "bytes", &t, &e))
        fail_msg("%s: %s", e.where, e.what);
    lm_buf_fini(&b);
    return t;
}

static void round_trip(void **state)
{
    static const char *const pres[] = {
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}",
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}",
    };
    lm_rng r = lm_rng_make(1, "test", 0);
    uint64_t at = 0;

    (void)state;
    for (int p = 0; p < 2; p++) {
        lm_tokenizer *t = make_bytes(pres[p]);
        lm_tok_scratch *s;
        lm_err e = { 0 };
        assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
        for (int round = 0; round < 1000; round++) {
            lm_buf x = { 0 }, y = { 0 };
            lm_ids ids = { 0 };
            size_t n = lm_rng_below(r, at++, round % 50 ? 40 : 3000);
            size_t bytes = 0;
            for (size_t i = 0; i < n; i++) {
                uint64_t k = lm_rng_below(r, at++, 8);
                uint32_t c = k < 5   ? 'a' + (uint32_t)(k & 1)
                             : k < 6 ? ' '
                                     : (uint32_t)lm_rng_below(r, at++, 0xD800);
                char u[4];
                assert_int_equal(lm_buf_add(&x, u, lm_utf8_put(c, u), &e), 0);
            }
            assert_int_equal(lm_tokenizer_encode(t, s, x.data ? x.data : "", x.len, true, &ids, &e),
                             0);
            assert_int_equal(lm_tokenizer_decode(t, ids.v, ids.n, false, &y, &e), 0);
            assert_int_equal(x.len, y.len);
            if (x.len)
                assert_memory_equal(x.data, y.data, x.len);
            for (size_t i = 0; i < ids.n; i++)
                bytes += lm_tokenizer_id_bytes(t, ids.v[i]);
            assert_int_equal(bytes, x.len);
            lm_buf_fini(&x);
            lm_buf_fini(&y);
            lm_ids_fini(&ids);
        }
        lm_tok_scratch_free(s);
        lm_tokenizer_free(t);
    }
}

/* Long words are merged with a heap, short ones with a scan: both must merge leftmost first. */
static void long_words(void **state)
{
    lm_tokenizer *t = make_bytes("null");
    lm_tok_scratch *s;
    lm_err e = { 0 };
    lm_ids ids = { 0 };
    char x[1003];

    (void)state;
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    memset(x, 'a', sizeof x);
    for (size_t n = 1; n < sizeof x; n += n < 60 ? 1 : 157) {
        ids.n = 0;
        assert_int_equal(lm_tokenizer_encode(t, s, x, n, false, &ids, &e), 0);
        assert_int_equal(ids.n, n / 4 + n % 4 / 2 + n % 2);
        for (size_t i = 0; i < n / 4; i++)
            assert_int_equal(ids.v[i], 257);
        if (n % 2)
            assert_int_equal(ids.v[ids.n - 1], 'a');
    }
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
}

static void invalid_text(void **state)
{
    lm_tokenizer *t = make_bytes("null");
    lm_tok_scratch *s;
    lm_err e = { 0 };
    lm_ids ids = { 0 };
    lm_buf b = { 0 };
    const uint32_t high = 261, half[2] = { 0xC3, 'x' };

    (void)state;
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    assert_int_equal(lm_tokenizer_encode(t, s, "ab\xFF", 3, false, &ids, &e), LM_EFORMAT);
    assert_string_equal(e.what, "invalid UTF-8 at byte 2 of 3");
    e = (lm_err){ 0 };
    assert_int_equal(lm_tokenizer_decode(t, &high, 1, false, &b, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "id 261"));
    e = (lm_err){ 0 };
    assert_int_equal(lm_tokenizer_decode(t, half, 2, false, &b, &e), 0);
    assert_int_equal(b.len, 4);
    assert_memory_equal(b.data, "\xEF\xBF\xBDx", 4);
    lm_buf_fini(&b);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
}

#define MODEL(v, m) "\"model\":{\"type\":\"BPE\",\"vocab\":{" v "},\"merges\":[" m "]}"

#define UNIGRAM(v, unk) "\"model\":{\"type\":\"Unigram\",\"unk_id\":" unk ",\"vocab\":[" v "]}"
#define WORDPIECE(v, most)                                                                         \
    "\"model\":{\"type\":\"WordPiece\",\"unk_token\":\"[UNK]\",\"max_input_chars_per_word\":" most \
    ",\"vocab\":{" v "}}"

static void hostile(void **state)
{
    static const struct {
        const char *json, *says;
    } bad[] = {
        { "", "JSON" },
        { "[]", "must be an object" },
        { "{}", "\"model\" is missing" },
        { "{\"model\":{\"type\":\"WordLevel\"}}", "model type \"WordLevel\"" },
        { "{" UNIGRAM("", "0") "}", "list with tokens" },
        { "{" UNIGRAM("[\"a\",0]", "1") "}", "unk_id" },
        { "{" UNIGRAM("[\"a\",0]", "-1") "}", "unk_id" },
        { "{" UNIGRAM("[\"a\"]", "0") "}", "entry 0 of the vocabulary" },
        { "{" UNIGRAM("[\"a\",0],[\"b\",\"c\"]", "0") "}", "entry 1 of the vocabulary" },
        { "{" UNIGRAM("[\"a\",0],[\"b\",1,2]", "0") "}", "entry 1 of the vocabulary" },
        { "{" UNIGRAM("[\"a\",0],[\"a\",1]", "0") "}", "appears twice" },
        { "{" UNIGRAM("[\"a\",1e999]", "0") "}", "JSON" },
        { "{" WORDPIECE("", "100") "}", "object with tokens" },
        { "{" WORDPIECE("\"a\":0", "-1") "}", "max_input_chars_per_word" },
        { "{" WORDPIECE("\"a\":0,\"b\":0", "1") "}", "id 0 belongs to two tokens" },
        { "{\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0},\"max_input_chars_per_word\":9}}",
          "unk_token" },
        { "{\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0},\"merges\":[]}}",
          "key \"merges\"" },
        { "{" MODEL("", "") "}", "\"vocab\"" },
        { "{" MODEL("\"a\":0,\"b\":0", "") "}", "id 0 belongs to two tokens" },
        { "{" MODEL("\"a\":-1", "") "}", "is not a number from 0" },
        { "{" MODEL("\"a\":4294967296", "") "}", "is not a number from 0" },
        { "{" MODEL("\"a\":900000000", "") "}", "is not a number from 0" },
        { "{" MODEL("\"a\":1.5", "") "}", "is not a number from 0" },
        { "{" MODEL("\"a\":0,\"a\":1", "") "}", "appears twice" },
        { "{" MODEL("\"a\":0", "\"a b\"") "}", "\"b\" is not in the vocabulary" },
        { "{" MODEL("\"a\":0", "\"a a\"") "}", "\"aa\" is not in the vocabulary" },
        { "{" MODEL("\"a\":0", "\"a a a\"") "}", "neither" },
        { "{" MODEL("\"a\":0", "[\"a\"]") "}", "neither" },
        { "{" MODEL("\"a\":0,\"\":1", "[\"a\",\"\"]") "}", "empty" },
        { "{" MODEL("\"a\":0", "7") "}", "neither" },
        { "{" MODEL("\"\xFF\":0", "") "}", "JSON" },
        { "{\"surprise\":1," MODEL("\"a\":0", "") "}", "key \"surprise\"" },
        { "{\"normalizer\":{\"type\":\"Precompiled\"}," MODEL("\"a\":0", "") "}",
          "\"precompiled_charsmap\" is missing" },
        { "{\"pre_tokenizer\":{\"type\":\"Magic\"}," MODEL("\"a\":0", "") "}", "\"Magic\"" },
        { "{\"decoder\":{\"type\":\"CTC\"}," MODEL("\"a\":0", "") "}", "\"CTC\"" },
        { "{\"post_processor\":{\"type\":\"X\"}," MODEL("\"a\":0", "") "}", "\"X\"" },
        { "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":"
          "\"Isolated\"}," MODEL("\"a\":0", "") "}",
          "bad pattern" },
        { "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":"
          "\"Odd\"}," MODEL("\"a\":0", "") "}",
          "behavior \"Odd\"" },
        { "{\"added_tokens\":[{\"id\":1,\"content\":\"a\"}]," MODEL("\"a\":0", "") "}",
          "the vocabulary gives it 0" },
        { "{\"added_tokens\":[{\"id\":0,\"content\":\"b\"}]," MODEL("\"a\":0", "") "}",
          "belongs to another token" },
        { "{\"added_tokens\":[{\"id\":99999999,\"content\":\"b\"}]," MODEL("\"a\":0", "") "}",
          "is not a number from 0" },
        { "{\"added_tokens\":[3]," MODEL("\"a\":0", "") "}", "added token 0" },
        { "{\"added_tokens\":{}," MODEL("\"a\":0", "") "}", "must be a list" },
        { "{\"model\":{\"dropout\":0.1,\"vocab\":{\"a\":0},\"merges\":[]}}", "dropout" },
        { "{\"model\":{\"end_of_word_suffix\":\"</w>\",\"vocab\":{\"a\":0},\"merges\":[]}}",
          "end_of_word_suffix" },
        { "{\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"a\",9],\"sep\":[\"a\",0]}"
          "," MODEL("\"a\":0", "") "}",
          "\"cls\"" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_tokenizer *t = (lm_tokenizer *)1;
        lm_err e = { 0 };
        lm_code rc =
            lm_tokenizer_from_json(bad[i].json, strlen(bad[i].json), NULL, 0, "bad", &t, &e);
        if (rc != LM_EFORMAT || !strstr(e.what, bad[i].says))
            fail_msg("%s: code %d, \"%s\", expected \"%s\"", bad[i].json, rc, e.what, bad[i].says);
        assert_null(t);
    }
}

static lm_code encode_once(const char *json, const char *text, lm_ids *ids, lm_err *e)
{
    lm_tokenizer *t;
    lm_tok_scratch *s;
    lm_code rc;

    if (lm_tokenizer_from_json(json, strlen(json), NULL, 0, "x", &t, e))
        fail_msg("%s: %s", e->where, e->what);
    assert_int_equal(lm_tok_scratch_new(t, &s, e), 0);
    ids->n = 0;
    rc = lm_tokenizer_encode(t, s, text, strlen(text), false, ids, e);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    return rc;
}

static void check_once(const char *json, const char *text, const uint32_t *want, size_t n)
{
    lm_ids ids = { 0 };
    lm_err e = { 0 };

    if (encode_once(json, text, &ids, &e))
        fail_msg("%s: %s", e.where, e.what);
    assert_int_equal(ids.n, n);
    assert_memory_equal(ids.v, want, n * sizeof *want);
    lm_ids_fini(&ids);
}

/* What decides between cuts of a word; the ids are those of `tokenizers`. */
static void choices(void **state)
{
    const uint32_t first[] = { 1, 4 }, whole[] = { 3 }, run[] = { 2 }, unk[] = { 0 };
    lm_ids ids = { 0 };
    lm_err e = { 0 };

    (void)state;
    /* a + bc and ab + c have one sum: the cut whose last token begins first */
    check_once("{" UNIGRAM("[\"?\",-9],[\"a\",-1],[\"ab\",-1],[\"c\",-2],[\"bc\",-2]", "0") "}",
               "abc", first, 2);
    /* a run of unknown characters that is a token */
    check_once("{" UNIGRAM("[\"?\",99],[\"b\",80],[\"xy\",70]", "0") "}", "xy", run, 1);
    check_once("{" UNIGRAM("[\"?\",99],[\"b\",80],[\"xy\",70]", "0") "}", "xyz", unk, 1);
    /* a word of as many characters as allowed, and one more */
    check_once("{" WORDPIECE("\"[UNK]\":0,\"a\":1,\"##\":2,\"\u00e9\u00e9\":3", "2") "}",
               "\u00e9\u00e9", whole, 1);
    check_once("{" WORDPIECE("\"[UNK]\":0,\"a\":1,\"##a\":2", "2") "}", "aaa", unk, 1);
    check_once("{" WORDPIECE("\"[UNK]\":0,\"a\":1,\"##\":2", "2") "}", "aa", unk, 1);
    /* no token for what is unknown */
    assert_int_equal(encode_once("{" WORDPIECE("\"a\":0", "2") "}", "b", &ids, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "unk_token \"[UNK]\" is needed"));
    e = (lm_err){ 0 };
    assert_int_equal(encode_once("{" UNIGRAM("[\"a\",0]", "null") "}", "b", &ids, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "no unk_id"));
    lm_ids_fini(&ids);
}

/* Merges that lead back to shorter tokens or to themselves cannot loop: each makes the word
 * shorter. */
static void merge_cycles(void **state)
{
    static const char json[] =
        "{" MODEL("\"a\":0,\"aa\":1,\"aaa\":2", "\"a a\",\"a aa\",\"aa a\",\"a a\"") "}";
    lm_tokenizer *t;
    lm_tok_scratch *s;
    lm_ids ids = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_tokenizer_from_json(json, strlen(json), NULL, 0, "cycle", &t, &e), 0);
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    assert_int_equal(lm_tokenizer_encode(t, s, "aaaaaa", 6, false, &ids, &e), 0);
    assert_true(ids.n > 0 && ids.n < 6);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
}

/* Normalisers that double the text over and over are stopped. */
static void blow_up(void **state)
{
    lm_buf b = { 0 };
    lm_err e = { 0 };
    lm_tokenizer *t;
    lm_tok_scratch *s;
    lm_ids ids = { 0 };

    (void)state;
    assert_int_equal(
        lm_buf_addf(&b, &e, "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":["), 0);
    for (int i = 0; i < 60; i++)
        assert_int_equal(lm_buf_addf(&b, &e,
                                     "%s{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},"
                                     "\"content\":\"aa\"}",
                                     i ? "," : ""),
                         0);
    assert_int_equal(lm_buf_addf(&b, &e, "]}," MODEL("\"a\":0", "") "}"), 0);
    assert_int_equal(lm_tokenizer_from_json(b.data, b.len, NULL, 0, "bomb", &t, &e), 0);
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    assert_int_equal(lm_tokenizer_encode(t, s, "a", 1, false, &ids, &e), LM_ELIMIT);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    lm_buf_fini(&b);
}

static void special_names(void **state)
{
    static const char json[] =
        "{\"added_tokens\":[{\"id\":1,\"content\":\"<s>\",\"special\":true},"
        "{\"id\":2,\"content\":\"</s>\",\"special\":true},"
        "{\"id\":3,\"content\":\"<end>\",\"special\":true}]," MODEL("\"a\":0", "") "}";
    static const char config[] = "{\"eos_token\":{\"content\":\"<end>\"},\"bos_token\":null}";
    lm_tokenizer *t;
    lm_err e = { 0 };
    size_t len;

    (void)state;
    assert_int_equal(lm_tokenizer_from_json(json, strlen(json), NULL, 0, "x", &t, &e), 0);
    assert_int_equal(lm_tokenizer_bos(t), 1);
    assert_int_equal(lm_tokenizer_eos(t), 2);
    assert_int_equal(lm_tokenizer_pad(t), -1);
    assert_int_equal(lm_tokenizer_vocab_size(t), 4);
    assert_int_equal(lm_tokenizer_id(t, "<end>", 5), 3);
    assert_int_equal(lm_tokenizer_id(t, "nope", 4), -1);
    assert_null(lm_tokenizer_config_json(t, &len));
    assert_string_equal(lm_tokenizer_json(t, &len), json);
    lm_tokenizer_free(t);
    assert_int_equal(
        lm_tokenizer_from_json(json, strlen(json), config, strlen(config), "x", &t, &e), 0);
    assert_int_equal(lm_tokenizer_eos(t), 3);
    lm_tokenizer_free(t);
    assert_int_equal(lm_tokenizer_load("/nonexistent/tokenizer.json", &t, &e), LM_EIO);
}

static void put_file(const char *dir, const char *name, const char *text)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

/* GPT-2's pair of files, with what was added to it. */
static void pair_with_added_tokens(void **state)
{
    static const char *const names[] = { "vocab.json", "merges.txt", "added_tokens.json",
                                         "tokenizer_config.json" };
    char dir[] = "/tmp/test_text_tokenizer.XXXXXX", path[200];
    lm_tokenizer *t = NULL;
    lm_err e = { 0 };

    (void)state;
    assert_non_null(mkdtemp(dir));
    put_file(dir, names[0], "{\"a\":0,\"b\":1,\"ab\":2,\"<|endoftext|>\":3}");
    put_file(dir, names[1], "#version: 0.2\na b\n");
    put_file(dir, names[2], "{\"<|endoftext|>\":3,\"<|user|>\":4}");
    assert_int_equal(lm_tokenizer_load(dir, &t, &e), 0);
    assert_int_equal(lm_tokenizer_vocab_size(t), 5);
    assert_int_equal(lm_tokenizer_id(t, "<|user|>", 8), 4);
    assert_true(lm_tokenizer_is_special(t, 3));
    lm_tokenizer_free(t);
    put_file(dir, names[2], "{\"<|user|>\":1}");
    assert_int_equal(lm_tokenizer_load(dir, &t, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "belongs to another token"));
    /* Qwen2 has such a pair, too, and cuts before each digit */
    put_file(dir, names[0], "{\"1\":0,\"2\":1,\"12\":2}");
    put_file(dir, names[1], "1 2\n");
    put_file(dir, names[2], "{}");
    for (size_t n = 1; n <= 2; n++) {
        lm_tok_scratch *s = NULL;
        lm_ids ids = { 0 };
        e = (lm_err){ 0 };
        put_file(dir, names[3], n == 1 ? "{}" : "{\"tokenizer_class\":\"Qwen2Tokenizer\"}");
        assert_int_equal(lm_tokenizer_load(dir, &t, &e), 0);
        assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
        assert_int_equal(lm_tokenizer_encode(t, s, "12", 2, false, &ids, &e), 0);
        assert_int_equal(ids.n, n);
        lm_ids_fini(&ids);
        lm_tok_scratch_free(s);
        lm_tokenizer_free(t);
    }
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        remove(path);
    }
    rmdir(dir);
}

/* BERT's older folder: lower case unless the configuration says otherwise. */
static void list_of_tokens(void **state)
{
    static const char *const names[] = { "vocab.txt", "tokenizer_config.json" };
    static const char list[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\r\n[MASK]\nthe\nThe\n##s\n.\n";
    static const char *const configs[] = { "{}", "{\"do_lower_case\":false}" };
    static const uint32_t pair[] = { 2, 5, 8, 3, 5, 3 };
    const uint32_t want[2][6] = { { 2, 5, 7, 8, 4, 3 }, { 2, 6, 7, 8, 4, 3 } };
    char dir[] = "/tmp/test_text_tokenizer.XXXXXX", path[200];
    lm_tokenizer *t = NULL;
    lm_err e = { 0 };

    (void)state;
    assert_non_null(mkdtemp(dir));
    put_file(dir, names[0], list);
    for (int i = 0; i < 4; i++) { /* the folder, then the file */
        lm_tok_scratch *s = NULL;
        lm_ids ids = { 0 }, types = { 0 };
        put_file(dir, names[1], configs[i & 1]);
        snprintf(path, sizeof path, "%s%s", dir, i < 2 ? "" : "/vocab.txt");
        if (lm_tokenizer_load(path, &t, &e))
            fail_msg("%s: %s", e.where, e.what);
        assert_string_equal(lm_tokenizer_model(t), "WordPiece");
        assert_int_equal(lm_tokenizer_pad(t), 0);
        assert_int_equal(lm_tokenizer_bos(t), 2);
        assert_int_equal(lm_tokenizer_eos(t), 3);
        assert_int_equal(lm_tokenizer_mask(t), 4);
        assert_int_equal(lm_tokenizer_id_bytes(t, 5), 4);
        assert_int_equal(lm_tokenizer_id_bytes(t, 7), 1);
        assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
        assert_int_equal(lm_tokenizer_encode(t, s, "Thes. [MASK]", 12, true, &ids, &e), 0);
        assert_int_equal(ids.n, 6);
        assert_memory_equal(ids.v, want[i & 1], sizeof want[0]);
        ids.n = 0;
        assert_int_equal(
            lm_tokenizer_encode_pair(t, s, "the.", 4, "the", 3, true, &ids, &types, &e), 0);
        assert_int_equal(ids.n, sizeof pair / sizeof *pair);
        assert_memory_equal(ids.v, pair, sizeof pair);
        assert_int_equal(types.n, ids.n);
        for (size_t k = 0; k < types.n; k++)
            assert_int_equal(types.v[k], k > 3);
        lm_ids_fini(&ids);
        lm_ids_fini(&types);
        lm_tok_scratch_free(s);
        lm_tokenizer_free(t);
    }
    snprintf(path, sizeof path, "%s", dir);
    put_file(dir, names[1], "{\"tokenizer_class\":\"BertJapaneseTokenizer\"}");
    assert_int_equal(lm_tokenizer_load(path, &t, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "BertJapaneseTokenizer"));
    put_file(dir, names[1], "{}");
    put_file(dir, names[0], "[UNK]\n[CLS]\nx\nx\n[SEP]\n");
    e = (lm_err){ 0 };
    assert_int_equal(lm_tokenizer_load(path, &t, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "appears twice"));
    put_file(dir, names[0], "[UNK]\n[CLS]\n");
    e = (lm_err){ 0 };
    assert_int_equal(lm_tokenizer_load(path, &t, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "no line \"[SEP]\""));
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        remove(path);
    }
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden),
        cmocka_unit_test(gpt2),
        cmocka_unit_test(round_trip),
        cmocka_unit_test(long_words),
        cmocka_unit_test(invalid_text),
        cmocka_unit_test(hostile),
        cmocka_unit_test(choices),
        cmocka_unit_test(merge_cycles),
        cmocka_unit_test(blow_up),
        cmocka_unit_test(special_names),
        cmocka_unit_test(pair_with_added_tokens),
        cmocka_unit_test(list_of_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
