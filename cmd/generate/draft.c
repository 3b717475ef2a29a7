/* SPDX-License-Identifier: Apache-2.0 */
/* draft.c -- generate --draft. */
#include "base/text.h"
#include "generate/work.h"

void generate_check_draft(void)
{
    const struct {
        bool given;
        const char *option;
    } other[] = {
        { opt.serve.batch, "--serve-batch" },
        { opt.chat.talk, "--chat" },
        { opt.kv, "--kv" },
        { opt.states, "--states" },
        { opt.cache.save, "--save-cache" },
        { opt.cache.load, "--load-cache" },
        { opt.adapter.n, "--adapter" },
    };
    if (lm_given(&tool, "draft-tokens") && !opt.draft)
        lm_misuse(&tool, "--draft-tokens", "give --draft mtp, too", "has no effect without it");
    for (size_t i = 0; opt.draft && i < sizeof other / sizeof *other; i++)
        if (other[i].given)
            lm_misuse(&tool, "--draft", "leave one of them out", "cannot be combined with %s",
                      other[i].option);
}

void generate_say_drafts(const generate_work *w)
{
    const lm_complete_stats *s = &w->st;
    if (!opt.draft || !s->steps)
        return;
    lm_say(&tool, LM_LOG_NOTICE,
           "drafts: %lld of %lld token%s accepted (%.1f %%), %.2f tokens a step",
           (long long)s->accepted, (long long)s->drafted, lm_plural((uint64_t)s->drafted),
           s->drafted ? 100.0 * (double)s->accepted / (double)s->drafted : 0,
           (double)(s->accepted + s->steps) / (double)s->steps);
}
