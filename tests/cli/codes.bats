#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Models whose weights stay encoded in memory: GGUF files and FP8 folders give the results of decoded copies.

bats_require_minimum_version 1.5.0

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/generate.sh" # run/ with a tokenizer
    head -c 6000 "$root/README.md" > text.txt
    # rows of 256 numbers, so that blocks of every format are whole; two heads share keys and values
    cat > config.json << 'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 256,
 "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "max_position_embeddings": 128, "rms_norm_eps": 1e-05, "tie_word_embeddings": true,
 "initializer_range": 0.06}
END
    init-model -q -t run -o model config.json
}

loss() { # MODEL DTYPE
    eval-model -q --json --dtype "$2" -b 2 --seq-len 64 "$1" text.txt | grep -o '"loss":[0-9.]*'
}

same() { # CODES NUMBERS
    for dtype in f32 bf16; do
        [ "$(loss "$1" $dtype)" = "$(loss "$2" $dtype)" ]
        generate -q --dtype $dtype -n 12 -T 0 --ignore-eos -p 'The system' "$1" > a
        generate -q --dtype $dtype -n 12 -T 0 --ignore-eos -p 'The system' "$2" > b
        cmp a b
    done
}

@test "a GGUF file in its own types gives the results of its decoded copy" {
    for type in q8_0 q4_k q4_k_m iq4_nl; do
        convert-model -q -f --type $type -o m.gguf model
        convert-model -q -f --dtype f32 -o numbers m.gguf
        same m.gguf numbers
    done
}

@test "codes read from the file give the same results as codes in memory" {
    convert-model -q --type q4_k_m -o m.gguf model
    compress-ckpt -q --weights fp8_e4m3 -o m.lmz model > /dev/null
    compress-ckpt -q -d -o m8 m.lmz
    for m in m.gguf m8; do
        for where in file memory auto; do
            eval-model -q --json -b 2 --seq-len 64 --weights-in $where $m text.txt | grep -o '"loss":[0-9.]*' > $where
            generate -q -n 12 -T 0 --ignore-eos -p 'The system' --weights-in $where $m >> $where
        done
        cmp file memory
        cmp auto memory
    done
    run -2 generate -p 'The' --weights-in file model
    [[ $output == *"no weight can be read in the file"*"leave --weights-in out" ]]
    run -2 eval-model --weights-in file m.lmz text.txt
    [[ $output == *"no weight can be read in the file"* ]]
}

@test "a GGUF file of another program, without lmutils' keys; f16" {
    convert-model -q --type q6_k --no-originals -o m.gguf model
    convert-model -q --dtype f32 -o numbers m.gguf
    same m.gguf numbers
    convert-model -q -f --type f16 --no-originals -o m.gguf model
    convert-model -q -f --dtype f32 -o numbers m.gguf
    same m.gguf numbers
}

@test "GPT-2, whose matrices GGUF has transposed" {
    cat > gpt2.json << 'END'
{"model_type": "gpt2", "vocab_size": 300, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128,
 "initializer_range": 0.06}
END
    init-model -q -t run -o gpt2 gpt2.json
    convert-model -q --type q5_k -o m.gguf gpt2
    convert-model -q --dtype f32 -o numbers m.gguf
    same m.gguf numbers
}

@test "FP8 weights of a folder" {
    init-model -q -t run -o gpt2 -s n_embd=64 -s n_layer=1 -s n_head=2 -s n_positions=128 gpt2-124m
    for model in model gpt2; do
        compress-ckpt -q -f --weights fp8_e4m3 -o m.lmz $model > /dev/null
        compress-ckpt -q -f -d -o m m.lmz
        convert-model -q -f --to hf --dtype f32 -o numbers m
        same m numbers
        same m.lmz numbers
    done
}

@test "weights with scales of an .lmz and of a folder of its files" {
    for model in model gpt2; do
        [ $model = model ] ||
            init-model -q -t run -o gpt2 -s n_embd=72 -s n_layer=1 -s n_head=2 -s n_positions=128 gpt2-124m
        compress-ckpt -q -f --weights dynamic8 -o m.lmz $model > /dev/null
        compress-ckpt -q -f -d -o numbers m.lmz
        same m.lmz numbers
    done
    # without a config.json
    compress-ckpt -q -f --weights dynamic8 -o one.lmz model/model.safetensors > /dev/null
    run -2 --separate-stderr generate -p x one.lmz
    [[ "$stderr" == *config.json* ]]
}

