#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Files that the tools read as text, their fields, and files that are not text.
bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR"
}

# fails STATUS PART COMMAND ARGUMENT ...: that exit status, and one line with PART on standard error.
fails() {
    local want=$1 part=$2
    shift 2
    run --separate-stderr "$@"
    [ "$status" -eq "$want" ] || { echo "status $status: $stderr"; false; }
    [ "${#stderr_lines[@]}" -eq 1 ] || { echo "$stderr"; false; }
    [[ $stderr == *"$part"* ]] || { echo "$stderr"; false; }
}

# a folder with text in it, and other things
make_folder() {
    mkdir -p in/sub in/.git
    printf 'b' > in/b.txt
    printf '{"text":"a"}\n' > in/a.jsonl
    printf '{"text":"s"}\n' | gzip > in/sub/s.jsonl.gz
    printf 'z' > in/z.md
    printf '\211PNG' > in/c.png
    printf 'hidden' > in/.git/x.txt
    printf 'hidden' > in/.hidden.txt
    ln -s ../in in/loop
}

@test "inputs: a folder stands for the text in it, sorted; skipped files are reported" {
    make_folder
    run --separate-stderr clean-data in
    [ "$output" = $'{"text":"a"}\n{"text": "b"}\n{"text":"s"}\n{"text": "z"}' ]
    [[ $stderr == *"skipped 1 file in folders without the ending .jsonl, .txt or similar, such as in/c.png"* ]]
    train-tokenizer -q -V 257 -o tok/ in/
    shard-data -q -t tok --no-shuffle -o d in/:1
    grep -q '"documents": 4,' d/meta.json
    [ "$(grep -c '"name": "in/"' d/meta.json)" -eq 2 ]
    mkdir empty pictures
    cp in/c.png pictures
    fails 2 "empty: a folder without files" clean-data empty
    fails 2 "pictures: a folder without text: 1 file not called .jsonl, .txt or the like (c.png)" clean-data pictures
}

@test "inputs: a pattern in quotes is expanded, sorted; a file of that name comes first" {
    for i in 3 1 2; do printf "$i" > t$i.txt; done
    run clean-data -q 't*.txt'
    [ "$output" = $'{"text": "1"}\n{"text": "2"}\n{"text": "3"}' ]
    run clean-data -q 't{3,1}.txt'
    [ "$output" = $'{"text": "3"}\n{"text": "1"}' ]
    printf 'itself' > 't[12].txt'
    run clean-data -q 't[12].txt'
    [ "$output" = '{"text": "itself"}' ]
    fails 2 "x*.txt: no file matches the pattern" clean-data 'x*.txt'
    # glob(3) would expand '**' to one level and omit the others
    fails 2 "**/*.txt: '**' is not supported in patterns: name the folder: " clean-data '**/*.txt'
    train-tokenizer -q -V 257 -o tok/ 't?.txt'
    shard-data -q -t tok -o d 't?.txt:2' 't{1,2}.txt:1'
    grep -q '"documents": 3,' d/meta.json
}

@test "inputs: a file that is read twice is reported" {
    make_folder
    run --separate-stderr clean-data in/b.txt in
    [[ $stderr == *"1 file given more than once, such as in/b.txt"* ]]
    [ "${#lines[@]}" -eq 5 ]
}

@test "inputs: a pipe under two names is refused: the second would give nothing" {
    for names in "- -" "- /dev/stdin" "/dev/fd/0 /dev/stdin"; do
        run -2 bash -c "echo '{\"text\":\"x y\"}' | clean-data $names"
        echo "$names: $output"
        [[ $output == "clean-data: "*"can be read only once: name it once, or write it to a file first" ]]
    done
    echo '{"text":"x y"}' | clean-data -q - /dev/null > /dev/null # not one stream
}

@test "inputs: all must exist before the first is read, and the first missing one is named" {
    echo 'x y' > t.txt
    cp t.txt t.bin
    mkfifo model # without a writer: opening it would block
    while IFS='|' read -r name line; do
        # shellcheck disable=SC2086
        run timeout 10 $line
        echo "$line: $status $output"
        [ "$status" -eq 1 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *": $name: "* ]]
    done << 'EOF'
no1|generate model t.txt no1 no2
no1|generate no1 no2
no1|eval-model model no1
no1.jsonl|eval-model model no1.jsonl
no1|eval-model --task multiple-choice model no1
no1|merge-models -m linear model no1 no2 -o out
no1|merge-models -m fisher model:fisher=no1 no2:fisher=t.txt -o out
no1|merge-models -m linear model t.txt --search grid --val no1 --val no2 -o out
no1|train model no1 -o out
no1|train model t.bin --eval-every 1 --val no1 -o out
no1|clean-data t.txt no1 no2 -o out
no1|train-tokenizer t.txt no1 no2 -o out
no1|shard-data -t no1 t.txt no2 -o out
EOF
    [ ! -e out ]
}

