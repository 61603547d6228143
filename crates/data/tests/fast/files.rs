//! Order, cursor, splits, weights and filters.

use crate::support::{NoHub, config, file, lines, numbers, open, prompts, without_split, words};
use grpo_data::{DataConfig, DataFile, Dataset, Error, FileDataset, PromptEncoder};
use serde_json::json;
use std::collections::BTreeSet;

#[test]
fn file_datasets_have_every_row_once_per_epoch_and_continue_from_their_cursor() {
    let (_folder, first) = file("a.jsonl", numbers(0..120));
    let (_other, second) = file("b.jsonl", numbers(120..200));
    let config = DataConfig { files: vec![DataFile::new(first), DataFile::new(second)], ..DataConfig::default() };
    let (mut rows, report) = open(&config).unwrap();
    assert_eq!((report.files[0].rows, report.files[1].rows), (120, 80));
    let size = report.training();
    assert!((170..190).contains(&size), "{report}");
    let (first, second) = (prompts(&rows.next_batch(size).unwrap()), prompts(&rows.next_batch(size).unwrap()));
    let set = |prompts: &[String]| prompts.iter().cloned().collect::<BTreeSet<_>>();
    assert_eq!((set(&first).len(), set(&first)), (size, set(&second)));
    assert_ne!(first, second, "every epoch has an order of its own");

    let (mut resumed, _) = open(&config).unwrap();
    resumed.set_cursor(size as u64 + 17);
    assert_eq!(prompts(&resumed.next_batch(9).unwrap()), second[17..26]);
    assert_eq!(resumed.cursor(), size as u64 + 26);
    let (mut other, _) = FileDataset::open(&config, 8, &words(false)).unwrap();
    assert_ne!(prompts(&other.next_batch(size).unwrap()), first);

    let (mut in_order, _) = open(&DataConfig { shuffle: false, ..config }).unwrap();
    let in_order = prompts(&in_order.next_batch(size).unwrap());
    let number = |prompt: &String| prompt[7..].parse::<u32>().unwrap();
    assert!(in_order.is_sorted_by_key(number) && set(&in_order) == set(&first));
}

#[test]
fn held_out_rows_are_independent_of_the_seed_and_never_trained_on() {
    let (_folder, path) = file("rows.jsonl", numbers(0..300));
    let (mut rows, report) = open(&config(&path)).unwrap();
    let all = prompts(&rows.held_out(0).unwrap());
    assert_eq!(all.len(), report.held_out());
    assert!((15..50).contains(&all.len()));
    assert_eq!(prompts(&rows.held_out(5).unwrap()), all[..5]);
    let trained = prompts(&rows.next_batch(600).unwrap());
    assert!(!trained.iter().any(|prompt| all.contains(prompt)));
    assert!(!prompts(&rows.probe(100).unwrap()).iter().any(|prompt| all.contains(prompt)));
    assert_eq!(rows.cursor(), 600, "the probe does not move the stream");
    let (other, _) = FileDataset::open(&config(&path), 99, &words(false)).unwrap();
    assert_eq!(prompts(&other.held_out(0).unwrap()), all);
    let error = rows.held_out(301).unwrap_err();
    assert!(matches!(error, Error::TooFewRows { wanted: 301, .. }) && error.to_string().contains("0 is all of them"));
}

#[test]
fn eval_files_replace_the_held_out_fraction() {
    let (_folder, path) = file("train.jsonl", numbers(0..50));
    let (_other, eval) = file("test.jsonl", numbers(0..3) + &lines(&[json!({"prompt": "another"})]));
    let config = DataConfig { eval_files: vec![DataFile::new(&eval)], ..config(&path) };
    let (mut rows, report) = open(&config).unwrap();
    let mut held_out = prompts(&rows.held_out(0).unwrap());
    held_out.sort();
    assert_eq!(held_out, ["another", "number 0", "number 1", "number 2"]);
    assert!(prompts(&rows.next_batch(100).unwrap()).iter().all(|prompt| !held_out.contains(prompt)));
    assert_eq!((report.training(), report.held_out(), report.dropped()), (47, 4, 3));
    let text = report.to_string();
    assert!(
        text.contains("train.jsonl: 50 rows, 47 to train on, 0 held out\n  3 dropped: the same prompt is in data.eval"),
        "{text}"
    );
    assert_eq!(&*rows.held_out(1).unwrap()[0].source, "test");
}

