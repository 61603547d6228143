//! Files that import each other in a circle.
//!
//! A file uses another one if it imports an item that the other file defines, or writes a path to it. Re-exports are resolved to the file that
//! defines the item. A declaration `mod` and a re-export alone are no use. Items with `#[cfg(test)]` are ignored, and so are modules that a macro
//! declares: the losses of `grpo-core`.

use crate::tokens::{Token, tokens};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Largest number of files in a circle.
const MOST: usize = 3;

/// The numbers of files of the larger circles, by crate. Entries only fall. The circle of `grpo-core` stays: the keys of a loss are a part of
/// `LossConfig`, and the formula in the file of the loss reads them.
const KNOWN: &[(&str, &[usize])] = &[
    ("backend-cpu", &[6, 12]),
    ("backend-tpu", &[4]),
    ("grpo-core", &[6]),
    ("models", &[5]),
    ("pjrt", &[7, 9]),
    ("stablehlo", &[5, 9]),
];

type Names = Vec<String>;

/// A module of a crate.
#[derive(Default)]
struct Module {
    file: PathBuf,
    /// The names of items and of modules that are defined here.
    defined: BTreeSet<String>,
    /// The paths of imports and re-exports, by the name in this module.
    aliases: BTreeMap<String, Names>,
    /// The paths whose items are all imported or re-exported.
    globs: Vec<Names>,
    /// `true` if a macro may define further items.
    has_macro: bool,
    /// The paths that are used: of imports, and in code.
    used: BTreeSet<Names>,
}

/// The modules of a crate, by the path from its root.
type Modules = BTreeMap<Names, Module>;

/// Adds a module and its child modules. `folder` has the files of the child modules.
fn add(modules: &mut Modules, at: &[String], code: &[Token], file: &Path, folder: &Path) {
    let mut module = Module { file: file.to_owned(), ..Module::default() };
    for item in code.split_inclusive(|token| matches!(token, Token::Mark(';') | Token::Group('{', _))) {
        // Attributes and the visibility come first.
        let is_test = item.iter().any(|token| matches!(token, Token::Group('[', words) if Token::is_cfg_test(words)));
        let start = item.iter().position(|token| matches!(token, Token::Word(_))).unwrap_or(item.len());
        let (is_public, item) = match &item[start..] {
            [Token::Word(word), Token::Group('(', _), rest @ ..] if word == "pub" => (true, rest),
            [Token::Word(word), rest @ ..] if word == "pub" => (true, rest),
            rest => (false, rest),
        };
        match item {
            _ if is_test => {}
            [Token::Word(word), rest @ ..] if word == "use" => imports(&mut module, &[], rest, !is_public),
            [Token::Word(word), Token::Word(name), content] if word == "mod" => {
                let (child, below) = ([at, std::slice::from_ref(name)].concat(), folder.join(name));
                match content {
                    Token::Group(_, code) => add(modules, &child, code, file, &below),
                    _ => {
                        let files = [below.with_extension("rs"), below.join("mod.rs")];
                        read(modules, &child, files.iter().find(|file| file.exists()).expect("a module"), &below);
                    }
                }
                module.defined.insert(name.clone());
            }
            item => {
                module.has_macro |= matches!(item, [Token::Word(word), Token::Mark('!'), ..] if word != "macro_rules");
                module.defined.extend(name(item).map(str::to_owned));
                paths(item, &mut module.used);
            }
        }
    }
    modules.insert(at.to_vec(), module);
}

fn read(modules: &mut Modules, at: &[String], file: &Path, folder: &Path) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    add(modules, at, &tokens(&text), file, folder);
}

/// Returns the name of an item: the first word after its keywords.
fn name(item: &[Token]) -> Option<&str> {
    let words = item.iter().filter_map(|token| match token {
        Token::Word(word) => Some(&**word),
        _ => None,
    });
    let keywords = ["fn", "struct", "enum", "union", "trait", "type", "const", "static", "macro_rules"];
    let mut words = words.skip_while(|word| ["unsafe", "async", "extern"].contains(word)).peekable();
    words.peek().filter(|word| keywords.contains(*word))?;
    words.find(|word| !keywords.contains(word) && *word != "unsafe" && *word != "extern")
}

