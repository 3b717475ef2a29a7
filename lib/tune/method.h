/* SPDX-License-Identifier: Apache-2.0 */
/* method.h -- the interface of a method of adaptation: one file each, in lib/tune/methods.
 *
 * A method says which tensors a module of the base gets, and how they change it.  Its names are
 * those of PEFT: peft_type and the keys of adapter_config.json, and the tensors of
 * adapter_model.safetensors, `base_model.model.MODULE.SUFFIX`.  Everything else follows: training
 * appends `input`, `output` or `weight` to the model's graph, merging runs `weight` and `bias` in
 * double, folders are read and written by `tensors`.
 *
 * A module is a linear layer y = W x + b with W [out,in], whichever way its file stores it, or an
 * embedding, seen as the linear layer of one-hot tokens: W [H,V] is the transpose of the table. */
#ifndef LM_TUNE_METHOD_H
#define LM_TUNE_METHOD_H

#include "base/hyper.h"
#include "base/rng.h"
#include "tune/rule.h"

enum { LM_TUNE_TENSORS = 80, LM_TUNE_SUFFIX = 64 };
enum { LM_TUNE_ANY = -1 }; /* a dimension of a tensor that is known from its file, or from `ids` */

/* A module of the base as a method sees it. */
typedef struct {
    const char *name; /* in the base: "model.layers.0.self_attn.q_proj" */
    int64_t out, in;
    int64_t layer; /* -1: outside the layers */
    bool turned;   /* its file stores [in,out]: Conv1D of GPT-2, or an embedding */
    bool embedding;
    bool has_bias;
    const double *hyper;  /* values of the method's table for this module, patterns applied */
    const double *bias;   /* b [out], for `derive` of methods of LM_TUNE_MIXES; NULL: none */
    const json_t *config; /* adapter_config.json, for keys that are not numbers; NULL: none */
    /* Of all modules of the adapter: the widest, for tensors that they share, and this one's place
     * among them, in the base's order. */
    int64_t most_out, most_in, place, places;
    /* numbers of `ids` tensors, by place in `tensors`; NULL: not known yet */
    const int64_t *const *ids;
} lm_tune_module;

typedef enum {
    LM_TUNE_ZEROS,
    LM_TUNE_ONES,
    LM_TUNE_FULL,    /* `scale` everywhere */
    LM_TUNE_UNIFORM, /* within -scale and scale */
    LM_TUNE_NORMAL,  /* of deviation `scale` */
    LM_TUNE_BASE,    /* the method's `start` */
} lm_tune_init;

/* A tensor of the adapter. */
typedef struct {
    char suffix
        [LM_TUNE_SUFFIX]; /* behind the module's name: "lora_A.weight"; if shared, behind "base_model." */
    int ndim;
    int64_t dim[LM_MAX_DIMS];
    lm_tune_init init;
    double scale;
    /* not there with these values: it keeps its place in the list, and its value is LM_NONE */
    bool off;
    bool shared; /* one for all modules: VeRA's A and B */
    bool frozen; /* does not train */
    /* of a file: may be missing, and then is as `init` or `draw` makes it; those of `start` may not */
    bool absent;
    bool ids;    /* I32 or I64 in the file: indices; frozen.  `absent` ones are not written to
                    files: `derive` makes them, and `tensors` may give shapes by them */
    bool wide;   /* I64 in files that are written */
    bool matrix; /* takes weight decay */
    bool second; /* LoRA+: of the group with the larger learning rate (lora_B) */
} lm_tune_tensor;

typedef enum {
    LM_TUNE_EMBEDS = 1, /* can change embeddings, as linear layers of one-hot tokens */
    LM_TUNE_LINEAR =
        2, /* W' - W does not depend on W: converts to other methods without the base */
    LM_TUNE_SQUARE = 4,  /* needs out = in */
    LM_TUNE_VECTORS = 8, /* its modules are norms or biases, not matrices */
    LM_TUNE_MIXES = 32,  /* `bias` reads the weight */
    LM_TUNE_SAVED = 64,  /* a new adapter cannot be made here, a saved one of PEFT is read */
    LM_TUNE_DIVIDES =
        128, /* `start` or `derive` finds singular values (svd.h); of lora: some of its kinds */
    LM_TUNE_SEEDED = 16, /* part is drawn from a seed as torch draws it (torch_rng.h) */
} lm_tune_flag;

