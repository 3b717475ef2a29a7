/* SPDX-License-Identifier: Apache-2.0 */
/* store.c -- the blocks of a store: their layout, memory and bindings. */
#include "model/store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "model/store_impl.h"
#include "numeric/format.h"

enum { ALIGN = 64 }; /* elements */

/* ---- layout ---- */

static lm_store_block *add_block(lm_store *s, lm_kept role, const lm_format *format)
{
    lm_store_block *k = &s->block[s->n_blocks++];
    *k = (lm_store_block){ .role = role,
                           .format = format,
                           .space = s->backend->host_memory ? LM_SPACE_HOST : LM_SPACE_DEVICE };
    return k;
}

static lm_store_block *add_plain(lm_store *s, lm_kept role, lm_dtype element, int64_t count)
{
    lm_store_block *k = add_block(s, role, lm_format_of_dtype(element));
    k->count = count;
    k->bytes = lm_plain_bytes(element, count);
    return k;
}

static lm_dtype format_of(const lm_model *m, int param)
{
    return m->graph->value[m->param[param].value].t.dtype;
}

/* The format in which graphs of `m` read tensor i. */
static const lm_format *stored_format(const lm_model *m, int i)
{
    const struct lm_code_run *r = store_run(m, i);
    return r ? r->format : lm_format_of_dtype(format_of(m, m->slice[i].param));
}

/* Kernels run over PARAM, DERIVED, GRAD and OPT together, so an element has the same offset in
 * all. */
static lm_code lay_out_master(lm_store *s, const lm_store_opts *o, lm_err *e)
{
    const lm_model *m = s->model;
    bool low = false;
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        int64_t before = m->param[t->param].offset + t->row * store_width(m, t);
        s->place[i] = (struct lm_store_place){ .at = (size_t)before * sizeof(float) };
    }
    for (int i = 0; i < m->n_params; i++) {
        if (!m->param[i].trains)
            continue;
        low = low || format_of(m, i) == LM_DTYPE_BF16;
        if (format_of(m, i) != LM_DTYPE_F32 && format_of(m, i) != LM_DTYPE_BF16)
            return lm_fail(e, LM_EUSAGE, m->graph->value[m->param[i].value].name, NULL,
                           "%s has no master copy in F32", lm_dtype_name(format_of(m, i)));
    }
    if (o->n_states > LM_STORE_STATES)
        return lm_fail(e, LM_ELIMIT, "optimiser", "use fewer optimisers side by side",
                       "%d states, %d are supported", o->n_states, LM_STORE_STATES);
    add_plain(s, LM_KEPT_PARAM, LM_DTYPE_F32, m->train_end);
    if (low)
        add_plain(s, LM_KEPT_DERIVED, LM_DTYPE_BF16, m->train_end);
    if (o->grads)
        add_plain(s, LM_KEPT_GRAD, LM_DTYPE_F32, m->train_end);
    for (int k = 0; k < o->n_states; k++)
        add_plain(s, LM_KEPT_OPT, o->state[k].format, o->state[k].count)->state = &o->state[k];
    return LM_OK;
}

/* Append a [rows, cols] matrix in format f to the block of that role and format. */
static lm_code append(lm_store *s, lm_kept role, const lm_format *f, int64_t rows, int64_t cols,
                      struct lm_store_place *out, lm_err *e)
{
    lm_tensor_size size;
    int k = 0;
    while (k < s->n_blocks &&
           (s->block[k].borrowed || s->block[k].role != role || s->block[k].format != f))
        k++;
    if (k == LM_STORE_BLOCKS)
        return lm_fail(e, LM_EBUG, "store", NULL, "more formats than %d", LM_STORE_BLOCKS);
    if (lm_tensor_bytes(f, 2, (int64_t[]){ rows, cols }, &size, e))
        return e->code;
    lm_store_block *b = k == s->n_blocks ? add_block(s, role, f) : &s->block[k];
    bool plain = f->element != LM_DTYPE_NONE;
    size_t unit = ALIGN * (plain ? store_element(b) : 1), room = 0;
    *out = (struct lm_store_place){ .block = k, .at = b->bytes };
    if (!lm_add_ok(size.all, unit - 1, &room) ||
        !lm_add_ok(b->bytes, room / unit * unit, &b->bytes))
        return lm_fail(e, LM_ELIMIT, "store", NULL, "weights of format %s are too many", f->name);
    b->count = plain ? (int64_t)(b->bytes / store_element(b)) : b->count + rows * cols;
    return LM_OK;
}

