/* SPDX-License-Identifier: Apache-2.0 */
/* The choice among kernels, and the properties of every table of kernels. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernel.h"

static void every_operator_has_a_reference(void **state)
{
    (void)state;
    int n = 0;
    for (const lm_kernel *k; (k = lm_cpu_kernel_at(n)); n++) {
        assert_non_null(k->run);
        assert_true(k->level >= LM_CPU_REF && k->level <= LM_CPU_AMX);
        const lm_kernel *ref = lm_cpu_kernel(k->op, LM_DTYPE_F64, LM_CPU_REF);
        assert_non_null(ref);
        assert_int_equal(ref->act, LM_DTYPE_NONE);
        for (int j = 0; j < n; j++) { /* no two entries have the same key */
            const lm_kernel *o = lm_cpu_kernel_at(j);
            assert_false(o->level == k->level && o->act == k->act && !strcmp(o->op, k->op));
        }
    }
    assert_true(n > 60);
    assert_null(lm_cpu_kernel_at(n + 1));
    assert_null(lm_cpu_kernel_at(-1));
}

static void choice(void **state)
{
    (void)state;
    const lm_cpu_level levels[] = { LM_CPU_REF, LM_CPU_AVX2, LM_CPU_AVX512, LM_CPU_BF16,
                                    LM_CPU_AMX };
    for (int i = 0; i < 5; i++) { /* never above the bound, and the best below it */
        const lm_kernel *k = lm_cpu_kernel("linear", LM_DTYPE_BF16, levels[i]);
        assert_int_equal(k->level, levels[i]);
        assert_int_equal(k->act, i ? LM_DTYPE_BF16 : LM_DTYPE_NONE);
        assert_int_equal(lm_cpu_kernel("norm", LM_DTYPE_F64, levels[i])->level, LM_CPU_REF);
    }
    assert_int_equal(lm_cpu_kernel("adamw", LM_DTYPE_F32, LM_CPU_AMX)->level, LM_CPU_AVX512);
    assert_null(lm_cpu_kernel("no such operator", LM_DTYPE_F32, LM_CPU_AMX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operator_has_a_reference),
        cmocka_unit_test(choice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
