/* SPDX-License-Identifier: Apache-2.0 */
/* layout.c -- which part of a value each rank of a mesh holds. */
#include "graph/layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

const char *const lm_axis_names[] = { "dp", "pp", "cp", "tp", "ep", NULL };
const char *const lm_context_names[] = { "ulysses", "ring", "zigzag", NULL };
const lm_mesh lm_mesh_alone = { .size = { 1, 1, 1, 1, 1 } };

static const char *const share_names[] = {
    "replicated", "split", "partial", "on", "sorted", "own"
};

static bool same_pieces(const lm_portions *a, const lm_portions *b)
{
    for (int i = 0; i < a->n && a->n == b->n; i++)
        if (a->run[i].times != b->run[i].times || a->run[i].size != b->run[i].size ||
            a->run[i].unit != b->run[i].unit)
            return false;
    return a->n == b->n && a->ends == b->ends;
}

bool lm_layout_same(const lm_layout *a, const lm_layout *b)
{
    for (int i = 0; i < LM_AXES; i++)
        if (a->axis[i].share != b->axis[i].share || a->axis[i].at != b->axis[i].at ||
            a->axis[i].sum != b->axis[i].sum ||
            !same_pieces(&a->axis[i].pieces, &b->axis[i].pieces))
            return false;
    return true;
}

lm_code lm_layout_check(const lm_layout *l, int ndim, lm_err *e)
{
    for (int i = 0; i < LM_AXES; i++)
        if (l->axis[i].share == LM_SPLIT && l->axis[i].at >= ndim)
            return lm_fail(e, LM_EUSAGE, lm_axis_names[i], NULL,
                           "splits dimension %d of a value of %d dimensions", l->axis[i].at, ndim);
    return LM_OK;
}

void lm_layout_part(const lm_layout *l, const lm_mesh *mesh, const lm_tensor *whole,
                    lm_tensor *part, int64_t first[LM_MAX_DIMS])
{
    int64_t begin[LM_MAX_DIMS] = { 0 };
    bool here = true;
    *part = *whole;
    for (int i = 0; i < LM_AXES; i++) {
        int at = l->axis[i].at, rank = mesh->rank[i];
        if (l->axis[i].share == LM_ON)
            here = here && at == rank;
        if (l->axis[i].share != LM_SPLIT && l->axis[i].share != LM_OWN)
            continue;
        lm_range range = { 0 };
        const lm_portions *pieces = &l->axis[i].pieces;
        lm_portions_at(pieces, part->dim[at], mesh->size[i], rank, 0, &range);
        begin[at] += range.from;
        part->dim[at] = lm_portions_count(pieces, part->dim[at], mesh->size[i], rank);
    }
    for (int d = 0; !here && d < part->ndim; d++)
        part->dim[d] = 0;
    if (first)
        memcpy(first, begin, sizeof begin);
}

/* ---- text ---- */

static lm_code print_pieces(const lm_portions *p, lm_buf *out, lm_err *e)
{
    lm_code rc = LM_OK;
    for (int i = 0; !rc && i < p->n; i++) {
        const struct lm_portions_run *r = &p->run[i];
        rc = lm_buf_addf(out, e, i ? "+" : ":");
        if (!rc && r->times > 1)
            rc = lm_buf_addf(out, e, "%" PRId64 "*", r->times);
        rc = rc ? rc : lm_buf_addf(out, e, "%" PRId64, r->size);
        if (!rc && r->unit > 1)
            rc = lm_buf_addf(out, e, "/%" PRId64, r->unit);
    }
    return !rc && p->ends ? lm_buf_addf(out, e, "z") : rc;
}

lm_code lm_layout_print(const lm_layout *l, lm_buf *out, lm_err *e)
{
    const char *before = "";
    lm_code rc = LM_OK;
    for (int i = 0; !rc && i < LM_AXES; i++) {
        const lm_placement *p = &l->axis[i];
        if (p->share == LM_REPLICATED)
            continue;
        rc = lm_buf_addf(out, e, "%s%s=%s", before, lm_axis_names[i], share_names[p->share]);
        if (!rc && p->share != LM_PARTIAL)
            rc = lm_buf_addf(out, e, "%d", p->at);
        rc = rc ? rc : print_pieces(&p->pieces, out, e);
        before = ",";
    }
    return rc || *before ? rc : lm_buf_addf(out, e, "%s", share_names[LM_REPLICATED]);
}

/* The number of the name at the beginning of s, of which no name is a beginning of another; -1: none. */
static int name_at(const char *const *names, int n, const char *s)
{
    for (int i = 0; i < n; i++)
        if (!strncmp(s, names[i], strlen(names[i])))
            return i;
    return -1;
}

/* A whole number above 0 at the beginning of *s, which moves behind it; 0: none. */
static int64_t read_number(const char **s)
{
    int64_t n = 0;
    size_t digits = strspn(*s, "0123456789");
    for (size_t i = 0; i < digits && digits <= 15; i++)
        n = n * 10 + ((*s)[i] - '0');
    *s += digits;
    return n;
}

/* "4096/128+2*1024/128", "8*256z" */
static bool read_pieces(const char *s, lm_portions *p)
{
    for (;; s++) {
        if (p->n == LM_PORTIONS_RUNS)
            return false;
        struct lm_portions_run *r = &p->run[p->n++];
        *r = (struct lm_portions_run){ 1, read_number(&s), 1 };
        if (*s == '*') {
            s++;
            r->times = r->size;
            r->size = read_number(&s);
        }
        if (*s == '/') {
            s++;
            r->unit = read_number(&s);
        }
        if (r->times < 1 || r->unit < 1 || r->size < 1 || r->size % r->unit)
            return false;
        if (*s == 'z') {
            p->ends = true;
            s++;
        }
        if (*s != '+')
            return !*s;
    }
}

