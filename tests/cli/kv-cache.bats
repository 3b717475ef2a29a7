#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Caches in files: generate saves and loads them, quantize-kv codes them.

bats_require_minimum_version 1.5.0

setup_file() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export made=$BATS_FILE_TMPDIR
    cd "$made"
    sh "$root/tests/cli/examples/quantize-kv.sh"
    generate -q run/ --save-cache short.kv -p 'The system reads' -n 0 --dtype bf16
    generate -q run/ --save-cache doc.kv -p "$(head -c 2000 corpus.txt)" -n 0 --context 1024 --dtype bf16 -f # of 16 bits
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$made"/* .
}

# FILE FROM TO: an equal number of bytes replaced in a copy called bad.kv
damage() { LC_ALL=C sed "s/$2/$3/" "$1" > bad.kv; }

@test "a prompt behind a saved cache has the tokens and log-probabilities of one run" {
    text=$(head -c 300 corpus.txt)
    for type in f32 bf16; do
        generate -q run/ -p "$text one" -n 8 -T 0 --json --logprobs --dtype $type > whole
        generate -q run/ --save-cache a.kv -p "$text" -n 0 --dtype $type -f > nothing
        [ ! -s nothing ]
        generate -q run/ --load-cache a.kv -p ' one' -n 8 -T 0 --json --logprobs > loaded
        generate -q run/ --load-cache - -p ' one' -n 8 -T 0 --json --logprobs < a.kv > piped
        [ "$(grep -o '"token_ids".*' whole)" = "$(grep -o '"token_ids".*' loaded)" ]
        cmp loaded piped
        grep -q '"prompt":" one"' loaded
    done
}

@test "an answer goes on behind its cache, which many prompts can follow" {
    generate -q run/ -p 'The system' -n 12 -T 0 --ignore-eos --json --logprobs > whole
    generate -q run/ -p 'The system' -n 5 -T 0 --ignore-eos --json --logprobs --save-cache a.kv > begin
    generate -q run/ --load-cache a.kv -p '' -n 7 -T 0 --ignore-eos --json --logprobs > end
    ids() { grep -o '"token_ids":\[[0-9,]*\]' "$1" | grep -o '[0-9,]*' | tr ',' '\n'; }
    logs() { grep -o '"logprobs":\[[-0-9.,e]*\]' "$1" | grep -o '[-0-9.,e]*' | tail -n 1 | tr ',' '\n'; }
    [ "$(ids whole)" = "$(ids begin; ids end)" ]
    [ "$(logs whole)" = "$(logs begin; logs end)" ]
    quantize-kv -l --json a.kv | grep -q '"next":'
    echo '{"prompt": " and"}
{"prompt": ""}' | generate -q run/ --load-cache a.kv -n 3 -T 0 > answers
    [ "$(wc -l < answers)" -eq 2 ]
}

# the bytes behind the header
numbers() { tail -c +$((9 + $(od -An -N 8 -t u8 "$1"))) "$1"; }

@test "coded caches: used as they are, with other methods, through pipes" {
    for m in int8 int4 kivi k=int8,v=auto 'layers.0=auto;int4' fp8; do
        quantize-kv doc.kv -m "$m" -o c.kv -f -q
        quantize-kv --verify c.kv
        quantize-kv c.kv -m "$m" -o again.kv -f -q # parts in this form are copied
        cmp <(numbers c.kv) <(numbers again.kv)
        generate -q run/ --load-cache c.kv -p ' one' -n 4 -T 0 > a
        quantize-kv -q doc.kv -m "$m" | generate -q run/ --load-cache - -p ' one' -n 4 -T 0 > b
        [ -s a ]
        cmp a b
    done
    quantize-kv -q doc.kv -m int4 -o four.kv
    quantize-kv -q -d four.kv -o back.kv
    quantize-kv -l back.kv | grep -q '16.00 bits a number'
    quantize-kv -l four.kv | grep -q '^layers.1.v.*bits.int4$'
    [ "$(quantize-kv -l four.kv --json | grep -o '"bits":[0-9.]*' | head -n 1 | cut -d: -f2 | cut -c1)" -lt 8 ]
    quantize-kv -q doc.kv -m int4 --no-history > new.kv
    quantize-kv -q -m int4 -j 1 --no-history < doc.kv | cmp - new.kv
    quantize-kv doc.kv --method kivi --bits 4 --group 64 --residual 64 -v -o k.kv 2> said
    quantize-kv -l k.kv | grep -q 'kivi:bits=4,group=64,residual=64'
    [ "$(grep -c 'relative error 0\.0' said)" -eq 4 ]
}

