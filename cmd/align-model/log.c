/* SPDX-License-Identifier: Apache-2.0 */
/* log.c -- the files of align-model that grow with each rollout: completions.jsonl, and that of --write-samples.
 *
 * Both follow the checkpoints: a resumed run removes the records of steps behind its own, and a run that fails before
 * its first checkpoint leaves completions.jsonl as it was, or no such file. */
#include <sys/stat.h>
#include <unistd.h>

#include "align-model/options.h"
#include "base/mem.h"
#include "format/folder_run.h"

static const char log_name[] = "completions.jsonl";

static lm_code open_completions(align_session *s, lm_err *e)
{
    const lm_session_ask *a = &s->t.ask;
    struct stat st;
    if (lm_path_join(&s->log, a->run, log_name, e) ||
        (a->from >= 0 && lm_samples_cut(s->log, a->from, e)))
        return e->code;
    s->log_before = stat(s->log, &st) ? -1 : st.st_size;
    if (lm_metrics_open(s->log, a->from >= 0 ? LM_METRICS_APPEND : LM_METRICS_REPLACE, a->sink,
                        &s->completions, e))
        return e->code;
    lm_on_policy_log(s->policy, s->completions);
    return LM_OK;
}

lm_code align_open_log(align_session *s, lm_err *e)
{
    if (!s->policy || tool.rank > 0) /* all ranks have all completions */
        return LM_OK;
    if (opt.samples) {
        if (lm_samples_open(opt.samples, s->t.ask.from, tool.force, &s->kept_samples, e))
            return e->code;
        lm_on_policy_samples(s->policy, s->kept_samples);
    }
    return opt.shown ? open_completions(s, e) : LM_OK;
}

/* As it was before a run that has no checkpoint.  What fails here is repaired by the next run, which removes the old
 * records. */
static void restore_completions(const align_session *s)
{
    char *latest = NULL;
    lm_err unseen = { 0 };
    if (s->log_before < 0) {
        /* one whose last fsync failed is there nevertheless, and so are its records */
        if (lm_run_latest(s->t.ask.run, &latest, &unseen) || !latest)
            unlink(s->log);
        lm_free(latest);
    } else if (truncate(s->log, s->log_before))
        lm_say(&tool, LM_LOG_WARN, "%s: records of the run that failed remain in it", s->log);
}

void align_close_log(align_session *s)
{
    lm_err unseen = { 0 };
    const bool kept = s->t.trainer && lm_trainer_saved(s->t.trainer) >= 0;
    if (kept)
        lm_metrics_settle(s->completions);
    lm_metrics_close(s->completions, &unseen);
    if (s->completions && !kept)
        restore_completions(s);
    lm_samples_close(s->kept_samples);
    lm_free(s->log);
}
