/* SPDX-License-Identifier: Apache-2.0 */
/* test_tune_places.c -- adapters that change no weight, against their definitions in float64: a Llama
 * written out as loops, with bottlenecks behind its branches and keys and values of a prefix; rows
 * that encoders make of virtual tokens; and rows of embeddings and heads, against the base with
 * these rows. */
#include "attach_case.h"

enum { C = 16, H = 4, K = 2, D = 4, F = 24, V = 23, LAYERS = 2, QKV = (H + 2 * K) * D };

/* ---- the reference ---- */

/* What a layer has beside the base's weights; zeros: nothing. */
typedef struct {
    int width; /* of the bottlenecks */
    const char *function;
    bool attention, mlp, with_stream;
    double scale;
    const double *down[LAYERS][2], *down_bias[LAYERS][2], *up[LAYERS][2], *up_bias[LAYERS][2];
    const double *prefix; /* [P,2 LAYERS K D] */
} extras;

typedef struct {
    const lm_model *m; /* names and numbers of the base */
    const float *block;
    const extras *x;
    double stream[SEQ][C];
} reference;

static double *weight(const reference *r, int layer, const char *part)
{
    char name[100];
    snprintf(name, sizeof name, layer < 0 ? "%.0d%s.weight" : "model.layers.%d.%s.weight",
             layer < 0 ? 0 : layer, part);
    double *w = numbers_of(r->m, r->block, name);
    if (!w)
        fail_msg("no '%s'", name);
    return w;
}

/* y [out] = w [out,in] x + b */
static void product(const double *w, const double *b, const double *x, int out, int in, double *y)
{
    for (int o = 0; o < out; o++) {
        y[o] = b ? b[o] : 0;
        for (int i = 0; i < in; i++)
            y[o] += w[o * in + i] * x[i];
    }
}

static void scale_by_norm(const reference *r, int layer, const char *part, const double *x,
                          double *y)
{
    double *w = weight(r, layer, part), square = 0;
    for (int i = 0; i < C; i++)
        square += x[i] * x[i] / C;
    for (int i = 0; i < C; i++)
        y[i] = x[i] / sqrt(square + 1e-6) * w[i];
    lm_free(w);
}

static double activated(const char *function, double x)
{
    const double root = sqrt(2 / acos(-1));
    return !strcmp(function, "relu")       ? fmax(x, 0)
           : !strcmp(function, "gelu")     ? x / 2 * (1 + erf(x / sqrt(2)))
           : !strcmp(function, "gelu_new") ? x / 2 * (1 + tanh(root * (x + 0.044715 * x * x * x)))
                                           : x / (1 + exp(-x));
}

/* The bottleneck on what a branch gives, and into the stream. */
static void add_branch(reference *r, int layer, bool mlp, int t, double *h)
{
    const extras *x = r->x;
    double in[C], inner[C], out[C];
    if (mlp ? x->mlp : x->attention) {
        for (int i = 0; i < C; i++)
            in[i] = h[i] + (x->with_stream ? r->stream[t][i] : 0);
        product(x->down[layer][mlp], x->down_bias[layer][mlp], in, x->width, C, inner);
        for (int i = 0; i < x->width; i++)
            inner[i] = activated(x->function, inner[i]);
        product(x->up[layer][mlp], x->up_bias[layer][mlp], inner, C, x->width, out);
        for (int i = 0; i < C; i++)
            h[i] += x->scale * out[i];
    }
    for (int i = 0; i < C; i++)
        r->stream[t][i] += h[i];
}

static void rotate(double *x, int t)
{
    for (int d = 0; d < D / 2; d++) {
        double angle = t * pow(10000, -2.0 * d / D), a = x[d], b = x[d + D / 2];
        x[d] = a * cos(angle) - b * sin(angle);
        x[d + D / 2] = b * cos(angle) + a * sin(angle);
    }
}