@test "cachegen: levels beside each other, chosen by the deadline, absent ones refused" {
    quantize-kv doc.kv -m cachegen --level 0 --level 2 -v -o l.kv 2> said
    grep -q 'level 2:' said
    quantize-kv -l l.kv | grep -q '^level 2'
    run -0 --separate-stderr generate -v run/ --load-cache l.kv -p ' one' -n 4 -T 0
    [[ "$stderr" =~ 'levels of its chunks: 0 ' ]]
    run -0 --separate-stderr generate -v run/ --load-cache l.kv -p ' one' -n 4 -T 0 --deadline 0.000001
    [[ "$stderr" =~ 'levels of its chunks: 2 2' ]]
    # with enough time the text is computed, and has the bits of the run itself; codes have no place for that
    generate -q run/ --load-cache doc.kv -p ' one' -n 4 -T 0 --json --logprobs > whole.jsonl
    run -0 --separate-stderr generate -v run/ --load-cache l.kv -p ' one' -n 4 -T 0 --json --logprobs --deadline 1h
    [[ "$stderr" =~ 'levels of its chunks: - -' ]]
    [[ "$stderr" =~ 'first token after' ]]
    [ "$output" = "$(cat whole.jsonl)" ]
    run -0 --separate-stderr generate -v run/ --load-cache l.kv -p ' one' -n 4 -T 0 --kv int8 --deadline 1h
    [[ "$stderr" =~ 'levels of its chunks: 0 0' ]]
    run -0 generate run/ --load-cache l.kv -p ' one' -n 4 -T 0 --deadline 0.001
    [[ "$output" =~ '--deadline: the first token came after '[0-9.]+' s, not 0.001 s' ]]
    quantize-kv -q doc.kv -m cachegen | generate -q run/ --load-cache - -p ' one' -n 2
    quantize-kv -q l.kv -m int8 -o from-levels.kv
    grep -q 'tokens, .*iB to .*iB' said
    quantize-kv -q -d --level 2 l.kv --no-history -o two.kv
    quantize-kv -q doc.kv -m cachegen --level 2 --no-history | quantize-kv -q -d --no-history -o only-two.kv
    cmp two.kv only-two.kv
    quantize-kv -q -d l.kv --no-history -o best.kv
    ! cmp -s two.kv best.kv || false
    # levels of the file are copied, others are coded from its best one
    quantize-kv -q doc.kv -m cachegen --level 2 --no-history -o direct.kv
    quantize-kv l.kv -m cachegen --level 2 --no-history -o copied.kv 2> said
    ! grep -q 'it lacks' said || false
    cmp direct.kv copied.kv
    cat l.kv | quantize-kv -q -m cachegen --level 2 --no-history | cmp - direct.kv
    quantize-kv l.kv -m cachegen --level 2 --level 3 --no-history -o three.kv 2> said
    grep -q 'coded from the numbers of its level 0, for it lacks them: 3$' said
    quantize-kv -q -d --level 2 three.kv --no-history | cmp - two.kv
    quantize-kv -q -d l.kv --no-history | quantize-kv -q -m cachegen --level 3 --no-history > coded.kv
    quantize-kv -q three.kv -m cachegen --level 3 --no-history | cmp - coded.kv
    quantize-kv --list-methods | grep -q '^cachegen .*levels 0 to 3'
    run -2 --separate-stderr quantize-kv -d --level 1 l.kv -o x.kv
    [[ "$stderr" =~ 'level 1 is requested, it has 0, 2' ]]
    run -2 --separate-stderr quantize-kv -l --level 1 l.kv
    [[ "$stderr" =~ '--level: no level is coded or decoded: give it with --method cachegen, or one with -d' ]]
    run -2 quantize-kv -d --level 1 --level 2 l.kv -o x.kv
    run -2 --separate-stderr quantize-kv doc.kv -m cachegen:level=2 -o x.kv
    [[ "$stderr" =~ '--method: cachegen has no keys: give its levels with --level' ]]
    run -2 --separate-stderr quantize-kv doc.kv -m int7 -o x.kv
    [[ "$stderr" == 'quantize-kv: --method: '* ]]
    run -2 --separate-stderr quantize-kv --evaluate --methods int7 run/ data/val
    [[ "$stderr" == *'--methods: '* ]]
    run -2 quantize-kv doc.kv -m cachegen --level 4 -o x.kv
    run -2 quantize-kv doc.kv -m int8 --level 1 -o x.kv
    [ ! -e x.kv ]
}

