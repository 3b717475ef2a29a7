/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_passkey.c -- tasks of passkeys, decoded again: their text, lengths, depths and records. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compress/kv_passkey.h"

static lm_err err;
static lm_tokenizer *tok;
enum { FILLER = 500 };
static uint32_t filler[FILLER];

static void ok(lm_code rc)
{
    if (rc)
        fail_msg("%s: %s", err.where, err.what);
}

/* A token for each letter that the records have; " 1" to " 9" are one token, so that a question and
 * its answer meet at a border of tokens; the filler is 'X'. */
static int setup(void **state)
{
    lm_buf b = { 0 };
    const char *letters = "0123456789abcdefghijklmnopqrstuvwxyzT.X";
    int n = 0;

    (void)state;
    ok(lm_buf_addf(&b, &err,
                   "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                   "\"use_regex\":false},\"decoder\":{\"type\":\"ByteLevel\"},"
                   "\"model\":{\"type\":\"BPE\",\"vocab\":{"));
    for (const char *p = letters; *p; p++)
        ok(lm_buf_addf(&b, &err, "\"%c\":%d,", *p, n++));
    for (char c = '1'; c <= '9'; c++)
        ok(lm_buf_addf(&b, &err, "\"\xC4\xA0%c\":%d,", c, n++));
    ok(lm_buf_addf(&b, &err, "\"\xC4\xA0\":%d},\"merges\":[", n++));
    for (char c = '1'; c <= '9'; c++)
        ok(lm_buf_addf(&b, &err, "%s\"\xC4\xA0 %c\"", c > '1' ? "," : "", c));
    ok(lm_buf_addf(&b, &err, "]}}"));
    ok(lm_tokenizer_from_json(b.data, b.len, NULL, 0, "tokenizer", &tok, &err));
    lm_buf_fini(&b);
    for (int i = 0; i < FILLER; i++)
        filler[i] = (uint32_t)(strlen(letters) - 1);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    lm_tokenizer_free(tok);
    return 0;
}

/* The text of ids, which the caller frees with lm_buf_fini. */
static lm_buf text_of(const uint32_t *ids, int64_t n)
{
    lm_buf b = { 0 };
    ok(lm_tokenizer_decode(tok, ids, (size_t)n, false, &b, &err));
    ok(lm_buf_add(&b, "", 0, &err));
    return b;
}

static size_t count(const char *text, const char *what)
{
    size_t n = 0;

    for (; (text = strstr(text, what)) != NULL; text++)
        n++;
    return n;
}

/* The filler before `at` in text. */
static int64_t filler_before(const char *text, const char *at)
{
    int64_t n = 0;

    for (; text < at; text++)
        n += *text == 'X';
    return n;
}

static void a_task_asks_for_one_of_its_records(void **state)
{
    static const int64_t length[3] = { 120, 199, 300 };
    const lm_kv_passkey_opts o = {
        .length = length, .lengths = 3, .depths = 3, .repeats = 4, .records = 3, .seed = 7
    };
    lm_kv_passkeys p;

    (void)state;
    ok(lm_kv_passkeys_make(tok, filler, FILLER, &o, &p, &err));
    assert_int_equal(p.n, 36);
    for (int64_t i = 0; i < p.n; i++) {
        const lm_kv_task *t = &p.task[i];
        int64_t cell = i / 4, depth = cell / 3;
        lm_buf c = text_of(t->ids, t->context);
        lm_buf q = text_of(t->ids + t->context, t->question);
        lm_buf a = text_of(t->ids + t->context + t->question, t->answer);
        char record[96];

        assert_int_equal(t->cell, cell);
        assert_int_equal(t->context + t->question, length[cell % 3]);
        assert_int_equal(count(c.data, " The key of "), 3);
        assert_int_equal(strncmp(q.data, " The key of ", 12), 0);
        assert_string_equal(q.data + q.len - 3, " is");
        assert_true(a.data[0] == ' ' && (atoi(a.data) - 101) % 14 == 0 && atoi(a.data) <= 983);
        snprintf(record, sizeof record, "%s%s.", q.data, a.data);
        assert_int_equal(count(c.data, record), 1);
        q.data[q.len - 3] = '\0';
        assert_int_equal(count(c.data, q.data), 1); /* the name is that of one record */

        int64_t all = filler_before(c.data, c.data + c.len);
        int64_t before = filler_before(c.data, strstr(c.data, record));
        assert_int_equal(before, all * depth / 2);
        lm_buf_fini(&c);
        lm_buf_fini(&q);
        lm_buf_fini(&a);
    }
    lm_kv_passkeys_fini(&p);
}

/* The same seed makes the same tasks; a task does not depend on how many follow. */
static void tasks_follow_from_the_seed(void **state)
{
    static const int64_t length[2] = { 90, 200 };
    lm_kv_passkey_opts o = {
        .length = length, .lengths = 2, .depths = 1, .repeats = 2, .records = 1, .seed = 3
    };
    lm_kv_passkeys a, b;

    (void)state;
    ok(lm_kv_passkeys_make(tok, filler, FILLER, &o, &a, &err));
    ok(lm_kv_passkeys_make(tok, filler, FILLER, &o, &b, &err));
    for (int64_t i = 0; i < a.n; i++) {
        assert_int_equal(a.task[i].context, b.task[i].context);
        assert_memory_equal(a.task[i].ids, b.task[i].ids,
                            (size_t)length[a.task[i].cell] * sizeof(uint32_t));
    }
    lm_kv_passkeys_fini(&b);
    o.seed = 4;
    ok(lm_kv_passkeys_make(tok, filler, FILLER, &o, &b, &err));
    assert_memory_not_equal(a.task[0].ids, b.task[0].ids, 90 * sizeof(uint32_t));
    lm_kv_passkeys_fini(&a);
    lm_kv_passkeys_fini(&b);
}

static void refusals(void **state)
{
    static const int64_t few[1] = { 40 }, many[1] = { 900 };
    const lm_kv_passkey_opts good = {
        .length = few, .lengths = 1, .depths = 1, .repeats = 1, .records = 2, .seed = 7
    };
    lm_kv_passkeys p;

    (void)state;
    for (int k = 0; k < 6; k++) {
        lm_kv_passkey_opts o = good; /* as it is: no room for two records */
        o.length = k == 1 ? many : o.length;
        o.lengths = k == 2 ? 0 : 1;
        o.depths = k == 3 ? 0 : 1;
        o.repeats = k == 4 ? 0 : 1;
        o.records = k == 5 ? LM_KV_PASSKEY_NAMES + 1 : 2;
        assert_int_equal(lm_kv_passkeys_make(tok, filler, FILLER, &o, &p, &err), LM_EUSAGE);
        assert_null(p.task);
        assert_null(p.ids);
        err = (lm_err){ 0 };
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_task_asks_for_one_of_its_records),
        cmocka_unit_test(tasks_follow_from_the_seed),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
