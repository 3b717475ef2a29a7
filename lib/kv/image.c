/* SPDX-License-Identifier: Apache-2.0 */
/* image.c -- whole caches in host memory. */
#include "kv/image.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "kv/file_impl.h"

/* ---- Copies of descriptions ---- */

static lm_code copy_text(lm_arena *a, const char **text, lm_err *e)
{
    char *own = NULL;
    if (!*text)
        return LM_OK;
    lm_code rc = lm_arena_strdup(a, &own, *text, strlen(*text), e);
    *text = own;
    return rc;
}

static lm_code copy_bytes(lm_arena *a, const void *from, size_t n, size_t each, void *out_ptr,
                          lm_err *e)
{
    void *own = NULL;
    if (from) {
        if (lm_arena_alloc(a, &own, n, each, e))
            return e->code;
        memcpy(own, from, n * each);
    }
    memcpy(out_ptr, &own, sizeof own);
    return LM_OK;
}

static lm_code copy_form(lm_arena *a, int64_t K, int64_t D, lm_kv_side *s, lm_err *e)
{
    lm_kv_format *f = NULL;
    size_t all = (size_t)(K * D);
    if (!s->format)
        return LM_OK;
    if (copy_bytes(a, s->format, 1, sizeof *f, &f, e) || copy_text(a, &f->name, e) ||
        copy_bytes(a, f->lower, all, sizeof *f->lower, &f->lower, e) ||
        copy_bytes(a, f->upper, all, sizeof *f->upper, &f->upper, e) ||
        copy_bytes(a, f->head, (size_t)K, sizeof *f->head, &f->head, e))
        return e->code;
    s->format = f;
    return LM_OK;
}

/* Forms of layers that share a format share its copy, too; `form` is not copied yet. */
static lm_code copy_forms(lm_arena *a, const lm_kv_about *from, lm_kv_side *form, lm_err *e)
{
    enum { NEAR = 16 };
    lm_code rc = LM_OK;
    for (int64_t i = 0; i < kv_parts(from) && !rc; i++) {
        int64_t k = i;
        for (int64_t j = i - 2; j >= 0 && j >= i - NEAR && k == i; j -= 2)
            if (from->form[j].format == from->form[i].format &&
                from->kv_heads[j / 2] == from->kv_heads[i / 2] &&
                lm_kv_about_dim(from, j) == lm_kv_about_dim(from, i))
                k = j;
        if (k < i)
            form[i].format = form[k].format;
        else
            rc = copy_form(a, from->kv_heads[i / 2], lm_kv_about_dim(from, i), &form[i], e);
    }
    return rc;
}

static lm_code copy_about(lm_arena *a, const lm_kv_about *from, lm_kv_about *to, lm_err *e)
{
    size_t L = (size_t)from->layers;
    lm_kv_side *form = NULL;
    *to = *from;
    if (copy_text(a, &to->model_type, e) || copy_text(a, &to->weights, e) ||
        copy_text(a, &to->config, e) || copy_text(a, &to->rope, e) ||
        copy_text(a, &to->history, e) || copy_text(a, &to->spec, e) ||
        copy_text(a, &to->policy, e) ||
        copy_bytes(a, from->kv_heads, L, sizeof *to->kv_heads, &to->kv_heads, e) ||
        copy_bytes(a, from->head_dim, L, sizeof *to->head_dim, &to->head_dim, e) ||
        copy_bytes(a, from->latent, L, sizeof *to->latent, &to->latent, e) ||
        copy_bytes(a, from->state, L, sizeof *to->state, &to->state, e) ||
        copy_bytes(a, from->conv, L, sizeof *to->conv, &to->conv, e) ||
        copy_bytes(a, from->rows, L, sizeof *to->rows, &to->rows, e) ||
        copy_bytes(a, from->form, 2 * L, sizeof *form, &form, e))
        return e->code;
    to->form = form;
    return form ? copy_forms(a, from, form, e) : LM_OK;
}

/* ---- Life ---- */

