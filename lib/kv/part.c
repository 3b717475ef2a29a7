/* SPDX-License-Identifier: Apache-2.0 */
/* part.c -- parts of a cache: their sections, and copies between them and the memory of a cache. */
#include "kv/part.h"

#include <string.h>

#include "base/cpu.h"
#include "base/mem.h"
#include "kernels/kv_code.h"

const char *lm_kv_section_suffix(lm_kv_section i)
{
    static const char *const suffix[LM_KV_SECTIONS] = { "",        ".q",      ".scale",  ".min",
                                                        ".scale2", ".sp_ptr", ".sp_idx", ".sp_val",
                                                        ".first",  ".tail" };
    return suffix[i];
}

bool lm_kv_section_is_float(lm_kv_section i)
{
    return i != LM_KV_CODES && i != LM_KV_SP_BEGIN && i != LM_KV_SP_INDEX;
}

/* ---- Shapes ---- */

/* The ranges of codes: those of channels, of a group, or of all heads of a token without a share of its numbers.  NULL:
 * they fit the format. */
static const char *wrong_ranges(const lm_kv_side *s)
{
    const lm_kv_format *f = s->format;
    bool share = s->outliers >= 0;
    if (!share && s->outliers != -1) /* NaN, too */
        return "the share of outliers is not a number from 0 to 1";
    if (share && !(s->outliers < 1))
        return "the share of outliers is not below 1";
    if (share && !(f->values && f->axis == LM_KV_TOKEN && f->levels == LM_KV_TABLE && f->zero))
        return "only values in levels of a table have a share of outliers";
    if (f->outliers && !f->lower && !share)
        return "outliers have no ranges of channels or tokens beside them";
    if (s->pre_rope && (f->values || s->rotate))
        return f->values ? "values have no rotation by positions"
                         : "keys before the rotation by positions cannot be rotated by a matrix";
    return NULL;
}

lm_code lm_kv_shape_check(const lm_kv_shape *s, lm_err *e)
{
    const lm_kv_side *f = s->form;
    lm_kv_sections at;
    if (!f->format)
        return LM_OK;
    if (lm_kv_page(f->format, s->page, s->head_dim, &at, e))
        return e->code;
    int64_t step = lm_kv_step(f->format, s->page);
    if (f->residual < 0 || f->sinks < 0 || (step > 1 && f->residual < step) || f->residual % step ||
        f->sinks % step)
        return lm_fail(e, LM_EUSAGE, f->format->name, "choose multiples of that",
                       "%lld first and %lld newest tokens are plain, %lld are coded together",
                       (long long)f->sinks, (long long)f->residual, (long long)step);
    const char *bad = wrong_ranges(f);
    return bad ? lm_fail(e, LM_EUSAGE, f->format->name, "choose other values", "%s", bad) : LM_OK;
}

static int64_t groups_of(int64_t n, int64_t each)
{
    return (n + each - 1) / each;
}

/* Dimensions of a section of `coded` tokens; zeros for one that the format has not. */
static void set_coded(const lm_kv_shape *s, const lm_kv_rows_size *z, lm_kv_section i,
                      int64_t coded, lm_kv_section_size *out)
{
    const lm_kv_format *f = s->form->format;
    int64_t K = s->kv_heads, D = s->head_dim, most = K * z->outliers;
    bool channel = f->axis == LM_KV_CHANNEL;
    int64_t group = f->group ? f->group : s->page, span = f->span ? f->span : s->page;
    lm_kv_section_size r = { .dtype = f->scale, .ndim = 3, .dim = { K } };
    if (i == LM_KV_CODES) {
        r.dtype = LM_DTYPE_U8;
        r.dim[1] = channel ? D : coded;
        r.dim[2] = (int64_t)z->codes / r.dim[1];
    } else if (i == LM_KV_SCALES || (i == LM_KV_MINIMA && z->min)) {
        r.dim[1] = channel ? groups_of(coded, group) : coded;
        r.dim[2] = !z->scale ? 0 : channel ? D : lm_kv_groups(f, D);
    } else if (i == LM_KV_SECONDS && f->second) {
        r.ndim = channel ? 2 : 3;
        r.dim[1] = channel ? coded : groups_of(coded, span);
        r.dim[2] = D;
    } else if (i == LM_KV_SP_BEGIN && f->outliers) {
        r = (lm_kv_section_size){ .dtype = LM_DTYPE_U32, .ndim = 2, .dim = { K, z->pages + 1 } };
    } else if (i == LM_KV_SP_INDEX || i == LM_KV_SP_VALUE) {
        r = (lm_kv_section_size){ .ndim = 1, .dim = { most } };
        r.dtype = i == LM_KV_SP_INDEX ? LM_DTYPE_U16 : LM_DTYPE_F16;
    }
    *out = r;
}

