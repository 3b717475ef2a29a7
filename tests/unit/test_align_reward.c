/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_reward.c -- rewards of completions: numbers in texts, forms, and commands that answer, die, hang, or say
 * too little, too much or nonsense. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/stop.h"
#include "tune/align/reward.h"

static lm_err err;

static void ok(lm_code rc)
{
    if (rc)
        fail_msg("%s: %s", err.where, err.what);
}

/* An item with the record `json` (NULL: none). */
static lm_reward_item item_of(const char *text, json_t *record)
{
    return (lm_reward_item){
        .prompt = "p", .prompt_len = 1, .text = text, .text_len = strlen(text), .record = record
    };
}

static json_t *record_of(const char *text)
{
    json_t *o = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_json_parse(text, strlen(text), "record", &o, &e), LM_OK);
    return o;
}

static bool whole;

static lm_reward_set *open_one(const char *spec)
{
    const lm_reward_opts o = { .most_new = 100, .timeout = 5 };
    lm_reward_set *s = NULL;
    err = (lm_err){ 0 };
    ok(lm_reward_open(&spec, NULL, 1, &o, &s, &err));
    return s;
}

/* The reward of a text by `spec`. */
static double reward_of(const char *spec, const char *text, const char *record)
{
    json_t *r = record ? record_of(record) : NULL;
    lm_reward_item it = item_of(text, r);
    lm_reward_set *s = open_one(spec);
    double total;
    ok(lm_reward_score(s, &it, 1, NULL, &total, &whole, &err));
    lm_reward_close(s);
    json_decref(r);
    return total;
}

static lm_code code_of(const char *spec)
{
    const lm_reward_opts o = { .most_new = 100 };
    lm_reward_set *s = NULL;
    err = (lm_err){ 0 };
    lm_code rc = lm_reward_open(&spec, NULL, 1, &o, &s, &err);
    assert_int_equal(rc == LM_OK, s != NULL);
    lm_reward_close(s);
    return rc;
}

/* ---- answers ---- */

