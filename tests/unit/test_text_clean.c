/* SPDX-License-Identifier: Apache-2.0 */
/* Cleaning rules: each rule alone drops text beyond its threshold and keeps text just inside it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/text.h"
#include "text/clean.h"
#include "text/clean_parts.h"

static lm_clean_scratch *scratch;
static lm_stop_words *english;

/* Options in which no rule of the set can fail. */
static lm_clean_opts lenient(lm_clean_set set)
{
    lm_clean_opts o;
    lm_clean_defaults(&o);
    o.set[set] = true;
    o.stop = english;
    for (int r = 0; r < LM_RULES; r++) {
        o.rule[r].on = false;
        o.rule[r].limit = 1e18;
    }
    static const lm_clean_rule lower[] = { LM_RULE_MIN_WORDS,  LM_RULE_MIN_WORD_LEN,
                                           LM_RULE_ALPHA,      LM_RULE_STOP_WORDS,
                                           LM_RULE_LINE_WORDS, LM_RULE_SENTENCES,
                                           LM_RULE_FW_PUNCT };
    for (size_t i = 0; i < sizeof lower / sizeof *lower; i++)
        o.rule[lower[i]].limit = 0;
    return o;
}

static lm_clean_result judge(const lm_clean_opts *o, const char *text)
{
    lm_clean_result r;
    lm_err e = { 0 };
    assert_int_equal(lm_clean_text(o, scratch, text, strlen(text), &r, &e), LM_OK);
    return r;
}

/* Only `rule`, at `limit`: does it drop the text? */
static bool drops(lm_clean_rule rule, double limit, const char *text)
{
    lm_clean_opts o = lenient(lm_clean_rule_set(rule));
    o.rule[rule].limit = limit;
    o.rule[rule].on = true;
    int got = judge(&o, text).rule;
    assert_true(got == -1 || got == (int)rule);
    return got >= 0;
}

static void gopher_quality(void **st)
{
    (void)st;
    assert_true(drops(LM_RULE_MIN_WORDS, 4, "one two three -- ..."));
    assert_false(drops(LM_RULE_MIN_WORDS, 3, "one two three -- ..."));
    assert_true(drops(LM_RULE_MAX_WORDS, 2, "one two three"));
    assert_false(drops(LM_RULE_MAX_WORDS, 3, "one two three"));
    assert_true(drops(LM_RULE_MIN_WORD_LEN, 2.1, "(ab) \"cd\"."));
    assert_false(drops(LM_RULE_MIN_WORD_LEN, 2, "(ab) \"cd\"."));
    assert_false(drops(LM_RULE_MAX_WORD_LEN, 2, "\xC3\xA9\xC3\xA9 cd")); /* characters, not bytes */
    assert_true(drops(LM_RULE_MAX_WORD_LEN, 1.9, "\xC3\xA9\xC3\xA9 cd"));
    assert_true(drops(LM_RULE_HASHES, 0.4, "#a b"));
    assert_false(drops(LM_RULE_HASHES, 0.5, "#a b"));
    assert_true(drops(LM_RULE_ELLIPSES, 0.9, "a... b\xE2\x80\xA6"));
    assert_false(drops(LM_RULE_ELLIPSES, 1, "a... b\xE2\x80\xA6"));
    assert_true(drops(LM_RULE_BULLETS, 0.6, "- a\n\xE2\x80\xA2 b\nc"));
    assert_false(drops(LM_RULE_BULLETS, 0.7, "- a\n\xE2\x80\xA2 b\nc"));
    assert_true(drops(LM_RULE_ELLIPSIS_LINES, 0.3, "a...\nb\nc"));
    assert_false(drops(LM_RULE_ELLIPSIS_LINES, 0.34, "a... \nb\n\n\nc...d"));
    assert_true(drops(LM_RULE_ALPHA, 0.6, "a 12"));
    assert_false(drops(LM_RULE_ALPHA, 0.5, "a 12"));
    assert_true(drops(LM_RULE_STOP_WORDS, 2, "the the THE them"));
    assert_false(drops(LM_RULE_STOP_WORDS, 2, "The, (and"));
}

