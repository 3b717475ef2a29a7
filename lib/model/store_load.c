/* SPDX-License-Identifier: Apache-2.0 */
/* store_load.c -- loads tensors into a store. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "format/safetensors_table.h"
#include "kernels/panels.h"
#include "model/fused.h"
#include "model/store_impl.h"
#include "numeric/format.h"

/* ---- transposing ---- */

typedef struct {
    const void *src;
    void *dst;
    int64_t rows, cols; /* of src */
    size_t size;
} turn_job;

#define TURN(type)                                                        \
    for (int64_t c0 = begin; c0 < end; c0 += STORE_TILE)                  \
        for (int64_t r0 = 0; r0 < j->rows; r0 += STORE_TILE)              \
            for (int64_t r = r0; r < j->rows && r < r0 + STORE_TILE; r++) \
                for (int64_t c = c0; c < end && c < c0 + STORE_TILE; c++) \
    ((type *)j->dst)[c * j->rows + r] = ((const type *)j->src)[r * j->cols + c]

/* Columns [begin, end) of src, which are rows of dst. */
static void turn_columns(void *ctx, int64_t begin, int64_t end, int worker)
{
    const turn_job *j = ctx;
    (void)worker;
    if (j->size == 1)
        TURN(uint8_t);
    else if (j->size == 2)
        TURN(uint16_t);
    else if (j->size == 4)
        TURN(uint32_t);
    else
        TURN(uint64_t);
}

void store_transpose(lm_par *par, const void *src, int64_t rows, int64_t cols, size_t size,
                     void *dst)
{
    turn_job j = { src, dst, rows, cols, size };
    lm_par_for(par, cols, STORE_TILE, turn_columns, &j);
}

void store_turn(lm_par *par, const store_piece *p, bool back, const void *src, size_t size,
                void *dst)
{
    const int64_t rows = p->rows / p->stack;
    const size_t bytes = (size_t)(rows * p->cols) * size;
    for (int64_t k = 0; k < p->stack; k++)
        store_transpose(par, (const char *)src + (size_t)k * bytes, back ? rows : p->cols,
                        back ? p->cols : rows, size, (char *)dst + (size_t)k * bytes);
}

/* ---- reading and converting ---- */

/* A tensor in the file's shape: memory, or a file from which any thread reads. */
typedef struct {
    lm_dtype dtype;
    int64_t from, count; /* the elements [from, from + count) of it */
    const uint8_t *data; /* NULL: by `read` */
    lm_code (*read)(const void *ctx, const lm_st_tensor *t, uint64_t from, void *dst, size_t bytes,
                    lm_err *e);
    const void *ctx;
    const lm_st_tensor *t;
    bool whole; /* read by one thread: its bytes must be decoded */
} origin;

typedef struct {
    const origin *o;
    lm_dtype to;
    int64_t first; /* element of the tensor that goes to dst */
    uint8_t *dst;
    pthread_mutex_t lock;
    bool failed; /* under lock, with err */
    lm_err err;  /* the first */
} fetch_job;

enum { PIECE = 1 << 16, FETCH_GRAIN = 1 << 18 }; /* bytes that pass through the stack; elements */

static lm_code fetch(const origin *o, lm_dtype to, int64_t begin, int64_t n, uint8_t *dst,
                     lm_err *e)
{
    _Alignas(64) uint8_t buf[PIECE];
    size_t size = lm_dtype_size(o->dtype), out = lm_dtype_size(to);
    int64_t step = (int64_t)(PIECE / size);
    begin += o->from;
    if (o->data) {
        lm_convert(o->dtype, o->data + (size_t)begin * size, to, dst, n);
        return LM_OK;
    }
    if (o->dtype == to)
        return o->read(o->ctx, o->t, (uint64_t)begin * size, dst, (size_t)n * size, e);
    for (int64_t i = 0; i < n; i += step) {
        int64_t k = n - i < step ? n - i : step;
        if (o->read(o->ctx, o->t, (uint64_t)(begin + i) * size, buf, (size_t)k * size, e))
            return e->code;
        lm_convert(o->dtype, buf, to, dst + (size_t)i * out, k);
    }
    return LM_OK;
}

static void fetch_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    fetch_job *j = ctx;
    lm_err e = { 0 };
    (void)worker;
    if (!fetch(j->o, j->to, j->first + begin, end - begin,
               j->dst + (size_t)begin * lm_dtype_size(j->to), &e))
        return;
    pthread_mutex_lock(&j->lock);
    if (!j->failed)
        j->err = e;
    j->failed = true;
    pthread_mutex_unlock(&j->lock);
}