static void heads(const reference *r, int layer, const int32_t *id, double qkv[SEQ][QKV])
{
    static const char *const names[] = { "self_attn.q_proj", "self_attn.k_proj",
                                         "self_attn.v_proj" };
    static const int at[] = { 0, H * D, (H + K) * D, QKV };
    double n[C];
    for (int part = 0; part < 3; part++) {
        double *w = weight(r, layer, names[part]);
        for (int t = 0; t < SEQ; t++) {
            scale_by_norm(r, layer, "input_layernorm", r->stream[t], n);
            product(w, NULL, n, at[part + 1] - at[part], C, qkv[t] + at[part]);
            for (int h = at[part]; part < 2 && h < at[part + 1]; h += D)
                rotate(qkv[t] + h, t);
            if (part && r->x->prefix && id[t] >= V)
                memcpy(qkv[t] + at[part],
                       r->x->prefix + (id[t] - V) * LAYERS * 2 * K * D +
                           (2 * layer + part - 1) * K * D,
                       K * D * sizeof(double));
        }
        lm_free(w);
    }
}

static void attention(reference *r, int layer, const int32_t *id)
{
    double qkv[SEQ][QKV], mixed[C], out[C], *w = weight(r, layer, "self_attn.o_proj");
    heads(r, layer, id, qkv);
    for (int t = 0; t < SEQ; t++) {
        memset(mixed, 0, sizeof mixed);
        for (int h = 0; h < H; h++) {
            const int key = H * D + h / (H / K) * D, value = key + K * D;
            double p[SEQ], sum = 0;
            for (int s = 0; s <= t; s++) {
                p[s] = 0;
                for (int d = 0; d < D; d++)
                    p[s] += qkv[t][h * D + d] * qkv[s][key + d] / sqrt(D);
                sum += p[s] = exp(p[s]);
            }
            for (int s = 0; s <= t; s++)
                for (int d = 0; d < D; d++)
                    mixed[h * D + d] += p[s] / sum * qkv[s][value + d];
        }
        product(w, NULL, mixed, C, C, out);
        add_branch(r, layer, false, t, out);
    }
    lm_free(w);
}

static void mlp(reference *r, int layer)
{
    double *gate = weight(r, layer, "mlp.gate_proj"), *up = weight(r, layer, "mlp.up_proj"),
           *down = weight(r, layer, "mlp.down_proj");
    for (int t = 0; t < SEQ; t++) {
        double n[C], g[F], u[F], out[C];
        scale_by_norm(r, layer, "post_attention_layernorm", r->stream[t], n);
        product(gate, NULL, n, F, C, g);
        product(up, NULL, n, F, C, u);
        for (int i = 0; i < F; i++)
            u[i] *= g[i] / (1 + exp(-g[i]));
        product(down, NULL, u, C, F, out);
        add_branch(r, layer, true, t, out);
    }
    lm_free(gate);
    lm_free(up);
    lm_free(down);
}

static double loss_of(const reference *r, const int32_t *target)
{
    double *head = weight(r, -1, "lm_head"), loss = 0;
    for (int t = 0; t < SEQ; t++) {
        double n[C], y[V], sum = 0;
        if (target[t] < 0)
            continue;
        scale_by_norm(r, -1, "model.norm", r->stream[t], n);
        product(head, NULL, n, V, C, y);
        for (int v = 0; v < V; v++)
            sum += exp(y[v]);
        loss += log(sum) - y[target[t]];
    }
    lm_free(head);
    return loss;
}

/* The loss of the runner's tokens; virtual ones have zeros in place of an embedding. */
static double reference_loss(runner *run, const float *block, const extras *x)
{
    reference r = { .m = run->model, .block = block, .x = x };
    double *table = weight(&r, -1, "model.embed_tokens"), loss = 0;
    for (int b = 0; b < BATCH; b++) {
        const int32_t *id = ids_of(run, run->model->tokens) + b * SEQ,
                      *target = ids_of(run, run->model->targets) + b * SEQ;
        for (int t = 0; t < SEQ; t++)
            for (int i = 0; i < C; i++)
                r.stream[t][i] = id[t] < V ? table[id[t] * C + i] : 0;
        for (int l = 0; l < LAYERS; l++) {
            attention(&r, l, id);
            mlp(&r, l);
        }
        loss += loss_of(&r, target);
    }
    lm_free(table);
    return loss;
}

