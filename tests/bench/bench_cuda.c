/* SPDX-License-Identifier: Apache-2.0 */
/* bench_cuda.c -- ceilings of a CUDA device, and the kernels beside them: bytes/s of a copy within
 * the device, FLOP/s of large products by cuBLASLt, then each kernel on shapes of GPT-2 and Llama,
 * joined operators beside the sum of their parts.
 *
 * usage: bench_cuda [--quick] [--toy] [--seconds N] [--paths LIST] [--device DEV] MODULES [NAME]
 *        bench_cuda --probe [--device DEV] MODULES      (properties and free memory of the device)
 *
 * MODULES is the folder of libcore-cuda.so; NAME: only operators whose names begin so.  Bytes and
 * FLOPs are those of the operators' cost rules, every operand once.  A kernel's ceiling is that of
 * copies or of products in its type, whichever would take longer; both are measured first, in the
 * same run.  Operands are random normal numbers; there are several copies of small ones, so that
 * caches hold nothing of the last call.  --toy: shapes that are small enough for the emulated
 * device. */
#include "kernels/cuda/blaslt.h"
#include "kernels/linear.h"
#include "numeric/code_rows.h"
#include "op/ops.h"
#include "tests/bench/cuda_bench.h"
#include "tests/bench/cuda_cases.h"

enum { SETS = 32, PATTERN = 65521, MOST_CASES = 512 };
enum { OF_BF16, OF_F32, OF_TF32, OF_FP8, PRODUCTS };
static const size_t cold = (size_t)256 << 20; /* more bytes than any cache */

static struct {
    lm_backend *path[PATHS]; /* one device; NULL for a path that is not available */
    bool wanted[PATHS];
    double copy, product[PRODUCTS];                    /* ceilings: bytes/s; FLOP/s; 0: unknown */
    void (*counts)(const lm_stream *, lm_lt_counts *); /* counts of cuBLASLt; may be NULL */
    double deadline, budget;
    const char *only;
    bool quick, toy, probe, fp8;
    int left_out;
} bench;

static lm_backend *device(void)
{
    return bench.path[0];
}

/* ---- operands ---- */

static size_t tensor_bytes(const lm_tensor *t)
{
    return t->ndim ? lm_stored_bytes(t) : 0;
}