/* Elements [first, first + n).  Those of one tensor are asked for in order. */
static lm_code fetch_part(lm_par *par, const origin *o, lm_dtype to, int64_t first, int64_t n,
                          void *dst, lm_err *e)
{
    fetch_job j = { .o = o, .to = to, .first = first, .dst = dst };
    if (o->whole && o->dtype == to)
        return o->read(o->ctx, o->t, (uint64_t)(o->from + first) * lm_dtype_size(to), dst,
                       lm_plain_bytes(to, n), e);
    pthread_mutex_init(&j.lock, NULL);
    lm_par_for(o->whole ? NULL : par, n, FETCH_GRAIN, fetch_range, &j);
    pthread_mutex_destroy(&j.lock);
    if (j.failed)
        *e = j.err;
    return j.failed ? e->code : LM_OK;
}

static lm_code fetch_all(lm_par *par, const origin *o, lm_dtype to, void *dst, lm_err *e)
{
    return fetch_part(par, o, to, 0, o->count, dst, e);
}

/* ---- one tensor ---- */

/* Size of the largest tensor or state. */
static size_t passage_bytes(const lm_store *s)
{
    size_t most = 0;
    for (int k = 0; k < s->n_blocks; k++) {
        const lm_store_block *b = &s->block[k];
        for (int i = 0; i < lm_store_tensors(s, b); i++) {
            const store_piece p = store_piece_of(s, b, i);
            const store_piece w = store_whole(&p);
            bool own = b->role == LM_KEPT_OPT || store_own(s, i) == b;
            size_t bytes = own ? store_bytes(b, &w) : 0;
            most = bytes > most ? bytes : most;
        }
    }
    return most;
}

void *store_open(lm_store *s, const lm_store_block *k, const store_piece *p, lm_err *e)
{
    lm_backend *b = s->backend;
    if (k->space != LM_SPACE_DEVICE && !p->cut && !(p->apart && !store_is_own(p)))
        return store_at(k, p);
    if (s->passage.data)
        return s->passage.data;
    size_t most = passage_bytes(s);
    if (b->host_alloc(b, most, "a tensor", &s->passage.data, e))
        return NULL;
    s->passage.bytes = most;
    return s->passage.data;
}

/* Copy what there is memory for of the part that this rank has of the whole matrix at `from`. */
static void take_part(const store_piece *p, size_t element, const char *from, char *to)
{
    const lm_cut *c = p->cut;
    const int64_t first = p->apart ? p->own.row : 0, end = p->apart ? first + p->own.rows : p->rows;
    const size_t row = (size_t)p->cols * element;
    lm_range r;
    if (store_is_none(p))
        return;
    if (!c || c->ranks == 1) {
        memcpy(to + (size_t)first * row, from + (size_t)first * row, (size_t)(end - first) * row);
        return;
    }
    for (int64_t k = 0, at = 0; lm_cut_at(c, k, &r); k++) {
        if (c->dim) { /* columns: of each row */
            for (int64_t i = first; i < end; i++)
                memcpy(to + (size_t)i * row + (size_t)at * element,
                       from + (size_t)(i * c->whole + r.from) * element, (size_t)r.count * element);
        } else {
            const int64_t lo = at > first ? at : first,
                          hi = at + r.count < end ? at + r.count : end;
            if (lo < hi)
                memcpy(to + (size_t)lo * row, from + (size_t)(r.from + lo - at) * row,
                       (size_t)(hi - lo) * row);
        }
        at += r.count;
    }
}

lm_code store_close(lm_store *s, const lm_store_block *k, const store_piece *p, const void *made,
                    lm_err *e)
{
    lm_backend *b = s->backend;
    void *place = store_at(k, p);
    const bool part = p->cut || (p->apart && !store_is_own(p));
    size_t bytes = store_bytes(k, p);
    if (s->shared && store_send(s, k, p, made, e))
        return e->code;
    if (part && k->space != LM_SPACE_DEVICE) {
        take_part(p, store_element(k), made, place);
        return LM_OK;
    }
    if (part) {
        if (lm_grow(&s->passage.part, &s->passage.part_room, bytes, 1, "a tensor", e))
            return e->code;
        take_part(p, store_element(k), made, (char *)s->passage.part);
        made = s->passage.part;
        bytes = store_is_none(p) ? 0 : bytes;
    }
    if (made == place)
        return LM_OK;
    /* the next tensor uses the same buffer */
    return b->copy(b, place, made, bytes, b->main, e) || b->sync(b, b->main, e) ? e->code : LM_OK;
}

