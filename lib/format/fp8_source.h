/* SPDX-License-Identifier: Apache-2.0 */
/* fp8_source.h -- a model folder whose weights are FP8 with a scale for each block of a matrix,
 * as DeepSeek-V3 is published (README_WEIGHTS.md of deepseek-ai/DeepSeek-V3): a model source
 * with their numbers.
 *
 * config.json has quantization_config with quant_method "fp8" and weight_block_size [R,C] (128,
 * 128).  A matrix X of F8_E4M3 [M,N] has X_scale_inv [ceil(M/R),ceil(N/C)], in F32 or, as in
 * Qwen's files, in BF16: number [i,j] is the code's times the scale [i/R,j/C].  Scales that are powers of two (scale_fmt
 * "ue8m0", as of DeepSeek-V3.1) may also be in F8_E8M0, or with that key in U8: the byte b is 2^(b - 127), 255 is NaN.
 * Here X has F32, its scales are no tensors, and the config has no quantization_config.  Other tensors are as they
 * are. */
#ifndef LM_FORMAT_FP8_SOURCE_H
#define LM_FORMAT_FP8_SOURCE_H

#include "format/folder.h"

/* *src is replaced by a source of the numbers, which owns the former one; it stays where the
 * config says nothing of FP8 in blocks.  Fails: LM_EUSAGE for a matrix of FP8 without scales,
 * or with scales of another shape; *src is the caller's then. */
lm_code lm_fp8_source_over(lm_model_source **src, lm_err *e);

/* True if config.json says so. */
bool lm_fp8_in_blocks(const json_t *config);
/* What such a source has for config.json. */
void lm_fp8_plain_config(json_t *config);

/* lm_model_source_open, then that. */
lm_code lm_fp8_source_open(const char *path, const lm_bundle_opts *how, lm_model_source **out,
                           lm_err *e);

#endif
