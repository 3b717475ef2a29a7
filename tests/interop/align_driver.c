/* SPDX-License-Identifier: Apache-2.0 */
/* align_driver -- one call of a loss of alignment for test_align.py.
 *
 * Standard input: {"loss": TEXT, "seq": [{"logp": [...], "ref": [...], "old": [...], "mask": [...], "correct": [...],
 * "advantages": [...], "entropy": [...], "collision": [...], "value": [...], "old_value": [...], "returns": [...],
 * "advantage": X, "good": B, "mismatched": B, "margin": X, "score": X}, ...]}; absent arrays are NULL.
 * Standard output: {"loss": X, "dlogp": [[...], ...], "dvalue": [[...], ...], "dentropy": [[...], ...], "dscore": [...],
 * "metrics": {...}}. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "tune/align/loss.h"

static double *numbers(const json_t *o, const char *key, int64_t n)
{
    const json_t *a = json_object_get(o, key);
    double *x = json_is_array(a) ? calloc((size_t)n + 1, sizeof *x) : NULL;
    for (int64_t i = 0; x && i < n; i++)
        x[i] = json_number_value(json_array_get(a, (size_t)i));
    return x;
}

static uint8_t *bits(const json_t *o, const char *key, int64_t n)
{
    double *x = numbers(o, key, n);
    uint8_t *b = x ? calloc((size_t)n + 1, 1) : NULL;
    for (int64_t i = 0; b && i < n; i++)
        b[i] = x[i] != 0;
    free(x);
    return b;
}

static double number(const json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key));
}

static lm_align_seq read_seq(const json_t *o)
{
    int64_t n = (int64_t)json_array_size(json_object_get(o, "logp"));
    return (lm_align_seq){ .n = n,
                           .logp = numbers(o, "logp", n),
                           .ref = numbers(o, "ref", n),
                           .old = numbers(o, "old", n),
                           .correct = numbers(o, "correct", n),
                           .mask = bits(o, "mask", n),
                           .advantages = numbers(o, "advantages", n),
                           .entropy = numbers(o, "entropy", n),
                           .collision = numbers(o, "collision", n),
                           .value = numbers(o, "value", n),
                           .old_value = numbers(o, "old_value", n),
                           .returns = numbers(o, "returns", n),
                           .advantage = number(o, "advantage"),
                           .good = json_is_true(json_object_get(o, "good")),
                           .mismatched = json_is_true(json_object_get(o, "mismatched")),
                           .margin = number(o, "margin"),
                           .score = number(o, "score"),
                           .dlogp = calloc((size_t)n + 1, sizeof(double)),
                           .dentropy = calloc((size_t)n + 1, sizeof(double)),
                           .dvalue = calloc((size_t)n + 1, sizeof(double)) };
}

static json_t *list(const double *x, int64_t n)
{
    json_t *row = json_array();
    for (int64_t t = 0; t < n; t++)
        json_array_append_new(row, json_real(x[t]));
    return row;
}

static json_t *result(const lm_align_batch *b)
{
    json_t *o = json_object(), *dlogp = json_array(), *dvalue = json_array(),
           *dentropy = json_array(), *dscore = json_array(), *m = json_object();
    for (int64_t i = 0; i < b->n; i++) {
        json_array_append_new(dlogp, list(b->seq[i].dlogp, b->seq[i].n));
        json_array_append_new(dvalue, list(b->seq[i].dvalue, b->seq[i].n));
        json_array_append_new(dentropy, list(b->seq[i].dentropy, b->seq[i].n));
        json_array_append_new(dscore, json_real(b->seq[i].dscore));
    }
    for (int i = 0; i < b->metrics->n; i++)
        json_object_set_new(m, b->metrics->item[i].name,
                            json_real(lm_align_value(&b->metrics->item[i])));
    json_object_set_new(o, "loss", json_real(b->loss));
    json_object_set_new(o, "dlogp", dlogp);
    json_object_set_new(o, "dvalue", dvalue);
    json_object_set_new(o, "dentropy", dentropy);
    json_object_set_new(o, "dscore", dscore);
    json_object_set_new(o, "metrics", m);
    return o;
}

int main(void)
{
    json_t *in = json_loadf(stdin, 0, NULL), *seqs = json_object_get(in, "seq");
    size_t n = json_array_size(seqs);
    lm_align_seq *seq = calloc(n + 1, sizeof *seq);
    lm_align_metrics m = { .n = 0 };
    lm_align_spec spec;
    lm_err e = { 0 };
    for (size_t i = 0; i < n; i++)
        seq[i] = read_seq(json_array_get(seqs, i));
    lm_align_batch b = { .seq = seq, .n = (int64_t)n, .metrics = &m };
    if (lm_align_parse(json_string_value(json_object_get(in, "loss")), &spec, &e) ||
        lm_align_run(&spec, &b, &e)) {
        fprintf(stderr, "%s: %s: %s\n", e.where, e.what, e.todo);
        return 1;
    }
    json_dumpf(result(&b), stdout, JSON_REAL_PRECISION(17));
    return 0; /* the system frees */
}
