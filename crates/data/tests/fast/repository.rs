//! Data sets that are folders, or names on a hub.

use crate::support::{NoHub, lines, numbers};
use grpo_data::{DataConfig, DataFile, DatasetHub, HubError, data_files};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn files(names: &[&str], readme: Option<&str>, config: Option<&str>, split: &str) -> Result<String, String> {
    data_files(names, readme, config, split).map(|files| files.join(" "))
}

#[track_caller]
fn refused(names: &[&str], readme: Option<&str>, config: Option<&str>, split: &str, parts: &[&str]) {
    let reason = files(names, readme, config, split).unwrap_err();
    for part in parts {
        assert!(reason.contains(part), "{part:?} is not in: {reason}");
    }
}

#[test]
fn configurations_of_the_readme_select_files() {
    let readme = "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    \
                  path:\n    - main/test-*\n- config_name: socratic\n  data_files: socratic/*\n- config_name: nested\n  data_dir: nested\n---\n# x\n";
    let names = [
        ".gitattributes",
        "README.md",
        "main/test-00000-of-00001.parquet",
        "main/train-00000-of-00002.parquet",
        "main/train-00001-of-00002.parquet",
        "nested/dev.jsonl",
        "nested/train.jsonl",
        "socratic/a.jsonl",
        "socratic/b/c.jsonl",
    ];
    let of = |config, split| files(&names, Some(readme), config, split);
    let train = "main/train-00000-of-00002.parquet main/train-00001-of-00002.parquet";
    assert_eq!(of(Some("main"), "train").unwrap(), train);
    assert_eq!(of(Some("main"), "test").unwrap(), "main/test-00000-of-00001.parquet");
    assert_eq!(of(Some("socratic"), "train").unwrap(), "socratic/a.jsonl", "a star does not match a slash");
    assert_eq!(of(Some("nested"), "validation").unwrap(), "nested/dev.jsonl");
    refused(&names, Some(readme), None, "train", &["several configurations", "main, socratic, nested", "`config`"]);
    refused(&names, Some(readme), Some("Main"), "train", &["no configuration \"Main\"", "main, socratic, nested"]);
    refused(&names, Some(readme), Some("main"), "dev", &["no split \"dev\"", "train, test"]);
    let marked = readme.replace("config_name: socratic", "config_name: socratic\n  default: true");
    assert_eq!(files(&names, Some(&marked), None, "train").unwrap(), "socratic/a.jsonl");
    let twice = marked.replace("config_name: main", "config_name: main\n  default: true");
    refused(&names, Some(&twice), None, "train", &["several configurations as the default"]);
}

#[test]
fn broken_headers_and_patterns_are_named() {
    let refuses = |header: &str, part: &str| {
        let readme = format!("---\nconfigs:\n- config_name: a\n{header}---\n");
        refused(&["a.jsonl"], Some(&readme), None, "train", &[part]);
    };
    refuses("  data_files: {a: 1}\n", "expected `data_files` to be a pattern");
    refuses("  data_files: \"[\"\n", "expected a pattern");
    refuses("  data_files: b.jsonl\n", "no file matches b.jsonl of the split \"train\"");
    refuses("  data_files: ../a.jsonl\n", "no file matches ../a.jsonl");
    refuses(&format!("  data_files: {}\n", "a*".repeat(400)), "a pattern of at most 256 bytes");
    refuses("  data_dir: b\n", "no file in the folder \"b\"");
    refuses("  data_files: a.jsonl\n- 7: [\n", "the header of README.md: ");
    // Without an end the lines are text.
    assert_eq!(files(&["a.jsonl"], Some("---\nconfigs: 7\n"), None, "train").unwrap(), "a.jsonl");
}

