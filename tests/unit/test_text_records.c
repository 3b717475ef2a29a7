/* SPDX-License-Identifier: Apache-2.0 */
/* Forms of records: each becomes its kind, with messages as templates read them; names of columns;
 * what is refused, with the key. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "text/records.h"

static lm_text_record read_line(const char *line, const lm_text_record_map *map)
{
    lm_err e = { 0 };
    lm_text_record r = { 0 };
    if (lm_text_record_read(line, strlen(line), map, "d.jsonl:3", &r, &e))
        fail_msg("%s: %s (%s)", e.where, e.what, line);
    return r;
}

/* v in compact JSON with sorted keys is `want`; NULL: no value. */
static void assert_json(const json_t *v, const char *want)
{
    char *got = v ? json_dumps(v, JSON_COMPACT | JSON_SORT_KEYS | JSON_ENCODE_ANY) : NULL;
    if (want)
        assert_string_equal(got ? got : "nothing", want);
    else
        assert_null(got);
    free(got);
}

typedef struct {
    const char *line;
    lm_text_record_kind kind;
    const char *form, *messages, *prompt, *completion, *chosen, *rejected;
} form;

#define U(t) "{\"content\":\"" t "\",\"role\":\"user\"}"
#define A(t) "{\"content\":\"" t "\",\"role\":\"assistant\"}"
#define S(t) "{\"content\":\"" t "\",\"role\":\"system\"}"

static const form forms[] = {
    { "{\"text\": \"a\"}", LM_RECORD_TEXT, "text", NULL, NULL, NULL, NULL, NULL },
    { "{\"messages\": [" U("q") ", " A("a") "]}", LM_RECORD_MESSAGES, "messages",
      "[" U("q") "," A("a") "]", NULL, NULL, NULL, NULL },
    { "{\"prompt\": \"q\"}", LM_RECORD_PROMPT, "prompt", NULL, "\"q\"", NULL, NULL, NULL },
    { "{\"prompt\": \"q\", \"completion\": \"a\"}", LM_RECORD_COMPLETION, "prompt and completion",
      NULL, "\"q\"", "\"a\"", NULL, NULL },
    { "{\"prompt\": [" U("q") "], \"completion\": [" A("a") "]}", LM_RECORD_COMPLETION,
      "prompt and completion", NULL, "[" U("q") "]", "[" A("a") "]", NULL, NULL },
    { "{\"prompt\": \"q\", \"response\": \"a\", \"label\": 0}", LM_RECORD_UNPAIRED, NULL, NULL,
      "\"q\"", "\"a\"", NULL, NULL },
    { "{\"prompt\": \"q\", \"completion\": \"a\", \"label\": \"spam\"}", LM_RECORD_COMPLETION, NULL,
      NULL, "\"q\"", "\"a\"", NULL, NULL },
    { "{\"prompt\": \"q\", \"chosen\": \"a\", \"rejected\": \"b\"}", LM_RECORD_PREFERENCE, NULL,
      NULL, "\"q\"", NULL, "\"a\"", "\"b\"" },
    { "{\"chosen\": \"The sky is blue\", \"rejected\": \"The sky is black\"}", LM_RECORD_PREFERENCE,
      NULL, NULL, "\"The sky is bl\"", NULL, "\"ue\"", "\"ack\"" },
    { "{\"chosen\": [" U("q") "," A("a") "], \"rejected\": [" U("q") "," A("b") "]}",
      LM_RECORD_PREFERENCE, NULL, NULL, "[" U("q") "]", NULL, "[" A("a") "]", "[" A("b") "]" },
    { "{\"prompt\": \"q\", \"messages\": [" U("q") "," A("a") "], \"chosen\": [" U("q") "," A(
          "a") "], \"rejected\": [" U("q") "," A("b") "]}",
      LM_RECORD_PREFERENCE, NULL, NULL, "[" U("q") "]", NULL, "[" A("a") "]", "[" A("b") "]" },
    { "{\"prompt\": \"q\", \"chosen\": [" A("a") "], \"rejected\": [" A("b") "]}",
      LM_RECORD_PREFERENCE, NULL, NULL, "[" U("q") "]", NULL, "[" A("a") "]", "[" A("b") "]" },
    { "{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", "
      "\"value\": \"a\"}], \"system\": \"s\"}",
      LM_RECORD_MESSAGES, "ShareGPT", "[" S("s") "," U("q") "," A("a") "]", NULL, NULL, NULL,
      NULL },
    { "{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}], \"chosen\": {\"from\": "
      "\"gpt\", \"value\": \"a\"}, \"rejected\": {\"from\": \"gpt\", \"value\": \"b\"}}",
      LM_RECORD_PREFERENCE, "ShareGPT", NULL, "[" U("q") "]", NULL, "[" A("a") "]",
      "[" A("b") "]" },
    { "{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", "
      "\"value\": \"a\"}], \"kto_tag\": false}",
      LM_RECORD_UNPAIRED, "ShareGPT", NULL, "[" U("q") "]", "[" A("a") "]", NULL, NULL },
    { "{\"instruction\": \"i\", \"input\": \"j\", \"output\": \"o\"}", LM_RECORD_COMPLETION,
      "Alpaca", NULL, "[" U("i\\nj") "]", "[" A("o") "]", NULL, NULL },
    { "{\"instruction\": \"i\", \"input\": \"\", \"output\": \"o\", \"system\": \"s\", "
      "\"history\": "
      "[[\"h\", \"k\"]]}",
      LM_RECORD_COMPLETION, "Alpaca", NULL, "[" S("s") "," U("h") "," A("k") "," U("i") "]",
      "[" A("o") "]", NULL, NULL },
    { "{\"instruction\": \"i\", \"chosen\": \"a\", \"rejected\": \"b\"}", LM_RECORD_PREFERENCE,
      "Alpaca", NULL, "[" U("i") "]", NULL, "[" A("a") "]", "[" A("b") "]" },
    { "{\"question\": \"q\", \"answer\": \"#### 4\"}", LM_RECORD_COMPLETION, "question and answer",
      NULL, "\"q\"", "\"#### 4\"", NULL, NULL },
    { "{\"input\": \"q\", \"output\": \"a\"}", LM_RECORD_COMPLETION, "input and output", NULL,
      "\"q\"", "\"a\"", NULL, NULL },
};

