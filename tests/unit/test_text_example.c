/* SPDX-License-Identifier: Apache-2.0 */
/* Examples of records: which ids train, what begins and ends them, truncation, virtual tokens; many of them read in order
 * by any number of threads; packed windows as batches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "text/answers.h"
#include "text/examples.h"
#include "train/packed.h"

/* A tokenizer of bytes: letters and some signs are ids, "<s>" begins a text, "</s>" ends one. */
static const char json[] =
    "{\"added_tokens\":[{\"id\":0,\"content\":\"<s>\",\"special\":true,\"single_word\":false,"
    "\"lstrip\":false,\"rstrip\":false,\"normalized\":false},{\"id\":1,\"content\":\"</s>\","
    "\"special\":true,\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false}"
    "],"
    "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
    "\"trim_offsets\":true,\"use_regex\":true},\"post_processor\":{\"type\":\"TemplateProcessing\","
    "\"single\":[{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\","
    "\"type_id\":0}}],\"pair\":[{\"Sequence\":{\"id\":\"A\",\"type_id\":0}},{\"Sequence\":{\"id\":"
    "\"B\",\"type_id\":1}}],\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[0],\"tokens\":[\"<"
    "s>\""
    "]}}},\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,"
    "\"use_regex\":true},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
    "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":false,"
    "\"byte_fallback\":false,\"vocab\":{\"<s>\":0,\"</s>\":1,%s},\"merges\":[]}}";
static const char config[] = "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}";
/* Turns as "U:text|" and "A:text|", behind <s>. */
static const char template[] =
    "<s>{% for m in messages %}{{ m.role[0] | upper }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}";

static lm_tokenizer *tok;
static lm_chat *chat;

static int begin(void **state)
{
    lm_buf vocab = { 0 }, text = { 0 };
    lm_err e = { 0 };
    int id = 2;
    (void)state;
    for (const char *c = "abcdefghijklmnopqrstuvwxyzUASN0123456789:|."; *c; c++, id++)
        lm_buf_addf(&vocab, &e, "%s\"%c\":%d", id > 2 ? "," : "", *c, id);
    lm_buf_addf(&vocab, &e, ",\"\xc4\xa0\":%d,\"\xc4\x8a\":%d", id, id + 1); /* space, newline */
    lm_buf_addf(&text, &e, json, vocab.data);
    int bad = lm_tokenizer_from_json(text.data, text.len, config, strlen(config), "t", &tok, &e) ||
              lm_chat_new(template, strlen(template), "t", NULL, &chat, &e);
    if (bad)
        fprintf(stderr, "%s: %s\n", e.where, e.what);
    lm_buf_fini(&vocab);
    lm_buf_fini(&text);
    return bad;
}

static int end(void **state)
{
    (void)state;
    lm_chat_free(chat);
    lm_tokenizer_free(tok);
    return 0;
}

/* The text of the ids, and below each character of ids that train '^' (of special ids under their '<'). */
static void show(const lm_text_example *x, char *text, char *marks)
{
    lm_err e = { 0 };
    *text = *marks = 0;
    for (size_t i = 0; i < x->ids.n; i++) {
        lm_buf one = { 0 };
        if (x->ids.v[i] >= 1000)
            lm_buf_addf(&one, &e, "@");
        else
            assert_int_equal(lm_tokenizer_decode(tok, &x->ids.v[i], 1, false, &one, &e), LM_OK);
        strcat(text, one.data);
        for (size_t k = 0; k < one.len; k++)
            strcat(marks, x->trains[i] ? "^" : " ");
        lm_buf_fini(&one);
    }
}

static lm_text_example_maker maker(void)
{
    return (lm_text_example_maker){ .tok = tok, .chat = chat, .eos = 1 };
}

