# SPDX-License-Identifier: Apache-2.0
# first-light.mk -- from raw text to a trained, evaluated, speaking model.  Read it, copy it, change it.
#
#   make -f first-light.mk                              the text of a Debian package, some minutes
#   make -f first-light.mk CORPUS='a.txt b.jsonl.zst'   your own text: plain, JSONL, compressed, archives
#
# The tools must be on PATH.  Everything is made in the folder WORK; what is there already is not made
# again, so that a second call goes on where the first one ended.  `make -f first-light.mk clean` removes it.

WORK    ?= first-light
CORPUS  ?=
PRESET  ?= llama-5m#     see share/models
VOCAB   ?= 4096
RULES   ?= $(if $(CORPUS),none,gopher,c4,fineweb)
SPLIT   ?= blank#        plain text is cut into documents at empty lines; none: a document a file
BATCH   ?= 16#           sequences a step
SEQ     ?= 256#          tokens a sequence
LR      ?= 3e-3
BUDGET  ?= 165#          seconds of training; the number of steps follows from the speed of the machine
EPOCHS  ?= 10#           but never more passes over the text than this
SEED    ?= 1

comma := ,
W     := $(strip $(WORK))
HERE  := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
RAW   := $(if $(CORPUS),$(CORPUS),$W/raw.jsonl)
TRAIN := --batch-size $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --lr $(LR) --dtype bf16 --seed $(SEED)

.DELETE_ON_ERROR:
.PHONY: all report clean

all: report

# 1. Text: a document for each chapter.
$W/raw.jsonl:
	@mkdir -p $W && date +%s > $W/started
	bash $(HERE)fetch-corpus $W > $@

# 2. Clean it.
$W/clean.jsonl: $(RAW)
	@mkdir -p $W && { test -e $W/started || date +%s > $W/started; }
	clean-data --rules $(RULES) --dedup minhash --split $(strip $(SPLIT)) $(RAW) > $@

# 3. Hold out every fortieth document: training never sees it, the last measurement is made on it.
$W/train.jsonl: $W/clean.jsonl
	awk -v held=$W/held-out.jsonl 'NR % 40 == 20 { print > held; next } { print }' $< > $@
	@test -s $W/held-out.jsonl || { echo 'fewer than 20 documents are left: give more text' >&2; exit 1; }
$W/held-out.jsonl: $W/train.jsonl ;
$W/held-out.txt: $W/held-out.jsonl
	perl $(HERE)jsonl2text $< > $@

# 4. Learn a tokenizer, turn text into token shards.
$W/tok/tokenizer.json: $W/train.jsonl
	@mkdir -p $(@D)
	train-tokenizer --vocab-size $(VOCAB) --pattern llama3 -f -o $@ $<
$W/data/train.bin: $W/tok/tokenizer.json $W/train.jsonl
	shard-data --tokenizer $< --val-fraction 0.01 --seed $(SEED) -f -o $W/data/ $W/train.jsonl

# 5. A model of random numbers, and what it knows of the held-out text: nothing.  It is measured on windows as
# long as those of the training, which the trained model names itself.
$W/m0/config.json: $W/tok/tokenizer.json
	init-model $(strip $(PRESET)) --tokenizer $< --seed $(SEED) -f -o $W/m0/
$W/before.json: $W/m0/config.json $W/held-out.jsonl
	eval-model --seq-len $(strip $(SEQ)) $W/m0/ $W/held-out.jsonl > $@

# 6. How many steps fit into BUDGET?  A short run tells.
$W/steps: $W/m0/config.json $W/data/train.bin
	rm -rf $W/probe $W/probe.jsonl
	train $W/m0/ $W/data/ -o $W/probe/ --steps 12 $(TRAIN) --metrics $W/probe.jsonl
	@speed=$$(sed -n 's/.*"tokens_per_second":\([0-9.e+]*\).*/\1/p' $W/probe.jsonl | tail -n 1) && \
	bytes=$$(wc -c < $W/data/train.bin) && \
	awk -v speed="$$speed" -v bytes="$$bytes" 'BEGIN { \
	    step = $(BATCH) * $(SEQ); most = $(EPOCHS) * bytes / 2 / step; n = $(BUDGET) * speed / step; \
	    printf "%d\n", (n > most ? most + 1 : n < 20 ? 20 : n) }' > $@
	@rm -rf $W/probe

# 7. Train.
$W/trained: $W/steps $W/before.json
	rm -rf $W/run $W/run.jsonl
	train $W/m0/ $W/data/ -o $W/run/ --steps $$(cat $W/steps) --warmup $$(($$(cat $W/steps) / 20 + 1)) \
	    $(TRAIN) --metrics $W/run.jsonl
	@touch $@

# 8. What it knows now, what it says, and the pictures.
$W/after.json: $W/trained
	eval-model $W/run/ $W/held-out.jsonl > $@
$W/samples.txt: $W/trained $W/held-out.txt
	@rm -f $@.new
	awk 'NR == FNR { n++; next } \
	    { k = int(n / 3) + 1 } FNR % k == 1 % k { print $$1, $$2, $$3, $$4 }' $W/held-out.txt $W/held-out.txt | while read -r prompt; do \
	    generate $W/run/ -p "$$prompt" -n 120 --temperature 0.8 --top-p 0.95 --seed $(SEED) < /dev/null >> $@.new && \
	    printf '\n\n' >> $@.new || exit 1; \
	done
	@mv $@.new $@
$W/loss.svg: $W/trained
	plot-run --smooth 0.9 -f -o $@ $W/run.jsonl
$W/loss.png: $W/trained
	plot-run --smooth 0.9 -f -o $@ $W/run.jsonl

report: $W/before.json $W/after.json $W/samples.txt $W/loss.svg $W/loss.png $W/held-out.txt
	@bash $(HERE)first-light-report $W
	@rm -f $W/started

clean:
	rm -rf $W
