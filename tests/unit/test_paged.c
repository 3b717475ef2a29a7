/* SPDX-License-Identifier: Apache-2.0 */
/* test_paged.c -- steps of ragged rows over pages: the logits of a generator with a cache for each sequence, and
 * the same bits in any company, order, cut and pages, for any number of sequences; on every level of the CPU and on the
 * emulated GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "generate_case.h"
#include "kernels/linear.h"
#include "kernels/panels.h"
#include "model/paged.h"

enum { V = 96, CONTEXT = 200, SEQS = 5, PAGE = 16, PAGES = 96, ROWS = 150, SLOTS = 16 };

static const char *const configs[] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":96,\"n_embd\":64,\"n_layer\":2,\"n_head\":4,"
    "\"n_positions\":200,\"initializer_range\":0.2}",
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":400,\"initializer_range\":0.2}",
    "{\"model_type\":\"mistral\",\"vocab_size\":96,\"hidden_size\":128,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":400,\"sliding_window\":21,\"initializer_range\":0.2}",
    "{\"model_type\":\"gemma2\",\"vocab_size\":96,\"hidden_size\":72,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
    "\"sliding_window\":16,\"query_pre_attn_scalar\":24,\"attn_logit_softcapping\":5,"
    "\"final_logit_softcapping\":6,\"max_position_embeddings\":400,\"initializer_range\":0.2}",
};
enum { CONFIGS = sizeof configs / sizeof *configs };

static const int64_t prompt[SEQS] = { 130, 3, 40, 17, 75 }, length[SEQS] = { 140, 20, 44, 17, 90 };

static uint32_t token_at(int64_t s, int64_t i)
{
    return (uint32_t)lm_rng_below(lm_rng_make(4, "tokens", (uint64_t)s), (uint64_t)i, V);
}

/* Logits after each position of each sequence; NaN: not computed. */
typedef struct {
    float at[SEQS][CONTEXT][V];
} record;

static void fetch_rows(lm_backend *b, float *to, const float *from, int64_t rows)
{
    ok(b->copy(b, to, from, (size_t)(rows * V) * sizeof *to, b->main, &err));
    ok(b->sync(b, b->main, &err));
}

/* Run the sequences `which` (a set of bits) in steps that random numbers draw: which have rows, how many, in what
 * order; pages are taken in another order, too. */
static void run_steps(lm_loaded *w, lm_dtype type, lm_backend *b, unsigned which, int64_t most,
                      uint64_t seed, record *out)
{
    const lm_paged_opts o = { ROWS, most, CONTEXT, PAGE, PAGES, NULL, 0, 0, NULL, NULL, NULL };
    static float logits[SEQS][V];
    int32_t table[SEQS][CONTEXT / PAGE + 1];
    int64_t used[SEQS] = { 0 }, pages = 0;
    lm_paged *g = NULL;
    ok(lm_paged_new(w, type, &o, b, &g, &err));
    for (uint64_t step = 0;; step++) {
        lm_rng r = lm_rng_make(seed, "steps", step);
        lm_paged_part part[SEQS];
        uint32_t ids[SEQS][ROWS];
        int64_t seq[SEQS], n = 0, left = 0, rows = 0;
        for (int64_t k = 0; k < SEQS; k++) {
            int64_t s = (k + (int64_t)(seed + step)) % SEQS, room = ROWS - rows;
            bool is_prompt = used[s] < prompt[s];
            int64_t rest = !(which >> s & 1) ? 0
                           : is_prompt       ? prompt[s] - used[s]
                                             : length[s] - used[s];
            int64_t take = is_prompt ? 1 + (int64_t)lm_rng_below(r, (uint64_t)s, 70) : 1;
            left += rest;
            take = take < rest ? take : rest;
            take = take < room ? take : room;
            if (take < 1 || n == most || (seed && lm_rng_below(r, 50 + (uint64_t)s, 4) == 0))
                continue;
            for (int64_t i = 0; i < take; i++)
                ids[n][i] = token_at(s, used[s] + i);
            for (int64_t p = (used[s] + PAGE - 1) / PAGE; p * PAGE < used[s] + take; p++)
                table[s][p] = (int32_t)((seed ? 55 : 1) * (pages++ + 1) % PAGES);
            part[n] = (lm_paged_part){ .ids = ids[n],
                                       .n = take,
                                       .used = used[s],
                                       .kind = is_prompt ? LM_ROWS_PROMPT : LM_ROWS_TOKEN,
                                       .table = table[s] };
            used[s] += take;
            rows += take;
            seq[n++] = s;
        }
        if (!left)
            break;
        if (!n)
            continue;
        const float *x = NULL;
        ok(lm_paged_step(g, part, n, &x, &err));
        fetch_rows(b, &logits[0][0], x, n);
        for (int64_t i = 0; i < n; i++)
            memcpy(out->at[seq[i]][used[seq[i]] - 1], logits[i], sizeof logits[i]);
    }
    assert_true(pages <= PAGES);
    lm_paged_free(g);
}

