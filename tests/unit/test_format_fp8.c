/* SPDX-License-Identifier: Apache-2.0 */
/* Folders with weights of FP8 in blocks: their numbers, and every way in which they are refused. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/json.h"
#include "format/fp8_source.h"

static char dir[64];

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

static void put(const char *name, const void *data, size_t n, const void *more, size_t n_more)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fwrite(more, 1, n_more, f), n_more);
    fclose(f);
}

enum { ROWS = 3, COLS = 5, SCALES = 6 };
static const float scale[SCALES] = { 2, 0.5f, -1, 3, 0.25f, 8 };
static const float norm[2] = { 7, -7 };
/* 1, 1.5, -2, 0.015625 (the least normal number), 448, ... */
static const uint8_t code[ROWS * COLS] = { 0x38, 0x3c, 0xc0, 0x08, 0x7e, 0x00, 0x01, 0x81,
                                           0x40, 0x44, 0x38, 0xb8, 0x48, 0x50, 0x30 };

#define PLAIN "\"model_type\":\"llama\""
#define FP8   PLAIN ",\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":"

/* The same as powers of two: exponents, and what they stand for. */
static const uint8_t exponent[SCALES] = { 128, 126, 0, 1, 255, 254 };
static const float power[SCALES] = { 2, 0.5f, 0x1p-127f, 0x1p-126f, NAN, 0x1p127f };

static bool are_bytes(const char *scales)
{
    return strstr(scales, "E8M0") || strstr(scales, "U8");
}

/* Scales in F32, or in BF16 or as exponents where they are declared so. */
static void write_folder(const char *config, const char *scales)
{
    const lm_dtype type = strstr(scales, "BF16") ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    const size_t wide = are_bytes(scales) ? SCALES : SCALES * lm_dtype_size(type);
    uint8_t data[SCALES * 4 + 8 + ROWS * COLS];
    char text[512] = { 0 };
    if (are_bytes(scales))
        memcpy(data, exponent, SCALES);
    else
        lm_convert(LM_DTYPE_F32, scale, type, data, SCALES);
    memcpy(data + wide, norm, 8);
    memcpy(data + wide + 8, code, ROWS * COLS);
    snprintf(text + 8, sizeof text - 8,
             "{%s,\"n.weight\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[%zu,%zu]},"
             "\"a.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[3,5],\"data_offsets\":[%zu,%zu]}}",
             scales, wide, wide + 8, wide + 8, wide + 23);
    uint64_t n = strlen(text + 8);
    memcpy(text, &n, 8);
    put("model.safetensors", text, 8 + n, data, wide + 8 + ROWS * COLS);
    snprintf(text, sizeof text, "{%s}", config);
    put("config.json", text, strlen(text), "", 0);
}

#define SCALE(name, shape) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[0,24]}"
#define NARROW(name, shape) \
    "\"" name "\":{\"dtype\":\"BF16\",\"shape\":" shape ",\"data_offsets\":[0,12]}"

#define BYTES(type, name, shape) \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[0,6]}"
#define POWERS FP8 "[2,2],\"scale_fmt\":\"ue8m0\"}"

static void check_numbers(const char *config, const char *scales)
{
    const float *by = are_bytes(scales) ? power : scale;
    lm_err e = { 0 };
    lm_model_source *src = NULL;
    float got[ROWS * COLS], plain[ROWS * COLS];
    write_folder(config, scales);
    assert_int_equal(lm_fp8_source_open(dir, NULL, &src, &e), LM_OK);
    assert_int_equal(lm_model_source_count(src), 2);
    assert_null(json_object_get(lm_model_source_config(src), "quantization_config"));
    assert_non_null(json_object_get(lm_model_source_config(src), "model_type"));
    const lm_st_tensor *t = lm_model_source_find(src, "a.weight");
    assert_non_null(t);
    assert_true(t->dtype == LM_DTYPE_F32 && t->dim[0] == ROWS && t->dim[1] == COLS);
    assert_int_equal(lm_model_source_load(src, t, LM_DTYPE_F32, got, &e), LM_OK);
    lm_convert(LM_DTYPE_F8E4M3, code, LM_DTYPE_F32, plain, ROWS * COLS);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++)
            if (isnan(by[r / 2 * 3 + c / 2]))
                assert_true(isnan(got[r * COLS + c]));
            else
                assert_true(got[r * COLS + c] == plain[r * COLS + c] * by[r / 2 * 3 + c / 2]);
    assert_true(got[0] == 2 && got[2] == -2 * by[1] && got[4] == 448 * by[2]);
    t = lm_model_source_find(src, "n.weight");
    assert_int_equal(lm_model_source_load(src, t, LM_DTYPE_F32, got, &e), LM_OK);
    assert_memory_equal(got, norm, sizeof norm);
    assert_null(lm_model_source_find(src, "a.weight_scale_inv"));
    lm_model_source_close(src);
}

