//! Errors about files name the file and the line.

use crate::support::{config, file, lines, open, refusal, without_split, words};
use grpo_data::{DataConfig, Dataset, FileDataset};
use serde_json::json;

const GOOD: &str = "{\"prompt\": \"a\"}\n";

#[test]
fn invalid_lines_are_errors_with_their_number() {
    for (line, words) in [
        (&b"{\"prompt\": \"a\"\n"[..], "ends at column"),
        (b"{\"prompt\": \"a\r\n", "expected a whole JSON object on this line, and it ends at column 13"),
        (b"{\"prompt\": nope}\n", "expected a JSON object: column 13"),
        (b"[1, 2]\n", "expected a JSON object, got `[1,2]`"),
        (b"\"text\"\n", "expected a JSON object, got `\"text\"`"),
        (b"{\"prompt\": \"\xff\"}\n", "expected UTF-8, which ends at byte 13 of the line"),
        (
            b"{\"text\": \"a\", \"answer\": 1}\n",
            "a prompt in column `prompt` or `messages` or `question`, got the columns `text`, `answer`",
        ),
        (b"{\"prompt\": null}\n", "got the columns `prompt`"),
        (b"{\"prompt\": 3}\n", "column `prompt`: expected a text or a list of messages, got `3`"),
        (b"{\"messages\": \"a\"}\n", "column `messages`: expected a list of messages, got `\"a\"`"),
        (b"{\"messages\": []}\n", "at least one message"),
        (b"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n", "at least one message"),
        (b"{\"messages\": [{\"content\": \"a\"}]}\n", "message 1: expected an object with `role`"),
        (b"{\"prompt\": [\"a\"]}\n", "message 1: expected an object with `role`"),
        (b"{\"prompt\": [{\"role\": \"user\"}]}\n", "message 1: expected an object with `role` and `content`"),
        (b"{\"prompt\": [{\"role\": \"user\", \"content\": null}]}\n", "message 1: expected an object with `role`"),
        (
            b"{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": \"b\"}\n",
            "column `tools`: expected a list",
        ),
    ] {
        // Empty lines count as lines, but not as rows.
        let text = refusal([GOOD.as_bytes(), b"\n", line, GOOD.as_bytes()].concat());
        assert!(text.contains("rows.jsonl, line 3: ") && text.contains(words), "{text}");
    }
}

#[test]
fn files_without_rows_are_errors() {
    for list in ["[{\"prompt\": \"a\"}]\n", "[\n  {\"prompt\": \"a\"}\n]\n", "\u{feff} [\n"] {
        let text = refusal(list);
        assert!(text.contains("got a JSON list: `{path: FILE, format: json}` reads a list of rows"), "{text}");
    }
    let object = refusal("{\n  \"prompt\": \"a\"\n}\n");
    assert!(object.contains("line 1: expected a whole JSON object on this line"), "{object}");
    assert!(object.contains("`jq -c . FILE > NEW` writes an object of several lines on one"), "{object}");
    assert!(refusal("").contains("no row is left to train on"));
    assert!(refusal("\n \n").contains("0 rows"));
    let missing = open(&config("no/such.jsonl")).err().unwrap().to_string();
    assert!(missing.contains("cannot read no/such.jsonl"), "{missing}");
    let folder = open(&config(std::env::temp_dir())).err().unwrap();
    assert!(matches!(&folder, grpo_data::Error::Io { .. } | grpo_data::Error::File { .. }), "{folder:?}");
    #[cfg(not(feature = "parquet"))]
    {
        let (_folder, path) = file("rows.parquet", "PAR1");
        let text = open(&config(path)).err().unwrap().to_string();
        assert!(text.contains("build with the feature `parquet`"), "{text}");
    }
}

