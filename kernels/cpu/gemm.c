/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.c -- the matrix product: choice of the level, division of the work, and the loops over
 * blocks.
 *
 * Blocks may depend on the number of threads: each element of C is one sum over k in order for any
 * division, so its bits do not.  Only a_sum sees block borders, and those (pc) depend on k
 * alone. */
#include "kernels/cpu/gemm.h"

#include <math.h>
#include <string.h>

enum {
    MIN_PANELS = 4,          /* panels of A below which a block is too small to reuse B */
    MIN_COLUMNS = 1024,      /* of one sweep; A is packed again for each sweep */
    MAX_COLUMNS = 8192,      /* of one sweep when partial tiles are kept */
    CHUNK_DOWN = 32,         /* rows of storage packed at a time where depth runs down */
    PACK_GROUP = 16,         /* panels of B packed together */
    SMALL_ROWS = 16,         /* of B in codes, made numbers at a time for a product of few rows, */
    SMALL_BYTES = 16384,     /* and bytes of these, but for 4 rows that take more */
    SWEEP_ELEMENTS = 1 << 25 /* of op(B) packed at a time, unless MIN_COLUMNS need more */
};

/* True if results of m rows are written to memory past the caches.  Smaller ones are found there by the
 * next operator: with 3 MiB for few rows in place of 1, prompts of 512 rows gain 14 to 40 %; with 3 MiB for
 * 2,048 rows, whose other values fill the caches, 8 % are lost, with 8 MiB for 4,096 rows 5 %. */
static bool bypasses(int64_t m, int64_t bytes)
{
    return bytes > (m > 1024 ? (int64_t)1 << 20 : (int64_t)3 << 20);
}

typedef struct {
    const lm_gemm *g;
    const lm_gemm_impl *impl;
    int64_t kp;        /* padded depth */
    int64_t pc, n_sup; /* depth of a packed block of A, number of these */
    int64_t kc;        /* depth of one step */
    int64_t mb, nb;    /* blocks over rows, ranges over columns */
    int64_t panels;    /* of A in the largest block */
    int64_t sweep;     /* columns packed and worked through at a time, a multiple of nr */
    int64_t tiles;     /* kept per worker */
    int64_t b_bytes, a_bytes, tile_bytes, own_b_bytes;
    int64_t threads;
    int64_t own; /* panels of B that a worker packs at a time for itself; 0: all share them */
    bool stream;
    const char *b;  /* packed panels of the running sweep */
    int64_t j0, j1; /* the running sweep */
} plan;