@test "weights in F16 and BF16 stay so under f32, in a folder and in a GGUF file; -v shows the formats" {
    for half in f16 bf16; do
        convert-model -q -f --to hf --dtype $half -o half model
        convert-model -q -f --type $half -o half.gguf model
        convert-model -q -f --to hf --dtype f32 -o numbers half
        for m in half half.gguf; do
            same $m numbers
            run --separate-stderr generate -v --dtype f32 -n 2 -T 0 -p 'The system' $m
            [[ "$stderr" == *"weights: $half "*", f32 "* || "$stderr" == *"weights: f32 "*", $half "* ]]
        done
        generate -v --weights-in file --dtype f32 -n 12 -T 0 --ignore-eos -p 'The system' half > a 2> err
        generate -q --dtype f32 -n 12 -T 0 --ignore-eos -p 'The system' numbers > b
        cmp a b
        grep -q "weights: f32 .*; in the file" err
        run -2 generate -q --weights-in file --dtype bf16 -p 'The system' half
        run --separate-stderr generate -v --dtype f32 -n 2 -T 0 -p 'The system' numbers
        [[ "$stderr" == *"weights: f32 "* ]] && ! grep -q "weights: .*\b$half\b" <<< "$stderr"
    done
}

@test "a GGUF file on standard input, a pipe or a file" {
    convert-model -q --type q8_0 -o m.gguf model
    generate -q -n 5 -T 0 -p 'The system' m.gguf > a
    cat m.gguf | generate -q -n 5 -T 0 -p 'The system' - > b
    cmp a b
    generate -q -n 5 -T 0 -p 'The system' - < m.gguf > b
    cmp a b
    loss m.gguf f32 > a
    cat m.gguf | eval-model -q --json --dtype f32 -b 2 --seq-len 64 - text.txt | grep -o '"loss":[0-9.]*' > b
    cmp a b
    head -c 3000 m.gguf > cut.gguf
    run -1 --separate-stderr generate -p x - < cut.gguf
    [[ "$stderr" == *"standard input"* ]]
    run -2 --separate-stderr generate - < m.gguf
    [[ "$stderr" == *"give prompts by -p or in files"* ]]
}

@test "a GGUF file on standard input that arrives in small pieces; other pipes name the remedy" {
    convert-model -q --type q8_0 -o m.gguf model
    generate -q -n 5 -T 0 -p 'The system' m.gguf > a
    { printf GG; sleep 0.2; tail -c +3 m.gguf; } | generate -q -n 5 -T 0 -p 'The system' - > b
    cmp a b
    # a socket, as ssh gives to its commands
    perl -MSocket -e 'socketpair(my $in, my $out, AF_UNIX, SOCK_STREAM, 0) or die;
        if (!fork) { close $out; open STDIN, "<&", $in; exec @ARGV }
        close $in; open my $f, "<", "m.gguf"; local $/ = \65536; print $out $_ while <$f>; close $out; wait' \
        generate -q -n 5 -T 0 -p 'The system' - > b
    cmp a b
    mkfifo pipe
    for tool in "generate -p x" "convert-model --to hf -o out"; do
        cat m.gguf > pipe &
        run -2 --separate-stderr $tool pipe
        [[ "$stderr" == *"model of llama.cpp: give it as a file or on standard input" ]]
        wait || true
    done
    echo 'plain text' > pipe &
    run -2 --separate-stderr generate -p x pipe
    [[ "$stderr" == *"it is plain text"* ]]
    wait || true
    printf '\0\1\2\3\0\1\2\3' > pipe &
    run -2 --separate-stderr generate -p x pipe
    [[ "$stderr" == *"an .lmz or a .gguf" ]]
    wait || true
}

@test "--tokenizer replaces that of a GGUF file; a damaged file is named" {
    convert-model -q --type q8_0 -o m.gguf model
    generate -q -n 5 -T 0 -p 'The system' m.gguf > a
    generate -q -n 5 -T 0 -p 'The system' --tokenizer run m.gguf > b
    cmp a b
    head -c 3000 m.gguf > cut.gguf
    run -1 --separate-stderr generate -p x cut.gguf
    [[ "$stderr" == *cut.gguf* ]]
    : > empty.gguf
    for c in generate eval-model; do
        run --separate-stderr $c empty.gguf < /dev/null
        [ "$status" -ne 0 ]
        [[ "$stderr" == *"empty.gguf: this is not a GGUF file"* ]]
    done
}
