#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The Makefile where paths have spaces: the checkout, B, PREFIX, DESTDIR.
bats_require_minimum_version 1.5.0

setup() {
    ROOT=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    BUILD=${LM_TEST_BUILD:-$ROOT/build}
    cd "$BATS_TEST_TMPDIR"
    mkdir 'my checkout' my checkout # folders that an unquoted path would name
    touch my/own checkout/own
    (cd "$ROOT" && tar -cf - Makefile cmd kernels lib man scripts share) | tar -xf - -C 'my checkout'
    cd 'my checkout'
    mkdir my build prefix
    touch my/own build/own prefix/own
}

# The outputs of the build under test, as if they had been built in $1.
built() {
    mkdir -p "$1"
    cp -r "$BUILD/bin" "$BUILD/libcore.a" "$1"
}

# All files here except those that must be made.
listing() {
    (cd "$BATS_TEST_TMPDIR" && find . \( -path './my checkout/my build' -o -path './my checkout/build' -o -path './my dest' -o \
        -name '.build-*' -o -name before -o -name text -o -path './my work' \) -prune -o -print | sort)
}

@test "a checkout and a build folder with spaces: objects, clean" {
    listing > ../before
    make B=build CUDA=no MPI=no build/lib/base/err.o
    [ -s build/lib/base/err.o ]
    make B='my build' CUDA=no MPI=no help | grep -q '^  install '
    link=$(echo .build-*)
    [ "$(readlink "$link")" = "$PWD/my build" ]
    make B="$link" CUDA=no MPI=no "$link/lib/base/err.o" "$link/cmd/common/alias.o"
    [ -s 'my build/lib/base/err.o' ]
    made() { make B="$link" CUDA=no MPI=no "$link/lib/base/err.o" && stat -c %y "$link/lib/base/err.o"; }
    first=$(stat -c %y "$link/lib/base/err.o")
    [ "$(made)" = "$first" ]
    touch lib/base/err.h # the dependencies were kept, too
    [ "$(made)" != "$first" ]
    make B='my build' CUDA=no MPI=no clean
    [ ! -e 'my build' ] && [ ! -e "$link" ] && [ ! -L "$link" ]
    [ -e my/own ] && [ -e build/own ]
    listing | diff ../before -
    run make B= clean
    [ "$status" -eq 2 ]
    [[ $output == *"B is empty"* ]]
    [ -e build/own ]
}

@test "install and uninstall: PREFIX and DESTDIR with spaces, and nothing beside them" {
    built 'my build'
    listing > ../before
    make B='my build' CUDA=no MPI=no PREFIX='/my prefix' DESTDIR="$PWD/../my dest" install-built
    listing | diff ../before -
    at="$PWD/../my dest/my prefix"
    "$at/bin/train" --version | grep -q lmutils
    [ -s "$at/share/man/man1/train.1" ] && [ -s "$at/share/zsh/site-functions/_train" ] && [ -s "$at/include/lmcore/base/err.h" ]
    [ -x "$at/share/lmutils/recipes/enter" ]
    # presets and recipes are found there
    (cd .. && "$at/bin/init-model" llama-1m --set vocab_size=100 --dry-run) > /dev/null
    echo 'one two three' > ../text
    (cd .. && PATH="$at/bin:$PATH" make -f "$at/share/lmutils/recipes/first-light.mk" CORPUS=text WORK='my work' clean.jsonl)
    [ -s '../my work/clean.jsonl' ]
    rm -r '../my work' ../text
    make B='my build' CUDA=no MPI=no PREFIX='/my prefix' DESTDIR="$PWD/../my dest" uninstall
    [ -z "$(find '../my dest' -type f)" ]
    listing | diff ../before -
    # a relative PREFIX is one folder in the current folder
    make B='my build' CUDA=no MPI=no PREFIX='a prefix' install-built
    [ -x 'a prefix/bin/train' ] && [ ! -e a ]
    [ "$(ls prefix)" = own ]
    make B='my build' CUDA=no MPI=no PREFIX='a prefix' uninstall
    [ "$(ls prefix)" = own ] && [ -e 'my build/bin/train' ]
}

# C++ includes the headers within extern "C".
@test "the installed headers compile alone and together, as C17 and as C++17" {
    built 'my build'
    make B='my build' CUDA=no MPI=no PREFIX="$PWD/../at" install-built
    cd ../at/include/lmcore
    find . -name '*.h' -printf '%P\n' | sort > headers
    [ "$(wc -l < headers)" -gt 100 ]
    run ! grep -riE 'private to lib/' .
    [ ! -e model/generate_impl.h ] && [ -e model/model.h ] && [ -e kernels/kernel.h ]
    cat > check << 'END'
{ echo 'extern "C" {'; sed 's/.*/#include "&"/' "$1"; echo '}'; } > "$1.cc"
sed 's/.*/#include "&"/' "$1" > "$1.c"
cc -std=c17 -Wall -Wextra -Werror -fsyntax-only -I. "$1.c" && c++ -std=c++17 -Wall -Wextra -Werror -fsyntax-only -I. "$1.cc"
END
    split -l 1 -a 3 headers one.
    find . -name 'one.???' -print0 | xargs -0 -n 1 -P 2 sh check
    sh check headers
}