#[test]
fn names_of_files_and_folders_select_splits() {
    let cases: [(&[&str], &str, &str); 12] = [
        (
            &["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "test.jsonl"],
            "test",
            "data/test-00000-of-00001.parquet",
        ),
        (
            &["data/sft-train-00000-of-00001-0a1b.parquet", "x/train.jsonl"],
            "sft-train",
            "data/sft-train-00000-of-00001-0a1b.parquet",
        ),
        (&["train.jsonl", "test.jsonl"], "train", "train.jsonl"),
        (
            &["my_dev.jsonl", "my_training_1.jsonl", "my_training_2.jsonl"],
            "train",
            "my_training_1.jsonl my_training_2.jsonl",
        ),
        (&["my_dev.jsonl", "my_training_1.jsonl"], "validation", "my_dev.jsonl"),
        (
            &["train/a.jsonl", "train/b/c.jsonl", "test/a.jsonl", "train.jsonl"],
            "train",
            "train/a.jsonl train/b/c.jsonl",
        ),
        (&["x/my-eval/a.jsonl", "x/other/a.jsonl"], "test", "x/my-eval/a.jsonl"),
        (
            &["rows.jsonl", "more/rows.jsonl", ".hidden/rows.jsonl", "__x__/rows.jsonl"],
            "train",
            "more/rows.jsonl rows.jsonl",
        ),
        (&["restrained.jsonl", "b.jsonl"], "train", "b.jsonl restrained.jsonl"),
        (&["a.jsonl", "b.jsonl", "c.parquet", "notes.txt"], "train", "a.jsonl b.jsonl"),
        (&["a.json", "b.parquet", "config.json", "dataset_infos.json"], "train", "b.parquet"),
        (&["main/train-0.parquet", "main/test-0.parquet"], "train", "main/train-0.parquet"),
    ];
    for (names, split, expected) in cases {
        assert_eq!(files(names, None, None, split).unwrap(), expected, "{names:?}");
    }
    let folders = ["one/train.jsonl", "one/test.jsonl", "two/train.jsonl"];
    assert_eq!(files(&folders, None, Some("two"), "train").unwrap(), "two/train.jsonl");
    refused(&folders, None, Some("three"), "train", &["no configuration \"three\"", "no folder three"]);
    refused(&["train.csv", "test.csv"], None, None, "train", &["expected Parquet, JSON lines or JSON, got train.csv"]);
    refused(&["README.md", "script.py"], Some(""), None, "train", &["expected Parquet", "script.py"]);
    refused(&["README.md"], None, None, "train", &["no data files"]);
    refused(&["train.jsonl"], None, None, "test", &["no split \"test\"", "the splits are train"]);
}

/// A hub with the data sets in the folders of `root`.
struct FolderHub {
    root: TempDir,
    fetched: RefCell<Vec<String>>,
}

impl FolderHub {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let gsm8k = root.path().join("openai/gsm8k");
        std::fs::create_dir_all(gsm8k.join("main")).unwrap();
        for (name, rows) in [("train-0", 0..9), ("train-1", 9..20), ("test-0", 20..25)] {
            std::fs::write(gsm8k.join(format!("main/{name}.jsonl")), numbers(rows)).unwrap();
        }
        let readme = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n";
        std::fs::write(gsm8k.join("README.md"), readme).unwrap();
        Self { root, fetched: RefCell::default() }
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
}

impl DatasetHub for FolderHub {
    fn list(&self, name: &str, revision: Option<&str>) -> Result<Vec<String>, HubError> {
        if revision == Some("v9") {
            return Err("no revision v9".into());
        }
        if !self.folder(name).is_dir() {
            return Err(format!("no data set {name}").into());
        }
        Ok(["README.md", "main/test-0.jsonl", "main/train-0.jsonl", "main/train-1.jsonl"].map(str::to_owned).into())
    }

    fn fetch(&self, name: &str, _: Option<&str>, files: &[String]) -> Result<Vec<PathBuf>, HubError> {
        self.fetched.borrow_mut().extend(files.iter().cloned());
        Ok(files.iter().map(|file| self.folder(name).join(file)).collect())
    }
}

fn parsed(value: Value) -> DataConfig {
    serde_json::from_value(value).unwrap()
}

fn error(hub: &dyn DatasetHub, files: Value) -> String {
    parsed(json!({ "files": files })).expand_paths(hub).unwrap_err().to_string()
}

#[test]
fn names_of_data_sets_become_files_of_their_splits() {
    let hub = FolderHub::new();
    for name in ["openai/gsm8k", "hf://datasets/openai/gsm8k"] {
        let mut config = parsed(json!({"files": name, "eval_files": {"path": name, "config": "main"}}));
        config.expand_paths(&hub).unwrap();
        let file = |name: &str| DataFile {
            name: Some("gsm8k".into()),
            ..DataFile::new(hub.folder("openai/gsm8k").join(name))
        };
        assert_eq!(config.files, [file("main/train-0.jsonl"), file("main/train-1.jsonl")]);
        assert_eq!(config.eval_files, [file("main/test-0.jsonl")]);
        config.validate().unwrap();
        config.check_files().unwrap();
    }
    let once = ["README.md", "main/train-0.jsonl", "main/train-1.jsonl", "README.md", "main/test-0.jsonl"];
    assert_eq!(*hub.fetched.borrow(), [once, once].concat());
    // The weight of a data set is the sum of the weights of its files.
    let mut config = parsed(json!({"files": [
        {"path": "openai/gsm8k", "weight": 3, "name": "school"},
        {"path": "openai/gsm8k", "weight": 1, "split": "test"},
    ]}));
    config.expand_paths(&hub).unwrap();
    let found: Vec<_> = config.files.iter().map(|file| (file.weight.unwrap(), file.source())).collect();
    assert_eq!(found, [(1.5, "school".into()), (1.5, "school".into()), (1.0, "gsm8k".into())]);
    assert!(config.files.iter().all(|file| file.split.is_none() && file.config.is_none()));
}

#[test]
fn errors_about_data_sets_name_what_exists() {
    let hub = FolderHub::new();
    for (files, parts) in [
        (json!("openai/other"), &["`data.files`", "no such file or folder here", "no data set openai/other"][..]),
        (json!({"path": "openai/gsm8k", "revision": "v9"}), &["no revision v9"]),
        (
            json!({"path": "openai/gsm8k", "split": "dev"}),
            &["data set openai/gsm8k", "no split \"dev\"", "train, test"],
        ),
        (json!({"path": "openai/gsm8k", "config": "x"}), &["no configuration \"x\"", "main"]),
        (json!("hf://datasets/gsm8k"), &["expected hf://datasets/OWNER/NAME"]),
        (json!("hf://datasets/openai/gsm8k/main"), &["expected hf://datasets/OWNER/NAME"]),
        (json!("hf://datasets/../gsm8k"), &["expected hf://datasets/OWNER/NAME"]),
    ] {
        let text = error(&hub, files);
        assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} are not in: {text}");
    }
    // Other texts are paths.
    for path in ["rows", "a/b/c", "data/rows.jsonl", "../gsm8k", "/openai/gsm8k", "a/b.parquet"] {
        let mut config = parsed(json!({ "files": path }));
        config.expand_paths(&NoHub).unwrap();
        assert_eq!(config.files, [DataFile::new(path)]);
        assert!(config.check_files().unwrap_err().to_string().contains("`data.files`"));
    }
}

