/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy_choose.c -- which completions of a generation are the sequences of a step. */
#include <string.h>

#include "base/rng.h"
#include "tune/align/on_policy_impl.h"

/* ---- pairs ---- */

/* The completions with the best and the worst reward of a prompt; false: all are equal. */
static bool find_pair(const lm_on_policy *p, int64_t prompt, int64_t *best, int64_t *worst)
{
    *best = *worst = -1;
    for (int64_t i = prompt * p->o.group; i < (prompt + 1) * p->o.group; i++) {
        const double r = p->made[i].reward;
        if (isnan(r) || is_silent(p, &p->made[i]))
            continue;
        *best = *best < 0 || r > p->made[*best].reward ? i : *best;
        *worst = *worst < 0 || r < p->made[*worst].reward ? i : *worst;
    }
    return *best >= 0 && p->made[*best].reward > p->made[*worst].reward;
}

/* ---- what is kept ---- */

static bool is_equal(const sampled *a, const sampled *b)
{
    return a->n == b->n && !memcmp(a->text.ids + a->text.from, b->text.ids + b->text.from,
                                   (size_t)a->n * sizeof *a->text.ids);
}

/* True if made[i] may be kept beside out[0 .. n). */
static bool is_eligible(const lm_on_policy *p, int64_t i, const int64_t *out, int64_t n)
{
    const sampled *s = &p->made[i];
    if (!(s->reward >= p->o.least) || is_silent(p, s))
        return false;
    for (int64_t k = 0; k < n; k++)
        if (is_equal(s, &p->made[out[k]]))
            return false;
    return true;
}

int64_t on_policy_kept(const lm_on_policy *p, int64_t prompt, int64_t *out)
{
    const int64_t first = prompt * p->o.group;
    int64_t n = 0;
    while (n < p->o.best) {
        int64_t best = -1;
        for (int64_t i = first; i < first + p->o.group; i++)
            if (is_eligible(p, i, out, n) && (best < 0 || p->made[i].reward > p->made[best].reward))
                best = i;
        if (best < 0)
            break;
        out[n++] = best;
    }
    return n;
}

/* ---- steps ---- */

/* Share u of the completions, in the order of iteration `it` of the generation. */
static void choose_shuffled(lm_on_policy *p, int64_t u, int64_t it)
{
    const int64_t all = p->o.prompts * p->o.group, each = all / p->o.updates;
    const lm_rng order =
        lm_rng_make(p->o.seed, "minibatches", (uint64_t)(p->generation * p->o.iterations + it));
    for (int64_t i = 0; i < each; i++)
        p->member[p->n_members++] =
            (int64_t)lm_rng_permute(order, (uint64_t)(u * each + i), (uint64_t)all);
}

void on_policy_choose(lm_on_policy *p, int64_t k)
{
    const int64_t each = p->o.prompts / p->o.updates, first = k % p->o.updates * each;
    p->n_members = 0;
    if (p->values)
        choose_shuffled(p, k % p->o.updates, k / p->o.updates);
    for (int64_t q = first; !p->values && q < first + each; q++) {
        int64_t *to = &p->member[p->n_members];
        if (p->pairs)
            p->n_members += find_pair(p, q, &to[0], &to[1]) ? 2 : 0;
        else if (p->keeps)
            p->n_members += on_policy_kept(p, q, to);
        for (int64_t i = 0; !p->pairs && !p->keeps && i < p->o.group; i++)
            p->member[p->n_members++] = q * p->o.group + i;
    }
    for (int64_t i = 0; i < p->n_members; i++)
        p->text[i] = p->made[p->member[i]].text;
}