static const lm_gemm_impl *impl_of(lm_cpu_level level, lm_dtype ab)
{
    switch (level) {
    case LM_CPU_AMX:
        return lm_gemm_impl_amx(ab);
    case LM_CPU_BF16:
        return lm_gemm_impl_bf16(ab);
    case LM_CPU_AVX512:
        return lm_gemm_impl_avx512(ab);
    case LM_CPU_AVX2:
        return lm_gemm_impl_avx2(ab);
    default:
        return NULL;
    }
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The beginning of piece i when `n` is divided into `parts` nearly equal pieces. */
static int64_t cut(int64_t n, int64_t parts, int64_t i)
{
    return n / parts * i + min64(i, n % parts);
}

/* True for B [k,n] in codes: whole rows become numbers, of which each panel takes a part, so that all panels are
 * packed together. */
static bool is_deep(const lm_gemm *g)
{
    return g->b_codes && !g->tb;
}

/* True if each worker should pack the columns of B that it multiplies.  A panel then stays in its L2
 * between packing and use, where the shared panels of all columns are written to memory and read
 * back; but every worker packs all of A, which pays only for half as many panels of A as it has of
 * B.  With more than one block of A each would pack B again. */
static bool owns(const lm_gemm *g, const lm_gemm_impl *im, int64_t fit, int threads)
{
    int64_t rows = lm_ceil_div(g->m, im->mr), columns = lm_ceil_div(g->n, im->nr);
    int64_t each = lm_ceil_div(columns, threads), uneven = each * threads - columns;

    return im->own_panels && !g->ta && !g->b_packed && !is_deep(g) && rows <= fit &&
           rows <= 2 * each && 8 * uneven <= columns;
}

static void plan_grid(plan *p, int threads)
{
    const lm_gemm_impl *im = p->impl;
    int64_t all = lm_ceil_div(p->g->m, im->mr);
    int64_t fit = max64(im->l2_bytes / (p->pc * im->esize * im->mr), 1);
    int64_t blocks = lm_round_up(lm_ceil_div(all, fit), threads);

    p->mb = max64(min64(blocks, all / MIN_PANELS), lm_ceil_div(all, fit));
    /* Several panels at a time need scratch, which sharing would need as well, except here. */
    bool single = p->g->tb || p->g->b_turned || !im->own_panels || (p->mb == 1 && p->n_sup > 1);
    if (owns(p->g, im, fit, threads))
        p->mb = 1;
    if (p->mb == 1 && !p->g->b_packed && !is_deep(p->g))
        p->own = single ? 1 : im->own_panels;
    p->nb = p->mb < threads ? lm_ceil_div(threads, p->mb) : 1;
    p->nb = min64(p->nb, lm_ceil_div(p->g->n, im->nr));
    p->panels = lm_ceil_div(all, p->mb);
}

static plan plan_make(const lm_gemm *g, const lm_gemm_impl *im, int threads)
{
    plan p = { .g = g, .impl = im, .threads = threads };
    int64_t n_up = lm_round_up(g->n, im->nr), range;

    p.kp = lm_round_up(g->k, im->kr);
    p.n_sup = lm_ceil_div(p.kp, im->pc);
    p.pc = lm_round_up(lm_ceil_div(p.kp, p.n_sup), im->kr);
    p.n_sup = lm_ceil_div(p.kp, p.pc);
    p.kc = lm_round_up(lm_ceil_div(p.pc, lm_ceil_div(p.pc, im->kc)), im->kr);
    plan_grid(&p, threads);

    p.sweep = lm_round_up(max64(SWEEP_ELEMENTS / p.kp, MIN_COLUMNS), im->nr);
    if (p.n_sup > 1)
        p.sweep = min64(p.sweep, MAX_COLUMNS);
    else if (g->b_packed || p.own)
        p.sweep = n_up;
    p.sweep = min64(p.sweep, n_up);

    range = lm_ceil_div(p.sweep / im->nr, p.nb);
    p.tiles = p.panels * (p.n_sup > 1 ? range : 1);
    p.b_bytes = g->b_packed || p.own ? 0 : p.sweep * p.kp * im->esize;
    p.own_b_bytes = p.own * im->nr * p.pc * im->esize;
    p.a_bytes = lm_round_up(p.panels * im->mr * p.pc * im->esize, 4096);
    p.tile_bytes = p.tiles * im->mr * im->nr * (int64_t)sizeof(float);
    p.b_bytes = lm_round_up(p.b_bytes, 4096);
    p.own_b_bytes = lm_round_up(p.own_b_bytes, 4096);
    p.tile_bytes = lm_round_up(p.tile_bytes, 4096);
    p.stream = !g->accumulate && bypasses(g->m, g->m * g->n * (int64_t)lm_dtype_size(g->cd));
    return p;
}

/* ---- B in codes: rows of B become numbers in the scratch of a worker, and are read as ever (products
 * of few rows: small_sums) ---- */

static int64_t code_rows(const lm_gemm_impl *im)
{
    return max64(im->nr, SMALL_ROWS);
}

static int64_t row_of_b(const lm_gemm *g)
{
    return g->tb ? g->k : g->n;
}

static size_t rows_bytes(const lm_gemm *g, int64_t rows)
{
    return (size_t)lm_round_up(rows * row_of_b(g) * (int64_t)lm_dtype_size(g->ab), 64);
}

/* Rows that a product of few rows makes numbers of at a time: they stay in the first-level cache. */
static int64_t small_rows(const lm_gemm *g)
{
    int64_t rows = SMALL_BYTES / (g->k * (int64_t)lm_dtype_size(g->ab)) / 4 * 4;
    return max64(min64(rows, SMALL_ROWS), 4);
}

/* Scratch of one worker. */
static size_t codes_bytes(const lm_gemm *g, const lm_gemm_impl *im)
{
    if (!g->b_codes)
        return 0;
    return rows_bytes(g, is_deep(g) ? CHUNK_DOWN : code_rows(im)) +
           (size_t)lm_round_up((int64_t)lm_code_rows_scratch(g->ab, row_of_b(g)), 64);
}

/* The product of columns [j, j + n) alone. */
static lm_gemm of_codes(const lm_gemm *g, const lm_gemm_impl *im, int64_t j, int64_t n,
                        char *scratch)
{
    lm_gemm part = *g;

    lm_code_rows_numbers(g->b_codes, j, n, g->k, g->ab, im->coder, scratch,
                         scratch + rows_bytes(g, n));
    part.n = n;
    part.b = scratch;
    part.ldb = g->k;
    part.b_codes = NULL;
    part.c = (char *)g->c + j * (int64_t)lm_dtype_size(g->cd);
    part.bias = g->bias ? g->bias + j : NULL;
    return part;
}

static bool is_small(const lm_gemm *g)
{
    return g->m <= LM_GEMM_SMALL_M && !g->ta && g->tb && !g->a_sum;
}

/* A product of few rows with B in panels, not in rows: the rows of each panel are unpacked. */
static bool is_small_packed(const lm_gemm *g, const lm_gemm_impl *im)
{
    return is_small(g) && im->rows_b && g->b_packed && !g->b && g->k % im->kr == 0;
}

size_t lm_gemm_work(const lm_gemm *g, lm_cpu_level level, int threads)
{
    const lm_gemm_impl *im = impl_of(level, g->ab);
    size_t most = 0;

    if (!im)
        return 0;
    /* A pool may have fewer threads than requested: the scratch must be enough for any number up to
     * `threads`. */
    for (int t = 1; t <= threads; t++) {
        plan p = plan_make(g, im, t);
        size_t need = (size_t)(p.b_bytes + t * (p.a_bytes + p.tile_bytes + p.own_b_bytes)) +
                      (size_t)t * codes_bytes(g, im);
        if (is_small_packed(g, im))
            need = (size_t)t * rows_bytes(g, im->nr);
        most = need > most ? need : most;
    }
    return most;
}

/* Packing of B: panels are independent. */
typedef struct {
    const lm_gemm *g;
    const lm_gemm_impl *im;
    int64_t kp, j0, panels;
    char *dst;
    char *codes; /* scratch of the workers */
} pack_job;

/* Storage is read along its rows: where depth runs down the rows, a few of them over all panels of
 * the group, so that each row gives whole runs of cache lines; else a longer piece of one panel. */
static int64_t chunk(bool down, int64_t kn)
{
    return down ? CHUNK_DOWN : max64(kn, 1);
}

static void pack_panels(void *ctx, int64_t begin, int64_t end, int worker)
{
    const pack_job *j = ctx;
    const lm_gemm_impl *im = j->im;
    int64_t step = chunk(!j->g->tb, j->g->k);

    for (int64_t i = begin; j->g->b_codes && i < end; i++) {
        int64_t col = j->j0 + i * im->nr;
        lm_gemm part = of_codes(j->g, im, col, min64(im->nr, j->g->n - col),
                                j->codes + (size_t)worker * codes_bytes(j->g, im));
        im->pack_b(&part, 0, 0, part.k, j->dst + i * j->kp * im->nr * im->esize);
    }
    if (j->g->b_codes)
        return;
    for (int64_t k = 0; k < j->g->k; k += step)
        for (int64_t i = begin; i < end; i++)
            im->pack_b(j->g, j->j0 + i * im->nr, k, min64(step, j->g->k - k),
                       j->dst + (i * j->kp + k) * im->nr * im->esize);
}

/* Of B [k,n] in codes: pieces of depth [begin, end) of all panels. */
static void pack_depth(void *ctx, int64_t begin, int64_t end, int worker)
{
    const pack_job *j = ctx;
    const lm_gemm_impl *im = j->im;
    char *rows = j->codes + (size_t)worker * codes_bytes(j->g, im);
    lm_gemm part = *j->g;

    part.b = rows;
    part.ldb = j->g->n;
    part.b_codes = NULL;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t k = piece * CHUNK_DOWN, kn = min64(CHUNK_DOWN, j->g->k - k);
        lm_code_rows_numbers(j->g->b_codes, j->g->b_from + k, kn, j->g->n, j->g->ab, im->coder,
                             rows, rows + rows_bytes(j->g, CHUNK_DOWN));
        for (int64_t i = 0; i < j->panels; i++)
            im->pack_b(&part, j->j0 + i * im->nr, 0, kn,
                       j->dst + (i * j->kp + k) * im->nr * im->esize);
    }
}