void store_end(lm_store *s)
{
    if (s->passage.data)
        s->backend->host_free(s->backend, s->passage.data, s->passage.bytes);
    lm_free(s->passage.file);
    lm_free(s->passage.part);
    memset(&s->passage, 0, sizeof s->passage);
}

/* Copy codes unchanged. */
static lm_code bring_codes(lm_store *s, const lm_store_block *k, int i, const lm_model_source *src,
                           const lm_st_tensor *t, lm_err *e)
{
    const store_piece p = store_piece_of(s, k, i);
    bool turned;
    if (lm_model_source_format(src, t, &turned) != k->format)
        return lm_fail(e, LM_EBUG, t->name, NULL,
                       "is not in the format that it had when the model was built");
    void *to = store_open(s, k, &p, e);
    return !to || lm_model_source_codes(src, t, to, e) ? e->code : store_close(s, k, &p, to, e);
}

/* A matrix in BF16 whose panels replace its rows: each has the place of 32 rows. */
typedef struct {
    const lm_store *s;
    uint16_t *at, *rows; /* the matrix; scratch of the workers */
    int64_t cols;
} pack_job;

static void pack_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const pack_job *j = ctx;
    int64_t count = LM_PANEL * j->cols;
    uint16_t *rows = j->rows + worker * count;
    for (int64_t q = begin; q < end; q++) {
        memcpy(rows, j->at + q * count, (size_t)count * sizeof *rows);
        store_pack(j->s, LM_DTYPE_BF16, rows, LM_PANEL, j->cols, j->at + q * count);
    }
}

static lm_code pack_in_place(lm_store *s, const store_piece *p, void *at, lm_err *e)
{
    size_t panel = (size_t)(LM_PANEL * p->cols) * sizeof(uint16_t);
    if (lm_grow(&s->passage.file, &s->passage.file_room, (size_t)lm_par_threads(s->par) * panel, 1,
                "rows of a tensor", e))
        return e->code;
    pack_job j = { .s = s, .at = at, .rows = (uint16_t *)s->passage.file, .cols = p->cols };
    lm_par_for(s->par, p->rows / LM_PANEL, 1, pack_range, &j);
    return LM_OK;
}

lm_code store_into_panels(lm_store *s, const lm_store_block *k, int i, lm_err *e)
{
    const store_piece p = store_piece_of(s, k, i);
    return lm_store_in_panels(s, k, i) && !store_is_none(&p)
               ? pack_in_place(s, &p, store_at(k, &p), e)
               : LM_OK;
}

/* Rows of numbers that become codes. */
typedef struct {
    const lm_format *format;
    const float *rows;          /* from row `first` of the tensor on */
    int64_t first, count, cols; /* count: rows of the tensor */
    uint8_t *at;                /* the planes one behind another */
} encode_job;

static void encode_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const encode_job *j = ctx;
    void *plane[LM_MAX_PLANES] = { NULL };
    uint8_t *at = j->at;
    (void)worker;
    for (int p = 0; p < j->format->n_planes; p++) {
        size_t bytes = lm_plane_bytes(&j->format->plane[p], 1, j->cols);
        plane[p] = at + (size_t)(j->first + begin) * bytes;
        at += (size_t)j->count * bytes;
    }
    j->format->encode(j->format, j->rows + begin * j->cols, end - begin, j->cols, j->cols, plane,
                      NULL);
}

enum {
    ENCODE_ELEMENTS = 1 << 22
}; /* in F32 at a time, where the file has rows as they are wanted */

/* The numbers of a tensor in the file's shape, in F32, as codes of block k. */
static lm_code bring_encoded(lm_store *s, const lm_store_block *k, const store_piece *p,
                             const origin *o, void *to, lm_err *e)
{
    int64_t some = p->turned ? p->rows : (ENCODE_ELEMENTS + p->cols - 1) / p->cols;
    some = some < p->rows ? some : p->rows;
    size_t count = (size_t)(some * p->cols), bytes = count * sizeof(float);
    if (lm_grow(&s->passage.file, &s->passage.file_room, p->turned ? 2 * bytes : bytes, 1,
                "rows of a tensor", e))
        return e->code;
    float *file = (float *)(void *)s->passage.file, *rows = p->turned ? file + count : file;
    for (int64_t first = 0, n; first < p->rows; first += n) {
        n = p->rows - first < some ? p->rows - first : some;
        if (fetch_part(s->par, o, LM_DTYPE_F32, first * p->cols, n * p->cols, file, e))
            return e->code;
        if (p->turned)
            store_turn(s->par, p, false, file, sizeof(float), rows);
        encode_job j = { k->format, rows, first, p->rows, p->cols, to };
        lm_par_for(s->par, n, 16, encode_range, &j);
    }
    return LM_OK;
}

