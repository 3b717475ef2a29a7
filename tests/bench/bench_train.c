/* SPDX-License-Identifier: Apache-2.0 */
/* bench_train.c -- a whole training step of GPT-2 124M on random weights and random tokens:
 * tokens/s, share of the ceiling, time by operator, peak memory beside the plan; and beside llm.c's
 * CPU trainer when LLMC names its binary (built from train_gpt2.c with OpenMP; B and T as compiled
 * in).
 *
 * Each configuration runs in a separate process, so that its peak memory is measured alone.
 * --quick: one timed step each. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/rng.h"
#include "kernels/peak.h"
#include "tests/bench/ceilings.h"
#include "train/batch.h"
#include "train/memory.h"
#include "train/state.h"

enum { VOCAB = 50257, MOST_STEPS = 8 };

static const char config_text[] =
    "{\"model_type\":\"gpt2\",\"vocab_size\":50257,\"n_embd\":768,\"n_layer\":12,\"n_head\":12,"
    "\"n_positions\":1024,\"embd_pdrop\":0,\"resid_pdrop\":0,\"attn_pdrop\":0}";

typedef struct {
    int64_t batch, seq;
    lm_dtype dtype;
    int steps;
} setup;

static _Noreturn void die(const lm_err *e)
{
    fprintf(stderr, "bench_train: %s: %s\n", e->where, e->what);
    exit(1);
}

/* ---- ours ---- */

typedef struct {
    lm_par *par;
    lm_backend *backend;
    lm_config config;
    lm_program *program;
    lm_model *model;
    lm_exec *exec;
    lm_train_state s;
    lm_batch batch;
    double loss, sumsq, weights, numbers[LM_OPTIM_NUMBERS];
    double optimizer; /* seconds */
} run;

static void bind_update(run *r)
{
    const lm_update_values *v = lm_update_value(r->program->update);
    const lm_store_state *state;
    const lm_vid *value;
    lm_exec *x = r->program->updating;
    int n = lm_update_states(r->program->update, &state, &value);
    static float unread[3][1 << 14]; /* samples */
    lm_exec_bind(r->exec, r->program->loss_sum, &r->loss);
    lm_exec_bind(x, v->loss, &r->loss);
    lm_exec_bind(x, v->sumsq, &r->sumsq);
    lm_exec_bind(x, v->weights, &r->weights);
    lm_exec_bind(x, v->numbers, r->numbers);
    lm_exec_bind(x, v->param, lm_store_flat(r->s.store, LM_KEPT_PARAM, 0));
    lm_exec_bind(x, v->grad, lm_store_flat(r->s.store, LM_KEPT_GRAD, 0));
    if (v->low != LM_NONE)
        lm_exec_bind(x, v->low, lm_store_flat(r->s.store, LM_KEPT_DERIVED, 0));
    const lm_update_constant *c;
    for (int i = lm_update_constants(r->program->update, &c); i-- > 0;)
        lm_exec_bind(x, c[i].value, c[i].number);
    for (int k = 0; k < n; k++)
        lm_exec_bind(x, value[k], lm_store_flat(r->s.store, LM_KEPT_OPT, k));
    lm_exec_bind(x, v->before, unread[0]);
    lm_exec_bind(x, v->grads, unread[1]);
    lm_exec_bind(x, v->after, unread[2]);
}

static void prepare(run *r, const setup *c, lm_err *e)
{
    json_t *json;
    const lm_program_opts o = { .batch = c->batch,
                                .seq = c->seq,
                                .precision = { .low = c->dtype },
                                .groups = lm_groups_of(lm_optim_default(lm_optim_find("adamw"))),
                                .clip_norm = 1 };
    int64_t n = c->batch * c->seq;
    lm_rng rng = lm_rng_make(1, "tokens", 0);
    lm_cpu_level level = lm_cpu_detect();
    if (lm_json_parse(config_text, strlen(config_text), "config", &json, e) ||
        lm_config_read(json, "config", &r->config, e) || lm_par_new(&r->par, 0, e) ||
        lm_backend_cpu(level, r->par, &r->backend, e))
        die(e);
    if (lm_program_new(&o, &r->config, false, r->backend, NULL, &r->program, e))
        die(e);
    r->model = r->program->train;
    if (lm_program_ready(r->program, false, NULL, e) ||
        lm_train_state_new(r->program, NULL, &r->s, e) ||
        lm_batch_new(&r->batch, r->backend, c->batch, c->seq, 0, e) ||
        lm_store_draw(r->s.store, LM_TENSORS_ALL, 1, e))
        die(e);
    r->exec = r->program->exec;
    lm_store_derive(r->s.store);
    lm_store_bind(r->s.store, r->model, r->exec);
    bind_update(r);
    for (int64_t i = 0; i < n; i++) {
        r->batch.tokens[i] = (int32_t)lm_rng_below(rng, (uint64_t)i, VOCAB);
        r->batch.targets[i] = (int32_t)lm_rng_below(rng, (uint64_t)(i + 1), VOCAB);
        r->batch.pos[i] = (int32_t)(i % c->seq);
    }
    lm_batch_scale(&r->batch, (float)(1.0 / (double)n));
    lm_batch_bind(&r->batch, r->model, r->exec);
    json_decref(json);
}

