/* SPDX-License-Identifier: Apache-2.0 */
/* graph.h -- a model's computation as a static list of operators over values.
 *
 * The list is the order: nodes are appended in the order in which they run.  A pass walks the list
 * and changes it or writes a new one; the order of passes is build -> precision -> backward -> shard (if ranks share the
 * model) -> fuse (lib/op/fuse.h) -> recompute -> plan -> execute.  A graph owns its
 * values and nodes (one arena); they are identified by number. */
#ifndef LM_GRAPH_GRAPH_H
#define LM_GRAPH_GRAPH_H

#include "base/buf.h"
#include "base/mem.h"
#include "graph/layout.h"
#include "graph/op.h"

typedef int32_t lm_vid; /* a value's number */
enum { LM_NONE = -1 };  /* no value: an optional operand that is absent */

typedef enum {
    LM_ROLE_INPUT,   /* fed before each run            */
    LM_ROLE_PARAM,   /* weights                        */
    LM_ROLE_GRAD,    /* gradients of parameters, kept between runs (micro-batches add up) */
    LM_ROLE_STATE,   /* kept between runs: KV caches   */
    LM_ROLE_CONST,   /* filled once: rotary tables     */
    LM_ROLE_OPT,     /* a state of an optimiser        */
    LM_ROLE_DERIVED, /* of a parameter, made anew after each update: its copy in BF16 */
    LM_ROLE_ACT,     /* lives inside one run; placed by the memory plan */
} lm_role;

typedef enum {
    LM_PHASE_FORWARD,
    LM_PHASE_RECOMPUTE, /* a node of the forward once more, for the backward */
    LM_PHASE_BACKWARD_INPUT,
    LM_PHASE_BACKWARD_WEIGHT,
    LM_PHASE_UPDATE,
    LM_PHASE_COUNT,
} lm_phase;
const char *lm_phase_name(lm_phase p);

typedef enum {
    LM_SPACE_HOST,   /* memory of the host */
    LM_SPACE_DEVICE, /* memory of a device */
    LM_SPACE_FILE,   /* a mapped file, read only: codes of weights (code_rows.h) */
} lm_space;

typedef struct {
    const char *name; /* "h.3.qkv"; NULL for most activations */
    lm_role role;
    lm_space space;
    lm_tensor t;      /* shape of the whole value, format: its dtype or codes; data is NULL */
    lm_layout layout; /* which part a rank of a mesh holds; initially all of it */
    lm_vid grad_of;   /* LM_ROLE_GRAD: its parameter */
    /* A view: the value in whose memory it lies, itself not a view; otherwise LM_NONE. */
    lm_vid of;
    int64_t at; /* a view: the number of elements of `of` before it */
    /* The value whose last number tells how many rows there are, of those that the shape has room for
     * (lm_graph_find_rows): `mean` in the mean of ranks, and `most` at most.  LM_NONE: all are. */
    lm_vid rows;
    int64_t mean, most;
} lm_value;

/* Values in one block begin at multiples of this many elements, with zeros between them. */
enum { LM_BLOCK_ALIGN = 64 };

typedef struct lm_node {
    const lm_op *op;
    void *attr; /* the graph's copy; may be edited by passes */
    lm_vid in[LM_MAX_IN], out[LM_MAX_OUT];
    int n_in, n_out;
    lm_phase phase;
    int layer; /* -1: before the first layer, n_layers: after the last */
    int when; /* 0: in every run, else in those in which condition number `when` holds (lm_exec_run_part) */
} lm_node;

typedef struct lm_graph {
    lm_arena *arena;
    lm_value *value;
    size_t n_values, cap_values;
    lm_node *node;
    size_t n_nodes, cap_nodes;
    lm_phase phase; /* of nodes appended now */
    lm_space space; /* of values made now */
    int layer, when;
    bool has_views;
    double room; /* of lm_graph_find_rows; 0: memory is planned for all rows of the shapes */
} lm_graph;

