//! The Python package, the images and the workflows of CI agree with the repository. `tests/python/installable.rs` runs their own checkers.

use parse_dockerfile::{Instruction, Source};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

const DOCKERFILE: &str = include_str!("../../Dockerfile");
const DOCKERIGNORE: &str = include_str!("../../.dockerignore");
const WORKFLOW: &str = include_str!("../../.github/workflows/ci.yml");
const NIGHTLY: &str = include_str!("../../.github/workflows/nightly.yml");

/// Returns `true` if the repository has this file or folder.
fn exists(path: &str) -> bool {
    Path::new("..").join(path).exists()
}

fn parse_toml(text: &str) -> toml::Table {
    text.parse().expect("TOML")
}

#[test]
fn the_python_package_has_the_licence_of_the_workspace_and_files_that_exist() {
    let python = parse_toml(include_str!("../../pyproject.toml"));
    let workspace = parse_toml(include_str!("../../Cargo.toml"));
    let project = &python["project"];
    assert_eq!(project["license"], workspace["workspace"]["package"]["license"]);
    let files = project["license-files"].as_array().expect("a list").iter().chain([&project["readme"]]);
    for path in files.chain([&python["tool"]["maturin"]["manifest-path"]]) {
        let path = path.as_str().expect("a path");
        assert!(exists(path), "pyproject.toml names {path}, which is not there");
    }
}

/// The defects of a Dockerfile that build tools find late, or never.
fn dockerfile_defects(text: &str) -> Vec<String> {
    let file = match parse_dockerfile::parse(text) {
        Ok(file) => file,
        Err(error) => return vec![error.to_string()],
    };
    let mut defects = vec![];
    // Each stage with `true` if its user is not root.
    let mut stages: Vec<(String, bool)> = vec![];
    for stage in file.stages() {
        let image = &*stage.from.image.value;
        let parent = stages.iter().find(|(name, _)| name == image);
        if parent.is_none() && image.split_once("@sha256:").is_none_or(|(_, digest)| digest.len() != 64) {
            defects.push(format!("{image} is neither a stage nor an image with a digest"));
        }
        let mut is_user = parent.is_some_and(|(_, is_user)| *is_user);
        for instruction in stage.instructions {
            match instruction {
                Instruction::User(user) => is_user = !["root", "0"].contains(&&*user.arguments.value),
                Instruction::Copy(copy) => {
                    let from = copy.options.iter().find(|option| option.name.value == "from");
                    let from = from.and_then(|option| option.value.as_ref()).map(|from| &*from.value);
                    if let Some(from) = from {
                        if !stages.iter().any(|(name, _)| name == from) {
                            defects.push(format!("--from={from} names no earlier stage"));
                        }
                        continue;
                    }
                    let sources = copy.src.iter().filter_map(|source| match source {
                        Source::Path(path) => Some(&*path.value),
                        _ => None,
                    });
                    for path in sources {
                        if !exists(path) {
                            defects.push(format!("{path} is not there"));
                        }
                        if !DOCKERIGNORE.lines().any(|line| line.strip_prefix('!') == Some(path)) {
                            defects.push(format!(".dockerignore excludes {path}"));
                        }
                    }
                }
                _ => {}
            }
        }
        let name = stage.from.as_.as_ref().map(|(_, name)| name.value.to_string()).unwrap_or_default();
        stages.push((name, is_user));
    }
    for (name, is_user) in stages.iter().filter(|(name, _)| ["cpu", "cuda"].contains(&&**name)) {
        if !is_user {
            defects.push(format!("the image {name} runs as root"));
        }
    }
    if stages.last().is_none_or(|(name, _)| name != "cpu") {
        defects.push("the default image is not `cpu`".into());
    }
    defects
}

