/* SPDX-License-Identifier: Apache-2.0 */
/* advice.c -- warnings before the first step. */
#include "train/advice.h"

#include <inttypes.h>

#include "base/text.h"

static void advise_schedule(const lm_schedule *s, lm_sink *sink)
{
    if (s->warmup > s->total)
        lm_log(sink, LM_LOG_WARN,
               "a warm-up of %" PRId64 " is above the %" PRId64
               " step%s of the schedule: the learning rate ends at %.3g, not at its peak of %.3g",
               s->warmup, s->total, lm_plural(s->total), lm_schedule_lr(s, s->from + s->total - 1),
               s->lr);
    else if (s->kind == LM_SCHED_WSD && s->warmup + s->decay > s->total)
        lm_log(sink, LM_LOG_WARN,
               "a warm-up of %" PRId64 " and a decay of %" PRId64 " are above the %" PRId64
               " step%s of the schedule: the learning rate falls before it has reached its peak",
               s->warmup, s->decay, s->total, lm_plural(s->total));
}

static void advise_averages(const lm_trainer_opts *o, lm_sink *sink)
{
    for (int i = 0; i < o->groups.n && o->schedule.kind != LM_SCHED_CONSTANT; i++)
        if (o->groups.use[i].optim->averages) {
            lm_log(
                sink, LM_LOG_WARN,
                "%s averages its steps in place of a rate that falls: choose a constant schedule",
                o->groups.use[i].optim->name);
            return;
        }
}

/* Decay that removes what is learnt. */
static void advise_decay(const lm_trainer_opts *o, lm_sink *sink)
{
    const double most = 0.01;
    for (int i = 0; i < o->groups.n; i++) {
        const lm_optim_use *use = &o->groups.use[i];
        double rate = o->schedule.lr * use->rate;
        double share = use->optim->shrinks ? use->optim->shrinks(use->hyper) * rate : 0;
        if (share >= most) {
            lm_log(sink, LM_LOG_WARN,
                   "the weight decay of %s shrinks matrices by %.3g %% a step at a rate of %.3g: "
                   "choose a smaller one, or 0",
                   use->optim->name, 100 * share, rate);
            return;
        }
    }
}

void lm_train_advise(const lm_trainer_opts *o, const lm_config *c, lm_sink *sink)
{
    advise_schedule(&o->schedule, sink);
    advise_averages(o, sink);
    advise_decay(o, sink);
    if (o->seq > c->max_positions)
        lm_log(sink, LM_LOG_WARN,
               "a sequence length of %" PRId64 " is above the %" PRId64
               " position%s of the model: raise %s in its config.json if it is to serve as many",
               o->seq, c->max_positions, lm_plural(c->max_positions),
               c->layer[0].alibi ? "seq_length" : "max_position_embeddings");
}

void lm_train_advise_space(const lm_disk *s, const char *run, bool lmz, lm_sink *sink)
{
    char need[32], each[32], room[32];
    if (s->need <= s->free)
        return;
    lm_log(sink, LM_LOG_WARN,
           "%s: up to %" PRId64
           " checkpoints of %s at once need %s%s more, %s are free on disk: make "
           "room, keep fewer of them%s",
           run, s->at_once, lm_show_bytes(s->checkpoint, each), lmz ? "at most " : "",
           lm_show_bytes(s->need, need), lm_show_bytes(s->free, room),
           lmz ? "" : ", or have them compressed");
}