/* ---- runs ---- */

/* A base, an adapter beside it, and random numbers in both. */
typedef struct {
    tiny t;
    json_t *config;
    lm_attach *a;
    runner r;
    float *block;
} place_case;

/* text NULL: the base alone */
static void begin(place_case *p, int model, const char *text, lm_mode mode, bool drops)
{
    lm_err e = { 0 };
    *p = (place_case){ .config = text ? adapter_of(text) : NULL };
    tiny_begin(&p->t, model);
    p->t.config.drop_embed = p->t.config.drop_resid = p->t.config.drop_attn = 0;
    if (text)
        must(lm_attach_new(&p->t.bases, &p->t.config, p->config, "adapter", &p->a, &e), &e);
    lm_build b = build_of(mode, p->a);
    b.dropout = drops;
    runner_new(&p->r, &p->t.config, &b, LM_CPU_REF, 1);
    p->block = random_block(p->r.model);
}

static double run(place_case *p, int64_t virtuals)
{
    runner_weights(&p->r, p->block);
    feed(&p->r, virtuals);
    runner_run(&p->r);
    return loss_sum(&p->r);
}

static void end(place_case *p)
{
    lm_free(p->block);
    runner_free(&p->r);
    lm_attach_free(p->a);
    json_decref(p->config);
    tiny_end(&p->t);
}

static void near(const char *what, double got, double want)
{
    if (!(fabs(got - want) <= 2e-6 * fabs(want)))
        fail_msg("%s: %.12g, by the definition %.12g", what, got, want);
}

static int slice_param(const lm_model *m, const char *name)
{
    int i = lm_model_slice(m, name);
    return i < 0 ? -1 : m->slice[i].param;
}

static double *needed(const place_case *p, const char *name)
{
    double *v = numbers_of(p->r.model, p->block, name);
    if (!v)
        fail_msg("no '%s'", name);
    return v;
}

/* ---- tests ---- */

static void test_reference(void **state)
{
    place_case p;
    (void)state;
    begin(&p, LLAMA, NULL, LM_MODE_EVAL, false);
    double got = run(&p, 0);
    near("the base", got, reference_loss(&p.r, p.block, &(extras){ .width = 0 }));
    end(&p);
}

static void check_bottleneck(const char *function, bool attention_too, bool mlp_too, bool stream,
                             const char *scaling)
{
    static const char *const branch[] = { "attention", "output" };
    extras x = { .width = 5, /* 16 / 3 */
                 .function = function,
                 .attention = attention_too,
                 .mlp = mlp_too,
                 .with_stream = stream,
                 .scale = scaling ? strtod(scaling, NULL) : 1 };
    place_case p;
    char text[400], name[200];
    snprintf(text, sizeof text,
             "{\"name\":\"a\",\"config\":{\"mh_adapter\":%s,\"output_adapter\":%s,"
             "\"reduction_factor\":3,\"non_linearity\":\"%s\",\"original_ln_before\":%s,"
             "\"original_ln_after\":true%s%s}}",
             attention_too ? "true" : "false", mlp_too ? "true" : "false", function,
             stream ? "true" : "false", scaling ? ",\"scaling\":" : "", scaling ? scaling : "");
    begin(&p, LLAMA, text, LM_MODE_TRAIN, false);
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < 2; k++) {
            struct {
                const char *part;
                const double **to;
            } of[] = { { "adapter_down.0.weight", &x.down[l][k] },
                       { "adapter_down.0.bias", &x.down_bias[l][k] },
                       { "adapter_up.weight", &x.up[l][k] },
                       { "adapter_up.bias", &x.up_bias[l][k] } };
            for (int i = 0; i < 4 && (k ? mlp_too : attention_too); i++) {
                snprintf(name, sizeof name, "model.layers.%d.%s_adapters.adapters.a.%s", l,
                         branch[k], of[i].part);
                *of[i].to = needed(&p, name);
            }
        }
    double got = run(&p, 0);
    near(text, got, reference_loss(&p.r, p.block, &x));
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < 2; k++) {
            lm_free((void *)(uintptr_t)x.down[l][k]);
            lm_free((void *)(uintptr_t)x.down_bias[l][k]);
            lm_free((void *)(uintptr_t)x.up[l][k]);
            lm_free((void *)(uintptr_t)x.up_bias[l][k]);
        }
    end(&p);
}

