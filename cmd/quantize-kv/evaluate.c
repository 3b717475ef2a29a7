/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.c -- quantize-kv --evaluate: ways to store a cache, measured beside each other on one model. */
#include "quantize-kv/evaluate.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/device.h"
#include "common/model.h"
#include "quantize-kv/text.h"

/* ---- methods ---- */

/* What is no specification is refused before anything is measured. */
static lm_code add_row(kv_report *k, const char *name, lm_err *e)
{
    lm_kv_row *row = &k->row[k->rows];
    lm_kv_calibrate_opts ignored = { 0 };
    lm_kv_spec *s;

    if (k->rows > KV_MOST_METHODS)
        return lm_fail(e, LM_EUSAGE, "--methods", NULL, "more than %d", KV_MOST_METHODS);
    row->name = row->spec = name;
    if (kv_calibrated_here(name)) {
        if (kv_calibration_parse(name, &ignored, &k->spec[k->rows], e))
            return e->code;
        row->spec = k->spec[k->rows];
    }
    k->rows++;
    if (lm_kv_spec_parse(row->spec, &s, e))
        return e->code;
    lm_kv_spec_free(s);
    return LM_OK;
}

static lm_code split_methods(kv_report *k, const char *methods, lm_err *e)
{
    size_t len = strlen(methods);
    char *at, *name;

    if (lm_alloc_n(&k->list, len + 1, 1, "methods", e))
        return e->code;
    memcpy(k->list, methods, len);
    for (at = k->list; (name = kv_next_method(&at));)
        if (add_row(k, name, e))
            return e->code;
    if (k->rows < 2)
        return lm_fail(e, LM_EUSAGE, "--methods", "name some", "no method is named");
    return LM_OK;
}

/* On tokens behind those of the report if there are some. */
static lm_code calibrate_row(kv_report *k, int i, lm_err *e)
{
    kv_work *w = &k->work;
    const char *name = k->row[i].name;
    char *spec;
    lm_kv_calibrate_opts o = { .par = w->par, .sink = &w->tool->sink };

    if (!kv_calibrated_here(name))
        return LM_OK;
    if (kv_calibration_parse(name, &o, &spec, e))
        return e->code;
    lm_free(spec);
    int64_t own = w->o->windows < w->windows ? w->o->windows : w->windows;
    o.windows = w->windows > own ? w->windows - own : own;
    o.ids = w->ids.v + (w->windows - o.windows) * w->seq;
    o.seq = w->seq;
    lm_code rc = lm_kv_calibrate(&k->host_model, &o, "calibration", k->host, NULL, &k->made[i], e);
    k->row[i].data = k->made[i];
    return rc;
}

/* ---- retrieval ---- */

static lm_code read_lengths(kv_report *k, lm_err *e)
{
    const char *at = k->work.o->lengths;
    char one[32];

    if (!at) { /* powers of two, and all of the context */
        for (int64_t n = 128; n <= k->work.seq && k->lengths < KV_MOST_LENGTHS; n *= 2)
            k->length[k->lengths++] = n < k->work.seq ? n : n - 8;
        return LM_OK;
    }
    while (*at) {
        size_t n = strcspn(at, ", ");
        if (n >= sizeof one || k->lengths == KV_MOST_LENGTHS)
            return lm_fail(e, LM_EUSAGE, "--lengths", NULL, "more than %d, or a long one",
                           KV_MOST_LENGTHS);
        memcpy(one, at, n);
        one[n] = 0;
        if (n && (!lm_parse_count(one, &k->length[k->lengths++]) || k->length[k->lengths - 1] < 1))
            return lm_fail(e, LM_EUSAGE, "--lengths", "give numbers of tokens: 128,256", "'%s'",
                           one);
        at += n + (at[n] != 0);
    }
    return LM_OK;
}

static lm_code make_passkeys(kv_report *k, lm_err *e)
{
    const kv_model_options *o = k->work.o;
    const lm_ids *filler = &k->work.ids;

    k->depths = o->depths;
    k->repeats = o->repeats;
    if (!o->repeats || !k->work.tok)
        return LM_OK;
    if (read_lengths(k, e))
        return e->code;
    if (o->text) {
        if (kv_read_tokens(&k->work, o->text, 1 << 20, &k->filler, e))
            return e->code;
        filler = &k->filler;
    }
    const lm_kv_passkey_opts p = { .length = k->length,
                                   .lengths = k->lengths,
                                   .depths = o->depths,
                                   .repeats = o->repeats,
                                   .records = o->records,
                                   .seed = (uint64_t)k->work.tool->seed };
    return k->lengths ? lm_kv_passkeys_make(k->work.tok, filler->v, (int64_t)filler->n, &p,
                                            &k->passkeys, e)
                      : LM_OK;
}

/* ---- the report ---- */

