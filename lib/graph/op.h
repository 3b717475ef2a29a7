/* SPDX-License-Identifier: Apache-2.0 */
/* op.h -- what an operator is: one entry with its shape rule, gradient rule, cost and examples.
 *
 * Kernels are found by name in a backend's table; everything else about an operator is in its entry
 * (lib/op/FAMILY.c).  Rules see a node as an lm_call whose operands have shapes but no data, the
 * same structure that the kernel receives, so attributes and operand order are those of
 * kernels/FAMILY.h. */
#ifndef LM_GRAPH_OP_H
#define LM_GRAPH_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/rng.h"
#include "graph/layout.h"
#include "kernels/kernel.h"

#define LM_MAX_IN  16
#define LM_MAX_OUT 8

/* Kinds of operands (lm_operand.is). */
enum {
    LM_ACT_TYPE = 1,  /* of the dtype of activations; without it, of lm_wide() of that dtype */
    LM_LOW_PARAM = 2, /* an input in which a parameter has the low type (weights, not biases) */
    LM_WEIGHT = LM_ACT_TYPE | LM_LOW_PARAM,
    LM_OPTIONAL = 4,
    LM_IDS = 8,     /* of I32 in every case: tokens, positions, rows */
    LM_FIXED = 16,  /* a float input through which no gradient flows (tables, scales) */
    LM_SAVED = 32,  /* an output for the backward only (statistics): no gradient flows into it */
    LM_OVER = 64,   /* the outputs so marked may share memory with the inputs so marked */
    LM_GIVEN = 128, /* an output that the caller gives: its shape is an operand of the rule, too */
    LM_ANY_TYPE = 256, /* of any float dtype; of an output the caller gives it */
    LM_DOUBLE = 512,   /* of F64 in every case: sums, numbers of a step */
    LM_CODES = 1024,   /* of U8 in every case: codes of numbers */
    LM_KV =
        2048, /* can be a coded cache (numeric/kv_format.h) [pages,K,T,D]; otherwise plain numbers */
    /* An input that is added to what the others make: where results are addends, one rank's alone */
    LM_ADDEND = 4096,
    /* The outputs are linear in the inputs so marked, together: of addends they are addends */
    LM_LINEAR = 8192,
    /* A gradient: of what several ranks hold, each has an addend, as each has seen what it reads alone */
    LM_GRADIENT = 16384,
};

/* An operand's dimensions are sums and products of numbers and letters, such as "BT,(H+2K)D".  A
 * letter has the same size in all operands; if an attribute has that letter, its value is the size.
 * Terms and factors are in the order of memory, the slowest first: (H+2K)D are H queries, then K keys, then K values.
 * "*": any shape, the same for all operands with "*".  "~": that shape, or one that is repeated to
 * it (the rule says which). */
typedef struct {
    const char *name, *dims; /* name NULL: past the last */
    unsigned is;
} lm_operand;

/* An attribute, for dumps and for letters, as { LM_ATTR_INT(lm_rope_attr, heads, 'H') }; a table ends with
 * { 0 }. */
typedef enum {
    LM_FIELD_INT,
    LM_FIELD_REAL,
    LM_FIELD_FLAG,
    LM_FIELD_WORD,
    LM_FIELD_TEXT
} lm_field_kind;
typedef struct {
    const char *name;
    size_t at;               /* bytes from the beginning of the attributes */
    lm_field_kind kind;      /* an int64_t, a double, a bool, an enum, a char[] for dumps alone */
    char letter;             /* of an int64_t that is a size of operands; 0: of none */
    const char *const *word; /* of an enum: its names by number */
    bool rare;               /* of few models: dumps leave it out where it is 0 */
    char otherwise; /* where it is 0 its letter has the size of this letter; 0: it has none */
} lm_field;
#define LM_ATTR_INT(t, member, letter) \
#member, offsetof(t, member), LM_FIELD_INT, letter, NULL, false, 0
#define LM_ATTR_REAL(t, member) #member, offsetof(t, member), LM_FIELD_REAL, 0, NULL, false, 0
#define LM_ATTR_FLAG(t, member) #member, offsetof(t, member), LM_FIELD_FLAG, 0, NULL, false, 0
#define LM_ATTR_WORD(t, member, words) \
#member, offsetof(t, member), LM_FIELD_WORD, 0, words, false, 0
#define LM_ATTR_RARE_REAL(t, member) #member, offsetof(t, member), LM_FIELD_REAL, 0, NULL, true, 0
#define LM_ATTR_RARE_FLAG(t, member) #member, offsetof(t, member), LM_FIELD_FLAG, 0, NULL, true, 0
#define LM_ATTR_RARE_INT(t, member, letter, otherwise) \
#member, offsetof(t, member), LM_FIELD_INT, letter, NULL, true, otherwise
extern const char *const lm_acc_words[]; /* of lm_acc */

