//! Every package can be published: metadata, license and README files, dependencies, and files that a build reads.
//!
//! `scripts/release.sh` builds the packages.

use crate::dependencies::{cargo, list, text};
use serde_json::Value;
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

/// Packages that are for tests only.
const NOT_PUBLISHED: [&str; 2] = ["grpo-testkit", "grpo-tests"];

/// The categories in use, as crates.io spells them (<https://crates.io/category_slugs>). crates.io drops other categories.
const CATEGORIES: [&str; 13] = [
    "algorithms",
    "api-bindings",
    "command-line-utilities",
    "compilers",
    "concurrency",
    "config",
    "development-tools::profiling",
    "development-tools::testing",
    "encoding",
    "filesystem",
    "hardware-support",
    "science",
    "visualization",
];

static METADATA: LazyLock<Value> = LazyLock::new(|| {
    let metadata = cargo(&["metadata", "--format-version", "1", "--no-deps", "--locked"]);
    serde_json::from_str(&metadata).expect("JSON")
});

fn published() -> impl Iterator<Item = &'static Value> {
    list(&METADATA, "packages").iter().filter(|package| !NOT_PUBLISHED.contains(&text(package, "name")))
}

fn folder(package: &Value) -> &Path {
    Path::new(text(package, "manifest_path")).parent().expect("the folder of Cargo.toml")
}

#[test]
fn all_packages_except_those_of_tests_may_be_published() {
    for package in list(&METADATA, "packages") {
        let name = text(package, "name");
        // `null` is every registry, `[]` is `publish = false`.
        assert_eq!(package["publish"].is_null(), !NOT_PUBLISHED.contains(&name), "{name}");
    }
    assert!(published().count() > 20);
}

#[test]
fn packages_have_the_metadata_that_crates_io_shows() {
    for package in published() {
        let name = text(package, "name");
        let length = text(package, "description").len();
        assert!((20..=200).contains(&length), "the description of {name} has {length} characters, expected 20 to 200");
        assert_eq!(text(package, "version"), env!("CARGO_PKG_VERSION"), "the version of {name}");
        assert_eq!(text(package, "license"), "MIT OR Apache-2.0", "the license of {name}");
        assert_eq!(text(package, "readme"), "README.md", "the README of {name}");
        assert!(text(package, "repository").starts_with("https://"), "the repository of {name}");
        assert!(!text(package, "rust_version").is_empty(), "the rust-version of {name}");
        let keywords = list(package, "keywords");
        assert!((1..=5).contains(&keywords.len()), "{name} has {} keywords, and crates.io accepts 5", keywords.len());
        for keyword in keywords.iter().map(|keyword| keyword.as_str().expect("a keyword")) {
            let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(keyword.len() <= 20 && keyword.chars().all(legal), "crates.io refuses {keyword:?} of {name}");
        }
        let categories = list(package, "categories");
        assert!((1..=5).contains(&categories.len()), "{name} has {} categories", categories.len());
        for category in categories.iter().map(|category| category.as_str().expect("a category")) {
            assert!(
                CATEGORIES.contains(&category),
                "the category {category:?} of {name} is not in the list of this test"
            );
        }
    }
}

#[test]
fn packages_have_license_files_and_a_readme_which_is_their_documentation() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the workspace");
    let read = |path: PathBuf| std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    for package in published() {
        let name = text(package, "name");
        for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
            assert!(read(folder(package).join(license)) == read(top.join(license)), "{license} of {name} differs");
        }
        let readme = read(folder(package).join("README.md"));
        assert!(readme.starts_with(&format!("# {name}\n")), "README.md of {name} has another title");
        for link in readme.split("](").skip(1) {
            assert!(
                link.starts_with("https://"),
                "README.md of {name} has a link that crates.io and docs.rs cannot follow"
            );
        }
        let root = ["src/lib.rs", "src/main.rs"].map(|root| folder(package).join(root));
        let root = read(root.into_iter().find(|root| root.exists()).expect("a crate root"));
        assert!(
            root.contains("#![doc = include_str!(\"../README.md\")]"),
            "the crate {name} does not include its README"
        );
    }
}

/// Cargo removes a dev-dependency without a version from a package; every other dependency is on crates.io.
#[test]
fn packages_depend_on_packages_that_are_published() {
    for package in published() {
        for dependency in list(package, "dependencies") {
            let (name, needed) = (text(package, "name"), text(dependency, "name"));
            let has_version = text(dependency, "req") != "*";
            if NOT_PUBLISHED.contains(&needed) {
                let removed = dependency["kind"] == "dev" && !has_version;
                assert!(
                    removed,
                    "{name} needs {needed}, which is not published: make it a dev-dependency without a version"
                );
            } else if dependency["kind"] != "dev" {
                assert!(has_version, "{name} needs a version of {needed}");
            }
        }
    }
}

/// Returns the Rust files of a folder that a build of the package compiles: without unit tests in files of their own.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.map(|entry| entry.expect("an entry").path()).filter(|path| !path.ends_with("tests"));
    let (folders, files): (Vec<_>, Vec<_>) = paths.partition(|path| path.is_dir());
    let is_source = |path: &PathBuf| path.extension().is_some_and(|rs| rs == "rs") && !path.ends_with("tests.rs");
    files.into_iter().filter(is_source).chain(folders.iter().flat_map(|folder| sources(folder))).collect()
}

/// Returns `path` without `..`, as a compiler in an unpacked package finds it. Links are not followed: a package has their files.
fn normalized(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut path, component| {
        match component {
            Component::ParentDir => assert!(path.pop()),
            other => path.push(other),
        }
        path
    })
}

/// Returns the paths in macros and attributes that read a file at compile time.
fn included(code: &str) -> impl Iterator<Item = &str> {
    let openings = ["include_str!(\"", "include_bytes!(\"", "include!(\"", "#[path = \""];
    let rests = openings.into_iter().flat_map(move |opening| code.split(opening).skip(1));
    rests.filter_map(|rest| rest.split('"').next())
}

#[test]
fn packages_include_no_files_of_other_folders() {
    let mut count = 0;
    for package in published() {
        let folder = folder(package);
        let mut files = [sources(&folder.join("src")), sources(&folder.join("examples"))].concat();
        files.extend(Some(folder.join("build.rs")).filter(|path| path.exists()));
        for file in files {
            let source = std::fs::read_to_string(&file).expect("UTF-8");
            let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            let code = lines.collect::<Vec<_>>().join("\n");
            assert!(
                !code.contains("CARGO_MANIFEST_DIR"),
                "{} reads files at run time that a user of the package does not have",
                file.display()
            );
            for path in included(&code) {
                let path = normalized(&file.parent().expect("a folder").join(path));
                let inside = path.strip_prefix(folder).ok().filter(|path| !path.starts_with("tests"));
                assert!(inside.is_some(), "{} includes {}, which the package lacks", file.display(), path.display());
                assert!(path.is_file(), "{} includes {}, which does not exist", file.display(), path.display());
                count += 1;
            }
        }
    }
    assert!(count > 20, "only {count} included files were found");
}

#[test]
fn the_release_script_accepts_only_the_version_of_the_packages() {
    let run = |arguments: &[&str]| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/release.sh");
        let output = std::process::Command::new(script).arg("--no-build").args(arguments).output().expect("bash");
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8"))
    };
    let (passed, text) = run(&[]);
    assert!(passed && text.contains(concat!("version ", env!("CARGO_PKG_VERSION"), ", ")), "{text}");
    let (passed, text) = run(&["999.0.0"]);
    assert!(!passed && text.contains("expected 999.0.0"), "{text}");
}
