/* SPDX-License-Identifier: Apache-2.0 */
/* attach_virtual.c -- prompts, P-tuning and prefixes: rows that virtual tokens get.
 *
 * PROMPT_TUNING  the embedding of token p is row p of prompt_embeddings [P,C] (arXiv:2104.08691)
 * P_TUNING       the same with rows made by an encoder, C - E - E - C with ReLU, or C - 2E by an
 *                LSTM (attach_lstm.c) and then 2E - 2E - C (arXiv:2103.10385); the file holds the
 *                rows, and the encoder is there while it trains (inference_mode false)
 * PREFIX_TUNING  in layer l, keys and values of token p are columns 2lD and (2l+1)D of row p of
 *                prompt_embeddings [P,2LD], D = kv heads x head size, put in after the rotation
 *                (arXiv:2101.00190); with prefix_projection, while it trains, rows come from a
 *                table [P,D], D - E - 2LD with tanh
 *
 * Of a model with an encoder, prompts stand in front of what the encoder reads, prefixes in front of
 * what the decoder reads, whose attention to itself alone has them.  PEFT's tables of prompts have a
 * part for each stack (num_transformer_submodules), of which the first is used; in prefixes layer l
 * has the pair 2l mod L of the table's L pairs, because PEFT lists the pairs of both stacks in a row
 * and cuts the list into pieces of four.
 *
 * Queries and states of a prefix's rows are computed and not used: nothing reads them.  Numbers of
 * an encoder are drawn as torch.nn.Linear and torch.nn.Embedding draw theirs.
 * Source: huggingface/peft tuners/{prompt_tuning,p_tuning,prefix_tuning}. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/arrange.h"
#include "kernels/virtual.h"
#include "model/store.h"
#include "op/ops.h"
#include "tune/attach_impl.h"

static const char prompt[] = "PROMPT_TUNING", p_tuning[] = "P_TUNING", prefix[] = "PREFIX_TUNING";
static const char encoder[] = "base_model.prompt_encoder";
enum { MOST_STEPS = 512 }; /* of an LSTM, all of whose nodes are in the graph */

bool lm_attach_virtual_is(const char *peft_type)
{
    return !strcmp(peft_type, prompt) || !strcmp(peft_type, p_tuning) || !strcmp(peft_type, prefix);
}

/* ---- the table of a graph ---- */

static int64_t kv_width(const lm_config *c)
{
    return c->layer[0].kv_heads * c->layer[0].head_dim;
}

/* Columns of the table: embeddings, or keys and values of all layers. */
static int64_t table_width(const lm_attach *a)
{
    return a->rows.prefix ? 2 * a->rows.layers * kv_width(a->config) : a->config->width;
}

/* Columns of the encoder's first table. */
static int64_t encoder_width(const lm_attach *a)
{
    return a->rows.prefix ? kv_width(a->config) : a->config->width;
}

static const char rows_name[] = "prompt_embeddings";

/* Beside an encoder, the rows that it makes: nothing reads them, and lm_attach_fold sets them for
 * the file. */
static lm_vid plain_table(const lm_attach *a, lm_builder *b)
{
    lm_vid v = lm_b_param(b, 2, (int64_t[]){ a->rows.count, table_width(a) }, rows_name);
    lm_b_slice(b, a->rows.count, false, a->rows.encoder ? LM_INIT_ZEROS : LM_INIT_NORMAL, 1,
               rows_name);
    if (lm_b_ok(b) && a->rows.encoder)
        lm_b_model(b)->slice[lm_b_model(b)->n_slices - 1].trains = false;
    return v;
}

lm_vid lm_attach_encoder_part(lm_builder *b, int ndim, const int64_t *dim, double bound,
                              const char *part)
{
    lm_vid v = lm_b_param(b, ndim, dim, "prompt_encoder.%s", part);
    lm_b_slice(b, dim[0], false, LM_INIT_UNIFORM, bound, "%s.%s", encoder, part);
    return v;
}

