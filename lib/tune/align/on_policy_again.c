/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy_again.c -- other prompts in place of those whose completions all have one reward. */
#include <string.h>

#include "base/rng.h"
#include "tune/align/on_policy_impl.h"

enum { DRAWS = 30 }; /* bits of the number of a generation in that of its draws */

static double *group_of(const on_policy_batch *b, const lm_on_policy *p, int64_t i)
{
    return b->total + i * p->o.group;
}

/* Put group k of `more` in the place of group `slot`. */
static void replace(const lm_on_policy *p, on_policy_batch *all, int64_t slot,
                    const on_policy_batch *more, int64_t k)
{
    const int64_t group = p->o.group, kinds = lm_reward_count(p->o.reward), to = slot * group;
    memcpy(all->each + to * kinds, more->each + k * group * kinds,
           (size_t)(group * kinds) * sizeof *all->each);
    memcpy(all->total + to, more->total + k * group, (size_t)group * sizeof *all->total);
    for (int64_t i = 0; i < group; i++) {
        all->out[to + i] = more->out[k * group + i];
        all->out[to + i].each = all->each + (to + i) * kinds;
    }
}

static int64_t list_flat(const lm_on_policy *p, const on_policy_batch *all, int64_t *slot)
{
    int64_t n = 0;
    for (int64_t i = 0; i < all->n; i++)
        if (lm_advantage_flat(group_of(all, p, i), p->o.group))
            slot[n++] = i;
    return n;
}

/* Try number `t` for the groups slot[0 .. n); *replaced: those that now teach something. */
static lm_code try_again(lm_on_policy *p, on_policy_batch *all, int64_t g, int64_t t,
                         const int64_t *slot, int64_t n, int64_t *replaced, bool *whole, lm_err *e)
{
    on_policy_batch more = { .n = n, .draw = (t + 1) << DRAWS | g };
    int64_t *prompt;
    if (lm_arena_alloc(p->arena, &prompt, (size_t)n, sizeof *prompt, e) ||
        lm_arena_alloc(p->arena, &more.out, (size_t)(n * p->o.group), sizeof *more.out, e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        prompt[i] = on_policy_prompt(p, "prompts again", (g * p->o.tries + t) * all->n + i);
    more.prompt = prompt;
    if (on_policy_complete(p, &more, whole, e) || !*whole)
        return e->code;
    for (int64_t i = 0; i < n; i++)
        if (!lm_advantage_flat(group_of(&more, p, i), p->o.group)) {
            replace(p, all, slot[i], &more, i);
            ++*replaced;
        }
    all->rollout.tokens += more.rollout.tokens;
    all->rollout.truncated += more.rollout.truncated;
    all->rollout.seconds += more.rollout.seconds;
    all->rollout.prompt_seconds += more.rollout.prompt_seconds;
    all->rollout.again += more.rollout.again;
    return LM_OK;
}

lm_code on_policy_again(lm_on_policy *p, int64_t g, on_policy_batch *all, bool *whole, lm_err *e)
{
    int64_t *slot, n, t = 0, drawn = 0, replaced = 0;
    double mean, std;
    if (lm_arena_alloc(p->arena, &slot, (size_t)all->n, sizeof *slot, e))
        return e->code;
    lm_moments(all->total, all->n * p->o.group, &mean, &std);
    for (; *whole && t < p->o.tries && (n = list_flat(p, all, slot)); t++) {
        drawn += n;
        if (try_again(p, all, g, t, slot, n, &replaced, whole, e))
            return e->code;
    }
    on_policy_note(p, "resampled/first_reward", mean);
    on_policy_note(p, "resampled/tries", (double)t);
    on_policy_note(p, "resampled/groups", (double)drawn);
    on_policy_note(p, "resampled/replaced", (double)replaced);
    return LM_OK;
}
