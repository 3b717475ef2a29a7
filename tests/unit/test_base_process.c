/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_process.c -- states of processes: this one, a stopped one, an ended one, one whose number is another's, and any of them
 * when no file can be opened. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/process.h"

static void test_states(void **state)
{
    int64_t me = getpid();
    uint64_t start = lm_process_start(me);
    pid_t child = fork();

    (void)state;
    assert_true(child >= 0);
    if (!child)
        for (;;)
            pause();
    uint64_t its = lm_process_start(child);
    assert_true(start > 0 && its >= start);
    assert_int_equal(lm_process_look(me, start), LM_PROCESS_RUNS);
    assert_int_equal(lm_process_look(me, 0), LM_PROCESS_RUNS);
    assert_int_equal(lm_process_look(me, start + 1), LM_PROCESS_ENDED);
    kill(child, SIGSTOP);
    assert_int_equal(waitpid(child, NULL, WUNTRACED), child);
    assert_int_equal(lm_process_look(child, its), LM_PROCESS_STOPPED);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(lm_process_look(child, its), LM_PROCESS_ENDED);
}

static void test_no_files(void **state)
{
    struct rlimit usual, none;
    uint64_t start = lm_process_start(getpid());

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &usual), 0);
    none = (struct rlimit){ .rlim_cur = 0, .rlim_max = usual.rlim_max };
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    lm_process_state seen = lm_process_look(getpid(), start);
    uint64_t unknown = lm_process_start(getpid());
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &usual), 0);
    assert_int_equal(seen, LM_PROCESS_RUNS);
    assert_int_equal(unknown, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_states),
        cmocka_unit_test(test_no_files),
    };
    return cmocka_run_group_tests_name("base_process", tests, NULL, NULL);
}
