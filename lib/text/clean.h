/* SPDX-License-Identifier: Apache-2.0 */
/* clean.h -- filters of text quality: the published rules for documents that are not worth learning
 * from.
 *
 * Sets of rules, applied in this order; the first rule that fails names the reason:
 * - gopher: repetition, then quality (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1);
 * - c4: lines are dropped, then documents (Raffel et al. 2020, arXiv:1910.10683, section 2.2);
 * - fineweb: the rules found by ablation (Penedo et al. 2024, arXiv:2406.17557, section 3.6).
 * Where the papers are not specific, datatrove's interpretation is used, with these choices of our
 * own: a word is a run of characters without white space, or one character in scripts without
 * spaces (cjk.h), punctuation around it is not counted in its length and its spelling; a sentence
 * ends at . ? or ! before white space or the end of a line, or at such a mark of another script;
 * the top n-gram counts only when it occurs twice.  Lengths are in characters (code points).
 *
 * Two things depend on the language and are off without one (language.h): stop words, and the mean
 * length of words. */
#ifndef LM_TEXT_CLEAN_H
#define LM_TEXT_CLEAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "text/language.h"

typedef enum { LM_CLEAN_GOPHER, LM_CLEAN_C4, LM_CLEAN_FINEWEB, LM_CLEAN_SETS } lm_clean_set;

/* X(ID, set, shape, name, default, max, help).  Shape: NUM has a threshold, FLAG is on or off, LIST
 * is one of a list of thresholds (n-grams), BYLANG a threshold that the language sets.  `help`
 * completes "drop a document ..." or, for LINE rules, "drop a line ...". */
#define LM_CLEAN_RULES(X)                                                                         \
    X(DUP_LINES, GOPHER, NUM, "gopher-dup-lines", 0.3, 1, "more of its lines are repeats")        \
    X(DUP_LINE_CHARS, GOPHER, NUM, "gopher-dup-line-chars", 0.2, 1, "characters in such lines")   \
    X(DUP_PARAS, GOPHER, NUM, "gopher-dup-paras", 0.3, 1, "more of its paragraphs are repeats")   \
    X(DUP_PARA_CHARS, GOPHER, NUM, "gopher-dup-para-chars", 0.2, 1,                               \
      "characters in such paragraphs")                                                            \
    X(TOP_2, GOPHER, LIST, "gopher-top-2-gram", 0.20, 1, "")                                      \
    X(TOP_3, GOPHER, LIST, "gopher-top-3-gram", 0.18, 1, "")                                      \
    X(TOP_4, GOPHER, LIST, "gopher-top-4-gram", 0.16, 1, "")                                      \
    X(DUP_5, GOPHER, LIST, "gopher-dup-5-gram", 0.15, 1, "")                                      \
    X(DUP_6, GOPHER, LIST, "gopher-dup-6-gram", 0.14, 1, "")                                      \
    X(DUP_7, GOPHER, LIST, "gopher-dup-7-gram", 0.13, 1, "")                                      \
    X(DUP_8, GOPHER, LIST, "gopher-dup-8-gram", 0.12, 1, "")                                      \
    X(DUP_9, GOPHER, LIST, "gopher-dup-9-gram", 0.11, 1, "")                                      \
    X(DUP_10, GOPHER, LIST, "gopher-dup-10-gram", 0.10, 1, "")                                    \
    X(MIN_WORDS, GOPHER, NUM, "gopher-min-words", 50, 1e12, "fewer words than this")              \
    X(MAX_WORDS, GOPHER, NUM, "gopher-max-words", 100000, 1e12, "more words than this")           \
    X(MIN_WORD_LEN, GOPHER, BYLANG, "gopher-min-word-len", 3, 1e6, "mean word shorter than this") \
    X(MAX_WORD_LEN, GOPHER, BYLANG, "gopher-max-word-len", 10, 1e6, "mean word longer than this") \
    X(HASHES, GOPHER, NUM, "gopher-hashes", 0.1, 1e6, "more '#' a word")                          \
    X(ELLIPSES, GOPHER, NUM, "gopher-ellipses", 0.1, 1e6, "more '...' a word")                    \
    X(BULLETS, GOPHER, NUM, "gopher-bullets", 0.9, 1, "more of its lines begin with a bullet")    \
    X(ELLIPSIS_LINES, GOPHER, NUM, "gopher-ellipsis-lines", 0.3, 1, "more lines end in '...'")    \
    X(ALPHA, GOPHER, NUM, "gopher-alpha-words", 0.8, 1, "fewer of its words hold a letter")       \
    X(STOP_WORDS, GOPHER, NUM, "gopher-stop-words", 2, 1e6, "fewer different stop words")         \
    X(LOREM, C4, FLAG, "c4-lorem-ipsum", 1, 1, "it contains 'lorem ipsum'")                       \
    X(CURLY, C4, FLAG, "c4-curly-bracket", 1, 1, "it contains a '{'")                             \
    X(LINE_WORD_LEN, C4, NUM, "c4-max-word-len", 1000, 1e9, "line: a word longer than this")      \
    X(LINE_PUNCT, C4, FLAG, "c4-terminal-punct", 1, 1, "line: does not end in . ? ! or a quote")  \
    X(LINE_WORDS, C4, NUM, "c4-min-line-words", 3, 1e9, "line: fewer words than this")            \
    X(LINE_SCRIPT, C4, FLAG, "c4-javascript", 1, 1, "line: contains 'javascript'")                \
    X(LINE_POLICY, C4, FLAG, "c4-policy", 1, 1, "line: terms of use, privacy, cookies")           \
    X(SENTENCES, C4, NUM, "c4-min-sentences", 5, 1e9, "fewer sentences remain")                   \
    X(FW_PUNCT, FINEWEB, NUM, "fineweb-line-punct", 0.12, 1, "fewer lines end in punctuation")    \
    X(FW_SHORT, FINEWEB, NUM, "fineweb-short-lines", 0.67, 1,                                     \
      "more lines of 30 characters at most")                                                      \
    X(FW_DUP_CHARS, FINEWEB, NUM, "fineweb-dup-line-chars", 0.01, 1,                              \
      "characters in repeated lines")                                                             \
    X(FW_NEWLINES, FINEWEB, NUM, "fineweb-newlines", 0.3, 1e6, "more newlines a word")