static void gopher_repetition(void **st)
{
    (void)st;
    assert_true(drops(LM_RULE_DUP_LINES, 0.3, "a\n a \nb"));
    assert_false(drops(LM_RULE_DUP_LINES, 0.34, "a\n a \nb"));
    assert_true(drops(LM_RULE_DUP_LINE_CHARS, 0.36, "abcd\nabcd\nx")); /* 4 of 11 */
    assert_false(drops(LM_RULE_DUP_LINE_CHARS, 0.37, "abcd\nabcd\nx"));
    assert_true(drops(LM_RULE_DUP_PARAS, 0.4, "a\nb\n\na\nb"));
    assert_false(drops(LM_RULE_DUP_PARAS, 0.5, "a\nb\n\na\nb"));
    assert_false(drops(LM_RULE_DUP_PARAS, 0.0, "a\nb\n\na\nc"));
    assert_true(drops(LM_RULE_DUP_PARA_CHARS, 0.3, "abc\n\nabc")); /* 3 of 8 */
    assert_false(drops(LM_RULE_DUP_PARA_CHARS, 0.38, "abc\n\nabc"));
    /* "a b" twice: 6 of 11 characters; 2-grams that occur once do not count */
    assert_true(drops(LM_RULE_TOP_2, 0.54, "a b c a b d"));
    assert_false(drops(LM_RULE_TOP_2, 0.55, "a b c a b d"));
    assert_false(drops(LM_RULE_TOP_2, 0.0, "a b c d e f"));
    /* the second "a b c d e" covers 5 of 21 characters */
    assert_true(drops(LM_RULE_DUP_5, 0.23, "a b c d e x a b c d e"));
    assert_false(drops(LM_RULE_DUP_5, 0.24, "a b c d e x a b c d e"));
    assert_false(drops(LM_RULE_DUP_6, 0.0, "a b c d e x a b c d e"));
    /* eight times "a": one repeat fits behind the first, overlapping ones do not count again */
    assert_true(drops(LM_RULE_DUP_5, 0.33, "a a a a a a a a"));
    assert_false(drops(LM_RULE_DUP_5, 0.34, "a a a a a a a a"));
}

static void c4_lines(void **st)
{
    (void)st;
    lm_clean_opts o = lenient(LM_CLEAN_C4);
    o.rule[LM_RULE_LINE_PUNCT].on = o.rule[LM_RULE_LINE_SCRIPT].on = true;
    o.rule[LM_RULE_LINE_POLICY].on = true;
    o.rule[LM_RULE_LINE_WORDS].limit = 3;
    o.rule[LM_RULE_LINE_WORD_LEN].limit = 20;
    lm_clean_result r = judge(&o, "  A good line it is[12] . \nno end here\nToo short.\n\n"
                                  "And so on and on...\nPlease enable JavaScript now.\n"
                                  "We use cookies on it.\nA wooooooooooooooooooooord it is.\n"
                                  "She said: \"it is fine\"\nIt ends[citation needed]. [edit]");
    assert_int_equal(r.rule, -1);
    assert_int_equal(r.len, strlen("A good line it is .\nShe said: \"it is fine\""));
    assert_memory_equal(r.text, "A good line it is .\nShe said: \"it is fine\"", r.len);
    assert_int_equal(r.lines[LM_RULE_LINE_PUNCT], 2);
    assert_int_equal(r.lines[LM_RULE_LINE_WORDS], 2);
    assert_int_equal(r.lines[LM_RULE_LINE_SCRIPT], 1);
    assert_int_equal(r.lines[LM_RULE_LINE_POLICY], 1);
    assert_int_equal(r.lines[LM_RULE_LINE_WORD_LEN], 1);
    const char *clean = "A line as it is.\nAnother one it is.";
    assert_ptr_equal(judge(&o, clean).text, clean); /* nothing changed: the very same bytes */
}

static void c4_documents(void **st)
{
    (void)st;
    assert_true(drops(LM_RULE_LOREM, 1, "x Lorem IPSUM y"));
    assert_false(drops(LM_RULE_LOREM, 1, "lorem  ipsum"));
    assert_true(drops(LM_RULE_CURLY, 1, "f() { }"));
    assert_true(drops(LM_RULE_SENTENCES, 5, "One. Two! Three?\nFour"));
    assert_false(drops(LM_RULE_SENTENCES, 4, "One. Two! \"Three?\"\nFour 3.5"));
}

static void fineweb(void **st)
{
    (void)st;
    assert_true(drops(LM_RULE_FW_PUNCT, 0.4, "a.\nb\nc"));
    assert_false(drops(LM_RULE_FW_PUNCT, 0.33, "a.\nb\nc"));
    assert_true(drops(LM_RULE_FW_SHORT, 0.4, "short\nThis line has more than thirty characters."));
    assert_false(drops(LM_RULE_FW_SHORT, 0.5, "short\nThis line has more than thirty characters."));
    assert_true(drops(LM_RULE_FW_DUP_CHARS, 0.3, "abc\nabc\nxy")); /* 3 of 8 */
    assert_false(drops(LM_RULE_FW_DUP_CHARS, 0.38, "abc\nabc\nxy"));
    assert_true(drops(LM_RULE_FW_NEWLINES, 0.4, "a b\nc d\n"));
    assert_false(drops(LM_RULE_FW_NEWLINES, 0.5, "a b\nc d\n"));
}

