//! Compares keys.txt with the documentation of the structs and with the serialised configuration.

use super::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A field of a struct.
struct Field {
    name: String,
    /// The type name without its wrappers: `LoraConfig` for `Option<LoraConfig>`. A list has no keys.
    of: String,
    is_map: bool,
    is_flattened: bool,
    meaning: String,
}

/// Returns the structs of a source file, in rustfmt's formatting.
fn structs(source: &str) -> String {
    let mut is_inside = false;
    let mut text = String::new();
    for line in source.lines() {
        is_inside |= line.starts_with("pub struct ") && line.ends_with(" {");
        if is_inside {
            text += line;
            text.push('\n');
        }
        is_inside &= line != "}";
    }
    text
}

/// Returns the structs of the crates with structs of the configuration.
fn sources() -> &'static str {
    static SOURCES: OnceLock<String> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let crates = ["run-config", "policy", "sinks", "models", "data", "rewards", "agents", "engines", "grpo-core"];
        let mut folders: Vec<_> = crates.iter().map(|name| source(name).join("src")).collect();
        let mut text = String::new();
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                match path.is_dir() {
                    true => folders.push(path),
                    false => text += &structs(&std::fs::read_to_string(path).unwrap()),
                }
            }
        }
        text
    })
}

/// Returns the path of a file or folder under `crates/`.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// Adds the keys of a struct at `path` in the format of keys.txt.
fn collect(name: &str, path: &str, keys: &mut Vec<String>) {
    for field in fields(sources(), name) {
        if field.of == "LossParameters" {
            // The losses with keys of their own, which `LossConfig` flattens.
            let losses = std::fs::read_to_string(source("grpo-core/src/objective/mod.rs")).unwrap();
            let modules =
                losses.lines().filter_map(|line| line.trim().strip_suffix(" with Parameters,")?.split("::").next());
            for module in modules {
                let text = std::fs::read_to_string(source(&format!("grpo-core/src/objective/{module}.rs"))).unwrap();
                fields(&text, "Parameters").into_iter().for_each(|field| add(field, path, keys));
            }
        } else if field.is_flattened {
            collect(&field.of, path, keys);
        } else {
            add(field, path, keys);
        }
    }
}

fn add(Field { name, of, is_map, meaning, .. }: Field, path: &str, keys: &mut Vec<String>) {
    let path = if path.is_empty() { name } else { format!("{path}.{name}") };
    keys.push(format!("{path}\t{meaning}"));
    // A model is a name or a shape, a mesh is `auto` or its axes, and a threshold is written as one value.
    let of = match &*of {
        "ModelSource" => "ModelConfig",
        "MeshChoice" => "MeshConfig",
        "Threshold" => "",
        of => of,
    };
    collect(of, &if is_map { format!("{path}.*") } else { path }, keys);
}

/// Returns the public fields of a struct in rustfmt's formatting.
fn fields(source: &str, name: &str) -> Vec<Field> {
    let begin = format!("pub struct {name} {{");
    let lines = source.lines().skip_while(|line| *line != begin).skip(1).take_while(|line| *line != "}");
    let (mut fields, mut text, mut renamed, mut is_flattened) = (Vec::new(), Vec::new(), None, false);
    for line in lines.map(str::trim) {
        if let Some(words) = line.strip_prefix("///") {
            text.push(words.trim());
        } else if let Some((_, name)) = line.strip_prefix("#[serde(").and_then(|line| line.split_once("rename = \"")) {
            renamed = name.split('"').next();
        } else if line == "#[serde(flatten)]" {
            is_flattened = true;
        } else if let Some((name, of)) = line.strip_prefix("pub ").and_then(|field| field.split_once(": ")) {
            let of = of.trim_end_matches(',');
            let (is_map, innermost) = (of.starts_with("BTreeMap<"), of.rsplit(['<', ' ']).next().unwrap_or(of));
            fields.push(Field {
                name: renamed.take().unwrap_or(name.trim_start_matches("r#")).to_owned(),
                of: if of.starts_with("Vec<") { "" } else { innermost.trim_end_matches('>') }.to_owned(),
                is_map,
                is_flattened: std::mem::take(&mut is_flattened),
                meaning: first_sentence(&text.join(" ")),
            });
            text.clear();
        }
    }
    fields
}

/// Returns the first sentence of a documentation comment, with Rust's words replaced by those of configurations.
fn first_sentence(text: &str) -> String {
    let end = text.match_indices(['.', ':']).map(|(at, _)| at).find(|at| {
        let (before, after) = (&text[..*at], &text[at + 1..]);
        text[*at..].starts_with('.')
            && (after.is_empty() || after.starts_with(' '))
            && !["e.g", "i.e", "vs"].iter().any(|short| before.ends_with(short))
    });
    let sentence = end.map_or(text, |end| &text[..end]);
    // Links of rustdoc: [`path::Name`], [`name`](where).
    let mut plain = String::new();
    let mut rest = sentence;
    while let Some((before, link)) = rest.split_once("[`") {
        plain.push_str(before);
        let Some((name, after)) = link.split_once("`]") else {
            plain.push_str("[`");
            rest = link;
            break;
        };
        plain.push_str(&format!("`{}`", name.rsplit("::").next().unwrap_or(name)));
        rest = match after.strip_prefix('(').and_then(|target| target.split_once(')')) {
            Some((_, after)) => after,
            None => after,
        };
    }
    plain.push_str(rest);
    plain.replace("`None` (null)", "null").replace("`None`", "null").replace("`Some`", "a value")
}

