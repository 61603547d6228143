//! The documents agree with the repository.

use crate::accidental_markup::accidental_markup;
use mdbook_driver::MDBook;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const README: &str = include_str!("../../README.md");
const EMBED: &str = include_str!("../../docs/embed.md");
const TRAPS: &str = include_str!("../../docs/traps.md");

/// The name, manifest and program of a project in examples/embed.
macro_rules! project {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!("../../examples/embed/", $name, "/Cargo.toml")),
            include_str!(concat!("../../examples/embed/", $name, "/src/main.rs")),
        )
    };
}

/// The projects of examples/embed, which `.ci/run` builds and runs: name, manifest, program.
const PROJECTS: [(&str, &str, &str); 5] =
    [project!("slices"), project!("burn"), project!("candle"), project!("own_loss"), project!("with_parts")];

/// Removes the indentation of every line.
fn unindented(text: &str) -> String {
    text.lines().map(|line| format!("{}\n", line.trim_start())).collect()
}

/// The code blocks of a page in a language.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let opening = format!("```{language}\n");
    page.split(&opening).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

#[test]
fn code_on_the_page_about_embedding_is_part_of_the_projects() {
    let programs: Vec<_> = PROJECTS.iter().map(|(_, _, program)| unindented(program)).collect();
    let code = blocks(EMBED, "rust,ignore");
    assert_eq!(code.len(), 7);
    for block in code {
        let found = programs.iter().any(|program| program.contains(&unindented(block)));
        assert!(found, "no program of examples/embed has this part of docs/embed.md:\n{block}");
    }
    let (_, manifest, _) = PROJECTS[0];
    for line in blocks(EMBED, "toml").concat().lines() {
        assert!(manifest.lines().any(|known| known == line), "examples/embed/slices/Cargo.toml has no line {line:?}");
    }
}

#[test]
fn projects_have_one_file_of_at_most_150_lines() {
    for (name, _, program) in PROJECTS {
        let lines = program.lines().count();
        assert!(lines <= 150, "examples/embed/{name}/src/main.rs has {lines} lines");
    }
}

/// The lines that users copy into `Cargo.toml` name existing packages and folders, and optimise the kernels in debug builds.
#[test]
fn packages_in_the_documented_manifests_exist() {
    let packages = [
        ("grpo-core", "../grpo/crates/grpo-core", include_str!("../../crates/grpo-core/Cargo.toml")),
        ("grpo-backend-cpu", "../grpo/crates/backend-cpu", include_str!("../../crates/backend-cpu/Cargo.toml")),
    ];
    for (name, path, manifest) in packages {
        assert!(manifest.contains(&format!("name = \"{name}\"\n")), "{path} is no package {name}");
        assert!(EMBED.contains(&format!("{name} = {{ path = \"{path}\" }}")), "docs/embed.md does not name {name}");
    }
    let front_page = include_str!("../../crates/backend-cpu/README.md");
    let pages = [("docs/embed.md", EMBED), ("backend-cpu", front_page)];
    for (name, text) in pages.into_iter().chain(PROJECTS.map(|(name, manifest, _)| (name, manifest))) {
        assert!(text.contains("[profile.dev.package.grpo-backend-cpu]\nopt-level = 3\n"), "{name} has no profile");
    }
}

#[test]
fn the_readme_names_every_loss() {
    let missing = |loss: &&grpo_core::LossType| !README.contains(&format!("`{}`", loss.name()));
    let missing: Vec<_> = grpo_core::LossType::ALL.iter().filter(missing).collect();
    assert!(missing.is_empty(), "README.md does not name {missing:?}");
}

/// The paths of the Markdown files in a folder and its subfolders.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    files.chain(folders.iter().flat_map(|folder| pages(folder))).collect()
}

/// The targets of the links in a page, without addresses on the web.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    targets.filter(|target| !target.starts_with("http"))
}

