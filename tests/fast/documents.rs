//! The documents say what the repository does.

use std::path::Path;

const README: &str = include_str!("../../README.md");
const TRAPS: &str = include_str!("../../docs/traps.md");

#[test]
fn the_readme_shows_the_example_that_is_compiled() {
    let example = include_str!("../../crates/backend-cpu/examples/host_slices.rs");
    let (_, code) = example.split_once("\n\n").unwrap();
    assert!(README.contains(&format!("```rust\n{code}```")), "README.md and examples/host_slices.rs differ");
}

/// What a user copies into `Cargo.toml` names packages and folders that exist, on both pages that show it.
#[test]
fn the_packages_that_a_user_is_to_write_down_exist() {
    let packages = [
        ("grpo-core", "../grpo/crates/grpo-core", include_str!("../../crates/grpo-core/Cargo.toml")),
        ("grpo-backend-cpu", "../grpo/crates/backend-cpu", include_str!("../../crates/backend-cpu/Cargo.toml")),
    ];
    for (name, path, manifest) in packages {
        assert!(manifest.contains(&format!("name = \"{name}\"\n")), "{path} is no package {name}");
        assert!(README.contains(&format!("{name} = {{ path = \"{path}\" }}")), "README.md does not name {name}");
    }
    let (front_page, _) = include_str!("../../crates/backend-cpu/src/lib.rs").split_once("\n#![").unwrap();
    let front_page = front_page.replace("//! ", "");
    for (name, text) in [("README.md", README), ("backend-cpu", &front_page)] {
        assert!(text.contains("[profile.dev.package.grpo-backend-cpu]\nopt-level = 3\n"), "{name} has no profile");
    }
}

#[test]
fn the_readme_names_every_loss() {
    let missing = |loss: &&grpo_core::LossType| !README.contains(&format!("`{}`", loss.name()));
    let missing: Vec<_> = grpo_core::LossType::ALL.iter().filter(missing).collect();
    assert!(missing.is_empty(), "README.md does not name {missing:?}");
}

#[test]
fn files_that_the_documents_link_to_exist() {
    let documents = [
        ("README.md", "..", README),
        ("ARCHITECTURE.md", "..", include_str!("../../ARCHITECTURE.md")),
        ("docs/traps.md", "../docs", TRAPS),
    ];
    for (name, folder, text) in documents {
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
        for target in targets.filter(|t| !t.starts_with("http")) {
            let file = target.split('#').next().unwrap();
            assert!(Path::new(folder).join(file).exists(), "{name} links to {target}, which is not there");
        }
    }
}

/// Sections 1 to 23, each with a list of `path::name`.
#[test]
fn every_trap_names_tests_that_exist() {
    let sections: Vec<&str> = TRAPS.split("\n## ").skip(1).collect();
    assert_eq!(sections.len(), 23);
    for (number, section) in (1..).zip(sections) {
        assert!(
            section.starts_with(&format!("{number}. ")),
            "section {number} begins with {:?}",
            section.lines().next()
        );
        let item = |line: &'static str| line.strip_prefix("* `")?.strip_suffix('`')?.split_once("::");
        let tests: Vec<(&str, &str)> = section.lines().filter_map(item).collect();
        assert!(!tests.is_empty(), "section {number} names no test");
        assert_eq!(tests.len(), section.matches("\n* ").count(), "section {number} lists something else");
        for (path, name) in tests {
            let source = std::fs::read_to_string(Path::new("..").join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
            let (before, _) =
                source.split_once(&format!("fn {name}(")).unwrap_or_else(|| panic!("{path} has no test {name}"));
            let attributes = before.rsplit("}\n\n").next().unwrap();
            assert!(attributes.contains("#[test]") || attributes.contains("#[rstest]"), "{path}: {name} is no test");
        }
    }
}
