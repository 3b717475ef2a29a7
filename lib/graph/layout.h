/* SPDX-License-Identifier: Apache-2.0 */
/* layout.h -- which part of a value each rank of a mesh holds.
 *
 * A mesh arranges ranks along five axes.  Shapes in a graph are those of whole values; a layout says
 * for each axis how the ranks along it share a value:
 *
 *   replicated   all hold the same (the default: a layout of zero bytes)
 *   split D      each holds a range of dimension D: rank r of n holds the elements from len * r / n
 *                up to len * (r + 1) / n; or of packed parts, such a range of each (numeric/portions.h)
 *   partial      each holds an addend in the shape of the whole; the value is their sum
 *   on R         rank R alone holds it
 *   sorted D     each holds some indices of dimension D, in their order and in the shape of the whole: which ones and how many
 *                is in the data, as for the rows of each rank's experts; behind them is anything
 *   own D        each has, in the shape of its part of dimension D, what it made of its part of other values, in an order of
 *                its own: the rows of its tokens sorted by expert
 *
 * Several axes may split one dimension: an axis that comes first in lm_axis splits first, and each
 * further axis splits what a rank then has.  Sources: GSPMD (arXiv:2105.04663), DTensor's placements. */
#ifndef LM_GRAPH_LAYOUT_H
#define LM_GRAPH_LAYOUT_H

#include "base/buf.h"
#include "base/err.h"
#include "numeric/portions.h"
#include "numeric/tensor.h"

typedef enum {
    LM_AXIS_DP, /* data parallel: rows of the batch */
    LM_AXIS_PP, /* pipeline stages */
    LM_AXIS_CP, /* context parallel: positions */
    LM_AXIS_TP, /* tensor parallel: heads, columns, rows of matrices */
    LM_AXIS_EP, /* experts */
    LM_AXES,
} lm_axis;
extern const char *const lm_axis_names[]; /* "dp" ..., by lm_axis, NULL at the end */

/* What attention does with positions that ranks along cp share. */
typedef enum {
    LM_CONTEXT_HEADS, /* each has all positions of some heads there (arXiv:2309.14509) */
    LM_CONTEXT_RING,  /* blocks of keys and values travel around the ranks (kernels/ring.h) */
    LM_CONTEXT_ENDS,  /* the same, of positions from both ends of each window (lm_portions.ends) */
} lm_context;
extern const char *const lm_context_names[]; /* "ulysses", "ring", "zigzag"; NULL at the end */

typedef struct {
    int size[LM_AXES];  /* ranks along each axis, at least 1 */
    int rank[LM_AXES];  /* this rank's coordinates */
    lm_context context; /* along cp */
} lm_mesh;
extern const lm_mesh lm_mesh_alone; /* one rank */

/* "dp=2,tp=4": ranks along axes, 1 along the others; the coordinates are 0.  Fails: LM_EUSAGE naming the word, for unknown
 * axes, an axis named twice, and sizes other than 1 to 999,999. */
lm_code lm_mesh_read(const char *text, lm_mesh *out, lm_err *e);
/* The ranks of all axes together; along one of them.  A size of 0 is 1. */
int64_t lm_mesh_ranks(const lm_mesh *mesh);
static inline int lm_mesh_along(const lm_mesh *mesh, lm_axis axis)
{
    return mesh->size[axis] > 0 ? mesh->size[axis] : 1;
}
/* The axes whose ranks share one list, each with a part of its values, in the order in which the sharding pass takes them; and
 * the ranks along these together. */
enum { LM_INNER_AXES = 3 };
extern const lm_axis lm_inner_axes[LM_INNER_AXES];
int64_t lm_mesh_inner(const lm_mesh *mesh);
/* The name of the first of these with several ranks; NULL: all have one. */
const char *lm_mesh_first_inner(const lm_mesh *mesh);
/* The coordinates of rank number `rank` of all: tp first, whose ranks exchange most and should be near each other, then ep, cp,
 * dp, and pp last.  */
void lm_mesh_place(lm_mesh *mesh, int rank);
/* A number that those ranks share which differ from this one in their coordinate along `axis` alone (lm_comm_split). */
int lm_mesh_color(const lm_mesh *mesh, lm_axis axis);

typedef enum { LM_REPLICATED, LM_SPLIT, LM_PARTIAL, LM_ON, LM_SORTED, LM_OWN } lm_share;

typedef struct {
    lm_share share;
    int at; /* LM_SPLIT, LM_SORTED, LM_OWN: the dimension; LM_ON: the rank; otherwise 0 */
    lm_portions pieces; /* LM_SPLIT, LM_OWN: of that dimension; otherwise none */
    /* LM_SPLIT: what several ranks hold (numeric/portions.h) are addends, whose sum is the value; false: equal copies.
     * Layouts in text do not say it: gradients get it in the sharding pass. */
    bool sum;
} lm_placement;

typedef struct {
    lm_placement axis[LM_AXES];
} lm_layout;

bool lm_layout_same(const lm_layout *a, const lm_layout *b);
/* Check that a value of so many dimensions may have the layout.  Fails: LM_EUSAGE naming the axis. */
lm_code lm_layout_check(const lm_layout *l, int ndim, lm_err *e);

/* The part of a value of shape *whole that this rank holds: its shape (a dimension may be 0 when there
 * are more ranks than elements, and all are 0 where only another rank holds the value), and if `first`
 * is not NULL, the index in *whole of its first element in each dimension (where packed parts are split,
 * other elements of the part are not beside it).  *whole and *part may be the same.  The layout must have passed
 * lm_layout_check. */
void lm_layout_part(const lm_layout *l, const lm_mesh *mesh, const lm_tensor *whole,
                    lm_tensor *part, int64_t first[LM_MAX_DIMS]);

/* "tp=split0,pp=on2": the axes that are not replicated; "replicated" if all axes are.  Packed parts follow the
 * dimension, in elements / elements of a unit: "tp=split0:4096/128+2*1024/128"; a z behind them: parts are from both ends. */
lm_code lm_layout_print(const lm_layout *l, lm_buf *out, lm_err *e);
/* The same text read.  Fails: LM_EUSAGE naming the word, for unknown axes and shares, an axis named twice,
 * dimensions from LM_MAX_DIMS on, ranks from a million on, parts that are not whole units. */
lm_code lm_layout_read(const char *text, lm_layout *out, lm_err *e);

#endif