/* Tensors of a parameter in codes each in the format of their file; otherwise the parameter as a
 * whole, and its tensors in it. */
static lm_code lay_out_param(lm_store *s, lm_kept role, int p, lm_err *e)
{
    const lm_model *m = s->model;
    struct lm_store_place whole = { 0 }, in_file = { .block = -1 };
    const lm_format *f = lm_format_of_dtype(format_of(m, p));
    if (!store_codes(m, p) && append(s, role, f, 1, m->param[p].count, &whole, e))
        return e->code;
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        const struct lm_code_run *r = store_run(m, i);
        int64_t width = store_width(m, t);
        if (t->param != p)
            continue;
        s->place[i] = r ? in_file : whole;
        if (!r)
            s->place[i].at += (size_t)(t->row * width) * lm_dtype_size(f->element);
        else if (!r->in_file && append(s, role, r->format, t->rows, width, &s->place[i], e))
            return e->code;
    }
    return LM_OK;
}

/* True if tensor i is the checkpoint's own: not of an adapter, nor brought by one. */
static bool is_base(const lm_model *m, int i)
{
    return !m->slice[i].of_adapter && !(m->build.trainable && m->slice[i].trains);
}

/* True if tensor k of the base stays as it is: beside a master copy, what trains does not. */
static bool is_still(const lm_store *base, int k)
{
    const lm_store_block *own = store_own(base, k);
    return own && !(own->role == LM_KEPT_PARAM && lm_store_find(base, LM_KEPT_GRAD, 0));
}

/* The numbers or codes of parameter p in the base, if they are there one behind another and as this model reads
 * them. */
static bool borrow_param(lm_store *s, const lm_store *base, int p)
{
    const lm_model *m = s->model;
    size_t next = 0;
    int block = -1;
    bool numbers = !store_codes(m, p);
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        int k = t->param == p && is_base(m, i) ? lm_model_slice(base->model, t->name) : -1;
        if (t->param != p)
            continue;
        if (k < 0 || !is_still(base, k) || store_own(base, k)->format != stored_format(m, i) ||
            base->place[k].panels != store_panels(m, p))
            return false;
        const struct lm_store_place *at = &base->place[k];
        if (numbers && t->row == 0 && at->at % ALIGN)
            return false;
        if (numbers && t->row > 0 && (at->block != block || at->at != next))
            return false;
        block = at->block;
        next =
            at->at + (size_t)lm_slice_count(t) * (numbers ? store_element(&base->block[block]) : 0);
        s->place[i] = *at;
    }
    return true;
}

static void borrow_blocks(lm_store *s, const lm_store *base)
{
    for (int k = 0; base && k < base->n_blocks; k++) {
        s->block[s->n_blocks] = base->block[k];
        s->block[s->n_blocks++].borrowed = true;
    }
}

/* For training the parameters that do not train, for use all of them. */
static lm_code lay_out_use(lm_store *s, const lm_store_opts *o, lm_err *e)
{
    const lm_model *m = s->model;
    borrow_blocks(s, o->base);
    for (int p = 0; p < m->n_params; p++)
        if (!(o->master && m->param[p].trains) && !(o->base && borrow_param(s, o->base, p)) &&
            lay_out_param(s, o->master ? LM_KEPT_FROZEN : LM_KEPT_PARAM, p, e))
            return e->code;
    return LM_OK;
}

/* ---- blocks that ranks share ---- */

static bool is_in(const lm_store *s, const lm_store_block *k, int i)
{
    return k->state || store_own(s, i) == k;
}