/* The only input of numbers. */
static lm_code bring(lm_store *s, const lm_store_block *k, int i, const origin *o, lm_err *e)
{
    const store_piece p = store_piece_of(s, k, i), whole = store_whole(&p);
    size_t size = store_element(k);
    void *to = store_open(s, k, &p, e), *file = to;
    if (!to)
        return e->code;
    if (!size)
        return bring_encoded(s, k, &p, o, to, e) ? e->code : store_close(s, k, &p, to, e);
    if (p.turned) {
        if (lm_grow(&s->passage.file, &s->passage.file_room, (size_t)o->count * size, 1, "a tensor",
                    e))
            return e->code;
        file = s->passage.file;
    }
    if (fetch_all(s->par, o, k->format->element, file, e))
        return e->code;
    if (file != to)
        store_turn(s->par, &whole, false, file, size, to);
    return store_close(s, k, &p, to, e) || store_into_panels(s, k, i, e) ? e->code : LM_OK;
}

/* ---- a model ---- */

static bool same_shape(int ndim, const int64_t *dim, const lm_st_tensor *t)
{
    bool same = t->ndim == ndim;
    for (int i = 0; same && i < ndim; i++)
        same = t->dim[i] == dim[i];
    return same;
}

static const char other_base[] = "use the base on which the adapter was trained";

/* adapter: the file is that of an adapter, whose shapes follow from its own configuration and from the base. */
static lm_code check_tensor(const lm_slice *s, const lm_st_tensor *t, const char *file,
                            bool adapter, lm_err *e)
{
    char want[LM_ST_SHAPE], have[LM_ST_SHAPE];
    if (!same_shape(s->ndim, s->dim, t))
        return lm_fail(e, LM_EUSAGE, file,
                       adapter ? other_base : "config.json and weights belong to different models",
                       "tensor \"%s\" has shape [%s], %s [%s]", t->name,
                       lm_st_show_shape(t->ndim, t->dim, have),
                       adapter ? "where the base and adapter_config.json have"
                               : "config.json requires",
                       lm_st_show_shape(s->ndim, s->dim, want));
    if (t->dtype == LM_DTYPE_NONE || !lm_dtype_is_float(t->dtype))
        return lm_fail(e, LM_EUSAGE, file, NULL, "tensor \"%s\" has dtype %s, not a float type",
                       t->name, t->dtype_name);
    return LM_OK;
}

/* The second would be stored where the size of the first has room. */
static lm_code twice(const lm_slice *s, const char *file, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, file, "keep one of them",
                   "tensor \"%s\" occurs twice, with and without its prefix", s->name);
}

/* The tensor of the checkpoint with that name; -1: none. */
static int base_slice(const lm_model *m, const char *name)
{
    int i = lm_model_slice(m, name);
    return i >= 0 && lm_slice_is(&m->slice[i], LM_TENSORS_BASE) ? i : -1;
}

/* Tensors of the model that a fused one holds. */
static lm_code see_fused(const lm_model *m, const lm_fused *f, const lm_st_tensor *t,
                         const char *file, bool *seen, lm_err *e)
{
    char name[LM_TENSOR_NAME];
    lm_code rc = lm_fused_check(f, t, file, e);
    for (int64_t k = 0; !rc && k < lm_fused_count(f); k++) {
        lm_fused_name(&m->config, f, k, name);
        const int i = lm_model_slice(m, name);
        if (seen[i])
            rc = lm_fail(e, LM_EUSAGE, file, "keep one of them",
                         "tensor \"%s\" occurs twice, also in \"%s\"", name, t->name);
        seen[i] = true;
    }
    return rc;
}