static void update(run *r, lm_update_part part, const lm_step *st, lm_err *e)
{
    size_t first, last;
    lm_update_part_at(r->program->update, part, &first, &last);
    if (lm_exec_run_part(r->program->updating, first, last, NULL, st, e))
        die(e);
}

static double step(run *r, int64_t t, lm_err *e)
{
    lm_step st = { .seed = 1, .step = t };
    double began = lm_now();
    if (lm_exec_run(r->exec, &st, e))
        die(e);
    double after = lm_now();
    lm_update_numbers_at(r->program->update, 1e-4, t, r->numbers);
    update(r, LM_UPDATE_NORM, &st, e);
    update(r, LM_UPDATE_STEP, &st, e);
    r->optimizer += lm_now() - after;
    return lm_now() - began;
}

static void print_times(run *r, int steps)
{
    const lm_exec_time *line;
    size_t n = lm_exec_times(r->exec, &line);
    double all = r->optimizer, products = 0;
    for (size_t i = 0; i < n; i++) {
        all += line[i].seconds;
        if (!strncmp(line[i].op, "linear", 6) || !strcmp(line[i].op, "head_loss"))
            products += line[i].seconds;
    }
    printf("    products and head %.0f %% of the step; by operator, ms a step:\n     ",
           100 * products / all);
    for (size_t i = 0; i < n && i < 12; i++)
        printf(" %s %.0f", line[i].op, 1e3 * line[i].seconds / steps);
    printf(" optimiser %.0f\n", 1e3 * r->optimizer / steps);
}

/* In a child: prints its lines and writes tokens/s to `result`. */
static void measure(const setup *c, int result)
{
    run r = { 0 };
    lm_err e = { 0 };
    double times[MOST_STEPS], loss;
    struct rusage use;
    lm_memory_plan plan;
    prepare(&r, c, &e);
    step(&r, 0, &e);
    loss = r.loss * (double)*r.batch.scale;
    lm_exec_times_reset(r.exec);
    r.optimizer = 0;
    for (int i = 0; i < c->steps; i++)
        times[i] = step(&r, i + 1, &e);
    double peak = lm_cpu_peak(c->dtype, lm_cpu_detect(), r.par);
    double rate = (double)(c->batch * c->seq) / lm_median(times, c->steps);
    getrusage(RUSAGE_SELF, &use);
    lm_memory_of(r.program, &(lm_memory_ask){ .accumulate = 1 }, &plan);
    printf("  %-4s B=%lld T=%-4lld %8.0f tokens/s  %7.0f ms/step  %4.1f %% of %.2f TFLOP/s  loss "
           "%.3f  "
           "memory %.2f GB, planned %.2f\n",
           lm_dtype_name(c->dtype), (long long)c->batch, (long long)c->seq, rate,
           1e3 * (double)(c->batch * c->seq) / rate,
           100 * rate * lm_config_train_flops(&r.config, c->seq) / peak, peak * 1e-12, loss,
           (double)use.ru_maxrss * 1024e-9, plan.total * 1e-9);
    print_times(&r, c->steps);
    fflush(stdout);
    if (write(result, &rate, sizeof rate) != sizeof rate)
        exit(1);
}

static double measure_apart(const setup *c)
{
    int fd[2];
    double rate = 0;
    fflush(stdout);
    if (pipe(fd))
        return 0;
    pid_t child = fork();
    if (child == 0) {
        close(fd[0]);
        measure(c, fd[1]);
        exit(0);
    }
    close(fd[1]);
    if (child < 0 || read(fd[0], &rate, sizeof rate) != sizeof rate)
        rate = 0;
    close(fd[0]);
    waitpid(child, NULL, 0);
    return rate;
}

