#!/usr/bin/env bash
# Checks that a release would succeed. It uploads nothing. `.ci/run` has the other requirements of a release.
#
#     scripts/release.sh 0.2.0              # Cargo.toml has this version, and CHANGELOG.md a section for it
#     scripts/release.sh                    # between releases: CHANGELOG.md has unreleased changes instead
#     scripts/release.sh --no-build ...     # only versions and the changelog
set -euo pipefail
cd "$(dirname "$0")/.."

build=true
if [ "${1-}" = --no-build ]; then build=false; shift; fi
[ $# -le 1 ] || { echo "usage: scripts/release.sh [--no-build] [VERSION]" >&2; exit 2; }

step() { printf '\n== %s\n' "$*"; "$@"; }
fail() { echo "release: $*" >&2; exit 1; }

# The packages have one version: tests/fast/packages.rs.
id=$(cargo pkgid --locked --package grpo-core)
version=${id##*[@#]}
section="## [${1-Unreleased}]"
[ "${1-$version}" = "$version" ] || fail "the packages have version $version, expected $1: set both versions in Cargo.toml"
entries=$(awk -v section="$section" '/^## /{inside = index($0, section) == 1} inside && /^\* /{n++} END{print n + 0}' CHANGELOG.md)
[ "$entries" -gt 0 ] || fail "CHANGELOG.md has no entries in a section \"$section\""
echo "version $version, $entries entries in \"$section\" of CHANGELOG.md"
$build || exit 0

packages=(--workspace --exclude grpo-testkit --exclude grpo-tests --locked)
step cargo test --workspace --locked --test public_api
# docs.rs builds with nightly and these flags; the features are in `[package.metadata.docs.rs]`.
RUSTDOCFLAGS="--cfg docsrs -D warnings" step cargo doc "${packages[@]}" --no-deps --lib --all-features

# Cargo builds each package from its archive, with the archives of its dependencies in a temporary registry.
# Cargo unpacks and builds a version of such a registry once, and would use the packages of an earlier check again.
rm -rf "${CARGO_HOME:-$HOME/.cargo}"/registry/{cache,src}/-*/grpo-*-"$version"* target/release-check
log=$(mktemp)
trap 'rm -f "$log"' EXIT
CARGO_PROFILE_DEV_DEBUG=false step cargo package "${packages[@]}" --target-dir target/release-check 2>&1 | tee "$log"

printf '\nThe packages in the order of publication, which "cargo publish %s" follows:\n' "${packages[*]}"
awk '/^ *Packaging /{name = $2} /^ *Packaged /{sub(/^ *Packaged /, ""); printf "%3d  %-18s %s\n", ++n, name, $0}' "$log"