static void forget(record *x)
{
    for (float *p = &x->at[0][0][0]; p < &x->at[0][0][0] + SEQS * CONTEXT * V; p++)
        *p = NAN;
}

/* Logits that both have are equal; returns how many positions both have. */
static int check_same(const record *x, const record *y, int64_t s)
{
    int both = 0;
    for (int64_t i = 0; i < length[s]; i++) {
        if (isnan(x->at[s][i][0]) || isnan(y->at[s][i][0]))
            continue;
        if (memcmp(x->at[s][i], y->at[s][i], sizeof x->at[s][i]))
            fail_msg("sequence %d has other bits behind token %d", (int)s, (int)i);
        both++;
    }
    return both;
}

/* One step of generator g, whose slot k has sequence k % SEQS; logits of the slots below SEQS that have a token. */
static void decode_all(lm_generator *g, lm_backend *b, int64_t batch, int64_t step,
                       float want[SEQS][V])
{
    static float all[SLOTS][V];
    int32_t next[SLOTS];
    const float *logits;
    for (int64_t k = 0; k < batch; k++) {
        int64_t s = k % SEQS, i = prompt[s] + step;
        next[k] = (int32_t)token_at(s, i < length[s] ? i : 0);
    }
    ok(lm_generator_decode(g, next, &logits, &err));
    fetch_rows(b, &all[0][0], logits, batch);
    memcpy(want, all, SEQS * sizeof *want);
}

/* A generator of plain contiguous caches whose products have more than LM_GEMM_SMALL_M rows, as those of pages have: the
 * same bits, behind prompts of more tokens. */
static void check_contiguous(lm_loaded *w, lm_dtype type, lm_backend *b, const record *x)
{
    lm_generator *g = NULL;
    static float want[SEQS][V];
    int same = 0;
    ok(lm_generator_new(
        w, &(lm_generator_opts){ .dtype = type, .batch = SLOTS, .context = CONTEXT }, b, &g, &err));
    for (int64_t k = 0; k < SLOTS; k++) {
        uint32_t ids[CONTEXT];
        for (int64_t i = 0; i < prompt[k % SEQS]; i++)
            ids[i] = token_at(k % SEQS, i);
        ok(lm_generator_prompt(g, k, ids, prompt[k % SEQS], NULL, &err));
    }
    for (int64_t step = 0; step < 20; step++) {
        decode_all(g, b, SLOTS, step, want);
        for (int64_t s = 0; s < SEQS; s++) {
            int64_t i = prompt[s] + step;
            if (i >= length[s] || prompt[s] <= LM_GEMM_SMALL_M)
                continue;
            if (memcmp(x->at[s][i], want[s], sizeof want[s]))
                fail_msg("sequence %d has other bits behind token %d", (int)s, (int)i);
            same++;
        }
    }
    assert_int_equal(same, 10 + 4 + 15);
    lm_generator_free(g);
}

