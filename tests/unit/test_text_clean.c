/* SPDX-License-Identifier: Apache-2.0 */
/* Cleaning rules: each rule alone drops what it names and keeps what lies just inside its
 * threshold. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "text/clean.h"
#include "text/clean_parts.h"

static lm_clean_scratch *scratch;

/* Options in which no rule of the set can fail. */
static lm_clean_opts lenient(lm_clean_set set)
{
    lm_clean_opts o;
    lm_clean_defaults(&o);
    o.set[set] = true;
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

static int setup(void **st)
{
    lm_err e = { 0 };
    (void)st;
    return lm_clean_scratch_new(&scratch, &e);
}

static int teardown(void **st)
{
    (void)st;
    lm_clean_scratch_free(scratch);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gopher_quality), cmocka_unit_test(gopher_repetition),
        cmocka_unit_test(c4_lines),       cmocka_unit_test(c4_documents),
        cmocka_unit_test(fineweb),        cmocka_unit_test(defaults_keep_prose),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
