/* SPDX-License-Identifier: Apache-2.0 */
/* dim_pieces.c -- what a split of letters does to a dimension that is a sum of products of them.
 *
 * A product a L b, of which L is split, is a pieces of L units of b elements; a sum is its terms one behind the other; and a
 * product a (sum) b has the pieces of the sum, each unit b times as long, a times over. */
#include <string.h>

#include "graph/op.h"

typedef struct {
    int64_t value;      /* elements */
    lm_portions pieces; /* if n > 0: it has a letter that is split */
    bool bad;
} part;

typedef struct {
    const char *at;
    unsigned letters;
    const int64_t *size;
} reader;

static part read_sum(reader *r);

static part read_factor(reader *r)
{
    part p = { 0 };
    if (*r->at == '(') {
        r->at++;
        p = read_sum(r);
        r->at++;
    } else if (*r->at >= 'A' && *r->at <= 'Z') {
        int letter = *r->at++ - 'A';
        p.value = r->size[letter];
        if (r->letters >> letter & 1)
            p.pieces = (lm_portions){ .n = 1, .run = { { 1, p.value, 1 } } };
    } else {
        for (; *r->at >= '0' && *r->at <= '9'; r->at++)
            p.value = p.value * 10 + (*r->at - '0');
    }
    return p;
}

/* Sizes were checked with the operands (dims.c): no product overflows. */
static part read_product(reader *r)
{
    part all = { .value = 1 };
    while (*r->at && !strchr(",+)", *r->at)) {
        part p = read_factor(r);
        all.bad |= p.bad || (p.pieces.n && all.pieces.n) ||
                   (p.pieces.n > 1 && all.value > 1 && !all.pieces.n);
        for (int i = 0; i < all.pieces.n; i++) {
            all.pieces.run[i].size *= p.value;
            all.pieces.run[i].unit *= p.value;
        }
        for (int i = 0; !all.pieces.n && i < p.pieces.n; i++)
            p.pieces.run[i].times *= all.value;
        if (p.pieces.n)
            all.pieces = p.pieces;
        all.value *= p.value;
    }
    return all;
}

/* Pieces of one more term, joined with the last ones if they are equal. */
static void add_run(part *all, const struct lm_portions_run *r)
{
    lm_portions *p = &all->pieces;
    struct lm_portions_run *last = p->n ? &p->run[p->n - 1] : NULL;
    if (!r->size) /* a letter of size 0 */
        return;
    if (last && last->size == r->size && last->unit == r->unit)
        last->times += r->times;
    else if (p->n == LM_PORTIONS_RUNS)
        all->bad = true;
    else
        p->run[p->n++] = *r;
}

static part read_sum(reader *r)
{
    part all = { 0 };
    for (int terms = 0;; terms++) {
        part p = read_product(r);
        all.bad |= p.bad || (terms && !p.pieces.n != !all.pieces.n);
        all.value += p.value;
        for (int i = 0; i < p.pieces.n; i++)
            add_run(&all, &p.pieces.run[i]);
        if (*r->at != '+')
            return all;
        r->at++;
    }
}

static const char *dim_at(const char *dims, int i)
{
    for (; i > 0 && *dims; dims++)
        i -= *dims == ',';
    return dims;
}

bool lm_dim_pieces(const char *dims, int i, unsigned letters, const int64_t size[LM_LETTERS],
                   bool *held, lm_portions *out)
{
    reader r = { dim_at(dims, i), letters, size };
    *held = false;
    if (dims[0] == '*' || dims[0] == '~')
        return true;
    part all = read_sum(&r);
    *held = all.pieces.n > 0 || all.bad;
    *out = all.pieces;
    return !all.bad;
}

char lm_dim_letter(const char *dims, int i)
{
    const char *d = dim_at(dims, i);
    return *d >= 'A' && *d <= 'Z' && (!d[1] || d[1] == ',') ? *d : 0;
}