/* Spans of a block, in the order of its tensors, which is not that of their places. */
static int by_place(const void *a, const void *b)
{
    const struct lm_store_span *x = a, *y = b;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Sorted ones without overlaps, and joined up to the zeros between tensors, through which joined nodes run. */
static void join_spans(lm_store_block *k)
{
    const size_t gap = ALIGN * store_element(k);
    int n = 0;
    qsort(k->kept, (size_t)k->n_kept, sizeof *k->kept, by_place);
    for (int i = 0; i < k->n_kept; i++) {
        struct lm_store_span *last = n ? &k->kept[n - 1] : NULL, *x = &k->kept[i];
        if (last && x->at < last->at + last->bytes + gap)
            last->bytes = x->at + x->bytes > last->at + last->bytes ? x->at + x->bytes - last->at
                                                                    : last->bytes;
        else
            k->kept[n++] = *x;
    }
    k->n_kept = n;
    for (int i = 0; i < n; i++)
        k->kept_bytes += k->kept[i].bytes;
}

/* What is derived of the spans of PARAM. */
static lm_code keep_like(const lm_store_block *p, lm_store_block *k, lm_err *e)
{
    if (lm_alloc_n(&k->kept, (size_t)p->n_kept + 1, sizeof *k->kept, "a list of tensors", e))
        return e->code;
    for (; k->n_kept < p->n_kept; k->n_kept++)
        k->kept[k->n_kept] =
            (struct lm_store_span){ p->kept[k->n_kept].at / store_element(p) * store_element(k),
                                    p->kept[k->n_kept].bytes / store_element(p) *
                                        store_element(k) };
    k->kept_bytes = p->kept_bytes / store_element(p) * store_element(k);
    return LM_OK;
}

static lm_code find_kept(const lm_store *s, lm_store_block *k, lm_err *e)
{
    if (s->gathered && k->role == LM_KEPT_DERIVED)
        return keep_like(lm_store_find(s, LM_KEPT_PARAM, 0), k, e);
    const int n = lm_store_tensors(s, k);
    const bool drops = s->drops && k->role == LM_KEPT_GRAD;
    if (!drops && (!s->own || (k->role != LM_KEPT_PARAM && k->role != LM_KEPT_OPT)))
        return LM_OK;
    if (lm_alloc_n(&k->kept, (size_t)n + 1, sizeof *k->kept, "a list of tensors", e))
        return e->code;
    if (drops) {
        k->kept[k->n_kept++] = (struct lm_store_span){ 0, k->bytes };
        k->kept_bytes = k->bytes;
        return LM_OK;
    }
    for (int i = 0; i < n; i++) {
        const store_piece p = store_piece_of(s, k, i),
                          own = p.apart ? store_own_rows(&p, store_element(k)) : p;
        const size_t bytes = store_bytes(k, &own), left = k->bytes - own.at,
                     unit = ALIGN * store_element(k), up = (bytes + unit - 1) / unit * unit;
        if (is_in(s, k, i) &&
            own.rows) /* with the zeros behind it, of which there may be samples */
            k->kept[k->n_kept++] = (struct lm_store_span){ own.at, up < left ? up : left };
    }
    join_spans(k);
    return LM_OK;
}

/* Addresses for all of a block, and memory for the pages of what is kept. */
static lm_code map_kept(lm_store_block *k, lm_err *e)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), all = k->bytes + !k->bytes;
    char *at = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return lm_fail(e, LM_ELIMIT, "memory", NULL, "no addresses for %zu bytes", all);
    k->data = at;
    for (int i = 0; i < k->n_kept; i++) {
        const size_t from = k->kept[i].at / page * page, end = k->kept[i].at + k->kept[i].bytes;
        if (mprotect(at + from, end - from, PROT_READ | PROT_WRITE))
            return lm_fail(e, LM_ELIMIT, "memory", NULL, "no memory for %zu bytes", end - from);
    }
    return LM_OK;
}

static lm_code lay_out(lm_store *s, const lm_store_opts *o, lm_err *e)
{
    if (lm_alloc_n(&s->place, (size_t)s->model->n_slices, sizeof *s->place, "a list of tensors", e))
        return e->code;
    s->own = o->own;
    s->drops = o->own && o->drops;
    s->gathered = o->own && o->gathered;
    lm_code rc = o->master ? lay_out_master(s, o, e) : LM_OK;
    rc = rc ? rc : lay_out_use(s, o, e);
    for (int i = 0; i < s->model->n_slices; i++) {
        s->place[i].panels = store_panels(s->model, s->model->slice[i].param);
        s->in_panels |= s->place[i].panels;
    }
    for (int k = 0; !rc && k < s->n_blocks; k++)
        rc = find_kept(s, &s->block[k], e);
    return rc;
}

/* ---- life ---- */

/* The bytes are reserved, so that no write finds the disk full. */
static lm_code map_file(lm_store_block *k, const char *dir, lm_err *e)
{
    size_t bytes = k->bytes + !k->bytes;
    int fd = lm_file_unnamed(dir);
    if (fd < 0)
        return lm_fail(e, LM_EIO, dir, NULL, "cannot hold a file of optimiser states");
    int bad = posix_fallocate(fd, 0, (off_t)bytes);
    void *at = bad ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    errno = bad ? bad : errno;
    if (at == MAP_FAILED)
        return lm_fail(e, LM_EIO, dir, "keep the states in memory, or free some disk",
                       "no room for %zu bytes of optimiser states", bytes);
    k->data = at;
    return LM_OK;
}