static void each_form_becomes_its_kind(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const form *f = &forms[i];
        lm_text_record r = read_line(f->line, NULL);
        assert_int_equal(r.kind, f->kind);
        if (f->form)
            assert_string_equal(r.form, f->form);
        assert_json(r.messages, f->messages);
        assert_json(r.prompt, f->prompt);
        assert_json(r.completion, f->completion);
        assert_json(r.chosen, f->chosen);
        assert_json(r.rejected, f->rejected);
        assert_int_equal(lm_text_record_is_chat(&r), r.messages || json_is_array(r.prompt));
        lm_text_record_fini(&r);
    }
}

static void labels_and_steps(void **state)
{
    (void)state;
    lm_text_record r = read_line("{\"prompt\":\"q\",\"completion\":\"a\",\"label\":true}", NULL);
    assert_true(r.good);
    lm_text_record_fini(&r);
    r = read_line("{\"messages\":[" U("q") "," A("a") "],\"label\":false}", NULL);
    assert_int_equal(r.kind, LM_RECORD_UNPAIRED);
    assert_false(r.good);
    assert_json(r.completion, "[" A("a") "]");
    lm_text_record_fini(&r);
    r = read_line("{\"prompt\":\"q\",\"completions\":[\"a\",\"b\"],\"labels\":[true,false]}", NULL);
    assert_int_equal(r.kind, LM_RECORD_STEPWISE);
    assert_json(r.right, "[true,false]");
    lm_text_record_fini(&r);
}

