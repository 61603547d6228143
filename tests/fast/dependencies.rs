//! The packages that a build of the trainer downloads, and those that its loop compiles.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Largest number of external packages that `cargo build` of `grpo` may download.
const MOST: usize = 300;

/// Returns the output of `cargo` with these arguments, run in this workspace.
pub(crate) fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

pub(crate) fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_else(|| panic!("cargo's metadata have no `{field}` here: {value}"))
}

pub(crate) fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field].as_array().unwrap_or_else(|| panic!("cargo's metadata have no list `{field}` here: {value}"))
}

/// `cargo tree` lists fewer packages: a package behind an unused optional feature, such as the cookies of an HTTP client, is downloaded if
/// `Cargo.lock` has it, but never compiled. `Cargo.lock` lists more: packages of tests and of other systems.
#[test]
fn building_downloads_fewer_than_300_packages() {
    let version = cargo(&["-vV"]);
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("the host of cargo");
    let metadata = cargo(&["metadata", "--format-version", "1", "--locked", "--filter-platform", host]);
    let metadata: Value = serde_json::from_str(&metadata).expect("JSON");
    let packages: BTreeMap<_, _> = list(&metadata, "packages").iter().map(|p| (text(p, "id"), p)).collect();
    let nodes: BTreeMap<_, _> = list(&metadata["resolve"], "nodes").iter().map(|n| (text(n, "id"), n)).collect();
    let binary =
        packages.iter().find(|(_, package)| text(package, "name") == "grpo-cli").expect("the binary's package").0;

    let (mut reached, mut next) = (BTreeSet::new(), vec![*binary]);
    while let Some(id) = next.pop() {
        if !reached.insert(id) {
            continue;
        }
        let needed = |kind: &Value| kind["kind"].is_null() || kind["kind"] == "build";
        let needs = list(nodes[id], "deps").iter().filter(|dep| list(dep, "dep_kinds").iter().any(needed));
        next.extend(needs.map(|dep| text(dep, "pkg")));
    }
    let downloaded = reached.iter().map(|id| packages[id]).filter(|package| !package["source"].is_null());
    let names: BTreeSet<_> = downloaded.map(|p| format!("{} {}", text(p, "name"), text(p, "version"))).collect();
    println!("{} packages", names.len());
    for name in ["clap ", "serde_derive ", "burn-core "] {
        assert!(names.iter().any(|package| package.starts_with(name)), "{name}is not among {names:?}");
    }
    assert!(names.len() < MOST, "{} packages, and fewer than {MOST} are the aim:\n{names:?}", names.len());
}

/// The beginnings of the names of packages that the training loop must not compile: tensor libraries, devices, and clients and servers of HTTP.
const NOT_IN_THE_LOOP: [&str; 14] = [
    "burn",
    "candle",
    "grpo-backend-",
    "grpo-burn",
    "grpo-pjrt",
    "grpo-policy-",
    "grpo-stablehlo",
    "http",
    "hyper",
    "rustls",
    "tiny_http",
    "tungstenite",
    "ureq",
    "xla",
];

/// Returns the packages of a build of `package` that begin as [`NOT_IN_THE_LOOP`], with the features of this package alone.
fn not_in_the_loop(package: &str) -> BTreeSet<String> {
    let tree = ["tree", "--locked", "--edges", "normal,build", "--prefix", "none", "--no-default-features"];
    let tree = cargo(&[&tree[..], &["--package", package]].concat());
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    let is_named = |name: &&str| NOT_IN_THE_LOOP.iter().any(|start| name.starts_with(start));
    names.filter(is_named).map(str::to_owned).collect()
}

#[test]
fn the_training_loop_compiles_no_tensor_library_no_device_and_no_http() {
    assert_eq!(not_in_the_loop("grpo-trainer"), BTreeSet::new());
    // The crate that builds devices and servers from a configuration has all of them.
    let built = not_in_the_loop("grpo-setup");
    for name in ["burn-core", "grpo-pjrt", "grpo-policy-cpu", "grpo-stablehlo", "httparse", "tungstenite", "ureq"] {
        assert!(built.contains(name), "{name} is not among {built:?}");
    }
}