static void defaults_keep_prose(void **st)
{
    (void)st;
    static const char *const sentences[] = {
        "The river that runs through the old town has been a road for trade since it was settled. ",
        "Boats of every size were built on its banks, and the yards gave work to whole families. ",
        "When the railway came in the spring of that year, the harbour lost most of its traffic. ",
        "Some of the owners sold their land to mills; others waited for better times in vain. ",
        "Today a path for walkers follows the water, with gardens where the cranes once stood. ",
        "Visitors often ask to see the last of the locks, which is opened by hand on feast days. ",
    };
    lm_clean_opts o;
    lm_buf b = { 0 };
    lm_err e = { 0 };
    lm_clean_defaults(&o);
    o.set[0] = o.set[1] = o.set[2] = true;
    for (int i = 0; i < 6; i++)
        lm_buf_addf(&b, &e, "%s", sentences[i]);
    assert_int_equal(judge(&o, b.data).rule, -1);
    for (int i = 0; i < 3; i++)
        lm_buf_addf(&b, &e, "%s", sentences[0]);
    assert_int_equal(lm_clean_rule_set((lm_clean_rule)judge(&o, b.data).rule), LM_CLEAN_GOPHER);
    assert_int_equal(judge(&o, "").rule, LM_RULE_MIN_WORDS);
    assert_int_equal(judge(&o, "\n\n\n").rule, LM_RULE_MIN_WORDS);
    lm_buf_fini(&b);
}

/* ---- languages ---- */

static int64_t count_words(const char *text)
{
    lm_parts p = { 0 };
    lm_err e = { 0 };
    assert_int_equal(lm_parts_split(&p, text, strlen(text), NULL, &e), 0);
    int64_t n = p.n_words, words, longest;
    lm_parts_fini(&p);
    lm_line_words(text, strlen(text), &words, &longest);
    assert_int_equal(words, n);
    return n;
}

static void characters_are_words_without_spaces(void **st)
{
    (void)st;
    assert_int_equal(count_words("two words"), 2);
    assert_int_equal(count_words("\u4f60\u597d\u3002\u4e16\u754c"), 4); /* a stop in between */
    assert_int_equal(count_words("\u300c\u4f60\u300d\u597d"), 2);       /* quotes around */
    assert_int_equal(count_words("AI\u6a21\u578b\u304cv2"), 5);
    assert_int_equal(count_words("\u304b\u3099\u3057"), 2); /* a mark stays with its letter */
    assert_int_equal(count_words("\u30b9\u30fc\u30d1\u30fc"), 4);
    assert_int_equal(count_words("\ud55c\uad6d\uc5b4 \ubb38\uc7a5"), 2); /* Hangul has spaces */
    assert_int_equal(count_words("caf\u00e9\u2019s"), 1);
    lm_clean_opts o;
    lm_clean_defaults(&o);
    o.set[LM_CLEAN_GOPHER] = true;
    lm_buf b = { 0 };
    lm_err e = { 0 };
    for (uint32_t i = 0; i < 60; i++) { /* sixty characters, none of them twice */
        char c[4];
        assert_int_equal(lm_buf_add(&b, c, lm_utf8_put(0x4E00 + 7 * i, c), &e), 0);
    }
    assert_int_equal(judge(&o, b.data).rule, -1);
    lm_clean_word_len(&o, LM_RULE_MIN_WORD_LEN, lm_language_find("en"));
    assert_int_equal(judge(&o, b.data).rule, LM_RULE_MIN_WORD_LEN);
    lm_buf_fini(&b);
}

/* A 5-gram of such characters has ten of them, not five. */
static void n_grams_of_characters(void **st)
{
    static const char five[] = "\u4e00\u4e8c\u4e09\u56db\u4e94";
    static const char ten[] = "\u5929\u5730\u7384\u9ec4\u5b87\u5b99\u6d2a\u8352\u65e5\u6708";
    char text[200];
    (void)st;
    snprintf(text, sizeof text, "%s\u4eba%s\u53e3%s", five, five, five);
    assert_false(drops(LM_RULE_DUP_5, 0.0, text));
    snprintf(text, sizeof text, "%s\u4eba%s", ten, ten);
    assert_true(drops(LM_RULE_DUP_5, 0.47, text)); /* 10 of 21 characters */
    assert_false(drops(LM_RULE_DUP_5, 0.48, text));
    assert_false(
        drops(LM_RULE_TOP_2, 0.77, "\u4e00\u4e8c\u4eba\u4e00\u4e8c\u53e3")); /* pairs only */
    snprintf(text, sizeof text, "%.12s\u4eba%.12s", five, five);
    assert_true(drops(LM_RULE_TOP_2, 0.88, text)); /* twice four of 9 characters */
    assert_false(drops(LM_RULE_TOP_2, 0.89, text));
}

