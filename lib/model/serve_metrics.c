/* SPDX-License-Identifier: Apache-2.0 */
/* serve_metrics.c -- records of continuous batching. */
#include "model/serve_metrics.h"

static double share(double a, double b)
{
    return b > 0 ? a / b : 0;
}

static void put_pages(lm_metrics *m, const lm_pool *p)
{
    static const char *const key[LM_TIERS] = { "pages_device", "pages_host", "pages_disk" };
    for (int i = 0; i < LM_TIERS; i++)
        lm_metrics_int(m, key[i], lm_pool_used(p, (lm_tier)i));
}

lm_code lm_serve_meter_step(lm_serve_meter *x, lm_metrics *m, const lm_complete_stats *st,
                            const lm_serve_stats *kv, const lm_pool *pages, bool last, lm_err *e)
{
    const lm_sched_stats *s = &kv->sched;
    const lm_tiers_stats *t = &kv->tiers;
    const double passed = kv->seconds - x->seconds;
    if (!m || s->steps == x->steps || (!last && passed < 1))
        return LM_OK;
    lm_metrics_begin(m, "step");
    lm_metrics_int(m, "step", s->steps);
    lm_metrics_int(m, "tokens", st->new_tokens);
    lm_metrics_f64(m, "seconds", kv->seconds);
    lm_metrics_f32(m, "tokens_per_second", share((double)(st->new_tokens - x->tokens), passed));
    lm_metrics_f32(m, "rows_per_second", share((double)(s->rows - x->rows), passed));
    lm_metrics_f32(m, "rows_per_step",
                   share((double)(s->rows - x->rows), (double)(s->steps - x->steps)));
    lm_metrics_int(m, "running", s->running);
    lm_metrics_int(m, "waiting", s->waiting);
    put_pages(m, pages);
    lm_metrics_f32(m, "hit_rate", share((double)s->hits, (double)s->pages));
    lm_metrics_int(m, "moves", t->down + t->up + t->out + t->in);
    lm_metrics_f64(m, "moved_bytes", t->bytes);
    lm_metrics_f64(m, "stalls_seconds", t->stalls);
    lm_metrics_int(m, "recomputed", s->dropped_rows);
    *x = (lm_serve_meter){ kv->seconds, st->new_tokens, s->rows, s->steps };
    return lm_metrics_end(m, e);
}
