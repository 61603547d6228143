//! The source distribution, the images, and the files in `.github`, checked by the programs of their formats.

use crate::support::repository;
use grpo_testkit::python::Python;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const WORKFLOW: &str = ".github/workflows/ci.yml";
const NIGHTLY: &str = ".github/workflows/nightly.yml";

/// Runs a program of the Python packages, or of this system, in a folder.
fn run(program: impl AsRef<Path>, arguments: &[&str], folder: &Path) -> Output {
    let program = program.as_ref();
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder);
    command.output().unwrap_or_else(|error| panic!("{} starts: {error}", program.display()))
}

/// Returns standard output of a call that must succeed.
#[track_caller]
fn succeed(output: Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Returns the names and versions of the packages in `Cargo.lock`.
fn locked(path: PathBuf) -> BTreeSet<String> {
    let text = fs::read_to_string(path).expect("a lock file");
    let packages = text.split("[[package]]\n").skip(1);
    packages.map(|package| package.lines().take(2).collect::<Vec<_>>().join(" ")).collect()
}

/// `scripts/wheel.sh` builds it, which takes minutes.
#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn the_source_distribution_has_the_packages_of_the_binary_and_no_tests() {
    let (python, folder) = (Python::install(), tempfile::tempdir().expect("a folder"));
    let root = PathBuf::from(repository(""));
    let out = folder.path().display().to_string();
    succeed(run(python.scripts().join("maturin"), &["sdist", "--out", &out], &root));
    let name = format!("grpo-{}", env!("CARGO_PKG_VERSION"));
    let archive = format!("{name}.tar.gz");
    succeed(run("tar", &["-xzf", &archive], folder.path()));
    let sources = folder.path().join(name);

    let names = succeed(run("tar", &["-tzf", &archive], folder.path()));
    // `grpo-VERSION/crates/NAME/tests/`; unit tests are in `src`.
    let is_data = |name: &&str| name.split('/').nth(3) == Some("tests") || name.ends_with(".safetensors");
    let data: Vec<_> = names.lines().filter(is_data).collect();
    assert!(data.is_empty(), "test data in the source distribution: {data:?}");
    assert!(names.lines().any(|name| name.ends_with("/LICENSE-MIT")), "{names}");

    // Cargo finds every package without the rest of the workspace, and drops packages from the lock file without changing versions.
    let before = locked(root.join("Cargo.lock"));
    let arguments = ["metadata", "--offline", "--format-version=1", "--manifest-path=crates/cli/Cargo.toml"];
    let metadata = succeed(run(env!("CARGO"), &arguments, &sources));
    let metadata: Value = serde_json::from_str(&metadata).expect("JSON");
    assert!(metadata["workspace_members"].as_array().is_some_and(|members| members.len() > 10), "{metadata}");
    let after = locked(sources.join("Cargo.lock"));
    assert!(after.len() > 100 && after.is_subset(&before), "{:?}", after.difference(&before));

    let information = fs::read_to_string(sources.join("PKG-INFO")).expect("PKG-INFO");
    let (fields, readme) = information.split_once("\n\n").expect("fields and the README");
    let field = |name: &str| fields.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
    assert_eq!(field("Name"), Some("grpo"));
    assert_eq!(field("Version"), Some(env!("CARGO_PKG_VERSION")));
    assert_eq!(field("Summary"), Some(env!("CARGO_PKG_DESCRIPTION")));
    assert_eq!(field("License-Expression"), Some(env!("CARGO_PKG_LICENSE")));
    let source = concat!("Project-URL: Source Code, ", env!("CARGO_PKG_REPOSITORY"));
    assert!(fields.lines().any(|line| line == source), "{fields}");
    assert!(readme.starts_with("# grpo"), "{readme}");
}

/// Returns the output of check-jsonschema for a schema that it has.
fn check_schema(python: &Python, schema: &str, path: &Path) -> Output {
    let mut command = python.command();
    command.args(["-m", "check_jsonschema", "--builtin-schema", &format!("vendor.{schema}")]).arg(path);
    command.output().expect("python3 starts")
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn forms_of_issues_and_dependabot_have_their_schemas() {
    let (python, folder) = (Python::install(), tempfile::tempdir().expect("a folder"));
    for (schema, file, key) in [
        ("github-issue-forms", "ISSUE_TEMPLATE/bug.yml", "body:"),
        ("github-issue-forms", "ISSUE_TEMPLATE/feature.yml", "description:"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml", "url:"),
        ("dependabot", "dependabot.yml", "package-ecosystem:"),
    ] {
        let path = PathBuf::from(repository(&format!(".github/{file}")));
        succeed(check_schema(&python, schema, &path));
        // The schema requires the key.
        let text = fs::read_to_string(&path).expect("a file");
        assert!(text.contains(key), "{file} has no {key}");
        let damaged = folder.path().join("damaged.yml");
        fs::write(&damaged, text.replacen(key, "unknown:", 1)).expect("written");
        assert!(!check_schema(&python, schema, &damaged).status.success(), "{file} without {key} is accepted");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn the_workflows_are_valid_and_safe() {
    let (python, folder) = (Python::install(), tempfile::tempdir().expect("a folder"));
    let check = |path: &Path| {
        let schema = check_schema(&python, "github-workflows", path);
        let path = path.display().to_string();
        let zizmor = ["--offline", "--persona", "pedantic", "--no-progress", &path];
        let zizmor = run(python.scripts().join("zizmor"), &zizmor, folder.path());
        [schema, zizmor]
    };
    let [workflow, nightly] = [WORKFLOW, NIGHTLY].map(|path| PathBuf::from(repository(path)));
    check(&workflow).into_iter().chain(check(&nightly)).for_each(|output| drop(succeed(output)));
    // Each program finds the defects of its kind.
    let text = fs::read_to_string(workflow).expect("a workflow");
    for (checker, found, replaced) in [
        (0, "runs-on:", "run-on:"),
        (0, "permissions:\n  contents: read", "permissions:\n  content: read"),
        (1, "@3d3c42e5aac5ba805825da76410c181273ba90b1", "@main"),
        (1, "permissions:\n  contents: read", "permissions: write-all"),
        (1, "run: .ci/run", "run: echo ${{ github.event.pull_request.title }}"),
    ] {
        assert!(text.contains(found), "{found}");
        // zizmor expects the names of GitHub's folders.
        let path = folder.path().join(WORKFLOW);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, text.replace(found, replaced)).expect("written");
        assert!(!check(&path)[checker].status.success(), "{replaced} is not found");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn the_dockerfile_has_no_findings_of_hadolint() {
    let (python, folder) = (Python::install(), tempfile::tempdir().expect("a folder"));
    let hadolint = |path: &str| run(python.scripts().join("hadolint"), &[path], folder.path());
    let path = repository("Dockerfile");
    succeed(hadolint(&path));
    let text = fs::read_to_string(path).expect("a Dockerfile");
    for (found, replaced) in
        [("WORKDIR /work", "WORKDIR work"), ("COPY crates", "COPPY crates"), ("USER 1000", "USER root")]
    {
        assert!(text.contains(found), "{found}");
        let path = folder.path().join("Dockerfile");
        fs::write(&path, text.replace(found, replaced)).expect("written");
        assert!(!hadolint(&path.display().to_string()).status.success(), "{replaced} is not found");
    }
}
