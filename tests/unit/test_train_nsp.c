/* SPDX-License-Identifier: Apache-2.0 */
/* Pairs of texts: what a window is of, labels, the same in any order of reading and in marks, batches, refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "train/batch.h"

enum { T = 11, FIRST = 901, BETWEEN = 902, PAD = 900, MASK = 903, DOCUMENTS = 7 };
/* With the ids at their ends: 0 and 1 stretch of a short one, full ones, a rest that is too short, no text at all. */
static const int lengths[DOCUMENTS] = { 3, 4, 8, 19, 2, 30, 0 };
static const int stretches[DOCUMENTS] = { 0, 1, 1, 2, 0, 4, 0 };

static char folder[] = "/tmp/test_train_nsp.XXXXXX";
static lm_tokens *tokens;
static const lm_nsp_ids joins = { .on = true, .first = FIRST, .between = BETWEEN, .pad = PAD };

/* Document d is FIRST, 100 d + 1, 100 d + 2, ..., BETWEEN: an id says where it is. */
static lm_tokens *write_data(const char *name, int documents, bool mask)
{
    lm_err e = { 0 };
    lm_tokens_writer *w = NULL;
    lm_tokens *out = NULL;
    char *path = NULL;
    const lm_tokens_writer_opts o = { .vocab = 1000, .mask = mask };
    assert_int_equal(lm_path_join(&path, folder, name, &e), LM_OK);
    assert_int_equal(lm_tokens_create(path, &o, &w, &e), LM_OK);
    for (int d = 0; d < documents; d++) {
        uint32_t ids[64];
        for (int i = 0; i < lengths[d]; i++)
            ids[i] = !i ? FIRST : i + 1 < lengths[d] ? (uint32_t)(100 * d + i) : BETWEEN;
        assert_int_equal(lm_tokens_put(w, ids, lengths[d], &e), LM_OK);
        assert_int_equal(lm_tokens_end_doc(w, &e), LM_OK);
    }
    assert_int_equal(lm_tokens_commit(w, &e), LM_OK);
    assert_int_equal(lm_tokens_open(path, LM_TOKENS_AUTO, -1, &out, &e), LM_OK);
    assert_int_equal(lm_tokens_index(out, NULL, &e), LM_OK);
    lm_free(path);
    return out;
}

static int begin(void **state)
{
    (void)state;
    if (!mkdtemp(folder))
        return 1;
    tokens = write_data("train", DOCUMENTS, false);
    return 0;
}

static int end(void **state)
{
    lm_err e = { 0 };
    (void)state;
    lm_tokens_close(tokens);
    return lm_rm_rf(folder, &e);
}

typedef struct {
    int32_t token[T], target[T], pos[T], lo[T], hi[T], type[T], follows;
    int64_t valid;
} window;

static const lm_mlm masks = { .share = 0.3, .mask = MASK, .words = 900 };

static lm_feed *feed(uint64_t seed)
{
    lm_err e = { 0 };
    lm_feed *f = NULL;
    static uint8_t kind[900]; /* ids from 900 on are special */
    static lm_mlm m;
    m = masks;
    m.kind = kind;
    const lm_feed_opts o = { .seq = T,
                             .documents = true,
                             .shuffle = true,
                             .seed = seed,
                             .vocab = 1000,
                             .mlm = &m,
                             .nsp = &joins };
    assert_int_equal(lm_feed_new(tokens, &o, &f, &e), LM_OK);
    return f;
}

static window draw(lm_feed *f, int64_t index)
{
    window w;
    lm_err e = { 0 };
    memset(&w, 0, sizeof w);
    assert_int_equal(lm_feed_sentences(f, index, w.token, w.target, w.pos, w.lo, w.hi, w.type,
                                       &w.follows, &w.valid, &e),
                     LM_OK);
    return w;
}

/* The id of row i without its mask. */
static int id_of(const window *w, int i)
{
    return w->target[i] >= 0 ? w->target[i] : w->token[i];
}

/* Rows [from, to) are ids of one document, one behind another: which. */
static int document_of(const window *w, int from, int to)
{
    for (int i = from; i < to; i++) {
        const int id = id_of(w, i);
        assert_true(id % 100 >= 1 && id % 100 <= lengths[id / 100] - 2);
        assert_int_equal(id, id_of(w, from) + i - from);
    }
    assert_true(to > from);
    return id_of(w, from) / 100;
}

/* Checks the window; counts its stretch's document in *own. */
static void check_window(const window *w, int *own)
{
    int a = 1, n;
    assert_int_equal(w->token[0], FIRST);
    while (w->token[a] != BETWEEN)
        a++;
    for (n = a + 1; w->token[n] != BETWEEN;)
        n++;
    *own = document_of(w, 1, a);
    const int second = document_of(w, a + 1, n);
    n++;
    if (w->follows)
        assert_int_not_equal(second, *own);
    else
        assert_int_equal(id_of(w, a + 1), id_of(w, a - 1) + 1);
    int64_t valid = 0;
    for (int i = 0; i < T; i++) {
        const bool padding = i >= n;
        assert_int_equal(w->type[i], i > a && !padding);
        assert_int_equal(w->pos[i], i);
        assert_int_equal(w->lo[i], padding ? i : 0);
        assert_int_equal(w->hi[i], padding ? i + 1 : n);
        assert_true(w->target[i] < 0 || (i != 0 && i != a && i < n - 1));
        if (padding)
            assert_int_equal(w->token[i], PAD);
        valid += w->target[i] >= 0;
    }
    assert_int_equal(w->valid, valid);
}

