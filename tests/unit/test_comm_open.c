/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_open.c -- how a process was started; a group of one; a launcher without the module; and, where mpirun and the
 * module are, this program as 2 and 4 ranks of Open MPI: the checks of every transport by shared memory and by messages, ranks
 * that are killed or stopped.
 *
 * As a rank, its arguments are `rank`, a mode, and for some modes the number of the rank that suffers. */
#include <errno.h>
#include <libgen.h>
#include <signal.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "comm/open.h"
#include "tests/unit/comm_case.h"

/* ---- how it was started ---- */

static const char *const *env; /* names and values */

static char *fake_env(const char *name)
{
    for (const char *const *v = env; *v; v += 2)
        if (!strcmp(*v, name))
            return (char *)v[1];
    return NULL;
}

static void test_launched(void **state)
{
    static const struct {
        const char *env[9];
        const char *launcher;
        int rank, ranks;
    } cases[] = {
        { { NULL }, NULL, 0, 1 },
        { { "OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_SIZE", "4", NULL }, "mpirun", 2, 4 },
        { { "PMIX_RANK", "3", NULL }, "PMIx", 3, 0 },
        { { "PMI_RANK", "1", "PMI_SIZE", "2", NULL }, "PMI", 1, 2 },
        { { "SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "8", NULL }, "srun", 5, 8 },
        { { "PMIX_RANK", "5", "SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "8", NULL },
          "srun",
          5,
          8 },
        /* a batch script */
        { { "SLURM_PROCID", "0", "SLURM_NTASKS", "8", NULL }, NULL, 0, 1 },
        /* mpirun in a job */
        { { "SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "1", "OMPI_COMM_WORLD_RANK", "1",
            "OMPI_COMM_WORLD_SIZE", "2", NULL },
          "mpirun",
          1,
          2 },
        /* a tool's own ranks, in a job; without the memory that they share they are none */
        { { LM_RANK_VARIABLE, "1", LM_RANKS_VARIABLE, "3", LM_MEMORY_VARIABLE, "1:2:3", NULL },
          "the tool",
          1,
          3 },
        { { LM_RANK_VARIABLE, "1", LM_RANKS_VARIABLE, "3", NULL }, NULL, 0, 1 },
        { { "OMPI_COMM_WORLD_RANK", "", "OMPI_COMM_WORLD_SIZE", "x", NULL }, NULL, 0, 1 },
        { { "OMPI_COMM_WORLD_RANK", "4", "OMPI_COMM_WORLD_SIZE", "4", NULL }, NULL, 0, 1 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        env = cases[i].env;
        lm_launch l = lm_launched(fake_env);

        if (l.rank != cases[i].rank || l.ranks != cases[i].ranks ||
            strcmp(l.launcher ? l.launcher : "", cases[i].launcher ? cases[i].launcher : "") != 0)
            fail_msg("case %zu: %s, rank %d of %d", i, l.launcher ? l.launcher : "alone", l.rank,
                     l.ranks);
    }
}

/* ---- without a launcher, and without a module ---- */

static lm_code run_self(int ranks, double timeout, lm_rank_fn *fn, void *ctx, lm_err *e)
{
    const lm_comm_opts o = { .launch = { .ranks = 1 }, .timeout = timeout };
    lm_comm *c;

    assert_int_equal(ranks, 1);
    if (lm_comm_open(&o, &c, e))
        return e->code;
    fn(ctx, c, e);
    lm_comm_free(c);
    return e->code;
}

static lm_code fails_alone(void *ctx, lm_comm *c_, lm_err *e)
{
    lm_err why = { 0 }, got = { 0 };

    (void)ctx;
    lm_fail(&why, LM_ENUMERIC, "loss", NULL, "is not finite");
    lm_comm_abort(c_, &why);
    EXPECT(lm_comm_barrier(c_, &got) == LM_ENUMERIC && !strcmp(got.where, "loss"));
    EXPECT(lm_comm_reports(c_));
    return LM_OK;
}

static void test_alone(void **state)
{
    lm_err e = { 0 };

    (void)state;
    check_calls(run_self, 1, "self");
    if (run_self(1, 1, fails_alone, NULL, &e))
        fail_msg("%s: %s", e.where, e.what);
}

static void test_no_module(void **state)
{
    static const char *const folders[] = { "/no/such/folder", "/neither", NULL };
    lm_comm_opts o = { .launch = { .launcher = "mpirun", .ranks = 4 }, .modules = folders };
    lm_comm *c;
    lm_err e = { 0 };
    double begin;

    (void)state;
    assert_int_equal(lm_comm_open(&o, &c, &e), LM_EIO);
    assert_null(c);
    assert_string_equal(e.where, "mpirun has started 4 ranks");
    assert_string_equal(e.what, "there is no libcore-mpi.so in /no/such/folder, /neither");
    o.transport = "self";
    e = (lm_err){ 0 };
    assert_int_equal(lm_comm_open(&o, &c, &e), LM_EUSAGE);
    o = (lm_comm_opts){ .launch = { "PMIx", 3, 0 } };
    e = (lm_err){ 0 };
    begin = lm_now();
    assert_int_equal(lm_comm_open(&o, &c, &e), LM_EIO);
    assert_true(lm_now() - begin > 0.4);
}

/* ---- a rank of Open MPI ---- */

static char modules[4096]; /* beside this program, in the build folder */
static lm_comm *all;

/* The checks of every transport, without cmocka: this is not its process. */
static lm_code work(void *ctx, lm_comm *c, lm_err *e)
{
    lm_rank_fn *const calls[] = { reductions, movements, ring, lanes, groups };
    int rank = lm_comm_rank(c), size = lm_comm_size(c), bad;
    uint64_t threads[MOST] = { 0 }, here[MOST] = { 0 };

    (void)ctx;
    for (size_t k = 0; k < sizeof calls / sizeof *calls; k++)
        if (calls[k](NULL, c, e))
            return e->code;
    if (hash_results(here, c, e) || lm_threads_run(size, 60, hash_results, threads, e))
        return e->code;
    bad = here[rank] != threads[rank];
    if (lm_comm_all_reduce(c, &bad, &bad, 1, LM_DTYPE_I32, LM_COMM_MAX, e))
        return e->code;
    return bad ? lm_fail(e, LM_EBUG, "bits", NULL, "differ from those of threads") : LM_OK;
}

static lm_code suffer(lm_comm *c, const char *mode, int victim, lm_err *e)
{
    float x[5000] = { 0 };

    for (int i = 0;; i++) {
        if (i == 100 && lm_comm_rank(c) == victim && !strcmp(mode, "fail"))
            return lm_fail(e, LM_ENUMERIC, "loss", NULL, "is not finite");
        if (i == 100 && lm_comm_rank(c) == victim)
            kill(getpid(), !strcmp(mode, "kill") ? SIGKILL : SIGSTOP);
        if (lm_comm_all_reduce(c, x, x, 5000, LM_DTYPE_F32, LM_COMM_SUM, e))
            return e->code;
    }
}

/* As tools do: they finish what they are doing. */
static void on_term(int s)
{
    (void)s;
}

static int be_rank(const char *transport, const char *mode, int victim)
{
    const char *const folders[] = { modules, NULL };
    const lm_comm_opts o = { .launch = lm_launched(getenv),
                             .transport = !strcmp(transport, "best") ? NULL : transport,
                             .modules = folders,
                             .timeout = !strcmp(mode, "stop") ? 1 : 30,
                             .unmapped =
                                 !strcmp(mode, "unmapped") && lm_launched(getenv).rank == victim };
    lm_err e = { 0 };

    signal(SIGTERM, on_term);
    if (lm_comm_open(&o, &all, &e)) {
        if (o.launch.rank == 0)
            printf("failed: %s: %s\n", e.where, e.what);
        fflush(stdout);
        return 1;
    }
    if (!strcmp(mode, "work") || !strcmp(mode, "unmapped") ? work(NULL, all, &e)
                                                           : suffer(all, mode, victim, &e)) {
        lm_err named = { 0 };

        lm_comm_abort(all, &e);
        lm_comm_barrier(all, &named);
        if (lm_comm_reports(all))
            printf("failed: %s: %s\n", named.where, named.what);
    } else if (lm_comm_rank(all) == 0) {
        printf("passed on %d by %s\n", lm_comm_size(all), lm_comm_transport(all));
    }
    fflush(stdout);
    lm_comm_free(all);
    return e.code != LM_OK;
}

/* ---- with mpirun ---- */

static char self[4096];

/* What the ranks print; returns the status of mpirun, -1 without mpirun or module. */
static int mpirun(int ranks, const char *transport, const char *mode, int victim, char *out,
                  size_t size)
{
    char command[9000];
    size_t n = 0;
    FILE *f;

    if (system("command -v mpirun > /dev/null") || access(modules, F_OK))
        return -1;
    snprintf(command, sizeof command,
             "mpirun --allow-run-as-root --oversubscribe -n %d '%s' rank %s %s %d 2>&1 < /dev/null",
             ranks, self, transport, mode, victim);
    f = popen(command, "r");
    assert_non_null(f);
    while (n + 1 < size) {
        size_t got = fread(out + n, 1, size - 1 - n, f);

        if (!got)
            break;
        n += got;
    }
    out[n] = 0;
    int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

static char out[1 << 16];

static void test_ranks(void **state)
{
    static const char *const transport[] = { "best", "mpi" };

    (void)state;
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (int t = 0; t < 2; t++) {
            char wanted[32];
            int status = mpirun(ranks, transport[t], "work", 0, out, sizeof out);

            if (status < 0)
                skip();
            snprintf(wanted, sizeof wanted, "passed on %d by %s\n", ranks, t ? "mpi" : "shm");
            if (status || !strstr(out, wanted))
                fail_msg("%d ranks, %s: status %d: %s", ranks, transport[t], status, out);
        }
}

/* A container may keep one rank from the memory of the others: all use messages then. */
static void test_unmapped(void **state)
{
    (void)state;
    for (int victim = 0; victim < 2; victim++) {
        int status = mpirun(2, "best", "unmapped", victim, out, sizeof out);

        if (status < 0)
            skip();
        if (status || !strstr(out, "passed on 2 by mpi\n"))
            fail_msg("rank %d: status %d: %s", victim, status, out);
    }
}

static int lines_that_begin(const char *s, const char *begin)
{
    int n = 0;

    for (; (s = strstr(s, begin)); s++)
        n++;
    return n;
}

static void test_suffering(void **state)
{
    static const struct {
        const char *transport, *mode, *line;
    } cases[] = {
        { "best", "kill", "failed: all_reduce: rank 1 of 3 on " },
        { "best", "stop", "failed: all_reduce: rank 1 of 3 on " },
        { "mpi", "stop", "failed: all_reduce: rank 1 of 3 on " },
        { "best", "fail", "failed: rank 1 of 3 on " },
        { "mpi", "fail", "failed: rank 1 of 3 on " },
        { "mpi", "kill", "" }, /* mpirun names it; whether a rank does, too, is a matter of time */
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double begin = lm_now();
        int status = mpirun(3, cases[i].transport, cases[i].mode, 1, out, sizeof out);

        if (status < 0)
            skip();
        if (!status || !strstr(out, cases[i].line) || lines_that_begin(out, "failed: ") > 1 ||
            lm_now() - begin > 20)
            fail_msg("%s, %s: status %d, %.1f s: %s", cases[i].transport, cases[i].mode, status,
                     lm_now() - begin, out);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_launched),  cmocka_unit_test(test_alone),
        cmocka_unit_test(test_no_module), cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_suffering), cmocka_unit_test(test_unmapped),
    };
    char folder[sizeof self];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

    if (n < 0)
        return 1;
    self[n] = 0;
    snprintf(folder, sizeof folder, "%s", self);
    snprintf(modules, sizeof modules, "%.4000s/../../lib/lmutils", dirname(folder));
    if (argc == 5 && !strcmp(argv[1], "rank"))
        return be_rank(argv[2], argv[3], atoi(argv[4]));
    return cmocka_run_group_tests_name("comm_open", tests, NULL, NULL);
}
