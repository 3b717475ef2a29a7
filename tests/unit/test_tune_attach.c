/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters in the graph: every method's gradients against finite differences, and its loss against that of the base
 * with the adapter merged; virtual tokens against rows that are written by hand. */
#include "attach_case.h"
#include "tune/apply.h"
#include "tune/join.h"

/* ---- runs ---- */

static double loss_at(runner *r, double *w, const double *kept, const double *d, int64_t n,
                      double h)
{
    for (int64_t i = 0; i < n; i++)
        w[i] = kept[i] + h * d[i];
    runner_run(r);
    return loss_sum(r);
}

/* d [n,k] - h h^T d, h [n,m] */
static void project_off(double *d, int64_t n, int64_t k, const double *h, int64_t m)
{
    double *c = room((size_t)(m * k), sizeof *c);
    for (int64_t i = 0; i < n; i++)
        for (int64_t a = 0; a < m; a++)
            for (int64_t j = 0; j < k; j++)
                c[a * k + j] += h[i * m + a] * d[i * k + j];
    for (int64_t i = 0; i < n; i++)
        for (int64_t a = 0; a < m; a++)
            for (int64_t j = 0; j < k; j++)
                d[i * k + j] -= h[i * m + a] * c[a * k + j];
    lm_free(c);
}

/* The parameter whose name is the first n characters of `name` and `part`. */
static const lm_value *param_of(const runner *r, const char *name, size_t n, const char *part)
{
    const lm_model *m = r->model;
    for (int p = 0; p < m->n_params; p++) {
        const lm_value *v = &m->graph->value[m->param[p].value];
        if (!strncmp(v->name, name, n) && !strcmp(v->name + n, part))
            return v;
    }
    fail_msg("%.*s%s is not a parameter", (int)n, name, part);
    return NULL;
}

/* d [in,n]: off the rows of h^T w, each as one of length 1. */
static void project_off_rows(double *d, int64_t n, const double *h, const double *w, int64_t out,
                             int64_t in, int64_t k)
{
    double *rows = room((size_t)(in * k), sizeof *rows);
    for (int64_t a = 0; a < k; a++) {
        double q = 0;
        for (int64_t j = 0; j < in; j++) {
            for (int64_t i = 0; i < out; i++)
                rows[j * k + a] += h[i * k + a] * w[i * in + j];
            q += rows[j * k + a] * rows[j * k + a];
        }
        for (int64_t j = 0; j < in; j++)
            rows[j * k + a] /= sqrt(q);
    }
    project_off(d, in, n, rows, k);
    lm_free(rows);
}

/* Where a rule projects the gradient of a parameter, no step along d shows it: one along the projection of d does, whose
 * matrix is symmetric.  OSF: U off the columns of H, V off the rows of H^T W. */
static void project(const runner *r, const char *name, double *d)
{
    const char *end = strstr(name, ".osf_svd_params."), *u = strstr(name, ".U_low"),
               *v = strstr(name, ".V_low");
    if (!end || (!u && !v))
        return;
    size_t n = (size_t)(end - name), root = sizeof "model." - 1;
    const lm_value *high = param_of(r, name, n, ".osf_U_high"),
                   *base = param_of(r, name + root, n - root, ".weight"),
                   *right = param_of(r, name, n, ".osf_svd_params.V_low");
    const double *h = r->mem[high - r->model->graph->value],
                 *w = r->mem[base - r->model->graph->value];
    int64_t out = high->t.dim[0], k = high->t.dim[1], rest = right->t.dim[0], in = right->t.dim[1];
    if (u) {
        project_off(d, out, rest, h, k);
        return;
    }
    double *turned = room((size_t)(in * rest), sizeof *turned);
    for (int64_t i = 0; i < rest * in; i++)
        turned[i % in * rest + i / in] = d[i];
    project_off_rows(turned, rest, h, w, out, in, k);
    for (int64_t i = 0; i < rest * in; i++)
        d[i] = turned[i % in * rest + i / in];
    lm_free(turned);
}