@test "damaged files and those of others: one line, status 1, no token" {
    quantize-kv -q doc.kv -m int4 -o four.kv
    for file in doc.kv four.kv; do
        size=$(stat -L -c %s $file)
        for at in 20 200 $((size / 3)) $((size / 2)) $((size - 9)); do
            cp -L $file bad.kv
            printf '\125' | dd of=bad.kv bs=1 seek="$at" conv=notrunc status=none
            cmp -s bad.kv $file && continue
            run -1 --separate-stderr generate -q run/ --load-cache bad.kv -p ' one' -n 4
            [ -z "$output" ]
            [ "$(wc -l <<< "$stderr")" -eq 1 ]
            [ "$at" -lt 3000 ] || run -1 quantize-kv -q --verify bad.kv
        done
        head -c $((size - 100)) $file > bad.kv
        run -1 --separate-stderr generate -q run/ --load-cache bad.kv -p ' one' -n 4
        [ -z "$output" ]
        run -1 --separate-stderr generate -q run/ --load-cache - -p ' one' -n 4 < bad.kv
        [ -z "$output" ]
    done
    for change in '"theta\\":10000/"theta\\":20000' '"model_type":"llama"/"model_type":"qwen2"' '"k_state"/"k_stats"'; do
        damage doc.kv "${change%/*}" "${change#*/}"
        for run in "generate -q run/ --load-cache bad.kv -p one -n 4" "quantize-kv -l bad.kv" "quantize-kv --verify bad.kv"; do
            run -1 --separate-stderr $run
            [ -z "$output" ]
            [[ "$stderr" =~ 'the checksum of its header is wrong' ]]
        done
    done
    cp -RL run changed
    sed -i 's/"rms_norm_eps": *[^,]*/"rms_norm_eps": 0.5/' changed/config.json
    run -1 generate -q changed --load-cache doc.kv -p ' one' -n 4
    [[ "$output" =~ 'with other settings of norms' ]]
    cp run/config.json changed/
    sed -i 's/"rope_theta": *[0-9.]*/"rope_theta": 77.0/' changed/config.json
    run -1 generate -q changed --load-cache doc.kv -p ' one' -n 4
    [[ "$output" =~ 'rotated with other settings' ]]
    init-model -q llama-1m --tokenizer tok/tokenizer.json -o other
    run -1 generate -q other --load-cache doc.kv -p ' one' -n 4
    [[ "$output" =~ 'cache of another model: layers and heads differ' ]]
    init-model -q run/ --tokenizer tok/tokenizer.json --seed 9 -o alike
    run -1 generate -q alike --load-cache doc.kv -p ' one' -n 4
    [[ "$output" =~ 'cache of another model: of weights ' ]]
}

@test "keys before their rotation and after it: kvquant of a plain cache, and back" {
    quantize-kv -q --calibrate --method kvquant:bits=4 --seq-len 64 --windows 2 run/ data/val -o kvq.safetensors
    quantize-kv doc.kv -m kvquant:bits=4,file=kvq.safetensors -v -o kvq.kv 2> said
    [ "$(grep -c 'relative error 0\.[01]' said)" -eq 4 ]
    quantize-kv -q -d kvq.kv -o plain.kv
    quantize-kv -l plain.kv | grep -q '16.00 bits a number'
    quantize-kv -q plain.kv -m kvquant:bits=4,file=kvq.safetensors -v -o again.kv 2> said
    generate -q run/ --load-cache plain.kv -p ' one' -n 4
    generate -q run/ --load-cache kvq.kv -p ' one' -n 8 -T 0 --json --logprobs > a
    generate -q run/ --load-cache doc.kv --kv kvquant:bits=4,file=kvq.safetensors -p ' one' -n 8 -T 0 --json --logprobs > b
    cmp a b
}