lm_code lm_model_check(const lm_model *m, const lm_model_source *src, lm_err *e)
{
    bool *seen = NULL;
    lm_code rc = LM_OK;
    if (lm_alloc_n(&seen, (size_t)m->n_slices, sizeof *seen, "a list of tensors", e))
        return e->code;
    for (size_t k = 0; !rc && k < lm_model_source_count(src); k++) {
        const lm_st_tensor *t = lm_model_source_at(src, k);
        const char *file = lm_model_source_file_of(src, t);
        int i = base_slice(m, t->name);
        lm_fused fused;
        if (i < 0 && lm_fused_find(&m->config, t->name, &fused)) {
            rc = see_fused(m, &fused, t, file, seen, e);
            continue;
        }
        if (i < 0) {
            if (!lm_model_ignores(m, t->name))
                rc =
                    lm_fail(e, LM_EUSAGE, file, NULL, "tensor \"%s\" does not belong to a %s model",
                            t->name, lm_arch_name(m->config.arch));
            continue;
        }
        rc = seen[i] ? twice(&m->slice[i], file, e) : check_tensor(&m->slice[i], t, file, false, e);
        seen[i] = true;
    }
    lm_err_in(e, "%s", lm_model_source_path(src));
    for (int i = 0; !rc && i < m->n_slices; i++)
        if (!seen[i] && lm_slice_is(&m->slice[i], LM_TENSORS_BASE) &&
            !(m->slice[i].may_lack &&
              (m->build.mode == LM_MODE_TRAIN || (m->build.trainable && m->slice[i].trains))))
            rc = lm_fail(e, LM_EUSAGE, lm_model_source_path(src), NULL, "tensor \"%s\" is missing",
                         m->slice[i].name);
    lm_free(seen);
    return rc;
}

static lm_code read_source(const void *ctx, const lm_st_tensor *t, uint64_t from, void *dst,
                           size_t bytes, lm_err *e)
{
    return lm_model_source_read(ctx, t, from, dst, bytes, e);
}

/* True if a tensor of the source becomes codes here that it is not in. */
static bool is_encoded(const lm_model *m, const lm_store_block *k, const lm_model_source *src,
                       const lm_st_tensor *t)
{
    bool turned;
    return (k->format == m->build.frozen_format || k->format == m->build.frozen_embed) &&
           lm_model_source_format(src, t, &turned) != k->format;
}

/* Choices are by scores and this bias: with a NaN they would be others, without a sign of it in the numbers. */
static lm_code check_bias(const lm_model_source *src, const origin *o, lm_err *e)
{
    float x[LM_ROUTE_MOST_EXPERTS];
    if (fetch(o, LM_DTYPE_F32, 0, o->count, (uint8_t *)x, e))
        return e->code;
    for (int64_t i = 0; i < o->count; i++)
        if (!isfinite(x[i]))
            return lm_fail(e, LM_ENUMERIC, lm_model_source_path(src),
                           "begin with another copy of the model",
                           "tensor \"%.200s\" holds %s of expert %lld", o->t->name,
                           isnan(x[i]) ? "a NaN" : "an infinity", (long long)i);
    return LM_OK;
}

/* Numbers of a tensor of the source for slice i. */
static lm_code load_slice(lm_store *s, lm_model_source *src, int i, const origin *o, lm_err *e)
{
    const lm_model *m = s->model;
    const lm_store_block *k = store_own(s, i);
    if (m->slice[i].by_load && check_bias(src, o, e))
        return e->code;
    if (!k) /* in the file */
        return LM_OK;
    return store_codes(m, m->slice[i].param) && k->format->element != o->dtype &&
                   !is_encoded(m, k, src, o->t)
               ? bring_codes(s, k, i, src, o->t, e)
               : bring(s, k, i, o, e);
}

/* Those of a fused tensor, in its order; nothing if the tensor is not fused. */
static lm_code load_fused(lm_store *s, lm_model_source *src, origin o, lm_err *e)
{
    const lm_model *m = s->model;
    char name[LM_TENSOR_NAME];
    lm_fused f;
    lm_code rc = LM_OK;
    if (!lm_fused_find(&m->config, o.t->name, &f))
        return LM_OK;
    o.count /= lm_fused_count(&f);
    for (int64_t k = 0; !rc && k < lm_fused_count(&f); k++) {
        lm_fused_name(&m->config, &f, k, name);
        o.from = k * o.count;
        rc = load_slice(s, src, lm_model_slice(m, name), &o, e);
    }
    return rc;
}

/* Embedding, head, and what files hold of them again for modules: a number for the bytes of each. */
typedef struct {
    struct copy {
        uint64_t hash;
        lm_part of;
        char name[LM_TENSOR_NAME];
    } copy[2 + 2 * LM_MOST_AHEAD];
    int n;
} copies;

static lm_code hash_tensor(const lm_model_source *src, const lm_st_tensor *t, uint64_t *out,
                           lm_err *e)
{
    const size_t most = 1 << 20;
    uint8_t *piece = NULL;
    lm_hash128 h;
    lm_code rc = lm_alloc_n(&piece, most, 1, "a piece of a tensor", e);
    lm_hash128_init(&h);
    for (size_t at = 0; !rc && at < t->bytes; at += most) {
        const size_t n = t->bytes - at < most ? t->bytes - at : most;
        rc = lm_model_source_read(src, t, at, piece, n, e);
        if (!rc)
            lm_hash128_add(&h, piece, n);
    }
    lm_free(piece);
    *out = lm_hash128_end64(&h) + (uint64_t)t->dtype;
    return rc;
}