static lm_code take_block(lm_store *s, lm_store_block *k, const lm_store_opts *o, lm_err *e)
{
    static const char *const purpose[] = { "weights", "BF16 weights", "gradients",
                                           "optimiser states", "frozen weights" };
    lm_backend *b = s->backend;
    if (k->kept && !b->host_memory)
        return lm_fail(e, LM_EUSAGE, b->name, NULL, "ranks of a device do not share weights");
    if (k->kept && !(k->role == LM_KEPT_OPT && o->states_in == LM_STATES_FILE))
        return map_kept(k, e);
    if (k->role == LM_KEPT_OPT && o->states_in == LM_STATES_FILE) {
        if (!b->host_memory)
            return lm_fail(e, LM_EUSAGE, b->name, "page them to memory of the host",
                           "optimiser states of a device are not paged to a file");
        k->space = LM_SPACE_FILE;
        return map_file(k, o->states_dir, e);
    }
    if (k->role == LM_KEPT_OPT && o->states_in == LM_STATES_HOST && !b->host_memory) {
        k->space = LM_SPACE_HOST;
        return b->host_alloc(b, k->bytes, purpose[k->role], &k->data, e);
    }
    return b->alloc(b, k->bytes, purpose[k->role], &k->data, e);
}

static void drop_block(lm_store *s, lm_store_block *k)
{
    lm_backend *b = s->backend;
    if (k->borrowed)
        return;
    if (k->data && (k->space == LM_SPACE_FILE || k->kept))
        munmap(k->data, k->bytes + !k->bytes);
    else if (k->data)
        (k->space == LM_SPACE_HOST ? b->host_free : b->free)(b, k->data, k->bytes);
    lm_free(k->kept);
}

lm_code lm_store_new(const lm_model *m, lm_backend *b, const lm_store_opts *o, lm_store **out,
                     lm_err *e)
{
    lm_store *s = NULL;
    *out = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "a store", e))
        return e->code;
    *s = (lm_store){ .model = m,
                     .backend = b,
                     .par = o->par ? o->par : b->par,
                     .shown = o->shown,
                     .twice = o->twice };
    lm_code rc = lay_out(s, o, e);
    for (int k = 0; !rc && k < s->n_blocks; k++)
        rc = s->block[k].borrowed ? LM_OK : take_block(s, &s->block[k], o, e);
    if (rc) {
        lm_store_free(s);
        return rc;
    }
    *out = s;
    return LM_OK;
}

void lm_store_free(lm_store *s)
{
    if (!s)
        return;
    store_end(s);
    for (int k = 0; k < s->n_blocks; k++)
        drop_block(s, &s->block[k]);
    lm_free(s->place);
    lm_free(s);
}

void lm_store_bytes(const lm_store *s, size_t out[LM_KEPT_ROLES])
{
    memset(out, 0, LM_KEPT_ROLES * sizeof *out);
    for (int k = 0; k < s->n_blocks; k++)
        out[s->block[k].role] += s->block[k].kept ? s->block[k].kept_bytes : s->block[k].bytes;
}

lm_code lm_store_outlook(const lm_model *m, const lm_store_opts *o, size_t out[LM_KEPT_ROLES],
                         lm_err *e)
{
    lm_backend nowhere = { 0 };
    lm_store s = { .model = m, .backend = &nowhere };
    lm_code rc = lay_out(&s, o, e); /* also after a failure: frees the blocks laid out so far */
    lm_store_bytes(&s, out);
    for (int k = 0; k < s.n_blocks; k++)
        lm_free(s.block[k].kept);
    lm_free(s.place);
    return rc;
}

int lm_store_frozen(const lm_model *m, lm_store_part out[LM_STORE_FORMATS])
{
    const lm_store_opts o = { .master = true };
    lm_backend nowhere = { 0 };
    lm_store s = { .model = m, .backend = &nowhere };
    lm_err unseen = { 0 };
    int n = 0;
    lay_out(&s, &o, &unseen);
    for (int k = 0; k < s.n_blocks && n < LM_STORE_FORMATS; k++)
        if (s.block[k].role == LM_KEPT_FROZEN)
            out[n++] = (lm_store_part){ s.block[k].format, s.block[k].bytes };
    lm_free(s.place);
    return n;
}