static void check_param(runner *r, int p, const char *what)
{
    const lm_param *param = &r->model->param[p];
    int64_t n = param->count;
    double *w = r->mem[param->value], *kept = room((size_t)n, sizeof *w),
           *d = room((size_t)n, sizeof *d);
    double got = 0, norm = 0, h = 1e-5;
    lm_rng rng = lm_rng_make(2, "direction", (uint64_t)p);
    runner_run(r);
    for (int64_t i = 0; i < n; i++) {
        kept[i] = w[i];
        d[i] = lm_rng_normal(rng, (uint64_t)i);
        got += grad_at(r, p, i) * d[i];
        norm += grad_at(r, p, i) * grad_at(r, p, i);
    }
    project(r, r->model->graph->value[param->value].name, d);
    double want = (8 * (loss_at(r, w, kept, d, n, h) - loss_at(r, w, kept, d, n, -h)) -
                   (loss_at(r, w, kept, d, n, 2 * h) - loss_at(r, w, kept, d, n, -2 * h))) /
                  (12 * h);
    loss_at(r, w, kept, d, n, 0);
    if (!(fabs(got - want) <= 1e-5 * (fabs(want) + sqrt(norm)) + 1e-8))
        fail_msg("%s, %s: gradient %.12g, finite differences %.12g", what,
                 r->model->graph->value[param->value].name, got, want);
    lm_free(kept);
    lm_free(d);
}

/* Gradients of all that trains; the number of those parameters. */
static int check_gradients(runner *r, const char *what)
{
    int n = 0;
    for (int p = 0; p < r->model->n_params; p++) {
        const char *name = r->model->graph->value[r->model->param[p].value].name;
        if (!r->model->param[p].trains)
            continue;
        /* Through the lengths of DoRA's rows no gradient flows. */
        if (strstr(what, "use_dora") && !strstr(name, "magnitude"))
            continue;
        check_param(r, p, what);
        n++;
    }
    return n;
}

/* ---- merged ---- */

/* False: it would need a bias that the base does not have. */
static bool merge_module(const lm_attach *a, const lm_tune_module *t, const lm_model *m,
                         const float *block, const lm_model *plain, float *merged)
{
    static lm_tune_tensor tensor[LM_TUNE_TENSORS];
    lm_err e = { 0 };
    lm_tune_loaded l = { .method = lm_attach_method(a), .m = *t, .tensor = tensor };
    char name[300], bias[300];
    bool any = false;
    must(l.method->tensors(t, tensor, &l.n, &e), &e);
    for (int i = 0; i < l.n; i++) {
        l.ids[i] = t->ids ? (int64_t *)(uintptr_t)t->ids[i] : NULL;
        if (tensor[i].ids)
            continue;
        snprintf(name, sizeof name, tensor[i].shared ? "base_model.%s%s" : "base_model.model.%s.%s",
                 tensor[i].shared ? "" : t->name, tensor[i].suffix);
        l.v[i] = tensor[i].off ? NULL : numbers_of(m, block, name);
        l.given[i] = l.v[i] != NULL;
    }
    snprintf(name, sizeof name, "%s.weight", t->name);
    snprintf(bias, sizeof bias, "%s.bias", t->name);
    double *w = numbers_of(plain, merged, name), *b = numbers_of(plain, merged, bias);
    double *changed = room((size_t)t->out, sizeof *changed);
    if (l.method->bias) {
        must(lm_tune_bias(&l, w, b, changed, &any, NULL, &e), &e);
        if (b)
            put_numbers(plain, merged, bias, changed);
    }
    bool fits = b || !any;
    must(lm_tune_weight(&l, w, w, NULL, &e), &e);
    put_numbers(plain, merged, name, w);
    for (int i = 0; i < l.n; i++)
        lm_free(l.v[i]);
    lm_free(w);
    lm_free(b);
    lm_free(changed);
    return fits;
}

/* NAN: it does not fit. */
static double merged_loss(const tiny *t, const lm_attach *a, const lm_model *m, const float *block)
{
    runner r;
    lm_build b = build_of(LM_MODE_EVAL, NULL);
    runner_new(&r, &t->config, &b, LM_CPU_REF, 1);
    float *merged = random_block(r.model);
    bool fits = true;
    for (size_t i = 0; i < lm_attach_modules(a); i++)
        fits &= merge_module(a, lm_attach_module(a, i), m, block, r.model, merged);
    runner_weights(&r, merged);
    feed(&r, 0);
    runner_run(&r);
    double loss = fits ? loss_sum(&r) : (double)NAN;
    lm_free(merged);
    runner_free(&r);
    return loss;
}

/* ---- tests ---- */