/* The generator with a cache for each sequence. */
static void check_generator(lm_loaded *w, lm_dtype type, lm_backend *b, const record *x)
{
    lm_generator *g = NULL;
    const float *logits;
    static float want[V];
    ok(lm_generator_new(w, &(lm_generator_opts){ .dtype = type, .batch = 1, .context = CONTEXT }, b,
                        &g, &err));
    for (int64_t s = 0; s < SEQS; s++) {
        uint32_t ids[CONTEXT];
        for (int64_t i = 0; i < length[s]; i++)
            ids[i] = token_at(s, i);
        ok(lm_generator_prompt(g, 0, ids, prompt[s], &logits, &err));
        for (int64_t i = prompt[s] - 1;;) {
            double diff = 0, norm = 0;
            fetch_rows(b, want, logits, 1);
            for (int v = 0; v < V; v++) {
                diff += pow((double)x->at[s][i][v] - (double)want[v], 2);
                norm += pow((double)want[v], 2);
            }
            if (!(sqrt(diff / norm) < (type == LM_DTYPE_F32 ? 1e-5 : 4e-2)))
                fail_msg("sequence %d behind token %d: error %.3g", (int)s, (int)i,
                         sqrt(diff / norm));
            if (++i == length[s])
                break;
            ok(lm_generator_decode(g, (int32_t[]){ (int32_t)ids[i] }, &logits, &err));
        }
    }
    lm_generator_free(g);
}

static void check_model(const char *config, lm_dtype type, lm_backend *b)
{
    static record plain_order, x;
    lm_loaded w;
    loaded_of(config, type, par, b, &w);
    forget(&plain_order);
    run_steps(&w, type, b, (1u << SEQS) - 1, SEQS, 0, &plain_order);
    check_generator(&w, type, b, &plain_order);
    if (b->host_memory) /* a device's recorded steps have an attention of their own */
        check_contiguous(&w, type, b, &plain_order);
    for (uint64_t seed = 1; seed < 4; seed++) {
        forget(&x);
        run_steps(&w, type, b, (1u << SEQS) - 1, seed == 2 ? 2 : 20, seed, &x);
        for (int64_t s = 0; s < SEQS; s++)
            assert_true(check_same(&plain_order, &x, s) >= length[s] - prompt[s] + 1);
    }
    for (int64_t s = 0; s < SEQS; s += 2) { /* alone */
        forget(&x);
        run_steps(&w, type, b, 1u << s, 1, 7, &x);
        assert_true(check_same(&plain_order, &x, s) >= length[s] - prompt[s] + 1);
    }
    lm_loaded_fini(&w);
    loaded_config(config, &w); /* the same weights in panels */
    loaded_draw_panels(&w, type, par, b);
    bool panels = b->panels && b->panels(b, "linear", 1, type) && w.config.width % LM_PANEL == 0;
    assert_true(w.store->in_panels == panels);
    forget(&x);
    run_steps(&w, type, b, (1u << SEQS) - 1, SEQS, 0, &x);
    for (int64_t s = 0; s < SEQS; s++)
        assert_true(check_same(&plain_order, &x, s) >= length[s] - prompt[s] + 1);
    lm_loaded_fini(&w);
}

static void any_company(void **state)
{
    (void)state;
    for (int level = LM_CPU_AVX2; level <= (int)lm_cpu_detect(); level++) {
        lm_backend *b = NULL;
        ok(lm_backend_cpu((lm_cpu_level)level, par, &b, &err));
        for (int i = 0; i < CONFIGS; i++) {
            check_model(configs[i], LM_DTYPE_BF16, b);
            if ((i + level) % 2)
                check_model(configs[i], LM_DTYPE_F32, b);
        }
        lm_backend_close(b);
    }
}

static void on_device(void **state)
{
    (void)state;
    check_model(configs[1], LM_DTYPE_BF16, plain);
    check_model(configs[2], LM_DTYPE_F32, plain);
}

