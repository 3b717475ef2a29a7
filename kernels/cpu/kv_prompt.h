/* SPDX-License-Identifier: Apache-2.0 */
/* kv_prompt.h -- rows of a prompt over a coded cache: keys and values of a head are decoded once, into the form that
 * attention over plain caches multiplies from, and its kernel does the rest (attention_jobs.h); included by kv_simd.c. */
#ifndef LM_KERNELS_CPU_KV_PROMPT_H
#define LM_KERNELS_CPU_KV_PROMPT_H

/* Whose keys and values a job packs. */
typedef struct {
    const kv_call *k;
    kv_seq s;
    kv_scratch w; /* tile, kt and v alone */
    bool tiles;   /* of BF16 */
} kv_packing;

/* Into the kernel's form for vectors. */
LM_INLINE void pack_floats(lm_dtype t, const attn_job *job, int64_t lo, void *keys, void *values)
{
    kv_packing *p = job->cache;
    int64_t hi = job->mask.keys;
    for (int64_t j0 = lo / KV_SUB * KV_SUB; j0 < hi; j0 += KV_SUB) {
        p->w.kt = (float *)keys + j0 * job->D;
        p->w.v = (float *)values + j0 * p->w.lv;
        load_keys(t, p->k, &p->s, j0, lo, hi, &p->w);
        load_values(t, p->k, &p->s, j0, lo, hi, &p->w);
    }
}

#ifdef KV_TILES
static const uint16_t of_both[32]
    __attribute__((aligned(64))) = { 0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31 };

/* A row of pairs (a[i], b[i]) as BF16. */
LM_INLINE void store_pairs(uint16_t *to, const float *a, const float *b)
{
    __m512bh v = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(b), _mm512_loadu_ps(a));
    _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(of_both), (__m512i)v));
}

/* Into tiles of BF16, 64 tokens after another. */
LM_INLINE void pack_tiles(lm_dtype t, const attn_job *job, int64_t lo, void *keys, void *values)
{
    kv_packing *p = job->cache;
    int64_t hi = job->mask.keys, D = job->D;
    for (int64_t j0 = lo / KV_SUB * KV_SUB; j0 < hi; j0 += KV_SUB) {
        uint16_t *to = (uint16_t *)keys + j0 * D;
        load_keys(t, p->k, &p->s, j0, lo, hi, &p->w);
        load_values(t, p->k, &p->s, j0, lo, hi, &p->w);
        for (int64_t x = 0; x < KV_SUB; x += LM_KV_TILE)
            for (int64_t d = 0; d < D; d += 2, to += 32)
                store_pairs(to, p->w.kt + d * KV_SUB + x, p->w.kt + (d + 1) * KV_SUB + x);
        to = (uint16_t *)values + j0 * D;
        for (int64_t x = 0; x < KV_SUB; x += 32)
            for (int64_t d = 0; d < D; d += 16)
                for (int64_t i = 0; i < 32; i += 2, to += 32)
                    store_pairs(to, p->w.v + (x + i) * p->w.lv + d,
                                p->w.v + (x + i + 1) * p->w.lv + d);
    }
}
#endif

#define KV_PACK(name)                                                                  \
    static void name##_f32(const attn_job *job, int64_t lo, void *keys, void *values)  \
    {                                                                                  \
        name(LM_DTYPE_F32, job, lo, keys, values);                                     \
    }                                                                                  \
    static void name##_bf16(const attn_job *job, int64_t lo, void *keys, void *values) \
    {                                                                                  \
        name(LM_DTYPE_BF16, job, lo, keys, values);                                    \
    }

#ifdef KV_TILES
#define packed_bytes lm_attention_packed_bytes_avx512
#define run_packed   lm_attention_packed_avx512
KV_PACK(pack_tiles)
#else
#define packed_bytes LM_ATTN_NAME(attention_packed_bytes, LM_SIMD)
#define run_packed   LM_ATTN_NAME(attention_packed, LM_SIMD)
#endif
KV_PACK(pack_floats)

/* Bytes that a worker needs; where they lie. */
static size_t lay_packing(const kv_call *k, char *at, kv_packing *p, char **job)
{
    size_t bytes = attn_round64(sizeof *p->w.tile), more = 0;
    p->w.tile = (kv_tile_scratch *)(void *)at;
    p->w.lv = k->ld; /* as the kernel has them, whatever is wider */
#ifdef KV_TILES
    more = k->latent ? 0 : lm_attention_packed_bytes_amx(k->a, k->keys);
    p->tiles = more > 0;
    if (p->tiles) {
        p->w.kt = (float *)(void *)(at + bytes);
        p->w.v = p->w.kt + KV_SUB * k->ld;
        bytes += (size_t)(2 * KV_SUB * k->ld) * sizeof(float);
    }
#endif
    *job = at + bytes;
    return bytes + (more ? more : packed_bytes(k->a, k->keys));
}

static size_t prompt_bytes(const kv_call *k)
{
    kv_packing p;
    char *job;
    return lay_packing(k, NULL, &p, &job);
}

/* Part `part` of the rows of key/value head bk % K of sequence bk / K. */
static attn_job prompt_job(const kv_call *k, kv_packing *p, int64_t bk, int64_t part)
{
    static const attn_drop none = { 0 };
    const lm_attention_attr *a = k->a;
    const lm_tensor *qkv = &k->c->in[KV_QKV];
    size_t size = lm_dtype_size(qkv->dtype);
    int64_t H = a->heads, K = a->kv_heads, D = a->head_dim, kv = bk % K,
            E = lm_attention_value_dim(a), pitch = lm_kv_row_heads(k->attr);
    p->s = kv_seq_of(k->c, bk / K, kv);
    return (attn_job){
        .q = attn_at(qkv->data, p->s.row * pitch, size),
        .o = attn_at(k->c->out[0].data, p->s.row * H * E, size),
        .lse =
            k->c->n_out > 1 && k->c->out[1].data ? (float *)k->c->out[1].data + p->s.row * H : NULL,
        .lse_head = 1,
        .lse_row = H,
        .sinks = attn_f32(k->c, KV_SINKS),
        .bias = k->bias,
        .cache = p,
        .q_pitch = pitch,
        .o_pitch = H * E,
        .b = bk / K,
        .kv = kv,
        .K = K,
        .h0 = kv * k->group,
        .h1 = (kv + 1) * k->group,
        .H = H,
        .T = p->s.fresh,
        .D = D,
        .E = E,
        .queries = p->s.fresh,
        .part = part,
        .parts = k->parts,
        .scale = (float)a->scale,
        .soft_cap = (float)a->soft_cap,
        .mask = p->s.mask,
        .drop = &none,
    };
}

static void prompt_units(void *ctx, int64_t begin, int64_t end, int worker)
{
    const kv_call *k = ctx;
    lm_dtype t = k->c->in[KV_QKV].dtype;
    char *scratch;
    kv_packing p = { .k = k };
    lay_packing(k, k->scratch + (size_t)worker * k->scratch_bytes, &p, &scratch);
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / k->parts, b = bk / k->a->kv_heads;
        if (!kv_is_prompt(k->c, b) || attn_i32(k->c, KV_FRESH)[b] == 0)
            continue;
        attn_job job = prompt_job(k, &p, bk, u % k->parts);
#ifdef KV_TILES
        if (p.tiles) {
            job.pack = VF_PICK(pack_tiles, t);
            lm_attention_packed_amx(&job, scratch);
            continue;
        }
#endif
        job.pack = VF_PICK(pack_floats, t);
        run_packed(t, &job, scratch);
    }
}

#endif