#[test]
fn images_copy_files_that_exist_from_pinned_images_and_run_as_a_user() {
    assert_eq!(dockerfile_defects(DOCKERFILE), [""; 0]);
    let toolchain = parse_toml(include_str!("../../rust-toolchain.toml"));
    let channel = toolchain["toolchain"]["channel"].as_str().expect("a version");
    assert!(DOCKERFILE.contains(&format!("FROM rust:{channel}-slim")), "the images are built with another Rust");
    // The check itself finds each defect.
    for (found, replaced, defect) in [
        ("COPY crates crates", "COPY krates crates", "krates is not there"),
        ("COPY crates crates", "COPY docs crates", ".dockerignore excludes docs"),
        ("USER 1000", "USER root", "the image cuda runs as root"),
        ("--from=cuda-files", "--from=cuda-file", "--from=cuda-file names no earlier stage"),
        ("FROM base AS cpu", "FROM debian:12 AS cpu", "debian:12 is neither a stage nor an image with a digest"),
        ("FROM base AS cpu", "", "the default image is not `cpu`"),
        ("COPY crates crates", "COPPY crates crates", "COPPY"),
    ] {
        assert!(DOCKERFILE.contains(found), "{found}");
        let defects = dockerfile_defects(&DOCKERFILE.replace(found, replaced));
        assert!(defects.iter().any(|found| found.contains(defect)), "{replaced}: {defects:?}");
    }
}

/// The commands of a workflow.
fn commands(workflow: &str) -> Vec<String> {
    let workflow: Value = serde_saphyr::from_str(workflow).expect("YAML");
    let jobs = workflow["jobs"].as_object().expect("jobs").values();
    let steps = jobs.flat_map(|job| job["steps"].as_array().expect("steps").iter());
    steps.filter_map(|step| Some(step["run"].as_str()?.to_owned())).collect()
}

/// Returns the scripts of the repository that commands run.
fn scripts(commands: &[String]) -> BTreeSet<&str> {
    let words = commands.iter().flat_map(|command| command.split_whitespace());
    let scripts: BTreeSet<&str> =
        words.filter(|word| word.starts_with("scripts/") || word.starts_with(".ci/")).collect();
    for script in &scripts {
        assert!(exists(script), "a workflow runs {script}, which is not there");
    }
    scripts
}

#[test]
fn every_night_runs_miri_and_each_fuzz_target_with_its_seeds() {
    let commands = commands(NIGHTLY);
    assert_eq!(scripts(&commands), BTreeSet::from(["scripts/fuzz.sh", "scripts/miri.sh"]));
    let nightly: Value = serde_saphyr::from_str(NIGHTLY).expect("YAML");
    let matrix = nightly["jobs"]["fuzz"]["strategy"]["matrix"]["target"].as_array().expect("targets");
    let nightly: Vec<&str> = matrix.iter().map(|target| target.as_str().expect("a name")).collect();
    let manifest = parse_toml(include_str!("../../fuzz/Cargo.toml"));
    let targets = manifest["bin"].as_array().expect("targets").iter();
    let targets: Vec<&str> = targets.map(|target| target["name"].as_str().expect("a name")).collect();
    assert_eq!(nightly, targets);
    for target in targets {
        assert!(exists(&format!("fuzz/fuzz_targets/{target}.rs")), "{target} has no file");
        let seeds = std::fs::read_dir(format!("../fuzz/corpus/{target}")).expect("seeds");
        assert!(seeds.count() >= 3, "{target} has fewer than 3 seeds");
    }
    assert!(manifest["workspace"].as_table().expect("a table").is_empty(), "fuzz/ is not part of this workspace");
}

#[test]
fn the_workflow_runs_ci_and_every_script_of_an_installation() {
    let commands = commands(WORKFLOW);
    let words = scripts(&commands);
    for needed in [".ci/run", "scripts/wheel.sh", "scripts/try_binary.sh", "scripts/release.sh"] {
        assert!(words.contains(needed), "ci.yml does not run {needed}");
    }
    let lock = parse_toml(include_str!("../../Cargo.lock"));
    let mut packages = lock["package"].as_array().expect("packages").iter();
    let mdbook = packages.find(|package| package["name"].as_str() == Some("mdbook-driver")).expect("mdBook");
    let version = mdbook["version"].as_str().expect("a version");
    assert!(
        commands.iter().any(|command| command.contains(&format!("cargo install mdbook --version {version} "))),
        "the tests build the book with mdBook {version}, and ci.yml with another version"
    );
}
