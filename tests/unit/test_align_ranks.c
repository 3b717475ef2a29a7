/* SPDX-License-Identifier: Apache-2.0 */
/* test_align_ranks.c -- training on preferences by ranks that are threads: weights, states and losses have the bits of one rank
 * with the same leaves, on given answers and on sampled completions, also where a leaf or a rank has no micro-batch. */
#include <math.h>
#include <stdio.h>

#include "train_case.h"

#include "comm/threads.h"
#include "train/trainer_impl.h"
#include "tune/align/offline.h"
#include "tune/align/on_policy.h"
#include "tune/align/sums.h"

enum { PROMPTS = 6, GROUP = 4, NEW = 5, STEPS = 4, EOS = 36 };

static const char judge_text[] =
    "{\"architectures\":[\"LlamaForSequenceClassification\"],\"num_labels\":1,\"pad_token_id\":40,"
    "\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":48,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","
    "\"tie_word_embeddings\":false,\"initializer_range\":0.02,\"rope_theta\":10000.0}";

static lm_backend *backend;
static tiny_model plain, judge;
static lm_tokenizer *tok;
static lm_text_answers *pairs;
static uint32_t ids[PROMPTS][3];
static lm_on_policy_prompt prompts[PROMPTS];

/* Ids of "a".."z" are 0.., those of "0".."9" follow. */
static lm_tokenizer *letters(void)
{
    lm_err e = { 0 };
    lm_tokenizer *out = NULL;
    lm_buf json = { 0 };
    ok(lm_buf_addf(&json, &e,
                   "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
                   "\"decoder\":{\"type\":\"ByteLevel\"},"
                   "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{"),
       &e);
    for (int i = 0; i < 36; i++)
        ok(lm_buf_addf(&json, &e, "%s\"%c\":%d", i ? "," : "", i < 26 ? 'a' + i : '0' + i - 26, i),
           &e);
    ok(lm_buf_addf(&json, &e, "}}}"), &e);
    ok(lm_tokenizer_from_json(json.data, json.len, NULL, 0, "test", &out, &e), &e);
    lm_buf_fini(&json);
    return out;
}

static void read_pairs(void)
{
    lm_err e = { 0 };
    char *path = path_of("pairs.jsonl");
    const char *name = path;
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 7; i++)
        fprintf(f, "{\"prompt\":\"q%d\",\"chosen\":\"yes%d\",\"rejected\":\"%.*s\"}\n", i, i,
                1 + i % 3, "no7");
    fclose(f);
    const lm_text_answers_opts read = {
        .path = &name, .n = 1, .maker = { .tok = tok, .eos = EOS }, .pairs = true
    };
    ok(lm_text_answers_read(&read, NULL, &pairs, &e), &e);
    lm_free(path);
}

static int begin(void **state)
{
    lm_err e = { 0 };
    (void)state;
    train_begin();
    ok(lm_backend_cpu(lm_cpu_detect(), par, &backend, &e), &e);
    tiny_model_make(&plain, llama_text, "plain");
    tiny_model_make(&judge, judge_text, "judge");
    tok = letters();
    read_pairs();
    for (uint32_t i = 0; i < PROMPTS; i++) {
        ids[i][0] = 1 + i % 3;
        ids[i][1] = i;
        ids[i][2] = 20 + i;
        prompts[i] = (lm_on_policy_prompt){ ids[i], 2 + i % 2, "prompt", 6, NULL, NULL };
    }
    return 0;
}

static int end(void **state)
{
    (void)state;
    lm_text_answers_free(pairs);
    lm_tokenizer_free(tok);
    tiny_model_fini(&plain);
    tiny_model_fini(&judge);
    lm_backend_close(backend);
    return train_end();
}

/* ---- runs ---- */

typedef struct {
    const char *loss, *reward; /* reward NULL: of given answers */
    int64_t batch, each;       /* windows of a micro-batch; records of a step */
    int64_t updates, iterations, tries;
    double rate;
} ask;