static lm_code open_models(kv_report *k, lm_err *e)
{
    kv_work *w = &k->work;
    lm_code rc = lm_open_backend(w->tool, w->par, true, &k->b, e);

    if (!rc)
        rc = lm_backend_cpu(w->tool->cpu, w->par, &k->host, e);
    if (!rc)
        rc = lm_open_model(w->tool, w->path, w->o->tokenizer, w->par, &k->host_model, e);
    return rc;
}

static lm_code measure(kv_report *k, lm_err *e)
{
    kv_work *w = &k->work;
    int64_t steps = w->o->steps, prompt = w->seq / 2;

    for (int i = 1; i < k->rows; i++) {
        lm_code rc = calibrate_row(k, i, e);
        if (rc)
            lm_err_in(e, "%s", k->row[i].name);
        if (rc || lm_stopping())
            return rc;
    }
    if (w->o->states && lm_cache_states_open(w->o->states, &w->model.config, &k->states, e)) {
        if (!strcmp(e->where, "states"))
            e->where[0] = 0;
        lm_err_in(e, "--states");
        return e->code;
    }
    if (lm_alloc_n(&k->outliers, (size_t)w->model.config.layers, sizeof *k->outliers, "layers", e))
        return e->code;
    if (prompt + steps + 2 > w->seq)
        steps = w->seq - prompt - 2;
    k->report =
        (lm_kv_report){ .w = &w->model,
                        .dtype = w->o->dtype[0] == 'b' ? LM_DTYPE_BF16 : LM_DTYPE_F32,
                        .b = k->b,
                        .par = w->par,
                        .ids = w->ids.v,
                        .windows = w->o->windows < w->windows ? w->o->windows : w->windows,
                        .length = w->seq,
                        .state_codes = k->states.plan,
                        .speed_prompt = prompt,
                        .speed_steps = steps > 0 ? steps : 0,
                        .batch = { 1, 32 },
                        .passkeys = k->passkeys.n ? &k->passkeys : NULL,
                        .cells = k->lengths * k->depths,
                        .host_w = lm_config_all_heads(&w->model.config) ? &k->host_model : NULL,
                        .host = k->host,
                        .error_tokens = w->seq < 256 ? w->seq : 256,
                        .outliers = k->outliers,
                        .sink = &w->tool->sink };
    return lm_kv_report_run(&k->report, k->row, k->rows, e);
}

static lm_code answer(kv_report *k, lm_err *e)
{
    lm_tool *t = k->work.tool;
    lm_buf text = { 0 }, picture = { 0 };
    lm_code rc = t->json ? kv_report_json(k, &text, e) : kv_report_table(k, &text, e);

    if (!rc && t->output)
        rc = kv_report_picture(k, t->output, &picture, e);
    if (!rc && t->output)
        rc = kv_write_text(t->output, t->force, &picture, e);
    if (!rc)
        rc = kv_write_text("-", false, &text, e);
    lm_buf_fini(&text);
    lm_buf_fini(&picture);
    for (int i = 0; i < k->rows; i++)
        if (!k->row[i].ran)
            lm_answer_no(t);
    return rc;
}

static lm_code run(kv_report *k, lm_err *e)
{
    int64_t windows = k->work.o->windows;
    lm_code rc = split_methods(k, k->work.o->methods, e);

    for (int i = 1; i < k->rows; i++) /* calibrations read other tokens */
        windows = kv_calibrated_here(k->row[i].name) ? 2 * k->work.o->windows : windows;
    if (!rc && k->work.tool->output)
        rc = lm_out_try(k->work.tool->output, k->work.tool->force, e);
    if (!rc)
        rc = kv_work_open(&k->work, windows, e);
    if (!rc && !lm_stopping())
        rc = make_passkeys(k, e);
    if (!rc && !lm_stopping())
        rc = open_models(k, e);
    if (!rc && !lm_stopping())
        rc = measure(k, e);
    return !rc && !lm_stopping() ? answer(k, e) : rc;
}

void kv_evaluate(lm_tool *t, const kv_model_options *o)
{
    static kv_report k;
    lm_err e = { 0 };

    k = (kv_report){ .work = { .tool = t, .o = o, .path = t->argv[0], .data = t->argv[1] },
                     .row = { { .name = "plain" } },
                     .rows = 1 };
    if (run(&k, &e))
        lm_complain(t, &e);
    for (int i = 0; i <= KV_MOST_METHODS; i++) {
        lm_kv_row_fini(&k.row[i]);
        lm_kv_data_free(k.made[i]);
        lm_free(k.spec[i]);
    }
    lm_free(k.list);
    lm_free(k.outliers);
    lm_cache_plan_fini(&k.states);
    lm_kv_passkeys_fini(&k.passkeys);
    lm_ids_fini(&k.filler);
    lm_loaded_fini(&k.host_model);
    lm_loaded_fini(&k.work.model);
    lm_close_backend(t, k.b);
    lm_backend_close(k.host);
    kv_work_close(&k.work);
}
