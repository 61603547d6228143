//! Ignored tests run with `GRPO_TESTS=all`.

use std::path::{Path, PathBuf};

/// Returns the folders of the sources of test binaries: `src` of each crate, and the folders in its `tests`.
fn binaries() -> Vec<PathBuf> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let folders = |path: &Path| -> Vec<PathBuf> {
        let Ok(entries) = path.read_dir() else { return Vec::new() };
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect()
    };
    let crates = folders(&repository.join("crates"));
    let of_crates = crates.iter().flat_map(|of| [vec![of.join("src")], folders(&of.join("tests"))].concat());
    of_crates.chain(folders(&repository.join("tests"))).collect()
}

fn texts(folder: &Path, texts: &mut String) {
    for entry in folder.read_dir().expect("a folder of sources").map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            self::texts(&entry, texts);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            texts.push_str(&std::fs::read_to_string(entry).unwrap());
        }
    }
}

#[test]
fn every_binary_with_ignored_tests_runs_them_in_the_tier_all() {
    let (ignore, tiers) = (["#[", "ignore"].concat(), ["grpo_testkit::", "tiers!();"].concat());
    let mut found = 0;
    for folder in binaries() {
        let mut text = String::new();
        texts(&folder, &mut text);
        let ignored: Vec<&str> = text.lines().map(str::trim).filter(|line| line.starts_with(&ignore)).collect();
        for line in &ignored {
            assert!(line.starts_with(&format!("{ignore} = \"GRPO_TESTS=all")), "{}: {line}", folder.display());
        }
        assert_eq!(text.contains(&tiers), !ignored.is_empty(), "{}: `{tiers}` is for ignored tests", folder.display());
        found += usize::from(!ignored.is_empty());
    }
    assert!(found > 5, "{found} binaries with ignored tests");
}