static lm_code set_bytes(lm_kv_section_size *r, lm_err *e)
{
    int64_t n = 1;
    bool good = true;
    for (int i = 0; i < r->ndim; i++)
        good = good && lm_mul_i64_ok(n, r->dim[i], &n);
    good = good && n < INT64_MAX / 8;
    if (!good)
        return lm_fail(e, LM_ELIMIT, "", NULL, "the size of a cache cannot be counted");
    r->bytes = n ? (size_t)n * lm_dtype_size(r->dtype) : 0;
    return LM_OK;
}

lm_code lm_kv_section_size_of(const lm_kv_shape *s, lm_kv_section i, lm_kv_section_size *out,
                              lm_err *e)
{
    int64_t from, to;
    lm_kv_rows_size z;
    lm_kv_part_range(s, &from, &to);
    *out =
        (lm_kv_section_size){ .dtype = s->act, .ndim = 3, .dim = { s->kv_heads, 0, s->head_dim } };
    if (!s->form->format) {
        out->dim[1] = i == LM_KV_PLAIN ? s->n : 0;
    } else if (i == LM_KV_FIRST) {
        out->dim[1] = from;
    } else if (i == LM_KV_TAIL) {
        out->dim[1] = s->n - to;
    } else if (i != LM_KV_PLAIN && to > from) {
        if (lm_kv_rows_size_of(s->form->format, s->page, s->head_dim, from, to, &z, e))
            return e->code;
        set_coded(s, &z, i, to - from, out);
    }
    return set_bytes(out, e);
}

lm_code lm_kv_part_bytes(const lm_kv_shape *s, size_t *out, lm_err *e)
{
    *out = 0;
    for (int i = 0; i < LM_KV_SECTIONS; i++) {
        lm_kv_section_size z;
        if (lm_kv_section_size_of(s, (lm_kv_section)i, &z, e))
            return e->code;
        if (!lm_add_ok(*out, z.bytes, out))
            return lm_fail(e, LM_ELIMIT, "", NULL, "the size of a cache cannot be counted");
    }
    return LM_OK;
}

lm_code lm_kv_part_init(const lm_kv_shape *s, lm_kv_part *out, lm_err *e)
{
    *out = (lm_kv_part){ 0 };
    for (int i = 0; i < LM_KV_SECTIONS; i++) {
        lm_kv_section_size z;
        if (lm_kv_section_size_of(s, (lm_kv_section)i, &z, e) ||
            (z.bytes && lm_alloc_n(&out->data[i], z.bytes, 1, "a cache", e)))
            return e->code;
    }
    return LM_OK;
}

void lm_kv_part_fini(lm_kv_part *p)
{
    for (int i = 0; i < LM_KV_SECTIONS; i++)
        lm_free(p->data[i]);
    *p = (lm_kv_part){ 0 };
}

/* ---- Heads ---- */

/* Coded tokens, and the pages that have them: pages pages, from first_page on. */
typedef struct {
    int64_t from, to, first_page, pages;
} coded_range;

/* False if no token is coded. */
static bool find_range(const lm_kv_shape *s, coded_range *r)
{
    lm_kv_part_range(s, &r->from, &r->to);
    r->first_page = r->pages = 0;
    if (r->to == r->from)
        return false;
    r->first_page = r->from / s->page;
    r->pages = groups_of(r->to, s->page) - r->first_page;
    return true;
}

