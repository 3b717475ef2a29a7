/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens of lm_generator_next as one recording: when it is made and replayed, which data a replay
 * reads, and decoding without it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "generate_case.h"

enum { V = 61 };

static const char config[] =
    "{\"model_type\":\"llama\",\"vocab_size\":61,\"hidden_size\":32,\"intermediate_size\":40,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":150,\"initializer_range\":0.2}";

/* A model and its generator on the device. */
typedef struct {
    lm_loaded w;
    lm_generator *g;
} writer;

static void open_writer(writer *w, lm_backend *b, int64_t batch, int64_t context)
{
    loaded_of(config, LM_DTYPE_F32, par, b, &w->w);
    ok(lm_generator_new(
        &w->w, &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = batch, .context = context }, b,
        &w->g, &err));
}

static void close_writer(writer *w)
{
    lm_generator_free(w->g);
    lm_loaded_fini(&w->w);
}

static int replays;
static lm_code (*real_replay)(lm_backend *b, lm_recording *r, lm_stream *s, lm_err *e);
static lm_code counted_replay(lm_backend *b, lm_recording *r, lm_stream *s, lm_err *e)
{
    replays++;
    return real_replay(b, r, s, e);
}

/* The first step of each way of choosing launches kernels separately, the others replay a
 * recording. */
static void steps_of_another_choice_are_recorded_anew(void **state)
{
    const lm_sample_attr greedy = { 0, 0, 1, 0, 1 }, drawn = { 0.8, 12, 0.9, 0, 1.2 };
    const struct {
        const lm_sample_attr *o;
        bool logprob;
    } turn[4] = { { &greedy, false }, { &drawn, false }, { &drawn, true }, { &greedy, false } };
    lm_backend *on[2] = { host, plain };
    const lm_backend real = *plain;
    writer w[2];
    int32_t now = 7;
    (void)state;
    replays = 0;
    real_replay = real.replay;
    plain->replay = counted_replay;
    for (int k = 0; k < 2; k++) {
        open_writer(&w[k], on[k], 1, 40);
        ok(lm_generator_prompt(w[k].g, 0, (uint32_t[]){ 7, 8, 9 }, 3, NULL, &err));
    }
    for (int i = 0; i < 16; i++) {
        const int32_t *next[2];
        const double *logprob[2];
        double u = lm_sample_draw(5, 0, 0, i);
        for (int k = 0; k < 2; k++)
            ok(lm_generator_next(w[k].g, &now, turn[i / 4].o, &u, &next[k],
                                 turn[i / 4].logprob ? &logprob[k] : NULL, &err));
        assert_int_equal(next[0][0], next[1][0]);
        if (turn[i / 4].logprob)
            assert_true(fabs(logprob[0][0] - logprob[1][0]) < 1e-4);
        now = next[0][0];
        assert_int_equal(replays, i / 4 * 3 + i % 4);
        assert_true((lm_generator_recorded(w[1].g) != NULL) == (i % 4 > 0));
        assert_null(lm_generator_recorded(w[0].g));
    }
    for (int k = 0; k < 2; k++)
        close_writer(&w[k]);
    *plain = real;
}

/* Slots are reset between replays: a replay copies the current data of the host, and a penalty
 * reads the ids of the new prompt. */
static void prompts_come_between_replays(void **state)
{
    const lm_sample_attr o = { 1, 0, 1, 0, 1.8 };
    lm_backend *on[2] = { host, plain };
    const lm_recording *one = NULL;
    writer w[2];
    int32_t now[2] = { -1, -1 };
    uint32_t ids[24];
    (void)state;
    for (int i = 0; i < 24; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(4, "test", 0), (uint64_t)i, V);
    for (int k = 0; k < 2; k++)
        open_writer(&w[k], on[k], 2, 40);
    for (int i = 0; i < 12; i++) {
        const int slot = i / 4 % 2;
        const double u[2] = { lm_sample_draw(5, 0, 0, i), lm_sample_draw(5, 1, 0, i) };
        const int32_t *next[2];
        if (i % 4 == 0) { /* the third replaces the first, which has the same number of ids then */
            for (int k = 0; k < 2; k++) {
                ok(lm_generator_prompt(w[k].g, slot, ids + i, 3 + i, NULL, &err));
                ok(lm_generator_choose(w[k].g, &o, u, &next[k], NULL, &err));
            }
            assert_int_equal(next[0][slot], next[1][slot]);
            now[slot] = next[0][slot];
        }
        if (i == 7) /* the second continues in the slot of the first, with its penalty */
            for (int k = 0; k < 2; k++)
                ok(lm_generator_copy(w[k].g, 1, 0, &err));
        now[0] = i == 7 ? now[1] : now[0];
        for (int k = 0; k < 2; k++)
            ok(lm_generator_next(w[k].g, now, &o, u, &next[k], NULL, &err));
        for (int s = 0; s < 2; s++)
            if (now[s] >= 0) {
                assert_int_equal(next[0][s], next[1][s]);
                now[s] = next[0][s];
            }
        /* one recording for a row, another for two */
        one = i == 1 || i == 5 ? lm_generator_recorded(w[1].g) : one;
        assert_true(i < 1 || (i == 4 ? !lm_generator_recorded(w[1].g)
                                     : one && lm_generator_recorded(w[1].g) == one));
    }
    for (int k = 0; k < 2; k++)
        close_writer(&w[k]);
}