/* What remains of a run: weights and states one behind another, and numbers. */
typedef struct {
    lm_train_result r;
    char *data;
    size_t bytes;
} outcome;

static void keep(outcome *x, const lm_store *s, lm_kept role)
{
    lm_err e = { 0 };
    const lm_store_block *k;
    for (int i = 0; (k = lm_store_find(s, role, i)); i++) {
        ok(lm_realloc_n(&x->data, x->bytes + k->bytes, 1, "test", &e), &e);
        memcpy(x->data + x->bytes, k->data, k->bytes);
        x->bytes += k->bytes;
    }
}

static const int64_t eos = EOS;

static lm_on_policy_opts policy_opts(const ask *a, const lm_align_spec *spec, lm_reward_set *reward)
{
    return (lm_on_policy_opts){ .loss = spec,
                                .reward = reward,
                                .prompt = prompts,
                                .val = prompts,
                                .n_prompts = PROMPTS,
                                .n_val = 3,
                                .prompts = a->each,
                                .group = GROUP,
                                .updates = a->updates ? a->updates : 1,
                                .iterations = a->iterations ? a->iterations : 1,
                                .advantage = { .eps = 1e-4 },
                                .correct = LM_CORRECT_TOKEN_TRUNCATE,
                                .correct_most = 3,
                                .gamma = 0.9,
                                .lambda = 0.8,
                                .best = 2,
                                .least = -INFINITY,
                                .tries = a->tries,
                                .rollout = { .most_prompt = 3,
                                             .most_new = NEW,
                                             .sample = { 1, 0, 1, 0, 1 },
                                             .eos = &eos,
                                             .n_eos = 1,
                                             .seed = 2 },
                                .tokenizer = tok,
                                .seed = 2 };
}

static lm_trainer_opts trainer_opts(const ask *a, int ranks, int64_t leaves)
{
    return (lm_trainer_opts){ .batch = a->batch,
                              .seq = T,
                              .accumulate = 1,
                              .leaves = leaves,
                              .mesh = { .size = { ranks } },
                              .steps = STEPS,
                              .precision = { .low = LM_DTYPE_F32 },
                              .documents = true,
                              .seed = 1,
                              .objective = true,
                              .groups = lm_groups_of(lm_optim_default(lm_optim_find("adamw"))),
                              .schedule = { .kind = LM_SCHED_CONSTANT, .lr = a->rate },
                              .clip_norm = 1,
                              .eval_every = 2,
                              .log_every = 1 };
}

static lm_code run(const ask *a, lm_trainer_opts *o, const lm_align_spec *spec,
                   const lm_objective *objective, outcome *x, lm_err *e)
{
    const tiny_model *m = lm_align_kind_of(spec) == LM_ALIGN_SCORES ? &judge : &plain;
    const lm_trainer_io io = { .config = &m->config, .weights = m->source, .objective = objective };
    lm_trainer *t = NULL;
    (void)a;
    if (!lm_trainer_train(o, &io, backend, NULL, NULL, &t, &x->r, e)) {
        keep(x, t->s.store, LM_KEPT_PARAM);
        keep(x, t->s.store, LM_KEPT_OPT);
    }
    lm_trainer_free(t);
    return e->code;
}