static int replays;
static lm_code (*real_replay)(lm_backend *b, lm_recording *r, lm_stream *s, lm_err *e);
static lm_code counted_replay(lm_backend *b, lm_recording *r, lm_stream *s, lm_err *e)
{
    replays++;
    return real_replay(b, r, s, e);
}

static lm_code no_begin(lm_backend *b, lm_stream *s, lm_err *e)
{
    (void)b, (void)s;
    return lm_fail(e, LM_EIO, "spy", NULL, "no recordings today");
}

enum { STEPS = 6 };

/* Steps of 3 and of 20 tokens by turns, which have 16 rows and 32, each of another text: on a backend with recordings each
 * number of rows has its own from its second step on. */
static void run_alternately(lm_paged *g, float logits[STEPS][V])
{
    const int32_t table[3] = { 5, 9, 2 };
    const lm_recording *few = NULL;
    const bool records = plain->record_begin != NULL;
    for (int i = 0; i < STEPS; i++) {
        uint32_t ids[20];
        const float *x;
        for (int k = 0; k < 20; k++)
            ids[k] = token_at(i, k);
        ok(lm_paged_step(g, &(lm_paged_part){ ids, i % 2 ? 20 : 3, 0, LM_ROWS_PROMPT, table, 0, 0 },
                         1, &x, &err));
        fetch_rows(plain, logits[i], x, 1);
        assert_true((lm_paged_recorded(g) != NULL) == (records && i > 1));
        if (i == 2)
            few = lm_paged_recorded(g);
        assert_true(!records || i < 2 || (lm_paged_recorded(g) == few) == (i % 2 == 0));
    }
}

/* Steps of a device are recordings, one for each number of rows, made after a first step without: with the bits of steps
 * that are not recorded, whatever sequences, rows and pages come between. */
static void steps_are_recordings(void **state)
{
    static record recorded, launched;
    const lm_backend real = *plain;
    const lm_paged_opts o = { ROWS, 4, CONTEXT, PAGE, PAGES, NULL, 0, 0, NULL, NULL, NULL };
    const int32_t table[1] = { 5 };
    const uint32_t ids[3] = { 1, 2, 3 };
    static float logits[2][STEPS][V];
    lm_paged *g = NULL;
    lm_loaded w;
    (void)state;
    loaded_of(configs[1], LM_DTYPE_BF16, par, plain, &w);
    forget(&recorded);
    forget(&launched);
    replays = 0;
    real_replay = real.replay;
    plain->replay = counted_replay;
    run_steps(&w, LM_DTYPE_BF16, plain, (1u << SEQS) - 1, SEQS, 3, &recorded);
    assert_true(replays > 10);
    plain->record_begin = NULL;
    replays = 0;
    run_steps(&w, LM_DTYPE_BF16, plain, (1u << SEQS) - 1, SEQS, 3, &launched);
    assert_int_equal(replays, 0);
    for (int64_t s = 0; s < SEQS; s++)
        assert_true(check_same(&recorded, &launched, s) > 0);
    *plain = real;
    ok(lm_paged_new(&w, LM_DTYPE_BF16, &o, plain, &g, &err));
    run_alternately(g, logits[0]);
    assert_null(lm_paged_unrecorded(g));
    lm_paged_free(g);
    plain->record_begin = NULL;
    ok(lm_paged_new(&w, LM_DTYPE_BF16, &o, plain, &g, &err));
    run_alternately(g, logits[1]);
    lm_paged_free(g);
    assert_memory_equal(logits[0], logits[1], sizeof logits[0]);
    plain->record_begin = no_begin;
    ok(lm_paged_new(&w, LM_DTYPE_BF16, &o, plain, &g, &err));
    for (int i = 0; i < 3; i++)
        ok(lm_paged_step(g, &(lm_paged_part){ ids, 3, 0, LM_ROWS_PROMPT, table, 0, 0 }, 1, NULL,
                         &err));
    assert_string_equal(lm_paged_unrecorded(g), "no recordings today");
    lm_paged_free(g);
    *plain = real;
    lm_loaded_fini(&w);
}