static void numbers(void **state)
{
    static const struct {
        const char *text, *answer;
        double want;
    } row[] = {
        { "16-3-4=9, 9*2=18\n#### 18", "x\n#### 18", 1 },
        { "#### 18 dollars, as 2 x 9", "18", 1 },
        { "the answer is $1,080.", "#### 1080", 1 },
        { "it is 1080.00", "#### 1,080", 1 },
        { "it is 1,08", "#### 108", 0 },
        { "it is 1,0805", "#### 10805", 0 },
        { "it is 1,0805", "#### 0805", 1 },
        { "so -$5", "-5", 1 },
        { "so $-5", "-5", 1 },
        { "7-5", "-5", 0 },
        { "7-5", "5", 1 },
        { "so it is \\boxed{\\$12} and not 13", "12", 1 },
        { "\\boxed{a_{1} = 7} 9", "7", 1 },
        { "<answer>3 + 4 = 7</answer> 9", "7", 1 },
        { "<answer>7", "7", 1 },
        { ".5", "0.50", 1 },
        { "50%", "50", 1 },
        { "#### no idea, 18", "18", 1 },
        { "18 #### none", "18", 0 },
        { "none", "18", 0 },
        { "", "18", 0 },
        { "1234567890123456789012345678901234567890123456789012345678901234567890", "1", 0 },
        { "9007199254740993", "9007199254740993", 1 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char record[200];
        snprintf(record, sizeof record, "{\"answer\":\"%s\"}",
                 strcmp(row[i].answer, "x\n#### 18") ? row[i].answer : "x\\n#### 18");
        if (reward_of("gsm8k", row[i].text, record) != row[i].want)
            fail_msg("'%s' for '%s'", row[i].text, row[i].answer);
    }
    assert_true(reward_of("gsm8k", "7", "{\"answer\":7}") == 1);
    assert_true(reward_of("gsm8k:column=n", "7", "{\"answer\":8,\"n\":7.0}") == 1);
    assert_true(reward_of("gsm8k", "7", "{\"solution\":\"7\"}") == 1);
}

static void texts(void **state)
{
    (void)state;
    assert_true(reward_of("exact", " Paris\n", "{\"answer\":\"Paris\"}") == 1);
    assert_true(reward_of("exact", "Paris.", "{\"answer\":\"Paris\"}") == 0);
    assert_true(reward_of("exact", "", "{\"answer\":\"\"}") == 1);
    assert_true(reward_of("regex:^a+b$", "aab", NULL) == 1);
    assert_true(reward_of("regex:^a+b$", "aabc", NULL) == 0);
    assert_true(reward_of("regex:x, y=1:\\d", "x, y=1:5", NULL) == 1);
    assert_true(reward_of("regex:b", "\xff\xc3 b", NULL) == 1);
    /* the engine gives up */
    assert_true(reward_of("regex:(x+x+)+(?=y)z", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
                          NULL) == 0);
}

static void forms(void **state)
{
    (void)state;
    assert_true(reward_of("think", "<think>\na\n</think>\nb", NULL) == 1);
    assert_true(reward_of("think", "<think>a", NULL) == 0);
    assert_true(reward_of("think", " <think>a</think>", NULL) == 0);
    assert_true(reward_of("think", "<think>a<think>b</think>", NULL) == 0);
    assert_true(reward_of("tags", "<think>a</think>\n<answer>b</answer>\n", NULL) == 1);
    assert_true(reward_of("tags", "<think>a</think>\n<answer>b</answer> c", NULL) == 0);
    assert_true(reward_of("tags", "<think>a</think> c <answer>b</answer>", NULL) == 0);
    assert_true(reward_of("tags", "<answer>b</answer>", NULL) == 0);
}

static double of_tokens(const char *spec, const uint32_t *ids, int64_t n)
{
    lm_reward_item it = item_of("", NULL);
    lm_reward_set *s = open_one(spec);
    double total;
    it.ids = ids;
    it.n = n;
    ok(lm_reward_score(s, &it, 1, NULL, &total, &whole, &err));
    lm_reward_close(s);
    return total;
}

static void lengths(void **state)
{
    const uint32_t different[] = { 1, 2, 3, 4 }, same[] = { 5, 5, 5, 5, 5 };
    (void)state;
    assert_true(of_tokens("length:target=3,cost=0.5", different, 4) == -0.5);
    assert_true(of_tokens("length:target=4", different, 4) == 0);
    /* most 100, soft 20: TRL's example gives -0.5 at 90 */
    assert_true(of_tokens("overlong", different, 80) == 0);
    assert_true(of_tokens("overlong", different, 90) == -0.5);
    assert_true(of_tokens("overlong", different, 100) == -1);
    assert_true(of_tokens("overlong:most=50,soft=10", different, 51) == -1);
    assert_true(of_tokens("repetition:ngram=2", different, 4) == 0);
    assert_true(of_tokens("repetition:ngram=2", same, 5) == -0.75);
    assert_true(of_tokens("repetition", same, 2) == 0);
}

static void weights(void **state)
{
    const char *spec[] = { "gsm8k", "regex:a", "regex:b",
                           "command:while read x; do echo null; done" };
    const double weight[] = { 1, 0.5, -2, 8 };
    const lm_reward_opts o = { .timeout = 5 };
    json_t *r = record_of("{\"answer\":\"3\"}");
    lm_reward_item it[] = { item_of("a3", r), item_of("b", r) };
    lm_reward_set *s = NULL;
    double each[8], total[2];
    (void)state;
    err = (lm_err){ 0 };
    ok(lm_reward_open(spec, weight, 4, &o, &s, &err));
    assert_int_equal(lm_reward_count(s), 4);
    assert_string_equal(lm_reward_name(s, 1), "regex");
    assert_string_equal(lm_reward_name(s, 2), "regex_2");
    ok(lm_reward_score(s, it, 2, each, total, &whole, &err));
    assert_true(total[0] == 1.5 && total[1] == -2);
    assert_true(each[0] == 1 && each[1] == 1 && each[2] == 0 && isnan(each[3]));
    assert_true(each[4] == 0 && each[5] == 0 && each[6] == 1 && isnan(each[7]));
    lm_reward_close(s);
    json_decref(r);
}

static void refused(void **state)
{
    lm_reward_set *s;
    lm_reward_item it = item_of("3", NULL);
    double total;
    (void)state;
    assert_int_equal(code_of("gsm8"), LM_EUSAGE);
    assert_non_null(strstr(err.todo, "gsm8k"));
    assert_int_equal(code_of("gsm8k:colum=x"), LM_EUSAGE);
    assert_int_equal(code_of("length:target=-1"), LM_EUSAGE);
    assert_int_equal(code_of("overlong:most=5,soft=6"), LM_EUSAGE);
    assert_int_equal(code_of("regex"), LM_EUSAGE);
    assert_int_equal(code_of("regex:("), LM_EUSAGE);
    assert_int_equal(code_of("command:"), LM_EUSAGE);
    s = open_one("gsm8k"); /* no record at all */
    assert_int_equal(lm_reward_score(s, &it, 1, NULL, &total, &whole, &err), LM_EFORMAT);
    lm_reward_close(s);
    json_t *r = record_of("{\"answer\":\"none\"}");
    it.record = r;
    s = open_one("gsm8k");
    err = (lm_err){ 0 };
    assert_int_equal(lm_reward_score(s, &it, 1, NULL, &total, &whole, &err), LM_EFORMAT);
    lm_reward_close(s);
    json_decref(r);
}

/* ---- commands ---- */

enum { MANY = 3000 };

/* Reward `n` completions of 200 bytes, twice; the code of the first call that fails. */
static lm_code run_command(const char *command, double timeout, int64_t n, double *total)
{
    static char text[MANY][201];
    static lm_reward_item it[MANY];
    const lm_reward_opts o = { .timeout = timeout };
    char line[400];
    const char *spec = line;
    json_t *r = record_of("{\"level\":3,\"prompt\":\"not this one\"}");
    lm_reward_set *s = NULL;
    snprintf(line, sizeof line, "command:%s", command);
    err = (lm_err){ 0 };
    for (int64_t i = 0; i < n; i++) {
        snprintf(text[i], sizeof text[i], "%0200lld", (long long)i);
        it[i] = item_of(text[i], r);
    }
    lm_code rc = lm_reward_open(&spec, NULL, 1, &o, &s, &err);
    for (int k = 0; k < 2 && !rc; k++)
        rc = lm_reward_score(s, it, n, NULL, total, &whole, &err);
    lm_reward_close(s);
    json_decref(r);
    assert_true(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD); /* no zombie is left */
    return rc;
}

/* More bytes than a pipe holds in both directions. */
static void many_answers(void **state)
{
    static double total[MANY];
    (void)state;
    ok(run_command("sed -u 's/.*\"completion\":\"0*\\([0-9]*\\)\".*/\\1/; s/^$/0/'", 20, MANY,
                   total));
    for (int i = 0; i < MANY; i++)
        assert_true(total[i] == i);
    ok(run_command("while read -r x; do echo '{\"reward\": -1.5, \"why\": \"long\"}'; done", 20, 3,
                   total));
    assert_true(total[2] == -1.5);
    ok(run_command(
        "while read -r x; do case $x in *'\"prompt\":\"p\"'*'\"level\":3}') echo 1;; *) echo "
        "0;; esac; done",
        20, 1, total));
    assert_true(total[0] == 1);
}

static void expect(const char *command, double timeout, int64_t n, lm_code want, const char *what)
{
    double total[64], began = lm_now();
    assert_int_equal(run_command(command, timeout, n, total), want);
    if (!strstr(err.what, what))
        fail_msg("'%s' is not in: %s", what, err.what);
    assert_true(lm_now() - began < 20);
}

static void bad_commands(void **state)
{
    (void)state;
    expect("/no/such/program", 5, 4, LM_EIO, "status 127");
    expect("exit 3", 5, 4, LM_EIO, "status 3 after 0 of 4");
    expect("read x; echo 1; kill -9 $$", 5, 4, LM_EIO, "signal 9 after 1 of 4");
    expect("head -n 2 | sed 's/.*/1/'", 5, 4, LM_EIO, "after 2 of 4");
    expect("sleep 100 & sleep 100", 0.3, 4, LM_EIO, "no answer for 0.3 s, after 0 of 4");
    expect("exec >&-; sleep 100", 5, 4, LM_EIO, "closed its output");
    expect("while read x; do echo nan; done", 5, 4, LM_EFORMAT, "answer 1");
    expect("while read x; do echo inf; done", 5, 4, LM_EFORMAT, "'inf'");
    expect("while read x; do echo; done", 5, 4, LM_EFORMAT, "answer 1");
    expect("while read x; do echo '{\"score\":1}'; done", 5, 4, LM_EFORMAT, "answer 1");
    expect("while read x; do echo 1; echo 2; done", 5, 4, LM_EIO, "more answers");
    expect("echo 1; echo 2; echo 3; echo 4; echo 5; cat > /dev/null", 5, 4, LM_EIO, "more answers");
    expect("read x; tr -d '\\n' < /dev/zero", 5, 4, LM_EFORMAT, "answer 1");
}

/* It reads nothing and ends while lines are written to it: SIGPIPE would end this process. */
static void broken_pipe(void **state)
{
    static double total[MANY];
    (void)state;
    signal(SIGPIPE, SIG_DFL);
    assert_int_equal(run_command("exec <&-; sleep 0.2; exit 4", 5, MANY, total), LM_EIO);
    assert_non_null(strstr(err.what, "status 4 after 0"));
}

/* A command that does not end by itself is ended with its children. */
static void stubborn(void **state)
{
    double total[4], began = lm_now();
    (void)state;
    ok(run_command("trap '' TERM; for i in 1 2 3 4 5 6 7 8; do read x; echo 1; done; sleep 100", 5,
                   4, total));
    assert_true(lm_now() - began < 10);
}

static void stopped(void **state)
{
    double total[4];
    (void)state;
    lm_stop_request(SIGINT);
    ok(run_command("sleep 100", 50, 4, total));
    assert_true(isnan(total[0]));
    lm_stop_request(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers),      cmocka_unit_test(texts),
        cmocka_unit_test(forms),        cmocka_unit_test(lengths),
        cmocka_unit_test(weights),      cmocka_unit_test(refused),
        cmocka_unit_test(many_answers), cmocka_unit_test(bad_commands),
        cmocka_unit_test(broken_pipe),  cmocka_unit_test(stubborn),
        cmocka_unit_test(stopped),
    };
    return cmocka_run_group_tests_name("align_reward", tests, NULL, NULL);
}