#[test]
fn file_weights_set_the_frequency_of_rows() {
    let (_folder, small) = file("small.jsonl", numbers(0..20));
    let (_other, large) = file("large.jsonl", numbers(0..400));
    let named = DataFile { name: Some("few".into()), ..DataFile::new(&small) };
    let sources = |files: Vec<DataFile>, count: usize| {
        let (mut rows, report) = open(&DataConfig { files, ..DataConfig::default() }).unwrap();
        let items = rows.next_batch(count.min(report.training())).unwrap();
        (items.iter().filter(|item| &*item.source == "few").count(), items.len())
    };
    let (few, all) = sources(vec![named.clone(), DataFile::new(&large)], usize::MAX);
    assert!(few < 22 && all > 350, "without weights a row is a row: {few} of {all}");
    let weighted = |file: DataFile, weight| DataFile { weight: Some(weight), ..file };
    let (few, all) = sources(vec![weighted(named, 1.0), weighted(DataFile::new(&large), 3.0)], usize::MAX);
    assert!((few as f64 / all as f64 - 0.25).abs() < 0.01, "{few} of {all}");
}

#[test]
fn long_prompts_are_dropped_and_counted() {
    let rows =
        [json!({"prompt": "a b c"}), json!({"prompt": "a b"}), json!({"prompt": "a b c d e f"}), json!({"prompt": ""})];
    let (_folder, path) = file("rows.jsonl", lines(&rows));
    let config = DataConfig { max_prompt_length: Some(2), ..without_split(&path) };
    let (mut kept, report) = open(&config).unwrap();
    assert_eq!(prompts(&kept.next_batch(1).unwrap()), ["a b"]);
    let text = report.to_string();
    assert!(text.contains("2 dropped: longer than data.max_prompt_length, 2 tokens"), "{text}");
    assert!(text.contains("1 dropped: a prompt without tokens"), "{text}");
    // The error names the smaller of two limits.
    let encoder = PromptEncoder { max_tokens: Some(1), ..words(false) };
    let error = FileDataset::open(&config, 0, &encoder).err().unwrap();
    let text = error.to_string();
    assert!(matches!(error, Error::Empty { .. }) && text.contains("no row is left to train on"), "{text}");
    assert!(
        text.contains(
            "3 dropped: longer than the model's context allows, 1 tokens beside rollout.max_completion_length"
        ),
        "{text}"
    );
}

#[test]
fn contradictory_data_keys_are_refused() {
    let refusal = |config: DataConfig| config.validate().unwrap_err().to_string();
    let files = || config("a.jsonl");
    let mut both = files();
    both.tasks.sorting.weight = 1.0;
    assert!(refusal(both).contains("`data.tasks`: expected left out where data.files is given"));
    let alone = DataConfig { system_prompt: Some("Be brief.".into()), ..DataConfig::default() };
    assert!(refusal(alone).contains("`data.system_prompt`: expected left out without data.files"));
    let weighted = DataFile { weight: Some(2.0), ..DataFile::new("b.jsonl") };
    let mut some = files();
    some.files.push(weighted.clone());
    assert!(refusal(some).contains("a weight for every file, or for none, got 1 of 2"));
    let zero = DataConfig { files: vec![DataFile { weight: Some(0.0), ..weighted }], ..files() };
    assert!(refusal(zero).contains("above 0"));
    let template = DataConfig { prompt_template: Some("Q: {question}".into()), ..files() };
    assert!(refusal(template).contains("`data.prompt_template`: expected a text with {prompt} in it"));
    let columns = DataConfig { prompt_column: Some("a".into()), messages_column: Some("b".into()), ..files() };
    assert!(refusal(columns).contains("one of data.prompt_column and data.messages_column"));
    let unknown = serde_json::from_value::<DataConfig>(json!({"file": "a.jsonl"})).unwrap_err().to_string();
    assert!(unknown.contains("unknown field `file`"), "{unknown}");
}