static void test_bottlenecks(void **state)
{
    (void)state;
    check_bottleneck("relu", true, true, false, NULL);
    check_bottleneck("gelu", false, true, true, NULL);
    check_bottleneck("gelu_new", true, false, true, "0.5");
    check_bottleneck("swish", true, true, false, "-2");
}

/* w^T of an encoder's layer, and rows of it by `function`: 't' tanh, 'r' ReLU, 0 none. */
static double *encoded(const place_case *p, const char *part, double *x, int rows, int in, int out,
                       char function)
{
    char name[100];
    double *y = room((size_t)(rows * out), sizeof *y);
    snprintf(name, sizeof name, "base_model.prompt_encoder.%s.weight", part);
    double *w = needed(p, name);
    snprintf(name, sizeof name, "base_model.prompt_encoder.%s.bias", part);
    double *b = needed(p, name);
    for (int r = 0; r < rows; r++) {
        product(w, b, x + r * in, out, in, y + r * out);
        for (int i = 0; i < out; i++)
            y[r * out + i] = function == 't'   ? tanh(y[r * out + i])
                             : function == 'r' ? fmax(y[r * out + i], 0)
                                               : y[r * out + i];
    }
    lm_free(w);
    lm_free(b);
    lm_free(x);
    return y;
}

/* The prefix is in the rows of keys and values; of a projected one, in those that the projection gives. */
static void test_prefixes(void **state)
{
    enum { P = 2, E = 5 };
    place_case p;
    extras x = { .width = 0 };
    (void)state;
    begin(&p, LLAMA, "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2}", LM_MODE_TRAIN,
          false);
    x.prefix = needed(&p, "prompt_embeddings");
    double got = run(&p, P);
    near("a prefix", got, reference_loss(&p.r, p.block, &x));
    lm_free((void *)(uintptr_t)x.prefix);
    end(&p);
    begin(&p, LLAMA,
          "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2,\"prefix_projection\":true,"
          "\"encoder_hidden_size\":5}",
          LM_MODE_TRAIN, false);
    double *rows = needed(&p, "base_model.prompt_encoder.embedding.weight");
    rows = encoded(&p, "transform.0", rows, P, K * D, E, 't');
    x.prefix = rows = encoded(&p, "transform.2", rows, P, E, 2 * LAYERS * K * D, 0);
    got = run(&p, P);
    near("a projected prefix", got, reference_loss(&p.r, p.block, &x));
    lm_free(rows);
    end(&p);
}

/* ---- P-tuning ---- */

static double logistic(double x)
{
    return 1 / (1 + exp(-x));
}

/* Layer l of the LSTM: x [P,in] to [P,2E], both directions side by side. */
static double *recurred(const place_case *p, int l, double *x, int rows, int in, int hidden)
{
    static const char *const parts[] = { "weight_ih", "weight_hh", "bias_ih", "bias_hh" };
    double *y = room((size_t)(rows * 2 * hidden), sizeof *y), *v[4];
    for (int back = 0; back < 2; back++) {
        double h[8] = { 0 }, c[8] = { 0 }, z[32], of_state[32];
        for (int i = 0; i < 4; i++) {
            char name[100];
            snprintf(name, sizeof name, "base_model.prompt_encoder.lstm_head.%s_l%d%s", parts[i], l,
                     back ? "_reverse" : "");
            v[i] = needed(p, name);
        }
        for (int step = 0; step < rows; step++) {
            const int t = back ? rows - 1 - step : step;
            product(v[0], v[2], x + t * in, 4 * hidden, in, z);
            product(v[1], v[3], h, 4 * hidden, hidden, of_state);
            for (int k = 0; k < hidden; k++) {
                double i = z[k] + of_state[k], f = z[hidden + k] + of_state[hidden + k],
                       g = z[2 * hidden + k] + of_state[2 * hidden + k],
                       o = z[3 * hidden + k] + of_state[3 * hidden + k];
                c[k] = logistic(f) * c[k] + logistic(i) * tanh(g);
                h[k] = logistic(o) * tanh(c[k]);
                y[t * 2 * hidden + back * hidden + k] = h[k];
            }
        }
        for (int i = 0; i < 4; i++)
            lm_free(v[i]);
    }
    lm_free(x);
    return y;
}

