/* SPDX-License-Identifier: Apache-2.0 */
/* unigram_train.c -- learning a Unigram model (arXiv:1804.10959), as SentencePiece and `tokenizers`
 * do.
 *
 * 1. Seeds: all characters, and the substrings that occur at least twice among the different words
 *    and are not always followed by one character, nor always by the end of the word.
 * 2. Rounds of two steps of expectation maximisation with the sparse prior of digamma (Liang and
 *    Klein, 2007) over all cuts of all words; then pieces whose removal costs the least likelihood
 *    are dropped, a quarter a round at most, until 1.1 times the vocabulary is left.
 * 3. The vocabulary: special tokens, all characters, then the pieces with the highest scores.
 *
 * Words are in the order of their bytes, so that sums do not depend on threads.  Serial. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "text/subword.h"
#include "text/train_impl.h"

enum { MOST_CHARS = 16, MOST_SEEDS = 1000000, STEPS = 2 };

typedef struct {
    size_t off; /* of the text in model.text */
    uint32_t len;
    double score;
} piece;

typedef struct {
    lm_buf text;
    piece *v; /* v[0] is the unknown piece, without text */
    size_t n, cap;
    lm_trie trie; /* ids are indices into v */
    double unknown;
} model;

typedef struct {
    const char *text;
    uint32_t len;
    double count;
} word;

typedef struct {
    uint32_t from, to, id;
} edge;

typedef struct {
    const lm_bpe_trainer *t;
    model m;
    word *words;
    size_t n_words;
    double total; /* of the words' counts */
    edge *edges;  /* of one word */
    size_t n_edges, cap_edges;
    double *sum[2]; /* log-probabilities of all cuts up to, and from, each position */
    size_t cap_sum[2];
    uint32_t *path, *at;
    size_t cap_path, cap_at;
    lm_err *e;
} learner;

static void learner_fini(learner *l)
{
    lm_buf_fini(&l->m.text);
    lm_free(l->m.v);
    lm_trie_fini(&l->m.trie);
    lm_free(l->words);
    lm_free(l->edges);
    lm_free(l->sum[0]);
    lm_free(l->sum[1]);
    lm_free(l->path);
    lm_free(l->at);
}

/* ---- Words and seeds ---- */

static int by_word(const void *a, const void *b)
{
    const word *x = a, *y = b;
    int c = memcmp(x->text, y->text, x->len < y->len ? x->len : y->len);
    return c ? c : (x->len > y->len) - (x->len < y->len);
}

static lm_code take_words(learner *l, const lm_words *from)
{
    lm_code rc = lm_alloc_n(&l->words, from->n, sizeof *l->words, "words", l->e);

    for (size_t i = 0; i < from->n_cells && !rc; i++) {
        const lm_word_cell *c = &from->cells[i];
        if (!c->count)
            continue;
        l->words[l->n_words++] = (word){ from->text + c->off, c->len, (double)c->count };
        l->total += (double)c->count;
    }
    if (!rc)
        qsort(l->words, l->n_words, sizeof *l->words, by_word);
    return rc;
}

static lm_code add_piece(learner *l, const char *text, size_t len, double score)
{
    lm_code rc = lm_grow(&l->m.v, &l->m.cap, l->m.n + 1, sizeof *l->m.v, "pieces", l->e);

    if (!rc) {
        l->m.v[l->m.n++] = (piece){ l->m.text.len, (uint32_t)len, score };
        rc = lm_buf_add(&l->m.text, text, len, l->e);
    }
    return rc;
}

static const char *text_of(const learner *l, size_t i)
{
    return l->m.text.data + l->m.v[i].off;
}

/* Bytes of the character at s[at]. */
static size_t char_at(const char *s, size_t len, size_t at)
{
    size_t k;
    lm_utf8_get(s + at, len - at, &k);
    return k;
}

/* The places where characters begin, and the end, to l->at[0..*n]. */
static lm_code find_chars(learner *l, const word *w, size_t *n)
{
    lm_code rc = lm_grow(&l->at, &l->cap_at, (size_t)w->len + 1, sizeof *l->at, "words", l->e);

    *n = 0;
    for (size_t i = 0; i < w->len && !rc; i += char_at(w->text, w->len, i))
        l->at[(*n)++] = (uint32_t)i;
    if (!rc)
        l->at[*n] = w->len;
    return rc;
}