/// Adds the imports of a tree below the path `before`.
fn imports(module: &mut Module, before: &[String], tree: &[Token], is_private: bool) {
    let mut path = before.to_vec();
    let mut name = None;
    for (i, token) in tree.iter().enumerate() {
        match token {
            Token::Word(word) if word == "as" => {
                let Some(Token::Word(renamed)) = tree.get(i + 1) else { panic!("a name after `as`: {tree:?}") };
                name = Some(renamed.clone());
                break;
            }
            // `a::{self, ..}` imports the module `a` itself.
            Token::Word(word) if word == "self" && !path.is_empty() => {}
            Token::Word(word) => path.push(word.clone()),
            Token::Mark('*') => return module.globs.push(path),
            Token::Group('{', trees) => {
                let trees = trees.split(|token| matches!(token, Token::Mark(',')));
                return trees.filter(|tree| !tree.is_empty()).for_each(|tree| imports(module, &path, tree, is_private));
            }
            _ => {}
        }
    }
    let name = name.or_else(|| path.last().cloned()).expect("a path");
    if is_private {
        module.used.insert(path.clone());
    }
    module.aliases.insert(name, path);
}

/// Adds the paths in code, also those in macros. A path of one segment is any name that is no field or method.
fn paths(code: &[Token], used: &mut BTreeSet<Names>) {
    let (mut path, mut colons) = (Names::new(), 0);
    for (i, token) in code.iter().enumerate() {
        match token {
            Token::Mark(':') if !path.is_empty() => colons += 1,
            Token::Word(word) if colons == 2 => {
                path.push(word.clone());
                colons = 0;
            }
            _ => {
                used.extend(Some(std::mem::take(&mut path)).filter(|path| !path.is_empty()));
                colons = 0;
                match token {
                    Token::Word(word) if i == 0 || code[i - 1] != Token::Mark('.') => path.push(word.clone()),
                    Token::Group(_, code) => paths(code, used),
                    _ => {}
                }
            }
        }
    }
    used.extend(Some(path).filter(|path| !path.is_empty()));
}

/// Returns the module that defines the item at a path, which module `at` writes; `None` for other crates, local names and primitive types.
fn resolve(modules: &Modules, at: &[String], path: &[String], depth: usize) -> Option<Names> {
    let first = path.first()?;
    if depth == 0 {
        return None;
    }
    let module = modules.get(at)?;
    match &**first {
        "crate" => return item(modules, &[], &path[1..], depth),
        "self" => return item(modules, at, &path[1..], depth),
        "super" => {
            let supers = path.iter().take_while(|word| *word == "super").count();
            return item(modules, at.get(..at.len().checked_sub(supers)?)?, &path[supers..], depth);
        }
        name if module.defined.contains(name) => return item(modules, at, path, depth),
        _ => {}
    }
    if let Some(alias) = module.aliases.get(first) {
        // `use name::{..}` of another crate is an alias of itself.
        let target = [&alias[..], &path[1..]].concat();
        return if alias[0] == *first { None } else { resolve(modules, at, &target, depth - 1) };
    }
    module.globs.iter().find_map(|glob| resolve(modules, at, &[&glob[..], path].concat(), depth - 1))
}

/// Returns the module that defines the item at a path below module `at`.
fn item(modules: &Modules, at: &[String], path: &[String], depth: usize) -> Option<Names> {
    // A path to a module alone uses nothing.
    let first = path.first()?;
    let child = [at, std::slice::from_ref(first)].concat();
    let module = modules.get(at)?;
    if modules.contains_key(&child) {
        if path.len() > 1 {
            return item(modules, &child, &path[1..], depth);
        }
    } else if module.defined.contains(first) {
        return Some(at.to_vec());
    }
    match module.aliases.get(first) {
        Some(alias) => resolve(modules, at, &[&alias[..], &path[1..]].concat(), depth.checked_sub(1)?),
        None => {
            let globs = module.globs.iter();
            let found =
                globs.clone().find_map(|glob| resolve(modules, at, &[&glob[..], path].concat(), depth.checked_sub(1)?));
            found.or_else(|| module.has_macro.then(|| at.to_vec()))
        }
    }
}

/// Returns the used files of every file, with one used path for each.
fn uses(modules: &Modules) -> BTreeMap<&Path, BTreeMap<&Path, String>> {
    let mut uses: BTreeMap<&Path, BTreeMap<&Path, String>> = BTreeMap::new();
    for (at, module) in modules {
        let of_file = uses.entry(&module.file).or_default();
        for path in &module.used {
            let Some(target) = resolve(modules, at, path, 16) else { continue };
            let file = &*modules[&target].file;
            if file != module.file {
                of_file.entry(file).or_insert_with(|| path.join("::"));
            }
        }
    }
    uses
}