/* Indices, none twice: of SHIRA rows, then columns; of UNILORA numbers of theta; of SUPERTUNING places. */
static void make_ids(lm_attach *a)
{
    static lm_tune_tensor tensor[LM_TUNE_TENSORS];
    lm_err e = { 0 };
    for (size_t i = 0; lm_attach_has_ids(a) && i < lm_attach_modules(a); i++) {
        const lm_tune_module *m = lm_attach_module(a, i);
        int n = 0;
        must(lm_attach_method(a)->tensors(m, tensor, &n, &e), &e);
        for (int k = 0; k < n; k++) {
            int64_t *out, count = tensor[k].dim[0] * (tensor[k].ndim > 1 ? tensor[k].dim[1] : 1);
            if (!tensor[k].ids)
                continue;
            must(lm_attach_make_ids(a, i, k, count, &out, &e), &e);
            for (int64_t j = 0; j < count; j++) {
                int64_t at = j % (count / 2 + 1) * 7 % (m->in * m->out);
                out[j] = !strcmp(lm_attach_method(a)->name, "unilora")       ? j * 5 % 12
                         : !strcmp(lm_attach_method(a)->name, "supertuning") ? j * 3
                         : j < count / 2                                     ? at / m->in
                                                                             : -1;
                if (out[j] < 0)
                    out[j] = (j - count / 2) * 7 % (m->in * m->out) % m->in;
            }
        }
    }
}

/* Trains, runs as merged, and has other gradients where the adapter sits. */
static void check_adapter(int model, const char *text, bool merges)
{
    lm_err e = { 0 };
    tiny t;
    runner r;
    lm_attach *a = NULL;
    json_t *o = adapter_of(text);
    tiny_begin(&t, model);
    must(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), &e);
    make_ids(a);
    lm_build b = build_of(LM_MODE_TRAIN, a);
    b.dropout = !merges;
    runner_new(&r, &t.config, &b, LM_CPU_REF, 1);
    float *block = random_block(r.model);
    runner_weights(&r, block);
    feed(&r, lm_attach_virtual(a));
    assert_true(check_gradients(&r, text) > 0);
    if (merges) {
        runner_run(&r);
        double got = loss_sum(&r), want = merged_loss(&t, a, r.model, block);
        if (!isnan(want) && !(fabs(got - want) <= 2e-6 * fabs(want)))
            fail_msg("%s, model %d: loss %.12g, merged %.12g", text, model, got, want);
    }
    lm_free(block);
    runner_free(&r);
    lm_attach_free(a);
    json_decref(o);
    tiny_end(&t);
}

#define ALL "\"target_modules\":\"all-linear\","
static const char *const methods[] = {
    "{\"peft_type\":\"LORA\"," ALL "\"r\":3,\"lora_alpha\":5}",
    "{\"peft_type\":\"LORA\",\"target_modules\":[\"q_proj\",\"v_proj\",\"c_attn\",\"down_proj\"],"
    "\"r\":3,\"lora_alpha\":5,\"use_rslora\":true,\"rank_pattern\":{\"v_proj\":2}}",
    "{\"peft_type\":\"LORA\",\"target_modules\":[\"q_proj\",\"k_proj\",\"v_proj\",\"c_attn\"],"
    "\"r\":3,\"lora_alpha\":5,\"alpha_pattern\":{\"v_proj\":9}}",
    "{\"peft_type\":\"LORA\"," ALL "\"r\":3,\"lora_alpha\":5,\"use_dora\":true}",
    "{\"peft_type\":\"IA3\",\"target_modules\":[\"k_proj\",\"v_proj\",\"down_proj\",\"c_attn\","
    "\"mlp.c_proj\"],\"feedforward_modules\":[\"down_proj\",\"mlp.c_proj\"]}",
    "{\"peft_type\":\"ADALORA\"," ALL "\"init_r\":3,\"r\":3,\"lora_alpha\":5}",
    "{\"peft_type\":\"LOHA\"," ALL "\"r\":3,\"alpha\":5}",
    "{\"peft_type\":\"LOKR\"," ALL "\"r\":3,\"alpha\":5}",
    "{\"peft_type\":\"OFT\"," ALL "\"r\":0,\"oft_block_size\":4}",
    "{\"peft_type\":\"BOFT\"," ALL "\"boft_block_size\":4,\"boft_n_butterfly_factor\":1}",
    "{\"peft_type\":\"HRA\"," ALL "\"r\":4}",
    "{\"peft_type\":\"ROAD\"," ALL "\"group_size\":8}",
    "{\"peft_type\":\"DELORA\"," ALL "\"r\":3}",
    "{\"peft_type\":\"GRALORA\"," ALL "\"r\":4,\"gralora_k\":2}",
    "{\"peft_type\":\"GLORA\"," ALL "\"r\":3}",
    "{\"peft_type\":\"HIRA\"," ALL "\"r\":3}",
    "{\"peft_type\":\"MISS\"," ALL "\"r\":4}",
    "{\"peft_type\":\"PEANUT\"," ALL "\"r\":3}",
    "{\"peft_type\":\"VERA\"," ALL "\"r\":3}",
    /* the last module is not the widest */
    "{\"peft_type\":\"VERA\",\"target_modules\":\".*(layers.0.mlp.down_proj|layers.1.self_attn.q_"
    "proj|"
    "h.0.mlp.c_proj|h.1.attn.c_proj)\",\"r\":3}",
    "{\"peft_type\":\"RANDLORA\"," ALL "\"r\":3}",
    "{\"peft_type\":\"TINYLORA\"," ALL "\"r\":2}",
    "{\"peft_type\":\"C3A\"," ALL "\"block_size\":4}",
    "{\"peft_type\":\"DEFT\"," ALL "\"r\":3}",
    "{\"peft_type\":\"PVERA\"," ALL "\"r\":3}",
    "{\"peft_type\":\"BEFT\"," ALL "\"r\":3}",
    "{\"peft_type\":\"FOURIERFT\"," ALL "\"n_frequency\":20}",
    "{\"peft_type\":\"WAVEFT\"," ALL "\"n_frequency\":20}",
    "{\"peft_type\":\"SHIRA\"," ALL "\"r\":2}",
    "{\"peft_type\":\"SUPERTUNING\"," ALL "\"sparsity\":0.9,\"r\":2,\"lora_alpha\":3}",
    "{\"peft_type\":\"UNILORA\"," ALL "\"r\":2,\"theta_d_length\":12}",
    "{\"peft_type\":\"VBLORA\"," ALL "\"r\":2,\"num_vectors\":5,\"vector_length\":4,\"topk\":2}",
    "{\"peft_type\":\"OSF\",\"target_modules\":[\"o_proj\",\"down_proj\"],\"effective_rank\":3}",
};