/* The substrings of one number of characters, and how many times they end a word. */
typedef struct {
    lm_words all, ends;
} level;

static void level_fini(level *v)
{
    lm_words_fini(&v->all);
    lm_words_fini(&v->ends);
}

/* Count the substrings of k characters, of which both parts of k - 1 occur twice or more. */
static lm_code count_level(learner *l, size_t k, const lm_words *shorter, level *out)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < l->n_words && !rc; i++) {
        const char *s = l->words[i].text;
        size_t n = 0;
        rc = find_chars(l, &l->words[i], &n);
        for (size_t j = 0; j + k <= n && !rc; j++) {
            const uint32_t *at = l->at + j;
            const lm_word_cell *a = lm_words_find(shorter, s + at[0], at[k - 1] - at[0]);
            const lm_word_cell *b = lm_words_find(shorter, s + at[1], at[k] - at[1]);
            if (k == 2 || (a && b && llabs(a->count) > 1 && llabs(b->count) > 1))
                rc = lm_words_add(&out->all, s + at[0], at[k] - at[0], 1, l->e);
            if (!rc && j + k == n)
                rc = lm_words_add(&out->ends, s + at[0], at[k] - at[0], 1, l->e);
        }
    }
    return rc;
}

/* Negate the counts of substrings that are always followed by one character. */
static void mark_followed(const lm_words *longer, lm_words *shorter)
{
    for (size_t i = 0; i < longer->n_cells; i++) {
        const lm_word_cell *c = &longer->cells[i];
        size_t len = c->len;
        if (!c->count)
            continue;
        while (((uint8_t)longer->text[c->off + --len] & 0xC0) == 0x80)
            ;
        lm_word_cell *p = lm_words_find(shorter, longer->text + c->off, len);
        if (p && p->count == c->count)
            p->count = -p->count;
    }
}

static lm_code emit_level(learner *l, const level *v, int n)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < v->all.n_cells && !rc; i++) {
        const lm_word_cell *c = &v->all.cells[i];
        const char *s = v->all.text + c->off;
        const lm_word_cell *end = c->count > 1 ? lm_words_find(&v->ends, s, c->len) : NULL;
        if (c->count > 1 && (!end || end->count < c->count))
            rc = add_piece(l, s, c->len, (double)c->count * n);
    }
    return rc;
}

/* The characters, with their counts in the text. */
static lm_code count_chars(learner *l, lm_words *chars)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < l->n_words && !rc; i++)
        for (size_t at = 0, k; at < l->words[i].len && !rc; at += k) {
            k = char_at(l->words[i].text, l->words[i].len, at);
            rc = lm_words_add(chars, l->words[i].text + at, k, (int64_t)l->words[i].count, l->e);
        }
    return rc;
}

static int by_score(const void *a, const void *b, void *ctx)
{
    const piece *x = a, *y = b;
    const char *text = ctx;

    if (x->score < y->score || x->score > y->score)
        return x->score < y->score ? 1 : -1;
    int c = memcmp(text + x->off, text + y->off, x->len < y->len ? x->len : y->len);
    return c ? c : (x->len > y->len) - (x->len < y->len);
}