static void pack_columns(const lm_gemm *g, const lm_gemm_impl *im, int64_t j0, int64_t j1,
                         lm_par *par, void *dst, char *codes)
{
    int64_t panels = lm_ceil_div(j1 - j0, im->nr);
    pack_job job = { g, im, lm_round_up(g->k, im->kr), j0, panels, dst, codes };

    if (is_deep(g)) {
        lm_par_for(par, lm_ceil_div(g->k, CHUNK_DOWN), 1, pack_depth, &job);
        return;
    }
    lm_par_for(par, panels, min64(PACK_GROUP, lm_ceil_div(panels, 4 * lm_par_threads(par))),
               pack_panels, &job);
}

size_t lm_gemm_pack_size(const lm_gemm *g, lm_cpu_level level)
{
    const lm_gemm_impl *im = impl_of(level, g->ab);

    return im ? (size_t)(lm_round_up(g->n, im->nr) * lm_round_up(g->k, im->kr) * im->esize) : 0;
}

void lm_gemm_pack(const lm_gemm *g, lm_cpu_level level, lm_par *par, void *dst)
{
    const lm_gemm_impl *im = impl_of(level, g->ab);

    if (im)
        pack_columns(g, im, 0, g->n, par, dst, NULL);
}

/* The state of one worker in a block. */
typedef struct {
    const plan *p;
    char *a, *own_b, *codes;
    float *tiles;
    int64_t i0, rows, panels; /* block of rows */
    int64_t q0, q1;           /* panels of B */
    int64_t k0, depth;        /* superblock: first index and padded depth */
    lm_gemm_tail waiting;     /* a tile that is complete but not stored; tile NULL: none */
} block;

