//! What building the trainer compiles.

use std::collections::BTreeSet;
use std::process::Command;

/// Packages that the release of `grpo` may consist of, with its own.
const MOST: usize = 300;

/// `Cargo.lock` also has those of tests, of other systems, and of features that are off.
#[test]
fn the_release_has_fewer_than_300_packages() {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--package", "grpo-cli", "--edges", "normal,build"])
        .args(["--prefix", "none", "--format", "{p}"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // `name version`, and where it is or that it was there before.
    let text = String::from_utf8(output.stdout).unwrap();
    let name_and_version = |line: &str| line.split(' ').take(2).map(str::to_owned).collect::<Vec<_>>();
    let packages: BTreeSet<_> = text.lines().filter(|line| !line.is_empty()).map(name_and_version).collect();
    for name in ["grpo-core", "clap", "serde_derive"] {
        assert!(packages.iter().any(|package| package[0] == name), "{name} is not in the tree of cargo:\n{text}");
    }
    println!("{} packages", packages.len());
    assert!(packages.len() < MOST, "{} packages, and fewer than {MOST} are the aim:\n{packages:?}", packages.len());
}