static lm_code make_seeds(learner *l, const lm_words *chars)
{
    level of[2] = { 0 }; /* of n characters, at n % 2 */
    double sum = 0;
    lm_code rc = add_piece(l, "", 0, 0);

    for (size_t i = 0; i < chars->n_cells && !rc; i++)
        if (chars->cells[i].count)
            rc = add_piece(l, chars->text + chars->cells[i].off, chars->cells[i].len,
                           (double)chars->cells[i].count);
    size_t n_chars = l->m.n;
    for (int n = 2; n <= MOST_CHARS + 1 && !rc; n++) {
        level *shorter = &of[1 - n % 2], *longer = &of[n % 2];
        rc = count_level(l, (size_t)n, &shorter->all, longer);
        if (!rc && n > 2)
            mark_followed(&longer->all, &shorter->all);
        if (!rc && n > 2)
            rc = emit_level(l, shorter, n - 1);
        level_fini(shorter);
        if (!longer->all.n)
            break;
    }
    level_fini(&of[0]);
    level_fini(&of[1]);
    if (rc)
        return rc;
    qsort_r(l->m.v + 1, n_chars - 1, sizeof *l->m.v, by_score, l->m.text.data);
    qsort_r(l->m.v + n_chars, l->m.n - n_chars, sizeof *l->m.v, by_score, l->m.text.data);
    if (l->m.n > MOST_SEEDS && n_chars < MOST_SEEDS)
        l->m.n = MOST_SEEDS;
    for (size_t i = 1; i < l->m.n; i++)
        sum += l->m.v[i].score;
    for (size_t i = 1; i < l->m.n; i++)
        l->m.v[i].score = log(l->m.v[i].score) - log(sum);
    return LM_OK;
}

/* ---- Cuts of a word ---- */

/* The trie of the present pieces. */
static lm_code index_pieces(learner *l)
{
    lm_trie_string *v = NULL;
    lm_code rc = lm_alloc_n(&v, l->m.n, sizeof *v, "pieces", l->e);
    double least = 0;

    lm_trie_fini(&l->m.trie);
    for (size_t i = 1; i < l->m.n && !rc; i++) {
        v[i - 1] = (lm_trie_string){ text_of(l, i), l->m.v[i].len, (uint32_t)i };
        least = l->m.v[i].score < least ? l->m.v[i].score : least;
    }
    l->m.unknown = least - 10;
    if (!rc)
        rc = lm_trie_build(&l->m.trie, v, l->m.n - 1, "pieces", l->e);
    lm_free(v);
    return rc;
}

static double score_of(const learner *l, uint32_t id)
{
    return id ? l->m.v[id].score : l->m.unknown;
}

/* All pieces in the text but `without`, from the left. */
static lm_code find_edges(learner *l, const char *s, size_t len, uint32_t without)
{
    lm_code rc = LM_OK;

    l->n_edges = 0;
    for (size_t from = 0, k; from < len && !rc; from += k) {
        uint32_t node = LM_TRIE_ROOT;
        bool single = false;
        k = char_at(s, len, from);
        /* the characters of the longest piece are at most 4 bytes each */
        rc = lm_grow(&l->edges, &l->cap_edges, l->n_edges + 4 * MOST_CHARS + 1, sizeof *l->edges,
                     "cuts", l->e);
        for (size_t to = from; to < len && !rc;) {
            node = lm_trie_step(&l->m.trie, node, (uint8_t)s[to++]);
            if (node == LM_TRIE_NONE)
                break;
            uint32_t id = l->m.trie.cell[node].id;
            if (id == LM_TRIE_NONE || id == without)
                continue;
            l->edges[l->n_edges++] = (edge){ (uint32_t)from, (uint32_t)to, id };
            single |= to - from == k;
        }
        if (!rc && !single)
            l->edges[l->n_edges++] = (edge){ (uint32_t)from, (uint32_t)(from + k), 0 };
    }
    return rc;
}

static lm_code need_sums(learner *l, size_t len)
{
    lm_code rc = LM_OK;

    for (int i = 0; i < 2 && !rc; i++)
        rc = lm_grow(&l->sum[i], &l->cap_sum[i], len + 1, sizeof(double), "cuts", l->e);
    for (size_t i = 0; i <= len && !rc; i++)
        l->sum[0][i] = l->sum[1][i] = -INFINITY;
    return rc;
}

/* log(exp(x) + exp(y)) */
static double add_logs(double x, double y)
{
    double high = x > y ? x : y, low = x > y ? y : x;
    return low < high - 50 ? high : high + log1p(exp(low - high));
}

