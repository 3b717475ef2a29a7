/* SPDX-License-Identifier: Apache-2.0 */
/* links.c -- see links.h. */
#include "common/links.h"

#include <dirent.h>
#include <jansson.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/process.h"
#include "base/text.h"
#include "comm/probe.h"

enum { TRIED = 256 << 10, CHECKED = 8 << 20, MOST_RANKS = 512, FEW_ROUNDS = 64 };

/* Where a rank is. */
typedef struct {
    uint64_t machine;
    int64_t locked; /* bytes of memory that it may lock; -1: any number */
    int64_t files;  /* that it may have open; -1: any number */
    int32_t cores, sharing, threads;
    bool infiniband;
    char host[48], nets[160]; /* network interfaces that are up: "eth0 10000 Mb/s, eth1" */
} place;

typedef struct {
    const lm_tool *t;
    place *place; /* [ranks] */
    uint64_t *machine;
    lm_link *link;
    size_t n, slow;
    int machines;
    lm_buf trouble; /* lines of what is wrong and what cures it */
} check;

/* ---- where ranks are ---- */

/* The first word of a file; "" if it cannot be read. */
static void read_word(const char *path, char out[24])
{
    FILE *f = fopen(path, "r");
    if (!f || fscanf(f, "%23s", out) != 1)
        out[0] = 0;
    if (f)
        fclose(f);
}

static void find_nets(place *p)
{
    struct dirent **all = NULL;
    const int found = scandir("/sys/class/net", &all, NULL, alphasort);
    size_t n = 0;
    for (int i = 0; i < found; i++) {
        const char *name = all[i]->d_name;
        char path[300], state[24], speed[24];
        snprintf(path, sizeof path, "/sys/class/net/%.200s/operstate", name);
        read_word(path, state);
        if (name[0] != '.' && !strcmp(state, "up") && n < sizeof p->nets) {
            snprintf(path, sizeof path, "/sys/class/net/%.200s/speed", name);
            read_word(path, speed);
            const bool known = speed[0] && speed[0] != '-';
            n +=
                (size_t)snprintf(p->nets + n, sizeof p->nets - n,
                                 known ? "%s%.15s %s Mb/s" : "%s%.15s", n ? ", " : "", name, speed);
        }
        free(all[i]);
    }
    free(all);
}

/* True if an interface of one list, by its name, is in the other, or one of them is unknown. */
static bool share_nets(const char *a, const char *b)
{
    bool any = !*a || !*b;
    for (const char *x = a; !any && *x; x += strcspn(x, ",") + (x[strcspn(x, ",")] ? 2 : 0)) {
        const size_t n = strcspn(x, " ,");
        for (const char *y = b; !any && *y; y += strcspn(y, ",") + (y[strcspn(y, ",")] ? 2 : 0))
            any = strcspn(y, " ,") == n && !strncmp(x, y, n);
    }
    return any;
}

static place this_place(const lm_tool *t)
{
    struct rlimit r;
    cpu_set_t set;
    place p = { .machine = lm_boot_hash(), .locked = -1, .files = -1, .threads = t->threads };
    if (gethostname(p.host, sizeof p.host - 1))
        snprintf(p.host, sizeof p.host, "?");
    if (!getrlimit(RLIMIT_MEMLOCK, &r) && r.rlim_cur != RLIM_INFINITY)
        p.locked = (int64_t)r.rlim_cur;
    if (!getrlimit(RLIMIT_NOFILE, &r) && r.rlim_cur != RLIM_INFINITY)
        p.files = (int64_t)r.rlim_cur;
    p.cores = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    p.sharing = t->ranks_sharing;
    p.infiniband = lm_path_exists("/sys/class/infiniband");
    find_nets(&p);
    return p;
}

static lm_code find_places(check *x, lm_err *e)
{
    const lm_tool *t = x->t;
    const place mine = this_place(t);
    if (lm_comm_gather_each(t->comm, &mine, sizeof mine, (void *)&x->place, e) ||
        lm_alloc_n(&x->machine, (size_t)t->ranks, sizeof *x->machine, "ranks", e))
        return e->code;
    for (int r = 0; r < t->ranks; r++) {
        bool known = false;
        x->machine[r] = x->place[r].machine;
        for (int q = 0; q < r && !known; q++)
            known = x->machine[q] == x->machine[r];
        x->machines += !known;
    }
    return LM_OK;
}

static lm_code try_links(check *x, size_t bytes, lm_err *e)
{
    const int all = lm_links_rounds(x->t->ranks);
    const int rounds = x->t->ranks > MOST_RANKS ? FEW_ROUNDS : all;
    if (find_places(x, e) || lm_links_probe(x->t->comm, rounds, bytes, &x->link, &x->n, e))
        return e->code;
    x->slow = lm_links_judge(x->link, x->n, x->machine, e);
    return e->code;
}

