/* SPDX-License-Identifier: Apache-2.0 */
/* clock.c -- see clock.h. */
#include "comm/clock.h"

#include <math.h>

enum { TRIPS = 10 };

/* On rank 0, with rank r. */
static lm_code ask(lm_comm *c, int r, double (*now)(void), lm_err *e)
{
    double least = INFINITY, ahead = 0;
    for (int i = 0; i < TRIPS; i++) {
        double there = 0;
        const double began = now();
        if (lm_comm_send(c, r, &began, sizeof began, e) ||
            lm_comm_recv(c, r, &there, sizeof there, e))
            return e->code;
        const double ended = now();
        if (ended - began < least) {
            least = ended - began;
            ahead = there - (began + ended) / 2;
        }
    }
    return lm_comm_send(c, r, &ahead, sizeof ahead, e);
}

static lm_code answer(lm_comm *c, double (*now)(void), double *ahead, lm_err *e)
{
    for (int i = 0; i < TRIPS; i++) {
        double asked;
        if (lm_comm_recv(c, 0, &asked, sizeof asked, e))
            return e->code;
        const double here = now();
        if (lm_comm_send(c, 0, &here, sizeof here, e))
            return e->code;
    }
    return lm_comm_recv(c, 0, ahead, sizeof *ahead, e);
}

lm_code lm_comm_clock(lm_comm *c, double (*now)(void), double *ahead, lm_err *e)
{
    *ahead = 0;
    if (lm_comm_rank(c) > 0)
        return answer(c, now, ahead, e);
    for (int r = 1; r < lm_comm_size(c); r++)
        if (ask(c, r, now, e))
            return e->code;
    return LM_OK;
}
