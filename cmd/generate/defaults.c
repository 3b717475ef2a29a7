/* SPDX-License-Identifier: Apache-2.0 */
/* defaults.c -- values of options from generation_config.json. */
#include "generate/work.h"

static void use(const char *option, double *to, double from, double otherwise)
{
    if (*to >= 0)
        return;
    *to = from >= 0 ? from : otherwise;
    if (from >= 0)
        lm_say(&tool, LM_LOG_INFO, "--%s %.15g comes from generation_config.json", option, from);
}

static void use_count(const char *option, int64_t *to, int64_t from, int64_t otherwise)
{
    double x = (double)*to;
    use(option, &x, (double)from, (double)otherwise);
    *to = (int64_t)x;
}

lm_code generate_defaults(generate_work *w, lm_err *e)
{
    lm_generation *g = &w->generation;
    json_t *file = NULL;
    lm_code rc = LM_OK;
    if (opt.generation)
        rc = lm_model_source_json(w->model.src, "generation_config.json", &file, e);
    rc = rc ? rc : lm_generation_read(&w->model.config, file, tool.argv[0], g, e);
    json_decref(file);
    if (rc)
        return rc;
    use("temperature", &opt.temperature, g->temperature, 1);
    use("top-p", &opt.top_p, g->top_p, 1);
    use("min-p", &opt.min_p, g->min_p, 0);
    use("repetition-penalty", &opt.penalty, g->repetition_penalty, 1);
    use_count("top-k", &opt.top_k, g->top_k, 0);
    use_count("max-new-tokens", &opt.max_new, g->max_new, 128);
    for (int i = 0; i < g->n_others; i++)
        lm_say(&tool, LM_LOG_WARN, "generation_config.json: \"%s\" has no effect here",
               g->others[i]);
    return LM_OK;
}