typedef struct lm_tune_method {
    const char *peft_type; /* "LORA" */
    const char *name;      /* for people: "lora" */
    const char *about;     /* one line */
    const char *prefix;    /* what the names of its tensors have in common: "lora_" */
    unsigned is;           /* of lm_tune_flag */
    const lm_hyper *hyper; /* keys of adapter_config.json that are numbers, flags or words */
    /* other keys of a new configuration, as JSON: "{\"init_lora_weights\": true}"; NULL: none */
    const char *extra;
    /* Keys that change what the method computes and that are not served: NULL-terminated; a file
     * in which one is set is refused.  NULL: none. */
    const char *const *refused;

    /* Refuses keys with which a new adapter cannot be made, though a saved one may have them; e->where: the key.
     * NULL: there are none.  Fails: LM_EUSAGE. */
    lm_code (*begins)(const json_t *config, lm_err *e);

    /* The tensors of a module: out has room for LM_TUNE_TENSORS.  Fails: LM_EUSAGE for values that
     * the module's shape does not allow, naming the module. */
    lm_code (*tensors)(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e);

    /* Rules.  p: values of the tensors in the order of `tensors`, LM_NONE for one that is absent.
     * NULL: there is none.
     *   weight  W' [out,in]
     *   bias    b' [out] seen as [1,out]; b may be LM_NONE
     *   input   x' [N,in] of the module's input
     *   output  y' [N,out] of x' and y = W x' + b
     * A method has `weight`, or `input` and `output`, or both, which then agree: y' = W' x + b'. */
    lm_vid (*weight)(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p);
    lm_vid (*bias)(lm_rule *r, const lm_tune_module *m, lm_vid w, lm_vid b, const lm_vid *p);
    lm_vid (*input)(lm_rule *r, const lm_tune_module *m, lm_vid x, const lm_vid *p);
    lm_vid (*output)(lm_rule *r, const lm_tune_module *m, lm_vid x, lm_vid y, const lm_vid *p);
    /* The matrices of the noise that training adds to what `weight` gives, and nothing else does:
     * y' = W' x + b' + up (n * exp(down x / 2)), n normal; up [out,k], down [k,in]. */
    void (*noise)(lm_rule *r, const lm_tune_module *m, const lm_vid *p, lm_vid *up, lm_vid *down);

    /* Numbers of tensors that start from the base (LM_TUNE_BASE), in double, into v[i] of tensor
     * i; w [out,in] may be changed (PiSSA), and *changed then says so.  NULL: none. */
    lm_code (*start)(const lm_tune_module *m, double *w, bool *changed, double *const *v,
                     lm_rng rng, lm_err *e);
    /* What the rule reads that follows from the base, when an adapter is applied to its W:
     * `absent` tensors of LM_TUNE_BASE that the file lacks (given[i] false), and W itself where
     * the start changed it (LoRA's pissa).  NULL: nothing. */
    lm_code (*derive)(const lm_tune_module *m, double *w, double *const *v, const bool *given,
                      lm_err *e);
    /* Of an `absent` tensor i that a file lacks: its numbers, as torch draws them from the
     * configuration's seed.  NULL: such tensors are as `init` says. */
    lm_code (*draw)(const lm_tune_module *m, int i, double *out, lm_err *e);
    /* Exact factors of W' - W = left [out,rank] right [rank,in] from the tensors' numbers; left
     * NULL: asks for the rank alone.  *rank 0: these values have none, and conversion goes by
     * singular values.  NULL: never. */
    lm_code (*low_rank)(const lm_tune_module *m, double *const *v, int64_t *rank, double *left,
                        double *right, lm_err *e);
} lm_tune_method;

/* Tables of methods end here. */
#define LM_TUNE_END  \
    {                \
        .name = NULL \
    }

/* Fill one entry of `tensors`: a matrix (cols > 0) or a vector [rows]. */
lm_tune_tensor *lm_tune_tensor_add(lm_tune_tensor *out, int *n, const char *suffix, int64_t rows,
                                   int64_t cols, lm_tune_init init, double scale);
/* The value of a key of the method's table for the module. */
double lm_tune_value(const lm_tune_method *t, const lm_tune_module *m, const char *key);

/* ---- registry.c ---- */

const lm_tune_method *lm_tune_method_at(int i);                 /* NULL past the last */
const lm_tune_method *lm_tune_method_find(const char *name);    /* by name; NULL: unknown */
const lm_tune_method *lm_tune_method_of(const char *peft_type); /* by peft_type; NULL: unknown */

#endif