static void assert_example(const lm_text_example_maker *m, const char *line, const char *text,
                           const char *marks)
{
    lm_err e = { 0 };
    lm_text_record r;
    lm_text_example x = { 0 };
    lm_text_example_scratch *s = NULL;
    char got[512], which[512];
    if (lm_text_record_read(line, strlen(line), NULL, "f:1", &r, &e) ||
        lm_text_example_scratch_new(m, &s, &e) || lm_text_example_make(m, s, &r, &x, &e))
        fail_msg("%s: %s: %s", line, e.where, e.what);
    show(&x, got, which);
    assert_string_equal(got, text);
    assert_string_equal(which, marks);
    lm_text_example_fini(&x);
    lm_text_example_scratch_free(s);
    lm_text_record_fini(&r);
}

#define TURNS                                                                                    \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":" \
    "\"yo\"},{\"role\":\"user\",\"content\":\"so\"},{\"role\":\"assistant\",\"content\":\"no\"}]}"

static void texts_and_completions(void **state)
{
    lm_text_example_maker m = maker();
    (void)state;
    assert_example(&m, "{\"text\":\"ab c\"}", "<s>ab c</s>", "^^^^^^^^^^^");
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\" c\"}", "<s>ab c</s>", "     ^^^^^^");
    m.eos = -1;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\" c\"}", "<s>ab c", "     ^^");
    m.loss_on = LM_LOSS_ALL;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\" c\"}", "<s>ab c", "^^^^^^^");
}

static void turns_of_the_assistant(void **state)
{
    lm_text_example_maker m = maker();
    (void)state;
    /* One <s>: the template's; the mark of a turn's end trains. */
    assert_example(&m, TURNS, "<s>U:hi|A:yo|U:so|A:no|", "          ^^^       ^^^");
    m.loss_on = LM_LOSS_LAST;
    assert_example(&m, TURNS, "<s>U:hi|A:yo|U:so|A:no|", "                    ^^^");
    m.loss_on = LM_LOSS_ALL;
    assert_example(&m, TURNS, "<s>U:hi|A:yo|U:so|A:no|", "^^^^^^^^^^^^^^^^^^^^^^^");
    m.loss_on = LM_LOSS_AUTO;
    assert_example(&m,
                   "{\"prompt\":[{\"role\":\"user\",\"content\":\"q\"}],\"completion\":[{\"role\":"
                   "\"assistant\",\"content\":\"a\"}]}",
                   "<s>U:q|A:a|", "         ^^");
    m.wrap = true;
    assert_example(&m, "{\"prompt\":\"q\",\"completion\":\"a\"}", "<s>U:q|A:a|", "         ^^");
}

static void longer_examples_are_cut(void **state)
{
    lm_text_example_maker m = maker();
    (void)state;
    m.most = 5;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\"cdef\"}", "<s>abcd", "     ^^");
    m.cut = LM_CUT_END;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\"cdef\"}", "cdef</s>", "^^^^^^^^");
    m.cut = LM_CUT_DROP;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\"cdef\"}", "", "");
    m.virtual_first = 1000;
    m.virtuals = 2;
    m.cut = LM_CUT_END;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\"cdef\"}", "@@ef</s>", "  ^^^^^^");
    m.most = 0;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\"c\"}", "@@<s>abc</s>", "       ^^^^^");
    assert_example(&m, "{\"text\":\"abc\"}", "@@<s>abc</s>", "  ^^^^^^^^^^");
    m.unseen = true;
    assert_example(&m, "{\"text\":\"abc\"}", "@@<s>abc</s>", "     ^^^^^^^");
}