/* Add the expected number of each piece in one word to expected[]. */
static lm_code expect(learner *l, const word *w, double *expected)
{
    lm_code rc = find_edges(l, w->text, w->len, LM_TRIE_NONE);
    double *a, *b;

    if (!rc)
        rc = need_sums(l, w->len);
    if (rc)
        return rc;
    a = l->sum[0];
    b = l->sum[1];
    a[0] = b[w->len] = 0;
    for (size_t i = 0; i < l->n_edges; i++) {
        const edge *x = &l->edges[i];
        a[x->to] = add_logs(a[x->to], a[x->from] + score_of(l, x->id));
    }
    for (size_t i = l->n_edges; i--;) {
        const edge *x = &l->edges[i];
        b[x->from] = add_logs(b[x->from], b[x->to] + score_of(l, x->id));
    }
    for (size_t i = 0; i < l->n_edges; i++) {
        const edge *x = &l->edges[i];
        expected[x->id] += w->count * exp(a[x->from] + score_of(l, x->id) + b[x->to] - a[w->len]);
    }
    return LM_OK;
}

/* The best cut without one piece: ids in l->path[0..*n), the last first. */
static lm_code best_cut(learner *l, const char *s, size_t len, uint32_t without, size_t *n)
{
    lm_code rc = find_edges(l, s, len, without);

    if (!rc)
        rc = need_sums(l, len);
    if (!rc)
        rc = lm_grow(&l->path, &l->cap_path, 2 * len + 2, sizeof *l->path, "cuts", l->e);
    *n = 0;
    if (rc)
        return rc;
    uint32_t *by = l->path + len + 1; /* the edge that ends at each position */
    l->sum[0][0] = 0;
    for (size_t i = 0; i < l->n_edges; i++) {
        const edge *x = &l->edges[i];
        double sum = l->sum[0][x->from] + score_of(l, x->id);
        if (sum > l->sum[0][x->to]) {
            l->sum[0][x->to] = sum;
            by[x->to] = (uint32_t)i;
        }
    }
    for (size_t at = len; at;) {
        const edge *x = &l->edges[by[at]];
        l->path[(*n)++] = x->id;
        at = x->from;
    }
    return LM_OK;
}

/* ---- Rounds ---- */

static double digamma(double x)
{
    double r = 0;

    for (; x < 7; x += 1)
        r -= 1 / x;
    x -= 0.5;
    double y = 1 / (x * x);
    return r + log(x) + y / 24 - 7.0 / 960 * y * y + 31.0 / 8064 * y * y * y -
           127.0 / 30720 * y * y * y * y;
}

static lm_code step(learner *l)
{
    double *expected = NULL, sum = 0;
    size_t k = 1;
    lm_code rc = index_pieces(l);

    if (!rc)
        rc = lm_alloc_n(&expected, l->m.n, sizeof *expected, "pieces", l->e);
    for (size_t i = 0; i < l->n_words && !rc; i++) {
        rc = expect(l, &l->words[i], expected);
        if (!rc && lm_stopping())
            rc = lm_fail(l->e, LM_EIO, "training", NULL, "stopped by signal %d", lm_stop_signal());
    }
    for (size_t i = 1; i < l->m.n && !rc; i++) {
        if (expected[i] < 0.5) /* it occurs in no likely cut */
            continue;
        l->m.v[k] = l->m.v[i];
        l->m.v[k++].score = expected[i];
        sum += expected[i];
    }
    if (!rc)
        l->m.n = k;
    for (size_t i = 1; i < l->m.n && !rc; i++)
        l->m.v[i].score = digamma(l->m.v[i].score) - digamma(sum);
    lm_free(expected);
    return rc;
}

typedef struct {
    uint32_t id;
    double loss;
} candidate;