static void test_methods(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        for (int model = strstr(methods[i], "OSF") != NULL; model < N_MODELS; model++)
            check_adapter(model, methods[i], true);
}

/* A second graph has shared tensors of its own. */
static void test_built_twice(void **state)
{
    lm_err e = { 0 };
    tiny t;
    runner r[2];
    lm_attach *a = NULL;
    json_t *o = adapter_of("{\"peft_type\":\"VERA\"," ALL "\"r\":3}");
    double loss[2];
    (void)state;
    tiny_begin(&t, 1);
    must(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), &e);
    for (int i = 0; i < 2; i++) {
        lm_build b = build_of(i ? LM_MODE_EVAL : LM_MODE_TRAIN, a);
        runner_new(&r[i], &t.config, &b, LM_CPU_REF, 1);
        float *block = random_block(r[i].model);
        runner_weights(&r[i], block);
        feed(&r[i], 0);
        runner_run(&r[i]);
        loss[i] = loss_sum(&r[i]);
        lm_free(block);
    }
    assert_true(fabs(loss[0] - loss[1]) <= 1e-12 * fabs(loss[0]));
    runner_free(&r[0]);
    runner_free(&r[1]);
    lm_attach_free(a);
    json_decref(o);
    tiny_end(&t);
}

/* Graphs that are built and freed one after another: each has the tensors, constants and nodes of the first, also where its
 * model has the address of one that was freed. */
static void check_rebuilt(const lm_config *c, const lm_build *b, const char *what)
{
    lm_err e = { 0 };
    int slices = 0, constants = 0, again = 0;
    size_t nodes = 0;
    uintptr_t last = 0;
    for (int i = 0; i < 16; i++) {
        lm_model *m = NULL;
        must(lm_model_build(c, b, &m, &e), &e);
        if (i &&
            (m->n_slices != slices || m->n_constants != constants || m->graph->n_nodes != nodes))
            fail_msg("%s, graph %d: %d tensors, %d constants, %zu nodes, not %d, %d, %zu", what, i,
                     m->n_slices, m->n_constants, m->graph->n_nodes, slices, constants, nodes);
        slices = m->n_slices;
        constants = m->n_constants;
        nodes = m->graph->n_nodes;
        again += last == (uintptr_t)m;
        last = (uintptr_t)m;
        lm_model_free(m);
    }
    if (!again)
        print_message("%s: no address came twice in a row, as with a sanitizer\n", what);
}

/* Values that graphs of an adapter share are those of the graph that is built: tensors, rows of a prompt, and the masks of
 * several adapters. */
