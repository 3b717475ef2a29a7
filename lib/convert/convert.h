/* SPDX-License-Identifier: Apache-2.0 */
/* convert.h -- a model from one published format to another: Hugging Face, GGUF, llm.c, llama2.c.
 *
 * Here every model has the form of Hugging Face: a config.json, some small files, and tensors with
 * the names and shapes of Hugging Face.  An importer produces this form, an exporter writes it; one
 * tensor at a time is in memory, before and after conversion.
 *
 * GGUF of our own making keeps config.json, the tokenizer's files and the types of the tensors
 * under "lmutils.*", so that converting back gives the same bytes; for other GGUF files config.json
 * and tokenizer.json are built from the metadata. */
#ifndef LM_CONVERT_CONVERT_H
#define LM_CONVERT_CONVERT_H

#include <stdbool.h>

#include "base/buf.h"
#include "base/par.h"
#include "base/progress.h"
#include "convert/names.h"
#include "format/folder.h"
#include "format/imatrix.h"
#include "format/provenance.h"
#include "model/config.h"
#include "numeric/format.h"

typedef enum {
    LM_FORMAT_AUTO, /* by content when reading, by the name when writing */
    LM_FORMAT_HF,
    LM_FORMAT_GGUF,
    LM_FORMAT_LLMC,    /* GPT-2 checkpoints of karpathy/llm.c, versions 3 (F32) and 5 (BF16) */
    LM_FORMAT_LLAMA2C, /* karpathy/llama2.c: version 0 (read and written), version 1 (read) */
} lm_model_format;

/* NULL-terminated, in the order of the enum: "auto", "hf", "gguf", "llmc", "llama2c". */
extern const char *const lm_model_formats[];
lm_model_format lm_model_format_of(const char *name);

/* ---- Importing ---- */

typedef struct {
    char *name;
    lm_buf data;
    bool made; /* synthesised; not copied to output folders */
} lm_side_file;

typedef struct lm_import lm_import;
struct lm_import {
    lm_model_format format;
    char *path;   /* for messages */
    json_t *tree; /* config.json */
    lm_config config;
    lm_side_file *side; /* config.json, tokenizer.json, ...: unchanged */
    size_t n_side, cap_side;
    lm_st_plan *plan; /* the tensors, in the types that load returns */
    bool quantised;   /* some tensors were decoded from fewer bits */
    char *name;       /* general.name of a GGUF; NULL: none */
    char *tokenizer;  /* path of a tokenizer given separately; NULL: none */
    char *history;    /* provenance.h; NULL: none */
    char *seq_len;    /* LM_SEQ_KEY there; NULL: unknown */
    uint64_t digest;  /* of the input; 0: not computed */
    /* All of t (of the plan) at *data, until the next call.  A forward-only source returns tensors
     * in the order of the plan; after spool, in any order. */
    lm_code (*load)(lm_import *m, const lm_st_tensor *t, const void **data, lm_err *e);
    lm_code (*spool)(lm_import *m, lm_err *e);
    /* The format from which t is decoded; NULL: all tensors have plain numbers. */
    const lm_format *(*format_of)(const lm_import *m, const lm_st_tensor *t);
    /* GGUF: the codes of t in that format, with the rows of t or, if `turned`, of its transpose. */
    lm_code (*codes)(lm_import *m, const lm_st_tensor *t, void *dst, lm_err *e);
    /* The same in the mapped file, until the import is closed; NULL: its rows stand in another order there. */
    const void *(*codes_in_file)(const lm_import *m, const lm_st_tensor *t);
    bool (*turned)(const lm_import *m, const lm_st_tensor *t);
    /* check that the source is complete, after all was read; NULL: no check needed */
    lm_code (*end)(lm_import *m, lm_err *e);
    void (*close)(lm_import *m);
    lm_par *par;
    lm_sink *sink;
    void *state;
};