bool lm_store_borrows(const lm_store *s)
{
    for (int i = 0; i < s->model->n_slices; i++) {
        const lm_store_block *k = store_own(s, i);
        if (is_base(s->model, i) && !(k && k->borrowed))
            return false;
    }
    return true;
}

/* ---- for graphs ---- */

const lm_store_block *lm_store_find(const lm_store *s, lm_kept role, int k)
{
    for (int i = 0; i < s->n_blocks; i++)
        if (s->block[i].role == role && k-- == 0)
            return &s->block[i];
    return NULL;
}

void *lm_store_flat(const lm_store *s, lm_kept role, int k)
{
    const lm_store_block *b = lm_store_find(s, role, k);
    return b ? b->data : NULL;
}

/* A parameter in DERIVED or GRAD, whose layout is that of the master copy. */
static void *address(const lm_store_block *k, const lm_param *p)
{
    return (char *)k->data + (size_t)p->offset * store_element(k);
}

static const uint8_t *own_address(const lm_store *s, int i)
{
    return (const uint8_t *)store_own(s, i)->data + s->place[i].at;
}

/* True if tensor i is in the master copy, of which a parameter's BF16 is derived. */
static bool is_mastered(const lm_store *s, int i)
{
    const lm_store_block *derived = lm_store_find(s, LM_KEPT_DERIVED, 0);
    return derived && store_own(s, i) == lm_store_find(s, LM_KEPT_PARAM, 0);
}

/* Parameters where their first tensor is; each tensor in codes is a run of its own.  Offsets are those of the store's
 * own model: others may train something else. */
static void bind_own(const lm_store *s, const lm_model *whole, const lm_model *m, lm_exec *x)
{
    const lm_store_block *derived = lm_store_find(s, LM_KEPT_DERIVED, 0);
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *t = &m->slice[i];
        struct lm_code_run *r = store_run(m, i);
        const int k = m == whole ? i : lm_model_slice(whole, t->name);
        if (k < 0)
            continue;
        const uint8_t *at = r && r->in_file ? r->data : own_address(s, k);
        const bool in_file = r && r->in_file;
        if (r)
            r->data = at;
        if (t->row != 0 || store_panels(m, t->param) != s->place[k].panels)
            continue;
        bool low = is_mastered(s, k) && format_of(m, t->param) == derived->format->element;
        if (!low && !in_file && store_own(s, k)->format != stored_format(m, i))
            continue;
        lm_exec_bind(x, m->param[t->param].value,
                     low ? address(derived, &s->model->param[whole->slice[k].param])
                         : (void *)(uintptr_t)at);
    }
}

void lm_store_bind(const lm_store *s, const lm_model *m, lm_exec *x)
{
    const lm_store_block *grad = lm_store_find(s, LM_KEPT_GRAD, 0);
    bind_own(s, m, m, x);
    for (int i = 0; i < m->n_params; i++)
        if (grad && m->grad && m->grad[i] != LM_NONE)
            lm_exec_bind(x, m->grad[i], address(grad, &s->model->param[i]));
}

void lm_store_bind_part(const lm_store *s, const lm_model *whole, const lm_model *m, lm_exec *x)
{
    bind_own(s, whole, m, x);
}

/* ---- derived values ---- */

typedef struct {
    const float *src;
    uint16_t *dst;
    lm_kernel_fn cast;
} round_job;

static void round_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const round_job *j = ctx;
    lm_tensor in = lm_shape1(LM_DTYPE_F32, end - begin);
    lm_tensor out = lm_shape1(LM_DTYPE_BF16, end - begin);
    (void)worker;
    in.data = (void *)(uintptr_t)(j->src + begin);
    out.data = j->dst + begin;
    j->cast(&(lm_call){ .in = &in, .n_in = 1, .out = &out, .n_out = 1 });
}

void lm_round_bf16(const float *src, uint16_t *dst, int64_t n, lm_par *par)
{
    round_job j = { src, dst, lm_cpu_kernel("cast", LM_DTYPE_F32, lm_cpu_detect())->run };
    lm_par_for(par, n, 1 << 18, round_range, &j);
}

