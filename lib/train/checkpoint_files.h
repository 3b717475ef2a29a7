/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint_files.h -- files of a checkpoint beside those of a model, for checkpoint.c and checkpoint_load.c.
 * Private to lib/train. */
#ifndef LM_TRAIN_CHECKPOINT_FILES_H
#define LM_TRAIN_CHECKPOINT_FILES_H

#define LM_CKPT_STATES    "optimizer.safetensors"
#define LM_CKPT_OBJECTIVE "objective.json"
#define LM_CKPT_STATE     "state.json"
#define LM_CKPT_ADAPTER   "adapter_model.safetensors"

#endif