#[test]
fn data_files_parse_from_paths_and_objects() {
    let short: DataConfig = serde_json::from_value(json!({"files": "a.jsonl", "apply_chat_template": true})).unwrap();
    assert_eq!(short.files, [DataFile::new("a.jsonl")]);
    let long = json!({"files": ["a.jsonl", {"path": "b.parquet", "weight": 2, "name": "b"}], "few_shot": [{"role": "user", "content": "x"}]});
    let long: DataConfig = serde_json::from_value(long).unwrap();
    assert_eq!((long.files[1].weight, long.files[1].source().as_str()), (Some(2.0), "b"));
    for config in [short, long] {
        assert_eq!(serde_json::from_value::<DataConfig>(serde_json::to_value(&config).unwrap()).unwrap(), config);
    }
    let error = serde_json::from_value::<DataConfig>(json!({"files": [{"file": "a"}]})).unwrap_err().to_string();
    assert!(error.contains("expected a file"), "{error}");
    let error = serde_json::from_value::<DataConfig>(json!({"apply_chat_template": "yes"})).unwrap_err().to_string();
    assert!(error.contains("expected auto, true or false"), "{error}");
    // A template would silently omit an object that is not a message.
    let rows = json!({"few_shot": [{"question": "1 x 1?", "answer": "#### 1"}]});
    let error = serde_json::from_value::<DataConfig>(rows).unwrap_err().to_string();
    assert!(error.contains("expected messages with `role` and `content`") && error.contains("1 x 1?"), "{error}");
}

#[test]
fn patterns_and_the_home_folder_are_expanded() {
    let (folder, _) = file("b.jsonl", numbers(0..3));
    let root = folder.path();
    std::fs::create_dir_all(root.join("deep/er")).unwrap();
    for name in ["a.jsonl", "c.txt", "deep/er/d.jsonl", "[odd].jsonl"] {
        std::fs::write(root.join(name), numbers(0..2)).unwrap();
    }
    let expanded = |pattern: &str| {
        let weighted = DataFile { weight: Some(2.0), ..DataFile::new(root.join(pattern)) };
        let mut config = DataConfig { files: vec![weighted], ..DataConfig::default() };
        config.expand_paths(&NoHub).map(|()| {
            assert!(config.files.iter().all(|file| file.weight == Some(2.0)));
            let names = config.files.iter().map(|file| file.path.strip_prefix(root).unwrap().display().to_string());
            names.collect::<Vec<_>>()
        })
    };
    assert_eq!(expanded("[ab].jsonl").unwrap(), ["a.jsonl", "b.jsonl"]);
    assert_eq!(expanded("?.*").unwrap(), ["a.jsonl", "b.jsonl", "c.txt"]);
    assert_eq!(expanded("deep/**/*.jsonl").unwrap(), ["deep/er/d.jsonl"]);
    assert_eq!(expanded("[odd].jsonl").unwrap(), ["[odd].jsonl"], "a file that is called so goes first");
    assert_eq!(expanded("none.jsonl").unwrap(), ["none.jsonl"], "it is missed when it is opened");
    let error = expanded("*.parquet").unwrap_err().to_string();
    assert!(error.contains("*.parquet: `data.files`: expected a pattern that at least one file matches"), "{error}");
    assert!(expanded("a[.jsonl").unwrap_err().to_string().contains("expected a path or a pattern"));

    let home = std::env::home_dir().unwrap();
    let mut config = DataConfig {
        files: vec![DataFile::new("~/rows.jsonl"), DataFile::new("a~b.jsonl"), DataFile::new("~other/rows.jsonl")],
        tools_file: Some("~/tools.json".into()),
        chat_template: Some("~".into()),
        ..DataConfig::default()
    };
    config.expand_paths(&NoHub).unwrap();
    let paths: Vec<_> = config.files.iter().map(|file| file.path.clone()).collect();
    assert_eq!(paths, [home.join("rows.jsonl"), "a~b.jsonl".into(), "~other/rows.jsonl".into()]);
    assert_eq!((config.tools_file, config.chat_template), (Some(home.join("tools.json")), Some(home.join(""))));
}