/// Returns the files that `from` reaches.
fn reached<'a>(uses: &BTreeMap<&'a Path, BTreeMap<&'a Path, String>>, from: &'a Path) -> BTreeSet<&'a Path> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(file) = next.pop() {
        let new: Vec<_> = uses[file].keys().filter(|file| !reached.contains(*file)).collect();
        reached.extend(new.iter().copied());
        next.extend(new);
    }
    reached
}

/// Returns the circles of a crate that have more than [`MOST`] files.
fn circles<'a>(uses: &BTreeMap<&'a Path, BTreeMap<&'a Path, String>>) -> BTreeSet<BTreeSet<&'a Path>> {
    let reached: BTreeMap<_, _> = uses.keys().map(|file| (*file, reached(uses, file))).collect();
    let circle = |file: &&'a Path| -> BTreeSet<_> {
        reached[file].iter().copied().filter(|other| reached[other].contains(file)).collect()
    };
    uses.keys().map(circle).filter(|files| files.len() > MOST).collect()
}

fn modules(source: &Path) -> Modules {
    let mut modules = Modules::new();
    let root = ["lib.rs", "main.rs"].map(|root| source.join(root));
    read(&mut modules, &[], root.iter().find(|root| root.exists()).expect("a crate root"), source);
    modules
}

#[test]
fn files_do_not_import_each_other_in_large_circles() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut folders: Vec<_> = std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let (mut found, mut text) = (Vec::new(), String::new());
    for folder in folders {
        let (source, name) = (folder.join("src"), folder.file_name().unwrap().to_str().unwrap());
        let modules = modules(&source);
        let uses = uses(&modules);
        let circles = circles(&uses);
        let short = |file: &Path| file.strip_prefix(&source).unwrap().display().to_string();
        for circle in &circles {
            text += &format!("\n{name}, {} files:\n", circle.len());
            for file in circle {
                let edges = uses[file].iter().filter(|(to, _)| circle.contains(*to));
                edges.for_each(|(to, path)| text += &format!("  {} -> {} by {path}\n", short(file), short(to)));
            }
        }
        let mut sizes: Vec<usize> = circles.iter().map(BTreeSet::len).collect();
        sizes.sort_unstable();
        if !sizes.is_empty() {
            found.push((name.to_owned(), sizes));
        }
    }
    let known: Vec<_> = KNOWN.iter().map(|(name, sizes)| ((*name).to_owned(), sizes.to_vec())).collect();
    let list: String = found.iter().map(|(name, sizes)| format!("    (\"{name}\", &{sizes:?}),\n")).collect();
    assert!(found == known, "the circles are not those of KNOWN, which only falls; found:\n{list}{text}");
}

#[test]
fn imports_are_resolved_to_the_file_that_defines_the_item() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    for (name, text) in [
        ("lib.rs", "mod a; mod b; mod c; mod d; mod unused; pub use a::A; pub use d::*;"),
        (
            "a.rs",
            "use crate::b::{self, Other as Renamed}; fn f() { b::B } pub struct A; #[cfg(test)] mod tests { use crate::c::C; }",
        ),
        ("b.rs", "mod inner { pub struct B(crate::c::C); pub struct Other; } pub use inner::*;"),
        ("c.rs", "pub struct C; impl C { fn f() { vec![super::D]; } }"),
        ("d.rs", "pub const fn D(a: crate::A) {}"),
        ("unused.rs", "use crate::A; // crate::c::C"),
    ] {
        std::fs::write(file(name), text).unwrap();
    }
    let modules = modules(folder.path());
    let uses = uses(&modules);
    let found: Vec<_> =
        uses.iter().flat_map(|(from, to)| to.keys().map(|to| (from.to_path_buf(), to.to_path_buf()))).collect();
    let expected = [("a.rs", "b.rs"), ("b.rs", "c.rs"), ("c.rs", "d.rs"), ("d.rs", "a.rs"), ("unused.rs", "a.rs")];
    assert_eq!(found, expected.map(|(from, to)| (file(from), file(to))));
    let circle = ["a.rs", "b.rs", "c.rs", "d.rs"].map(file);
    assert_eq!(circles(&uses), BTreeSet::from([circle.iter().map(|file| &**file).collect()]));
}