static size_t in_units(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static lm_tensor shape_of(const operand *o)
{
    lm_tensor t = { .dtype = o->ndim ? o->dtype : LM_DTYPE_NONE, .ndim = o->ndim };
    for (int i = 0; i < o->ndim; i++)
        t.dim[i] = o->dim[i];
    if (o->fill == CODED)
        t.kv = cuda_cache_format((int)o->x);
    return t;
}

static double number(const operand *o, lm_rng r, int64_t i)
{
    switch (o->fill) {
    case NORMAL:
        return o->x * lm_rng_normal(r, (uint64_t)i);
    case POSITIVE:
        return o->x * fabs(lm_rng_normal(r, (uint64_t)i));
    case IDS:
        return (double)lm_rng_below(r, (uint64_t)i, (uint64_t)o->x);
    case POSITIONS:
        return (double)(i % (int64_t)o->x);
    case STEPS:
        return (double)i * o->x;
    case BLOCKS:
        return i % 4 == 1 ? 0 : i % 4 == 2 ? o->x : (double)(i / 4);
    default:
        return o->x;
    }
}

/* The beginning is drawn on the host, the rest are copies of it on the device: their period is a
 * prime, except for positions, which have their own period. */
static void fill(const operand *o, void *data)
{
    static uint64_t drawn;
    static char pattern[PATTERN * 8];
    int64_t count = 1, first;
    size_t size = lm_dtype_size(o->dtype), done, all;
    lm_backend *b = device();
    lm_err e = { 0 };
    lm_rng r = lm_rng_make(1, "bench", drawn++);
    for (int i = 0; i < o->ndim; i++)
        count *= o->dim[i];
    first = o->fill == POSITIONS ? (int64_t)o->x : PATTERN;
    first = first < count ? first : count;
    for (int64_t i = 0; i < first; i++)
        lm_set(o->dtype, pattern, i, number(o, r, i));
    done = (size_t)first * size;
    all = (size_t)count * size;
    bench_must(b->copy(b, data, pattern, done, b->main, &e), &e);
    for (size_t n; done < all; done += n) {
        n = done < all - done ? done : all - done;
        bench_must(b->copy(b, (char *)data + done, data, n, b->main, &e), &e);
    }
    bench_must(b->sync(b, NULL, &e), &e);
}

/* A case with its operands on the device, in so many copies that caches do not help. */
typedef struct {
    const bench_case *c;
    const lm_kernel *kernel;
    lm_tensor in[SETS][LM_MAX_IN], out[SETS][LM_MAX_OUT];
    lm_call call[SETS];
    int sets, next;
    void *block;
    size_t set_bytes;
} placed;

static const lm_tensor *place(const operand *o, size_t set, lm_tensor *t, char **at)
{
    size_t bytes;
    *t = shape_of(o);
    bytes = in_units(tensor_bytes(t));
    if (!bytes)
        return t;
    t->data = *at;
    if (set == 0 && o->fill != NOTHING && o->fill != CODED)
        fill(o, *at);
    *at += bytes;
    return t;
}

static void describe(const bench_case *c, placed *p)
{
    *p = (placed){ .c = c };
    for (int i = 0; i < LM_MAX_IN + LM_MAX_OUT; i++) {
        lm_tensor t = shape_of(i < LM_MAX_IN ? &c->in[i] : &c->out[i - LM_MAX_IN]);
        p->set_bytes += in_units(tensor_bytes(&t));
    }
}

/* False if it does not fit into the free memory of the device, with a note. */
static bool put_in_place(const bench_case *c, placed *p)
{
    lm_backend *b = device();
    lm_err e = { 0 };
    size_t free, total;
    describe(c, p);
    bench_must(b->memory(b, &free, &total, &e), &e);
    p->sets = 1;
    while (!bench.toy && p->sets < SETS && (size_t)p->sets * p->set_bytes < cold)
        p->sets *= 2;
    if (p->set_bytes > free / 2) {
        put_note("%s %s left out: it takes %.1f GB, %.1f are free", c->op, c->shape,
                 (double)p->set_bytes * 1e-9, (double)free * 1e-9);
        return false;
    }
    bench_must(b->alloc(b, (size_t)p->sets * p->set_bytes, "operands", &p->block, &e), &e);
    for (int s = 0; s < p->sets; s++) {
        char *base = (char *)p->block + (size_t)s * p->set_bytes, *at = base;
        for (int i = 0; i < LM_MAX_IN; i++)
            place(&c->in[i], (size_t)s, &p->in[s][i], &at);
        for (int i = 0; i < LM_MAX_OUT; i++)
            place(&c->out[i], (size_t)s, &p->out[s][i], &at);
        if (s)
            bench_must(b->copy(b, base, p->block, p->set_bytes, b->main, &e), &e);
        p->call[s] = (lm_call){ .attr = c->attr,
                                .in = p->in[s],
                                .n_in = LM_MAX_IN,
                                .out = p->out[s],
                                .n_out = LM_MAX_OUT };
    }
    bench_must(b->sync(b, NULL, &e), &e);
    return true;
}

static void take_away(placed *p)
{
    device()->free(device(), p->block, (size_t)p->sets * p->set_bytes);
}

/* ---- times ---- */

static void call_next(void *arg)
{
    placed *p = arg;
    p->kernel->run(&p->call[p->next]);
    p->next = (p->next + 1) % p->sets;
}

static bool is_product(const bench_case *c)
{
    return !strncmp(c->op, "linear", 6) || !strcmp(c->op, "head_loss") || c->flops > 0;
}

/* Times by case, for the sums of parts. */
typedef struct {
    bench_part case_of;
    lm_dtype act;
    bool differs[PATHS];
    double seconds[PATHS];
} measured;

static struct {
    measured of[MOST_CASES];
    int n;
} times;

static measured *times_of(const bench_part *p, lm_dtype act)
{
    for (int i = 0; i < times.n; i++)
        if (times.of[i].act == act && !strcmp(times.of[i].case_of.op, p->op) &&
            !strcmp(times.of[i].case_of.shape, p->shape))
            return &times.of[i];
    return NULL;
}

/* True if this path has its own kernel for the case, or for the parts that it replaces. */
static bool differs(const bench_case *c, int path)
{
    const lm_kernel *k;
    if (path == 0)
        return true;
    for (int i = 0; i < PARTS && c->part[i].op; i++) {
        const measured *m = times_of(&c->part[i], c->act);
        if (m && m->differs[path])
            return true;
    }
    if (is_product(c))
        return path == 1 || c->act == LM_DTYPE_F32;
    if (c->kernel)
        return false;
    k = bench.path[path]->kernel(bench.path[path], c->op, c->act);
    return k && k->level == path;
}

/* Counts of cuBLASLt for a path so far. */
static lm_lt_counts counts_of(int path)
{
    lm_lt_counts n = { 0 };
    if (bench.counts)
        bench.counts(bench.path[path]->main, &n);
    return n;
}

/* False if the plain kernels computed the products instead of cuBLASLt. */
static bool served(const bench_case *c, lm_lt_counts before, int path)
{
    lm_lt_counts now = counts_of(path);
    if (now.unserved > before.unserved)
        put_note("%s %s: cuBLASLt has no kernel for it", c->op, c->shape);
    else if (now.refused > before.refused)
        put_note("%s %s: cuBLASLt makes the product alone, another kernel the rest", c->op,
                 c->shape);
    return now.unserved == before.unserved;
}

static bool time_on(placed *p, int path, timing *t)
{
    lm_lt_counts before = counts_of(path);
    static const lm_step step = { .seed = 1, .step = 3 };
    lm_backend *b = bench.path[path];
    lm_err e = { 0 };
    size_t work = 0, free, total;
    void *scratch = NULL;
    p->kernel = p->c->kernel ? p->c->kernel : b->kernel(b, p->c->op, p->c->act);
    if (!p->kernel) {
        put_note("%s has no kernel for %s", p->c->op, lm_dtype_name(p->c->act));
        return false;
    }
    for (int s = 0; s < p->sets; s++) {
        p->call[s].stream = b->main;
        p->call[s].step = &step;
    }
    if (p->kernel->work)
        work = p->kernel->work(&p->call[0], b->threads);
    if (work == SIZE_MAX)
        return false; /* cuBLASLt does not support these shapes */
    bench_must(b->memory(b, &free, &total, &e), &e);
    if (work > free / 2) {
        put_note("%s %s left out: its scratch takes %.1f GB, %.1f are free", p->c->op, p->c->shape,
                 (double)work * 1e-9, (double)free * 1e-9);
        return false;
    }
    if (work)
        bench_must(b->alloc(b, work, "scratch", &scratch, &e), &e);
    for (int s = 0; s < p->sets; s++)
        p->call[s].work = scratch;
    bench_must(b->step(b, &step, b->main, &e), &e);
    bench_must(time_calls(b, call_next, p, bench.budget, t, &e), &e);
    bench_must(b->sync(b, NULL, &e), &e);
    if (work)
        b->free(b, scratch, work);
    return served(p->c, before, path);
}

/* ---- rows ---- */

static void keep_time(const bench_case *c, int path, double seconds)
{
    bench_part name = { .op = c->op };
    memcpy(name.shape, c->shape, sizeof name.shape);
    measured *m = times_of(&name, c->act);
    if (!m && times.n == MOST_CASES)
        return;
    if (!m) {
        m = &times.of[times.n++];
        *m = (measured){ .case_of = name, .act = c->act };
        for (int i = 0; i < PATHS; i++)
            m->differs[i] = bench.path[i] && differs(c, i);
    }
    m->seconds[path] = seconds;
}

/* Seconds of all parts together on this path; 0 if one of them was not measured. */
static double parts_seconds(const bench_case *c, int path)
{
    double sum = 0;
    for (int i = 0; i < PARTS && c->part[i].op; i++) {
        const measured *m = times_of(&c->part[i], c->act);
        double s = m ? m->seconds[m->differs[path] ? path : 0] : 0;
        if (s <= 0)
            return 0;
        sum += s;
    }
    return sum;
}

static double product_ceiling(const bench_case *c, int path)
{
    if (!is_product(c) && strncmp(c->op, "attention", 9) && strncmp(c->op, "grouped", 7) &&
        strcmp(c->op, "norm_linear"))
        return 0;
    return bench.product[c->kernel                ? OF_FP8
                         : c->act != LM_DTYPE_F32 ? OF_BF16
                         : path == 2              ? OF_TF32
                                                  : OF_F32];
}

static void report(const placed *p, int path, const timing *t)
{
    const bench_case *c = p->c;
    const lm_op *op = lm_op_find(c->op);
    lm_cost cost = { .flops = c->flops, .bytes = c->bytes };
    char of[64];
    double peak = product_ceiling(c, path), by_copy, by_product;
    row r = { .part = "kernel",
              .name = c->op,
              .shape = c->shape,
              .dtype = lm_dtype_name(c->act),
              .path = path_names[path],
              .t = *t,
              .of = of,
              .parts = parts_seconds(c, path) };
    if (op)
        op->cost(&p->call[0], &cost);
    by_copy = cost.bytes / bench.copy;
    by_product = peak > 0 ? cost.flops / peak : 0;
    if (by_product > by_copy) {
        r.rate = cost.flops / t->median * 1e-12;
        r.unit = "TFLOP/s";
        r.share = by_product / t->median;
        snprintf(of, sizeof of, "cuBLASLt, %.4g TFLOP/s", peak * 1e-12);
    } else {
        r.rate = cost.bytes / t->median * 1e-9;
        r.unit = "GB/s";
        r.share = by_copy / t->median;
        snprintf(of, sizeof of, "copy, %.4g GB/s", bench.copy * 1e-9);
    }
    put_row(&r);
}

static void measure(const bench_case *c)
{
    placed p;
    timing t;
    bool there = false;
    if (bench.only && strncmp(c->op, bench.only, strlen(bench.only)))
        return;
    for (int path = 0; path < PATHS; path++) {
        if (!bench.path[path] || !bench.wanted[path] || !differs(c, path))
            continue;
        if (lm_now() > bench.deadline) {
            bench.left_out++;
            continue;
        }
        if (!there && !put_in_place(c, &p))
            return;
        there = true;
        if (time_on(&p, path, &t)) {
            keep_time(c, path, t.median);
            report(&p, path, &t);
        }
    }
    if (there)
        take_away(&p);
}

/* ---- ceilings ---- */

/* The fastest of several large square products of a type on a path; FLOP/s. */
static double product_rate(lm_dtype act, int path)
{
    static const int64_t sides[] = { 4096, 8192, 16384 };
    const lm_linear_attr attr = { LM_ACC_FIRST };
    bool fp8 = act == LM_DTYPE_F8E4M3;
    double best = 0;
    for (int i = 0; i < (act == LM_DTYPE_F32 ? 2 : 3) && bench.path[path]; i++) {
        int64_t n = bench.toy ? 16 << i : sides[i];
        bench_case c = { .op = "linear", .act = act };
        placed p;
        timing t;
        if (fp8) {
            c = cuda_fp8_square(n);
        } else {
            cuda_set_attr(&c, &attr, sizeof attr);
            c.in[0] = c.in[1] = c.out[0] = cuda_matrix(act, n, n);
            c.out[0].fill = NOTHING;
        }
        snprintf(c.shape, sizeof c.shape, "%lld^3", (long long)n);
        if (!put_in_place(&c, &p))
            continue;
        if (time_on(&p, path, &t)) {
            double rate = 2.0 * (double)n * (double)n * (double)n / t.median;
            put_row(&(row){ .part = "ceiling",
                            .name = "cuBLASLt",
                            .shape = c.shape,
                            .dtype = lm_dtype_name(act),
                            .path = path_names[path],
                            .t = t,
                            .rate = rate * 1e-12,
                            .unit = "TFLOP/s" });
            best = rate > best ? rate : best;
        }
        take_away(&p);
    }
    return best;
}

static void ceilings(void)
{
    bench.copy = copy_ceiling(device(), bench.toy ? 1 << 20 : (size_t)2 << 30, "copy");
    bench.product[OF_BF16] = product_rate(LM_DTYPE_BF16, 1);
    bench.product[OF_F32] = product_rate(LM_DTYPE_F32, 1);
    bench.product[OF_TF32] = product_rate(LM_DTYPE_F32, 2);
    if (bench.fp8)
        bench.product[OF_FP8] = product_rate(LM_DTYPE_F8E4M3, 1);
}

static const char *arguments(int argc, char **argv, const char **paths, const char **name)
{
    const char *modules = NULL;
    double seconds = 240;
    *paths = "plain,tensor,tf32";
    *name = "cuda:0";
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--quick"))
            bench.quick = true;
        else if (!strcmp(argv[i], "--toy"))
            bench.toy = true;
        else if (!strcmp(argv[i], "--probe"))
            bench.probe = true;
        else if (!strcmp(argv[i], "--seconds") && ++i)
            seconds = atof(value);
        else if (!strcmp(argv[i], "--paths") && ++i)
            *paths = value;
        else if (!strcmp(argv[i], "--device") && ++i)
            *name = value;
        else if (!modules)
            modules = argv[i];
        else
            bench.only = argv[i];
    }
    if (!modules) {
        fprintf(stderr, "bench-cuda: name the folder of the module\n");
        exit(2);
    }
    bench.deadline = lm_now() + seconds;
    bench.budget = bench.toy ? 1e-3 : bench.quick ? 0.2 : 0.5;
    return modules;
}

