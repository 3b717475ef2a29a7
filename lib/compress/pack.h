/* SPDX-License-Identifier: Apache-2.0 */
/* pack.h -- writes a model, a training state or a safetensors file to an .lmz: byte for byte, or
 * with chosen tensors coded with loss. */
#ifndef LM_COMPRESS_PACK_H
#define LM_COMPRESS_PACK_H

#include "base/par.h"
#include "base/progress.h"
#include "compress/coded.h"

/* All borrowed.  Zero-initialise. */
typedef struct {
    int level;        /* 1..19; 0: the default of lmz.h */
    const char *base; /* the model of which the output is a delta; NULL: not a delta */
    /* the base of an input that is itself a delta; NULL: at the path that it stores */
    const char *input_base;
    lm_coded_policy lossy;
    const lm_history_step *step; /* for the history of files coded with loss; may be NULL */
    bool force;                  /* replace `to` */
    /* refuse an input with entries that an .lmz does not carry (a folder below, a hidden or special
     * file); otherwise they cause a warning */
    bool whole;
    /* before publishing, read the output back, check every chunk, and compare its digest with that
     * of the input, which is read again; not for streams */
    bool verify;
    lm_par *par;
    lm_sink *sink;
    const char *tmpdir;
} lm_pack_opts;

typedef struct {
    char *file, *tensor;
    const char *codec;
    int64_t count;
    uint64_t before, after; /* bytes */
    lm_lossy_error err;
} lm_pack_loss;

typedef struct {
    uint64_t files, raw, coded; /* files and their bytes as read; bytes of the .lmz */
    lm_pack_loss *loss;         /* one line for each tensor coded with loss */
    size_t n_loss, cap_loss;
} lm_pack_report;
void lm_pack_report_fini(lm_pack_report *r);
/* The report as one line of JSON, appended to `out`: compress-ckpt(1), OUTPUT. */
lm_code lm_pack_report_json(const lm_pack_report *r, const char *input, const char *output,
                            lm_buf *out, lm_err *e);

/* Write the model at `from` (bundle.h) to the .lmz `to` ("-": standard output).  For the folder of
 * a run its newest checkpoint is taken.  Plain 16- and 32-bit codecs of weights are also written to
 * the "torch_dtype" or "dtype" of config.json.  Fails: LM_EUSAGE when `to` exists and !force, or
 * lies inside `from`, or the chain of bases would be too long or a cycle; LM_ENUMERIC as
 * lm_lossy_encode; LM_EFORMAT when verification finds a difference. */
lm_code lm_pack(const char *from, const char *to, const lm_pack_opts *o, lm_pack_report *r,
                lm_err *e);

#endif
