/* SPDX-License-Identifier: Apache-2.0 */
/* The rule of masked language modelling: shares over many tokens, special tokens, whole words, the same draws again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "train/mlm.h"
#include "train/targets.h"

/* Ids: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4, then words, of which every third continues one. */
enum { WORDS = 64, FIRST = 5, N = 1000 };

static lm_tokenizer *tokenizer(bool masks, const char *model)
{
    char text[8192], *at = text, *end = text + sizeof text;
    const char *special[] = { "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]" };
    lm_err e = { 0 };
    lm_tokenizer *t = NULL;
    at += snprintf(at, (size_t)(end - at), "{\"version\":\"1.0\",\"added_tokens\":[");
    for (int i = 0; i < FIRST - !masks; i++)
        at += snprintf(at, (size_t)(end - at),
                       "%s{\"id\":%d,\"content\":\"%s\",\"single_word\":false,\"lstrip\":false,"
                       "\"rstrip\":false,\"normalized\":false,\"special\":true}",
                       i ? "," : "", i, special[i]);
    at += snprintf(at, (size_t)(end - at),
                   "],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"},"
                   "\"post_processor\":null,\"decoder\":null,\"model\":{\"type\":\"%s\",%s"
                   "\"unk_token\":\"[UNK]\",\"vocab\":{",
                   model,
                   strcmp(model, "BPE")
                       ? "\"continuing_subword_prefix\":\"##\",\"max_input_chars_per_word\":100,"
                       : "\"merges\":[],");
    for (int i = 0; i < FIRST; i++)
        at +=
            snprintf(at, (size_t)(end - at), "\"%s\":%d,", masks || i < 4 ? special[i] : "[m]", i);
    for (int i = FIRST; i < WORDS; i++)
        at += snprintf(at, (size_t)(end - at), "\"%sw%d\":%d%s", i % 3 ? "" : "##", i, i,
                       i + 1 < WORDS ? "," : "}}}");
    if (lm_tokenizer_from_json(text, (size_t)(at - text), NULL, 0, "tokenizer.json", &t, &e))
        fail_msg("%s: %s", e.where, e.what);
    return t;
}

static lm_mlm masks_of(bool whole)
{
    lm_tokenizer *t = tokenizer(true, "WordPiece");
    lm_err e = { 0 };
    lm_mlm m = { .share = 0.15, .whole_words = whole };
    assert_int_equal(lm_mlm_init(&m, t, 100, "m", &e), LM_OK);
    assert_int_equal(m.mask, 4);
    assert_int_equal(m.words, WORDS);
    lm_tokenizer_free(t);
    return m;
}

static void make_window(int64_t w, int32_t *token)
{
    for (int i = 0; i < N; i++)
        token[i] = (int32_t)((i * 7 + w) % WORDS);
}

/* p of n draws within five standard deviations. */
static void about(int64_t got, int64_t n, double p)
{
    double sd = sqrt((double)n * p * (1 - p));
    if (fabs((double)got - (double)n * p) > 5 * sd)
        fail_msg("%lld of %lld, expected %.4f", (long long)got, (long long)n, p);
}

static void shares(void **state)
{
    (void)state;
    enum { WINDOWS = 400 };
    lm_mlm m = masks_of(false);
    int64_t all = 0, chosen = 0, masked = 0, drawn = 0, of[WORDS] = { 0 };
    int32_t before[N], token[N], target[N];
    for (int w = 0; w < WINDOWS; w++) {
        int64_t count = 0;
        make_window(w, before);
        memcpy(token, before, sizeof token);
        int64_t valid = lm_mlm_apply(&m, 7, w, N, NULL, token, target);
        for (int i = 0; i < N; i++) {
            bool special = before[i] < FIRST;
            all += !special;
            if (target[i] < 0) {
                assert_int_equal(token[i], before[i]);
                continue;
            }
            assert_false(special);
            assert_int_equal(target[i], before[i]);
            count++;
            masked += token[i] == 4;
            drawn += token[i] != 4 && token[i] != before[i];
            of[token[i]] += token[i] != before[i];
        }
        assert_int_equal(valid, count);
        chosen += count;
    }
    about(chosen, all, 0.15);
    about(masked, chosen, 0.8 + 0.1 / WORDS);
    about(drawn, chosen, 0.1 * (WORDS - 2) / WORDS);
    for (int i = 0; i < WORDS; i++) /* any token of the vocabulary is drawn */
        assert_true(of[i] > 0);
    lm_mlm_fini(&m);
}

static void draws_are_of_seed_and_window(void **state)
{
    (void)state;
    lm_mlm m = masks_of(false);
    int32_t a[N], b[N], x[N], y[N];
    for (int other = 0; other < 3; other++) { /* the same, another window, another seed */
        make_window(0, a);
        make_window(0, b);
        lm_mlm_apply(&m, 7, 5, N, NULL, a, x);
        lm_mlm_apply(&m, other == 2 ? 8 : 7, other == 1 ? 6 : 5, N, NULL, b, y);
        assert_int_equal(memcmp(x, y, sizeof x) == 0, other == 0);
        assert_int_equal(memcmp(a, b, sizeof a) == 0, other == 0);
    }
    make_window(0, a);
    make_window(0, b);
    lm_mlm_apply(&m, 7, 5, N, NULL, a, x);
    lm_mlm_apply(&m, 7, 5, N / 2, NULL, b, y); /* a place has the same draws in a shorter window */
    assert_memory_equal(a, b, N / 2 * sizeof *a);
    lm_mlm_fini(&m);
}