@test "options of caches that do not fit together" {
    run -2 generate -q run/ -n 0 -p a
    run -2 generate -q run/ --save-cache x.kv -p a -p b
    run -2 generate -q run/ --save-cache x.kv -p a --n 2
    run -2 generate -q run/ --save-cache - -p a -n 3
    run --separate-stderr bash -c "generate -q run/ --save-cache - -p 'The system reads' -n 0 > /dev/full"
    [[ $stderr == "generate: standard output: cannot write: "* ]]
    run -2 bash -c 'generate -q run/ --save-cache /dev/stdout -p a -n 3 | cat; exit "${PIPESTATUS[0]}"'
    [[ "$output" =~ 'standard output is for the text' ]]
    run -2 generate -q run/ --deadline 1 -p a
    run -2 generate -q run/ --load-cache doc.kv --serve-batch 2 -p a
    run -2 generate -q run/ --load-cache short.kv -p a --dtype f32
    [[ "$output" =~ 'it has numbers of bf16' ]]
    run -2 generate -q run/ --load-cache doc.kv --context 20 -p a
    [[ "$output" =~ '--context: 20, and doc.kv has '[0-9]+' tokens: raise it' ]]
    run -2 generate -q run/ --load-cache - < doc.kv
    run -2 quantize-kv doc.kv
    run -2 quantize-kv doc.kv -d -l
    run -2 quantize-kv doc.kv -m nothing -o x.kv
    run -2 quantize-kv doc.kv -m int4 -o doc.kv -f
    run -2 quantize-kv doc.kv -m h2o -o x.kv
    [[ "$output" =~ 'tokens are dropped while a model runs' ]]
    run -2 quantize-kv doc.kv -m f16 -o x.kv
    run -2 quantize-kv doc.kv -m k=int4,v=int8 --bits 2 -o x.kv
    [[ "$output" =~ 'they go with one method by its name' ]]
    run -2 quantize-kv doc.kv -m int4 -o doc2.kv --json
    [ ! -e x.kv ]
    quantize-kv --list-methods | grep -q '^kivi'
    quantize-kv --list-methods --json | grep -q '"kivi"'
    quantize-kv --list-methods --json | python3 -c '
import json, sys
o = json.load(sys.stdin)
assert o["methods"]["cachegen"]["levels"] == 4, o
assert "h2o" in o["policies"], o'
    while IFS='>' read -r m message; do
        run -2 quantize-kv doc.kv -m "$m" -o x.kv
        [ "$output" = "quantize-kv: --method: $message" ] || { echo "$output"; false; }
    done << 'END'
int7>there is no method 'int7': did you mean int8? (--list-methods shows all)
cachegem>there is no method 'cachegem': did you mean cachegen? (--list-methods shows all)
streeming>there is no method 'streeming': --list-methods shows all
k=cachegen,v=int4>cachegen codes whole files: give it alone
END
    generate -q run/ --save-cache - -p 'The system reads' -n 0 --dtype bf16 | cmp - short.kv
    generate -q run/ --load-cache short.kv --save-cache longer.kv -p ' one' -n 0
    [ "$(quantize-kv -l longer.kv --json | grep -o '"tokens":[0-9]*' | head -n 1 | cut -d: -f2)" -gt \
      "$(quantize-kv -l short.kv --json | grep -o '"tokens":[0-9]*' | head -n 1 | cut -d: -f2)" ]
}