static void copy_page(lm_paged *g, int64_t from, int64_t to)
{
    struct iovec a[8], b[8];
    int n = lm_paged_pieces(g, from, a);
    assert_int_equal(n, lm_paged_pieces(g, to, b));
    assert_true(n == 4 && a[3].iov_len == b[3].iov_len);
    for (int i = 0; i < n; i++)
        ok(host->copy(host, b[i].iov_base, a[i].iov_base, a[i].iov_len, NULL, &err));
}

/* A sequence continues in two ways: whole pages are shared, the last one is copied. */
static void forks(void **state)
{
    const lm_paged_opts o = { ROWS, 4, CONTEXT, PAGE, PAGES, NULL, 0, 0, NULL, NULL, NULL };
    const int32_t first[3] = { 5, 9, 2 }, second[3] = { 5, 9, 7 };
    static float one[V], two[V];
    uint32_t ids[60];
    const float *x;
    lm_paged *g = NULL;
    lm_loaded w;
    (void)state;
    loaded_of(configs[1], LM_DTYPE_BF16, par, host, &w);
    ok(lm_paged_new(&w, LM_DTYPE_BF16, &o, host, &g, &err));
    for (int i = 0; i < 60; i++)
        ids[i] = token_at(0, i);
    ok(lm_paged_step(g, &(lm_paged_part){ ids, 40, 0, LM_ROWS_PROMPT, first, 0, 0 }, 1, &x, &err));
    copy_page(g, 2, 7);
    uint32_t other[1] = { (ids[40] + 1) % V };
    ok(lm_paged_step(g,
                     (lm_paged_part[]){ { other, 1, 40, LM_ROWS_TOKEN, second, 0, 0 },
                                        { ids + 40, 1, 40, LM_ROWS_TOKEN, first, 0, 0 } },
                     2, &x, &err));
    memcpy(one, x + V, sizeof one);
    ok(lm_paged_step(g, &(lm_paged_part){ ids + 40, 1, 40, LM_ROWS_TOKEN, second, 0, 0 }, 1, &x,
                     &err));
    memcpy(two, x, sizeof two);
    assert_memory_equal(one, two, sizeof one);
    assert_int_equal(lm_paged_bytes(g), PAGES * lm_paged_page_bytes(g));
    lm_paged_free(g);
    lm_loaded_fini(&w);
}

static void refusals(void **state)
{
    const lm_paged_opts bad = { ROWS, 4, CONTEXT, 24, PAGES, NULL, 0, 0, NULL, NULL, NULL },
                        o = { ROWS, 4, CONTEXT, PAGE, PAGES, NULL, 0, 0, NULL, NULL, NULL };
    const int32_t table[13] = { 0 };
    uint32_t ids[ROWS + 1] = { 0 };
    const float *x;
    lm_paged *g = NULL;
    lm_loaded w;
    (void)state;
    loaded_of(configs[1], LM_DTYPE_F32, par, host, &w);
    assert_int_equal(lm_paged_new(&w, LM_DTYPE_F32, &bad, host, &g, &err), LM_EUSAGE);
    assert_null(g);
    err = (lm_err){ 0 };
    ok(lm_paged_new(&w, LM_DTYPE_F32, &o, host, &g, &err));
    const lm_paged_part parts[] = {
        { ids, ROWS + 1, 0, LM_ROWS_PROMPT, table, 0, 0 }, /* more rows than a step has */
        { ids, 2, 0, LM_ROWS_TOKEN, table, 0, 0 },         /* new tokens come one at a time */
        { ids, 1, CONTEXT, LM_ROWS_TOKEN, table, 0, 0 },
    };
    for (int i = 0; i < 3; i++)
        assert_int_equal(lm_paged_step(g, &parts[i], 1, &x, &err), LM_EUSAGE);
    err = (lm_err){ 0 };
    lm_paged_free(g);
    lm_loaded_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_company),
        cmocka_unit_test(on_device),
        cmocka_unit_test(steps_are_recordings),
        cmocka_unit_test(forks),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, open_both, close_both);
}