static void pairs_are_of_the_documents(void **state)
{
    (void)state;
    lm_feed *f = feed(5), *g = feed(6);
    const int64_t n = lm_feed_windows(f);
    int64_t seen[DOCUMENTS] = { 0 }, all = 0, other = 0, epochs = 40;
    for (int d = 0; d < DOCUMENTS; d++)
        all += stretches[d];
    assert_int_equal(n, all);
    assert_true(lm_feed_has_sentences(f));
    int64_t unlike = 0;
    for (int64_t i = epochs * n - 1; i >= 0; i--) {
        const window w = draw(f, i), again = draw(f, i), x = draw(g, i);
        int own;
        check_window(&w, &own);
        seen[own]++;
        other += w.follows;
        unlike += memcmp(&w, &x, sizeof w) != 0;
        assert_memory_equal(&w, &again, sizeof w);
        window m;
        lm_feed_marks(f, i, m.target, m.pos, m.lo, m.hi, &m.valid);
        for (int k = 0; k < T; k++)
            assert_int_equal(m.target[k], w.target[k] < 0 ? -1 : 0);
        assert_memory_equal(m.hi, w.hi, sizeof w.hi);
        assert_int_equal(m.valid, w.valid);
    }
    for (int d = 0; d < DOCUMENTS; d++)
        assert_int_equal(seen[d], epochs * stretches[d]);
    assert_true(other > epochs * n * 4 / 10 && other < epochs * n * 6 / 10);
    assert_true(unlike > epochs * n * 9 / 10);
    lm_feed_free(f);
    lm_feed_free(g);
}

static void batches_hold_types_and_labels(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_backend *cpu;
    lm_batch b;
    lm_feed *f = feed(5);
    assert_int_equal(lm_backend_cpu(LM_CPU_REF, NULL, &cpu, &e), LM_OK);
    assert_int_equal(lm_batch_new(&b, cpu, 3, T, 0, &e), LM_OK);
    for (int64_t at = 0; at < 9; at += 3) {
        assert_int_equal(lm_batch_fill(&b, f, at, INT64_MAX, &e), LM_OK);
        for (int i = 0; i < 3; i++) {
            const window w = draw(f, at + i);
            assert_memory_equal(b.tokens + i * T, w.token, sizeof w.token);
            assert_memory_equal(b.types + i * T, w.type, sizeof w.type);
            assert_memory_equal(b.hi + i * T, w.hi, sizeof w.hi);
            assert_int_equal(b.follows[i], w.follows);
        }
    }
    lm_batch_fini(&b);
    lm_backend_close(cpu);
    lm_feed_free(f);
}

static void refuse(const lm_tokens *t, int64_t seq, const char *what)
{
    lm_err e = { 0 };
    lm_nsp *p = NULL;
    assert_int_equal(lm_nsp_new(t, &joins, seq, 1000, 0, &p, &e), LM_EUSAGE);
    if (!strstr(e.what, what))
        fail_msg("%s", e.what);
    assert_null(p);
}

static void what_has_no_pairs_is_refused(void **state)
{
    (void)state;
    lm_tokens *masked = write_data("masked", 4, true), *one = write_data("one", 1, false);
    refuse(tokens, LM_NSP_LEAST - 1, "7 tokens, but a pair has at least 8");
    refuse(masked, T, "its marks say which tokens train");
    refuse(one, T, "no document has the 4 ids of a pair");
    lm_tokens_close(masked);
    lm_tokens_close(one);
}

/* Another document is found even where it has one id of text. */
static void short_texts_are_found(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_tokens *two = write_data("two", 2, false);
    lm_nsp *p = NULL;
    int32_t token[T], type[T], follows, some = 0;
    int64_t rows;
    assert_int_equal(lm_nsp_new(two, &joins, T, 1000, 0, &p, &e), LM_OK);
    assert_int_equal(lm_nsp_windows(p), 1);
    for (int i = 0; i < 40; i++) {
        assert_int_equal(lm_nsp_fill(p, 0, i, token, type, &rows, &follows, &e), LM_OK);
        assert_int_equal(rows, 5);
        some += follows;
    }
    assert_true(some > 5); /* document 0 has one id of text */
    lm_nsp_free(p);
    lm_tokens_close(two);
}

/* Measurements have no data. */
static void random_ids_make_pairs(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_nsp *p = NULL;
    int32_t token[T], type[T], follows;
    int64_t rows;
    assert_int_equal(lm_nsp_new(NULL, &joins, T, 1000, 7, &p, &e), LM_OK);
    assert_int_equal(lm_nsp_fill(p, 3, 3, token, type, &rows, &follows, &e), LM_OK);
    assert_int_equal(rows, T);
    assert_int_equal(token[0], FIRST);
    assert_int_equal(token[T - 1], BETWEEN);
    lm_nsp_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_are_of_the_documents),
        cmocka_unit_test(batches_hold_types_and_labels),
        cmocka_unit_test(what_has_no_pairs_is_refused),
        cmocka_unit_test(short_texts_are_found),
        cmocka_unit_test(random_ids_make_pairs),
    };
    return cmocka_run_group_tests_name("train_nsp", tests, begin, end);
}
