/* SPDX-License-Identifier: Apache-2.0 */
/* probe.c -- see probe.h. */
#include "comm/probe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

enum { PINGS = 20, LARGE = 4 };

/* ---- rounds: one rank stays, the others turn around it ---- */

int lm_links_rounds(int n)
{
    return n < 2 ? 0 : n + n % 2 - 1;
}

int lm_links_partner(int n, int round, int p)
{
    const int turning = lm_links_rounds(n);
    int q = p == turning ? round : (2 * round - p) % turning;
    q = q < 0 ? q + turning : q;
    q = p < turning && q == p ? turning : q;
    return q < n ? q : -1;
}

/* ---- one pair ---- */

/* A message there, and eight bytes back; the other end in the same order. */
static lm_code trip(lm_comm *c, int other, bool first, char *data, size_t bytes, double *seconds,
                    lm_err *e)
{
    uint64_t back = 0;
    const double began = lm_now();
    if (first ? lm_comm_send(c, other, data, bytes, e) ||
                    lm_comm_recv(c, other, &back, sizeof back, e)
              : lm_comm_recv(c, other, data, bytes, e) ||
                    lm_comm_send(c, other, &back, sizeof back, e))
        return e->code;
    *seconds = fmin(*seconds, lm_now() - began);
    return LM_OK;
}

static lm_code try_pair(lm_comm *c, int other, char *data, size_t bytes, lm_link *l, lm_err *e)
{
    const int mine = lm_comm_rank(c);
    const bool first = mine < other;
    double least = INFINITY, large = INFINITY;
    for (int i = 0; i < PINGS; i++)
        if (trip(c, other, first, data, sizeof(uint64_t), &least, e))
            return e->code;
    for (int i = 0; i < LARGE; i++)
        if (trip(c, other, first, data, bytes, &large, e))
            return e->code;
    if (first)
        *l = (lm_link){ .a = mine,
                        .b = other,
                        .latency = least / 2,
                        .bandwidth = (double)bytes / fmax(large - least, 1e-9) };
    return LM_OK;
}

/* ---- all of them ---- */

static lm_code try_rounds(lm_comm *c, int rounds, char *data, size_t bytes, lm_link *mine,
                          lm_err *e)
{
    for (int r = 0; r < rounds; r++) {
        const int other = lm_links_partner(lm_comm_size(c), r, lm_comm_rank(c));
        mine[r].a = -1;
        if (lm_comm_barrier(c, e) || (other >= 0 && try_pair(c, other, data, bytes, &mine[r], e)))
            return e->code;
    }
    return LM_OK;
}

/* Each round's links behind each other: those of the ranks that came first in their pair. */
static void sort_links(const lm_link *each, int ranks, int rounds, lm_link *out)
{
    const size_t pairs = (size_t)(ranks / 2);
    for (int r = 0; r < rounds; r++) {
        size_t k = 0;
        for (int p = 0; p < ranks && k < pairs; p++) {
            const lm_link *l = &each[(size_t)p * (size_t)rounds + (size_t)r];
            if (l->a >= 0)
                out[(size_t)r * pairs + k++] = *l;
        }
        for (; k < pairs; k++)
            out[(size_t)r * pairs + k] = (lm_link){ .a = -1 };
    }
}

lm_code lm_links_probe(lm_comm *c, int rounds, size_t bytes, lm_link **out, size_t *n, lm_err *e)
{
    const int ranks = lm_comm_size(c);
    lm_link *mine = NULL, *each = NULL;
    char *data = NULL;
    *out = NULL;
    *n = (size_t)rounds * (size_t)(ranks / 2);
    bytes = bytes < sizeof(uint64_t) ? sizeof(uint64_t) : bytes;
    if (!lm_alloc_n(&mine, (size_t)rounds + 1, sizeof *mine, "links", e) &&
        !lm_alloc_n(&data, bytes, 1, "a message", e) &&
        !lm_alloc_n(out, *n + 1, sizeof **out, "links", e) &&
        !try_rounds(c, rounds, data, bytes, mine, e) &&
        !lm_comm_gather_each(c, mine, (size_t)rounds * sizeof *mine, (void *)&each, e))
        sort_links(each, ranks, rounds, *out);
    lm_free(mine);
    lm_free(data);
    lm_free(each);
    if (e->code) {
        lm_free(*out);
        *out = NULL;
    }
    return e->code;
}

/* ---- slow ones ---- */

static int by_number(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static bool is_far(const lm_link *l, const uint64_t *machine)
{
    return machine[l->a] != machine[l->b];
}

/* The median of a kind of links; 0: fewer than three. */
static double median(const lm_link *all, size_t n, const uint64_t *machine, bool far,
                     bool bandwidth, double *room)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        if (all[i].a >= 0 && is_far(&all[i], machine) == far)
            room[k++] = bandwidth ? all[i].bandwidth : all[i].latency;
    if (k < 3)
        return 0;
    qsort(room, k, sizeof *room, by_number);
    return room[k / 2];
}

size_t lm_links_judge(lm_link *all, size_t n, const uint64_t *machine, lm_err *e)
{
    double *room = NULL, least[2], most[2];
    size_t slow = 0;
    if (lm_alloc_n(&room, n + 1, sizeof *room, "links", e))
        return 0;
    for (int far = 0; far < 2; far++) {
        const double usual = median(all, n, machine, far, false, room);
        least[far] = median(all, n, machine, far, true, room) / 3;
        most[far] = usual > 0 ? fmax(10 * usual, 1e-3) : INFINITY;
    }
    for (size_t i = 0; i < n; i++) {
        if (all[i].a < 0)
            continue;
        const bool far = is_far(&all[i], machine);
        all[i].slow = all[i].bandwidth < least[far] || all[i].latency > most[far];
        slow += all[i].slow;
    }
    lm_free(room);
    return slow;
}
