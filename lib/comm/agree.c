/* SPDX-License-Identifier: Apache-2.0 */
/* agree.c -- ranks that must have the same text: every rank reads all, so that all come to one verdict. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/mem.h"
#include "comm/comm.h"

/* A rank's text: compared by length and hash, shown by its beginning. */
typedef struct {
    uint64_t hash, len;
    char host[48], begin[64];
} statement;

static statement make_statement(const char *text)
{
    statement s = { .len = strlen(text) };

    s.hash = lm_hash64(text, s.len, 0);
    if (gethostname(s.host, sizeof s.host - 1))
        snprintf(s.host, sizeof s.host, "?");
    snprintf(s.begin, sizeof s.begin, "%s", text);
    if (s.len >= sizeof s.begin)
        memcpy(s.begin + sizeof s.begin - 4, "...", 4);
    return s;
}

static bool same(const statement *a, const statement *b)
{
    return a->len == b->len && a->hash == b->hash;
}

/* How many agree with rank r. */
static int votes(const statement *all, int size, int r)
{
    int n = 0;

    for (int q = 0; q < size; q++)
        n += same(&all[q], &all[r]);
    return n;
}

static lm_code compare(const statement *all, int size, const char *what, lm_err *e)
{
    int usual = 0, odd = 0, most = 0;

    /* Most ranks have the same text, so the loop over r ends early. */
    for (int r = 0; r < size && 2 * most <= size; r++) {
        int n = votes(all, size, r);

        if (n > most)
            most = n, usual = r;
    }
    while (odd < size && same(&all[odd], &all[usual]))
        odd++;
    if (odd == size)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, what, "start all ranks alike",
                   "rank %d of %d on %s has %s; rank %d has %s", odd, size, all[odd].host,
                   all[odd].begin, usual, all[usual].begin);
}

lm_code lm_comm_agree(lm_comm *c, const char *what, const char *text, lm_err *e)
{
    statement mine = make_statement(text), *all = NULL;

    if (!lm_comm_gather_each(c, &mine, sizeof mine, (void *)&all, e))
        compare(all, lm_comm_size(c), what, e);
    lm_free(all);
    return e->code;
}