@test "inputs: an output in a folder or pattern that is read is refused" {
    make_folder
    fails 2 "in/new.jsonl: it lies in the input in" clean-data -o in/new.jsonl in
    fails 2 "it lies in the input in" clean-data -o in/sub/new.jsonl in
    fails 2 "in/out.jsonl: it lies in the input in" generate none in -o in/out.jsonl
    fails 2 "is both an input" clean-data -f -o in/a.jsonl 'in/*.jsonl'
    fails 2 "in/tok.json: it lies in the input in" train-tokenizer -o in/tok.json in
    train-tokenizer -q -V 257 -o tok/ in
    for out in in in/ in/sub ./in/new/deep "$PWD/in/new"; do
        fails 2 "it lies in the input in: write to another folder" shard-data -t tok -o $out in
        fails 2 "it lies in the input in" shard-data -f -t tok -o $out in:1
    done
    [ ! -e in/new.jsonl ] && [ ! -e in/tok.json ] && [ ! -e in/train.bin ] && [ ! -e in/new ]
    shard-data -q -t tok -o index in # beside the folder, with a similar name
    [ -e index/train.bin ]
}

@test "inputs: --field A.B, and several" {
    printf '{"id":1,"data":{"en":"hello","de":"h\\u00e4"},"title":"T\\n","a.b":"dot"}\n' > f.jsonl
    run clean-data -q --field data.en f.jsonl
    [ "$output" = "$(cat f.jsonl)" ]
    [ "$(clean-data -q --field a.b --field title --field data.de f.jsonl)" = '{"text": "dot\nT\n\nhä"}' ]
    printf '{"a":{"en":"Bad line\\nThis is a good line here."}}\n' > g.jsonl
    run clean-data -q -r c4 --c4-min-sentences 1 --field a.en g.jsonl
    [ "$output" = '{"a":{"en":"This is a good line here."}}' ]
    train-tokenizer -q -V 257 --field data.en --field title -o tok/ f.jsonl
    shard-data -q -t tok --no-eos --field data.en --field title -o d f.jsonl
    [ "$(stat -c %s d/train.bin)" -eq $((2 * (5 + 1 + 2))) ]
}

@test "inputs: a missing field: the message lists the fields and the option" {
    printf '{"id":1,"body":"x","meta":{"title":"y","n":2}}\n' > f.jsonl
    fails 1 "f.jsonl:1: no field 'text'; it has 'body', 'meta.title': name the text's with --field" clean-data f.jsonl
    fails 1 "no field 'meta.text'; it has 'body', 'meta.title'" clean-data --field meta.text f.jsonl
    fails 1 "column 27: field 'meta' is an object, not a string; it has 'body', 'meta.title': name" clean-data --field meta f.jsonl
    printf '{"text":null}\n' > n.jsonl
    fails 1 "n.jsonl:1: column 9: field 'text' is null, not a string" clean-data n.jsonl
    printf '{"messages":[],"n":2}\n' > g.jsonl
    fails 1 "no field 'text'; it has 'messages', 'n'" clean-data g.jsonl
}

@test "inputs: files that are not text are refused" {
    printf 'PAR1xxxxPAR1' > a.parquet
    fails 1 "a.parquet: it is Parquet, not text: write it as JSONL" clean-data a.parquet
    printf '%%PDF-1.4 text' > a.txt
    fails 1 "it is a PDF, not text" clean-data --utf8 replace a.txt
    printf '[\n {"text":"a"},\n {"text":"b"}\n]\n' > a.json
    fails 1 "a.json: it is a JSON array, not a JSON object a line: convert it to lines: jq -c '.[]'" clean-data a.json
    printf '{\n "text":"a"\n}\n' > p.json
    fails 1 "p.json:1: column 2: expected a string (field 'text'): give one JSON object a line, as jq -c does" clean-data p.json
    printf 'a,b\n1,2\n' > t.csv
    fails 1 "t.csv: it is a table, not text" clean-data t.csv
    printf '{"text":"a"}\n{"text":"b"}\n' > lines.txt
    fails 1 "lines.txt: its name is that of text, but its lines are JSON" clean-data lines.txt
    [ "$(clean-data -q --input-format jsonl lines.txt | wc -l)" -eq 2 ]
    [ "$(clean-data -q --input-format text lines.txt | wc -l)" -eq 1 ]
    printf '{ a }\nno JSON\n' > brace.txt
    [ "$(clean-data -q brace.txt)" = '{"text": "{ a }\nno JSON\n"}' ]
    printf 'h\0e\0l\0l\0o\0' > u.txt
    fails 1 "u.txt: it is UTF-16, not UTF-8: convert it with iconv" clean-data u.txt
    printf 'a\0\0\0text' > z.txt
    fails 1 "z.txt: it is not text: it holds zero bytes" clean-data z.txt
    [ "$(clean-data -q --input-format text z.txt)" = '{"text": "a\u0000\u0000\u0000text"}' ]
    printf 'The river. The house. The river.' > t.txt
    train-tokenizer -q -V 257 -o tok/ t.txt
    shard-data -q -t tok -o d t.txt
    for f in d/train.bin d/train.idx; do
        run --separate-stderr clean-data $f
        [ "$status" -eq 1 ] && [[ $stderr == *"not text"* ]]
    done
}