static void test_numbers(void **state)
{
    (void)state;
    check_numbers(FP8 "[2,2]}", SCALE("a.weight_scale_inv", "[2,3]"));
    check_numbers(FP8 "[2,2]}", NARROW("a.weight_scale_inv", "[2,3]"));
    check_numbers(FP8 "[2,2]}", BYTES("F8_E8M0", "a.weight_scale_inv", "[2,3]"));
    check_numbers(POWERS, SCALE("a.weight_scale_inv", "[2,3]"));
    check_numbers(POWERS, BYTES("F8_E8M0", "a.weight_scale_inv", "[2,3]"));
    check_numbers(POWERS, BYTES("U8", "a.weight_scale_inv", "[2,3]"));
}

/* Without the description nothing is changed: readers of configs then refuse it. */
static void test_others(void **state)
{
    static const char *const config[] = {
        PLAIN, PLAIN ",\"quantization_config\":null",
        PLAIN ",\"quantization_config\":{\"quant_method\":\"fp8\"}",
        PLAIN ",\"quantization_config\":{\"quant_method\":\"gptq\",\"weight_block_size\":[2,2]}"
    };
    (void)state;
    for (size_t i = 0; i < sizeof config / sizeof *config; i++) {
        lm_err e = { 0 };
        lm_model_source *src = NULL;
        write_folder(config[i], SCALE("a.weight_scale_inv", "[2,3]"));
        assert_int_equal(lm_fp8_source_open(dir, NULL, &src, &e), LM_OK);
        assert_int_equal(lm_model_source_count(src), 3);
        lm_model_source_close(src);
    }
}

static void test_refused(void **state)
{
    static const char *const bad[][3] = {
        { FP8 "[2,2]}", SCALE("a.weight_scale_inv", "[3,2]"), "a.weight_scale_inv" },
        { FP8 "[2,2]}", SCALE("a.weight_scale_inv", "[6]"), "a.weight_scale_inv" },
        { FP8 "[2,2]}", NARROW("a.weight_scale_inv", "[3,2]"), "not F32, BF16 or F8_E8M0 [2,3]" },
        { FP8 "[2,2]}", BYTES("U8", "a.weight_scale_inv", "[2,3]"), "not F32, BF16 or F8_E8M0" },
        { POWERS, BYTES("F8_E8M0", "a.weight_scale_inv", "[3,2]"), "F8_E8M0 [2,3]" },
        { FP8 "[1,2]}", SCALE("a.weight_scale_inv", "[2,3]"), "[3,3]" },
        { FP8 "[2,2]}", SCALE("b.weight_scale_inv", "[2,3]"), "there are no scales of it" },
        { FP8 "[2,0]}", SCALE("a.weight_scale_inv", "[2,3]"), "weight_block_size" },
        { FP8 "[2]}", SCALE("a.weight_scale_inv", "[2,3]"), "weight_block_size" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_err e = { 0 };
        lm_model_source *src = NULL;
        write_folder(bad[i][0], bad[i][1]);
        if (!lm_fp8_source_open(dir, NULL, &src, &e))
            fail_msg("folder %zu was accepted", i);
        if (e.code != LM_EUSAGE || !strstr(e.what, bad[i][2]))
            fail_msg("\"%s: %s\" does not name %s", e.where, e.what, bad[i][2]);
        assert_null(src);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_others),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("format_fp8", tests, make_dir, drop_dir);
}
