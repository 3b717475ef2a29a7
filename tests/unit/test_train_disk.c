/* SPDX-License-Identifier: Apache-2.0 */
/* The largest number of checkpoints that are on disk at the same time. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "model/arch.h"
#include "train/disk.h"

static lm_disk space(lm_trainer_opts o, int64_t step, int64_t keep)
{
    lm_layer layer[2];
    for (int l = 0; l < 2; l++)
        layer[l] = (lm_layer){ .ffn = 48,
                               .heads = 2,
                               .kv_heads = 1,
                               .head_dim = 16,
                               .mlp = LM_MLP_SWIGLU,
                               .norm_before = true };
    lm_config c = { .arch = &lm_arch_llama,
                    .vocab = 64,
                    .width = 32,
                    .layers = 2,
                    .layer = layer,
                    .rope = { { .theta = 10000, .dim = 16 } },
                    .ropes = 1,
                    .tied = true };
    lm_err e = { 0 };
    lm_disk s;
    lm_backend *b;
    lm_memory_plan plan;
    lm_program *p = NULL;
    o.batch = 1;
    o.accumulate = 1;
    o.seq = 16;
    o.precision.low = LM_DTYPE_F32;
    o.groups = lm_groups_of(lm_optim_default(lm_optim_find("adamw")));
    assert_int_equal(lm_backend_cpu(LM_CPU_REF, NULL, &b, &e), LM_OK);
    if (lm_trainer_program(&o, &c, false, b, &p, &e))
        fail_msg("%s: %s", e.where, e.what);
    lm_trainer_plan(&o, p, false, &plan);
    lm_program_free(p);
    lm_backend_close(b);
    assert_int_equal(lm_train_disk(&o, &plan, step, keep, NULL, &s, &e), LM_OK);
    assert_true(s.checkpoint == 12.0 * (double)lm_config_params(&c));
    assert_true(s.need == s.checkpoint * (double)s.at_once);
    assert_true(isinf(s.free));
    return s;
}

static void counts(void **state)
{
    (void)state;
    const lm_trainer_opts once = { .steps = 100 }, tens = { .steps = 100, .save_every = 10 },
                          odd = { .steps = 101, .save_every = 10 },
                          timed = { .steps = 100, .save_seconds = 1800 },
                          validated = { .steps = 100, .save_every = 10, .eval_every = 7 };
    assert_int_equal(space(once, 0, 3).at_once, 1);
    assert_int_equal(space(tens, 0, 0).at_once, 10);
    assert_int_equal(space(tens, 50, 0).at_once, 5);
    assert_int_equal(space(tens, 95, 0).at_once, 1);
    assert_int_equal(space(odd, 0, 0).at_once, 11);
    assert_int_equal(space(tens, 0, 3).at_once, 4); /* 4: written before the first goes */
    assert_int_equal(space(timed, 0, 3).at_once, 4);
    assert_int_equal(space(timed, 98, 3).at_once, 2); /* no more than steps are left */
    assert_int_equal(space(timed, 0, 0).at_once, 1);
    assert_int_equal(space(validated, 0, 3).at_once, 5); /* best beside them */
    assert_int_equal(space(validated, 0, 0).at_once, 24);
    assert_int_equal(space(tens, 100, 3).at_once, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(counts) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