static void sentences_of_other_scripts(void **st)
{
    static const char zh[] = "\u4f60\u597d\u3002\u4e16\u754c\uff01\u4f60\uff1f\uff01";
    static const char hi[] = "\u0915\u0964 \u0916\u0964";
    static const char curly[] = "He said \u201cno.\u201d Yes.";
    (void)st;
    assert_int_equal(lm_line_sentences(zh, strlen(zh)), 3);
    assert_int_equal(lm_line_sentences(hi, strlen(hi)), 2);
    assert_int_equal(lm_line_sentences(curly, strlen(curly)), 2);
    assert_int_equal(lm_line_sentences("3.5 and e.g. this", 17), 1);
    assert_true(lm_line_ends_sentence(zh, strlen(zh)));
    assert_true(lm_line_ends_sentence(hi, strlen(hi)));
    assert_true(lm_line_ends_sentence("\u00ab oui \u00bb", strlen("\u00ab oui \u00bb")));
    assert_false(lm_line_ends_sentence("\u4f60", 3));
    assert_false(lm_line_ends_sentence("on...", 5));
    assert_false(lm_line_ends_sentence("", 0));
}

static void every_language_has_stop_words(void **st)
{
    lm_err e = { 0 };
    (void)st;
    assert_string_equal(lm_language_codes[0], "none");
    assert_null(lm_language_find("none"));
    for (int i = 1; lm_language_codes[i]; i++) {
        const lm_language *l = lm_language_find(lm_language_codes[i]);
        lm_stop_words *w = NULL;
        assert_non_null(l);
        assert_int_equal(lm_stop_words_new(l->words, strlen(l->words), l->code, &w, &e), 0);
        assert_true(lm_stop_words_count(w) >= 8);
        lm_stop_words_free(w);
    }
}

static void stop_words(void **st)
{
    static const char text[] = " \u00dcber\nund der  DER \u7684\t\u0438";
    static const char *const bad[] = {
        "", " \n", "a \u6211\u4eec", "a \xff",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    };
    lm_stop_words *w = NULL;
    lm_err e = { 0 };
    (void)st;
    assert_int_equal(lm_stop_words_new(text, strlen(text), "x", &w, &e), 0);
    assert_int_equal(lm_stop_words_count(w), 5); /* der occurs once */
    assert_int_equal(lm_stop_words_find(w, "\u00fcBER", 5), 0);
    assert_int_equal(lm_stop_words_find(w, "Und", 3), 1);
    assert_int_equal(lm_stop_words_find(w, "\u7684", 3), 3);
    assert_int_equal(lm_stop_words_find(w, "\u0418", 2), 4);
    assert_int_equal(lm_stop_words_find(w, "unds", 4), -1);
    assert_int_equal(lm_stop_words_find(w, "", 0), -1);
    lm_stop_words_free(w);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        e = (lm_err){ 0 };
        assert_int_equal(lm_stop_words_new(bad[i], strlen(bad[i]), "x", &w, &e), LM_EFORMAT);
        assert_null(w);
    }
}

static int setup(void **st)
{
    lm_err e = { 0 };
    (void)st;
    const char *words = lm_language_find("en")->words;
    assert_int_equal(lm_stop_words_new(words, strlen(words), "en", &english, &e), 0);
    return lm_clean_scratch_new(&scratch, &e);
}

static int teardown(void **st)
{
    (void)st;
    lm_clean_scratch_free(scratch);
    lm_stop_words_free(english);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gopher_quality),
        cmocka_unit_test(gopher_repetition),
        cmocka_unit_test(c4_lines),
        cmocka_unit_test(c4_documents),
        cmocka_unit_test(fineweb),
        cmocka_unit_test(defaults_keep_prose),
        cmocka_unit_test(characters_are_words_without_spaces),
        cmocka_unit_test(n_grams_of_characters),
        cmocka_unit_test(sentences_of_other_scripts),
        cmocka_unit_test(every_language_has_stop_words),
        cmocka_unit_test(stop_words),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
