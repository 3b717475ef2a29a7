# SPDX-License-Identifier: Apache-2.0
# dem.mk -- distribution edited models: fine-tune one base on each distribution alone, then search for the
# weights of the merge instead of for the best mixture of data (arXiv:2406.15570).  Read it, copy it, change it.
#
#   make -f dem.mk                              three small distributions of text, some minutes on two cores
#   make -f dem.mk SEARCH=cma-es                another search for the weights
#   make -f dem.mk FROM=text/ SETS='law math'   distributions of your own: text/law.jsonl, text/math.jsonl
#
# Made here, all from the same base: a fine-tuned model for each distribution, a model trained on their joint
# mixture with as many tokens as they have together, and the merge.  Then a table of losses and costs.
#
# The tools must be on PATH.  Everything is made in the folder WORK; what is there already is not made again.
# `make -f dem.mk clean` removes it.

WORK    ?= dem
FROM    ?= #             folder with a file NAME.jsonl for each of SETS; empty: dem-corpus makes them
SETS    ?= bible code numbers
SIZE    ?= 2#            megabytes of text of each distribution
PRESET  ?= llama-5m#     see share/models
VOCAB   ?= 4096
BATCH   ?= 16#           sequences a step
SEQ     ?= 256#          tokens a sequence
LR      ?= 3e-3#         of the base
TUNE_LR ?= 1e-4#         of what is trained on from the base: small steps add up, large ones undo each other
BUDGET  ?= 240#          seconds of training in all; the numbers of steps follow from the machine's speed
SEARCH  ?= coordinate
SEED    ?= 1

comma := ,
W     := $(strip $(WORK))
HERE  := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
K     := $(words $(SETS))
ALL   := base $(SETS) joint
TRAIN := --batch-size $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --dtype bf16 --seed $(SEED)
TEXT  := $(SETS:%=$W/text/%.train.jsonl)

.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: all clean
all: $W/table.txt
	@cat $<

# 1. Text of three distributions.  Every twentieth document is held out for the table at the end: neither
# training nor the search for the weights sees it.
$W/text/.made:
	@mkdir -p $(@D)
ifeq ($(strip $(FROM)),)
	bash $(HERE)dem-corpus $(@D) $(strip $(SIZE))
else
	cp $(SETS:%=$(strip $(FROM))/%.jsonl) $(@D)
endif
	for s in $(SETS); do awk -v test=$(@D)/$$s.test.jsonl 'NR % 20 == 10 { print > test; next } { print }' \
	    $(@D)/$$s.jsonl > $(@D)/$$s.train.jsonl || exit 1; done
	@touch $@

# 2. One tokenizer for all; token shards of each distribution, with a part for validation, and of all together.
$W/tok/tokenizer.json: $W/text/.made
	@mkdir -p $(@D)
	train-tokenizer -q --vocab-size $(VOCAB) --pattern llama3 -f -o $@ $(TEXT)
$W/data/%/train.bin: $W/tok/tokenizer.json $W/text/.made
	shard-data -q --tokenizer $< --val-fraction 0.05 --seed $(SEED) -f -o $(@D) $W/text/$*.train.jsonl
# from the shards, so that what is kept for validation stays so
$W/data/joint/train.bin: $(SETS:%=$W/data/%/train.bin)
	shard-data -q --eos-id 0 --vocab-size $(VOCAB) --seed $(SEED) -f -o $(@D) $(SETS:%=$W/data/%/train)

# 3. How many steps fit into BUDGET?  A short run tells.  Half of them make the base.
$W/m0/config.json: $W/tok/tokenizer.json
	init-model -q $(strip $(PRESET)) --tokenizer $< --seed $(SEED) -f -o $W/m0/
$W/steps: $W/m0/config.json $W/data/joint/train.bin
	rm -rf $W/probe $W/probe.jsonl
	train $W/m0/ $W/data/joint/ -o $W/probe/ --steps 12 --lr $(strip $(LR)) $(TRAIN) --metrics $W/probe.jsonl
	@sed -n 's/.*"tokens_per_second":\([0-9.e+]*\).*/\1/p' $W/probe.jsonl | tail -n 1 | awk '{ \
	    n = $(BUDGET) * $$1 / ($(BATCH) * $(SEQ)); n = n < 20 * $K ? 20 * $K : n; n = n > 3000 ? 3000 : n; \
	    tune = int(n * 0.25 / $K); printf "base %d\ntune %d\njoint %d\n", n * 0.5, tune, $K * tune }' > $@
	@test -s $@
	@rm -rf $W/probe
steps = $$(awk '$$1 == "$1" { print $$2 }' $W/steps)

# 4. The base; from it, one model for each distribution, and one for the joint mixture.
define run # name, model, data, kind of steps, learning rate
	rm -rf $W/$1 $W/$1.jsonl
	train $2 $3 -o $W/$1/ --steps $(call steps,$4) --warmup $$(($(call steps,$4) / 20 + 1)) --lr $(strip $5) \
	    $(TRAIN) --metrics $W/$1.jsonl
	@touch $@
endef
$W/base.done: $W/steps
	$(call run,base,$W/m0/,$W/data/joint/,base,$(LR))
$W/joint.done: $W/base.done
	$(call run,joint,$W/base/,$W/data/joint/,joint,$(TUNE_LR))
$(SETS:%=$W/%.done): $W/%.done: $W/base.done
	$(call run,$*,$W/base/,$W/data/$*/,tune,$(TUNE_LR))

# 5. The search: candidates are merged and validated in memory, the best is written.
$W/dem/config.json: $(SETS:%=$W/%.done)
	merge-models -q --method dem --base $W/base/ $(SETS:%=$W/%/) --search $(strip $(SEARCH)) --seed $(SEED) \
	    $(SETS:%=--val $W/data/%/val) --val-tokens 8k --seq-len $(strip $(SEQ)) --stride $(strip $(SEQ)) --val-dtype bf16 \
	    --objective equal -f -o $W/dem/ > $W/candidates.jsonl

# 6. Everything measured on everything held out, and the table.
$W/table.txt: $W/joint.done $W/dem/config.json
	@for m in $(ALL) dem; do for s in $(SETS); do \
	    eval-model -q --dtype bf16 --seq-len $(strip $(SEQ)) --stride $(strip $(SEQ)) $W/$$m/ $W/text/$$s.test.jsonl \
	        > $W/$$m-$$s.json || exit 1; \
	done; done
	@bash $(HERE)dem-report $W $(SETS) > $@

clean:
	rm -rf $W