static void function_calls_and_tools(void **state)
{
    (void)state;
    lm_text_record r = read_line("{\"conversations\":[{\"from\":\"human\",\"value\":\"q\"},"
                                 "{\"from\":\"function_call\",\"value\":\"{\\\"name\\\":\\\"f\\\","
                                 "\\\"arguments\\\":{\\\"x\\\":1}}\"},"
                                 "{\"from\":\"observation\",\"value\":\"2\"}],"
                                 "\"tools\":\"[{\\\"name\\\":\\\"f\\\"}]\",\"id\":7}",
                                 NULL);
    assert_json(r.tools, "[{\"name\":\"f\"}]");
    assert_json(json_array_get(r.messages, 1),
                "{\"content\":\"\",\"role\":\"assistant\",\"tool_calls\":[{\"function\":{"
                "\"arguments\":{\"x\":1},\"name\":\"f\"},\"type\":\"function\"}]}");
    assert_json(json_array_get(r.messages, 2), "{\"content\":\"2\",\"role\":\"tool\"}");
    assert_json(json_object_get(r.line, "id"), "7"); /* columns stay */
    lm_text_record_fini(&r);
}

static void columns_are_renamed(void **state)
{
    lm_text_record_map m = { 0 };
    lm_err e = { 0 };
    (void)state;
    assert_int_equal(lm_text_record_map_add(&m, "prompt=meta.q,completion=prompt", &e), LM_OK);
    lm_text_record r = read_line("{\"meta\":{\"q\":\"Q\"},\"prompt\":\"P\"}", &m);
    assert_json(r.prompt, "\"Q\"");
    assert_json(r.completion, "\"P\"");
    lm_text_record_fini(&r);
    assert_int_equal(lm_text_record_read("{\"prompt\":\"P\"}", 14, &m, "f:1", &r, &e), LM_EFORMAT);
    assert_non_null(strstr(e.what, "\"meta.q\""));
    lm_text_record_map_fini(&m);
    static const char *const bad[] = { "prompt", "=a", "prompt=", "promt=a", "text=a,text=b", "" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        e = (lm_err){ 0 };
        assert_int_equal(lm_text_record_map_add(&m, bad[i], &e), LM_EUSAGE);
        if (i == 3)
            assert_non_null(strstr(e.todo, "'prompt'"));
        lm_text_record_map_fini(&m);
    }
}

static void bad_records_are_refused(void **state)
{
    static const struct {
        const char *line, *what;
    } bad[] = {
        { "[1]", "not a JSON object" },
        { "{\"a\": 1, \"b\": 2}", "\"a\", \"b\"" },
        { "{}", "without keys" },
        { "{\"text\": 1}", "\"text\"" },
        { "{\"messages\": []}", "no message" },
        { "{\"messages\": [{\"content\": \"a\"}]}", "message 1 of \"messages\" has no \"role\"" },
        { "{\"messages\": \"a\"}", "\"messages\"" },
        { "{\"prompt\": 1}", "\"prompt\"" },
        { "{\"prompt\": \"a\", \"completion\": [" U("a") "]}", "\"completion\"" },
        { "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"b\"}", "the same" },
        { "{\"chosen\":\"b\",\"rejected\":\"c\"}", "common prompt" },
        { "{\"chosen\":[" U("q") "],\"rejected\":[" U("q") "," A("a") "]}",
          "ends with the prompt" },
        { "{\"prompt\":\"a\",\"completions\":[\"b\"],\"labels\":[]}", "\"labels\"" },
        { "{\"conversations\": [{\"from\": \"bob\", \"value\": \"a\"}]}", "\"bob\"" },
        { "{\"conversations\": [{\"from\": \"function_call\", \"value\": \"a\"}]}",
          "function_call" },
        { "{\"instruction\": \"a\", \"output\": 2}", "\"output\"" },
        { "{\"messages\": [" A("a") "], \"label\": true}", "without a prompt" },
        { "{\"text\": \"a\", \"tools\": 3}", "\"tools\"" },
        { "{\"text\": \"a\"", "" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_err e = { 0 };
        lm_text_record r;
        if (lm_text_record_read(bad[i].line, strlen(bad[i].line), NULL, "d.jsonl:3", &r, &e) !=
            LM_EFORMAT)
            fail_msg("accepted: %s", bad[i].line);
        if (!strstr(e.what, bad[i].what) || !strstr(e.where, "d.jsonl:3"))
            fail_msg("%s: %s: %s", bad[i].line, e.where, e.what);
        assert_null(r.line);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_form_becomes_its_kind), cmocka_unit_test(labels_and_steps),
        cmocka_unit_test(function_calls_and_tools),   cmocka_unit_test(columns_are_renamed),
        cmocka_unit_test(bad_records_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
