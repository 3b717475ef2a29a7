/* SPDX-License-Identifier: Apache-2.0 */
/* Windows: each once per epoch, in an order given by the seed; documents; loss marks; batches and
 * their empty rows. */
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
#include "train/batch.h"
#include "train/data.h"

enum { T = 8 };
static const int lengths[] = { 3, 20, 1, 1, 30, 8, 8, 0, 11, 5 };
enum { DOCS = sizeof lengths / sizeof *lengths };

static char folder[] = "/tmp/test_train_feed.XXXXXX";
static lm_tokens *tokens;
static int64_t total;

/* Token i of the stream is i + 1, so that a window says where it comes from. */
static int begin(void **state)
{
    lm_err e = { 0 };
    lm_tokens_writer *w = NULL;
    char *path = NULL;
    (void)state;
    if (!mkdtemp(folder) || lm_path_join(&path, folder, "train", &e) ||
        lm_tokens_create(path, &(lm_tokens_writer_opts){ .vocab = 1000 }, &w, &e))
        return 1;
    for (int d = 0; d < DOCS; d++) {
        uint32_t ids[64];
        for (int i = 0; i < lengths[d]; i++)
            ids[i] = (uint32_t)++total;
        if (lm_tokens_put(w, ids, lengths[d], &e) || lm_tokens_end_doc(w, &e))
            return 1;
    }
    int bad = lm_tokens_commit(w, &e) || lm_tokens_open(path, LM_TOKENS_AUTO, -1, &tokens, &e) ||
              lm_tokens_index(tokens, NULL, &e);
    lm_free(path);
    return bad;
}

static int end(void **state)
{
    lm_err e = { 0 };
    (void)state;
    lm_tokens_close(tokens);
    return lm_rm_rf(folder, &e);
}

static lm_feed *feed(bool documents, bool shuffle, uint64_t seed, int64_t seq)
{
    lm_err e = { 0 };
    lm_feed *f = NULL;
    lm_feed_opts o = {
        .seq = seq, .documents = documents, .shuffle = shuffle, .seed = seed, .vocab = LM_ANY_ID
    };
    assert_int_equal(lm_feed_new(tokens, &o, &f, &e), LM_OK);
    return f;
}

typedef struct {
    int32_t token[T], target[T], pos[T], lo[T], hi[T];
    int64_t valid;
} window;

static window draw(lm_feed *f, int64_t index)
{
    window w;
    lm_err e = { 0 };
    assert_int_equal(lm_feed_window(f, index, w.token, w.target, w.pos, w.lo, w.hi, &w.valid, &e),
                     LM_OK);
    return w;
}

static void every_window_once_an_epoch(void **state)
{
    (void)state;
    lm_feed *f = feed(false, true, 5, T);
    int64_t n = lm_feed_windows(f), moved = 0;
    int first[64] = { 0 };
    assert_int_equal(n, (total - 1) / T);
    for (int epoch = 0; epoch < 4; epoch++) {
        int seen[64] = { 0 };
        for (int64_t i = 0; i < n; i++) {
            window w = draw(f, epoch * n + i);
            int at = (w.token[0] - 1) / T;
            assert_int_equal((w.token[0] - 1) % T, 0);
            assert_int_equal(seen[at]++, 0);
            if (epoch == 0)
                first[i] = at;
            moved += at != first[i];
            for (int k = 0; k < T; k++) {
                assert_int_equal(w.token[k], at * T + k + 1);
                assert_int_equal(w.target[k], at * T + k + 2);
            }
            assert_int_equal(w.valid, T);
        }
    }
    assert_true(moved > 0); /* another order in each epoch */
    lm_feed_free(f);
}

static void the_order_is_the_seeds(void **state)
{
    (void)state;
    lm_feed *a = feed(true, true, 5, T), *b = feed(true, true, 5, T), *c = feed(true, true, 6, T);
    int64_t n = 3 * lm_feed_windows(a), other = 0;
    for (int64_t i = 0; i < n; i++) {
        window x = draw(a, i), y = draw(b, n - 1 - i), z = draw(c, i); /* b: from the end */
        window again = draw(a, n - 1 - i);
        assert_memory_equal(again.token, y.token, sizeof y.token);
        other += memcmp(x.token, z.token, sizeof x.token) != 0;
    }
    assert_true(other > 0);
    lm_feed_free(a);
    lm_feed_free(b);
    lm_feed_free(c);
}