static void test_built_after_one_was_freed(void **state)
{
    static const char *const text[] = {
        "{\"peft_type\":\"VERA\"," ALL "\"r\":3}",
        "{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":3}",
        "{\"peft_type\":\"LORA\"," ALL "\"r\":3}",
        "{\"peft_type\":\"LORA\"," ALL "\"r\":2}",
    };
    enum { N = sizeof text / sizeof *text };
    lm_err e = { 0 };
    tiny t;
    lm_attach *a[N];
    lm_join *join = NULL;
    json_t *o[N];
    (void)state;
    tiny_begin(&t, LLAMA);
    for (int i = 0; i < N; i++) {
        o[i] = adapter_of(text[i]);
        must(lm_attach_new(&t.bases, &t.config, o[i], "adapter", &a[i], &e), &e);
        lm_build b = build_of(LM_MODE_TRAIN, a[i]);
        check_rebuilt(&t.config, &b, text[i]);
    }
    must(lm_join_new(a + N - 2, (const lm_st *const[]){ NULL, NULL }, 2, &join, &e), &e);
    lm_build b = build_of(LM_MODE_GENERATE, NULL);
    b.adapt = lm_join_adapter(join)->adapt;
    b.chosen = true;
    check_rebuilt(&t.config, &b, "two adapters");
    lm_join_free(join);
    for (int i = 0; i < N; i++) {
        lm_attach_free(a[i]);
        json_decref(o[i]);
    }
    tiny_end(&t);
}

/* Inputs of paths are dropped: those of AdaLoRA and of DoRA, whose product is scaled beside. */
static void test_dropped(void **state)
{
    (void)state;
    for (int model = 0; model < N_MODELS; model++) {
        check_adapter(model, "{\"peft_type\":\"ADALORA\"," ALL "\"init_r\":3,\"lora_dropout\":0.4}",
                      false);
        check_adapter(
            model, "{\"peft_type\":\"LORA\"," ALL "\"r\":3,\"use_dora\":true,\"lora_dropout\":0.4}",
            false);
    }
}

/* The loss of an adapter whose numbers named *.PART are 0, in a graph that trains, with or without draws. */
static double drawn_loss(const char *text, const char *part, bool draws)
{
    lm_err e = { 0 };
    tiny t;
    runner r;
    lm_attach *a = NULL;
    json_t *o = adapter_of(text);
    tiny_begin(&t, 1);
    must(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), &e);
    lm_build b = build_of(LM_MODE_TRAIN, a);
    b.dropout = draws;
    runner_new(&r, &t.config, &b, LM_CPU_REF, 1);
    float *block = random_block(r.model);
    for (int i = 0; i < r.model->n_slices; i++) {
        const lm_slice *s = &r.model->slice[i];
        char saved[512];
        const char *name = lm_model_saved(r.model, i, saved);
        if (!strstr(name, part))
            continue;
        double *zero = room((size_t)lm_slice_count(s), sizeof *zero);
        put_numbers(r.model, block, name, zero);
        lm_free(zero);
    }
    runner_weights(&r, block);
    feed(&r, 0);
    runner_run(&r);
    double loss = loss_sum(&r);
    lm_free(block);
    runner_free(&r);
    lm_attach_free(a);
    json_decref(o);
    tiny_end(&t);
    return loss;
}

/* PVeRA's noise: gradients flow through its deviation; it passes through the outer scales, and only training draws it. */
static void test_noise(void **state)
{
    static const char text[] = "{\"peft_type\":\"PVERA\"," ALL "\"r\":3}";
    (void)state;
    for (int model = 0; model < N_MODELS; model++)
        check_adapter(model, text, false);
    assert_true(drawn_loss(text, "pvera_lambda_b", true) ==
                drawn_loss(text, "pvera_lambda_b", false));
    double noisy = drawn_loss(text, "pvera_lambda_d", true), /* of deviation 1 */
        plain = drawn_loss(text, "pvera_lambda_d", false);
    assert_true(fabs(noisy - plain) > 1e-3 * plain);
    /* no change of the weights: the mean is 0, too */
    assert_float_equal(plain, drawn_loss(text, "pvera_lambda_b", false), 1e-9 * plain);
}

