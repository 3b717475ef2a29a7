/* SPDX-License-Identifier: Apache-2.0 */
/* refuse.c -- options of align-model that the loss does not read. */
#include <stdio.h>
#include <string.h>

#include "align-model/options.h"

/* What learns: losses on completions that are sampled, of four kinds; or on given answers. */
enum {
    PPO = 1,
    REJECT = 2,
    OTHERS = 4,
    PAIRS = 8,
    SAMPLED = PPO | REJECT | OTHERS | PAIRS,
    GIVEN = 16,
    TEACHER = 32,   /* on given answers, and on those that the model samples */
    PLANNED = 64,   /* likewise, of prompts that are not known yet */
    COMPARED = 128, /* given answers that are compared with a reference */
};

static const struct {
    const char *name;
    int of;
} reads[] = {
    { "reward-weights", SAMPLED },
    { "reward-timeout", SAMPLED },
    { "group", SAMPLED },
    { "updates", SAMPLED },
    { "iterations", SAMPLED },
    { "max-new-tokens", SAMPLED | TEACHER },
    { "max-prompt-length", SAMPLED | PLANNED },
    { "temperature", SAMPLED | TEACHER },
    { "top-k", SAMPLED | TEACHER },
    { "top-p", SAMPLED | TEACHER },
    { "min-p", SAMPLED | TEACHER },
    { "stop", SAMPLED | TEACHER },
    { "resample", SAMPLED },
    { "reference", SAMPLED | COMPARED },
    { "missing-eos-penalty", SAMPLED },
    { "reward-clip", SAMPLED },
    { "mask-truncated", SAMPLED },
    { "rollout-sequences", SAMPLED | TEACHER },
    { "rollout-memory", SAMPLED | TEACHER },
    { "log-completions", SAMPLED },
    { "advantage", OTHERS },
    { "scale-rewards", OTHERS },
    { "normalize-advantages", OTHERS },
    { "normalize-each", OTHERS },
    { "kl", PPO | OTHERS | PAIRS },
    { "kl-target", PPO | OTHERS | PAIRS },
    { "kl-horizon", PPO | OTHERS | PAIRS },
    { "correct", PPO | OTHERS },
    { "correct-most", PPO | OTHERS },
    { "correct-least", PPO | OTHERS },
    { "discount", PPO },
    { "gae-lambda", PPO },
    { "whiten-rewards", PPO },
    { "best", REJECT },
    { "min-reward", REJECT },
    { "write-samples", REJECT },
    { "max-length", GIVEN | TEACHER },
    { "truncation", GIVEN | TEACHER },
};

static int kind_of(const align_session *s)
{
    if (s->samples)
        return lm_align_values(&s->spec)                      ? PPO
               : lm_align_keeps(&s->spec)                     ? REJECT
               : lm_align_kind_of(&s->spec) == LM_ALIGN_PAIRS ? PAIRS
                                                              : OTHERS;
    if (!align_distils(s))
        return lm_align_reads_ref(&s->spec) ? GIVEN | COMPARED : GIVEN;
    return s->t.ask.data ? TEACHER : TEACHER | PLANNED;
}

static lm_code fail_option(const align_session *s, const char *where, int of, lm_err *e)
{
    const char *loss = s->spec.use[0].loss->name;
    if (s->samples && !(of & SAMPLED))
        return lm_fail(e, LM_EUSAGE, where, "use --max-new-tokens and --max-prompt-length",
                       "serves given answers only, and %s learns from completions", loss);
    if (s->samples)
        return lm_fail(e, LM_EUSAGE, where, "leave it out", "%s does not read it", loss);
    if (of & COMPARED)
        return lm_fail(e, LM_EUSAGE, where, "leave it out",
                       "%s compares given answers with no other model", loss);
    return lm_fail(e, LM_EUSAGE, where,
                   lm_align_kind_of(&s->spec) == LM_ALIGN_PAIRS && (of & PAIRS)
                       ? "leave it out, or give --reward"
                       : "leave it out",
                   "serves sampled completions only, and %s learns from given answers", loss);
}

/* Rewards that are normalised one by one have no sum that these could change. */
static lm_code refuse_of_sums(const align_session *s, lm_err *e)
{
    static const char *const of_sums[] = {
        "advantage", "scale-rewards",       "normalize-advantages",
        "kl",        "missing-eos-penalty", "reward-clip"
    };
    const bool kl_in_loss = lm_align_hyper(&s->spec, "beta", -1) >= 0;
    char where[40];
    for (size_t i = 0; i < sizeof of_sums / sizeof *of_sums; i++) {
        snprintf(where, sizeof where, "--%s", of_sums[i]);
        if (lm_given(&tool, of_sums[i]) && (strcmp(of_sums[i], "kl") || !kl_in_loss))
            return lm_fail(e, LM_EUSAGE, where, "leave one of them out",
                           "rewards that are normalised one by one (--normalize-each) have no sum "
                           "that it could change");
    }
    return LM_OK;
}

lm_code align_refuse_without_effect(const align_session *s, lm_err *e)
{
    const int is = kind_of(s);
    char where[40];
    for (size_t i = 0; i < sizeof reads / sizeof *reads; i++) {
        snprintf(where, sizeof where, "--%s", reads[i].name);
        if (lm_given(&tool, reads[i].name) && !(reads[i].of & is))
            return fail_option(s, where, reads[i].of, e);
    }
    return s->samples && opt.each ? refuse_of_sums(s, e) : LM_OK;
}
