#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Outputs that would destroy an input, or have a format that no tool writes, are refused before anything is read.
bats_require_minimum_version 1.5.0

setup_file() {
    cd "$BATS_FILE_TMPDIR"
    for i in 1 2 3 4 5 6 7 8; do echo "{\"text\":\"the house number $i by the river\"}"; done > text.jsonl
    train-tokenizer -q -V 270 -o tok.json text.jsonl
    shard-data -q -t tok.json --val-fraction 0.3 -o data text.jsonl
    init-model -q llama-1m --set num_hidden_layers=1 --set hidden_size=64 -t tok.json -o m
    mkdir adapter hub
    echo '{}' > adapter/adapter_config.json
    echo x > adapter/adapter_model.safetensors
    cp m/model.safetensors hub/blob
    echo '{"question":"a?","choices":["a","b"],"answer":0}' > score.jsonl
}

setup() {
    cp -r "$BATS_FILE_TMPDIR"/* "$BATS_TEST_TMPDIR"
    cd "$BATS_TEST_TMPDIR"
    mkdir cached
    cp m/*.json cached
    ln -s ../hub/blob cached/model.safetensors # the layout of a Hugging Face cache
}

# onto FILE TEXT COMMAND ...: with standard output appended to FILE the command is refused in one line
onto() {
    local file=$1 text=$2 before
    shift 2
    before=$(md5sum "$file")
    run -2 bash -c '"${@:2}" 2>&1 >> "$1"' - "$file" "$@"
    echo "$*: $output"
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "$1: standard output: "*"$text"* ]]
    [ "$(md5sum "$file")" = "$before" ]
}

@test "refuse: standard output that is a file of an input folder" {
    onto m/model.safetensors "is a part of the input m" convert-model m -o -
    onto m/config.json "is a part of the input m" init-model m -o -
    onto m/config.json "is a part of the input m" init-model --json m -o new
    onto m/model.safetensors "is a part of the input m" merge-models -m linear m m -o -
    onto m/tokenizer.json "is a part of the input m" eval-model m data/val
    onto m/tokenizer.json "is a part of the input m" generate m -p x
    onto m/model.safetensors "is a part of the input m" inspect-model m
    onto m/model.safetensors "is a part of the input m" compress-ckpt -c m
    onto m/model.safetensors "is a part of the input m" compress-ckpt --json m
    onto m/model.safetensors "is a part of the input m" train m data -o run --metrics -
    onto hub/blob "is a part of the input cached" convert-model cached -o -
    [ ! -e new ] && [ ! -e run ]
}

@test "refuse: standard output that is a shard, an adapter, a file of questions or a tokenizer" {
    onto data/train.bin "is a shard of the input data/train" shard-data --json -o d2 data/train
    onto data/train.idx "is a shard of the input data/train" train m data -o run --json
    onto data/val.bin "is a shard of the input data/val" train m data -o run --eval-every 1 --json
    onto data/val.bin "is a shard of the input data/val" eval-model m data/val
    onto adapter/adapter_model.safetensors "is a part of the input adapter" merge-models -m linear m+adapter m -o -
    onto score.jsonl "is both an input" eval-model --task multiple-choice m score.jsonl
    onto text.jsonl "is both an input" generate m text.jsonl
    onto text.jsonl "is both an input" shard-data --json -t tok.json -o d2 text.jsonl
    onto tok.json "is both an input" eval-model m text.jsonl --tokenizer tok.json
    onto tok.json "is both an input" convert-model m -t tok.json -o -
    [ ! -e d2 ] && [ ! -e run ]
}

@test "refuse: other outputs that are inputs" {
    run -2 train -q m data -o run -f --metrics data/train.bin
    [[ $output == "train: data/train.bin: it is a shard of the input data/train: "* ]]
    run -2 train -q m data -o run -f --trace m/model.safetensors
    [[ $output == "train: m/model.safetensors: it is a part of the input m: "* ]]
    run -2 eval-model m score.jsonl --task multiple-choice -f -o score.jsonl
    [[ $output == *"score.jsonl: is both an input and the output"* ]]
    run -2 generate m text.jsonl -f -o text.jsonl
    [[ $output == *"text.jsonl: is both an input and the output"* ]]
    generate -q m -p x -n 1 > m/report.txt # a foreign file beside a model is not a part of it
    generate -q m -p x -n 1 >> m/report.txt
}

@test "refuse: outputs that are texts of an input folder or pattern, or the file of options" {
    mkdir corpus
    cp text.jsonl corpus/a.jsonl
    cp text.jsonl corpus/b.jsonl
    for corpus in corpus 'corpus/*.jsonl'; do
        onto corpus/b.jsonl "is both an input" shard-data --json -t tok.json -o d2 "$corpus"
        onto corpus/b.jsonl "is both an input" eval-model m "$corpus"
        onto corpus/b.jsonl "is both an input" generate m "$corpus"
        onto corpus/b.jsonl "is both an input" clean-data "$corpus"
        onto corpus/b.jsonl "is both an input" merge-models -m linear m:1 m:1 --search grid --val "$corpus" -o new
        onto corpus/b.jsonl "is both an input" convert-model m -o m.gguf --type q4_0 --imatrix "$corpus"
    done
    run -2 eval-model m corpus -f -o corpus/a.jsonl
    [[ $output == *"corpus/a.jsonl: is both an input and the output"* ]]
    run -2 convert-model m -o m.gguf --type q4_0 --imatrix corpus -f --save-imatrix corpus/a.jsonl
    [[ $output == *"corpus/a.jsonl: is both an input and the output"* ]]
    cmp text.jsonl corpus/a.jsonl
    echo '{"vocab-size": 280}' > options.json
    onto options.json "is both an input" train-tokenizer --config options.json text.jsonl -o -
    onto options.json "is both an input" train-tokenizer --config options.json --print-config
    run -2 train-tokenizer --config options.json text.jsonl -f -o options.json
    [[ $output == "train-tokenizer: options.json: is both an input and the output"* ]]
    [ ! -e d2 ] && [ ! -e new ] && [ ! -e m.gguf ]
}

@test "refuse: links of a run, which point into its newest checkpoint" {
    train -q m data -o run --steps 1 --batch-size 1 --seq-len 8
    cp -r run before
    run -2 train-tokenizer -q -V 270 text.jsonl -f -o run
    [[ $output == "train-tokenizer: run/tokenizer.json: is a link of a run"* ]]
    run -2 train-tokenizer -q -V 270 text.jsonl -f -o run/tokenizer.json
    [[ $output == "train-tokenizer: run/tokenizer.json: is a link of a run"* ]]
    run -2 init-model -q llama-1m -f -o run/model.safetensors
    [[ $output == "init-model: run/model.safetensors: is a link of a run"* ]]
    run -2 inspect-model m -f -o run/config.json
    [[ $output == "inspect-model: run/config.json: is a link of a run"* ]]
    diff -r run before
}

# ending NAME COMMAND ...: -o NAME is refused in one line, and not made
ending() {
    local name=$1
    shift
    run -2 "$@" -o "$name"
    echo "$* -o $name: $output"
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "$1: $name: has the name of "*", which is not written here: "* ]]
    [ ! -e "$name" ]
}

@test "refuse: names of formats that the tool does not write" {
    for name in x.zip x.7z x.rar x.gguf x.tar.br X.TAR x.bin x.json x.pt; do
        ending $name init-model llama-1m
        ending $name merge-models -m linear m m
    done
    ending x.zip convert-model m
    ending x.gguf convert-model --to hf m
    ending x.bin convert-model --to gguf m
    ending x.tar compress-ckpt m
    ending x.zip train m data
    ending x.tar shard-data data/train
    ending x.jsonl.zst clean-data text.jsonl
    ending x.gz train-tokenizer text.jsonl
    ending x.xz inspect-model m
    ending x.zst generate m -p x
    ending x.json.gz eval-model m data/val
    run -2 clean-data text.jsonl -o new --dropped x.jsonl.gz
    [[ $output == *"x.jsonl.gz: has the name of gzip data"* ]]
    run -2 train -q m data -o run --metrics m.jsonl.zst
    [[ $output == *"m.jsonl.zst: has the name of Zstandard data"* ]]
    init-model -q llama-1m --set num_hidden_layers=1 --set hidden_size=64 -o x.zip/ # a folder, because of the slash
    [ -s x.zip/model.safetensors ]
    inspect-model -q m -o report.json
    clean-data -q text.jsonl -o clean.jsonl
}

@test "refuse: an output name that is too long, before the work" {
    long=$(printf 'n%.0s' {1..256})
    for tool in "init-model llama-1m" "convert-model m" "compress-ckpt m" "train m data --seq-len 16" "shard-data data/train" \
        "clean-data text.jsonl" "merge-models -m linear m m"; do
        # shellcheck disable=SC2086
        run $tool -o $long
        echo "$output"
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == *": the name is too long: choose a shorter name" || $output == *"the name has 256 bytes, the file system's limit is 255: choose a shorter name" ]]
    done
}

@test "refuse: a tool that a launcher has started as one of several processes, before the work" {
    for tool in $(cd "$(dirname "$(command -v train)")" && ls); do
        case $tool in train | peft-tune | align-model | eval-model | generate) continue ;; esac
        OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 run -2 "$tool" m
        echo "$tool: $output"
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == "$tool: mpirun has started 4 ranks: each would do the whole work: "* ]]
    done
    # the others wait for a moment, in which a launcher ends them
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 run -2 init-model m
    [[ $output == "init-model: mpirun has started 4 ranks: each would do the whole work: "* ]]
    [ ! -e new ]
    PMIX_RANK=0 run -2 inspect-model m
    [[ $output == "inspect-model: PMIx has started several ranks: "* ]]
    # where they cannot find each other
    SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 LM_MODULES=/nowhere run -1 train m data -o new --seq-len 16 --dry-run
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "train: srun has started 2 ranks: "* ]]
    OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 inspect-model -q m
    SLURM_PROCID=0 inspect-model -q m # in a batch script
    OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 inspect-model --version
}