/* A layer of the encoder: torch's numbers are within 1/sqrt(in), of weight and bias. */
static lm_vid dense(const lm_attach *a, lm_builder *b, lm_rule *r, lm_vid x, int64_t in,
                    int64_t out, int number, const char *function)
{
    const char *part = a->rows.prefix ? "transform" : "mlp_head";
    double bound = 1 / sqrt((double)in);
    char name[48];
    snprintf(name, sizeof name, "%s.%d.weight", part, number);
    lm_vid w = lm_attach_encoder_part(b, 2, (int64_t[]){ out, in }, bound, name);
    snprintf(name, sizeof name, "%s.%d.bias", part, number);
    lm_vid bias = lm_attach_encoder_part(b, 1, (int64_t[]){ out }, bound, name);
    if (!lm_b_ok(b))
        return LM_NONE;
    return LM_R_MAP(r, function, LM_IS("x", lm_r_matmul(r, x, false, w, true)),
                    LM_IS("b", lm_r_shape2(r, bias, 1, out)));
}

static lm_vid encoded_table(const lm_attach *a, lm_builder *b)
{
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    int64_t width = encoder_width(a), hidden = a->rows.hidden;
    lm_vid x = lm_b_param(b, 2, (int64_t[]){ a->rows.count, width }, "prompt_encoder.embedding");
    lm_b_slice(b, a->rows.count, false, LM_INIT_NORMAL, 1, "%s.embedding.weight", encoder);
    if (a->rows.prefix) {
        x = dense(a, b, &r, x, width, hidden, 0, "y = tanh(x + b)");
        x = dense(a, b, &r, x, hidden, table_width(a), 2, "y = x + b");
    } else if (a->rows.lstm) {
        x = lm_attach_lstm(a, b, &r, x);
        x = dense(a, b, &r, x, 2 * hidden, 2 * hidden, 0, "y = max(x + b, 0)");
        x = dense(a, b, &r, x, 2 * hidden, width, 2, "y = x + b");
    } else {
        x = dense(a, b, &r, x, width, hidden, 0, "y = max(x + b, 0)");
        x = dense(a, b, &r, x, hidden, hidden, 2, "y = max(x + b, 0)");
        x = dense(a, b, &r, x, hidden, width, 4, "y = x + b");
    }
    lm_rule_fini(&r);
    plain_table(a, b);
    return x;
}

static lm_vid table_of(lm_attach *a, lm_builder *b)
{
    lm_attach_begin(a, b);
    if (a->rows.table < 0)
        a->rows.table = a->rows.encoder ? encoded_table(a, b) : plain_table(a, b);
    return a->rows.table;
}

/* ---- places ---- */

static lm_vid embed(void *ctx, lm_builder *b, const lm_adapt_embed *place)
{
    lm_attach *a = ctx;
    lm_virtual_attr attr = { .first = a->config->vocab, .add = true };
    if (a->rows.prefix || place->encoder != (a->config->encoder != NULL))
        return LM_NONE;
    lm_vid in[3] = { place->x, place->tokens, table_of(a, b) };
    return lm_b_append(b, &lm_op_virtual_rows, &attr, in);
}

static lm_vid heads(void *ctx, lm_builder *b, const lm_adapt_heads *place)
{
    lm_attach *a = ctx;
    const lm_layer *y = &a->config->layer[place->layer];
    int64_t width = 2 * kv_width(a->config),
            pair = a->config->encoder ? 2 * place->layer % a->rows.layers : place->layer;
    lm_virtual_attr attr = { .first = a->config->vocab, .at = y->heads * y->head_dim };
    lm_window_attr part = { 0, pair * width, a->rows.tokens, width };
    if (place->encoder)
        return LM_NONE;
    lm_vid table = table_of(a, b);
    if (place->late)
        lm_fail(lm_b_err(b), LM_EUSAGE, "prefix tuning", "use a cache that keeps rotated keys",
                "its keys do not rotate");
    lm_vid rows = lm_b_append(b, &lm_op_window, &part, &table);
    return lm_b_append(b, &lm_op_virtual_rows, &attr,
                       (lm_vid[]){ place->qkv, place->tokens, rows });
}

/* ---- the configuration ---- */

static lm_code read_count(const lm_attach *a, const char *key, int64_t usual, const char *where,
                          int64_t *out, lm_err *e)
{
    const json_t *v = json_object_get(a->adapter, key);
    *out = !v || json_is_null(v) ? usual : json_is_integer(v) ? json_integer_value(v) : -1;
    if (*out < 1 || *out > 1 << 20)
        return lm_fail(e, LM_EFORMAT, where, "write a number from 1 to 1048576",
                       "%s is missing or no such number", key);
    return LM_OK;
}