/* A row of W + s B A without length: DoRA's numbers and gradients are finite. */
static void test_zero_row(void **state)
{
    lm_err e = { 0 };
    tiny t;
    runner r;
    lm_attach *a = NULL;
    json_t *o = adapter_of("{\"peft_type\":\"LORA\",\"target_modules\":[\"o_proj\"],\"r\":3,"
                           "\"use_dora\":true}");
    (void)state;
    tiny_begin(&t, 1);
    must(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), &e);
    lm_build b = build_of(LM_MODE_TRAIN, a);
    runner_new(&r, &t.config, &b, LM_CPU_REF, 1);
    float *block = random_block(r.model);
    for (int i = 0; i < r.model->n_slices; i++) {
        const lm_slice *s = &r.model->slice[i];
        const lm_param *p = &r.model->param[s->param];
        bool is = strstr(s->name, "o_proj.weight") || strstr(s->name, "o_proj.lora_B");
        for (int64_t k = 0; is && k < p->count / s->rows; k++)
            block[p->offset + k] = 0; /* row 0 */
    }
    runner_weights(&r, block);
    feed(&r, 0);
    runner_run(&r);
    assert_true(isfinite(loss_sum(&r)));
    for (int p = 0; p < r.model->n_params; p++)
        for (int64_t k = 0; r.model->param[p].trains && k < r.model->param[p].count; k++)
            assert_true(isfinite(grad_at(&r, p, k)));
    lm_free(block);
    runner_free(&r);
    lm_attach_free(a);
    json_decref(o);
    tiny_end(&t);
}

/* An embedding has an adapter of its own; tensors of the base train beside. */
static void test_beside(void **state)
{
    (void)state;
    check_adapter(0,
                  "{\"peft_type\":\"LORA\",\"target_modules\":[\"wte\",\"c_fc\"],\"r\":2,"
                  "\"bias\":\"all\",\"modules_to_save\":[\"ln_f\"]}",
                  false);
    check_adapter(1,
                  "{\"peft_type\":\"LORA\",\"target_modules\":[\"embed_tokens\",\"o_proj\"],"
                  "\"r\":2,\"modules_to_save\":[\"lm_head\"]}",
                  false);
    for (int model = 0; model < N_MODELS; model++) { /* tied, and not */
        check_adapter(model, "{\"peft_type\":\"TRAINABLE_TOKENS\",\"token_indices\":[3,0,17,8]}",
                      false);
        check_adapter(model,
                      "{\"peft_type\":\"LORA\",\"target_modules\":[\"o_proj\",\"c_fc\"],"
                      "\"r\":2,\"trainable_token_indices\":[5,7]}",
                      false);
    }
    check_adapter(1,
                  "{\"peft_type\":\"LN_TUNING\",\"target_modules\":[\"input_layernorm\",\"norm\"]}",
                  false);
}

static void test_virtual_gradients(void **state)
{
    (void)state;
    for (int model = 0; model < N_MODELS; model++) {
        check_adapter(model, "{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":2}", false);
        check_adapter(model,
                      "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":3,"
                      "\"encoder_hidden_size\":5}",
                      false);
        check_adapter(model,
                      "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":3,"
                      "\"encoder_hidden_size\":5,\"encoder_reparameterization_type\":\"LSTM\"}",
                      false);
        check_adapter(model, "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2}", false);
        check_adapter(model,
                      "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2,"
                      "\"prefix_projection\":true,\"encoder_hidden_size\":5}",
                      false);
    }
}

static void test_bottleneck_gradients(void **state)
{
    static const char *const functions[] = { "relu", "gelu", "gelu_new", "swish" };
    char text[300];
    (void)state;
    for (int i = 0; i < 4; i++) {
        snprintf(text, sizeof text,
                 "{\"name\":\"a\",\"config\":{\"mh_adapter\":%s,\"output_adapter\":true,"
                 "\"reduction_factor\":4,\"non_linearity\":\"%s\",\"original_ln_before\":%s,"
                 "\"scaling\":%s}}",
                 i % 2 ? "true" : "false", functions[i], i < 2 ? "true" : "false",
                 i ? "1.0" : "0.5");
        check_adapter(i % 2, text, false);
    }
}

#define NECK(more)                                                             \
    "{\"name\":\"a\",\"config\":{\"mh_adapter\":true,\"output_adapter\":true," \
    "\"reduction_factor\":4,\"non_linearity\":\"gelu\",\"original_ln_before\":true" more "}}"

/* Both stacks have bottlenecks, the decoder's attention to the encoder if that is asked for; prompts are the encoder's,
 * prefixes the decoder's, and PEFT's order of pairs leaves some out. */