lm_code lm_graph_new(lm_graph **out, lm_err *e);
void lm_graph_free(lm_graph *g);

/* A value of `shape` (data ignored); `name` is copied and may be NULL. */
lm_code lm_graph_value(lm_graph *g, lm_role role, lm_tensor shape, const char *name, lm_vid *out,
                       lm_err *e);

/* A view: the elements of `of` from index `at` on, in the shape of `shape`; dtype and role are
 * those of `of`, which must be kept between runs (not an activation).  A view of a view is stored
 * as a view of the first value.  It may have no elements.  Fails: LM_EBUG when `of` is smaller, an activation, or split. */
lm_code lm_graph_view(lm_graph *g, lm_vid of, int64_t at, lm_tensor shape, const char *name,
                      lm_vid *out, lm_err *e);
/* Set the layout of a value; a gradient that is appended later has the layout of its parameter.  Fails:
 * LM_EUSAGE as lm_layout_check; LM_EBUG for a view, or a value with views, that would be split: a view is a
 * range of elements of the whole. */
lm_code lm_graph_lay(lm_graph *g, lm_vid v, const lm_layout *layout, lm_err *e);
/* Bytes of the part of a value that a rank holds, in its format. */
size_t lm_value_bytes(const lm_value *v, const lm_mesh *mesh);
/* True if two values share memory. */
bool lm_graph_share(const lm_graph *g, lm_vid a, lm_vid b);

/* Append op(attr; in...) -> out.  `attr` is copied (op->attr_size).  in[i] LM_NONE: absent, if the
 * operator allows it.  out[i] on entry: an existing GRAD or STATE value to write to, LM_NONE to
 * make a new activation, or LM_SKIP to leave out this optional output (it is LM_NONE afterwards).
 * Fails: LM_EBUG when operands do not fit the table of the operator, or an existing
 * output has another shape; LM_EUSAGE from the check of attributes. */
enum { LM_SKIP = -2 };
lm_code lm_graph_append(lm_graph *g, const lm_op *op, const void *attr, const lm_vid *in,
                        lm_vid *out, lm_err *e);

/* The node as rules and kernels see it: shapes without data.  in and out must have LM_MAX_* room.
 */
lm_call lm_node_call(const lm_graph *g, const lm_node *n, lm_tensor *in, lm_tensor *out);

/* ---- rows whose number is in the data ---- */

/* Behind all other passes: find the values of which the data tell how many rows there are (lm_op.rows), those that operators
 * make of them row by row included.  Plans give such a value memory for `room` times its mean number of rows, at least 1;
 * executors pass kernels the rows that are there, and where these are more, plan anew with more room (graph/exec.h).  Values
 * that an operator reads in another way than by rows keep their shape.  Fails: for memory. */
lm_code lm_graph_find_rows(lm_graph *g, double room, lm_err *e);
/* The shape of value v with so much room; 0: its own. */
lm_tensor lm_value_in_room(const lm_graph *g, lm_vid v, double room);
/* lm_node_call with these shapes. */
lm_call lm_node_call_in_room(const lm_graph *g, const lm_node *n, double room, lm_tensor *in,
                             lm_tensor *out);

/* The type of activations that the node works on, by which its kernel is chosen: that of its first
 * operand present of LM_ACT_TYPE, else of its first float output that is not LM_DOUBLE, else F32. */
lm_dtype lm_node_act(const lm_graph *g, const lm_node *n);

/* Text of the whole list, one node a line:
 * "  12 forward L3  gelu (x %41) exact=false -> y %42 bf16[1024,2304]".  Absent operands are left out; a
 * layout follows a value in braces unless it is replicated: "w %7 h.3.qkv {tp=split0}". */
lm_code lm_graph_dump(const lm_graph *g, lm_buf *out, lm_err *e);

/* FLOPs and bytes by phase, and their sum. */
typedef struct {
    lm_cost phase[LM_PHASE_COUNT], all;
} lm_graph_cost_sum;
void lm_graph_cost(const lm_graph *g, lm_graph_cost_sum *out);

#endif
