# SPDX-License-Identifier: Apache-2.0
# cuda.bash -- shared by tests of --device cuda: load cuda.
#
# The device is the emulated one of $LM_TEST_BUILD/emu, or with LM_TEST_CUDA=real a GPU of this machine.

real() { [ "${LM_TEST_CUDA-}" = real ]; }
emulated() { if real; then skip "only an emulated device does this"; fi; }

use_module() {
    LM_MODULES=$LM_TEST_BUILD/emu
    if real; then LM_MODULES=$LM_TEST_BUILD/lib/lmutils; fi
    export LM_MODULES
}

# examples NAME: the folder of tests/cli/examples/NAME.sh, once for a file of tests
examples() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    export root
    cd "$BATS_FILE_TMPDIR"
    sh "$root/tests/cli/examples/$1.sh"
}

# A separate folder for the test, with the data and the model of the example.
own_folder() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR/data" "$BATS_FILE_TMPDIR/m0" .
}