/* The rows [P,C] that the encoder makes, by loops. */
static double *rows_of(const place_case *p, bool lstm, int layers, int rows, int hidden)
{
    double *x = needed(p, "base_model.prompt_encoder.embedding.weight");
    if (!lstm) {
        x = encoded(p, "mlp_head.0", x, rows, C, hidden, 'r');
        x = encoded(p, "mlp_head.2", x, rows, hidden, hidden, 'r');
        return encoded(p, "mlp_head.4", x, rows, hidden, C, 0);
    }
    for (int l = 0; l < layers; l++)
        x = recurred(p, l, x, rows, l ? 2 * hidden : C, hidden);
    x = encoded(p, "mlp_head.0", x, rows, 2 * hidden, 2 * hidden, 'r');
    return encoded(p, "mlp_head.2", x, rows, 2 * hidden, C, 0);
}

/* The loss of a prompt that has these rows itself. */
static double prompt_loss(const double *rows, int n)
{
    place_case p;
    char text[100];
    snprintf(text, sizeof text, "{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":%d}", n);
    begin(&p, LLAMA, text, LM_MODE_EVAL, false);
    put_numbers(p.r.model, p.block, "prompt_embeddings", rows);
    double loss = run(&p, n);
    end(&p);
    return loss;
}

/* What lm_attach_fold sets for the file, of the same numbers. */
static void check_fold(const place_case *p, const double *rows, int n)
{
    lm_err e = { 0 };
    lm_build b = build_of(LM_MODE_TRAIN, p->a);
    lm_model *m = NULL;
    lm_store *s = NULL;
    float *got = room((size_t)(n * C), sizeof *got);
    b.precision.low = LM_DTYPE_F32;
    b.backend = p->r.backend;
    must(lm_model_build(&p->t.config, &b, &m, &e), &e);
    must(lm_store_new(m, p->r.backend, &(lm_store_opts){ .master = true, .par = p->r.par }, &s, &e),
         &e);
    for (int i = 0; i < m->n_slices; i++)
        if (m->slice[i].of_adapter) {
            double *v = needed(p, m->slice[i].name);
            must(lm_store_put(s, i, LM_DTYPE_F64, v, &e), &e);
            lm_free(v);
        }
    must(lm_attach_fold(p->a, s, &e), &e);
    must(lm_store_get(s, lm_store_find(s, LM_KEPT_FROZEN, 0),
                      lm_model_slice(m, "prompt_embeddings"), got, &e),
         &e);
    for (int i = 0; i < n * C; i++)
        if (!(fabs((double)got[i] - rows[i]) < 1e-6))
            fail_msg("row %d: %.9g, not %.9g", i / C, (double)got[i], rows[i]);
    lm_store_free(s);
    lm_model_free(m);
    lm_free(got);
}

/* Nine rows are more than one node joins. */
static void test_encoders(void **state)
{
    static const struct {
        const char *more;
        bool lstm;
        int layers, rows;
    } cases[] = { { "", false, 0, 3 },
                  { ",\"encoder_reparameterization_type\":\"LSTM\"", true, 2, 3 },
                  { ",\"encoder_reparameterization_type\":\"LSTM\",\"encoder_num_layers\":1", true,
                    1, 5 } };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        place_case p;
        char text[300];
        snprintf(text, sizeof text,
                 "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":%d,"
                 "\"encoder_hidden_size\":7%s}",
                 cases[i].rows, cases[i].more);
        begin(&p, LLAMA, text, LM_MODE_TRAIN, false);
        double *rows = rows_of(&p, cases[i].lstm, cases[i].layers, cases[i].rows, 7);
        near(text, run(&p, cases[i].rows), prompt_loss(rows, cases[i].rows));
        check_fold(&p, rows, cases[i].rows);
        lm_free(rows);
        end(&p);
    }
}