/* What the file says about the base, where it says anything, is so. */
static lm_code check_base(const lm_attach *a, const char *key, int64_t is, const char *where,
                          lm_err *e)
{
    const json_t *v = json_object_get(a->adapter, key);
    if (json_is_integer(v) && json_integer_value(v) != is)
        return lm_fail(e, LM_EUSAGE, where, "use the base that it was made for",
                       "%s is %" PRId64 ", but the base has %" PRId64, key,
                       (int64_t)json_integer_value(v), is);
    return LM_OK;
}

static lm_code check_prefix(lm_attach *a, const char *where, lm_err *e)
{
    const lm_config *c = a->config;
    if (lm_config_has_states(c))
        return lm_fail(e, LM_EUSAGE, where, "tune a prompt instead",
                       "layers of the base keep states, which have no place for keys");
    if (lm_config_check_heads(c, where, e))
        return e->code;
    for (int64_t l = 1; l < c->layers; l++)
        if (c->layer[l].kv_heads * c->layer[l].head_dim != kv_width(c))
            return lm_fail(e, LM_EUSAGE, where, "tune a prompt instead",
                           "layers of the base have keys of different widths");
    if (!c->encoder)
        return check_base(a, "num_layers", c->layers, where, e);
    /* PEFT counts the encoder's layers where its configuration leaves the number out. */
    if (read_count(a, "num_layers", c->layers, where, &a->rows.layers, e))
        return e->code;
    return a->rows.layers >= c->layers ? LM_OK : check_base(a, "num_layers", c->layers, where, e);
}

/* Rows of the table for each stack of the base, as PEFT makes them. */
static lm_code read_stacks(lm_attach *a, const char *where, lm_err *e)
{
    static const char key[] = "num_transformer_submodules";
    const char *task = json_string_value(json_object_get(a->adapter, "task_type"));
    const bool both = a->config->encoder != NULL;
    int64_t n;
    if (read_count(a, key, task && !strcmp(task, "SEQ_2_SEQ_LM") ? 2 : 1, where, &n, e))
        return e->code;
    if (n > 2 || (n == 2 && !both))
        return lm_fail(e, LM_EUSAGE, where, "use the base that it was made for",
                       "%s is %" PRId64 ", but the base has %s", key, n,
                       both ? "two stacks" : "one stack");
    if (n < 2 && both && a->rows.prefix)
        return lm_fail(e, LM_EUSAGE, where, "set it to 2",
                       "%s is 1, and prefixes of a model with an encoder have 2", key);
    a->rows.count = a->rows.tokens * (a->rows.prefix ? 1 : n);
    return LM_OK;
}

/* MLP has always 3 layers, as in PEFT; its dropout stands between the layers of the LSTM alone. */
static lm_code set_encoder(lm_attach *a, const char *kind, const char *where, lm_err *e)
{
    const json_t *dropout = json_object_get(a->adapter, "encoder_dropout");
    if (!kind || !strcmp(kind, "MLP"))
        return LM_OK;
    if (strcmp(kind, "LSTM") != 0)
        return lm_fail(e, LM_EUSAGE, where, "choose MLP or LSTM",
                       "encoders of the kind %.20s are not known", kind);
    if (json_number_value(dropout) > 0)
        return lm_fail(e, LM_EUSAGE, where, "set it to 0", "encoder_dropout is not served");
    if (a->rows.count > MOST_STEPS)
        return lm_fail(e, LM_EUSAGE, where, "choose MLP, or fewer virtual tokens",
                       "an LSTM over %" PRId64 " virtual tokens is too long: %d are possible",
                       a->rows.count, MOST_STEPS);
    return read_count(a, "encoder_num_layers", 2, where, &a->rows.lstm, e);
}

lm_code lm_attach_virtual_set(lm_attach *a, const char *where, lm_err *e)
{
    const json_t *o = a->adapter;
    const char *type = json_string_value(json_object_get(o, "peft_type"));
    const char *kind = json_string_value(json_object_get(o, "encoder_reparameterization_type"));
    a->rows.prefix = !strcmp(type, prefix);
    a->rows.encoder = !json_is_true(json_object_get(o, "inference_mode")) &&
                      (a->rows.prefix ? json_is_true(json_object_get(o, "prefix_projection"))
                                      : !strcmp(type, p_tuning));
    a->rows.layers = a->config->layers;
    if (read_count(a, "num_virtual_tokens", -1, where, &a->rows.tokens, e) ||
        read_count(a, "encoder_hidden_size", encoder_width(a), where, &a->rows.hidden, e) ||
        (a->rows.prefix ? check_prefix(a, where, e)
                        : check_base(a, "token_dim", a->config->width, where, e)) ||
        read_stacks(a, where, e))
        return e->code;
    if (a->rows.encoder && !a->rows.prefix && set_encoder(a, kind, where, e))
        return e->code;
    a->adapt.embed = embed;
    if (a->rows.prefix)
        a->adapt.heads = heads;
    return LM_OK;
}

