/* SPDX-License-Identifier: Apache-2.0 */
/* test_text_bpe_train.c -- the learned merges, against a trainer that recounts all pairs at each
 * merge. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/rng.h"
#include "text/bpe_train.h"
#include "text/tokenizer.h"

#define WORDS "\\S+|\\s" /* what the naive trainer does */

static json_t *learn(const lm_bpe_train_opts *o, const char *const *docs, int n, int threads,
                     lm_bpe_train_stats *stats)
{
    lm_bpe_trainer *t;
    lm_buf json = { 0 };
    lm_err e = { 0 };
    json_t *j;

    if (lm_bpe_trainer_new(o, threads, &t, &e))
        fail_msg("%s: %s", e.where, e.what);
    for (int i = 0; i < n; i++)
        assert_int_equal(lm_bpe_trainer_add(t, i % threads, docs[i], strlen(docs[i]), &e), 0);
    assert_int_equal(lm_bpe_trainer_finish(t, NULL, &json, stats, &e), 0);
    lm_bpe_trainer_free(t);
    assert_int_equal(lm_json_parse(json.data, json.len, "trained", &j, &e), 0);
    lm_buf_fini(&json);
    return j;
}

/* ---- the naive trainer, for ASCII without a special token ---- */

enum { MAX_WORDS = 400, MAX_LEN = 16, MAX_IDS = 400 };
typedef struct {
    int sym[MAX_LEN], n;
} word;
typedef struct {
    char text[64];
} name;
static word naive[MAX_WORDS];
static int n_naive, n_names;
static name names[MAX_IDS];

static void cut(const char *doc)
{
    for (const char *p = doc; *p;) {
        size_t n = *p == ' ' ? 1 : strcspn(p, " ");
        word *w = &naive[n_naive++];
        assert_true(n_naive < MAX_WORDS && n < MAX_LEN);
        w->n = (int)n;
        for (size_t i = 0; i < n; i++)
            w->sym[i] = p[i] == ' ' ? 220 : p[i] - '!';
        p += n;
    }
}

static int count(int a, int b)
{
    int c = 0;
    for (int w = 0; w < n_naive; w++)
        for (int i = 0; i + 1 < naive[w].n; i++)
            c += naive[w].sym[i] == a && naive[w].sym[i + 1] == b;
    return c;
}

/* The next pair to merge; false when there is none. */
static bool choose(int *a, int *b)
{
    int best = 0;
    for (int w = 0; w < n_naive; w++)
        for (int i = 0; i + 1 < naive[w].n; i++) {
            int x = naive[w].sym[i], y = naive[w].sym[i + 1], c = count(x, y);
            if (c > best || (c == best && (x < *a || (x == *a && y < *b)))) {
                best = c;
                *a = x;
                *b = y;
            }
        }
    return best > 0;
}

static void merge(int a, int b)
{
    name joined;
    int id = 0;
    snprintf(joined.text, sizeof joined.text, "%.31s%.31s", names[a].text, names[b].text);
    while (id < n_names && strcmp(names[id].text, joined.text))
        id++;
    if (id == n_names)
        names[n_names++] = joined;
    for (int w = 0; w < n_naive; w++) {
        int k = 0;
        for (int i = 0; i < naive[w].n; i++) {
            bool hit = i + 1 < naive[w].n && naive[w].sym[i] == a && naive[w].sym[i + 1] == b;
            naive[w].sym[k++] = hit ? id : naive[w].sym[i];
            i += hit;
        }
        naive[w].n = k;
    }
}

static void equals_naive(void **state)
{
    lm_rng r = lm_rng_make(3, "test", 0);
    uint64_t at = 0;

    (void)state;
    for (int round = 0; round < 30; round++) {
        char doc[8][200];
        const char *docs[8];
        lm_bpe_train_opts o = { .vocab_size = 256 + 40, .pattern = WORDS };
        lm_bpe_train_stats stats;
        n_naive = 0;
        for (int d = 0; d < 8; d++) {
            size_t n = 20 + lm_rng_below(r, at++, 100), run = 0;
            for (size_t i = 0; i < n; i++) {
                bool space = run == MAX_LEN - 2 || lm_rng_below(r, at++, 6) == 0;
                run = space ? 0 : run + 1;
                doc[d][i] =
                    space ? ' ' : (char)('a' + lm_rng_below(r, at++, 2 + (uint64_t)round % 3));
            }
            doc[d][n] = 0;
            docs[d] = doc[d];
            cut(doc[d]);
        }
        json_t *j = learn(&o, docs, 8, 1 + round % 3, &stats);
        const json_t *merges = json_object_get(json_object_get(j, "model"), "merges");
        n_names = 256;
        for (int i = 0; i < 256; i++)
            snprintf(names[i].text, 8, "%c", i < 94 ? '!' + i : 1);
        int a = 0, b = 0;
        size_t m = 0;
        for (; n_names < o.vocab_size && choose(&a, &b); m++) {
            const json_t *got = json_array_get(merges, m);
            assert_non_null(got);
            assert_string_equal(json_string_value(json_array_get(got, 0)), names[a].text);
            assert_string_equal(json_string_value(json_array_get(got, 1)), names[b].text);
            merge(a, b);
        }
        assert_int_equal(json_array_size(merges), m);
        assert_int_equal(stats.merges, m);
        assert_int_equal(stats.words, n_naive);
        json_decref(j);
    }
}