/* Note t if it is one of these, in a model that has the modules. */
static lm_code note_copy(const lm_model *m, const lm_model_source *src, const lm_st_tensor *t,
                         copies *all, lm_err *e)
{
    static const lm_part shared[2] = { LM_PART_EMBED, LM_PART_OUTPUT };
    char name[LM_TENSOR_NAME];
    lm_part of = 0;
    if (m->build.ahead == LM_AHEAD_NONE || !m->config.ahead)
        return LM_OK;
    for (int i = 0; i < 2; i++)
        if (!strcmp(t->name, lm_tensor_hf_name(m->config.arch, shared[i], -1, false, name)))
            of = shared[i];
    const bool own = of != 0;
    if (!(own || lm_ahead_is_copy(&m->config, t->name, &of)) ||
        all->n == (int)(sizeof all->copy / sizeof *all->copy))
        return LM_OK;
    struct copy *c = &all->copy[all->n++];
    c->of = of;
    snprintf(c->name, sizeof c->name, "%s", own ? "" : t->name);
    return hash_tensor(src, t, &c->hash, e);
}

/* They are kept once: a module with others would be another model. */
static lm_code check_copies(const copies *all, const lm_model_source *src, lm_err *e)
{
    for (int i = 0; i < all->n; i++)
        for (int k = 0; k < all->n; k++)
            if (!*all->copy[i].name && *all->copy[k].name && all->copy[i].of == all->copy[k].of &&
                all->copy[i].hash != all->copy[k].hash)
                return lm_fail(e, LM_EUSAGE, lm_model_source_path(src), NULL,
                               "tensor \"%s\" is not the copy of the model's own that it has to be",
                               all->copy[k].name);
    return LM_OK;
}

lm_code lm_store_load(lm_store *s, lm_model_source *src, lm_err *e)
{
    copies all = { .n = 0 };
    const lm_model *m = s->model;
    const lm_st_tensor *t = NULL;
    lm_code rc = lm_model_check(m, src, e);
    if (!rc)
        rc = lm_model_source_rewind(src, e);
    while (!rc && !(rc = lm_model_source_next(src, &t, e)) && t) {
        int i = base_slice(m, t->name);
        const origin o = { .dtype = t->dtype,
                           .count = t->count,
                           .read = read_source,
                           .ctx = src,
                           .t = t,
                           .whole = !lm_model_source_data(src, t) };
        rc = i < 0 ? load_fused(s, src, o, e) : load_slice(s, src, i, &o, e);
        rc = rc ? rc : note_copy(m, src, t, &all, e);
    }
    store_end(s);
    rc = rc ? rc : check_copies(&all, src, e);
    return rc ? rc : lm_model_source_finish(src, e);
}

lm_code lm_store_put(lm_store *s, int i, lm_dtype dtype, const void *data, lm_err *e)
{
    const lm_slice *t = &s->model->slice[i];
    const origin o = { .dtype = dtype, .count = lm_slice_count(t), .data = data };
    const lm_store_block *k = store_own(s, i);
    if (!k || (!store_element(k) && !k->format->encode))
        return lm_fail(e, LM_EBUG, t->name, NULL, "is kept in codes");
    return bring(s, k, i, &o, e);
}

/* ---- states and adapters ---- */

static lm_code read_st(const void *ctx, const lm_st_tensor *t, uint64_t from, void *dst,
                       size_t bytes, lm_err *e)
{
    return lm_st_read(ctx, t, from, dst, bytes, e);
}

/* Codes are read as they are; numbers may have any precision. */
static bool fits(lm_dtype state, lm_dtype file)
{
    return lm_dtype_is_float(state) ? file != LM_DTYPE_NONE && lm_dtype_is_float(file)
                                    : file == state;
}

static origin origin_of(const lm_st *st, const lm_st_tensor *t)
{
    return (origin){ .dtype = t->dtype,
                     .count = t->count,
                     .read = read_st,
                     .ctx = st,
                     .t = t,
                     .whole = !lm_st_data(st, t) };
}

/* A file of states, and which of its tensors have been loaded. */
typedef struct {
    const lm_st *st;
    bool *taken;
} state_file;