static void prompts_end_with_the_header_of_an_answer(void **state)
{
    lm_text_example_maker m = maker();
    lm_err e = { 0 };
    lm_text_record r;
    lm_text_example x = { 0 };
    lm_text_example_scratch *s = NULL;
    char text[200], marks[200];
    (void)state;
    assert_int_equal(lm_text_example_scratch_new(&m, &s, &e), LM_OK);
    assert_int_equal(lm_text_record_read(TURNS, strlen(TURNS), NULL, "f:1", &r, &e), LM_OK);
    assert_int_equal(lm_text_example_prompt(&m, s, &r, &x, &e), LM_OK);
    show(&x, text, marks);
    assert_string_equal(text, "<s>U:hi|A:yo|U:so|A:");
    assert_int_equal(x.trained, 0);
    lm_text_record_fini(&r);
    lm_text_example_fini(&x);
    lm_text_example_scratch_free(s);
}

/* Source and target, each ended: all of the target trains, nothing else. */
static void pairs_are_a_source_and_a_target(void **state)
{
    lm_text_example_maker m = maker();
    (void)state;
    m.pair = true;
    m.most_target = 0;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\"c\"}", "<s>ab</s><s>c</s>",
                   "         ^^^^^^^^");
    assert_example(&m, "{\"source\":\"a\",\"target\":\"\"}", "<s>a</s><s></s>", "        ^^^^^^^");
    /* rendered by the template: what it makes of the prompt, and what follows it */
    assert_example(&m, TURNS, "<s>U:hi|A:yo|U:so|A:</s>no|</s>", "                        ^^^^^^^");
    m.wrap = true;
    assert_example(&m, "{\"prompt\":\"q\",\"completion\":\"a\"}", "<s>U:q|A:</s>a|</s>",
                   "             ^^^^^^");
    m.wrap = false;
    m.chat = NULL; /* one question and its answer are texts */
    assert_example(&m, "{\"instruction\":\"ab\",\"input\":\"\",\"output\":\"c\"}",
                   "<s>ab</s><s>c</s>", "         ^^^^^^^^");
    m.most = 3;
    m.most_target = 3;
    assert_example(&m, "{\"prompt\":\"abc\",\"completion\":\"def\"}", "<s>a</s><s>d</s>",
                   "        ^^^^^^^^");
    m.cut = LM_CUT_END;
    assert_example(&m, "{\"prompt\":\"abc\",\"completion\":\"d\"}", "bc</s><s>d</s>",
                   "      ^^^^^^^^");
    m.cut = LM_CUT_DROP;
    assert_example(&m, "{\"prompt\":\"ab\",\"completion\":\"d\"}", "", "");
    assert_example(&m, "{\"prompt\":\"a\",\"completion\":\"de\"}", "", "");
}

/* Virtual tokens count as those of their side, whose cut leaves them in front. */
static void pairs_have_virtual_tokens(void **state)
{
    static const char line[] = "{\"prompt\":\"abc\",\"completion\":\"def\"}";
    lm_text_example_maker m = maker();
    lm_text_record r;
    (void)state;
    m.pair = true;
    m.chat = NULL;
    m.virtual_first = 1000;
    m.virtuals = 2;
    m.most = 5;
    m.most_target = 3;
    assert_example(&m, line, "@@<s>a</s><s>d</s>", "          ^^^^^^^^");
    m.cut = LM_CUT_END;
    assert_example(&m, line, "@@bc</s>ef</s>", "        ^^^^^^");
    m.cut = LM_CUT_START;
    m.unseen = true;
    m.most = 3;
    m.most_target = 5;
    assert_example(&m, line, "<s>a</s>@@<s>d</s>", "          ^^^^^^^^");
    for (int unseen = 0; unseen < 2; unseen++) {
        lm_err e = { 0 };
        lm_text_example x = { 0 };
        lm_text_example_scratch *s = NULL;
        m.unseen = unseen;
        m.most = m.most_target = 2;
        assert_int_equal(lm_text_record_read(line, strlen(line), NULL, "f:1", &r, &e), LM_OK);
        assert_int_equal(lm_text_example_scratch_new(&m, &s, &e), LM_OK);
        assert_int_equal(lm_text_example_make(&m, s, &r, &x, &e), LM_EUSAGE);
        assert_non_null(strstr(e.what, unseen ? "in a target of 2" : "in a source of 2"));
        lm_text_example_fini(&x);
        lm_text_example_scratch_free(s);
        lm_text_record_fini(&r);
    }
}