typedef struct {
    const lm_bundle_opts *bundle;
    lm_par *par;
    lm_sink *sink;
    /* A folder or tokenizer.json that replaces the input's tokenizer; NULL: the input's; "none":
     * none. */
    const char *tokenizer;
    /* type of decoded tensors; NONE: their type before quantisation if known, otherwise BF16 */
    lm_dtype dtype;
    bool no_digest; /* digest of the input is left out, which would read all its bytes */
} lm_import_opts;

/* The format by the first bytes, which are not consumed (of standard input: if it is a file or a pipe), or
 * by the name; LM_FORMAT_HF: none of the others.  Fails: LM_EIO. */
lm_code lm_model_format_tell(const char *path, lm_model_format *from, lm_err *e);
/* Open the model at `path` ("-": standard input).  *out must be zeroed; close it whatever the
 * result.  Fails: LM_EIO; LM_EFORMAT; LM_EUSAGE if it is not a model, if its config cannot be obeyed (names the
 * key), or if its tokenizer cannot be made. */
lm_code lm_import_open(const char *path, lm_model_format from, const lm_import_opts *o,
                       lm_import *out, lm_err *e);
void lm_import_close(lm_import *m);
/* NULL if there is no such file. */
const lm_side_file *lm_import_side(const lm_import *m, const char *name);

/* ---- Tensors by their part in the model ---- */

/* The tensors of a model and those that its config requires. */
typedef struct {
    lm_model_tensor *wanted;
    size_t n;
    int64_t *wanted_of;        /* of tensor i of the plan: index, or one of those below */
    const lm_st_tensor **from; /* of required tensor i; NULL: absent, of a part that GGUF has not */
} lm_match;
enum {
    LM_TENSOR_IGNORED = -1,
    LM_TENSOR_TIED = -2,
    LM_TENSOR_LEFT = -3
}; /* a buffer; the head's copy of the embedding; of a part that GGUF has not, when it is written */

/* Match the tensors of m with those that m->config requires, by name and shape; none may be left
 * over on either side.  Fails: LM_EUSAGE naming the tensor. */
lm_code lm_match_make(const lm_import *m, lm_match *out, lm_err *e);
void lm_match_fini(lm_match *s);
/* True if `name` is Hugging Face's name of the tensor, with or without the leading "model.". */
bool lm_model_tensor_is(const lm_model_tensor *s, const char *name);

/* ---- Exporting ---- */

typedef struct {
    bool force;
    const lm_bundle_opts *bundle;
    /* GGUF: "keep", "f32", "f16", "bf16", an interleaved format (numeric/format.h) or a mix (lm_gguf_types).
     * NULL: keep. */
    const char *type;
    bool pure;                 /* GGUF: no mixture, every matrix in the chosen type */
    const lm_imatrix *imatrix; /* GGUF: weights of the columns of each matrix; NULL: all equal */
    const char *imatrix_name;  /* path of its file or text */
    lm_dtype dtype;            /* HF, llm.c: type of all tensors; NONE: unchanged */
    uint64_t shard_bytes;      /* HF */
    bool originals;            /* GGUF: keep config.json and tokenizer files for converting back */
    const lm_history_step *step;
    const char *name; /* general.name; NULL: from the path */
} lm_export_opts;

/* The format selected by the output's name: NAME.gguf; NAME.bin (llm.c for GPT-2, else llama2.c);
 * "-": GGUF when the input is not GGUF, otherwise HF; any other name HF. */
lm_model_format lm_export_format(const char *path, const lm_import *m);
/* Write the model to `path` ("-": standard output).  The file or folder appears whole or not at
 * all.  Fails: LM_EUSAGE when the format cannot represent this model (nothing is written), LM_EIO,
 * LM_EFORMAT when the source is damaged. */
lm_code lm_export(lm_import *m, const char *path, lm_model_format to, const lm_export_opts *o,
                  lm_err *e);

/* Properties of a type: it is a mixture, and it depends on importance. */
bool lm_gguf_type_mixes(const char *type);
bool lm_gguf_type_weighs(const char *type);
/* The values of `type`, NULL-terminated. */
extern const char *const lm_gguf_types[];

#endif