/* A second computation: walk the documents and store the start of its document for each token. */
static void documents_are_kept_apart(void **state)
{
    (void)state;
    int64_t start[256] = { 0 }, end_of[256] = { 0 }, next = 0;
    bool last[256] = { false };
    for (int d = 0; d < DOCS; d++) {
        for (int i = 0; i < lengths[d]; i++)
            start[next + i] = next, end_of[next + i] = next + lengths[d];
        next += lengths[d];
        if (next > 0)
            last[next - 1] = true;
    }
    lm_feed *f = feed(true, false, 0, T);
    for (int64_t w = 0; w < lm_feed_windows(f); w++) {
        window x = draw(f, w);
        int64_t valid = 0;
        for (int64_t k = 0; k < T; k++) {
            int64_t at = w * T + k, from = start[at] < w * T ? w * T : start[at];
            assert_int_equal(x.token[k], at + 1);
            assert_int_equal(x.target[k], last[at] ? -1 : at + 2);
            assert_int_equal(x.pos[k], at - from);
            assert_int_equal(x.lo[k], from - w * T);
            assert_int_equal(x.hi[k],
                             (end_of[at] < (w + 1) * T ? end_of[at] : (w + 1) * T) - w * T);
            valid += !last[at];
        }
        assert_int_equal(x.valid, valid);
    }
    lm_feed_free(f);
}

/* Windows of T ids side by side, each id in its place or as the target of it; the same in any order of reading, and in
 * marks. */
static void masked_windows(void **state)
{
    (void)state;
    const lm_mlm m = { .share = 0.4, .mask = 999, .words = 1000 };
    lm_err e = { 0 };
    lm_feed *f = NULL;
    lm_feed_opts o = {
        .seq = T, .documents = true, .shuffle = true, .seed = 3, .vocab = 1000, .mlm = &m
    };
    assert_int_equal(lm_feed_new(tokens, &o, &f, &e), LM_OK);
    int64_t n = lm_feed_windows(f), chosen = 0, other = 0;
    assert_int_equal(n, total / T);
    for (int64_t i = 3 * n - 1; i >= 0; i--) {
        window x = draw(f, i), y = draw(f, i % n);
        int32_t mark[T], pos[T], lo[T], hi[T];
        int64_t at = -1, count = 0, valid;
        for (int k = 0; k < T; k++) {
            int64_t id = x.target[k] >= 0 ? x.target[k] : x.token[k];
            at = at < 0 ? id - k : at;
            assert_int_equal(id, at + k);
            count += x.target[k] >= 0;
        }
        assert_int_equal(at % T, 1);
        assert_int_equal(count, x.valid);
        chosen += count;
        other += i >= n && memcmp(x.target, y.target, sizeof x.target) != 0;
        lm_feed_marks(f, i, mark, pos, lo, hi, &valid);
        assert_int_equal(valid, count);
        for (int k = 0; k < T; k++)
            assert_int_equal(mark[k], x.target[k] < 0 ? -1 : 0);
        assert_memory_equal(hi, x.hi, sizeof hi);
    }
    assert_true(chosen > 3 * n * T * 3 / 10 && chosen < 3 * n * T / 2);
    assert_true(other > 0); /* other masks and windows in other epochs */
    lm_feed_free(f);
}

static void too_little_is_refused(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_feed *f = NULL;
    assert_int_equal(lm_feed_new(tokens, &(lm_feed_opts){ .seq = total }, &f, &e), LM_EUSAGE);
    assert_null(f);
    f = feed(false, true, 0, total - 1);
    assert_int_equal(lm_feed_windows(f), 1);
    lm_feed_free(f);
}

/* Opening checks the ends only; a bad id in the middle is found when its window is read. */
static void ids_are_checked_as_they_are_read(void **state)
{
    (void)state;
    enum { N = 10 * T + 1, PLACE = 5 * T + 3 };
    lm_err e = { 0 };
    lm_tokens_writer *w = NULL;
    lm_tokens *t = NULL;
    lm_feed *f = NULL;
    char *path = NULL;
    uint32_t ids[N] = { [PLACE] = 900 };
    int32_t token[T], target[T], pos[T];
    int64_t valid;
    assert_int_equal(lm_path_join(&path, folder, "odd", &e), 0);
    assert_int_equal(lm_tokens_create(path, &(lm_tokens_writer_opts){ .vocab = 1000 }, &w, &e), 0);
    assert_int_equal(lm_tokens_put(w, ids, N, &e), 0);
    assert_int_equal(lm_tokens_end_doc(w, &e), 0);
    assert_int_equal(lm_tokens_commit(w, &e), 0);
    lm_data_opts o = { .vocab = 500, .eos = -1, .seq = T };
    assert_int_equal(lm_data_open(path, &o, NULL, &t, &e), 0);
    assert_int_equal(lm_feed_new(t, &(lm_feed_opts){ .seq = T, .vocab = 500 }, &f, &e), 0);
    for (int k = 0; k < 10; k++) {
        lm_code rc = lm_feed_window(f, k, token, target, pos, NULL, NULL, &valid, &e);
        assert_int_equal(rc, k == PLACE / T ? LM_EFORMAT : LM_OK);
        if (rc)
            assert_non_null(
                strstr(e.what, "id 900 at position 43 does not fit a vocabulary of 500"));
    }
    lm_feed_free(f);
    lm_tokens_close(t);
    t = NULL;
    e = (lm_err){ 0 };
    o.seq = N - 1;
    assert_int_equal(lm_data_open(path, &o, NULL, &t, &e), LM_EFORMAT);
    lm_tokens_close(t);
    lm_free(path);
}