static void pack_block(const block *b, bool first_columns)
{
    const plan *p = b->p;
    const lm_gemm *g = p->g;
    const lm_gemm_impl *im = p->impl;
    int64_t kn = min64(g->k - b->k0, b->depth), step = chunk(g->ta, kn);
    int64_t panel = im->mr * b->depth * im->esize;

    for (int64_t k = 0; k < kn; k += step)
        for (int64_t q = 0; q < b->panels; q++)
            im->pack_a(g, b->i0 + q * im->mr, b->k0 + k, min64(step, kn - k),
                       b->a + q * panel + k * im->mr * im->esize);
    if (!g->a_sum || !first_columns)
        return;
    for (int64_t q = 0; q < b->panels; q++) {
        int64_t i = b->i0 + q * im->mr;
        int rows = (int)min64(im->mr, g->m - i);

        if (b->k0 == 0 && !g->a_sum_add)
            memset(g->a_sum + i, 0, sizeof(float) * (size_t)rows);
        im->sum_a(b->a + q * panel, b->depth, rows, g->a_sum + i);
    }
}

/* The destination of the tile of panel q of B and panel i of A in the block. */
static lm_gemm_tail tail_of(const block *b, const float *tile, int64_t i, int64_t q)
{
    const plan *p = b->p;
    const lm_gemm *g = p->g;
    int64_t row = b->i0 + i * p->impl->mr, col = p->j0 + q * p->impl->nr;

    return (lm_gemm_tail){
        .tile = tile,
        .nr = p->impl->nr,
        .rows = (int)min64(p->impl->mr, g->m - row),
        .cols = (int)min64(p->impl->nr, g->n - col),
        .c = (char *)g->c + (row * g->ldc + col) * (int64_t)lm_dtype_size(g->cd),
        .ldc = g->ldc,
        .cd = g->cd,
        .accumulate = g->accumulate,
        .stream = p->stream,
        .bias = g->bias ? g->bias + col : NULL,
    };
}