/* ---- tables and heads ---- */

/* The loss of the base with `w` in place of that tensor. */
static double base_loss(int model, const char *name, const double *w)
{
    place_case p;
    begin(&p, model, NULL, LM_MODE_EVAL, false);
    put_numbers(p.r.model, p.block, name, w);
    double loss = run(&p, 0);
    end(&p);
    return loss;
}

/* Each listed token has the row of its place in the list: of a head that is tied to it, too. */
static void check_tokens(int model, const char *table, const char *module, bool beside)
{
    static const int id[] = { 3, 0, 17, 8 };
    place_case p;
    char text[200], name[200];
    snprintf(text, sizeof text,
             beside ? "{\"peft_type\":\"LORA\",\"target_modules\":[\"%s\"],\"r\":1,"
                      "\"lora_alpha\":1e-9,\"trainable_token_indices\":[3,0,17,8]}"
                    : "{\"peft_type\":\"TRAINABLE_TOKENS\",\"token_indices\":[3,0,17,8]%.0s}",
             model == GPT2 ? "c_proj" : "o_proj");
    begin(&p, model, text, LM_MODE_TRAIN, false);
    snprintf(name, sizeof name, "base_model.model.%s.%strainable_tokens_delta", module,
             beside ? "token_adapter." : "");
    double *rows = needed(&p, name), *w = needed(&p, table);
    for (int i = 0; i < 4; i++)
        memcpy(w + id[i] * C, rows + i * C, C * sizeof *w);
    near(text, run(&p, 0), base_loss(model, table, w));
    lm_free(rows);
    lm_free(w);
    end(&p);
}

static void test_tokens(void **state)
{
    (void)state;
    for (int beside = 0; beside < 2; beside++) {
        check_tokens(GPT2, "transformer.wte.weight", "transformer.wte", beside);
        check_tokens(LLAMA, "model.embed_tokens.weight", "model.embed_tokens", beside);
        check_tokens(GEMMA2, "model.embed_tokens.weight", "model.embed_tokens", beside);
    }
}

/* LoRA of the table, where A^T has a row of each token, and of the head. */
static void check_matrix(const char *module, bool table)
{
    place_case p;
    char text[200], name[200];
    snprintf(text, sizeof text,
             "{\"peft_type\":\"LORA\",\"target_modules\":[\"%s\"],\"r\":3,\"lora_alpha\":5}",
             strrchr(module, '.') ? strrchr(module, '.') + 1 : module);
    begin(&p, LLAMA, text, LM_MODE_TRAIN, false);
    snprintf(name, sizeof name, "base_model.model.%s.lora_%s", module,
             table ? "embedding_A" : "A.weight");
    double *a = needed(&p, name);
    snprintf(name, sizeof name, "base_model.model.%s.lora_%s", module,
             table ? "embedding_B" : "B.weight");
    double *b = needed(&p, name);
    snprintf(name, sizeof name, "%s.weight", module);
    double *w = needed(&p, name);
    for (int v = 0; v < V; v++)
        for (int i = 0; i < C; i++)
            for (int k = 0; k < 3; k++)
                w[v * C + i] +=
                    5.0 / 3 * (table ? b[i * 3 + k] * a[v * 3 + k] : b[v * 3 + k] * a[k * C + i]);
    near(text, run(&p, 0), base_loss(LLAMA, name, w));
    lm_free(a);
    lm_free(b);
    lm_free(w);
    end(&p);
}

static void test_matrices(void **state)
{
    (void)state;
    check_matrix("model.embed_tokens", true);
    check_matrix("lm_head", false);
}