#[test]
fn files_of_other_formats_and_encodings_are_recognised() {
    let utf_16: Vec<u8> = GOOD.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let marked = [b"\xff\xfe", utf_16.as_slice()].concat();
    let big_endian: Vec<u8> = GOOD.encode_utf16().flat_map(u16::to_be_bytes).collect();
    // Text in another encoding, Parquet and Arrow are recognised in JSONL only.
    for (bytes, words, is_in_parquet) in [
        (
            b"\x1f\x8b\x08\x00".as_slice(),
            "got gzip, which is not decompressed here: unpack it first, as in `gunzip",
            true,
        ),
        (b"\x28\xb5\x2f\xfd\x00", "got Zstandard", true),
        (b"PK\x03\x04\x14", "got a zip archive", true),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n",
            "a Git LFS pointer, which stands for",
            true,
        ),
        (b"\n<!doctype HTML>\n<html></html>\n", "got a web page", true),
        (b"PAR1\x15\x04", "got Parquet: `{path: FILE, format: parquet}` reads it", false),
        (b"ARROW1\x00\x00", "got Arrow (Feather): `pandas.read_feather(FILE)", false),
        (
            b"\xff\xff\xff\xff\x08\x02\x00\x00\x10",
            "got Arrow, as `datasets` saves it: `datasets.Dataset.from_file(FILE).to_json(NEW)`",
            false,
        ),
        (b"question,answer\nWhat?,1\n", "got CSV: `pandas.read_csv(FILE).to_json(NEW, orient='records'", false),
        (b"\"the question\", answer\r\n1,2\n", "got CSV: ", false),
        (b"question\tanswer\nWhat?\t1\n", "got TSV: `pandas.read_csv(FILE, sep='\\t')", false),
        (b"question;answer\nWhat?;1\n", "got CSV with semicolons: `pandas.read_csv(FILE, sep=';')", false),
        (&utf_16, "got UTF-16LE text: `iconv -f UTF-16LE -t UTF-8", false),
        (&marked, "got UTF-16LE text", false),
        (&big_endian, "got UTF-16BE text", false),
        (b"\xff\xfe\x00\x00{\x00\x00\x00", "got UTF-32LE text", false),
    ] {
        let text = refusal(bytes);
        let expected = "rows.jsonl: expected a JSON object per line in UTF-8, ";
        assert!(text.contains(expected) && text.contains(words), "{text}");
        let (_folder, path) = file("rows.parquet", bytes);
        let text = open(&config(path)).err().unwrap().to_string();
        assert!(text.contains("rows.parquet") && text.contains(words) == is_in_parquet, "{text}");
    }
    // A table of one column has its extension only.
    for (name, words) in [("rows.csv", "got CSV: "), ("rows.TSV", "got TSV: ")] {
        let (_folder, path) = file(name, "question\nWhat?\n");
        let text = open(&config(path)).err().unwrap().to_string();
        assert!(text.contains(words), "{text}");
    }
    let (_folder, path) = file("rows.csv", GOOD);
    open(&without_split(path)).unwrap();
    // Other beginnings are errors of the first line.
    assert!(refusal("a, b: no table").contains("line 1: expected a JSON object"));
    assert!(refusal("<|im_start|>").contains("line 1: expected a JSON object"));
    assert!(refusal(b"\x80").contains("line 1: expected UTF-8"));
}

#[test]
fn a_missing_held_out_split_is_an_error_with_its_fix() {
    let (_folder, path) = file("rows.jsonl", GOOD);
    let (rows, report) = open(&config(path)).unwrap();
    assert!(report.to_string().ends_with("rows.jsonl: 1 row, 1 to train on, 0 held out"), "{report}");
    let text = rows.held_out(0).unwrap_err().to_string();
    assert!(text.contains("none of the files' rows is held out: raise data.held_out_fraction"), "{text}");
    assert!(text.ends_with("or name data.eval_files"), "{text}");
}

#[test]
fn byte_order_marks_and_crlf_are_accepted() {
    let (_folder, path) = file("rows.jsonl", "\u{feff}{\"prompt\": \"a\"}\r\n{\"prompt\": \"b\"}");
    let (mut rows, _) = open(&DataConfig { shuffle: false, ..without_split(path) }).unwrap();
    assert_eq!(crate::support::prompts(&rows.next_batch(3).unwrap()), ["a", "b", "a"]);
}

#[test]
fn a_file_that_changes_during_the_run_is_an_error() {
    let rows: Vec<_> = (0..40).map(|i| json!({"prompt": format!("row {i}")})).collect();
    let (_folder, path) = file("rows.jsonl", lines(&rows));
    let (mut data, _) = open(&config(&path)).unwrap();
    std::fs::write(&path, "{\"prompt\": \"x\"}\n").unwrap();
    let text = data.next_batch(40).unwrap_err().to_string();
    assert!(text.contains("the file has changed since"), "{text}");
}

#[test]
fn configured_columns_must_exist() {
    let (_folder, path) = file("rows.jsonl", lines(&[json!({"q": "a", "gold": "1"}), json!({"q": "b"})]));
    let columns = DataConfig { prompt_column: Some("q".into()), answer_column: Some("gold".into()), ..config(&path) };
    let text = open(&columns).err().unwrap().to_string();
    assert!(text.contains("line 2: expected an answer in column `gold`, and there is no such column"), "{text}");
    assert!(!text.contains("--set"), "{text}");
    let (_other_folder, other) =
        file("rows.jsonl", lines(&[json!({"q": "a", "label": 1, "Ground-Truth": "b", "answers": ["c"]})]));
    let likely = DataConfig { files: config(&other).files, ..columns.clone() };
    let text = open(&likely).err().unwrap().to_string();
    assert!(
        text.contains("; `Ground-Truth` looks like one of answers: `--set data.answer_column=Ground-Truth`"),
        "{text}"
    );
    let wrong = DataConfig { prompt_column: Some("p".into()), ..config(&path) };
    let text = open(&wrong).err().unwrap().to_string();
    assert!(text.contains("line 1: expected a prompt in column `p`, got the columns `q`, `gold`"), "{text}");
    let always = DataConfig { apply_chat_template: grpo_data::ApplyChatTemplate::Always, ..config(&path) };
    let text = FileDataset::open(&always, 0, &words(false)).err().unwrap().to_string();
    assert!(text.contains("data.apply_chat_template") && text.contains("a model without"), "{text}");
}