static void test_stacks(void **state)
{
    static const char prefix[] = "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2,"
                                 "\"num_layers\":3,\"num_transformer_submodules\":2}";
    enum { WIDTH = 2 * 16, PAIRS = 3 };
    lm_err e = { 0 };
    tiny t;
    runner r;
    lm_attach *a = NULL;
    (void)state;
    check_adapter(T5, "{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":2}", false);
    check_adapter(T5,
                  "{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":2,\"encoder_hidden_size\":5,"
                  "\"encoder_reparameterization_type\":\"LSTM\",\"num_transformer_submodules\":2}",
                  false);
    check_adapter(T5, prefix, false);
    check_adapter(T5, NECK(""), false);
    check_adapter(T5, NECK(",\"cross_adapter\":true"), false);
    json_t *o = adapter_of(prefix);
    tiny_begin(&t, T5);
    must(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), &e);
    lm_build b = build_of(LM_MODE_TRAIN, a);
    runner_new(&r, &t.config, &b, LM_CPU_REF, 1);
    float *block = random_block(r.model);
    runner_weights(&r, block);
    feed(&r, 2);
    runner_run(&r);
    const int p = r.model->slice[lm_model_slice(r.model, "prompt_embeddings")].param;
    assert_int_equal(r.model->param[p].count, 2 * PAIRS * WIDTH);
    for (int pair = 0; pair < PAIRS; pair++) { /* layers 0 and 1 have pairs 0 and 2 of 3 */
        double sum = 0;
        for (int row = 0; row < 2; row++)
            for (int i = 0; i < WIDTH; i++)
                sum += fabs(grad_at(&r, p, (row * PAIRS + pair) * WIDTH + i));
        assert_true((sum > 0) == (pair != 1));
    }
    lm_free(block);
    runner_free(&r);
    lm_attach_free(a);
    json_decref(o);
    tiny_end(&t);
}

/* Virtual tokens with the embeddings of real ones change nothing. */
static void test_prompt_is_rows(void **state)
{
    static const char *const tables[] = { "transformer.wte.weight", "model.embed_tokens.weight",
                                          "model.embed_tokens.weight", "shared.weight" };
    lm_err e = { 0 };
    tiny t;
    (void)state;
    for (int model = 0; model <= T5; model++) {
        if (model == GEMMA2)
            continue;
        runner r, plain;
        lm_attach *a = NULL;
        json_t *o = adapter_of("{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":2}");
        tiny_begin(&t, model);
        must(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), &e);
        lm_build b = build_of(LM_MODE_EVAL, a), without = build_of(LM_MODE_EVAL, NULL);
        runner_new(&r, &t.config, &b, LM_CPU_REF, 1);
        runner_new(&plain, &t.config, &without, LM_CPU_REF, 1);
        float *block = random_block(r.model), *base = random_block(plain.model);
        double *rows = numbers_of(plain.model, base, tables[model]);
        put_numbers(r.model, block, "prompt_embeddings", rows + 7 * 16); /* of tokens 7 and 8 */
        lm_free(rows);
        runner_weights(&r, block);
        runner_weights(&plain, base);
        feed(&r, 2);
        feed(&plain, 2);
        const lm_vid ids = model == T5 ? plain.model->source : plain.model->tokens;
        for (int i = 0; i < BATCH * SEQ; i++)
            if (ids_of(&plain, ids)[i] >= 23)
                ids_of(&plain, ids)[i] += 7 - 23;
        runner_run(&r);
        runner_run(&plain);
        assert_true(fabs(loss_sum(&r) - loss_sum(&plain)) < 1e-12);
        lm_free(block);
        lm_free(base);
        runner_free(&r);
        runner_free(&plain);
        lm_attach_free(a);
        json_decref(o);
        tiny_end(&t);
    }
}

static void check_refused_by(int model, const char *text, const char *part)
{
    lm_err e = { 0 };
    tiny t;
    lm_attach *a = NULL;
    json_t *o = adapter_of(text);
    tiny_begin(&t, model);
    assert_int_not_equal(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), LM_OK);
    if (!strstr(e.what, part))
        fail_msg("'%s' is not in '%s'", part, e.what);
    assert_null(a);
    json_decref(o);
    tiny_end(&t);
}

static void check_refused(const char *text, const char *part)
{
    check_refused_by(LLAMA, text, part);
}

