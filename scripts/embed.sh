#!/usr/bin/env bash
# Builds and runs the projects of examples/embed with the packages of this repository as they would be published:
#
#     scripts/embed.sh                  # all projects
#     scripts/embed.sh slices burn      # some
#
# `cargo package` makes the packages, and `[patch.crates-io]` puts them in the place of published ones, so a file or a dependency that a
# package lacks fails here. Packages of others have the versions of Cargo.lock.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/target/embed
[ $# -gt 0 ] || set -- $(ls examples/embed | grep -v README.md)

rm -rf "$root"/{package,new,projects}
mkdir -p "$root"/{new,packages,projects}
cargo package --workspace --exclude grpo-testkit --exclude grpo-tests --no-verify --allow-dirty --locked --quiet --target-dir "$root"
echo '[patch.crates-io]' >"$root/patch.toml"
for archive in "$root"/package/*.crate; do
    package=$(basename "$archive" .crate)
    # `-m`: files in archives have a constant time of modification, by which cargo does not see changes.
    tar -xmf "$archive" -C "$root/new"
    if ! diff -rq --exclude=.cargo_vcs_info.json "$root"/{new,packages}/"$package" >/dev/null 2>&1; then
        rm -rf "$root/packages/$package"
        mv "$root/new/$package" "$root/packages"
    fi
    echo "${package%-*} = { path = \"$root/packages/$package\" }" >>"$root/patch.toml"
done

for project; do
    printf '\n== %s\n' "$project"
    cp -R "examples/embed/$project" "$root/projects"
    cp Cargo.lock "$root/projects/$project"
    # `--quiet`: each project uses some of the patches, and cargo warns of the others.
    CARGO_PROFILE_DEV_DEBUG=false cargo run --quiet --offline --config "$root/patch.toml" --target-dir "$root/build" \
        --manifest-path "$root/projects/$project/Cargo.toml"
done