static int by_loss(const void *a, const void *b)
{
    const candidate *x = a, *y = b;

    if (x->loss < y->loss || x->loss > y->loss)
        return x->loss < y->loss ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

/* The loss of likelihood if piece `id` were replaced by its second-best cut; *keep: it has none and
 * stays, *drop: no word needs it. */
static lm_code weigh(learner *l, uint32_t id, const double *freq, double sum, double *loss,
                     bool *keep, bool *drop)
{
    size_t n = 0, len = l->m.v[id].len;
    const char *s = text_of(l, id);
    bool one = char_at(s, len, 0) == len;
    lm_code rc = one ? LM_OK : best_cut(l, s, len, LM_TRIE_NONE, &n);
    bool own = one || (n == 1 && l->path[0] == id);

    *keep = *drop = false;
    if (rc)
        return rc;
    if (!own || one) {
        *drop = !own && freq[id] <= 0;
        *keep = !*drop;
        return LM_OK;
    }
    *drop = freq[id] <= 0;
    rc = best_cut(l, s, len, id, &n);
    double alt = 0, all = log(sum + freq[id] * (double)(n - 1));
    for (size_t i = 0; i < n && !rc; i++)
        alt += log(freq[l->path[i]] + freq[id]) - all;
    *loss = freq[id] / l->total * (log(freq[id]) - log(sum) - alt);
    return rc;
}

static lm_code count_best(learner *l, double *freq, double *sum)
{
    lm_code rc = LM_OK;

    *sum = 0;
    for (size_t i = 0; i < l->n_words && !rc; i++) {
        size_t n = 0;
        rc = best_cut(l, l->words[i].text, l->words[i].len, LM_TRIE_NONE, &n);
        for (size_t k = 0; k < n && !rc; k++)
            freq[l->path[k]] += l->words[i].count;
        *sum += (double)n * l->words[i].count;
    }
    return rc;
}

/* Keep `most` pieces, those without an alternative first. */
static lm_code prune(learner *l, size_t most)
{
    double *freq = NULL, sum = 0;
    candidate *c = NULL;
    piece *kept = NULL;
    size_t n = 0, k = 1;
    lm_code rc = index_pieces(l);

    if (!rc)
        rc = lm_alloc_n(&freq, l->m.n, sizeof *freq, "pieces", l->e);
    if (!rc)
        rc = lm_alloc_n(&c, l->m.n, sizeof *c, "pieces", l->e);
    if (!rc)
        rc = lm_alloc_n(&kept, l->m.n, sizeof *kept, "pieces", l->e);
    if (!rc)
        rc = count_best(l, freq, &sum);
    for (uint32_t i = 1; i < l->m.n && !rc; i++) {
        bool keep, drop;
        rc = weigh(l, i, freq, sum, &c[n].loss, &keep, &drop);
        if (keep && !rc)
            kept[k++] = l->m.v[i];
        else if (!drop && !rc)
            c[n++].id = i;
    }
    if (!rc) {
        kept[0] = l->m.v[0];
        qsort(c, n, sizeof *c, by_loss);
        for (size_t i = 0; i < n && k < most; i++)
            kept[k++] = l->m.v[c[i].id];
        memcpy(l->m.v, kept, k * sizeof *kept);
        l->m.n = k;
    }
    lm_free(freq);
    lm_free(c);
    lm_free(kept);
    return rc;
}

/* ---- The vocabulary ---- */

/* The characters of the text with their present scores; those that no likely cut needs get scores
 * around the lowest. */
static lm_code append_chars(learner *l, const lm_words *chars)
{
    word *list = NULL;
    double least = 0;
    size_t n = 0;
    lm_code rc = lm_alloc_n(&list, chars->n, sizeof *list, "the alphabet", l->e);

    for (size_t i = 1; i < l->m.n; i++)
        least = l->m.v[i].score < least ? l->m.v[i].score : least;
    for (size_t i = 0; i < chars->n_cells && !rc; i++)
        if (chars->cells[i].count)
            list[n++] = (word){ chars->text + chars->cells[i].off, chars->cells[i].len, 0 };
    if (!rc)
        qsort(list, n, sizeof *list, by_word);
    for (size_t i = 0; i < n && !rc; i++) {
        uint32_t node = LM_TRIE_ROOT;
        for (uint32_t k = 0; k < list[i].len && node != LM_TRIE_NONE; k++)
            node = lm_trie_step(&l->m.trie, node, (uint8_t)list[i].text[k]);
        uint32_t id = node == LM_TRIE_NONE ? LM_TRIE_NONE : l->m.trie.cell[node].id;
        rc = add_piece(l, list[i].text, list[i].len, id == LM_TRIE_NONE ? least : l->m.v[id].score);
        least += id == LM_TRIE_NONE ? 1e-4 : 0;
    }
    lm_free(list);
    return rc;
}

/* All characters and the best longer pieces, `most` in all, by score, in l->m.v[0..n). */
static lm_code finish(learner *l, const lm_words *chars, size_t most)
{
    size_t before = l->m.n, n = 0, room = most - chars->n;
    lm_code rc = index_pieces(l);

    if (!rc)
        rc = append_chars(l, chars); /* the trie's ids are valid only until the pieces are sorted */
    if (rc)
        return rc;
    qsort_r(l->m.v + 1, before - 1, sizeof *l->m.v, by_score, l->m.text.data);
    for (size_t i = 1; i < before && n < room; i++)
        if (char_at(text_of(l, i), l->m.v[i].len, 0) < l->m.v[i].len)
            l->m.v[n++] = l->m.v[i];
    for (size_t i = before; i < l->m.n; i++)
        l->m.v[n++] = l->m.v[i];
    l->m.n = n;
    qsort_r(l->m.v, n, sizeof *l->m.v, by_score, l->m.text.data);
    return LM_OK;
}

static lm_code write_json(const learner *l, int unk, lm_buf *json)
{
    lm_jw w;

    lm_jw_begin(&w, json, 2, l->e);
    lm_subword_write(l->t, &w);
    lm_jw_obj(&w, "model");
    lm_jw_str(&w, "type", "Unigram");
    lm_jw_int(&w, "unk_id", unk);
    lm_jw_arr(&w, "vocab");
    for (size_t i = 0; i < l->t->special.n + l->m.n; i++) {
        size_t k = i - l->t->special.n;
        bool special = i < l->t->special.n;
        lm_jw_arr(&w, NULL);
        if (special)
            lm_jw_str(&w, NULL, l->t->special.v[i].text);
        else
            lm_jw_strn(&w, NULL, text_of(l, k), l->m.v[k].len);
        lm_jw_f64(&w, NULL, special ? 0 : l->m.v[k].score);
        lm_jw_close_arr(&w);
    }
    lm_jw_close_arr(&w);
    lm_jw_bool(&w, "byte_fallback", false);
    lm_jw_close_obj(&w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

static lm_code learn(learner *l, const lm_words *chars, size_t most, lm_sink *sink, int64_t *rounds)
{
    size_t wanted = (size_t)l->t->vocab_size * 11 / 10;
    lm_code rc = make_seeds(l, chars);
    size_t first = l->m.n;

    for (; !rc; ++*rounds) {
        for (int i = 0; i < STEPS && !rc; i++)
            rc = step(l);
        if (rc || l->m.n <= wanted)
            break;
        size_t next = (size_t)((double)l->m.n * 0.75);
        rc = prune(l, next > wanted ? next : wanted);
        lm_progress(sink, "dropping pieces", (double)(first - l->m.n), (double)(first - wanted),
                    "pieces", NULL);
    }
    return rc ? rc : finish(l, chars, most);
}

lm_code lm_unigram_train(const lm_bpe_trainer *t, const lm_words *words, lm_sink *sink,
                         lm_buf *json, lm_bpe_train_stats *stats, lm_err *e)
{
    learner l = { .t = t, .e = e };
    lm_words chars = { .n = 0 };
    size_t most = (size_t)t->vocab_size - t->special.n;
    int unk = lm_train_special(t, "<unk>");
    lm_code rc = unk >= 0 ? take_words(&l, words)
                          : lm_fail(e, LM_EUSAGE, "special tokens", "add '<unk>' to them",
                                    "Unigram needs a token for unknown characters");

    if (!rc)
        rc = count_chars(&l, &chars);
    if (!rc && chars.n > most)
        rc = lm_fail(e, LM_EUSAGE, "vocabulary size", "give more",
                     "%lld tokens cannot hold %zu special ones and %zu characters",
                     (long long)t->vocab_size, t->special.n, chars.n);
    if (!rc)
        rc = learn(&l, &chars, most, sink, &stats->merges);
    if (!rc)
        rc = write_json(&l, unk, json);
    stats->vocab_size = (int64_t)(t->special.n + l.m.n);
    lm_words_fini(&chars);
    learner_fini(&l);
    return rc;
}