static void specials_come_first(void **state)
{
    static const char *const special[] = { "<s>", "</s>" };
    static const char *const docs[] = { "ab<s>ab</s>ab" };
    lm_bpe_train_opts o = {
        .vocab_size = 259, .pattern = "gpt2", .special = special, .n_special = 2
    };
    lm_bpe_train_stats stats;
    json_t *j = learn(&o, docs, 1, 1, &stats);
    char *text = json_dumps(j, JSON_COMPACT);
    lm_tokenizer *t;
    lm_tok_scratch *s;
    lm_ids ids = { 0 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_tokenizer_from_json(text, strlen(text), NULL, 0, "trained", &t, &e), 0);
    assert_int_equal(lm_tokenizer_vocab_size(t), 259);
    assert_int_equal(lm_tokenizer_id(t, "</s>", 4), 1);
    assert_int_equal(lm_tokenizer_id(t, "!", 1), 2);
    assert_int_equal(lm_tokenizer_id(t, "ab", 2), 258);
    assert_int_equal(lm_tok_scratch_new(t, &s, &e), 0);
    assert_int_equal(lm_tokenizer_encode(t, s, "ab<s>ab", 7, false, &ids, &e), 0);
    assert_int_equal(ids.n, 3);
    assert_int_equal(ids.v[0], 258);
    assert_int_equal(ids.v[1], 0);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    free(text);
    json_decref(j);
}

static void bad_requests(void **state)
{
    static const char *const twice[] = { "x", "x" };
    static const lm_bpe_train_opts bad[] = {
        { .vocab_size = 255, .pattern = "gpt2" },
        { .vocab_size = 257, .pattern = "gpt2", .special = twice, .n_special = 2 },
        { .vocab_size = 300, .pattern = "gpt2", .special = twice, .n_special = 2 },
        { .vocab_size = 300, .pattern = "[" },
        { .vocab_size = 300, .pattern = "" },
        { .vocab_size = 300, .pattern = "\\h+" },
        { .vocab_size = (int64_t)1 << 40, .pattern = "gpt2" },
    };
    const lm_bpe_train_opts good = { .vocab_size = 300, .pattern = "gpt2" };
    lm_bpe_trainer *t;
    lm_bpe_train_stats stats;
    lm_buf json = { 0 };
    lm_err e = { 0 };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        e = (lm_err){ 0 };
        assert_int_equal(lm_bpe_trainer_new(&bad[i], 1, &t, &e), LM_EUSAGE);
        assert_null(t);
    }
    e = (lm_err){ 0 };
    assert_int_equal(lm_bpe_trainer_new(&good, 2, &t, &e), 0);
    assert_int_equal(lm_bpe_trainer_add(t, 1, "a\x80", 2, &e), LM_EFORMAT);
    e = (lm_err){ 0 };
    assert_int_equal(lm_bpe_trainer_add(t, 1, "", 0, &e), 0);
    assert_int_equal(lm_bpe_trainer_finish(t, NULL, &json, &stats, &e), LM_EUSAGE);
    lm_bpe_trainer_free(t);
    lm_buf_fini(&json);
}

/* Merges of characters: a tie goes to the smallest ids, and the right part loses its prefix. */
static void wordpiece(void **state)
{
    static const char *const specials[] = { "[UNK]" }, *const docs[] = { "AAB aab aab, ab", "ab" };
    static const char *const want[] = { "[UNK]", ",", "a", "b", "##a", "##b", "aa", "aab", "ab" };
    const lm_bpe_train_opts o = {
        .model = LM_TRAIN_WORDPIECE, .vocab_size = 12, .special = specials, .n_special = 1
    };
    lm_bpe_train_stats stats;
    json_t *j = learn(&o, docs, 2, 2, &stats);
    const json_t *vocab = json_object_get(json_object_get(j, "model"), "vocab");

    (void)state;
    assert_int_equal(stats.vocab_size, 9);
    assert_int_equal(stats.words, 6);
    assert_int_equal(json_object_size(vocab), 9);
    for (int i = 0; i < 9; i++)
        assert_int_equal(json_integer_value(json_object_get(vocab, want[i])), i);
    json_decref(j);
}

/* Parts that many words share become pieces; all characters are there; scores are sorted and their
 * probabilities sum to about 1. */
static void unigram(void **state)
{
    static const char *const specials[] = { "<unk>" };
    static const char *const docs[] = {
        "lowly newly fewly slowly lowing newing fewing slowing lowest newest fewest slowest",
        "low new few slow lows news fews slows lower newer fewer slower lowers newers fewers z"
    };
    const lm_bpe_train_opts o = {
        .model = LM_TRAIN_UNIGRAM, .vocab_size = 40, .special = specials, .n_special = 1
    };
    lm_bpe_train_stats stats;
    json_t *j = learn(&o, docs, 2, 1, &stats), *v;
    const json_t *vocab = json_object_get(json_object_get(j, "model"), "vocab");
    double sum = 0, last = 0;
    bool stem = false, letter = false;
    size_t i;

    (void)state;
    assert_true(json_array_size(vocab) > 20 && json_array_size(vocab) <= 40);
    json_array_foreach(vocab, i, v)
    {
        const char *text = json_string_value(json_array_get(v, 0));
        double score = json_number_value(json_array_get(v, 1));
        stem |= !strcmp(text, "\xE2\x96\x81new");
        letter |= !strcmp(text, "z");
        if (i)
            sum += exp(score);
        assert_true(!i || score <= last);
        last = score;
    }
    assert_true(stem && letter);
    assert_true(sum > 0.7 && sum < 1.05);
    json_decref(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_naive), cmocka_unit_test(specials_come_first),
        cmocka_unit_test(bad_requests), cmocka_unit_test(wordpiece),
        cmocka_unit_test(unigram),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