#define LM_CLEAN_ENUM(id, set, shape, name, dflt, max, help) LM_RULE_##id,
typedef enum { LM_CLEAN_RULES(LM_CLEAN_ENUM) LM_RULES } lm_clean_rule;
#undef LM_CLEAN_ENUM

const char *lm_clean_rule_name(lm_clean_rule r); /* "gopher-min-words", the option's name */
lm_clean_set lm_clean_rule_set(lm_clean_rule r);
bool lm_clean_rule_is_line(lm_clean_rule r); /* true: drops lines, not documents */

typedef struct {
    bool set[LM_CLEAN_SETS];
    struct {
        double limit;
        bool on;
    } rule[LM_RULES];
    bool strip_citations;      /* c4: [1], [edit], [citation needed] */
    const lm_stop_words *stop; /* NULL: STOP_WORDS is off */
} lm_clean_opts;
/* Thresholds as above, no set chosen, no language: MIN_WORD_LEN and MAX_WORD_LEN are off. */
void lm_clean_defaults(lm_clean_opts *o);
/* The bound for MIN_WORD_LEN (or MAX_WORD_LEN) in a language; NULL: none, the rule is off. */
void lm_clean_word_len(lm_clean_opts *o, lm_clean_rule r, const lm_language *l);

typedef struct lm_clean_scratch lm_clean_scratch; /* one per thread */
lm_code lm_clean_scratch_new(lm_clean_scratch **out, lm_err *e);
void lm_clean_scratch_free(lm_clean_scratch *s);

typedef struct {
    int rule; /* the lm_clean_rule that failed, -1: the document is kept */
    /* the kept text: the input itself, or memory of the scratch until its next use */
    const char *text;
    size_t len;
    int64_t lines[LM_RULES]; /* lines dropped, by rule */
} lm_clean_result;

/* Judge text[0..len), valid UTF-8.  Fails: LM_ELIMIT. */
lm_code lm_clean_text(const lm_clean_opts *o, lm_clean_scratch *s, const char *text, size_t len,
                      lm_clean_result *r, lm_err *e);

#endif
