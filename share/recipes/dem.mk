# SPDX-License-Identifier: Apache-2.0
# dem.mk -- distribution edited models: fine-tune one base on each distribution alone, then search for the
# weights of the merge instead of the best mixture of data (arXiv:2406.15570).  Meant to be read, copied, changed.
#
#   make -f dem.mk                              three small distributions of text, some minutes on two cores
#   make -f dem.mk SEARCH=cma-es                another search for the weights
#   make -f dem.mk FROM='my text' SETS='law math'   distributions of your own: my text/law.jsonl, my text/math.jsonl
#
# It makes, from the same base, a fine-tuned model for each distribution, a model trained on their joint
# mixture with as many tokens as they have together, and the merge, then a table of losses and costs.
#
# The tools must be on PATH.  Everything is made in the folder WORK; existing results are not made again.
# `make -f dem.mk clean` removes the folder.

WORK    ?= dem
FROM    ?= #             folder with a file NAME.jsonl for each of SETS; empty: dem-corpus makes them
SETS    ?= bible code numbers
SIZE    ?= 2#            megabytes of text of each distribution
PRESET  ?= llama-5m#     see share/models
VOCAB   ?= 4096
BATCH   ?= 16#           sequences per step
SEQ     ?= 256#          tokens per sequence
LR      ?= 3e-3#         of the base
TUNE_LR ?= 1e-4#         of models trained from the base: deltas of small steps add up, those of large ones interfere
BUDGET  ?= 240#          seconds of training in all; the numbers of steps follow from the machine's speed
SEARCH  ?= coordinate
SEED    ?= 1

K     := $(words $(SETS))
ALL   := base $(SETS) joint
TRAIN := --batch-size $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --dtype bf16 --seed $(SEED)
TEXT  := $(SETS:%=text/%.train.jsonl)

.DELETE_ON_ERROR:
.PHONY: all clean

ifndef RECIPE_HOME # called by the user: make the same goals in WORK
GOALS := $(filter-out clean,$(or $(MAKECMDGOALS),all))
.PHONY: $(GOALS)
export WORK FROM PRESET
export RECIPE := $(MAKEFILE_LIST)
$(GOALS):
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" "$(MAKE)" "$$recipe" $@
# a separate rule without $(MAKE): make runs lines with $(MAKE), like the one above, also with -n and -t
clean:
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" '' "$$recipe" $@
else

all: table.txt
	@cat $<

# 1. Text of three distributions.  Every twentieth document is held out for the table at the end: neither
# training nor the search for the weights sees it.
text/.made:
	@mkdir -p $(@D)
ifeq ($(strip $(FROM)),)
	bash "$$RECIPE_HOME/dem-corpus" $(@D) $(strip $(SIZE))
else
	for s in $(SETS); do cp "$$RECIPE_FROM/$$s.jsonl" $(@D) || exit 1; done
endif
	for s in $(SETS); do \
	    awk -v test=$(@D)/$$s.test.jsonl 'NR % 20 == 10 { print > test; next } { print }' \
	        $(@D)/$$s.jsonl > $(@D)/$$s.train.jsonl || exit 1; \
	    test -s $(@D)/$$s.test.jsonl || { echo "dem.mk: $$s: fewer than 10 documents: give more text" >&2; exit 1; }; \
	done
	@touch $@

# 2. One tokenizer for all; token shards of each distribution, with a part for validation, and of all together.
tok/tokenizer.json: text/.made
	@mkdir -p $(@D)
	train-tokenizer -q --vocab-size $(VOCAB) --pattern llama3 -f -o $@ $(TEXT)
$(SETS:%=data/%/train.bin): data/%/train.bin: tok/tokenizer.json text/.made
	shard-data -q --tokenizer $< --val-fraction 0.05 --seed $(SEED) -f -o $(@D) text/$*.train.jsonl
# from the shards, so that the validation split does not change
data/joint/train.bin: $(SETS:%=data/%/train.bin)
	shard-data -q --eos-id 0 --vocab-size $(VOCAB) --seed $(SEED) -f -o $(@D) $(SETS:%=data/%/train)

# 3. The number of steps that fit into BUDGET, measured by a short run.  Half of them train the base.
m0/config.json: tok/tokenizer.json
	init-model -q "$$RECIPE_PRESET" --tokenizer $< --seed $(SEED) -f -o m0/
steps: m0/config.json data/joint/train.bin
	rm -rf probe probe.jsonl
	train m0/ data/joint/ -o probe/ --steps 12 --lr $(strip $(LR)) $(TRAIN) --metrics probe.jsonl
	@sed -n 's/.*"tokens_per_second":\([0-9.e+]*\).*/\1/p' probe.jsonl | tail -n 1 | awk '{ \
	    n = $(BUDGET) * $$1 / ($(BATCH) * $(SEQ)); n = n < 20 * $K ? 20 * $K : n; n = n > 3000 ? 3000 : n; \
	    tune = int(n * 0.25 / $K); printf "base %d\ntune %d\njoint %d\n", n * 0.5, tune, $K * tune }' > $@
	@test -s $@
	@rm -rf probe
steps = $$(awk '$$1 == "$1" { print $$2 }' steps)

# 4. The base; from it, one model for each distribution, and one for the joint mixture.
define run # name, model, data, kind of steps, learning rate
	rm -rf $1 $1.jsonl
	train $2 $3 -o $1/ --steps $(call steps,$4) --warmup $$(($(call steps,$4) / 20 + 1)) --lr $(strip $5) \
	    $(TRAIN) --metrics $1.jsonl
	@touch $@
endef
base.done: steps
	$(call run,base,m0/,data/joint/,base,$(LR))
joint.done: base.done
	$(call run,joint,base/,data/joint/,joint,$(TUNE_LR))
$(SETS:%=%.done): %.done: base.done
	$(call run,$*,base/,data/$*/,tune,$(TUNE_LR))

# 5. The search: candidates are merged and validated in memory, the best one is written.
dem/config.json: $(SETS:%=%.done)
	merge-models -q --method dem --base base/ $(SETS:%=%/) --search $(strip $(SEARCH)) --seed $(SEED) \
	    $(SETS:%=--val data/%/val) --val-tokens 8k --seq-len $(strip $(SEQ)) --stride $(strip $(SEQ)) --val-dtype bf16 \
	    --objective equal -f -o dem/ > candidates.jsonl

# 6. The losses of all models on all held-out texts, and the table.
table.txt: joint.done dem/config.json
	@for m in $(ALL) dem; do for s in $(SETS); do \
	    eval-model -q --dtype bf16 --seq-len $(strip $(SEQ)) --stride $(strip $(SEQ)) $$m/ text/$$s.test.jsonl \
	        > $$m-$$s.json || exit 1; \
	done; done
	@bash "$$RECIPE_HOME/dem-report" $(SETS) > $@

endif