/// Returns the lines of keys.txt according to the documentation.
pub(super) fn documented() -> Vec<String> {
    let mut lines = Vec::new();
    collect("TrainConfig", "", &mut lines);
    lines
}

#[test]
fn keys_have_the_first_sentences_of_their_documentation() {
    assert_generated("run-config/src/keys.txt", &(documented().join("\n") + "\n"));
}

/// Fails unless a file under `crates/` has this text. With `UPDATE_DOCS=1`, writes the file.
pub(super) fn assert_generated(file: &str, made: &str) {
    let path = source(file);
    if std::env::var("UPDATE_DOCS").as_deref() == Ok("1") {
        std::fs::write(&path, made).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == made, "{file} differs from the code: UPDATE_DOCS=1 cargo test -p grpo-run-config --lib keys");
}

/// Returns the dotted paths of everything in a value, including maps of names as `*`.
fn paths(value: &Value, path: &str, found: &mut Vec<String>) {
    let Value::Object(map) = value else { return };
    for (key, value) in map {
        let here = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        found.push(here.clone());
        paths(value, &here, found);
    }
}

/// Returns a configuration with a value in every section that is off by default.
pub(super) fn everything() -> Value {
    let program = json!({"command": ["true"]});
    let soft = json!({"max_completion_len": 8, "soft_punish_cache": 3, "penalty_factor": 1});
    let rope = json!({"factor": 8, "original_max_position_embeddings": 32});
    json!({
        "lora": {}, "model": {"rope_scaling": rope, "experts": {"shared_expert": {}, "sigmoid": {}, "clamped": {}}, "linear_attention": {}}, "policy": {"mesh": {}}, "rollout": {"mesh": {}, "server": {"base_urls": ["http://localhost"]}},
        "environments": {"any": {"built_in": "calculator"}},
        "rewards": {"json": {}, "length": {"target": 5}, "soft_overlong_punishment": soft, "regex": {"any": {"pattern": "x"}},
            "programs": {"any": program}, "http": {"any": {"url": "http://localhost"}}},
    })
}

#[test]
fn keys_txt_has_every_key_with_its_meaning() {
    let config: TrainConfig = serde_json::from_value(everything()).expect("legal");
    let mut found = Vec::new();
    paths(&serde_json::to_value(&config).unwrap(), "", &mut found);
    let mut found: Vec<String> =
        found.into_iter().filter(|path| !path.ends_with(".any")).map(|path| path.replace(".any.", ".*.")).collect();
    let mut known: Vec<String> = keys().iter().map(|key| key.path.to_owned()).collect();
    known.sort();
    found.sort();
    assert_eq!(known, found);
    for Key { path, meaning } in keys() {
        assert!(meaning.len() > 5 && !meaning.contains("None") && !meaning.contains("[`"), "{path}: {meaning}");
    }
}

#[test]
fn every_key_is_found_from_a_wrong_section() {
    for Key { path, .. } in keys().iter().filter(|key| key.path.contains('.') && !key.path.contains('*')) {
        let name = path.rsplit('.').next().unwrap();
        let is_known = |path: &str| keys().iter().any(|key| key.path == path);
        for wrong in [name.to_owned(), format!("grpo.{name}"), format!("optimizer.{name}")] {
            if is_known(&wrong) {
                continue;
            }
            let layers = grpo_files::Layers::new().set(&[format!("{wrong}=1")]).unwrap();
            let error = layers.resolve::<TrainConfig>().unwrap_err();
            let text = format!("{error}: {}", std::error::Error::source(&error).unwrap());
            let meant = text.split_once("did you mean `").map(|(_, rest)| rest.split('`').next().unwrap());
            let meant = meant.unwrap_or_else(|| panic!("{wrong}: {text}"));
            assert!(is_known(meant) && meant.rsplit('.').next() == Some(name), "{wrong}: {text}");
        }
    }
}

#[test]
fn meanings_of_keys_contain_no_rust_syntax() {
    for (text, sentence) in [
        ("The weight of [`crate::Correct`]: 1 for a right one. More.", "The weight of `Correct`: 1 for a right one"),
        ("Which [rows](there) count, e.g. 0.5 of them", "Which [rows](there) count, e.g. 0.5 of them"),
        ("Bound; `None` (null) is off.", "Bound; null is off"),
        ("One of [`names`](a::b), and", "One of `names`, and"),
    ] {
        assert_eq!(first_sentence(text), sentence);
    }
}
