# SPDX-License-Identifier: Apache-2.0
# kv.mk -- a model that looks back: trained to repeat what its text said, up to 1,024 tokens ago, in which the losses of
# caches of few bits show; then ways to store its cache beside each other, as table and picture.  Meant to be
# read, copied, changed.
#
#   make -f kv.mk                               train and measure, about ten minutes on two cores
#   make -f kv.mk MODEL=folder/                 measure a model of your own
#   make -f kv.mk METHODS='int4 kivi:bits=2'    other methods
#   make -f kv.mk CORPUS=text.txt               between the records: your own text
#
# It makes lists/, short/ and long/, the model after each stage of its training, outliers/, the last of them with larger
# channels of keys and the same function, table.txt and map.svg: what `quantize-kv --evaluate` measures, and the
# passkeys found by length and depth.
#
# The tools must be on PATH.  Everything is made in the folder WORK; existing results are not made again.
# `make -f kv.mk clean` removes the folder.

WORK    ?= kv
CORPUS  ?= #             plain text or JSONL; empty: that of fetch-corpus
SPLIT   ?= blank#        plain text is split into documents at empty lines; file: a document per file
MODEL   ?= #             a model folder with a tokenizer; empty: one is trained
METHODS ?= fp8 int8 int4 int4:rotate=off q4_0 q4_0:rotate=off k4v4 k4v2 kvarn:sinks=0 kivi:bits=4 kivi:bits=2 kvquant:bits=3 h2o:keep=0.2 random:keep=0.2 snapkv:capacity=256 streaming:window=256
WINDOWS ?= 8#            of 1,024 tokens, on which methods are compared
VOCAB   ?= 1024
SIZE    ?= 1#            of the texts: 1 is 6, 10 and 24 megabytes
STEPS   ?= 600 600 1500# of the three stages
STEP    ?= 2048#         tokens of a step
SEQ     ?= 1024#         of the last stage; the first two have 64 and 128
LR      ?= 6e-3 6e-3 3e-3# of the stages: that of hidden matrices, the rest has a tenth
OUTLIERS ?= 16#          factor of some channels of keys, as large models have them; 1: as they were learnt
SEED    ?= 1

# Few layers with large heads: two layers are the least that can look back by content, and heads of 128 are those of
# the models whose caches are large.
SHAPE := num_hidden_layers=4 hidden_size=256 intermediate_size=512 num_attention_heads=4 num_key_value_heads=2 \
	head_dim=128 max_position_embeddings=$(strip $(SEQ)) rope_theta=10000 attention_bias=true