/* A row trains if the id that it predicts is marked, whatever its own mark is. */
static void marks_are_those_of_the_targets(void **state)
{
    (void)state;
    enum { N = 6 * T + 1 };
    lm_err e = { 0 };
    lm_tokens_writer *w = NULL;
    lm_tokens *t = NULL;
    lm_feed *f = NULL;
    char *path = NULL;
    uint32_t ids[N];
    int32_t token[T], target[T], pos[T], marked[T];
    int64_t valid, trained = 0;
    for (uint32_t i = 0; i < N; i++) /* no period of T, no two neighbours alike throughout */
        ids[i] = (i + 1) | (i % 5 == 1 || i % 5 == 2 ? LM_TOKENS_TRAINS : 0);
    const lm_tokens_writer_opts how = { .vocab = 1000, .mask = true };
    assert_int_equal(lm_path_join(&path, folder, "marked", &e), 0);
    assert_int_equal(lm_tokens_create(path, &how, &w, &e), 0);
    assert_int_equal(lm_tokens_put(w, ids, N, &e), 0);
    assert_int_equal(lm_tokens_end_doc(w, &e), 0);
    assert_int_equal(lm_tokens_commit(w, &e), 0);
    const lm_data_opts o = { .vocab = 1000, .eos = -1, .seq = T };
    assert_int_equal(lm_data_open(path, &o, NULL, &t, &e), 0);
    assert_int_equal(lm_feed_new(t, &(lm_feed_opts){ .seq = T, .vocab = 1000 }, &f, &e), 0);
    for (int k = 0; k < 6; k++) {
        assert_int_equal(lm_feed_window(f, k, token, target, pos, NULL, NULL, &valid, &e), LM_OK);
        for (int i = 0; i < T; i++) {
            const uint32_t next = ids[k * T + i + 1];
            assert_int_equal(token[i], ids[k * T + i] & LM_TOKENS_ID);
            assert_int_equal(target[i],
                             next & LM_TOKENS_TRAINS ? (int32_t)(next & LM_TOKENS_ID) : -1);
            valid -= target[i] >= 0;
            trained += target[i] >= 0;
        }
        assert_int_equal(valid, 0);
        lm_feed_marks(f, k, marked, pos, NULL, NULL, &valid);
        for (int i = 0; i < T; i++)
            assert_int_equal(marked[i] < 0, target[i] < 0);
    }
    assert_true(trained > 6 * T / 3 && trained < 6 * T / 2);
    lm_feed_free(f);
    lm_tokens_close(t);
    lm_free(path);
}

static void a_batch_beyond_the_end_is_empty(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_batch b;
    lm_backend *backend = NULL;
    lm_feed *f = feed(true, false, 0, T);
    assert_int_equal(lm_backend_cpu(LM_CPU_REF, NULL, &backend, &e), LM_OK);
    assert_int_equal(lm_batch_new(&b, backend, 3, T, 0, &e), LM_OK);
    assert_int_equal(lm_batch_fill(&b, f, 1, 3, &e), LM_OK);
    window x = draw(f, 1), y = draw(f, 2);
    assert_int_equal(b.valid, x.valid + y.valid);
    assert_memory_equal(b.targets, x.target, sizeof x.target);
    assert_memory_equal(b.lo + T, y.lo, sizeof y.lo);
    for (int i = 2 * T; i < 3 * T; i++) {
        assert_int_equal(b.targets[i], -1);
        assert_int_equal(b.pos[i], i - 2 * T);
    }
    lm_batch_fini(&b);
    lm_backend_close(backend);
    lm_feed_free(f);
}