/* A pair without target, and messages that only a template could render. */
static void pairs_refuse(void **state)
{
    static const char *const lines[] = {
        "{\"text\":\"a\"}", "{\"prompt\":\"a\"}", TURNS,
        "{\"prompt\":[{\"role\":\"system\",\"content\":\"s\"}],\"completion\":"
        "[{\"role\":\"assistant\",\"content\":\"a\"}]}",
        "{\"prompt\":[{\"role\":\"user\",\"content\":\"s\"}],\"completion\":"
        "[{\"role\":\"assistant\",\"content\":\"a\"}],\"tools\":[{}]}"
    };
    lm_text_example_maker m = maker();
    lm_text_example x = { 0 };
    lm_text_example_scratch *s = NULL;
    lm_text_record r;
    (void)state;
    m.pair = true;
    m.chat = NULL;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        lm_err e = { 0 };
        assert_int_equal(lm_text_example_scratch_new(&m, &s, &e), LM_OK);
        assert_int_equal(lm_text_record_read(lines[i], strlen(lines[i]), NULL, "f:1", &r, &e),
                         LM_OK);
        assert_int_equal(lm_text_example_make(&m, s, &r, &x, &e), LM_EUSAGE);
        lm_text_record_fini(&r);
        lm_text_example_scratch_free(s);
    }
    lm_text_example_fini(&x);
}

static void refusals(void **state)
{
    static const char text[] = "{\"text\":\"a\"}", *const none[] = { "{\"prompt\":\"a\"}", TURNS };
    lm_text_example_maker m = maker();
    lm_text_example x = { 0 };
    lm_text_example_scratch *s = NULL;
    lm_text_record r;
    (void)state;
    for (int i = 0; i < 3; i++) {
        lm_err e = { 0 };
        m.chat = NULL;
        m.loss_on = i == 2 ? LM_LOSS_ASSISTANT : LM_LOSS_AUTO;
        const char *line = i == 2 ? text : none[i];
        assert_int_equal(lm_text_example_scratch_new(&m, &s, &e), LM_OK);
        assert_int_equal(lm_text_record_read(line, strlen(line), NULL, "f:1", &r, &e), LM_OK);
        assert_int_equal(lm_text_example_make(&m, s, &r, &x, &e), LM_EUSAGE);
        lm_text_record_fini(&r);
        lm_text_example_scratch_free(s);
    }
    lm_text_example_fini(&x);
}

/* ---- many ---- */

static void write_records(const char *path, int n)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < n; i++) {
        fprintf(f, "{\"prompt\":\"");
        for (int k = 0; k <= i % 7; k++)
            fprintf(f, "%c", 'a' + (i + k) % 26);
        fprintf(f, "\",\"completion\":\"%d\"}\n", i);
    }
    fclose(f);
}