static lm_code make_content(lm_kv_image *m, lm_err *e)
{
    const lm_kv_about *a = &m->about;
    lm_kv_content *c = &m->content;
    size_t L = (size_t)a->layers, T = (size_t)a->tokens;
    if (lm_arena_alloc(m->arena, &c->ids, T, sizeof *c->ids, e) ||
        (!a->rows && lm_arena_alloc(m->arena, &c->positions, T, sizeof *c->positions, e)) ||
        (a->rows && lm_arena_alloc(m->arena, &c->at, L, sizeof *c->at, e)) ||
        (a->ordered && lm_arena_alloc(m->arena, &c->order, L, sizeof *c->order, e)) ||
        (a->weighed && lm_arena_alloc(m->arena, &c->mass, L, sizeof *c->mass, e)) ||
        (a->state && (lm_arena_alloc(m->arena, &c->state, L, sizeof *c->state, e) ||
                      lm_arena_alloc(m->arena, &c->conv, L, sizeof *c->conv, e))) ||
        lm_arena_alloc(m->arena, &c->part, 2 * L, sizeof *c->part, e))
        return e->code;
    for (int64_t i = 0; i < a->layers; i++)
        if (lm_kv_about_has_state(a, i) &&
            (lm_arena_alloc(m->arena, &c->state[i], (size_t)a->state[i], sizeof(float), e) ||
             (a->conv[i] &&
              lm_arena_alloc(m->arena, &c->conv[i], (size_t)a->conv[i], lm_dtype_size(a->act), e))))
            return e->code;
    for (size_t i = 0; i < L && a->rows; i++) {
        size_t n = (size_t)(a->kv_heads[i] * a->rows[i]);
        if (lm_arena_alloc(m->arena, &c->at[i], n, sizeof *c->at[i], e) ||
            (a->ordered && lm_arena_alloc(m->arena, &c->order[i], n, sizeof *c->order[i], e)) ||
            (a->weighed && lm_arena_alloc(m->arena, &c->mass[i], n, sizeof *c->mass[i], e)))
            return e->code;
    }
    for (int64_t i = 0; i < 2 * a->layers; i++) {
        const lm_kv_shape s = lm_kv_about_shape(a, i);
        if (lm_kv_part_init(&s, &c->part[i], e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_kv_image_new(const lm_kv_about *a, lm_kv_image **out, lm_err *e)
{
    lm_kv_image *m;
    *out = NULL;
    if (kv_check_about(a, "", LM_EUSAGE, e) || lm_alloc_n(&m, 1, sizeof *m, "a cache", e))
        return e->code;
    if (lm_arena_new(&m->arena, 1 << 16, e) || copy_about(m->arena, a, &m->about, e) ||
        make_content(m, e)) {
        lm_kv_image_free(m);
        return e->code;
    }
    *out = m;
    return LM_OK;
}

void lm_kv_image_free(lm_kv_image *m)
{
    if (!m)
        return;
    for (int64_t i = 0; i < 2 * m->about.layers && m->content.part; i++)
        lm_kv_part_fini(&m->content.part[i]);
    lm_arena_free(m->arena);
    lm_free(m);
}

size_t lm_kv_image_bytes(const lm_kv_image *m)
{
    const lm_kv_about *a = &m->about;
    size_t sum = 0, one;
    for (int64_t i = 0; i < a->layers && a->state; i++)
        sum += (size_t)a->state[i] * sizeof(float) + (size_t)a->conv[i] * lm_dtype_size(a->act);
    for (int64_t i = 0; i < 2 * m->about.layers; i++) {
        const lm_kv_shape s = lm_kv_about_shape(&m->about, i);
        sum += lm_kv_part_bytes(&s, &one, NULL) ? 0 : one;
    }
    return sum;
}

lm_code lm_kv_image_read(lm_kv_file *f, const lm_kv_reading *r, lm_cpu_level cpu, lm_par *par,
                         lm_kv_image **out, lm_err *e)
{
    lm_code rc = lm_kv_image_new(lm_kv_file_about(f), out, e);
    rc = rc ? rc : lm_kv_file_read(f, r, &(*out)->content, cpu, par, e);
    if (rc) {
        lm_kv_image_free(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- Forms ---- */

static bool same_floats(const float *a, const float *b, int64_t n)
{
    return a == b || (a && b && !memcmp(a, b, (size_t)n * sizeof *a));
}

static bool same_format(const lm_kv_format *a, const lm_kv_format *b, int64_t K, int64_t D)
{
    return a->values == b->values && a->bits == b->bits && a->axis == b->axis &&
           a->levels == b->levels && a->group == b->group && a->scale == b->scale &&
           (a->levels != LM_KV_FLOAT8 || a->float8 == b->float8) && a->ggml == b->ggml &&
           a->norm == b->norm && a->renorm == b->renorm && a->zero == b->zero &&
           a->second == b->second && a->span == b->span && a->outliers == b->outliers &&
           (a->scale != LM_DTYPE_NONE || a->constant == b->constant) &&
           (a->levels != LM_KV_TABLE ||
            (a->n_table == b->n_table && same_floats(a->table, b->table, a->n_table))) &&
           same_floats(a->lower, b->lower, K * D) && same_floats(a->upper, b->upper, K * D) &&
           same_floats(a->head, b->head, K);
}

bool lm_kv_same_form(const lm_kv_side *a, const lm_kv_side *b, int64_t kv_heads, int64_t head_dim)
{
    if (!a->format != !b->format || a->rotate != b->rotate || a->pre_rope != b->pre_rope)
        return false;
    return !a->format ||
           (a->residual == b->residual && a->sinks == b->sinks && a->outliers == b->outliers &&
            same_format(a->format, b->format, kv_heads, head_dim));
}

/* ---- Conversion ---- */

/* The plain type of all sides is that of the cache, and tokens are not dropped. */
static lm_code check_plan(const lm_kv_about *a, const lm_kv_plan *p, lm_err *e)
{
    if (p && p->layers != a->layers)
        return lm_fail(e, LM_EUSAGE, "", NULL, "a cache of %lld layers, and forms of %lld",
                       (long long)a->layers, (long long)p->layers);
    if (p && p->policy)
        return lm_fail(e, LM_EUSAGE, p->text, "choose it when a text is generated",
                       "tokens are dropped while a model runs");
    for (int64_t i = 0; i < 2 * a->layers && p; i++)
        if (!p->side[i].format && p->side[i].plain != a->act)
            return lm_fail(e, LM_EUSAGE, p->text, "choose auto, which is the type it has",
                           "the cache has numbers of %s", lm_dtype_name(a->act));
    return LM_OK;
}

/* Rotate the keys of a layer by their positions, or undo it. */
static lm_code turn_rows(const lm_kv_image *m, const lm_kv_shape *s, int64_t layer, bool back,
                         const lm_kv_turn *turn, char *rows, lm_err *e)
{
    size_t size = lm_dtype_size(s->act);
    double *head;
    if (lm_alloc_n(&head, (size_t)s->head_dim, sizeof *head, "a key", e))
        return e->code;
    for (int64_t i = 0; i < s->kv_heads * s->n; i++) {
        char *row = rows + (size_t)(i * s->head_dim) * size;
        int32_t at = m->content.at ? m->content.at[layer][i] : m->content.positions[i % s->n];
        for (int64_t d = 0; d < s->head_dim; d++)
            head[d] = lm_get(s->act, row, d);
        turn->turn(turn->ctx, layer, at, back, head);
        for (int64_t d = 0; d < s->head_dim; d++)
            lm_set(s->act, row, d, head[d]);
    }
    lm_free(head);
    return LM_OK;
}

/* A part to another form, through plain rows if its own differs. */
static lm_code convert_part(const lm_kv_image *m, lm_kv_image *to, int64_t i,
                            const lm_kv_turn *turn, lm_cpu_level cpu, lm_par *par, lm_err *e)
{
    const lm_kv_shape a = lm_kv_about_shape(&m->about, i), b = lm_kv_about_shape(&to->about, i);
    const lm_kv_part *from = &m->content.part[i];
    void *rows = NULL;
    lm_code rc = LM_OK;
    if (lm_kv_about_has_state(&m->about, i / 2))
        return LM_OK;
    if (a.page == b.page && lm_kv_same_form(a.form, b.form, a.kv_heads, a.head_dim)) {
        for (int s = 0; s < LM_KV_SECTIONS && !rc; s++) {
            lm_kv_section_size z;
            rc = lm_kv_section_size_of(&a, (lm_kv_section)s, &z, e);
            if (!rc && z.bytes)
                memcpy(to->content.part[i].data[s], from->data[s], z.bytes);
        }
        return rc;
    }
    if (a.form->pre_rope != b.form->pre_rope && !turn)
        return lm_fail(e, LM_EUSAGE, i % 2 ? "values" : "keys",
                       "convert between methods that agree in it",
                       "keys of layer %lld are stored %s the rotation by positions, and requested "
                       "%s it",
                       (long long)(i / 2), a.form->pre_rope ? "before" : "after",
                       b.form->pre_rope ? "before" : "after");
    size_t bytes = (size_t)(a.kv_heads * a.n * a.head_dim) * lm_dtype_size(a.act);
    rc = lm_alloc_n(&rows, bytes, 1, "rows of a cache", e);
    rc = rc ? rc : lm_kv_part_decode(&a, from, rows, cpu, par, e);
    if (!rc && a.form->pre_rope != b.form->pre_rope)
        rc = turn_rows(m, &a, i / 2, b.form->pre_rope, turn, rows, e);
    rc = rc ? rc : lm_kv_part_encode(&b, rows, &to->content.part[i], cpu, par, e);
    lm_free(rows);
    return rc;
}

static void copy_tokens(const lm_kv_image *m, lm_kv_image *to)
{
    const lm_kv_about *a = &m->about;
    size_t n = (size_t)a->tokens * sizeof(int32_t);
    memcpy(to->content.ids, m->content.ids, n);
    if (!a->rows)
        memcpy(to->content.positions, m->content.positions, n);
    for (int64_t i = 0; i < a->layers && a->rows; i++)
        memcpy(to->content.at[i], m->content.at[i],
               (size_t)(a->kv_heads[i] * a->rows[i]) * sizeof(int32_t));
}

static void copy_states(const lm_kv_image *m, lm_kv_image *to)
{
    const lm_kv_about *a = &m->about;
    for (int64_t i = 0; i < a->layers; i++) {
        if (!lm_kv_about_has_state(a, i))
            continue;
        memcpy(to->content.state[i], m->content.state[i], (size_t)a->state[i] * sizeof(float));
        if (a->conv[i])
            memcpy(to->content.conv[i], m->content.conv[i],
                   (size_t)a->conv[i] * lm_dtype_size(a->act));
    }
}

static bool all_plain(const lm_kv_plan *p)
{
    bool plain = true;
    for (int64_t i = 0; i < 2 * p->layers; i++)
        plain = plain && !p->side[i].format && !p->side[i].pre_rope;
    return plain;
}

lm_code lm_kv_image_convert(const lm_kv_image *m, const lm_kv_plan *plan, lm_cpu_level cpu,
                            lm_par *par, lm_kv_image **out, lm_err *e)
{
    return lm_kv_image_convert_turned(m, plan, NULL, cpu, par, out, e);
}

lm_code lm_kv_image_convert_turned(const lm_kv_image *m, const lm_kv_plan *plan,
                                   const lm_kv_turn *turn, lm_cpu_level cpu, lm_par *par,
                                   lm_kv_image **out, lm_err *e)
{
    lm_kv_about a = m->about;
    bool plain = !plan || all_plain(plan);
    *out = NULL;
    if (check_plan(&a, plan, e))
        return e->code;
    a.form = plain ? NULL : plan->side;
    a.page = plain ? 0 : plan->page;
    a.spec = plain ? NULL : plan->text;
    a.policy = NULL; /* it was that of the other forms */
    a.ordered = a.weighed = false;
    lm_code rc = lm_kv_image_new(&a, out, e);
    if (!rc) {
        copy_tokens(m, *out);
        copy_states(m, *out);
    }
    for (int64_t i = 0; i < 2 * a.layers && !rc; i++)
        rc = convert_part(m, *out, i, turn, cpu, par, e);
    if (rc) {
        lm_kv_image_free(*out);
        *out = NULL;
    }
    return rc;
}

double lm_kv_rows_error(lm_dtype act, const void *rows, const void *again, size_t n)
{
    double sum = 0, error = 0;
    for (size_t i = 0; i < n; i++) {
        double x = lm_get(act, rows, (int64_t)i), d = lm_get(act, again, (int64_t)i) - x;
        sum += x * x;
        error += d * d;
    }
    return sum > 0 ? sqrt(error / sum) : sqrt(error) > 0 ? INFINITY : 0;
}
