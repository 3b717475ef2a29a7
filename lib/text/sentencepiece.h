/* SPDX-License-Identifier: Apache-2.0 */
/* sentencepiece.h -- SentencePiece's tokenizer.model, as published with Llama 2 and Mistral, or
 * spiece.model, as with T5, converted to a tokenizer.json.
 *
 * The file is a ModelProto in protobuf's wire format (sentencepiece_model.proto):
 * 1. field 1, once a piece: its text (1), score as f32 (2) and type (3);
 * 2. field 2, TrainerSpec: kind of model (3), white space as a suffix (24), byte fallback (35), ids
 *    of unk, bos, eos, pad (40 to 43);
 * 3. field 3, NormalizerSpec: compiled map of characters (2), dummy prefix (3), extra
 *    white space removed (4), white space escaped as U+2581 (5);
 * 4. field 5, a NormalizerSpec for decoding.
 * Other fields describe the training and are skipped.
 *
 * Ids are those of `sentencepiece` for BPE models, with these exceptions, which the tokenizer.json
 * of `transformers` has too: decomposed characters, as charsmap.h describes; control pieces in the
 * text become their ids; a user-defined piece at the very beginning of a text gets no space before
 * it; in a vocabulary with user-defined pieces neither does a text that begins with white space.
 * Ids of Unigram models are those of the same model in `tokenizers`: sums of scores are f64 there
 * and f32 in `sentencepiece`, so that cuts with nearly equal sums may differ, and the texts
 * <0x00> to <0xFF> are tokens of bytes.
 * Word and character models are refused by name, as are options that a tokenizer.json cannot
 * express. */
#ifndef LM_TEXT_SENTENCEPIECE_H
#define LM_TEXT_SENTENCEPIECE_H

#include "base/buf.h"
#include "base/err.h"
#include "text/scored.h"

typedef struct {
    lm_scored_vocab vocab; /* texts point into the file; add_bos, add_eos are false */
    lm_scored_steps steps;
    lm_buf charsmap; /* steps.charsmap points to it */
    /* after LM_EFORMAT: the file is intact, but uses features that are not supported */
    bool other_kind;
} lm_sentencepiece;

/* Read data[0..len), which must outlive *m.  Fails: LM_EFORMAT for a file that breaks the format,
 * for models other than BPE and Unigram, and for options that have no counterpart here. */
lm_code lm_sentencepiece_parse(const char *data, size_t len, const char *where, lm_sentencepiece *m,
                               lm_err *e);
void lm_sentencepiece_fini(lm_sentencepiece *m);

/* The tokenizer.json, appended to *json.  config: the text of the tokenizer_config.json beside the
 * model, of which add_bos_token, add_eos_token and added_tokens_decoder are read; when empty, bos
 * is added and eos is not, and *config becomes a text with these settings and the special
 * pieces.  T5's model, which is a Unigram model without bos or names T5's class, gets eos and not
 * bos, and "extra_ids" (100) tokens <extra_id_N> behind its pieces, the highest N first.  Other
 * classes have rules of their own for Unigram models and are LM_EFORMAT. */
lm_code lm_sentencepiece_json(const char *data, size_t len, const char *where, lm_buf *json,
                              lm_buf *config, lm_err *e);

#endif
