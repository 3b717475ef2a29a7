/* SPDX-License-Identifier: Apache-2.0 */
/* gguf.h -- a LoRA adapter as a GGUF file that llama.cpp loads beside a model (--lora).
 *
 * Keys: general.architecture (the base's), general.type "adapter", adapter.type "lora",
 * adapter.lora.alpha; tensors in F32, named after the base's: blk.0.attn_q.weight.lora_a [r,in]
 * and .lora_b [out,r], rows of q and k in GGUF's order (convert/names.h).  llama.cpp scales every
 * product by alpha / r, so B is multiplied by what its module's scale differs from that.
 * Source: ggml-org/llama.cpp convert_lora_to_gguf.py. */
#ifndef LM_TUNE_GGUF_H
#define LM_TUNE_GGUF_H

#include "model/config.h"
#include "tune/folder.h"

/* f: bound to the modules of the base, whose config this is.  Fails: LM_EUSAGE for other methods
 * than plain LoRA, for embeddings, biases and saved modules, and for architectures without a GGUF;
 * LM_EIO. */
lm_code lm_tune_to_gguf(const lm_tune_folder *f, const lm_config *config, const char *path,
                        bool force, size_t *modules, lm_err *e);

#endif