static void windows_hold_each_example_once(void **state)
{
    enum { N = 500, T = 32 };
    char path[] = "/tmp/test_text_example.XXXXXX";
    const char *name = path;
    lm_err e = { 0 };
    uint64_t digest[2];
    int32_t token[T], target[T], pos[T], lo[T], again[T];
    int64_t valid, trained = 0, marked;
    (void)state;
    close(mkstemp(path));
    write_records(path, N);
    for (int threads = 1; threads <= 3; threads += 2) {
        lm_par *par = NULL;
        lm_packed_set p;
        lm_feed *f = NULL;
        const lm_text_examples_opts o = {
            .path = &name, .n = 1, .maker = maker(), .tmp = threads > 1 ? "/tmp" : NULL
        };
        const lm_feed_opts fo = { .seq = T, .documents = true, .shuffle = true, .vocab = 100 };
        assert_int_equal(lm_par_new(&par, threads, &e), LM_OK);
        if (lm_packed_read(&o, T, true, par, &p, &e))
            fail_msg("%s: %s", e.where, e.what);
        digest[threads > 1] = lm_text_examples_digest(p.examples);
        assert_int_equal(lm_text_examples_count(p.examples), N);
        assert_int_equal(lm_feed_new_packed(&p.data, &fo, &f, &e), LM_OK);
        trained = 0;
        for (int64_t w = 0; w < lm_feed_windows(f); w++) {
            assert_int_equal(lm_feed_window(f, w, token, target, pos, lo, NULL, &valid, &e), LM_OK);
            trained += valid;
            for (int i = 0; i < T; i++) {
                assert_true(lo[i] <= i && pos[i] == i - lo[i]);
                /* letters are of prompts; digits and the end of text train, at the row before each */
                if (i + 1 < T && lo[i + 1] == lo[i])
                    assert_int_equal(target[i] < 0, token[i + 1] >= 2 && token[i + 1] < 2 + 26);
                if (target[i] < 0)
                    continue;
                /* inside an example: the next row continues it */
                assert_true(i + 1 < T && lo[i + 1] == lo[i]);
                assert_int_equal(target[i], token[i + 1]);
            }
            lm_feed_marks(f, w, again, pos, lo, NULL, &marked);
            assert_int_equal(marked, valid);
            for (int i = 0; i < T; i++)
                assert_int_equal(again[i] < 0, target[i] < 0);
        }
        assert_int_equal(trained, lm_text_examples_stat(p.examples)->trained);
        assert_true((double)p.pack.used > 0.95 * (double)(p.pack.windows * T));
        lm_feed_free(f);
        lm_packed_fini(&p);
        lm_par_free(par);
    }
    assert_true(digest[0] == digest[1]);
    unlink(path);
}

/* Windows of pairs: padding behind either text, and the decoder reads its target behind the start token. */
static void check_windows(int64_t virtuals)
{
    enum { N = 50, S = 12, T = 11, START = 99 };
    char path[] = "/tmp/test_text_example.XXXXXX";
    const char *name = path;
    lm_err e = { 0 };
    lm_par *par = NULL;
    lm_packed_set p;
    lm_feed *f = NULL;
    lm_text_examples_opts o = { .path = &name, .n = 1, .maker = maker() };
    const lm_feed_opts fo = {
        .seq = T, .shuffle = true, .vocab = 100 + virtuals, .source = S, .start = START
    };
    int32_t source[S], token[T], target[T], pos[T], lo[T], hi[T], again[T];
    int64_t valid, trained = 0, marked, length, most[2] = { 0 };
    close(mkstemp(path));
    write_records(path, N);
    assert_int_equal(lm_par_new(&par, 2, &e), LM_OK);
    o.maker.pair = o.maker.unseen = true;
    o.maker.virtual_first = 100;
    o.maker.virtuals = virtuals;
    o.maker.eos = -1;
    assert_int_equal(lm_packed_read(&o, S, true, par, &p, &e), LM_EUSAGE); /* nothing ends them */
    e = (lm_err){ 0 };
    o.maker.eos = 1;
    assert_int_equal(lm_packed_read(&o, S, true, par, &p, &e), LM_OK);
    assert_int_equal(lm_feed_new_packed(&p.data, &fo, &f, &e), LM_OK);
    assert_int_equal(lm_feed_windows(f), N);
    for (int64_t w = 0; w < N; w++) {
        assert_int_equal(lm_feed_pair(f, w, source, &length, token, target, pos, &valid, &e),
                         LM_OK);
        assert_int_equal(source[0], 0); /* <s>, letters, </s> */
        assert_int_equal(source[length - 1], 1);
        for (int64_t i = 1; i < length - 1; i++)
            assert_true(source[i] >= 2 && source[i] < 2 + 26);
        for (int64_t i = length; i < S; i++)
            assert_int_equal(source[i], 0);
        const int64_t end = virtuals + valid;
        assert_int_equal(target[end - 1], 1);
        for (int64_t i = 0; i < T; i++) {
            assert_int_equal(target[i] < 0, i < virtuals || i >= end);
            assert_int_equal(pos[i], i);
            assert_int_equal(token[i], i < virtuals    ? 100 + i
                                       : i == virtuals ? START
                                       : i <= end      ? target[i - 1]
                                                       : 0);
        }
        lm_feed_marks(f, w, again, pos, lo, hi, &marked);
        assert_int_equal(marked, valid);
        for (int i = 0; i < T; i++)
            assert_true((again[i] < 0) == (target[i] < 0) && !lo[i] && hi[i] == T);
        trained += valid;
        most[0] = length > most[0] ? length : most[0];
        most[1] = end > most[1] ? end : most[1];
    }
    assert_int_equal(trained, lm_text_examples_stat(p.examples)->trained);
    assert_int_equal(most[0], lm_text_examples_stat(p.examples)->source);
    assert_int_equal(most[1], lm_text_examples_stat(p.examples)->target);
    lm_feed_free(f);
    lm_packed_fini(&p);
    lm_par_free(par);
    unlink(path);
}