#[test]
fn an_index_opens_files_without_reading_their_rows() {
    let (folder, train) =
        file("train.jsonl", numbers(0..5000) + &lines(&[json!({"prompt": "far too long ".repeat(9)})]));
    let eval = folder.path().join("eval.jsonl");
    std::fs::write(&eval, numbers(0..7)).unwrap();
    for eval_files in [vec![], vec![DataFile::new(&eval)]] {
        let config = DataConfig { eval_files, max_prompt_length: Some(9), ..config(&train) };
        let (mut first, report) = open(&config).unwrap();
        assert_eq!((report.files[0].rows, report.dropped() >= 1), (5001, true), "{report}");
        let json = serde_json::to_string(&first.index().unwrap()).unwrap();
        assert!(json.len() < 5001 * 24, "{}", json.len());
        let index: grpo_data::RowIndex = serde_json::from_str(&json).unwrap();
        let never = PromptEncoder { count: &|_, _| panic!("a prompt was encoded"), ..words(false) };
        let (mut second, again) = grpo_data::open(&config, 7, &never, Some(index.clone())).unwrap();
        assert_eq!(again.unwrap(), report);
        assert_eq!(prompts(&second.held_out(0).unwrap()), prompts(&first.held_out(0).unwrap()));
        assert_eq!(prompts(&second.next_batch(6000).unwrap()), prompts(&first.next_batch(6000).unwrap()));
        assert_eq!(second.index(), first.index());
        let other = DataConfig { files: vec![DataFile::new(&train), DataFile::new(&eval)], ..config };
        let error = FileDataset::with_index(&other, 7, false, index).err().unwrap().to_string();
        assert!(error.contains("the index is that of other files"), "{error}");
    }
}

#[test]
fn the_first_row_with_something_wrong_is_named_wherever_it_is() {
    // More rows than are read at a time, with faults of every kind behind one another.
    let mut rows: Vec<String> = (0..9000).map(|i| json!({"prompt": format!("number {i}")}).to_string()).collect();
    let refusal = |rows: &[String]| {
        let (_folder, path) = file("rows.jsonl", rows.join("\n"));
        let count = &|prompts: &[&grpo_data::Prompt], _| {
            let one = |prompt: &&grpo_data::Prompt| match prompt.to_string().contains("raise") {
                true => Err("the template raises".into()),
                false => Ok(1),
            };
            prompts.iter().map(one).collect()
        };
        let encoder = PromptEncoder { has_chat_template: false, max_tokens: Some(9), count, is_exact: true };
        FileDataset::open(&config(path), 0, &encoder).err().unwrap().to_string()
    };
    rows[8999] = "{".into();
    assert!(refusal(&rows).contains("line 9000: expected a whole JSON object"));
    rows[8500] = json!({"prompt": "raise"}).to_string();
    assert!(refusal(&rows).contains("line 8501: the prompt: the template raises"));
    rows[8400] = json!({"text": "raise"}).to_string();
    assert!(refusal(&rows).contains("line 8401: expected a prompt"));
    rows[100] = json!({"prompt": "raise"}).to_string();
    rows[101] = "nonsense".into();
    assert!(refusal(&rows).contains("line 101: the prompt: the template raises"));
}

#[test]
fn the_longest_prompt_is_found_where_most_prompts_are_only_bounded() {
    // A token per word; the bound is the number of bytes.
    let row = |i: usize| json!({"prompt": if i == 7777 { "a ".repeat(40) } else { format!("number {i}") }});
    let (_folder, path) = file("rows.jsonl", lines(&(0..9000).map(row).collect::<Vec<_>>()));
    let encoded = std::cell::Cell::new(0);
    let count = |prompts: &[&grpo_data::Prompt], limit| {
        let one = |prompt: &&grpo_data::Prompt| {
            let text = prompt.to_string();
            if text.len() <= limit {
                return Ok(text.len());
            }
            encoded.set(encoded.get() + 1);
            Ok(text.split_whitespace().count())
        };
        prompts.iter().map(one).collect()
    };
    let encoder = PromptEncoder { has_chat_template: false, max_tokens: Some(1000), count: &count, is_exact: false };
    let (_, report) = FileDataset::open(&config(&path), 0, &encoder).unwrap();
    assert_eq!((report.longest_prompt(), report.training() + report.held_out()), (40, 9000));
    assert!((2049..3000).contains(&encoded.get()), "{}", encoded.get());
}
