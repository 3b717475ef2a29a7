# SPDX-License-Identifier: Apache-2.0
# memory.bash -- for tests of the memory that a plan states.
# shellcheck shell=bash

# plain_memory TOOL: skip the test where the tool was built with a sanitizer, which needs memory of its own
plain_memory() {
    ! ldd "$(command -v "$1")" | grep -qE 'lib[at]san' || skip "a sanitizer needs memory of its own"
}
