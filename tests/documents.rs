//! The documents say what the repository does.

const README: &str = include_str!("../README.md");

#[test]
fn the_readme_shows_the_example_that_is_compiled() {
    let example = include_str!("../crates/backend-cpu/examples/host_slices.rs");
    let (_, code) = example.split_once("\n\n").unwrap();
    assert!(README.contains(&format!("```rust\n{code}```")), "README.md and examples/host_slices.rs differ");
}

#[test]
fn files_that_the_documents_link_to_exist() {
    for (name, text) in [("README.md", README), ("ARCHITECTURE.md", include_str!("../ARCHITECTURE.md"))] {
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
        for target in targets.filter(|t| !t.starts_with("http")) {
            assert!(std::path::Path::new("..").join(target).exists(), "{name} links to {target}, which is not there");
        }
    }
}