static void windows_hold_one_pair(void **state)
{
    (void)state;
    check_windows(0);
    check_windows(2); /* a prefix's, in front of the start token */
}

/* Records after the limit are not looked at, with any number of threads; a bad one within it is named. */
static void reading_stops_at_the_limit(void **state)
{
    enum { GOOD = 200 };
    char path[] = "/tmp/lm-limit-XXXXXX";
    const char *name = path;
    int fd = mkstemp(path);
    FILE *f = fdopen(fd, "w");
    (void)state;
    assert_non_null(f);
    for (int i = 0; i < GOOD; i++)
        fprintf(f, "{\"prompt\": \"a\", \"chosen\": \"b%d\", \"rejected\": \"c\"}\n", i);
    fputs("{ broken\n", f);
    fclose(f);
    for (int threads = 1; threads <= 5; threads += 2) {
        lm_err e = { 0 };
        lm_par *par;
        lm_text_answers *a;
        lm_text_answers_opts o = {
            .path = &name, .n = 1, .maker = { .tok = tok, .eos = 1 }, .pairs = true, .limit = GOOD
        };
        assert_int_equal(lm_par_new(&par, threads, &e), LM_OK);
        assert_int_equal(lm_text_answers_read(&o, par, &a, &e), LM_OK);
        assert_int_equal(lm_text_answers_stat(a)->records, GOOD);
        assert_int_equal(lm_text_answers_count(a), 2 * GOOD);
        lm_text_answers_free(a);
        o.limit = 3;
        assert_int_equal(lm_text_answers_read(&o, par, &a, &e), LM_OK);
        assert_int_equal(lm_text_answers_stat(a)->records, 3);
        lm_text_answers_free(a);
        o.limit = GOOD + 1;
        assert_int_equal(lm_text_answers_read(&o, par, &a, &e), LM_EFORMAT);
        assert_non_null(strstr(e.where, ":201"));
        assert_null(a);
        lm_par_free(par);
    }
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_and_completions),
        cmocka_unit_test(turns_of_the_assistant),
        cmocka_unit_test(longer_examples_are_cut),
        cmocka_unit_test(prompts_end_with_the_header_of_an_answer),
        cmocka_unit_test(pairs_are_a_source_and_a_target),
        cmocka_unit_test(pairs_refuse),
        cmocka_unit_test(pairs_have_virtual_tokens),
        cmocka_unit_test(refusals),
        cmocka_unit_test(windows_hold_each_example_once),
        cmocka_unit_test(windows_hold_one_pair),
        cmocka_unit_test(reading_stops_at_the_limit),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