/* A rate that drops no input changes nothing, of DoRA with a bias, too. */
static void test_small_dropout(void **state)
{
    static const char *const targets[] = { "c_attn\",\"c_fc", "q_proj\",\"down_proj" };
    (void)state;
    for (int model = 0; model < N_MODELS; model++)
        for (int dora = 0; dora < 2; dora++) {
            double loss[2];
            for (int drops = 0; drops < 2; drops++) {
                place_case p;
                char text[300];
                snprintf(text, sizeof text,
                         "{\"peft_type\":\"LORA\",\"target_modules\":[\"%s\"],\"r\":3,"
                         "\"use_dora\":%s,\"lora_dropout\":%s}",
                         targets[model], dora ? "true" : "false", drops ? "1e-9" : "0");
                begin(&p, model, text, LM_MODE_TRAIN, drops);
                loss[drops] = run(&p, 0);
                end(&p);
            }
            near(dora ? "DoRA" : "LoRA", loss[1], loss[0]);
        }
}

/* No gradient flows through DoRA's lengths: that of A is the gradient of a plain LoRA whose rows, of
 * W and of B, are scaled by m / |W + s B A| once and for all. */
static void test_fixed_lengths(void **state)
{
    static const char plain[] = "{\"peft_type\":\"LORA\",\"target_modules\":[\"o_proj\"],\"r\":3,"
                                "\"lora_alpha\":5,\"use_dora\":%s}",
                      module[] = "model.layers.1.self_attn.o_proj",
                      file[] = "base_model.model.model.layers.%d.self_attn.o_proj.lora_%s";
    place_case dora, lora;
    char text[200], name[200];
    (void)state;
    snprintf(text, sizeof text, plain, "true");
    begin(&dora, LLAMA, text, LM_MODE_TRAIN, false);
    snprintf(text, sizeof text, plain, "false");
    begin(&lora, LLAMA, text, LM_MODE_TRAIN, false);
    for (int l = 0; l < LAYERS; l++) {
        snprintf(name, sizeof name, file, l, "A.weight");
        double *a = needed(&dora, name);
        snprintf(name, sizeof name, file, l, "magnitude_vector");
        double *m = needed(&dora, name);
        snprintf(name, sizeof name, file, l, "B.weight");
        double *b = needed(&dora, name);
        char base[100];
        snprintf(base, sizeof base, "model.layers.%d.self_attn.o_proj.weight", l);
        double *w = needed(&dora, base);
        for (int o = 0; o < C; o++) {
            double square = 0;
            for (int i = 0; i < C; i++) {
                double v = w[o * C + i];
                for (int k = 0; k < 3; k++)
                    v += 5.0 / 3 * b[o * 3 + k] * a[k * C + i];
                square += v * v;
            }
            for (int i = 0; i < C; i++)
                w[o * C + i] *= m[o] / sqrt(square);
            for (int k = 0; k < 3; k++)
                b[o * 3 + k] *= m[o] / sqrt(square);
        }
        put_numbers(lora.r.model, lora.block, base, w);
        put_numbers(lora.r.model, lora.block, name, b);
        lm_free(a);
        lm_free(b);
        lm_free(m);
        lm_free(w);
    }
    near("DoRA", run(&dora, 0), run(&lora, 0));
    snprintf(name, sizeof name, "base_model.model.%s.lora_A.weight", module);
    const int p = slice_param(dora.r.model, name), q = slice_param(lora.r.model, name);
    for (int k = 0; k < 3 * C; k++)
        if (!(fabs(grad_at(&dora.r, p, k) - grad_at(&lora.r, q, k)) <= 1e-5))
            fail_msg("gradient %d of A: %g, not %g", k, grad_at(&dora.r, p, k),
                     grad_at(&lora.r, q, k));
    end(&dora);
    end(&lora);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference),     cmocka_unit_test(test_bottlenecks),
        cmocka_unit_test(test_prefixes),      cmocka_unit_test(test_encoders),
        cmocka_unit_test(test_tokens),        cmocka_unit_test(test_matrices),
        cmocka_unit_test(test_small_dropout), cmocka_unit_test(test_fixed_lengths),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