static void finish_waiting(block *b)
{
    if (b->waiting.tile)
        b->p->impl->finish(&b->waiting);
    b->waiting.tile = NULL;
}

/* Prefetch a tile that is added to while its product is computed. */
static void fetch_target(const lm_gemm_tail *t)
{
    int64_t size = (int64_t)lm_dtype_size(t->cd);

    for (int r = 0; r < t->rows; r++)
        for (int64_t at = 0; at < t->cols * size; at += 64)
            __builtin_prefetch((const char *)t->c + r * t->ldc * size + at, 1);
}

/* What the steps over the panels of A prefetch: lines of rows of storage, `per_row` of each, `pitch` bytes apart, in pieces of
 * `each` lines, the first `extra` of them with one more. */
typedef struct {
    const char *at;
    int64_t per_row, pitch, each, extra;
    bool one_row;
} ahead_run;

static ahead_run run_ahead(const char *at, int64_t rows, int64_t bytes, int64_t pitch,
                           int64_t parts)
{
    int64_t per_row = max64(lm_ceil_div(bytes, 64), 1), lines = bytes > 0 ? rows * per_row : 0;

    return (ahead_run){ at, per_row, pitch, lines / parts, lines % parts, rows == 1 };
}

/* Piece i: computed for each step, so without divisions where there is one row. */
static lm_gemm_ahead piece_ahead(const ahead_run *r, int64_t i)
{
    int64_t first = r->each * i + min64(i, r->extra), row = r->one_row ? 0 : first / r->per_row;

    return (lm_gemm_ahead){
        .at = r->at + row * r->pitch + (first - row * r->per_row) * 64,
        .row_end = r->at + row * r->pitch + r->per_row * 64,
        .lines = r->each + (i < r->extra),
        .row_bytes = r->per_row * 64,
        .skip = r->pitch - r->per_row * 64,
    };
}

/* What they prefetch where the worker packs B itself: depth k..k + kn of the storage of panel q, which it packs
 * next.  Only of B [n,k] and of panels of its transpose: rows of B [k,n] are read 256 bytes at a time, and these lines
 * fall into few sets of L2 when rows are 4 KiB apart. */
static ahead_run source_ahead(const block *b, int64_t q, int64_t k, int64_t kn)
{
    const plan *p = b->p;
    const lm_gemm *g = p->g;
    int64_t size = (int64_t)lm_dtype_size(g->ab), j = p->j0 + q * p->impl->nr;

    if (q >= b->q1 || !(g->b_turned || (g->b && g->tb)))
        return (ahead_run){ .one_row = true };
    k += b->k0;
    if (g->b_turned) {
        int64_t nr = p->impl->nr, row = nr * p->impl->esize;
        return run_ahead((const char *)g->b_turned + (k / nr * g->ldb + j) * row,
                         lm_ceil_div(min64(kn, g->k - k), nr), nr * row, g->ldb * row, b->panels);
    }
    return run_ahead((const char *)g->b + (j * g->ldb + k) * size, min64(p->impl->nr, g->n - j),
                     min64(kn, g->k - k) * size, g->ldb * size, b->panels);
}