static void probe(const char *modules, const char *name)
{
    size_t free, total;
    lm_err e = { 0 };
    open_path(modules, name, 0, &bench.path[0]);
    bench_must(device()->memory(device(), &free, &total, &e), &e);
    printf("{\"part\":\"device\",\"name\":\"%s\",\"free\":%zu,\"total\":%zu}\n", device()->device,
           free, total);
    lm_backend_close(device());
}

static void name_model(const char *name)
{
    put_note("%s", name);
}

int main(int argc, char **argv)
{
    const char *paths, *name, *modules = arguments(argc, argv, &paths, &name);
    if (bench.probe) {
        probe(modules, name);
        return 0;
    }
    for (int i = 0; i < PATHS; i++) {
        bench.wanted[i] = strstr(paths, path_names[i]) != NULL;
        open_path(modules, name, i, &bench.path[i]);
    }
    bench.fp8 = cuda_fp8_open(modules);
    *(void **)&bench.counts = cuda_symbol(modules, "lm_cuda_lt_counts");
    ceilings();
    cuda_decoding_cases(bench.toy, measure);
    cuda_sampling_cases(bench.toy, measure);
    cuda_optimiser_cases(bench.toy, measure);
    cuda_expert_cases(bench.toy, measure);
    cuda_training_cases(bench.quick, bench.toy, name_model, measure);
    if (bench.fp8)
        cuda_fp8_cases(bench.toy, measure);
    if (bench.left_out)
        put_note("%d rows left out: the time was over", bench.left_out);
    if (!bench.only)
        copy_ceiling(device(), bench.toy ? 1 << 20 : (size_t)2 << 30, "copy, at the end");
    for (int i = PATHS - 1; i >= 0; i--)
        if (bench.path[i])
            lm_backend_close(bench.path[i]);
    return 0;
}
