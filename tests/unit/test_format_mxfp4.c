/* SPDX-License-Identifier: Apache-2.0 */
/* Folders whose experts are in MXFP4: their numbers, their codes, and blocks and scales that do not match. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/folder.h"
#include "numeric/format.h"

enum { E = 2, OUT = 3, GROUPS = 2, IN = 32 * GROUPS, BLOCKS = E * OUT * GROUPS };

static char dir[64], path[256];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/lm-test-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int drop_dir(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_rm_rf(dir, &e);
}

static uint8_t byte_of(int64_t i)
{
    return (uint8_t)(i * 37 + i / 16 * 11 + 5);
}

static uint8_t scale_of(int64_t i)
{
    return (uint8_t)(120 + i % 13);
}

/* The number of expert k at [in, out], from the definition of the format. */
static float number_at(int64_t k, int64_t in, int64_t out)
{
    static const float size[8] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6 };
    int64_t block = (k * OUT + out) * GROUPS + in / 32, place = in % 32;
    uint8_t byte = byte_of(block * 16 + place / 2), code = place % 2 ? byte >> 4 : byte & 15;
    return ldexpf(code & 8 ? -size[code & 7] : size[code & 7], scale_of(block) - 127);
}

/* blocks, scales: tensors that are left out where false; groups: of the scales. */
static const char *write_folder(const char *name, bool blocks, bool scales, int64_t groups)
{
    lm_err e = { 0 };
    lm_st_plan *p = NULL;
    lm_folder *f = NULL;
    int64_t b[] = { E, OUT, GROUPS, 16 }, s[] = { E, OUT, groups }, n[] = { 4 };
    json_t *config = json_pack("{s:s, s:{s:s}}", "model_type", "gpt_oss", "quantization_config",
                               "quant_method", "mxfp4");
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    if (blocks)
        assert_int_equal(lm_st_plan_add(p, "w_blocks", LM_DTYPE_U8, 4, b, &e), LM_OK);
    if (scales)
        assert_int_equal(lm_st_plan_add(p, "w_scales", LM_DTYPE_U8, 3, s, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, "norm", LM_DTYPE_F32, 1, n, &e), LM_OK);
    lm_folder_spec spec = { .config = config, .plan = p };
    assert_int_equal(lm_folder_create(path, false, NULL, &spec, &f, &e), LM_OK);
    for (const lm_st_tensor *t; (t = lm_folder_next(f));) {
        uint8_t x[BLOCKS * 16];
        for (int64_t i = 0; i < (int64_t)t->bytes; i++)
            x[i] = strcmp(t->name, "w_scales") ? byte_of(i) : scale_of(i);
        assert_int_equal(lm_folder_write(f, x, (size_t)t->bytes, &e), LM_OK);
    }
    assert_int_equal(lm_folder_commit(f, &e), LM_OK);
    lm_st_plan_free(p);
    json_decref(config);
    return path;
}

static void numbers(void **state)
{
    lm_err e = { 0 };
    lm_model_source *m = NULL;
    bool turned;
    (void)state;
    assert_int_equal(lm_model_source_open(write_folder("m", true, true, GROUPS), NULL, &m, &e),
                     LM_OK);
    assert_int_equal(lm_model_source_count(m), 2);
    assert_null(json_object_get(lm_model_source_config(m), "quantization_config"));
    const lm_st_tensor *t = lm_model_source_find(m, "w");
    assert_non_null(t);
    assert_true(t->ndim == 3 && t->dim[0] == E && t->dim[1] == IN && t->dim[2] == OUT);
    assert_int_equal(t->dtype, LM_DTYPE_BF16);
    float x[E * IN * OUT];
    assert_int_equal(lm_model_source_load(m, t, LM_DTYPE_F32, x, &e), LM_OK);
    for (int64_t i = 0; i < E * IN * OUT; i++)
        assert_true(x[i] == number_at(i / (IN * OUT), i / OUT % IN, i % OUT));

    const lm_format *f = lm_model_source_format(m, t, &turned);
    assert_string_equal(f->name, "mxfp4");
    assert_true(turned);
    uint8_t codes[BLOCKS * 17];
    float y[E * OUT * IN];
    const void *plane[LM_MAX_PLANES] = { codes };
    assert_int_equal(lm_model_source_codes(m, t, codes, &e), LM_OK);
    f->decode(f, plane, (int64_t)E * OUT, IN, y, IN);
    for (int64_t i = 0; i < E * OUT * IN; i++)
        assert_true(y[i] == number_at(i / (IN * OUT), i % IN, i / IN % OUT));
    lm_model_source_close(m);
}

static void refused(const char *folder, const char *says)
{
    lm_err e = { 0 };
    lm_model_source *m = NULL;
    assert_int_equal(lm_model_source_open(folder, NULL, &m, &e), LM_EUSAGE);
    if (!strstr(e.what, says))
        fail_msg("'%s' does not say '%s'", e.what, says);
}

static void unmatched(void **state)
{
    (void)state;
    refused(write_folder("a", true, false, GROUPS), "tensor \"w_blocks\": has no scales");
    refused(write_folder("b", false, true, GROUPS), "tensor \"w_scales\": has no blocks");
    refused(write_folder("c", true, true, GROUPS + 1), "tensor \"w_blocks\" has shape [2,3,2,16]");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(numbers, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(unmatched, make_dir, drop_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