static void close_check(check *x)
{
    lm_free(x->place);
    lm_free(x->machine);
    lm_free(x->link);
    lm_buf_fini(&x->trouble);
}

static void show_link(const check *x, const lm_link *l, char *out, size_t size)
{
    snprintf(out, size, "ranks %d (%s) and %d (%s): latency %.3g us, bandwidth %.3g GB/s", l->a,
             x->place[l->a].host, l->b, x->place[l->b].host, l->latency * 1e6, l->bandwidth / 1e9);
}

lm_code lm_links_try(lm_tool *t, lm_err *e)
{
    check x = { .t = t };
    if (!t->comm || t->ranks < 2)
        return LM_OK;
    if (!try_links(&x, TRIED, e))
        for (size_t i = 0; i < x.n; i++) {
            const lm_link *l = &x.link[i];
            char text[240];
            if (l->a < 0 || !l->slow || x.machine[l->a] == x.machine[l->b])
                continue;
            show_link(&x, l, text, sizeof text);
            lm_say(t, LM_LOG_WARN, "a slow link, %s", text);
        }
    close_check(&x);
    return e->code;
}

/* ---- what is wrong ---- */

static lm_code tell(check *x, lm_err *e, const char *what, const char *todo)
{
    return lm_buf_addf(&x->trouble, e, "%s: %s\n", what, todo);
}

static lm_code find_slow(check *x, lm_err *e)
{
    for (size_t i = 0; i < x->n && !e->code; i++) {
        char text[240], what[280];
        if (x->link[i].a < 0 || !x->link[i].slow)
            continue;
        show_link(x, &x->link[i], text, sizeof text);
        snprintf(what, sizeof what, "slow link, %s", text);
        tell(x, e, what,
             x->machine[x->link[i].a] == x->machine[x->link[i].b]
                 ? "look at what else these cores do"
                 : "choose the interface with mpirun --mca btl_tcp_if_include NAME, or leave the "
                   "machine out");
    }
    return e->code;
}

/* Limits of a process, which those of one machine may have apart. */
static lm_code find_limits(check *x, lm_err *e)
{
    /* a connection to each rank by each of two layers, and what a run has open: data, checkpoints, metrics */
    const int64_t needed = 64 + 2 * (int64_t)x->t->ranks;
    for (int r = 0; r < x->t->ranks && !e->code; r++) {
        const place *p = &x->place[r];
        char what[160];
        if (p->files >= 0 && p->files < needed) {
            snprintf(what, sizeof what, "rank %d (%s) may have %lld files open, fewer than %lld", r,
                     p->host, (long long)p->files, (long long)needed);
            tell(x, e, what, "raise it: ulimit -n");
        }
        if (p->infiniband && p->locked >= 0 && p->locked < (64 << 20)) {
            snprintf(what, sizeof what, "rank %d (%s) may lock %lld KiB of memory", r, p->host,
                     (long long)(p->locked >> 10));
            tell(x, e, what, "raise it for InfiniBand: ulimit -l unlimited");
        }
    }
    return e->code;
}

static lm_code find_trouble(check *x, lm_err *e)
{
    const place *first = x->place;
    char what[480];
    if (x->machines == 1 && !strcmp(lm_comm_transport(x->t->comm), "mpi"))
        tell(x, e,
             "ranks of one machine exchange messages, because one cannot map the others' memory",
             "start them by one user, in one container and one PID namespace");
    for (int r = 0; r < x->t->ranks && !e->code; r++) {
        const place *p = &x->place[r];
        bool told = false;
        for (int q = 0; q < r && !told; q++)
            told = x->machine[q] == x->machine[r];
        if (told)
            continue;
        if (p->sharing > 1 && (int64_t)p->sharing * p->threads > p->cores) {
            snprintf(what, sizeof what, "%s: %d ranks of %d thread%s each share %d core%s", p->host,
                     p->sharing, p->threads, lm_plural((uint64_t)p->threads), p->cores,
                     lm_plural((uint64_t)p->cores));
            tell(x, e, what,
                 "start fewer, give -j, or bind each with mpirun --bind-to core --map-by "
                 "slot:PE=N");
        }
        if (!share_nets(p->nets, first->nets)) {
            snprintf(what, sizeof what, "%s has the interfaces %s, and %s %s", p->host, p->nets,
                     first->host, first->nets);
            tell(x, e, what, "name the one that all have: mpirun --mca btl_tcp_if_include NAME");
        }
    }
    return find_limits(x, e) || find_slow(x, e) ? e->code : LM_OK;
}