#[test]
fn files_that_the_documents_link_to_exist() {
    let mut documents = pages(Path::new("../docs"));
    let top = ["README", "ARCHITECTURE", "BENCHMARKS", "CONTRIBUTING", "CHANGELOG", "SECURITY", "peers/README"];
    documents.extend(top.map(|name| Path::new("..").join(name).with_extension("md")));
    let crates = std::fs::read_dir("../crates").unwrap().map(|entry| entry.unwrap().path().join("README.md"));
    documents.extend(crates.filter(|path| path.exists()));
    for path in documents {
        let text = std::fs::read_to_string(&path).unwrap();
        for target in links(&text) {
            let (file, fragment) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(file.exists(), "{} links to {target}, which is not there", path.display());
            let has_fragment = fragment.is_empty() || has_anchor(&std::fs::read_to_string(&file).unwrap(), fragment);
            assert!(has_fragment, "{} links to {target}, but the page has no such heading", path.display());
        }
    }
}

/// The paths of the files and folders in a folder and its subfolders.
fn tree(folder: &Path) -> Vec<PathBuf> {
    let entries: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let below = entries.iter().filter(|path| path.is_dir()).flat_map(|folder| tree(folder)).collect();
    [entries, below].concat()
}

/// Returns the rows of the table of crates: name and used crates.
fn rows_of_crates(page: &'static str) -> Vec<(&'static str, Vec<&'static str>)> {
    let (_, table) = page.split_once("| crate | uses | purpose |\n|---|---|---|\n").unwrap();
    let names = |cell: &'static str| -> Vec<&'static str> { cell.split('`').skip(1).step_by(2).collect() };
    let rows = table.lines().take_while(|line| line.starts_with('|')).map(|line| line.split('|').collect::<Vec<_>>());
    rows.map(|cells| (names(cells[1])[0], names(cells[2]))).collect()
}

/// Returns the crates of the workspace that a crate names in `[dependencies]`, by the names of their folders.
fn dependencies(name: &str, folders: &[String]) -> Vec<String> {
    let text = std::fs::read_to_string(Path::new("../crates").join(name).join("Cargo.toml")).unwrap();
    let manifest: toml::Table = text.parse().unwrap();
    let used = manifest.get("dependencies").and_then(toml::Value::as_table).map(|table| table.keys().cloned());
    let folder =
        |key: String| folders.iter().find(|folder| key == **folder || key == format!("grpo-{folder}")).cloned();
    used.into_iter().flatten().filter_map(folder).collect()
}

#[test]
fn the_table_of_crates_is_in_the_order_of_dependencies() {
    const PAGE: &str = include_str!("../../ARCHITECTURE.md");
    let rows = rows_of_crates(PAGE);
    let entries = std::fs::read_dir("../crates").unwrap().map(|entry| entry.unwrap().path());
    let crates = entries.filter(|path| path.join("Cargo.toml").exists());
    let mut folders: Vec<String> =
        crates.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
    folders.sort();
    let mut listed: Vec<&str> = rows.iter().map(|(name, _)| *name).collect();
    listed.sort();
    assert_eq!(listed, folders, "the table of ARCHITECTURE.md must list every crate once");
    // All crates that a crate depends on, directly or not.
    let mut below = BTreeMap::<String, BTreeSet<String>>::new();
    for (name, uses) in &rows {
        let direct = dependencies(name, &folders);
        for used in &direct {
            assert!(below.contains_key(used), "{name} uses {used}, which must stand above it");
        }
        let implied = |used: &String| direct.iter().any(|other| other != used && below[other].contains(used));
        let shown: BTreeSet<&str> = direct.iter().filter(|used| !implied(used)).map(String::as_str).collect();
        assert_eq!(uses.iter().copied().collect::<BTreeSet<_>>(), shown, "the crates that {name} uses");
        let all = direct.iter().flat_map(|used| below[used].iter().chain([used])).cloned().collect();
        below.insert((*name).to_owned(), all);
    }
}