static void test_refusals(void **state)
{
    (void)state;
    check_refused(NECK(",\"cross_adapter\":true"), "cross_adapter");
    check_refused("{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":2,"
                  "\"task_type\":\"SEQ_2_SEQ_LM\"}",
                  "is 2, but the base has one stack");
    check_refused_by(T5,
                     "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2,"
                     "\"num_transformer_submodules\":1}",
                     "is 1, and prefixes");
    check_refused_by(T5,
                     "{\"peft_type\":\"PREFIX_TUNING\",\"num_virtual_tokens\":2,"
                     "\"num_transformer_submodules\":2,\"num_layers\":1}",
                     "num_layers is 1, but the base has 2");
    check_refused("{\"peft_type\":\"NONE\"}", "not known");
    check_refused("{\"peft_type\":\"TRAINABLE_TOKENS\",\"token_indices\":[3,23]}", "not a token");
    check_refused("{\"peft_type\":\"TRAINABLE_TOKENS\",\"token_indices\":[3,3]}", "twice");
    check_refused("{\"peft_type\":\"TRAINABLE_TOKENS\"}", "no tokens");
    check_refused("{\"peft_type\":\"LORA\",\"target_modules\":[\"q_proj\"],"
                  "\"trainable_token_indices\":{\"lm_head\":[3]}}",
                  "names 'lm_head'");
    check_refused("{\"peft_type\":\"LORA\",\"target_modules\":[\"q_proj\",\"embed_tokens\"],"
                  "\"trainable_token_indices\":[3]}",
                  "rows of its own");
    check_refused("{}", "peft_type");
    check_refused("{\"peft_type\":\"BEFT\",\"target_modules\":[\"lm_head\"]}",
                  "no form on the head 'lm_head'");
    check_refused("{\"peft_type\":\"LORA\",\"target_modules\":[\"q_prj\"]}", "q_prj");
    check_refused("{\"peft_type\":\"PROMPT_TUNING\"}", "num_virtual_tokens");
    check_refused("{\"peft_type\":\"PROMPT_TUNING\",\"num_virtual_tokens\":2,\"token_dim\":8}",
                  "token_dim");
    check_refused("{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":2,"
                  "\"encoder_reparameterization_type\":\"GRU\"}",
                  "GRU");
    check_refused("{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":2,\"encoder_dropout\":0.1,"
                  "\"encoder_reparameterization_type\":\"LSTM\"}",
                  "encoder_dropout");
    check_refused("{\"peft_type\":\"P_TUNING\",\"num_virtual_tokens\":513,"
                  "\"encoder_reparameterization_type\":\"LSTM\"}",
                  "512 are possible");
    check_refused("{\"name\":\"a\",\"config\":{\"mh_adapter\":true,\"reduction_factor\":4,"
                  "\"non_linearity\":\"relu\",\"dropout\":0.1}}",
                  "dropout");
    check_refused("{\"name\":\"a\",\"config\":{\"mh_adapter\":true,\"reduction_factor\":4,"
                  "\"non_linearity\":\"relu\",\"residual_before_ln\":\"post_add\"}}",
                  "residual_before_ln");
    check_refused("{\"name\":\"a\",\"config\":{\"mh_adapter\":true,\"reduction_factor\":4,"
                  "\"non_linearity\":\"sine\"}}",
                  "sine");
}

/* A dropout that would not be is refused where it would be. */
static void test_dropout(void **state)
{
    lm_err e = { 0 };
    tiny t;
    lm_attach *a = NULL;
    lm_model *m = NULL;
    json_t *o = adapter_of("{\"peft_type\":\"VERA\",\"target_modules\":\"all-linear\","
                           "\"r\":2,\"vera_dropout\":0.1}");
    (void)state;
    tiny_begin(&t, 1);
    must(lm_attach_new(&t.bases, &t.config, o, "adapter", &a, &e), &e);
    lm_build b = build_of(LM_MODE_TRAIN, a);
    b.dropout = true;
    assert_int_equal(lm_model_build(&t.config, &b, &m, &e), LM_EUSAGE);
    assert_string_equal(e.where, "vera_dropout");
    e = (lm_err){ 0 };
    b.mode = LM_MODE_EVAL;
    must(lm_model_build(&t.config, &b, &m, &e), &e);
    lm_model_free(m);
    lm_attach_free(a);
    json_decref(o);
    tiny_end(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_methods),
        cmocka_unit_test(test_beside),
        cmocka_unit_test(test_built_twice),
        cmocka_unit_test(test_built_after_one_was_freed),
        cmocka_unit_test(test_virtual_gradients),
        cmocka_unit_test(test_bottleneck_gradients),
        cmocka_unit_test(test_stacks),
        cmocka_unit_test(test_prompt_is_rows),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_dropped),
        cmocka_unit_test(test_noise),
        cmocka_unit_test(test_zero_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