/* All panels of A in the block against panel q of B; `next`: the packed panel after it, or NULL. */
static void run_panel(block *b, int64_t q, const char *panel, const char *next)
{
    const plan *p = b->p;
    const lm_gemm_impl *im = p->impl;
    int64_t tile_len = (int64_t)im->mr * im->nr;
    float *tiles = b->tiles + (p->n_sup > 1 ? (q - b->q0) * p->panels * tile_len : 0);
    bool last_sup = b->k0 + b->depth >= p->kp;
    int cols = (int)min64(p->g->n - (p->j0 + q * im->nr), im->nr);

    for (int64_t k = 0; k < b->depth; k += p->kc) {
        int64_t kn = min64(p->kc, b->depth - k), after = min64(p->kc, b->depth - k - kn);
        const char *ahead = after ? panel + (k + kn) * im->nr * im->esize : next;
        int64_t ahead_bytes = ahead ? (after ? after : kn) * im->nr * im->esize : 0;
        ahead_run fetched =
            p->own ? source_ahead(b, q + 1, k, kn) : run_ahead(ahead, 1, ahead_bytes, 0, b->panels);

        for (int64_t i = 0; i < b->panels; i++) {
            lm_gemm_step s = {
                .a = b->a + (i * b->depth + k) * im->mr * im->esize,
                .b = panel + k * im->nr * im->esize,
                .kn = kn,
                .depth = min64(p->g->k - (b->k0 + k), kn),
                .rows = (int)min64(p->g->m - (b->i0 + i * im->mr), im->mr),
                .cols = cols,
                .tile = tiles + i * tile_len,
                .load = k > 0 || b->k0 > 0,
                .ahead = piece_ahead(&fetched, i),
            };
            /* Only whole steps read the panel of A as it lies: [depth / kr] groups of mr rows. */
            if (b->waiting.tile == s.tile || (b->waiting.tile && b->waiting.cols < im->nr))
                finish_waiting(b);
            if (b->waiting.tile)
                s.tail = &b->waiting;
            bool complete = last_sup && k + kn >= b->depth;
            lm_gemm_tail tail = complete ? tail_of(b, s.tile, i, q) : (lm_gemm_tail){ 0 };
            if (complete && tail.accumulate)
                fetch_target(&tail);
            im->micro(&s);
            b->waiting = tail;
            if (!im->hide_tail)
                finish_waiting(b);
        }
    }
}

/* Pack panels [q, end) of B, as deep as the superblock, into the worker's own scratch. */
static void pack_own(const block *b, int64_t q, int64_t end)
{
    const plan *p = b->p;
    const lm_gemm *g = p->g;
    const lm_gemm_impl *im = p->impl;
    int64_t kn = min64(g->k - b->k0, b->depth), step = chunk(!g->tb, kn);

    if (g->b_codes) { /* [n,k]: one panel */
        int64_t j = p->j0 + q * im->nr;
        lm_gemm part = of_codes(g, im, j, min64(im->nr, g->n - j), b->codes);
        im->pack_b(&part, 0, b->k0, kn, b->own_b);
        return;
    }
    for (int64_t k = 0; k < kn; k += step)
        for (int64_t i = q; i < end; i++)
            im->pack_b(g, p->j0 + i * im->nr, b->k0 + k, min64(step, kn - k),
                       b->own_b + ((i - q) * p->pc + k) * im->nr * im->esize);
}

static void run_own_panels(block *b)
{
    const plan *p = b->p;
    int64_t end, bytes = p->impl->nr * p->pc * p->impl->esize;

    for (int64_t q = b->q0; q < b->q1; q = end) {
        end = min64(q + p->own, b->q1);
        pack_own(b, q, end);
        for (int64_t i = q; i < end; i++)
            run_panel(b, i, b->own_b + (i - q) * bytes, NULL);
    }
}