#[test]
fn a_folder_is_a_data_set_and_takes_precedence() {
    let hub = FolderHub::new();
    let folder = hub.folder("openai/gsm8k");
    let mut config = parsed(json!({"files": folder, "eval_files": folder}));
    config.expand_paths(&NoHub).unwrap();
    assert_eq!(config.files.iter().map(DataFile::source).collect::<Vec<_>>(), ["gsm8k", "gsm8k"]);
    assert_eq!(config.files[1].path, folder.join("main/train-1.jsonl"));
    assert_eq!(config.eval_files[0].path, folder.join("main/test-0.jsonl"));
    let text = error(&NoHub, json!({"path": folder, "revision": "main"}));
    assert!(text.contains("it is a folder here, which has no `revision`"), "{text}");
    let text = error(&NoHub, json!({"path": folder.join("main/test-0.jsonl"), "split": "test"}));
    assert!(text.contains("it is a file here, which has no `split`"), "{text}");
    let empty = tempfile::tempdir().unwrap();
    assert!(error(&NoHub, json!(empty.path())).contains("there is no file in the folder"));
}

#[test]
fn json_lists_are_rows() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [json!({"prompt": "a, [b]\n{c}", "n": 1}), json!({"prompt": "d"})];
    let pretty = serde_json::to_string_pretty(&rows).unwrap();
    let long = "[{\"prompt\": \"a\", \"answer\": 123456789012345678901234567890}]";
    let read = |text: &str| {
        let path = folder.path().join("rows.json");
        std::fs::write(&path, text).unwrap();
        let config = DataConfig { shuffle: false, ..crate::support::without_split(path) };
        crate::support::open(&config).map_err(|error| error.to_string()).map(|(mut data, report)| {
            use grpo_data::Dataset;
            assert_eq!(report.files[0].rows, report.training());
            data.next_batch(report.training()).unwrap()
        })
    };
    for text in [pretty.clone(), format!("\u{feff}\n {pretty} \n"), lines(&rows)] {
        let items = read(&text).unwrap();
        assert_eq!(crate::support::prompts(&items), ["a, [b]\n{c}", "d"], "{text}");
        assert_eq!(items[0].columns["n"], 1);
    }
    assert_eq!(read(long).unwrap()[0].answer.as_deref(), Some("123456789012345678901234567890"), "no digit is lost");
    for (text, part) in [
        ("[]", "no row is left"),
        ("[{\"prompt\": \"a\"}", "line 1: expected `,` or `]`"),
        ("[{\"prompt\": \"a\"},", "line 2: expected a JSON object in the list, which is not closed"),
        ("[{\"prompt\": \"a\"} {\"prompt\": \"a\"}]", "line 1: expected `,` or `]`"),
        ("[{\"prompt\": \"a\"}] x", "expected the end of the file"),
        ("[{\"prompt\": }]", "line 1: expected a JSON object in the list: "),
        ("[1]", "line 1: expected a JSON object, got `1`"),
        ("[[{\"prompt\": \"a\"}]]", "got"),
    ] {
        let error = read(text).err().unwrap();
        assert!(error.contains(part), "{text}: {error}");
    }
}