void store_pack(const lm_store *s, lm_dtype from, const void *src, int64_t rows, int64_t cols,
                void *to)
{
    lm_tensor in = lm_shape2(from, rows, cols), out = lm_shape2(LM_DTYPE_BF16, rows, cols);
    in.data = (void *)(uintptr_t)src;
    out.data = to;
    s->backend->kernel(s->backend, "panels", from)
        ->run(&(lm_call){ .in = &in, .n_in = 1, .out = &out, .n_out = 1, .par = s->par });
}

/* Of tensors in panels the rows that PARAM has memory for, whole panels. */
static void derive_panels(const lm_store *s, const lm_store_block *from, const lm_store_block *to)
{
    for (int i = 0; s->own && i < s->model->n_slices; i++) {
        const lm_slice *t = &s->model->slice[i];
        const store_piece p = store_piece_of(s, from, i),
                          own = store_own_rows(&p, store_element(from));
        if (t->trains && store_panels(s->model, t->param) && own.rows)
            store_pack(s, LM_DTYPE_F32, store_at(from, &own), own.rows, own.cols,
                       (char *)to->data + own.at / store_element(from) * store_element(to));
    }
    for (int i = 0; !s->own && i < s->model->n_params; i++) {
        const lm_param *p = &s->model->param[i];
        const lm_tensor *t = &s->model->graph->value[p->value].t;
        if (t->panels && p->trains)
            store_pack(s, LM_DTYPE_F32, address(from, p), t->dim[0], t->dim[1], address(to, p));
    }
}

/* What a block has memory for. */
static struct lm_store_span kept_span(const lm_store_block *k, int i)
{
    const struct lm_store_span all = { 0, k->bytes };
    return k->kept ? k->kept[i] : all;
}

static int kept_spans(const lm_store_block *k)
{
    return k->kept ? k->n_kept : 1;
}

void lm_store_drop(const lm_store *s, int64_t from, int64_t end)
{
    const lm_store_block *k = lm_store_find(s, LM_KEPT_GRAD, 0);
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)k->data;
    const uintptr_t first = (at + (uintptr_t)from * store_element(k) + page - 1) / page * page,
                    last = (at + (uintptr_t)end * store_element(k)) / page * page;
    if (s->drops && from < end && first < last)
        madvise((void *)first, last - first, MADV_DONTNEED);
}

bool lm_store_read_run(const lm_store *s, int *i, int64_t *from, int64_t *end)
{
    const lm_model *m = s->model;
    *from = *end = -1;
    for (; *i < m->n_params; ++*i) {
        const lm_param *p = &m->param[*i];
        if (!p->trains || !store_is_read(s, *i))
            continue;
        if (*from >= 0 && (p->offset < *end || p->offset - *end >= ALIGN))
            break;
        *from = *from < 0 ? p->offset : *from;
        *end = p->offset + p->count;
    }
    return *from >= 0;
}

lm_code lm_store_stash(const lm_store *s, bool back, lm_err *e)
{
    const lm_store_block *p = lm_store_find(s, LM_KEPT_PARAM, 0),
                         *g = lm_store_find(s, LM_KEPT_GRAD, 0);
    const lm_store_block *from = back ? g : p, *to = back ? p : g;
    lm_backend *b = s->backend;
    for (int i = 0; i < kept_spans(p); i++) {
        const struct lm_store_span x = kept_span(p, i);
        if (b->copy(b, (char *)to->data + x.at, (const char *)from->data + x.at, x.bytes, b->main,
                    e))
            return e->code;
    }
    return LM_OK;
}

void lm_store_derive(const lm_store *s)
{
    const lm_store_block *from = lm_store_find(s, LM_KEPT_PARAM, 0);
    const lm_store_block *to = lm_store_find(s, LM_KEPT_DERIVED, 0);
    lm_backend *b = s->backend;
    if (!to)
        return;
    if (b->host_memory) {
        for (int i = 0; i < kept_spans(from); i++) {
            const struct lm_store_span x = kept_span(from, i);
            const size_t at = x.at / store_element(from);
            lm_round_bf16((const float *)from->data + at, (uint16_t *)to->data + at,
                          (int64_t)(x.bytes / store_element(from)), s->par);
        }
        derive_panels(s, from, to);
        return;
    }
    lm_tensor in = lm_shape1(from->format->element, from->count);
    lm_tensor out = lm_shape1(to->format->element, to->count);
    in.data = from->data;
    out.data = to->data;
    b->kernel(b, "cast", from->format->element)
        ->run(&(lm_call){ .in = &in, .n_in = 1, .out = &out, .n_out = 1, .stream = b->main });
}