/* How the precision pass treats an operator (the lists of AMP). */
typedef enum {
    LM_PREC_ALLOW, /* runs in the low type: matrix products, attention, look-ups */
    LM_PREC_INFER, /* follows its first operand                                 */
    LM_PREC_DENY,  /* stays in F32                                              */
} lm_prec;

typedef struct {
    double flops;         /* multiply-add = 2 */
    double bytes;         /* assuming that each operand is read or written once, without a cache */
    double sent[LM_AXES]; /* bytes that a rank sends to the others along each axis */
} lm_cost;

/* Rows of an output whose shape has room for the most of them, while the data tell how many there are. */
typedef struct {
    int of;             /* the input, of I32, whose last number is their number */
    int64_t mean, most; /* of ranks that share all rows, and of this one whatever the data are */
} lm_live_rows;

struct lm_grad;
struct lm_node;
struct lm_shard_call;

/* A random valid instance for tests: attributes, shapes of the inputs, and the requested
 * outputs. */
typedef struct {
    __attribute__((aligned(16))) char attr[1536];
    lm_tensor in[LM_MAX_IN]; /* act operands F32; dtype of integer operands I32; ndim 0: absent */
    int n_in;
    unsigned want; /* bit i: output i */
    /* Outputs whose shape or type the caller chooses (a cast's type, caches), dtypes as for inputs;
     * ndim 0: set by the shape rule. */
    lm_tensor out[LM_MAX_OUT];
} lm_example;

typedef struct lm_op {
    const char *name;
    size_t attr_size;
    lm_operand in[LM_MAX_IN], out[LM_MAX_OUT]; /* as documented in kernels/FAMILY.h */
    const lm_field *fields;                    /* this operator's attributes; NULL: none */
    /* The size of a letter that no attribute has and no operand tells by itself, because it follows from flags of the
     * attributes and from which operands there are; -1 for all other letters.  NULL if the
     * operator has no such letter. */
    int64_t (*letter)(const lm_call *c, char letter);
    /* Each element of an output depends on the elements at the same index alone, so calls on adjacent
     * pieces may be one call.  All outputs have the shape "*". */
    bool flat;
    /* How calls can be split over ranks (graph/shard.h): words of letters that are split together, as "N M K+".  Each
     * operand dimension with such a letter is split; attributes with the letter become local sizes.  An operand without
     * the letters is replicated, or behind a word with a +, for an output or an LM_ADDEND, an addend: K is summed over in
     * y[N,M] = x[N,K] w[M,K], so that each rank makes an addend of y.  "*": any one dimension of the operands of any
     * shape.  "": all operands are replicated.  NULL is for tests alone. */
    const char *split;
    /* Whether this call, of whole operands, can be split along a letter of a word, or of "*" along a dimension ('0' ..), in
     * which case operands of any shape may differ elsewhere; of a letter alone also asked in lower case, whether in parts from
     * both ends (lm_portions.ends).  NULL: every one can. */
    bool (*splits)(const lm_call *c, char letter);
    /* Append a rank's call where that is more than the call with local sizes (graph/passes.h, "sharding").  NULL: it is not
     * more.  `ranges`: letters of which it has to know this rank's part as one range; "*", for which it is not called otherwise:
     * as the same ranges of each of equal pieces; NULL: none. */
    lm_code (*shard)(struct lm_shard_call *s, lm_err *e);
    const char *ranges;
    /* The letter of a word along which ranks exchange blocks around a ring (kernels/ring.h): they have as much each, and it is
     * split where the mesh says so alone (lm_mesh.context).  0: none. */
    char around;
    /* Form number i in which a call, of whole operands, can be split besides; NULL: past the last.  A character for each
     * operand, inputs first: '-' replicated, '0' to '3' split along that dimension, '+' an addend, 's' sorted along dimension
     * 0, and 'e' split along that by experts, whole ones: there are as many as `offsets`, an input, has without its last.
     * Forms with 's' or 'e' are those of the axis ep; those of other axes may have 'o', LM_OWN along dimension 0, beside 's'.
     * `shard` is called for these forms alone, with lm_shard_call.form.
     * NULL: none. */
    const char *(*form)(const lm_call *c, int i);
    /* Whether each rank has a valid call by a form that splits dimensions in these pieces; NULL: by all of them. */
    bool (*form_fits)(const lm_call *c, const lm_portions *pieces, int ranks);
    lm_prec prec;
    /* Tolerance of kernels: relative L2 error against the reference in double, in F32 and BF16, as
     * documented in kernels/FAMILY.h; 0: 1e-6 and 4e-3. */
    double tolerance[2];

    /* Checks beyond the operands' letters: called after these fit and every output in `want` has
     * its shape and dtype.  Fails: LM_EUSAGE naming the operand or attribute.  NULL: the letters
     * are enough. */
    lm_code (*shape)(lm_call *c, unsigned want, lm_err *e);
    /* Append the nodes of the backward; NULL: not differentiable. */
    lm_code (*grad)(struct lm_grad *g, const struct lm_node *n, lm_err *e);
    void (*cost)(const lm_call *c, lm_cost *out);
    /* What is known of the rows of output 0; NULL: their number is that of its shape. */
    void (*rows)(const lm_call *c, lm_live_rows *out);
    /* The i-th example of a deterministic, endless series; NULL: covered by the forward operator's.
     */
    void (*example)(lm_rng r, int i, lm_example *out);
    /* Fill the integer inputs of an example with valid values, and numbers where any would not do, also outputs
     * that the operator reads; NULL: none. */
    void (*fill)(lm_rng r, const lm_call *c);
} lm_op;