/* Number i of block k, in files `prefix`.TENSOR. */
static lm_code load_state(lm_store *s, const lm_store_block *k, const char *prefix, int i,
                          const state_file *f, lm_err *e)
{
    const lm_st *st = f->st;
    int64_t dim[LM_MAX_DIMS];
    char name[512];
    int ndim = store_file_shape(s, k, i, dim);
    snprintf(name, sizeof name, "%s.%s", prefix,
             s->model->slice[store_piece_of(s, k, i).tensor].name);
    const lm_st_tensor *t = lm_st_find(st, name);
    if (!t || !same_shape(ndim, dim, t))
        return lm_fail(e, LM_EFORMAT, lm_st_path(st),
                       lm_st_meta(st, "lmutils.coded") ? "expand its states first"
                                                       : "resume with the values of its run",
                       "tensor \"%s\" is missing or of another shape", name);
    if (!fits(k->format->element, t->dtype))
        return lm_fail(e, LM_EFORMAT, lm_st_path(st), NULL,
                       "tensor \"%s\" has dtype %s, which is not that of its state", name,
                       t->dtype_name);
    const origin o = origin_of(st, t);
    f->taken[t - lm_st_at(st, 0)] = true;
    return bring(s, k, i, &o, e);
}

/* True if the file holds parameters that were shown otherwise.  Training continues with these, even if
 * nothing is shown in their place any longer. */
static bool has_own(const lm_store *s, const lm_st *st)
{
    char name[512];
    for (int i = 0; i < s->model->n_slices; i++) {
        snprintf(name, sizeof name, STORE_OWN_NAME ".%s", s->model->slice[i].name);
        if (lm_st_find(st, name))
            return true;
    }
    return s->shown || s->twice;
}

/* The value that is shown of a tensor of the training alone, if another one is trained, comes before that one. */
static lm_code load_states(lm_store *s, const state_file *f, lm_err *e)
{
    const lm_store_block *k, *own = lm_store_find(s, LM_KEPT_PARAM, 0);
    const bool owns = has_own(s, f->st);
    lm_code rc = LM_OK;
    for (int n = 0; !rc && (k = lm_store_find(s, LM_KEPT_OPT, n)); n++)
        for (int i = 0; !rc && i < lm_store_tensors(s, k); i++)
            rc = load_state(s, k, k->state->name, i, f, e);
    for (int i = 0; !rc && i < s->model->n_slices; i++)
        if (s->model->slice[i].of_training)
            rc = load_state(s, own, STORE_HEAD_NAME, i, f, e);
    for (int i = 0; !rc && owns && i < s->model->n_slices; i++)
        if (s->model->slice[i].trains)
            rc = load_state(s, own, STORE_OWN_NAME, i, f, e);
    return rc;
}

/* True for an average of a parameter, which a run may go on without: its own numbers are beside it, or in the weights. */
static bool is_average(const lm_store *s, const char *name)
{
    static const char prefix[] = STORE_AVERAGE_NAME ".";
    const size_t n = sizeof prefix - 1;
    const int i = strncmp(name, prefix, n) ? -1 : lm_model_slice(s->model, name + n);
    return i >= 0 && s->model->slice[i].trains;
}

/* Any other state that is left would have been part of the training that goes on here. */
static lm_code check_taken(const lm_store *s, const state_file *f, lm_err *e)
{
    for (size_t i = 0; i < lm_st_count(f->st); i++)
        if (!f->taken[i] && !is_average(s, lm_st_at(f->st, i)->name))
            return lm_fail(e, LM_EFORMAT, lm_st_path(f->st), "resume with the values of its run",
                           "tensor \"%s\" does not belong to a state of this run",
                           lm_st_at(f->st, i)->name);
    return LM_OK;
}

lm_code lm_store_load_states(lm_store *s, const lm_st *st, lm_err *e)
{
    state_file f = { .st = st };
    lm_code rc = lm_alloc_n(&f.taken, lm_st_count(st) + 1, sizeof *f.taken, "a list of tensors", e);
    if (!rc)
        rc = load_states(s, &f, e);
    store_end(s);
    if (!rc)
        rc = check_taken(s, &f, e);
    lm_free(f.taken);
    return rc;
}

/* The name of tensor i in the file of the adapter whose tensors have `prefix` in front in the model; NULL: it is of another
 * one. */
static const char *name_in_file(const lm_model *m, int i, const char *prefix, char out[512])
{
    size_t n = strlen(prefix);
    const char *name;
    if (!lm_slice_is(&m->slice[i], LM_TENSORS_ADAPTER))
        return NULL;
    name = lm_model_saved(m, i, out);
    return strncmp(name, prefix, n) ? NULL : name + n;
}