#[test]
fn files_that_the_description_of_the_architecture_names_exist() {
    const PAGE: &str = include_str!("../../ARCHITECTURE.md");
    let files: Vec<PathBuf> =
        ["crates", "tests", "examples", "docs"].iter().flat_map(|name| tree(&Path::new("..").join(name))).collect();
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let page = PAGE.replace("<br/>", " ");
    let words = page.split(|c| !is_part(c)).map(|word| word.trim_end_matches('.'));
    let named: Vec<&str> = words
        .filter(|word| [".rs", ".md", ".py", ".txt", "/"].iter().any(|end| word.ends_with(end)) && word.len() > 1)
        .collect();
    assert!(named.len() > 20, "{}", named.len());
    for name in named {
        let found = files.iter().any(|path| path.ends_with(name)) || Path::new("..").join(name).exists();
        assert!(found, "ARCHITECTURE.md names {name}, which does not exist");
    }
}

/// Returns the anchor that GitHub and mdBook give to a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Returns `true` if a page has an anchor.
fn has_anchor(page: &str, fragment: &str) -> bool {
    let headings = page.lines().filter_map(|line| line.strip_prefix('#').map(|rest| rest.trim_start_matches('#')));
    headings.map(anchor).any(|anchor| anchor == fragment)
}

/// Builds the book and checks that it has every page and no link that leads nowhere, also within a page.
#[test]
fn the_book_has_every_page_and_its_links_lead_somewhere() {
    let (docs, target) = (Path::new("../docs"), tempfile::tempdir().unwrap());
    let mut book = MDBook::load(docs).unwrap();
    book.config.build.build_dir = target.path().into();
    book.build().unwrap();
    let html = |page: &Path| std::fs::read_to_string(target.path().join(page).with_extension("html"));
    for page in pages(docs) {
        let page = page.strip_prefix(docs).unwrap();
        if page == Path::new("SUMMARY.md") {
            continue;
        }
        let text = html(page).unwrap_or_else(|_| panic!("SUMMARY.md lacks {}", page.display()));
        let (_, content) = text.split_once("<main>").unwrap();
        let (content, _) = content.split_once("</main>").unwrap();
        for link in content.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            if link.starts_with("http") {
                continue;
            }
            let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
            let folder = page.parent().unwrap();
            // A page of the book, or a file of the repository, for which mdBook writes .html instead of .md.
            let inside =
                target.path().join(if path.is_empty() { page.with_extension("html") } else { folder.join(path) });
            let outside = docs.join(folder).join(path);
            let source = outside.with_extension("md");
            let found = inside.exists() || outside.exists() || source.exists();
            assert!(found, "{} links to {link}, which is not there", page.display());
            let has_fragment = match std::fs::read_to_string(&inside) {
                _ if fragment.is_empty() => true,
                Ok(text) => text.contains(&format!("id=\"{fragment}\"")),
                Err(_) => has_anchor(&std::fs::read_to_string(&source).unwrap(), fragment),
            };
            assert!(has_fragment, "{} links to {link}, but the page has no such heading", page.display());
        }
    }
}

#[test]
fn no_sentence_of_the_documents_is_rendered_as_a_list_or_a_heading() {
    let folders = ["../docs", "../crates", "../examples", "../tests", "../peers"].map(Path::new);
    let top = ["README.md", "ARCHITECTURE.md", "BENCHMARKS.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let documents = folders.iter().flat_map(|folder| pages(folder)).chain(top.map(|name| Path::new("..").join(name)));
    let mut count = 0;
    for path in documents.filter(|path| !path.ends_with("SUMMARY.md")) {
        let lines = accidental_markup(&std::fs::read_to_string(&path).unwrap());
        assert!(lines.is_empty(), "{} continues a sentence with {lines:?}", path.display());
        count += 1;
    }
    assert!(count > 80, "{count}");
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