static void run_shared_panels(block *b)
{
    const plan *p = b->p;
    int64_t row = p->impl->nr * p->impl->esize, pitch = p->kp * row;
    const char *panel = p->b + b->q0 * pitch + b->k0 * row;

    for (int64_t q = b->q0; q < b->q1; q++, panel += pitch)
        run_panel(b, q, panel, q + 1 < b->q1 ? panel + pitch : NULL);
}

static void run_block(block *b)
{
    const plan *p = b->p;

    for (b->k0 = 0; b->k0 < p->kp; b->k0 += p->pc) {
        b->depth = min64(p->pc, p->kp - b->k0);
        pack_block(b, p->j0 == 0 && b->q0 == 0);
        if (p->own)
            run_own_panels(b);
        else
            run_shared_panels(b);
    }
    finish_waiting(b);
}

/* Where the workers' scratch for codes begins: behind all else. */
static char *codes_at(const plan *p)
{
    return (char *)p->g->work + p->b_bytes +
           p->threads * (p->a_bytes + p->tile_bytes + p->own_b_bytes);
}

static void run_items(void *ctx, int64_t begin, int64_t end, int worker)
{
    const plan *p = ctx;
    int64_t all = lm_ceil_div(p->g->m, p->impl->mr);
    int64_t cols = lm_ceil_div(p->j1 - p->j0, p->impl->nr);
    char *own =
        (char *)p->g->work + p->b_bytes + worker * (p->a_bytes + p->tile_bytes + p->own_b_bytes);

    if (p->impl->begin)
        p->impl->begin();
    for (int64_t it = begin; it < end; it++) {
        int64_t i = it / p->nb, j = it % p->nb;
        int64_t first = cut(all, p->mb, i);
        block b = {
            .p = p,
            .a = own,
            .own_b = own + p->a_bytes + p->tile_bytes,
            .codes = codes_at(p) + (size_t)worker * codes_bytes(p->g, p->impl),
            .tiles = (float *)(own + p->a_bytes),
            .i0 = first * p->impl->mr,
            .panels = cut(all, p->mb, i + 1) - first,
            .q0 = cut(cols, p->nb, j),
            .q1 = cut(cols, p->nb, j + 1),
        };
        run_block(&b);
    }
    p->impl->end();
}

/* Rows of x as F32, and zeros for those that sums over codes read beyond them. */
static void widen(const lm_gemm *g, float *x)
{
    int64_t rows = g->m > 2 ? LM_CODE_SUMS_X : g->m;

    for (int64_t i = 0; i < g->m; i++)
        lm_convert(g->ab, (const char *)g->a + i * g->lda * (int64_t)lm_dtype_size(g->ab),
                   LM_DTYPE_F32, x + i * g->k, g->k);
    memset(x + g->m * g->k, 0, (size_t)((rows - g->m) * g->k) * sizeof *x);
}

/* Column col of C from its sums; from decoded numbers if a sum may differ in bits (lm_code_rows_sums). */
static void put_sums(const lm_gemm *g, const lm_gemm_impl *im, int64_t col, const float *sum,
                     char *scratch)
{
    bool all = true;

    for (int64_t i = 0; i < g->m; i++)
        all &= fabsf(sum[i]) > 0; /* neither 0 nor NaN */
    for (int64_t i = 0; i < g->m && all; i++)
        lm_gemm_put(g, i, col, sum[i]);
    if (!all) {
        lm_gemm part = of_codes(g, im, col, 1, scratch);
        im->small_m(&part, 0, 1);
    }
}