/* ---- the answer ---- */

/* The least and the most that links inside machines, or between them (far), reach.  False without such links. */
static bool span(const check *x, bool far, lm_link *least, lm_link *most)
{
    bool any = false;
    for (size_t i = 0; i < x->n; i++) {
        const lm_link *l = &x->link[i];
        if (l->a < 0 || (x->machine[l->a] != x->machine[l->b]) != far)
            continue;
        if (!any)
            *least = *most = *l;
        any = true;
        least->latency = fmin(least->latency, l->latency);
        most->latency = fmax(most->latency, l->latency);
        least->bandwidth = fmin(least->bandwidth, l->bandwidth);
        most->bandwidth = fmax(most->bandwidth, l->bandwidth);
    }
    return any;
}

static lm_code say_text(const check *x, lm_buf *out, lm_err *e)
{
    static const char *const kind[] = { "inside machines", "between machines" };
    lm_buf_addf(out, e, "%d ranks on %d machine%s, transport %s\n", x->t->ranks, x->machines,
                lm_plural((uint64_t)x->machines), lm_comm_transport(x->t->comm));
    for (int r = 0; r < x->t->ranks && !e->code; r++) {
        const place *p = &x->place[r];
        lm_buf_addf(out, e, "rank %d: %s, %d thread%s on %d core%s, interfaces %s\n", r, p->host,
                    p->threads, lm_plural((uint64_t)p->threads), p->cores,
                    lm_plural((uint64_t)p->cores), p->nets[0] ? p->nets : "unknown");
    }
    for (int far = 0; far < 2 && !e->code; far++) {
        lm_link a, b;
        if (span(x, far, &a, &b))
            lm_buf_addf(out, e, "links %s: latency %.3g to %.3g us, bandwidth %.3g to %.3g GB/s\n",
                        kind[far], a.latency * 1e6, b.latency * 1e6, a.bandwidth / 1e9,
                        b.bandwidth / 1e9);
    }
    return lm_buf_addf(out, e, "%s",
                       x->trouble.len ? x->trouble.data : "every link works, and all are alike\n");
}

static lm_code say_json(const check *x, lm_buf *out, lm_err *e)
{
    json_t *ranks = json_array(), *links = json_array(), *trouble = json_array(), *all;
    for (const char *t = x->trouble.len ? x->trouble.data : ""; *t;) {
        const size_t n = strcspn(t, "\n");
        json_array_append_new(trouble, json_stringn(t, n));
        t += n + (t[n] == '\n');
    }
    for (int r = 0; r < x->t->ranks; r++) {
        const place *p = &x->place[r];
        json_array_append_new(ranks, json_pack("{s:i,s:s,s:i,s:i,s:s}", "rank", r, "host", p->host,
                                               "threads", (int)p->threads, "cores", (int)p->cores,
                                               "interfaces", p->nets));
    }
    for (size_t i = 0; i < x->n; i++)
        if (x->link[i].a >= 0)
            json_array_append_new(links, json_pack("{s:[ii],s:f,s:f,s:b}", "ranks", x->link[i].a,
                                                   x->link[i].b, "latency", x->link[i].latency,
                                                   "bandwidth", x->link[i].bandwidth, "slow",
                                                   (int)x->link[i].slow));
    all = json_pack("{s:s,s:i,s:o,s:o,s:o}", "transport", lm_comm_transport(x->t->comm), "machines",
                    x->machines, "ranks", ranks, "links", links, "trouble", trouble);
    char *text = all ? json_dumps(all, JSON_COMPACT | JSON_REAL_PRECISION(6)) : NULL;
    lm_code rc = text ? lm_buf_addf(out, e, "%s\n", text)
                      : lm_fail(e, LM_ELIMIT, "links", NULL, "cannot be written as JSON");
    free(text);
    json_decref(all);
    return rc;
}

lm_code lm_links_check(lm_tool *t, lm_err *e)
{
    check x = { .t = t };
    lm_buf text = { 0 };
    if (!t->comm || t->ranks < 2)
        return lm_fail(e, LM_EUSAGE, "--check-links", "start several with mpirun -n",
                       "one process has no links");
    if (!try_links(&x, CHECKED, e) && !find_trouble(&x, e)) {
        if (t->rank == 0)
            lm_print_text(t->json ? say_json(&x, &text, e) : say_text(&x, &text, e), &text, "");
        if (x.trouble.len) /* on every rank: they end alike */
            lm_answer_no(t);
    }
    close_check(&x);
    return e->code;
}