int64_t lm_kv_part_outliers(const lm_kv_shape *s, const lm_kv_part *p)
{
    const uint32_t *begin = p->data[LM_KV_SP_BEGIN];
    coded_range r;
    int64_t n = 0;
    if (!begin || !find_range(s, &r))
        return 0;
    for (int64_t h = 0; h < s->kv_heads; h++)
        n += begin[h * (r.pages + 1) + r.pages];
    return n;
}

/* The coded rows of head h; `at`: its first outlier. */
static lm_kv_rows rows_of(const lm_kv_shape *s, const lm_kv_part *p, const coded_range *r,
                          int64_t h, int64_t at)
{
    lm_kv_rows_size z;
    lm_kv_rows_size_of(s->form->format, s->page, s->head_dim, r->from, r->to, &z, NULL);
    char *const *d = (char *const *)p->data;
    return (lm_kv_rows){
        .codes = (uint8_t *)d[LM_KV_CODES] + (size_t)h * z.codes,
        .scale = z.scale ? d[LM_KV_SCALES] + (size_t)h * z.scale : NULL,
        .min = z.min ? d[LM_KV_MINIMA] + (size_t)h * z.min : NULL,
        .second = z.second ? d[LM_KV_SECONDS] + (size_t)h * z.second : NULL,
        .begin = z.outliers ? (uint32_t *)p->data[LM_KV_SP_BEGIN] + h * (r->pages + 1) : NULL,
        .index = z.outliers ? (uint16_t *)p->data[LM_KV_SP_INDEX] + at : NULL,
        .value = z.outliers ? (uint16_t *)p->data[LM_KV_SP_VALUE] + at : NULL,
    };
}

const char *lm_kv_part_wrong(const lm_kv_shape *s, const lm_kv_part *p)
{
    coded_range r;
    int64_t at = 0, most = s->form->format ? s->form->format->outliers : 0;
    const char *wrong = NULL;
    if (!s->form->format || !find_range(s, &r))
        return NULL;
    for (int64_t h = 0; h < s->kv_heads && !wrong; h++) {
        lm_kv_rows rows = rows_of(s, p, &r, h, at);
        if (rows.begin && rows.begin[r.pages] > r.pages * most)
            return "outliers do not rise, or are too many";
        wrong = lm_kv_rows_wrong(s->form->format, s->page, s->head_dim, r.from, r.to, &rows);
        at += rows.begin ? rows.begin[r.pages] : 0;
    }
    return wrong;
}

/* ---- Memory ---- */

typedef struct {
    const lm_kv_shape *s;
    const lm_kv_code_kernels *k;
    const lm_kv_memory *m;
    const lm_kv_part *p;
    coded_range r;
    size_t page_bytes, row;
    void **page; /* [K][all pages up to the last] */
    int64_t *at; /* [K]: the first outlier of each head */
    bool put;
} copying;

static void copy_rows(const copying *c, char *part, char *memory, int64_t n)
{
    if (c->put)
        memcpy(memory, part, (size_t)n * c->row);
    else
        memcpy(part, memory, (size_t)n * c->row);
}

static char *page_of(const copying *c, int64_t page, int64_t h)
{
    return (char *)c->m->pages + (size_t)(page * c->s->kv_heads + h) * c->page_bytes;
}

static void copy_plain(const copying *c, int64_t h)
{
    const lm_kv_shape *s = c->s;
    char *part = (char *)c->p->data[LM_KV_PLAIN] + (size_t)(h * s->n) * c->row;
    if (!s->page) {
        copy_rows(c, part, (char *)c->m->pages + (size_t)(h * c->m->room) * c->row, s->n);
        return;
    }
    for (int64_t t = 0; t < s->n; t += s->page)
        copy_rows(c, part + (size_t)t * c->row, page_of(c, t / s->page, h),
                  s->n - t < s->page ? s->n - t : s->page);
}

