/* SPDX-License-Identifier: Apache-2.0 */
/* mxfp4.h -- model folders whose experts are in MXFP4, as gpt-oss is published, as a source of their numbers.
 * Private to lib/format.
 *
 * Where config.json has quantization_config with quant_method "mxfp4", the weights of all experts of a layer are two
 * tensors of bytes (huggingface/transformers, integrations/mxfp4.py; OCP Microscaling Formats 1.0):
 *   NAME_blocks [E,out,in/32,16]   two codes a byte, that of the even place in its low half: E2M1
 *   NAME_scales [E,out,in/32]      a power of two for 32 codes: 2^(byte - 127)
 * The source has NAME [E,in,out] in BF16 in their place, which is exact, with the codes in the format mxfp4 of
 * numeric/format.h, and a config without quantization_config: what is written from it is in plain numbers. */
#ifndef LM_FORMAT_MXFP4_H
#define LM_FORMAT_MXFP4_H

#include "format/folder.h"

/* *src becomes such a source over it, if its config asks for it.  Fails: LM_EUSAGE naming a tensor whose blocks and
 * scales do not match; *src is then as it was. */
lm_code lm_mxfp4_over(lm_model_source **src, lm_err *e);

#endif
