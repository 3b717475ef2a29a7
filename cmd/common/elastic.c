/* SPDX-License-Identifier: Apache-2.0 */
/* elastic.c -- see elastic.h. */
#include "common/elastic.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "comm/open.h"
#include "train/run_tiers.h"

static const char resume_variable[] = "LM_RANKS_RESUME";
/* Those that wait for a lost rank notice within a second; a checkpoint that is being written may take longer. */
static const double grace = 20;
enum { LOOK_US = 20000 };

typedef struct {
    pid_t pid; /* 0: it has ended */
    int status;
} child;

typedef struct {
    lm_tool *t;
    const char *run;
    int ranks;
    child *child;
    lm_comm_memory *memory;
    char *older;    /* the newest checkpoint before the first rank began; NULL */
    struct stat of; /* of it */
    bool stopping;  /* the ranks have been asked to end */
    double ended;   /* when the first one ended badly; 0 */
    int first;      /* which one it was */
} family;

bool lm_elastic_is_rank(void)
{
    return getenv(LM_MEMORY_VARIABLE) != NULL;
}

const char *lm_elastic_run(void)
{
    return lm_elastic_is_rank() ? getenv(resume_variable) : NULL;
}

/* ---- processes ---- */

static void set_number(const char *name, int n)
{
    char text[24];

    snprintf(text, sizeof text, "%d", n);
    setenv(name, text, 1);
}

/* In the new process.  It has a group of its own, as signals of a terminal reach it through this process. */
static void become_rank(const family *f, int rank, pid_t parent)
{
    char path[PATH_MAX];

    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127);
    lm_comm_memory_enter(f->memory, rank);
    set_number(LM_RANK_VARIABLE, rank);
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    execv(path, f->t->full_argv); /* the process then has the program's name */
    execv("/proc/self/exe", f->t->full_argv);
    _exit(127);
}

static void signal_all(const family *f, int sig)
{
    for (int r = 0; r < f->ranks; r++)
        if (f->child[r].pid)
            kill(f->child[r].pid, sig);
}

static lm_code start_all(family *f, lm_err *e)
{
    char text[LM_MEMORY_TEXT];
    const pid_t own = getpid();

    if (lm_comm_memory_new(f->ranks, &f->memory, e))
        return e->code;
    lm_comm_memory_text(f->memory, text);
    setenv(LM_MEMORY_VARIABLE, text, 1);
    set_number(LM_RANKS_VARIABLE, f->ranks);
    fflush(NULL);
    for (int r = 0; r < f->ranks; r++) {
        f->child[r] = (child){ .pid = fork() };
        if (f->child[r].pid == 0)
            become_rank(f, r, own);
        if (f->child[r].pid > 0)
            continue;
        f->child[r].pid = 0;
        lm_fail(e, LM_ELIMIT, "--elastic", NULL, "process %d of %d cannot be started: %s", r + 1,
                f->ranks, strerror(errno));
        signal_all(f, SIGKILL);
        break;
    }
    unsetenv(LM_MEMORY_VARIABLE);
    return e->code;
}

/* Pass on what this process is asked for. */
static void pass_on(family *f)
{
    if (lm_stopping() && !f->stopping) {
        f->stopping = true;
        signal_all(f, lm_stop_signal() ? lm_stop_signal() : SIGTERM);
    }
    if (lm_poked())
        signal_all(f, SIGUSR1);
}

/* True while one runs. */
static bool look(family *f)
{
    bool any = false;

    for (int r = 0; r < f->ranks; r++) {
        child *c = &f->child[r];
        if (!c->pid)
            continue;
        if (waitpid(c->pid, &c->status, WNOHANG) != c->pid) {
            any = true;
            continue;
        }
        c->pid = 0;
        if (c->status && f->ended == 0) {
            f->ended = lm_now();
            f->first = r;
        }
    }
    return any;
}

static void wait_all(family *f)
{
    bool killed = false;

    f->ended = 0;
    while (look(f)) {
        pass_on(f);
        if (f->ended > 0 && !killed && lm_now() - f->ended > grace) {
            signal_all(f, SIGKILL);
            killed = true;
        }
        usleep(LOOK_US);
    }
    lm_comm_memory_free(f->memory);
    f->memory = NULL;
}

/* ---- after a loss ---- */

static int count_lost(const family *f, int *which)
{
    int lost = 0;

    for (int r = f->ranks - 1; r >= 0; r--)
        if (WIFSIGNALED(f->child[r].status)) {
            lost++;
            *which = r;
        }
    return lost;
}

/* What the processes ended with: the first that was not 0. */
static int status_of(const family *f)
{
    const int s = f->ended > 0 ? f->child[f->first].status : 0;

    return WIFEXITED(s) ? WEXITSTATUS(s) : 128 + WTERMSIG(s);
}

/* The newest checkpoint of the run, unless it is that of an older run; NULL. */
static lm_code find_newest(const family *f, char **out, lm_err *e)
{
    struct stat st;

    *out = NULL;
    if (access(f->run, F_OK))
        return LM_OK;
    if (lm_run_tiers_newest(f->run, out, e) || !*out)
        return e->code;
    if (f->older && !strcmp(f->older, *out) && !stat(*out, &st) && st.st_ino == f->of.st_ino &&
        st.st_dev == f->of.st_dev) {
        lm_free(*out);
        *out = NULL;
    }
    return LM_OK;
}

static lm_code go_on(family *f, int lost, int which, lm_err *e)
{
    const int sig = WTERMSIG(f->child[which].status), left = f->ranks - lost;
    char *newest = NULL, more[48] = "";

    if (lost > 1)
        snprintf(more, sizeof more, " and %d other%s", lost - 1, lm_plural((uint64_t)lost - 1));
    errno = 0;
    if (left < 1)
        return lm_fail(e, LM_EIO, "--elastic", "resume the run when the cause is gone",
                       "rank %d of %d%s: ended by signal %d (%s), and no rank is left", which,
                       f->ranks, more, sig, strsignal(sig));
    if (find_newest(f, &newest, e))
        return e->code;
    lm_say(f->t, LM_LOG_WARN, "--elastic: rank %d of %d%s: ended by signal %d (%s); %d rank%s %s%s",
           which, f->ranks, more, sig, strsignal(sig), left, left == 1 ? "" : "s",
           left == 1 ? (newest ? "goes on from " : "begins again")
                     : (newest ? "go on from " : "begin again"),
           newest ? newest : "");
    if (newest)
        setenv(resume_variable, f->run, 1);
    lm_free(newest);
    f->ranks = left;
    return LM_OK;
}

lm_code lm_elastic_start(lm_tool *t, int ranks, const char *run, bool force, lm_err *e)
{
    family f = { .t = t, .run = run, .ranks = ranks };
    int which = 0, lost;

    unsetenv(resume_variable);
    if (lm_alloc_n(&f.child, (size_t)ranks, sizeof *f.child, "ranks", e))
        return e->code;
    if (force && !find_newest(&f, &f.older, e) && f.older && stat(f.older, &f.of))
        lm_fail(e, LM_EIO, f.older, NULL, "cannot be read");
    while (!e->code) {
        start_all(&f, e);
        wait_all(&f);
        lost = count_lost(&f, &which);
        if (e->code || f.stopping || !lost || go_on(&f, lost, which, e))
            break;
    }
    if (!e->code)
        t->status = status_of(&f);
    lm_free(f.older);
    lm_free(f.child);
    return e->code;
}