/* Steps whose nodes are timed separately are not recorded, without a report of a refusal. */
static void timed_steps_are_not_recorded(void **state)
{
    const lm_sample_attr o = { 0, 0, 1, 0, 1 };
    const lm_exec_time *times;
    const int32_t *next;
    const double u = 0;
    int32_t now = 5;
    writer w;
    (void)state;
    open_writer(&w, plain, 1, 20);
    ok(lm_exec_timing(lm_generator_exec(w.g), true, &err));
    for (int i = 0; i < 4; i++) {
        ok(lm_generator_next(w.g, &now, &o, &u, &next, NULL, &err));
        now = next[0];
    }
    assert_null(lm_generator_recorded(w.g));
    assert_null(lm_generator_unrecorded(w.g));
    assert_true(lm_exec_times(lm_generator_exec(w.g), &times) > 0);
    assert_int_equal(times[0].calls % 4, 0);
    close_writer(&w);
}

static lm_code no_begin(lm_backend *b, lm_stream *s, lm_err *e)
{
    (void)b, (void)s;
    return lm_fail(e, LM_EIO, "spy", NULL, "no recordings today");
}

static lm_code (*real_end)(lm_backend *b, lm_stream *s, lm_recording **out, lm_err *e);
static lm_code no_end(lm_backend *b, lm_stream *s, lm_recording **out, lm_err *e)
{
    lm_code rc = real_end(b, s, out, e);
    if (rc)
        return rc;
    b->recording_free(b, *out);
    *out = NULL;
    return lm_fail(e, LM_EIO, "spy", NULL, "none that ends");
}

/* A recording that contains a call that cannot be recorded. */
static lm_code (*real_begin)(lm_backend *b, lm_stream *s, lm_err *e);
static lm_code spoiled_begin(lm_backend *b, lm_stream *s, lm_err *e)
{
    lm_err ignored = { 0 };
    lm_code rc = real_begin(b, s, e);
    if (!rc)
        b->sync(b, s, &ignored);
    return rc;
}

/* If a recording is refused, decoding continues without it and reports the reason. */
static void refused_recordings_are_reported(void **state)
{
    static const char *const why[] = { NULL, "no recordings today", "none that ends",
                                       "cudaErrorStreamCaptureInvalidated" };
    const lm_sample_attr o = { 0, 0, 1, 0, 1 };
    const lm_backend real = *plain;
    int32_t got[4][6];
    (void)state;
    real_begin = real.record_begin;
    real_end = real.record_end;
    for (int k = 0; k < 4; k++) {
        writer w;
        double u = 0;
        plain->record_begin = k == 1 ? no_begin : k == 3 ? spoiled_begin : real.record_begin;
        plain->record_end = k == 2 ? no_end : real.record_end;
        open_writer(&w, plain, 1, 20);
        ok(lm_generator_prompt(w.g, 0, (uint32_t[]){ 7, 8 }, 2, NULL, &err));
        const int32_t *next;
        ok(lm_generator_choose(w.g, &o, &u, &next, NULL, &err));
        for (int i = 0; i < 6; i++) {
            got[k][i] = next[0];
            ok(lm_generator_next(w.g, &got[k][i], &o, &u, &next, NULL, &err));
        }
        if (!why[k])
            assert_null(lm_generator_unrecorded(w.g));
        else
            assert_non_null(strstr(lm_generator_unrecorded(w.g), why[k]));
        assert_memory_equal(got[k], got[0], sizeof got[k]);
        close_writer(&w);
    }
    *plain = real;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_of_another_choice_are_recorded_anew),
        cmocka_unit_test(prompts_come_between_replays),
        cmocka_unit_test(timed_steps_are_not_recorded),
        cmocka_unit_test(refused_recordings_are_reported),
    };
    return cmocka_run_group_tests(tests, open_both, close_both);
}