/* The operators that passes insert (lib/op/elementwise.c, values.c). */
extern const lm_op lm_op_add, lm_op_cast, lm_op_accumulate;
/* and, of ranks, lib/op/exchange.c */
extern const lm_op lm_op_all_reduce, lm_op_reduce_scatter, lm_op_all_gather, lm_op_all_to_all,
    lm_op_gather_begin, lm_op_gather_end, lm_op_sum_shared, lm_op_part, lm_op_once;

/* For rules. */
static inline lm_dtype lm_wide(lm_dtype act) /* the type of statistics and gradients of weights */
{
    return act == LM_DTYPE_F64 ? LM_DTYPE_F64 : LM_DTYPE_F32;
}
static inline bool lm_absent(const lm_tensor *t)
{
    return t->ndim == 0;
}
int lm_op_ins(const lm_op *op), lm_op_outs(const lm_op *op); /* numbers of operands */
/* The dtype of activations: of the first present LM_ACT_TYPE operand, otherwise of the first float
 * output that is not LM_DOUBLE, otherwise F64 if the first input of a wide type is, else F32. */
lm_dtype lm_op_act(const lm_op *op, const lm_call *c);
/* Check the inputs against the operands' dimensions and types, then set dtype, ndim and dim of
 * every output in `want` (bit i: output i); the others get ndim 0.  Outputs with a shape or dtype
 * given by the caller hold it on entry.  Fails: LM_EBUG naming the operand that does not fit, LM_ELIMIT
 * for a size beyond 2^63. */
lm_code lm_op_shape(const lm_op *op, lm_call *c, unsigned want, lm_err *e);

/* The sizes of the letters of a call that passed lm_op_shape, A to Z; 0: the operator has no such letter.
 * Fails: as lm_op_shape. */
enum { LM_LETTERS = 26 };
lm_code lm_op_letters(const lm_op *op, const lm_call *c, int64_t size[LM_LETTERS], lm_err *e);
/* The pieces of dimension i of an operand when the letters (bit 0: A) are split: *held is false if it has none of them.  False:
 * they cannot be split apart. */
bool lm_dim_pieces(const char *dims, int i, unsigned letters, const int64_t size[LM_LETTERS],
                   bool *held, lm_portions *out);
/* The letter that dimension i of an operand is, alone; 0: it is more or less than one. */
char lm_dim_letter(const char *dims, int i);

lm_tensor lm_shape1(lm_dtype d, int64_t a);
lm_tensor lm_shape2(lm_dtype d, int64_t a, int64_t b);
lm_tensor lm_shape3(lm_dtype d, int64_t a, int64_t b, int64_t c);
bool lm_same_shape(const lm_tensor *a, const lm_tensor *b);
/* Bytes of all present operands together. */
double lm_call_bytes(const lm_call *c);
/* LM_EUSAGE "operator: what" unless ok. */
lm_code lm_expect(bool ok, const char *op, lm_err *e, const char *what, ...) LM_PRINTF(4, 5);

#endif
