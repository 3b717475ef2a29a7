/* SPDX-License-Identifier: Apache-2.0 */
/* pieces.c -- see pieces.h. */
#include "convert/pieces.h"

#include <stdio.h>
#include <string.h>

enum { TILE = 32 };

static bool has_turned(const lm_model_tensor *s)
{
    return lm_part_is_stack(s->part) && !s->bias;
}

int lm_pieces(const lm_config *c, const lm_model_tensor *s)
{
    const lm_tensor_name *row = lm_arch_part(c->arch, s->part);
    if (row && strchr(row->gguf, ','))
        return 2;
    return lm_part_is_stack(s->part);
}

/* "blk.3.attn_k_b.weight" of "blk.3.attn_k_b,attn_v_b.weight". */
static void name_of(const lm_config *c, const lm_model_tensor *s, int k, char out[LM_TENSOR_NAME])
{
    const char *both = lm_arch_part(c->arch, s->part)->gguf, *comma = strchr(both, ',');
    const char *own = k ? comma + 1 : both;
    const int n = !k && comma ? (int)(comma - both) : (int)strlen(own);
    snprintf(out, LM_TENSOR_NAME, "blk.%lld.%.*s%s", (long long)s->layer, n, own,
             s->bias ? ".bias" : ".weight");
}

static void cut_latents(const lm_layer *y, int k, lm_gguf_piece *p)
{
    const lm_latent *a = &y->latent;
    p->ndim = 3;
    p->outer = y->heads;
    p->outer_step = (a->nope_dim + a->value_dim) * a->kv_rank;
    p->base = k ? a->nope_dim * a->kv_rank : 0;
    p->inner = k ? a->value_dim : a->kv_rank;
    p->inner_step = k ? a->kv_rank : 1;
    p->cols = k ? a->kv_rank : a->nope_dim;
    p->step = k ? 1 : a->kv_rank;
}

/* s [experts, in, out], or its bias [experts, out], of which a piece has each `by`th number. */
static void cut_experts(const lm_model_tensor *s, int k, int by, lm_gguf_piece *p)
{
    const int64_t in = s->bias ? 1 : s->dim[1], out = s->dim[s->bias ? 1 : 2];
    p->ndim = s->bias ? 2 : 3;
    p->outer = s->dim[0];
    p->outer_step = in * out;
    p->base = k;
    p->inner = s->bias ? 1 : out / by;
    p->inner_step = by;
    p->cols = s->bias ? out / by : in;
    p->step = s->bias ? by : out;
}

static void add_run(lm_gguf_piece *p, int64_t at, int64_t rows)
{
    p->run[p->runs++] = (lm_piece_run){ at, rows };
    p->inner += p->groups * rows;
}

/* Of a layer with a state: queries, keys and values, or gates. */
static void cut_states(const lm_model_tensor *s, const lm_delta_sizes *d, int k, lm_gguf_piece *p)
{
    const int64_t key = d->key_dim, value = d->heads / d->key_heads * d->value_dim;
    p->ndim = 3;
    p->outer = 1;
    p->cols = s->dim[1];
    p->groups = d->key_heads;
    p->pitch = 2 * (key + value);
    if (k) {
        add_run(p, 2 * key + value, value);
        return;
    }
    add_run(p, 0, key);
    add_run(p, key, key);
    add_run(p, 2 * key, value);
}

lm_gguf_piece lm_piece_of(const lm_config *c, const lm_model_tensor *s, int k)
{
    lm_gguf_piece p = { .outer = 0 };
    name_of(c, s, k, p.name);
    if (s->part == LM_PART_KV_B)
        cut_latents(&c->layer[s->layer], k, &p);
    else if (s->part == LM_PART_DELTA_IN)
        cut_states(s, &c->layer[s->layer].delta, k, &p);
    else
        cut_experts(s, k, lm_pieces(c, s), &p);
    return p;
}

int lm_piece_shape(const lm_gguf_piece *p, int64_t dim[3])
{
    if (p->runs) {
        dim[0] = p->inner;
        dim[1] = p->cols;
        return 2;
    }
    dim[0] = p->outer;
    dim[1] = p->ndim == 3 ? p->inner : p->cols;
    dim[2] = p->cols;
    return p->ndim;
}

/* ---- moving ---- */

static void move_one(const lm_piece_job *j, int64_t whole, int64_t part)
{
    char *w = (char *)j->whole + (size_t)whole * j->size;
    char *p = (char *)j->part + (size_t)part * j->size;
    if (j->size == 2)
        memcpy(j->out ? p : w, j->out ? w : p, 2);
    else
        memcpy(j->out ? p : w, j->out ? w : p, 4);
}

/* Some rows and columns at a time, so that both sides stay in the cache. */
static void move_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_piece_job *j = ctx;
    const lm_gguf_piece *p = j->piece;
    (void)worker;
    for (int64_t o = begin; o < end; o++)
        for (int64_t i0 = 0; i0 < p->inner; i0 += TILE)
            for (int64_t k0 = 0; k0 < p->cols; k0 += TILE)
                for (int64_t i = i0; i < p->inner && i < i0 + TILE; i++)
                    for (int64_t k = k0; k < p->cols && k < k0 + TILE; k++)
                        move_one(j, p->base + o * p->outer_step + i * p->inner_step + k * p->step,
                                 (o * p->inner + i) * p->cols + k);
}

/* Whole rows, run by run. */
static void move_runs(const lm_piece_job *j)
{
    const lm_gguf_piece *p = j->piece;
    const size_t row = (size_t)p->cols * j->size;
    char *part = j->part;
    for (int r = 0; r < p->runs; r++)
        for (int64_t g = 0; g < p->groups; g++) {
            char *whole = (char *)j->whole + (size_t)(g * p->pitch + p->run[r].at) * row;
            const size_t bytes = (size_t)p->run[r].rows * row;
            memcpy(j->out ? part : whole, j->out ? whole : part, bytes);
            part += bytes;
        }
}

void lm_piece_move(const lm_piece_job *j, lm_par *par)
{
    lm_piece_job copy = *j;
    if (j->piece->runs) {
        move_runs(j);
        return;
    }
    lm_par_for(par, j->piece->outer, 1, move_range, &copy);
}

bool lm_piece_has_codes(const lm_model_tensor *s)
{
    return has_turned(s);
}

void lm_piece_move_codes(const lm_piece_job *j, size_t row)
{
    const lm_gguf_piece *p = j->piece;
    for (int64_t o = 0; o < p->outer; o++)
        for (int64_t i = 0; i < p->inner; i++) {
            /* row base + i inner_step of the transpose of matrix o, which has `step` rows */
            char *w = (char *)j->whole + (size_t)(o * p->step + p->base + i * p->inner_step) * row;
            char *q = (char *)j->part + (size_t)(o * p->inner + i) * row;
            memcpy(j->out ? q : w, j->out ? w : q, row);
        }
}