/* The plain tokens first .. first + n - 1 of head h: rows of a section, and places in the tail. */
static void copy_tail(const copying *c, lm_kv_section i, int64_t h, int64_t first, int64_t n)
{
    const lm_kv_side *f = c->s->form;
    int64_t rows = f->sinks + f->residual;
    for (int64_t t = first; t < first + n && c->m->tail; t++) {
        int64_t at = t < f->sinks ? t : f->sinks + t % f->residual;
        copy_rows(c, (char *)c->p->data[i] + (size_t)(h * n + t - first) * c->row,
                  (char *)c->m->tail + (size_t)(h * rows + at) * c->row, 1);
    }
}

static void copy_codes(const copying *c, int64_t h)
{
    const lm_kv_shape *s = c->s;
    const lm_kv_format *f = s->form->format;
    const lm_kv_rows rows = rows_of(s, c->p, &c->r, h, c->at[h]);
    int64_t end = c->r.first_page + c->r.pages;
    void **page = c->page + h * end;
    for (int64_t i = c->r.first_page; i < end; i++) {
        page[i] = page_of(c, i, h);
        if (c->put)
            memset(page[i], 0, c->page_bytes);
    }
    if (c->put)
        c->k->put(f, s->page, s->head_dim, c->r.from, c->r.to, &rows, page);
    else
        c->k->get(f, s->page, s->head_dim, c->r.from, c->r.to, (const void *const *)page, &rows);
}

static void copy_heads(void *ctx, int64_t begin, int64_t end, int worker)
{
    const copying *c = ctx;
    (void)worker;
    for (int64_t h = begin; h < end; h++) {
        if (!c->s->form->format) {
            copy_plain(c, h);
            continue;
        }
        copy_tail(c, LM_KV_FIRST, h, 0, c->r.from);
        copy_tail(c, LM_KV_TAIL, h, c->r.to, c->s->n - c->r.to);
        if (c->r.pages)
            copy_codes(c, h);
    }
}

/* Where the outliers of each head begin in a part. */
static void place_outliers(const copying *c)
{
    const lm_kv_shape *s = c->s;
    const uint32_t *begin = c->p->data[LM_KV_SP_BEGIN];
    lm_kv_sections z;
    lm_kv_page(s->form->format, s->page, s->head_dim, &z, NULL);
    for (int64_t h = 0, at = 0; h < s->kv_heads && begin; h++) {
        c->at[h] = at;
        if (c->put)
            at += begin[h * (c->r.pages + 1) + c->r.pages];
        for (int64_t i = 0; i < c->r.pages && !c->put; i++)
            at += *(uint16_t *)(void *)(page_of(c, c->r.first_page + i, h) + z.outliers);
    }
}

static lm_code copy_part(copying *c, lm_par *par, lm_err *e)
{
    const lm_kv_shape *s = c->s;
    const lm_kv_format *f = s->form->format;
    size_t K = (size_t)s->kv_heads, pages;
    c->row = (size_t)s->head_dim * lm_dtype_size(s->act);
    c->page_bytes = f ? lm_kv_page_bytes(f, s->page, s->head_dim) : (size_t)s->page * c->row;
    lm_code rc = LM_OK;
    if (f && find_range(s, &c->r)) {
        pages = (size_t)(c->r.first_page + c->r.pages);
        rc = lm_alloc_n(&c->page, K * pages, sizeof *c->page, "pages of a cache", e);
        rc = rc ? rc : lm_alloc_n(&c->at, K, sizeof *c->at, "heads of a cache", e);
        if (!rc)
            place_outliers(c);
    }
    if (!rc)
        lm_par_for(par, s->kv_heads, 1, copy_heads, c);
    lm_free(c->page);
    lm_free(c->at);
    return rc;
}

lm_code lm_kv_part_get(const lm_kv_shape *s, const lm_kv_memory *from, const lm_kv_part *to,
                       lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    copying c = { .s = s, .k = lm_kv_code_at(cpu), .m = from, .p = to };
    return copy_part(&c, par, e);
}

lm_code lm_kv_part_put(const lm_kv_shape *s, const lm_kv_part *from, const lm_kv_memory *to,
                       lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    copying c = { .s = s, .k = lm_kv_code_at(cpu), .m = to, .p = from, .put = true };
    return copy_part(&c, par, e);
}
