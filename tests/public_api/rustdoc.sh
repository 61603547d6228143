#!/bin/sh
# rustdoc of the pinned toolchain, with its unstable JSON output. The variable is set for rustdoc alone: build scripts of dependencies run
# again if it changes.
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