static lm_code try_train(const ask *a, int ranks, int64_t leaves, outcome *x, lm_err *e)
{
    lm_align_spec spec;
    lm_reward_set *reward = NULL;
    lm_on_policy *policy = NULL;
    lm_offline *offline = NULL;
    *x = (outcome){ 0 };
    ok(lm_align_parse(a->loss, &spec, e), e);
    lm_trainer_opts o = trainer_opts(a, ranks, leaves);
    if (a->reward) {
        const lm_reward_opts how = { .most_new = NEW, .tokenizer = tok, .timeout = 5 };
        ok(lm_reward_open(&a->reward, NULL, 1, &how, &reward, e), e);
        const lm_on_policy_opts p = policy_opts(a, &spec, reward);
        ok(lm_on_policy_new(&p, &policy, e), e);
        o.entropy = LM_ENTROPY_READ;
        o.value = lm_on_policy_values(policy);
    } else {
        const lm_offline_opts p = { .spec = &spec,
                                    .train = pairs,
                                    .val = pairs,
                                    .each = a->each,
                                    .vocab = VOCAB,
                                    .pad = 40,
                                    .seq = T,
                                    .seed = 3 };
        ok(lm_offline_new(&p, &offline, e), e);
    }
    run(a, &o, &spec, policy ? lm_on_policy_objective(policy) : lm_offline_objective(offline), x,
        e);
    lm_on_policy_free(policy);
    lm_offline_free(offline);
    lm_reward_close(reward);
    return e->code;
}

static outcome train(const ask *a, int ranks, int64_t leaves)
{
    lm_err e = { 0 };
    outcome x;
    ok(try_train(a, ranks, leaves, &x, &e), &e);
    assert_true(isfinite(x.r.loss) && isfinite(x.r.val_loss) && x.r.tokens > 0);
    return x;
}

static void check_same(const char *loss, const outcome *a, const outcome *b)
{
    assert_int_equal(a->bytes, b->bytes);
    if (memcmp(a->data, b->data, a->bytes) != 0)
        fail_msg("%s: other weights", loss);
    assert_memory_equal(&a->r.loss, &b->r.loss, sizeof a->r.loss);
    assert_memory_equal(&a->r.val_loss, &b->r.val_loss, sizeof a->r.val_loss);
    assert_int_equal(a->r.tokens, b->r.tokens);
    assert_true(a->r.flops == b->r.flops);
}

/* Runs of the numbers of ranks (0 at the end) have the bits of one. */
static void check_ranks(const ask *a, int64_t leaves, const int *ranks)
{
    outcome one = train(a, 1, leaves);
    for (; *ranks; ranks++) {
        outcome many = train(a, *ranks, leaves);
        check_same(a->loss, &one, &many);
        lm_free(many.data);
    }
    lm_free(one.data);
}

/* ---- tests ---- */

static const ask given = { .loss = "dpo", .batch = 1, .each = 5, .rate = 1e-2 };

/* Five records of two windows each, in micro-batches of one. */
static void on_given_answers(void **state)
{
    ask a = given;
    (void)state;
    check_ranks(&a, 2, (int[]){ 2, 0 });
    check_ranks(&a, 3, (int[]){ 3, 0 });
    a.loss = "reward";
    check_ranks(&a, 2, (int[]){ 2, 0 });
}

/* One or two micro-batches in four leaves, which four or two ranks have. */
static void leaves_may_be_empty(void **state)
{
    ask a = given;
    (void)state;
    a.batch = 4;
    a.each = 3;
    check_ranks(&a, 4, (int[]){ 2, 4, 0 });
}

static void on_sampled_completions(void **state)
{
    char *path = path_of("judge"), of[256];
    snprintf(of, sizeof of, "model:%s", path);
    const ask all[] = {
        { .loss = "grpo", .updates = 2, .iterations = 2, .tries = 1 },
        { .loss = "ppo", .updates = 2, .iterations = 2 },
        { .loss = "reject" },
        { .loss = "dapo",
          .reward =
              "command:while read x; do case $x in *[a-f]\\\",*) echo 1;; *) echo 0;; esac; done" },
        { .loss = "bnpo", .reward = of },
    };
    (void)state;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        ask a = all[i];
        a.reward = a.reward ? a.reward : "regex:[a-m]$";
        a.batch = 2;
        a.each = 4;
        a.rate = 1e-2;
        check_ranks(&a, 2, (int[]){ 2, 0 });
    }
    lm_free(path);
}