TRAIN := --dtype bf16 --optimizer muon:adam_rate=0.1 --lr-schedule wsd --seed $(strip $(SEED))
RAW   := $(if $(strip $(CORPUS)),corpus.list $(sort $(wildcard corpus/*)),raw.jsonl)

.DELETE_ON_ERROR:
.PHONY: all clean

ifndef RECIPE_HOME # called by the user: make the same goals in WORK
GOALS := $(filter-out clean,$(or $(MAKECMDGOALS),all))
.PHONY: $(GOALS)
export WORK CORPUS
export FROM := $(MODEL)
export RECIPE := $(MAKEFILE_LIST)
$(GOALS):
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" "$(MAKE)" "$$recipe" $@
# a separate rule without $(MAKE): make runs lines with $(MAKE), like the one above, also with -n and -t
clean:
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" '' "$$recipe" $@
else

all: table.txt
	@cat $<

# 1. Text, of which the last documents are held out; documents of each stage around it, and of the last one around the
# text that is held out.
raw.jsonl:
	bash "$$RECIPE_HOME/fetch-corpus" . > $@
text.jsonl: $(RAW)
	clean-data -q --rules none --split $(strip $(SPLIT)) $(filter-out corpus.list,$(RAW)) > $@
train.jsonl: text.jsonl
	perl "$$RECIPE_HOME/hold-out" $< $@ held-out.jsonl > held-out.how
held-out.jsonl: train.jsonl ;
# windows are parts of one document
TOKENS := $$(($(strip $(SEQ)) > 1024 ? 2 * $(strip $(SEQ)) : 2000))
bytes = $$(awk 'BEGIN { printf "%d", $(SIZE) * $1 * 1000000 }')
lists.jsonl: MILLIONS := 6
short.jsonl: MILLIONS := 10
long.jsonl: MILLIONS := 24
lists.jsonl short.jsonl long.jsonl: %.jsonl: train.jsonl
	perl "$$RECIPE_HOME/kv-text" $* $(call bytes,$(MILLIONS)) $(strip $(SEED)) $(if $(filter long,$*),$(TOKENS)) < $< > $@
test.jsonl: train.jsonl held-out.jsonl
	perl "$$RECIPE_HOME/kv-text" long 200000 $(strip $(SEED)) $(TOKENS) < held-out.jsonl > $@

# 2. A tokenizer in which each name and number of the records is one token; shards.
tok/tokenizer.json: lists.jsonl long.jsonl train.jsonl
	@mkdir -p $(@D)
	head -c 1000000 lists.jsonl | sed '$$d' > some.jsonl
	head -c 2000000 long.jsonl | sed '$$d' >> some.jsonl
	head -c 2000000 train.jsonl | sed '$$d' >> some.jsonl
	train-tokenizer -q --vocab-size $(strip $(VOCAB)) --pattern gpt2 -f -o $@ some.jsonl
	@rm some.jsonl
data/lists/train.bin data/short/train.bin data/long/train.bin: data/%/train.bin: tok/tokenizer.json %.jsonl
	shard-data -q --tokenizer $< --val-fraction 0.01 --seed $(strip $(SEED)) -f -o $(@D) $*.jsonl

# 3. The stages: short lists first, because to look back at all is learnt there within a million tokens, and elsewhere
# hardly ever.
m0/config.json: tok/tokenizer.json
	init-model -q llama-5m --tokenizer $< $(SHAPE:%=--set %) --seed $(strip $(SEED)) -f -o $(@D)
define run # number of the stage, name, model, tokens of a sequence
	rm -rf $2 $2.log.jsonl
	train $3 data/$2/ -o $2/ --steps $(word $1,$(STEPS)) --warmup $$(($(word $1,$(STEPS)) / 20 + 1)) \
	    --decay-steps $$(($(word $1,$(STEPS)) / $(word $1,10 10 3) + 1)) --seq-len $4 --batch-size $$((($(STEP) + $4 - 1) / $4)) \
	    --lr $(word $1,$(LR)) $(TRAIN) --eval-every 0 --save-every 0 --metrics $2.log.jsonl
	@touch $@
endef
lists.done: m0/config.json data/lists/train.bin
	$(call run,1,lists,m0/,64)
short.done: lists.done data/short/train.bin
	$(call run,2,short,lists/,128)
long.done: short.done data/long/train.bin
	$(call run,3,long,short/,$(strip $(SEQ)))

# Channels of keys as large models have them.  Without these, coding with and without rotation hardly differ.
outliers.done: long.done
	rm -rf outliers
	mkdir outliers # without the checkpoints of the run, which tools prefer
	cp long/*.json long/model.safetensors outliers/
	perl "$$RECIPE_HOME/kv-outliers" outliers $(strip $(OUTLIERS))
	@touch $@

# 4. Its caches, on the documents that are held out.  The table is made again when the model, the methods or the windows
# are others than those of the last one, which measured.txt has.
export MEASURED = $(strip $(RECIPE_FROM) $(METHODS) windows=$(WINDOWS) seq-len=$(SEQ) seed=$(SEED))
ifneq ($(shell cat measured.txt 2> /dev/null),$(MEASURED))
.PHONY: others
measured.txt: others
endif
measured.txt:
	@printf '%s\n' "$$MEASURED" > $@
table.txt: test.jsonl measured.txt $(if $(RECIPE_FROM),,outliers.done)
	quantize-kv --evaluate --methods '$(METHODS)' --windows $(strip $(WINDOWS)) --seq-len $(strip $(SEQ)) \
	    --text held-out.jsonl --seed $(strip $(SEED)) -f -o map.svg "$${RECIPE_FROM:-outliers}" $< > $@ || test $$? -eq 3

endif
