/* SPDX-License-Identifier: Apache-2.0 */
/* answers.c -- what generate writes. */
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "generate/chat.h"
#include "generate/serve.h"
#include "model/answer.h"

lm_code generate_write(generate_work *w, const char *text, size_t len, lm_err *e)
{
    if (fwrite(text, 1, len, w->to) != len || (w->live && fflush(w->to)))
        return lm_fail(e, LM_EIO, lm_out_path(w->out), NULL, "cannot write");
    return LM_OK;
}

/* Write the text that became final since the last call; the prompt comes first. */
lm_code generate_show(void *ctx, lm_completion *c, lm_err *e)
{
    generate_work *w = ctx;
    const lm_buf *prompt = &c->prompt;
    if (!w->shown && opt.echo &&
        generate_write(w, prompt->data ? prompt->data : "", prompt->len, e))
        return e->code;
    if (!w->shown)
        w->shown = 1; /* one more than the bytes shown: the prompt is out */
    if (c->safe > w->shown - 1) {
        if (generate_write(w, c->text.data + (w->shown - 1), c->safe - (w->shown - 1), e))
            return e->code;
        w->shown = c->safe + 1;
    }
    return LM_OK;
}

static lm_answer_opts answer_options(const generate_work *w)
{
    return (lm_answer_opts){ .record = w->in,
                             .sample = opt.samples > 1,
                             .index = opt.any_order,
                             .seconds = tool.json && opt.serve.batch,
                             .drafts = opt.draft,
                             .details = opt.logprobs };
}

static lm_code put_json(generate_work *w, const lm_completion *c, lm_err *e)
{
    const lm_answer_opts o = answer_options(w);
    if (c->failed) /* its prompt is the answer, with its error */
        return generate_write(w, c->prompt.data, c->prompt.len, e);
    w->line.len = 0;
    return lm_answer_write(c, &o, &w->line, e) ? e->code
                                               : generate_write(w, w->line.data, w->line.len, e);
}

lm_code generate_finish(void *ctx, lm_completion *c, lm_err *e)
{
    generate_work *w = ctx;
    lm_code rc;
    w->full += !strcmp(c->finish, "context");
    w->tokens = (int64_t)c->ids.n;
    w->last = c->ids.n ? c->ids.v[c->ids.n - 1] : 0;
    if (w->text) {
        rc = c->failed && !w->shown ? LM_OK : generate_write(w, "\n", 1, e);
        w->shown = 0;
    } else {
        rc = put_json(w, c, e);
    }
    return rc || !opt.chat.talk ? rc : generate_chat_keep(w, c, e);
}

lm_code generate_fail(void *ctx, lm_completion *c, lm_err *why, lm_err *e)
{
    generate_work *w = ctx;
    const lm_answer_opts o = answer_options(w);
    char text[sizeof why->where + sizeof why->what + sizeof why->todo + 5];
    lm_code rc;
    snprintf(why->todo, sizeof why->todo, "%s", lm_advise_finite(tool.argv[0]));
    snprintf(text, sizeof text, "%s: %s: %s", why->where, why->what, why->todo);
    lm_err_in(why, "%s", tool.argv[0]);
    lm_complain_beside(&tool, why);
    if (w->text)
        return LM_OK;
    w->line.len = 0;
    rc = lm_answer_write_failed(c, &o, text, &w->line, e);
    c->prompt.len = 0;
    return rc ? rc : lm_buf_add(&c->prompt, w->line.data, w->line.len, e);
}

lm_code generate_refuse_line(generate_work *w, lm_completion *c, bool object, lm_err *why,
                             lm_err *e)
{
    char text[sizeof why->what + sizeof why->todo + 3];
    lm_code rc;
    snprintf(text, sizeof text, "%s%s%s", why->what, *why->todo ? ": " : "", why->todo);
    c->failed = true;
    c->prompt.len = 0;
    rc = lm_answer_write_error(object ? w->doc.raw.data : "", object ? w->doc.raw.len : 0,
                               w->doc.source, w->doc.line, opt.any_order ? c->index : -1, text,
                               &c->prompt, e);
    why->code = LM_EFORMAT; /* status 1, also when the prompt is too long */
    lm_complain_beside(&tool, why);
    return rc;
}

static double rate(int64_t n, double seconds)
{
    return seconds > 0 ? (double)n / seconds : 0;
}

void generate_summary(const generate_work *w)
{
    const lm_complete_stats *s = &w->st;
    const char *refused = w->gen     ? lm_generator_unrecorded(w->gen)
                          : w->paged ? lm_paged_unrecorded(w->paged)
                                     : NULL;
    if (refused)
        lm_say(&tool, LM_LOG_WARN, "%s: decoding runs without a recording: %s", w->backend->name,
               refused);
    if (w->full)
        lm_say(&tool, LM_LOG_WARN, "%lld of %lld text%s ended because the context of %lld is full",
               (long long)w->full, (long long)s->prompts, lm_plural((uint64_t)s->prompts),
               (long long)w->context);
    if (w->paged) {
        generate_serve_summary(w);
        return;
    }
    lm_say(&tool, LM_LOG_NOTICE,
           "prompt %lld token%s, %.1f tokens/s; new %lld token%s, %.1f tokens/s",
           (long long)s->prompt_tokens, lm_plural(s->prompt_tokens),
           rate(s->prompt_tokens, s->prompt_seconds), (long long)s->new_tokens,
           lm_plural(s->new_tokens), rate(s->new_tokens - s->prompts, s->decode_seconds));
    generate_say_drafts(w);
}
