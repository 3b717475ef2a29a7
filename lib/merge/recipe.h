/* SPDX-License-Identifier: Apache-2.0 */
/* recipe.h -- the description of a merge: from options, or from a mergekit YAML file.
 *
 * A recipe names its inputs but not their contents; plan.h opens them and makes the list of
 * tensors.  All strings and arrays belong to the recipe.
 *
 * Parameters are given at five levels; the strongest first: of a model in a slice (in `models:` the
 * one slice is the whole model), of the slice, of the module, of the whole merge, the method's default.  A value is
 * a number, a gradient over the layers of its slice, or a list of these with filters:
 *   u = i / (L - 1) for layer i of L (1 when L = 1), 0 for tensors outside the layers
 *   gradient v[0..n): x = u (n - 1), linear between v[floor x] and v[floor x + 1]
 *   filters: the first entry whose filter is absent, "*", or a part of the tensor's name: of the name
 *   in the model for parameters of models, in the result for the others (slices renumber layers)
 * Values with names (rescale: l1, sign_election: sum) and truth values are numbers here: 0, 1, 2.
 * A gradient of truth values takes v[floor x]. */
#ifndef LM_MERGE_RECIPE_H
#define LM_MERGE_RECIPE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/mem.h"
#include "merge/method.h"
#include "merge/vocab.h"
#include "merge/yaml.h"
#include "numeric/dtype.h"

enum { LM_MERGE_MAX_INPUTS = 64, LM_MERGE_MAX_LAYERS = 100000 };

/* One case of a value. */
typedef struct {
    const char *filter; /* NULL: every tensor */
    const double *v;    /* gradient */
    int n;              /* at least 1 */
} lm_merge_case;
typedef struct {
    const lm_merge_case *at;
    int n; /* 0: not given */
} lm_merge_value;
typedef struct {
    lm_merge_value param[LM_MERGE_PARAMS];
} lm_merge_settings;

/* The value for a tensor; NAN if not given. */
double lm_merge_value_at(const lm_merge_value *v, lm_merge_param p, const char *tensor, double u);

/* An input model; a model that is used several times has one entry. */
typedef struct {
    const char *name;          /* as in the recipe: "math/", "base/+lora/" */
    const char *path;          /* of the model; NULL: a LoRA folder, which names its base */
    const char *lora;          /* PEFT folder merged into it on the fly; NULL: none */
    const char *fisher, *gram; /* safetensors with side data of its tensors; NULL: none */
} lm_merge_input;

/* One model in a slice. */
typedef struct {
    int input;
    int64_t from, to; /* layers [from, to); both -1: all of them */
    lm_merge_settings set;
} lm_merge_source;

/* A run of layers of the result, made from equally many layers of each source. */
typedef struct {
    lm_merge_source *source; /* the base among them when it was listed */
    int n;
    int base;   /* input; -1: the recipe's */
    int module; /* of the recipe */
    lm_merge_settings set;
} lm_merge_slice;

/* A part of the model that is merged separately (the decoder, the vision tower); plan_names.h finds
 * its tensors. */
typedef struct {
    const char *name; /* NULL: the whole model, the only module */
    int first, n;     /* its slices: one, or as many as `slices:` has */
    bool sliced;      /* `slices:`: its layers are renumbered */
    lm_merge_settings set;
} lm_merge_module;

typedef struct {
    const lm_merge_method *method;
    lm_merge_input *input;
    int n_inputs;
    int base; /* input that is the base; -1: none */
    lm_merge_slice *slice;
    int n_slices; /* of all modules */
    lm_merge_module *module;
    int n_modules; /* 1 without `modules:` */
    /* `slices:` in a module: layers are renumbered; otherwise one slice with all layers */
    bool sliced;
    lm_merge_settings set;
    /* Of the result.  mergekit's `dtype` is also the type of its arithmetic; here it is only the
     * type of the result when out_dtype is not given (NONE).  Both NONE: each tensor has its type
     * in the base, otherwise in the first model. */
    lm_dtype dtype, out_dtype;
    lm_vocab_spec vocab;       /* refers to models by lm_merge_input.name */
    const char *chat_template; /* as in chat.h; NULL: that of the tokenizer */
    uint64_t seed;
    bool mergekit; /* from YAML: `rescale` is l1 where the method's default is "expected" */
    lm_arena *arena;
} lm_merge_recipe;

void lm_merge_recipe_free(lm_merge_recipe *r);

/* ---- From options ---- */

/* An empty recipe for `method`: one slice, no inputs. */
lm_code lm_merge_recipe_new(const char *method, lm_merge_recipe **out, lm_err *e);
/* "MODEL", "MODEL:0.4", "MODEL:weight=0.4,density=0.5", "MODEL+LORA:..."; beside parameters the
 * keys fisher=FILE and gram=FILE.  An existing path is taken as a path, even with colons.  A model
 * without weight gets the weight 1 when the method needs one.  Fails: LM_EUSAGE naming the
 * operand. */
lm_code lm_merge_recipe_model(lm_merge_recipe *r, const char *operand, lm_err *e);
lm_code lm_merge_recipe_base(lm_merge_recipe *r, const char *path, lm_err *e);
/* A parameter for the whole merge: a number, a name, true, false, or a gradient "0,0.5,1".  Fails:
 * LM_EUSAGE for a parameter that the method does not have, or a value out of its range. */
lm_code lm_merge_recipe_param(lm_merge_recipe *r, const char *name, const char *value, lm_err *e);
/* Make all checks that need no open model: number of models, base, required parameters, ranges,
 * streams named twice.  Call it last; the YAML reader does so itself. */
lm_code lm_merge_recipe_check(const lm_merge_recipe *r, lm_err *e);

/* The inputs that are merged as models, without the base: their number, and the k-th. */
int lm_merge_recipe_models(const lm_merge_recipe *r);
int lm_merge_recipe_nth(const lm_merge_recipe *r, int k);
/* Set one weight for all uses of input i, replacing earlier ones.  Fails: LM_EUSAGE for a method
 * without weights. */
lm_code lm_merge_recipe_weight(lm_merge_recipe *r, int input, double weight, lm_err *e);

/* ---- From a mergekit YAML file ---- */

/* Relative paths start at the current folder, as in mergekit.  Fails: LM_EUSAGE with line and key
 * for keys and values that are unknown, unsupported, or contradictory. */
lm_code lm_merge_recipe_parse(const char *text, size_t len, const char *where,
                              lm_merge_recipe **out, lm_err *e);

/* The default of a parameter in this recipe: rescale l1 for "expected" when it comes from YAML,
 * weight 1 where options gave none; NAN: none. */
double lm_merge_recipe_default(const lm_merge_recipe *r, lm_merge_param p);

/* Append the recipe as compact JSON to `out`, for provenance and --json: method, base, inputs,
 * parameters with defaults filled in. */
lm_code lm_merge_recipe_json(const lm_merge_recipe *r, bool hide_paths, lm_buf *out, lm_err *e);

#endif