/* Columns [j0, j1), all of run r, by sums over codes; false: numbers must be made first. */
static bool small_sums(const lm_gemm *g, const lm_gemm_impl *im, const struct lm_code_run *r,
                       int64_t j0, int64_t j1, char *scratch)
{
    float sum[SMALL_ROWS][LM_CODE_SUMS_X], *x = (float *)scratch;
    lm_code_rows_sums by = *im->sums;
    int m = (int)g->m;

    if (!by || m > LM_CODE_SUMS_X || !by(r->format, g->ab, r->data, 0, g->k, x, m, sum[0]))
        return false;
    widen(g, x);
    scratch += lm_round_up(LM_CODE_SUMS_X * g->k * (int64_t)sizeof *x, 64);
    int64_t row_bytes = (int64_t)lm_plane_bytes(&r->format->plane[0], 1, g->k);
    for (int64_t j = j0, n; j < j1; j += n) {
        n = min64(SMALL_ROWS, j1 - j);
        by(r->format, g->ab, r->data + (j - r->row) * row_bytes, n, g->k, x, m, sum[0]);
        for (int64_t i = 0; i < n; i++)
            put_sums(g, im, j + i, sum[i], scratch);
    }
    return true;
}

/* Panels [begin, end) of B. */
static void run_small_packed(void *ctx, int64_t begin, int64_t end, int worker)
{
    const plan *p = ctx;
    const lm_gemm *g = p->g;
    const lm_gemm_impl *im = p->impl;
    char *rows = (char *)g->work + (size_t)worker * rows_bytes(g, im->nr);

    for (int64_t q = begin; q < end; q++) {
        int64_t j = q * im->nr;
        lm_gemm part = *g;
        im->rows_b((const char *)g->b_packed + j * g->k * im->esize, g->k, rows);
        part.n = min64(im->nr, g->n - j);
        part.b = rows;
        part.ldb = g->k;
        part.c = (char *)g->c + j * (int64_t)lm_dtype_size(g->cd);
        part.bias = g->bias ? g->bias + j : NULL;
        im->small_m(&part, 0, part.n);
    }
}

static void run_small(void *ctx, int64_t begin, int64_t end, int worker)
{
    const plan *p = ctx;
    const lm_gemm *g = p->g;
    const lm_code_rows *c = g->b_codes;
    char *scratch = (char *)g->work + (size_t)worker * codes_bytes(g, p->impl);

    if (!c)
        p->impl->small_m(g, begin, end);
    for (int i = 0; c && i < c->n; i++) {
        const struct lm_code_run run = lm_code_rows_run(c, i), *r = &run;
        int64_t j0 = max64(begin, r->row), j1 = min64(end, r->row + r->rows);
        if (j0 >= j1 || small_sums(g, p->impl, r, j0, j1, scratch))
            continue;
        for (int64_t j = j0, n; j < j1; j += n) {
            n = min64(small_rows(g), j1 - j);
            lm_gemm part = of_codes(g, p->impl, j, n, scratch);
            p->impl->small_m(&part, 0, n);
        }
    }
}

void lm_gemm_run(const lm_gemm *g, lm_cpu_level level, lm_par *par)
{
    const lm_gemm_impl *im = impl_of(level, g->ab);
    plan p;

    if (!im) {
        lm_gemm_ref(g, par);
        return;
    }
    if (is_small(g) && (g->b || g->b_codes)) {
        p = (plan){ .g = g, .impl = im };
        int64_t grain = lm_round_up(lm_ceil_div(g->n, 8 * lm_par_threads(par)), 16);
        lm_par_for(par, g->n, max64(grain, 16), run_small, &p);
        return;
    }
    if (is_small_packed(g, im)) {
        p = (plan){ .g = g, .impl = im };
        lm_par_for(par, lm_ceil_div(g->n, im->nr), 1, run_small_packed, &p);
        return;
    }
    p = plan_make(g, im, lm_par_threads(par));
    for (p.j0 = 0; p.j0 < g->n; p.j0 += p.sweep) {
        p.j1 = min64(g->n, p.j0 + p.sweep);
        if (g->b_packed) {
            p.b = (const char *)g->b_packed + p.j0 * p.kp * im->esize;
        } else if (!p.own) {
            p.b = g->work;
            pack_columns(g, im, p.j0, p.j1, par, g->work, codes_at(&p));
        }
        lm_par_for(par, p.mb * p.nb, 1, run_items, &p);
    }
}