/* Tokens that do not train are not chosen; ids behind the tokenizer's are special. */
static void some_are_never_chosen(void **state)
{
    (void)state;
    lm_mlm m = masks_of(false);
    uint8_t trains[N];
    int32_t token[N], target[N];
    m.share = 0.999;
    for (int i = 0; i < N; i++) {
        trains[i] = i % 2;
        token[i] = i % 5 ? FIRST : WORDS + 3;
    }
    int64_t n = lm_mlm_apply(&m, 1, 0, N, trains, token, target);
    assert_true(n > 390 && n <= 400);
    for (int i = 0; i < N; i++)
        assert_true(target[i] < 0 || (i % 2 && i % 5));
    lm_mlm_fini(&m);
}

static void whole_words(void **state)
{
    (void)state;
    lm_mlm m = masks_of(true), each = masks_of(false);
    /* a word of three pieces, a word, [CLS], and a piece that continues nothing */
    const int32_t piece[6] = { 5, 6, 9, 7, 2, 6 };
    int32_t token[N], target[N], alone[N];
    int64_t chosen = 0, pairs = 0;
    for (int w = 0; w < 200; w++) {
        for (int i = 0; i < N; i++)
            token[i] = piece[i % 6];
        lm_mlm_apply(&each, 7, w, N, NULL, token, alone);
        for (int i = 0; i < N; i++)
            token[i] = piece[i % 6];
        lm_mlm_apply(&m, 7, w, N, NULL, token, target);
        for (int i = 0; i + 6 <= N; i += 6) {
            assert_int_equal(target[i] >= 0, target[i + 1] >= 0);
            assert_int_equal(target[i] >= 0, target[i + 2] >= 0);
            assert_int_equal(target[i + 4], -1);
            for (int k = 0; k < 6; k++) /* the draw of the place where a word begins */
                assert_true(k == 1 || k == 2 || target[i + k] == alone[i + k]);
            pairs++;
            chosen += target[i] >= 0;
        }
    }
    about(chosen, pairs, 0.15);
    lm_mlm_fini(&m);
    lm_mlm_fini(&each);
}

static void tokenizers_that_do_not_fit(void **state)
{
    (void)state;
    lm_tokenizer *none = tokenizer(false, "WordPiece"), *bpe = tokenizer(true, "BPE");
    lm_err e = { 0 };
    lm_mlm m = { .share = 0.15 };
    assert_int_equal(lm_mlm_init(&m, none, 100, "m0", &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "has no mask token"));
    e = (lm_err){ 0 };
    assert_int_equal(lm_mlm_init(&m, bpe, 100, "m0", &e), LM_OK);
    lm_mlm_fini(&m);
    m.whole_words = true;
    assert_int_equal(lm_mlm_init(&m, bpe, 100, "m0", &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "WordPiece alone"));
    lm_tokenizer_free(none);
    lm_tokenizer_free(bpe);
}

static void objectives(void **state)
{
    (void)state;
    static const char *const bad[] = { "",
                                       "ml",
                                       "mlm:share",
                                       "mlm:share=0",
                                       "mlm:share=1",
                                       "mlm:size=3",
                                       "clm:share=0.2",
                                       "mlm:whole_words=perhaps",
                                       "mlm:",
                                       NULL };
    lm_targets t;
    lm_err e = { 0 };
    assert_int_equal(lm_targets_parse(NULL, &t, &e), LM_OK);
    assert_int_equal(t.kind, LM_TARGETS_OF_MODEL);
    assert_int_equal(lm_targets_parse("clm", &t, &e), LM_OK);
    assert_int_equal(t.kind, LM_TARGETS_NEXT);
    assert_int_equal(lm_targets_parse("mlm", &t, &e), LM_OK);
    assert_true(t.kind == LM_TARGETS_MASKED && fabs(t.key[LM_TARGETS_SHARE] - 0.15) < 1e-12);
    assert_int_equal(lm_targets_parse("mlm:share=0.3,whole-words=on", &t, &e), LM_OK);
    assert_true(fabs(t.key[LM_TARGETS_SHARE] - 0.3) < 1e-12 && t.key[LM_TARGETS_WHOLE_WORDS] > 0);
    for (int i = 0; bad[i]; i++) {
        e = (lm_err){ 0 };
        if (lm_targets_parse(bad[i], &t, &e) != LM_EUSAGE)
            fail_msg("'%s' was accepted", bad[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares),
        cmocka_unit_test(draws_are_of_seed_and_window),
        cmocka_unit_test(some_are_never_chosen),
        cmocka_unit_test(whole_words),
        cmocka_unit_test(tokenizers_that_do_not_fit),
        cmocka_unit_test(objectives),
    };
    return cmocka_run_group_tests_name("train_mlm", tests, NULL, NULL);
}