/* The axis that a word begins with, whose first letter behind "=" is *rest; -1: none, or one of *named, which has a bit for
 * each axis of the words before it. */
static int read_axis(const char *word, unsigned *named, const char **rest)
{
    int axis = name_at(lm_axis_names, LM_AXES, word);
    if (axis < 0 || *named & 1U << axis)
        return -1;
    *named |= 1U << axis;
    *rest = word + strlen(lm_axis_names[axis]);
    return *(*rest)++ == '=' ? axis : -1;
}

/* One word, "tp=split0". */
static bool read_share(const char *word, void *out, unsigned *named)
{
    lm_layout *l = out;
    int axis = read_axis(word, named, &word),
        share = axis < 0 ? -1 : name_at(share_names, LM_ON + 1, word);
    if (share < 0)
        return false;
    word += strlen(share_names[share]);
    size_t digits = strspn(word, "0123456789");
    bool numbered = share == LM_SPLIT || share == LM_ON;
    l->axis[axis] = (lm_placement){ .share = (lm_share)share, .at = atoi(word) };
    bool packed = share == LM_SPLIT && word[digits] == ':';
    if (packed && !read_pieces(word + digits + 1, &l->axis[axis].pieces))
        return false;
    if ((word[digits] && !packed) || numbered != (digits > 0) || digits > 6)
        return false;
    return share != LM_SPLIT || l->axis[axis].at < LM_MAX_DIMS;
}

/* "tp=4". */
static bool read_size(const char *word, void *out, unsigned *named)
{
    lm_mesh *mesh = out;
    int axis = read_axis(word, named, &word);
    size_t digits = axis < 0 ? 0 : strspn(word, "0123456789");
    if (!digits || word[digits] || digits > 6)
        return false;
    mesh->size[axis] = atoi(word);
    return mesh->size[axis] > 0;
}

/* Words with commas between them; NULL, or the first that cannot be read. */
static const char *read_words(const char *text, bool (*read)(const char *, void *, unsigned *),
                              void *out)
{
    unsigned named = 0;
    for (const char *at = text;; at++) {
        char word[128];
        size_t n = strcspn(at, ",");
        if (n >= sizeof word)
            return at;
        memcpy(word, at, n);
        word[n] = 0;
        if (!read(word, out, &named))
            return at;
        at += n;
        if (!*at)
            return NULL;
    }
}

/* The length of a word in a message. */
static int shown(const char *word)
{
    size_t n = strcspn(word, ",");
    return (int)(n < 40 ? n : 40);
}

lm_code lm_layout_read(const char *text, lm_layout *out, lm_err *e)
{
    memset(out, 0, sizeof *out);
    const char *bad =
        strcmp(text, share_names[LM_REPLICATED]) ? read_words(text, read_share, out) : NULL;
    return bad ? lm_fail(
                     e, LM_EUSAGE, "layout",
                     "write AXIS=SHARE[,...]: axes dp pp cp tp ep, each once; shares replicated, "
                     "split0 to split4, with :ELEMENTS/UNIT[+...] of packed parts, partial, on0, "
                     "on1 "
                     "...",
                     "'%.*s' is not the share of an axis", shown(bad), bad)
               : LM_OK;
}

lm_code lm_mesh_read(const char *text, lm_mesh *out, lm_err *e)
{
    *out = lm_mesh_alone;
    const char *bad = read_words(text, read_size, out);
    return bad ? lm_fail(e, LM_EUSAGE, "mesh", "write AXIS=N[,...]: axes dp pp cp tp ep, each once",
                         "'%.*s' is not the size of an axis", shown(bad), bad)
               : LM_OK;
}

int64_t lm_mesh_ranks(const lm_mesh *mesh)
{
    int64_t ranks = 1;
    for (int i = 0; i < LM_AXES; i++)
        ranks = ranks > INT32_MAX ? ranks : ranks * lm_mesh_along(mesh, (lm_axis)i);
    return ranks;
}

const lm_axis lm_inner_axes[LM_INNER_AXES] = { LM_AXIS_TP, LM_AXIS_EP, LM_AXIS_CP };

int64_t lm_mesh_inner(const lm_mesh *mesh)
{
    int64_t n = 1;
    for (int i = 0; i < LM_INNER_AXES; i++)
        n *= lm_mesh_along(mesh, lm_inner_axes[i]);
    return n;
}

const char *lm_mesh_first_inner(const lm_mesh *mesh)
{
    for (int i = 0; i < LM_INNER_AXES; i++)
        if (lm_mesh_along(mesh, lm_inner_axes[i]) > 1)
            return lm_axis_names[lm_inner_axes[i]];
    return NULL;
}

/* The nearest first. */
static const lm_axis nearness[LM_AXES] = { LM_AXIS_TP, LM_AXIS_EP, LM_AXIS_CP, LM_AXIS_DP,
                                           LM_AXIS_PP };

void lm_mesh_place(lm_mesh *mesh, int rank)
{
    for (int i = 0; i < LM_AXES; i++) {
        const int size = lm_mesh_along(mesh, nearness[i]);
        mesh->rank[nearness[i]] = rank % size;
        rank /= size;
    }
}

int lm_mesh_color(const lm_mesh *mesh, lm_axis axis)
{
    int color = 0;
    for (int i = LM_AXES - 1; i >= 0; i--)
        if (nearness[i] != axis)
            color = color * lm_mesh_along(mesh, nearness[i]) + mesh->rank[nearness[i]];
    return color;
}
