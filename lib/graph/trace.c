/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c -- events in order of arrival, in the trace event format ("JSON Object Format"):
 * {"displayTimeUnit": "ms", "traceEvents": [
 *   {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": ...}},
 *   {"name": ..., "cat": ..., "ph": "X", "ts": us, "dur": us, "pid": process, "tid": row,
 *    "args": {...}}]} */
#include "graph/trace.h"

#include "base/json.h"

struct lm_trace {
    lm_buf text;
    lm_jw w;
    lm_err err;  /* the first error of the writer */
    double zero; /* lm_now at the first event; times count from there */
    bool any;
    int number; /* of the process */
};

static void meta(lm_trace *t, const char *what, int row, const char *name)
{
    lm_jw_obj(&t->w, NULL);
    lm_jw_str(&t->w, "name", what);
    lm_jw_str(&t->w, "ph", "M");
    lm_jw_int(&t->w, "pid", t->number);
    lm_jw_int(&t->w, "tid", row);
    lm_jw_obj(&t->w, "args");
    lm_jw_str(&t->w, "name", name);
    lm_jw_close_obj(&t->w);
    lm_jw_close_obj(&t->w);
}

lm_code lm_trace_new(const char *process, int number, lm_trace **out, lm_err *e)
{
    lm_trace *t = NULL;
    *out = NULL;
    if (lm_alloc_n(&t, 1, sizeof *t, "a trace", e))
        return e->code;
    t->number = number;
    lm_jw_begin(&t->w, &t->text, 1, &t->err);
    lm_jw_arr(&t->w, NULL);
    meta(t, "process_name", 0, process);
    *out = t;
    return LM_OK;
}

void lm_trace_free(lm_trace *t)
{
    if (!t)
        return;
    lm_buf_fini(&t->text);
    lm_free(t);
}

void lm_trace_zero(lm_trace *t, double zero)
{
    t->zero = zero;
    t->any = true;
}

void lm_trace_row(lm_trace *t, int row, const char *name)
{
    meta(t, "thread_name", row, name);
}

/* Write an event up to its arguments; the caller closes it. */
static void open_event(lm_trace *t, int row, const char *kind, const char *name, double begin,
                       double end)
{
    if (!t->any)
        t->zero = begin;
    t->any = true;
    lm_jw_obj(&t->w, NULL);
    lm_jw_str(&t->w, "name", name);
    if (kind)
        lm_jw_str(&t->w, "cat", kind);
    lm_jw_str(&t->w, "ph", "X");
    lm_jw_f64(&t->w, "ts", 1e6 * (begin - t->zero));
    lm_jw_f32(&t->w, "dur", 1e6 * (end - begin));
    lm_jw_int(&t->w, "pid", t->number);
    lm_jw_int(&t->w, "tid", row);
}

void lm_trace_span(lm_trace *t, int row, const char *name, double begin, double end)
{
    open_event(t, row, NULL, name, begin, end);
    lm_jw_close_obj(&t->w);
}

/* The parameter that the node reads or writes, or whose gradient it makes. */
static const char *parameter_of(const lm_graph *g, const lm_node *n)
{
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] >= 0 && g->value[n->in[i]].role == LM_ROLE_PARAM)
            return g->value[n->in[i]].name;
    for (int i = 0; i < n->n_out; i++)
        if (n->out[i] >= 0 && g->value[n->out[i]].role == LM_ROLE_PARAM)
            return g->value[n->out[i]].name;
        else if (n->out[i] >= 0 && g->value[n->out[i]].role == LM_ROLE_GRAD)
            return g->value[g->value[n->out[i]].grad_of].name;
    return NULL;
}

void lm_trace_exec(lm_trace *t, int row, const lm_graph *g, const lm_exec *x, size_t first,
                   size_t last, int64_t micro, double begin)
{
    lm_exec_span s;
    for (size_t k = first; k < last; k++) {
        if (!lm_exec_span_at(x, k, &s))
            continue;
        const char *parameter = parameter_of(g, s.node), *phase = lm_phase_name(s.node->phase);
        double seconds = s.end - s.begin;
        open_event(t, row + (int)s.node->phase, phase, s.node->op->name, begin + s.begin,
                   begin + s.end);
        lm_jw_obj(&t->w, "args");
        lm_jw_str(&t->w, "phase", phase);
        lm_jw_int(&t->w, "layer", s.node->layer);
        if (micro >= 0)
            lm_jw_int(&t->w, "micro_batch", micro);
        if (parameter)
            lm_jw_str(&t->w, "parameter", parameter);
        lm_jw_f32(&t->w, "flops", s.flops);
        lm_jw_f32(&t->w, "bytes", s.bytes);
        lm_jw_f32(&t->w, "flops_per_second", s.flops / seconds);
        lm_jw_f32(&t->w, "bytes_per_second", s.bytes / seconds);
        lm_jw_close_obj(&t->w);
        lm_jw_close_obj(&t->w);
    }
}

static lm_code end(lm_trace *t, lm_err *e)
{
    lm_jw_close_arr(&t->w);
    if (lm_jw_end(&t->w))
        *e = t->err;
    return e->code;
}

lm_code lm_trace_give(lm_trace *t, const char **text, size_t *len, lm_err *e)
{
    if (end(t, e))
        return e->code;
    *text = t->text.data + 1; /* between '[' and ']' */
    *len = t->text.len - 2;
    return LM_OK;
}

void lm_trace_take(lm_trace *t, const char *text, size_t len)
{
    lm_jw_raw(&t->w, text, len);
}

lm_code lm_trace_write(lm_trace *t, lm_out *out, lm_err *e)
{
    if (end(t, e))
        return e->code;
    FILE *f = lm_out_file(out);
    fputs("{\"displayTimeUnit\": \"ms\", \"traceEvents\": ", f);
    fwrite(t->text.data, 1, t->text.len, f);
    fputs("}\n", f);
    return ferror(f) ? lm_fail_write(lm_out_path(out), e) : LM_OK;
}
