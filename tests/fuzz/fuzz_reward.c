/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_reward.c -- rewards: any specification gives a set or one error; any completion gets numbers that are finite,
 * or no reward.  A line of the input is the specification, the next one a record, the rest the completion. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "tune/align/reward.h"
#include "tune/align/reward_model.h"

/* A reward model needs the whole library, and no input here opens one. */
lm_code lm_reward_model_open(const char *spec, const lm_tokenizer *tok, lm_reward_model **out,
                             lm_err *e)
{
    (void)tok, (void)out;
    return lm_fail(e, LM_EUSAGE, spec, NULL, "reward models are not fuzzed");
}

void lm_reward_model_close(lm_reward_model *r)
{
    (void)r;
}

lm_code lm_reward_model_bytes(const lm_reward_model *r, const lm_model *train, size_t arena,
                              size_t *bytes, lm_err *e)
{
    (void)r, (void)train, (void)arena, (void)e;
    *bytes = 0;
    return LM_OK;
}

lm_code lm_reward_model_load(lm_reward_model *r, const lm_objective_site *site, lm_err *e)
{
    (void)r, (void)site, (void)e;
    return LM_OK;
}

lm_code lm_reward_model_score(lm_reward_model *r, const lm_reward_item *item, int64_t n,
                              double *out, lm_err *e)
{
    (void)r, (void)item, (void)n, (void)out, (void)e;
    return LM_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void score(lm_reward_set *s, const char *text, size_t len, const json_t *record)
{
    const lm_reward_item item = { .prompt = "p",
                                  .prompt_len = 1,
                                  .text = text,
                                  .text_len = len,
                                  .ids =
                                      (const uint32_t *)(const void *)"\1\0\0\0\1\0\0\0\1\0\0\0\2",
                                  .n = 3,
                                  .record = record };
    double each[1], total;
    bool whole;
    lm_err e = { 0 };
    if (lm_reward_score(s, &item, 1, each, &total, &whole, &e)) {
        if (!e.what[0])
            abort();
    } else if (!isfinite(total) && !isnan(total)) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const lm_reward_opts o = { .most_new = 100 };
    lm_reward_set *s = NULL;
    json_t *record = NULL;
    lm_err e = { 0 };
    char *text = malloc(size + 1);
    memcpy(text, data, size);
    text[size] = 0;
    char *second = strchr(text, '\n'), *third = second ? strchr(second + 1, '\n') : NULL;
    if (third && strncmp(text, "command", 7) != 0) {
        const char *spec = text;
        *second++ = *third++ = 0;
        lm_json_parse(second, strlen(second), "record", &record, &e);
        e = (lm_err){ 0 };
        if (lm_reward_open(&spec, NULL, 1, &o, &s, &e)) {
            if (!e.what[0] || s)
                abort();
        } else {
            score(s, third, size - (size_t)(third - text), json_is_object(record) ? record : NULL);
        }
        lm_reward_close(s);
        json_decref(record);
    }
    free(text);
    return 0;
}