/* True for a tensor that load_adapter has taken, or that has a place elsewhere. */
static bool is_known(const lm_model *m, const char *prefix, const lm_st_tensor *t)
{
    char text[512];
    for (int i = 0; i < m->n_slices; i++) {
        const char *name = name_in_file(m, i, prefix, text);
        if (name && !strcmp(t->name, name))
            return true;
    }
    return !t->count || lm_model_aside_find(m, t->name);
}

/* name = before + mark + rest, without the mark; false: it has none. */
static bool without(const char *name, const char *mark, char out[512])
{
    const char *at = strstr(name, mark);
    if (at)
        snprintf(out, 512, "%.*s.%s", (int)(at - name), name, at + strlen(mark));
    return at != NULL;
}

/* What PEFT saves beside a module that trains as a whole, where all biases are saved: the bias that it had, which is not
 * used, and its own under another name. */
static bool is_copy(const lm_st *st, const char *name)
{
    char plain[512];
    return strstr(name, ".original_module.") ||
           (without(name, ".modules_to_save.", plain) && lm_st_find(st, plain));
}

/* A weight of the base below an adapter, which PEFT saves of embeddings and heads: "MODULE.base_layer.weight".  shared: by
 * several adapters, which may differ in it. */
static lm_code load_below(lm_store *s, bool shared, const lm_st *st, const lm_st_tensor *t,
                          lm_err *e)
{
    static const char prefix[] = "base_model.model.";
    char name[512];
    bool below = !strncmp(t->name, prefix, sizeof prefix - 1) &&
                 without(t->name + sizeof prefix - 1, ".base_layer.", name);
    int i = below ? lm_model_slice(s->model, name) : -1;
    if (i < 0)
        return lm_fail(e, LM_EUSAGE, lm_st_path(st), other_base,
                       "tensor \"%s\" has no place in the model", t->name);
    const lm_store_block *k = store_own(s, i);
    const origin o = origin_of(st, t);
    if (shared || !k || !store_element(k))
        return lm_fail(e, LM_EUSAGE, lm_st_path(st), "merge it into its base first",
                       "tensor \"%s\" replaces a weight that is %s", t->name,
                       shared ? "other adapters' too" : "kept in codes");
    return check_tensor(&s->model->slice[i], t, lm_st_path(st), true, e) ? e->code
                                                                         : bring(s, k, i, &o, e);
}

/* Tensors of an adapter's file that are not the adapter's; own: its prefix. */
static lm_code load_others(lm_store *s, const char *own, const lm_st *st, lm_err *e)
{
    lm_code rc = LM_OK;
    for (size_t k = 0; !rc && k < lm_st_count(st); k++) {
        const lm_st_tensor *t = lm_st_at(st, k);
        if (!is_known(s->model, own, t) && !is_copy(st, t->name))
            rc = load_below(s, *own, st, t, e);
    }
    store_end(s);
    return rc;
}

static lm_code load_adapter(lm_store *s, const char *prefix, const lm_st *st, lm_err *e)
{
    const lm_model *m = s->model;
    lm_code rc = LM_OK;
    char text[512];
    size_t used = 0;
    for (int i = 0; i < m->n_aside; i++)
        used += lm_st_find(st, m->aside[i].name) != NULL;
    for (int i = 0; !rc && i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        const char *name = name_in_file(m, i, prefix, text);
        if (!name)
            continue;
        const lm_st_tensor *found = lm_st_find(st, name);
        if (!found && t->of_adapter)
            rc = lm_fail(e, LM_EUSAGE, lm_st_path(st), other_base,
                         "tensor \"%s\", which the base requires, is missing", name);
        if (!found)
            continue;
        const origin o = origin_of(st, found);
        rc = check_tensor(t, found, lm_st_path(st), true, e);
        rc = rc ? rc : bring(s, store_own(s, i), i, &o, e);
        used++;
    }
    store_end(s);
    if (!rc && used < lm_st_count(st))
        rc = load_others(s, prefix, st, e);
    return rc ? rc : store_check_finite(st, e);
}

lm_code lm_store_load_adapter(lm_store *s, const lm_st *st, lm_err *e)
{
    return load_adapter(s, "", st, e);
}

lm_code lm_store_load_joined(lm_store *s, int k, const lm_st *st, lm_err *e)
{
    char prefix[16];
    snprintf(prefix, sizeof prefix, "%d:", k);
    return load_adapter(s, prefix, st, e);
}