@test "the state of a sequence of llama.cpp continues as our own file, with --unverified" {
    generate -q run/ --save-cache long.kv -p "$(head -c 900 corpus.txt)" -n 0 --dtype bf16
    python3 - << 'PY' || skip "no python3"
import json, struct
f = open('long.kv', 'rb').read()
n = struct.unpack('<Q', f[:8])[0]
h, data = json.loads(f[8:8 + n]), f[8 + n:]
def tensor(name):
    a, b = h[name]['data_offsets']
    return h[name]['shape'], data[a:b]
T = h['token_ids']['shape'][0]
out = struct.pack('<III', 0x67677371, 3, T) + tensor('token_ids')[1] + struct.pack('<II', 1, T)
for i in range(T):
    out += struct.pack('<iIi', i, 1, 0)
layers = int(h['__metadata__']['layers'])
out += struct.pack('<II', 0, layers)
for side in 'kv':
    for l in range(layers):
        (K, T, D), x = tensor('layers.%d.%s' % (l, side))
        out += struct.pack('<iQ', 30, 2 * K * D)
        for t in range(T):
            for k in range(K):
                for d in range(D):
                    # adjacent numbers are rotated together there, those half a head apart here
                    i = d if side == 'v' else d % 2 * (D // 2) + d // 2
                    at = 2 * ((k * T + t) * D + i)
                    out += x[at:at + 2]
open('state.bin', 'wb').write(out)
open('quantised.bin', 'wb').write(out.replace(struct.pack('<iQ', 30, 2 * K * D), struct.pack('<iQ', 8, 2 * K * D)))
PY
    generate -q run/ --load-cache long.kv -p ' and' -n 6 -T 0 --json --logprobs --dtype bf16 > a
    generate -q run/ --load-cache state.bin --unverified -p ' and' -n 6 -T 0 --json --logprobs --dtype bf16 > b
    cmp a b
    generate -q run/ --load-cache state.bin --unverified -p '' -n 0 --save-cache s.kv --dtype bf16 2> said ||
        grep -q 'give a prompt' said
    run -2 generate -q run/ --load-cache state.bin -p ' and' -n 6
    [[ "$output" =~ 'add --unverified' ]]
    run -2 generate -q run/ --load-cache - --unverified -p ' and' -n 6 < state.bin
    run -1 generate -q run/ --load-cache quantised.bin --unverified -p ' and' -n 6
    [[ "$output" =~ 'blocks of q8_0' ]]
    run -1 generate -q run/ --load-cache short.kv --unverified -p ' and' -n 6
    head -c 9000 state.bin > cut.bin
    run -1 generate -q run/ --load-cache cut.bin --unverified -p ' and' -n 6
    [[ "$output" =~ 'it ends early' ]]
}

@test "--kv and a loaded cache: the file is converted, and saved caches are coded" {
    generate -q run/ --load-cache doc.kv --kv int8 -p ' one' -n 4 -T 0 > a
    quantize-kv -q doc.kv -m int8 -o eight.kv
    generate -q run/ --load-cache eight.kv -p ' one' -n 4 -T 0 > b
    cmp a b
    generate -q run/ --load-cache eight.kv --kv int4 -p ' one' -n 0 --save-cache c.kv
    quantize-kv -l c.kv | grep -q '^layers.0.k.*int4$'
    generate -q run/ --kv int4 --save-cache made.kv -p "$(head -c 900 corpus.txt)" -n 0
    quantize-kv -l made.kv | grep -q '^layers.0.k.*int4$'
    quantize-kv --verify made.kv
    generate -q run/ --kv int4 -p "$(head -c 900 corpus.txt) one" -n 4 -T 0 --json --logprobs > whole
    generate -q run/ --load-cache made.kv -p ' one' -n 4 -T 0 --json --logprobs > loaded
    [ "$(grep -o '"token_ids".*' whole)" = "$(grep -o '"token_ids".*' loaded)" ]
    run -2 generate -q run/ --kv h2o --load-cache doc.kv -p ' one'
}

@test "quantize-kv --verify checks all levels and their tables" {
    quantize-kv -q doc.kv -m cachegen --level 0 --level 1 --level 3 -o lv.kv
    quantize-kv --verify lv.kv
    data=$(($(od -An -tu8 -N8 lv.kv) + 8))
    head -c $data lv.kv | tail -c +9 | grep -o '"[a-z0-9.]*level[a-z0-9.]*":{[^}]*"data_offsets":\[[0-9]*' | sed 's/^"\([^"]*\)".*\[/\1 /' > levels
    [ "$(grep -c tables levels)" -eq 3 ]
    while read -r name at; do
        cp lv.kv bad.kv
        printf '\377\377' | dd of=bad.kv bs=1 seek=$((data + at + 5)) conv=notrunc status=none
        run -1 quantize-kv --verify bad.kv
        [[ $output == "quantize-kv: bad.kv: $name: its checksum is wrong: "* ]]
        run -1 quantize-kv --verify - < bad.kv
        [[ $output == *"$name: its checksum is wrong: "* ]]
    done < levels
}

@test "an output that cannot be written is refused before the work" {
    : > there.kv
    for to in there.kv none/a.kv run; do
        ! generate -q run/ -p 'The system' -n 4 --save-cache $to > text 2> why || false
        [ ! -s text ]
        [ "$(wc -l < why)" -eq 1 ]
    done
    [ ! -s there.kv ]
}