/* Modules read and predict nothing beyond the end of a document or a window; the rest follows. */
static void modules_stay_in_their_documents(void **state)
{
    enum { MODULES = 3, N = 3 * T };
    lm_err e = { 0 };
    lm_backend *backend = NULL;
    int64_t seen = 0, cut = 0;
    (void)state;
    assert_int_equal(lm_backend_cpu(LM_CPU_REF, NULL, &backend, &e), LM_OK);
    lm_feed *f = feed(true, false, 0, T);
    lm_batch b;
    assert_int_equal(lm_batch_new_ahead(&b, backend, 3, T, 0, MODULES, &e), LM_OK);
    for (int64_t at = 0; at < lm_feed_windows(f); at += 3) {
        assert_int_equal(lm_batch_fill(&b, f, at, lm_feed_windows(f), &e), LM_OK);
        lm_batch_fill_ahead(&b);
        for (int k = 0; k < MODULES; k++) {
            int64_t valid = 0;
            for (int i = 0; i < N; i++) {
                const int to = i + k + 1;
                const bool same = to / T == i / T && to < N && b.lo[to] == b.lo[i];
                assert_int_equal(b.ahead_targets[k][i], same ? b.targets[to] : -1);
                assert_int_equal(b.ahead_tokens[k][i], same ? b.tokens[to] : 0);
                valid += same && b.targets[to] >= 0;
                cut += to / T == i / T && to < N && !same;
            }
            assert_int_equal(b.ahead_valid[k], valid);
            seen += valid;
        }
    }
    assert_true(seen > 0 && cut > 0);
    lm_batch_fini(&b);
    lm_backend_close(backend);
    lm_feed_free(f);
}

/* Counts without reading ids equal the targets, positions and documents of the windows. */
static void marks_are_those_of_the_windows(void **state)
{
    (void)state;
    lm_err e = { 0 };
    lm_backend *backend = NULL;
    assert_int_equal(lm_backend_cpu(LM_CPU_REF, NULL, &backend, &e), LM_OK);
    for (int documents = 0; documents < 2; documents++) {
        lm_feed *f = feed(documents, true, 3, T);
        lm_batch full, marks;
        assert_int_equal(lm_batch_new(&full, backend, 3, T, 0, &e), LM_OK);
        assert_int_equal(lm_batch_new(&marks, backend, 3, T, 0, &e), LM_OK);
        for (int64_t i = 0; i < 2 * lm_feed_windows(f); i++) {
            assert_int_equal(lm_batch_fill(&full, f, i, INT64_MAX, &e), LM_OK);
            lm_batch_mark(&marks, f, i);
            assert_int_equal(marks.valid, full.valid);
            assert_memory_equal(marks.lo, full.lo, 3 * T * sizeof *full.lo);
            assert_memory_equal(marks.pos, full.pos, 3 * T * sizeof *full.pos);
            for (int k = 0; k < 3 * T; k++)
                assert_true((marks.targets[k] >= 0) == (full.targets[k] >= 0));
        }
        lm_batch_fini(&full);
        lm_batch_fini(&marks);
        lm_feed_free(f);
    }
    lm_backend_close(backend);
}

static void pairs_are_those_that_attention_sees(void **state)
{
    (void)state;
    int32_t lo[2 * T] = { 0, 0, 0, 3, 3, 3, 6, 6 };
    int32_t hi[2 * T] = { 3, 3, 3, 6, 6, 6, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8 };
    lm_batch b = { .batch = 2, .seq = T, .lo = lo, .hi = hi };
    /* documents of 3, 3 and 2 tokens; one of 8 */
    assert_int_equal(lm_batch_pairs(&b, 0, false), 6 + 6 + 3 + 36);
    assert_int_equal(lm_batch_pairs(&b, 2, false), 5 + 5 + 3 + 15);
    assert_int_equal(lm_batch_pairs(&b, 1, false), 16);
    assert_int_equal(lm_batch_pairs(&b, 100, false), lm_batch_pairs(&b, 0, false));
    assert_int_equal(lm_batch_pairs(&b, 0, true), 9 + 9 + 4 + 64);
    assert_int_equal(lm_batch_pairs(&b, 2, true), 7 + 7 + 4 + 22);
    assert_int_equal(lm_batch_pairs(&b, 1, true), 16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_window_once_an_epoch),
        cmocka_unit_test(the_order_is_the_seeds),
        cmocka_unit_test(documents_are_kept_apart),
        cmocka_unit_test(masked_windows),
        cmocka_unit_test(too_little_is_refused),
        cmocka_unit_test(ids_are_checked_as_they_are_read),
        cmocka_unit_test(marks_are_those_of_the_targets),
        cmocka_unit_test(a_batch_beyond_the_end_is_empty),
        cmocka_unit_test(modules_stay_in_their_documents),
        cmocka_unit_test(marks_are_those_of_the_windows),
        cmocka_unit_test(pairs_are_those_that_attention_sees),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