/* The order of the sums follows from the leaves: otherwise these tests could see nothing. */
static void leaves_change_bits(void **state)
{
    outcome a = train(&given, 1, 1), b = train(&given, 1, 2);
    (void)state;
    assert_int_equal(a.bytes, b.bytes);
    assert_memory_not_equal(a.data, b.data, a.bytes);
    assert_true(fabs(a.r.loss - b.r.loss) < 1e-4);
    lm_free(a.data);
    lm_free(b.data);
}

/* Both ranks meet the number that is not finite, which one of them had. */
static void a_failure_is_reported_once(void **state)
{
    lm_err e = { 0 };
    ask a = given;
    outcome x;
    (void)state;
    a.rate = 1e38;
    assert_int_equal(try_train(&a, 2, 2, &x, &e), LM_ENUMERIC);
    assert_int_equal(strncmp(e.where, "rank 0 of 2: step ", 18), 0);
}

static void a_reward_that_fails_ends_all_ranks(void **state)
{
    lm_err e = { 0 };
    const ask a = {
        .loss = "grpo", .reward = "command:read x; exit 3", .batch = 2, .each = 4, .rate = 1e-3
    };
    outcome x;
    (void)state;
    assert_int_equal(try_train(&a, 2, 2, &x, &e), LM_EIO);
    assert_non_null(strstr(e.where, " of 2: reward command"));
}

/* ---- sums ---- */

static lm_code join_part(void *ctx, lm_comm *c, lm_err *e)
{
    static const char *const names[] = { "mean", "most", "least", "late" };
    const int r = lm_comm_rank(c), n = lm_comm_size(c);
    lm_align_sums *s = &((lm_align_sums *)ctx)[r];
    for (int round = 0; round < 2; round++) {
        lm_align_sums_begin(s);
        lm_align_note(&s->metrics, "known", 7, 1, LM_ALIGN_MEAN);
        for (int i = 6 * r / n; i < 6 * (r + 1) / n; i++) {
            lm_align_metrics m = { .n = 0 };
            lm_align_note(&m, names[0], 0.1 * i, 1, LM_ALIGN_MEAN);
            lm_align_note(&m, names[1], i, 1, LM_ALIGN_MOST);
            lm_align_note(&m, names[2], -i, 1, LM_ALIGN_LEAST);
            if (i == 4)
                lm_align_note(&m, names[3], 1, 1, LM_ALIGN_MEAN);
            if (lm_align_sums_add(s, 1e-3 * i * i, &m, e))
                return e->code;
        }
        if (lm_align_sums_join(s, c, e))
            return e->code;
    }
    return LM_OK;
}

/* Losses and metrics of micro-batches, in their order: also of a rank without any, and of names that a rank does not have. */
static void sums_have_the_order_of_micro_batches(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 8; ranks++) {
        static lm_align_sums s[8];
        lm_err e = { 0 };
        double loss = 0, mean = 0;
        for (int i = 0; i < 6; i++) {
            loss += 1e-3 * i * i;
            mean += 0.1 * i;
        }
        memset(s, 0, sizeof s);
        ok(lm_threads_run(ranks, 0, join_part, s, &e), &e);
        for (int r = 0; r < ranks; r++) {
            const lm_align_metric *m = s[r].metrics.item;
            assert_true(s[r].loss == loss);
            assert_int_equal(s[r].metrics.n, 5);
            assert_string_equal(m[0].name, "known");
            assert_true(m[0].sum == 7 && m[1].sum == mean && m[1].weight == 6);
            assert_true(m[2].sum == 5 && m[3].sum == -5);
            assert_string_equal(m[4].name, "late");
            lm_align_sums_fini(&s[r]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_given_answers),
        cmocka_unit_test(leaves_may_be_empty),
        cmocka_unit_test(on_sampled_completions),
        cmocka_unit_test(leaves_change_bits),
        cmocka_unit_test(a_failure_is_reported_once),
        cmocka_unit_test(a_reward_that_fails_ends_all_ranks),
        cmocka_unit_test(sums_have_the_order_of_micro_batches),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