/// A folder of this name exists here, and no file in it: the text may be a path with a mistake or a name on the hub.
#[test]
fn a_name_whose_owner_is_a_folder_here_is_ambiguous() {
    assert!(Path::new("tests").is_dir());
    let text = error(&FolderHub::new(), json!("tests/gsm8k"));
    assert!(
        text.contains("no such file in the folder tests here") && text.contains("hf://datasets/tests/gsm8k"),
        "{text}"
    );
}

/// The expected files are in the order of the rows that `datasets` returns (fixtures/make_splits.py).
#[test]
fn splits_have_the_files_that_datasets_finds() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../fixtures/splits.json")).unwrap();
    let texts = |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap() };
    for case in &cases {
        for (split, expected) in case["splits"].as_object().unwrap() {
            let found = data_files(&texts(&case["names"]), case["readme"].as_str(), case["config"].as_str(), split);
            assert_eq!(found.as_ref(), Ok(&texts(expected)), "{split} of {case}");
        }
    }
    assert!(cases.len() > 15);
}

#[test]
fn folders_of_save_to_disk_are_named_with_the_line_that_converts_them() {
    for (files, split, call) in [
        (&["state.json", "dataset_info.json", "data-00000-of-00001.arrow"][..], None, "load_from_disk(FOLDER).to_json"),
        (
            &["dataset_dict.json", "train/state.json", "train/data-00000-of-00001.arrow", "test/state.json"],
            Some("test"),
            "load_from_disk(FOLDER)[\"test\"].to_json",
        ),
        (&["dataset_dict.json"], None, "load_from_disk(FOLDER)[\"train\"].to_json"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for name in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "{}").unwrap();
        }
        let mut file = json!({"path": folder.path()});
        if let Some(split) = split {
            file["split"] = split.into();
        }
        let text = error(&NoHub, file);
        assert!(text.contains("got a folder of `save_to_disk`, in Arrow") && text.contains(call), "{text}");
    }
}
