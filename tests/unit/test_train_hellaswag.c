/* SPDX-License-Identifier: Apache-2.0 */
/* test_train_hellaswag.c -- questions of HellaSwag are cleaned as lm-evaluation-harness cleans them: what its
 * expressions give in Python for the same strings. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "train/hellaswag.h"

static lm_err err;

static void text_is_cleaned(void **state)
{
    static const char *const pairs[][2] = {
        { "  a b.  ", "a b." },
        { "[header] How to x [title] Do it [step] Now. [substeps] A [b",
          " How to x. Do it Now. A [b" },
        { "no [x\ny] z", "no [x\ny] z" },
        { "\u00a0\u3000w  x   y    z \u2028", "w x  y  z" },
        { "[title] at start [title][title] x", " at start. x" },
        { "][a]]", "]]" },
        { "", "" },
        { "[]", "" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        lm_buf out = { 0 };
        assert_int_equal(lm_buf_add(&out, ">", 1, &err), LM_OK);
        assert_int_equal(lm_hellaswag_clean(pairs[i][0], strlen(pairs[i][0]), &out, &err), LM_OK);
        assert_string_equal(out.data + 1, pairs[i][1]);
        assert_int_equal(out.len, 1 + strlen(pairs[i][1]));
        lm_buf_fini(&out);
    }
}

static void contexts_are_made_of_three_fields(void **state)
{
    static const char *const quads[][4] = {
        { "Removing ice", "A man is [x] there.", "he STARTS to Écrire",
          "Removing ice: A man is there. He starts to écrire" },
        { "Überall", "x [title] y", "élan VITAL  now", "Überall: x. y Élan vital now" },
        { "K", "a", "", "K: a" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof quads / sizeof *quads; i++) {
        lm_buf out = { 0 };
        assert_int_equal(lm_hellaswag_context(quads[i][0], quads[i][1], quads[i][2], &out, &err),
                         LM_OK);
        assert_string_equal(out.data, quads[i][3]);
        lm_buf_fini(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_cleaned),
        cmocka_unit_test(contexts_are_made_of_three_fields),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
