/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_retrieve.c -- tasks are solved exactly where greedy decoding gives their answers, in any
 * number of slots. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"
#include "compress/kv_retrieve.h"
#include "cpu_case.h"
#include "loaded_case.h"

enum { V = 96, TASKS = 11, MOST = 80, CELLS = 3 };

static const char config[] =
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":400,\"initializer_range\":0.2}";

static lm_loaded w;
static uint32_t ids[TASKS][MOST];
static lm_kv_task tasks[TASKS];

static lm_generator *open_slots(int64_t batch)
{
    lm_generator *g;
    ok(lm_generator_new(
        &w, &(lm_generator_opts){ .dtype = LM_DTYPE_F32, .batch = batch, .context = MOST }, backend,
        &g, &err));
    return g;
}

/* The answer of task t as the model decodes it. */
static void answer(lm_generator *g, lm_kv_task *t, uint32_t *to)
{
    static const lm_sample_attr greedy = { 0, 0, 1, 0, 1 };
    const double u = 0;
    const int32_t *id;

    ok(lm_generator_prompt(g, 0, to, t->context, NULL, &err));
    for (int64_t i = t->context; i < t->context + t->question + t->answer - 1; i++) {
        int32_t next = (int32_t)to[i];
        ok(lm_generator_next(g, &next, &greedy, &u, &id, NULL, &err));
        if (i + 1 >= t->context + t->question)
            to[i + 1] = (uint32_t)*id;
    }
}

/* Tasks of many lengths, each with the answer that the model gives. */
static int setup(void **state)
{
    lm_generator *g;

    assert_int_equal(open_cpu(state), 0);
    loaded_of(config, LM_DTYPE_F32, par, backend, &w);
    g = open_slots(1);
    for (int i = 0; i < TASKS; i++) {
        for (int k = 0; k < MOST; k++)
            ids[i][k] = (uint32_t)lm_rng_below(lm_rng_make(2, "test", (uint64_t)i), (uint64_t)k, V);
        tasks[i] = (lm_kv_task){ ids[i], 1 + 7 * i % 70, 1 + i % 4, 1 + i % 5, i % CELLS };
        answer(g, &tasks[i], ids[i]);
    }
    lm_generator_free(g);
    return 0;
}

static int teardown(void **state)
{
    lm_loaded_fini(&w);
    return close_cpu(state);
}

static void greedy_answers_are_solved(void **state)
{
    static const int64_t want[CELLS] = { 4, 4, 3 };

    (void)state;
    for (int64_t batch = 1; batch <= TASKS + 1; batch += 3) {
        lm_generator *g = open_slots(batch);
        int64_t solved[CELLS] = { 0 }, done = 0;
        ok(lm_kv_retrieve(g, tasks, TASKS, solved, &done, &err));
        assert_int_equal(done, TASKS);
        assert_memory_equal(solved, want, sizeof want);
        lm_generator_free(g);
    }
}

/* One token of an answer differs: first, in the middle, last. */
static void another_token_is_wrong(void **state)
{
    lm_generator *g = open_slots(4);

    (void)state;
    for (int i = 0; i < TASKS; i++) {
        const lm_kv_task *t = &tasks[i];
        for (int64_t k = t->context + t->question; k < t->context + t->question + t->answer; k++) {
            int64_t solved[CELLS] = { 0 }, sum = 0;
            ids[i][k] = (ids[i][k] + 1) % V;
            ok(lm_kv_retrieve(g, tasks, TASKS, solved, NULL, &err));
            for (int c = 0; c < CELLS; c++)
                sum += solved[c];
            assert_int_equal(sum, TASKS - 1);
            ids[i][k] = (ids[i][k] + V - 1) % V;
        }
    }
    lm_generator_free(g);
}

static void refusals(void **state)
{
    lm_generator *g = open_slots(1);
    int64_t solved[CELLS] = { 0 };

    (void)state;
    for (int k = 0; k < 4; k++) {
        lm_kv_task t = tasks[0];
        t.context = k == 0 ? 0 : k == 3 ? MOST - 1 : t.context;
        t.question = k == 1 ? 0 : t.question;
        t.answer = k == 2 ? 0 : t.answer;
        assert_int_equal(lm_kv_retrieve(g, &t, 1, solved, NULL, &err), LM_EUSAGE);
        err = (lm_err){ 0 };
    }
    lm_generator_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_answers_are_solved),
        cmocka_unit_test(another_token_is_wrong),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