/* ---- llm.c ---- */

enum { PEER_TOKENS = 40 * 4096 };

/* Its model file: 256 int32 of header (magic 20240326, version 3, then T V L H C Vp), then F32
 * weights. */
static void peer_model(const char *path)
{
    int32_t head[256] = { 20240326, 3, 1024, VOCAB, 12, 12, 768, 50304 };
    int64_t c = 768, l = 12;
    int64_t n = 50304 * c + 1024 * c + l * (4 * c + 12 * c * c + 9 * c) + 2 * c;
    FILE *f = fopen(path, "wb");
    float buf[4096];
    if (!f)
        return;
    fwrite(head, sizeof head, 1, f);
    lm_rng r = lm_rng_make(1, "peer", 0);
    for (int64_t i = 0; i < n; i += 4096) {
        for (int k = 0; k < 4096; k++)
            buf[k] = 0.02f * (float)(lm_rng_uniform(r, (uint64_t)(i + k) / 8) - 0.5);
        fwrite(buf, sizeof *buf, (size_t)(n - i < 4096 ? n - i : 4096), f);
    }
    fclose(f);
}

static void peer_tokens(const char *path)
{
    int32_t head[256] = { 20240520, 1, PEER_TOKENS };
    lm_rng r = lm_rng_make(2, "peer", 0);
    FILE *f = fopen(path, "wb");
    if (!f)
        return;
    fwrite(head, sizeof head, 1, f);
    for (int i = 0; i < PEER_TOKENS; i++) {
        uint16_t t = (uint16_t)lm_rng_below(r, (uint64_t)i, VOCAB);
        fwrite(&t, sizeof t, 1, f);
    }
    fclose(f);
}

/* Runs the binary in a folder of its own until its third line of a step; tokens/s of the second and
 * third. */
static double peer_rate(const char *binary)
{
    char dir[] = "/tmp/bench-train-XXXXXX", cmd[1024], line[512];
    lm_err e = { 0 };
    double ms = 0, batches = 0, one;
    int seen = 0, step_no;
    if (!mkdtemp(dir) || chdir(dir))
        return 0;
    lm_mkdir_p("dev/data/tinyshakespeare", &e);
    peer_model("gpt2_124M.bin");
    peer_tokens("dev/data/tinyshakespeare/tiny_shakespeare_train.bin");
    peer_tokens("dev/data/tinyshakespeare/tiny_shakespeare_val.bin");
    snprintf(cmd, sizeof cmd, "OMP_NUM_THREADS=%d exec stdbuf -oL '%s' 2>&1", lm_cpu_count(),
             binary);
    FILE *p = popen(cmd, "r");
    while (p && seen < 3 && fgets(line, sizeof line, p)) {
        sscanf(line, "train dataset num_batches: %lf", &batches);
        const char *took = strstr(line, "(took ");
        if (sscanf(line, "step %d", &step_no) == 1 && took && sscanf(took, "(took %lf", &one) == 1)
            ms += seen++ ? one / 2 : 0;
    }
    if (p)
        pclose(p);
    if (chdir("/") == 0)
        lm_rm_rf(dir, &e);
    return seen == 3 && batches > 0 ? PEER_TOKENS / batches / ms * 1e3 : 0;
}

int main(int argc, char **argv)
{
    bool quick = argc > 1 && !strcmp(argv[1], "--quick");
    const char *peer = getenv("LLMC");
    const setup setups[] = { { 4, 256, LM_DTYPE_BF16, quick ? 1 : 5 },
                             { 4, 256, LM_DTYPE_F32, quick ? 1 : 3 },
                             { 4, 1024, LM_DTYPE_BF16, quick ? 1 : 3 } };
    double rate[3], theirs = 0;
    printf("GPT-2 124M, a whole training step (forward, backward, norm, AdamW), %d threads\n",
           lm_cpu_count());
    for (int i = 0; i < 3; i++)
        rate[i] = measure_apart(&setups[i]);
    if (peer && *peer) {
        theirs = peer_rate(peer);
        if (theirs > 0)
            printf("  llm.c %.1f tokens/s: bf16 %.1f times, f32 %.1f times\n", theirs,
                   rate[0] / theirs, rate[1] / theirs);
        else
            printf("  llm.c: %s gave no step times\n", peer);
    } else {
        printf("  llm.c: not given (LLMC=path of its train_gpt2, OpenMP, T as compiled)\n");
    }
    return rate[0] > 0 ? 0 : 1;
}