/* ---- the rows of an encoder ---- */

lm_code lm_attach_read_encoder(const lm_store *s, const char *part, float **out, lm_err *e)
{
    char name[96];
    snprintf(name, sizeof name, "%s.%s", encoder, part);
    int i = lm_model_slice(s->model, name);
    const lm_store_block *k = lm_store_find(s, LM_KEPT_PARAM, 0);
    if (i < 0 || !k)
        return lm_fail(e, LM_EBUG, name, NULL, "is not in the model");
    if (lm_alloc_n(out, (size_t)lm_slice_count(&s->model->slice[i]), sizeof **out,
                   "an encoder of prompts", e))
        return e->code;
    return lm_store_get_whole(s, k, i, *out, e);
}

/* y [rows,out] = f(x w^T + b). */
static void run_dense(const double *x, int64_t rows, int64_t in, const float *w, const float *bias,
                      int64_t out, char function, double *y)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++) {
            double sum = (double)bias[o];
            for (int64_t i = 0; i < in; i++)
                sum += x[r * in + i] * (double)w[o * in + i];
            y[r * out + o] = function == 't'   ? tanh(sum)
                             : function == 'r' ? (sum > 0 ? sum : 0)
                                               : sum;
        }
}

/* One layer of the encoder, whose result takes the place of *x; *width is that of *x. */
static lm_code fold_layer(const lm_attach *a, const lm_store *s, int number, int64_t out,
                          char function, double **x, int64_t *width, lm_err *e)
{
    const char *part = a->rows.prefix ? "transform" : "mlp_head";
    char name[48];
    float *w = NULL, *bias = NULL;
    double *y = NULL;
    snprintf(name, sizeof name, "%s.%d.weight", part, number);
    lm_code rc = lm_attach_read_encoder(s, name, &w, e);
    snprintf(name, sizeof name, "%s.%d.bias", part, number);
    rc = rc ? rc : lm_attach_read_encoder(s, name, &bias, e);
    rc = rc ? rc
            : lm_alloc_n(&y, (size_t)(a->rows.count * out), sizeof *y, "an encoder of prompts", e);
    if (!rc) {
        run_dense(*x, a->rows.count, *width, w, bias, out, function, y);
        lm_free(*x);
        *x = y;
        *width = out;
    }
    lm_free(w);
    lm_free(bias);
    return rc;
}

lm_code lm_attach_fold(const lm_attach *a, lm_store *s, lm_err *e)
{
    int64_t width = encoder_width(a), hidden = a->rows.hidden;
    float *first = NULL;
    double *x = NULL;
    const int made = lm_model_slice(s->model, rows_name);
    if (!a->rows.encoder || s->model->slice[made].cut.none) /* another rank has both */
        return LM_OK;
    lm_code rc = lm_attach_read_encoder(s, "embedding.weight", &first, e);
    rc =
        rc ? rc
           : lm_alloc_n(&x, (size_t)(a->rows.count * width), sizeof *x, "an encoder of prompts", e);
    for (int64_t i = 0; !rc && i < a->rows.count * width; i++)
        x[i] = (double)first[i];
    char inner = a->rows.prefix ? 't' : 'r';
    if (a->rows.lstm) {
        rc = rc ? rc : lm_attach_fold_lstm(a, s, &x, &width, e);
        hidden *= 2;
    }
    rc = rc ? rc : fold_layer(a, s, 0, hidden, inner, &x, &width, e);
    if (a->rows.lstm) {
        rc = rc ? rc : fold_layer(a, s, 2, a->config->width, 0, &x, &width, e);
    } else if (a->rows.prefix) {
        rc = rc ? rc : fold_layer(a, s, 2, table_width(a), 0, &x, &width, e);
    } else {
        rc = rc ? rc : fold_layer(a, s, 2, hidden, inner, &x, &width, e);
        rc = rc ? rc : fold_layer(a, s, 4, a->config->width, 0, &x, &width, e);
    }
    rc = rc ? rc : lm_store_put(s, made, LM_DTYPE_F64, x, e);
    lm_free(first);
    lm_free(x);
    return rc;
}
