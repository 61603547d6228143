//! The public APIs of the published crates: which crates they mention, and whether they changed.
//!
//! `baseline/` has the API of each crate with a stability promise (CONTRIBUTING.md, "Releases"). After an intended change:
//!
//!     UPDATE_API=1 cargo test --workspace --test public_api -- --ignored

use public_api::PublicApi;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

grpo_testkit::tiers!();

/// Packages whose API has a stability promise.
const PROMISED: [&str; 9] = [
    "grpo-core",
    "grpo-backend-cpu",
    "grpo-backend-tpu",
    "grpo-burn",
    "grpo-candle",
    "grpo-trainer",
    "grpo-policy",
    "grpo-data",
    "grpo-rewards",
];

/// Modules that exist for other crates of this workspace. They have no promise.
const INTERNAL: [&str; 5] = [
    "grpo_backend_tpu::compile_options",
    "grpo_backend_tpu::devices",
    "grpo_backend_tpu::mosaic",
    "grpo_backend_tpu::program",
    "grpo_rewards::programs",
];

/// The public API of each published library.
static APIS: LazyLock<BTreeMap<&str, PublicApi>> = LazyLock::new(|| {
    // The arguments of `.ci/run`, so that its build of the dependencies is used again.
    cargo(&["doc", "--workspace", "--no-deps", "--lib", "--locked"]);
    let folder = Path::new(METADATA["target_directory"].as_str().unwrap()).join("doc");
    let api = |package: &'static Value| {
        let json = folder.join(library(package)?).with_extension("json");
        let builder =
            public_api::Builder::from_rustdoc_json(&json).omit_blanket_impls(true).omit_auto_trait_impls(true);
        let api = builder.build().unwrap_or_else(|error| panic!("{}: {error}", json.display()));
        Some((package["name"].as_str().unwrap(), api))
    };
    packages().filter(|package| is_published(package)).filter_map(api).collect()
});

static METADATA: LazyLock<Value> = LazyLock::new(|| {
    let output = cargo(&["metadata", "--format-version", "1", "--locked"]);
    serde_json::from_slice(&output).unwrap()
});

/// Returns the output of `cargo`, whose rustdoc writes JSON.
fn cargo(arguments: &[&str]) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(folder)
        .env("RUSTDOC", folder.join("public_api/rustdoc.sh"))
        .env("RUSTDOCFLAGS", "-Z unstable-options --output-format json")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn packages() -> impl Iterator<Item = &'static Value> {
    METADATA["packages"].as_array().unwrap().iter()
}

/// Returns `true` if the package is of this workspace and may be published.
fn is_published(package: &Value) -> bool {
    package["source"].is_null() && package["publish"].is_null()
}

/// Returns the name of the package's library.
fn library(package: &Value) -> Option<String> {
    let is_library = |target: &&Value| {
        let kinds = target["kind"].as_array().unwrap();
        kinds.iter().any(|kind| ["lib", "rlib", "proc-macro"].contains(&kind.as_str().unwrap()))
    };
    let target = package["targets"].as_array().unwrap().iter().find(is_library)?;
    Some(target["name"].as_str().unwrap().replace('-', "_"))
}

/// Returns the crates that an API mentions: the first segments of its paths.
fn mentioned(api: &PublicApi) -> BTreeSet<String> {
    let lines: Vec<String> = api.items().map(|item| item.to_string()).collect();
    let paths = lines.iter().flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':'));
    let firsts = paths.filter_map(|path| path.trim_start_matches(':').split_once("::")).map(|(first, _)| first);
    firsts.filter(|first| first.starts_with(|c: char| c.is_ascii_lowercase())).map(String::from).collect()
}

/// Returns the items with a promise, one per line, with full paths. Items of trait implementations follow from their traits, and are left out.
fn promised(api: &PublicApi) -> String {
    let is_trait_impl = |line: &str| line.starts_with("impl") && line.contains(" for ");
    let implementations = api.items().filter(|item| is_trait_impl(&item.to_string())).map(|item| item.id());
    let implementations: HashSet<_> = implementations.collect();
    let items = api.items().filter(|item| item.parent_id().is_none_or(|parent| !implementations.contains(&parent)));
    items.map(|item| item.to_string()).filter(|line| !is_internal(line)).map(|line| format!("{line}\n")).collect()
}

/// Returns `true` if the first path of this crate in the line is in one of the modules [`INTERNAL`].
fn is_internal(line: &str) -> bool {
    INTERNAL.iter().any(|module| {
        let (library, _) = module.split_once("::").unwrap();
        let is_first = |start: usize| line[start..].starts_with(&format!("{module}::")) || line[start..] == **module;
        line.find(&format!("{library}::")).is_some_and(is_first)
    })
}

#[test]
#[ignore = "GRPO_TESTS=all: rustdoc's JSON"]
fn published_apis_mention_published_crates_only() {
    let registry = packages().filter(|package| !package["source"].is_null());
    let available: BTreeSet<String> =
        registry.chain(packages().filter(|package| is_published(package))).filter_map(library).collect();
    assert!(APIS.len() > 20, "{:?}", APIS.keys());
    let primitives = ["bool", "f32", "f64", "i16", "i32", "i64", "i8", "str", "u16", "u32", "u64", "u8", "usize"];
    let built_in = [&["std", "core", "alloc"], &primitives[..]].concat();
    for (name, api) in APIS.iter() {
        let mentioned = mentioned(api);
        assert!(mentioned.contains("core"), "{name}: {mentioned:?}");
        let is_known = |first: &&String| built_in.contains(&first.as_str()) || available.contains(*first);
        let unknown: Vec<_> = mentioned.iter().filter(|first| !is_known(first)).collect();
        assert!(unknown.is_empty(), "the API of {name} mentions {unknown:?}, which is not on crates.io");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all: rustdoc's JSON"]
fn promised_apis_equal_their_baselines() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("public_api/baseline");
    let mut changes = String::new();
    for name in PROMISED {
        let path: PathBuf = folder.join(name).with_extension("txt");
        let text = promised(&APIS[name]);
        if std::env::var_os("UPDATE_API").is_some() {
            std::fs::write(&path, text).unwrap();
            continue;
        }
        let baseline = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (old, new): (BTreeSet<_>, BTreeSet<_>) = (baseline.lines().collect(), text.lines().collect());
        changes.extend(old.difference(&new).map(|line| format!("- {line}\n")));
        changes.extend(new.difference(&old).map(|line| format!("+ {line}\n")));
    }
    assert!(
        changes.is_empty(),
        "public APIs changed. If this is intended, run `UPDATE_API=1 cargo test --workspace --test public_api -- --ignored`, and name removed \
         and changed items in CHANGELOG.md:\n{changes}"
    );
}
