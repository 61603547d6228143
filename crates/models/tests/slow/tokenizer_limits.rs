//! Tokenizers of others that make texts longer without bound, or that their library does not survive: each is an error that names the part.

use crate::support::{fixture_json, says, whole_text};
use grpo_models::{HfTokenizer, Tokenizer};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn source() -> Value {
    fixture_json("qwen2_5/tokenizer.json")
}

/// A folder with the tokenizer of Qwen2.5 and one part of it changed.
fn open(part: &str, value: Value) -> Result<HfTokenizer, String> {
    let mut tokenizer = source();
    tokenizer[part] = value;
    open_text(&tokenizer.to_string())
}

fn open_text(text: &str) -> Result<HfTokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), text).unwrap();
    let begin = Instant::now();
    let opened = HfTokenizer::open(folder.path(), &[0], 512).map_err(whole_text);
    assert!(begin.elapsed() < Duration::from_secs(20), "it took {:?}", begin.elapsed());
    opened
}

/// Returns the error of a tokenizer with one part changed.
fn refused(part: &str, value: Value) -> String {
    open(part, value).map(|_| ()).unwrap_err()
}

fn replace(pattern: Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

fn sequence(list: &str, step: &Value, count: usize) -> Value {
    json!({"type": "Sequence", list: vec![step; count]})
}

#[test]
fn normalizers_that_grow_a_text_without_bound_are_refused() {
    let thousand = "a".repeat(1000);
    for step in [
        replace(json!({"String": "a"}), &thousand),
        replace(json!({"Regex": "a"}), &thousand),
        json!({"type": "Sequence", "normalizers": [replace(json!({"String": "a"}), &thousand)]}),
    ] {
        // Added tokens are normalized, too.
        let opened = open("normalizer", sequence("normalizers", &step, 6));
        let refused = opened.and_then(|tokenizer| {
            let errors = ["encode", "prompt", "marked"].map(|kind| match kind {
                "encode" => tokenizer.encode("a cat and a dog"),
                "prompt" => tokenizer.encode_prompt("a cat"),
                _ => tokenizer.encode("a <|im_end|> a"),
            });
            errors.into_iter().collect::<Result<Vec<_>, _>>().map_err(whole_text)
        });
        let error = refused.map(|_| ()).unwrap_err();
        says(&error, &["normalizer", "times as long", "32 MiB"]);
    }
    // A long text, and a step that is none without it.
    let tokenizer = open("normalizer", replace(json!({"String": "a"}), &thousand)).unwrap();
    tokenizer.encode("abc").unwrap();
    let error = whole_text(tokenizer.encode(&"a".repeat(100_000)).unwrap_err());
    says(&error, &["`Replace` may make a text 1000 times as long", "100000 bytes"]);
    // A completion is not normalized, and is encoded when a warm-up trains on it.
    let ids = tokenizer.encode("bcd").unwrap();
    assert!(tokenizer.decode(&ids).unwrap().contains("bcd"));
}

#[test]
fn normalizers_of_real_models_are_taken() {
    for steps in [
        // Llama 2.
        json!([{"type": "Prepend", "prepend": "\u{2581}"}, replace(json!({"String": " "}), "\u{2581}")]),
        // ALBERT, without its table.
        json!([
            replace(json!({"String": "``"}), "\""), replace(json!({"String": "''"}), "\""), {"type": "NFKD"},
            {"type": "StripAccents"}, {"type": "Lowercase"}, replace(json!({"Regex": " {2,}"}), " "),
        ]),
        json!([{"type": "NFC"}]),
    ] {
        let tokenizer = open("normalizer", json!({"type": "Sequence", "normalizers": steps})).unwrap();
        tokenizer.encode(&"A text of some length. ".repeat(2_000)).unwrap();
    }
}

#[test]
fn pre_tokenizers_decoders_and_post_processors_that_grow_without_bound_are_refused() {
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
    let metaspace = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": false});
    for (part, value) in [
        ("pre_tokenizer", sequence("pretokenizers", &bytes, 40)),
        ("pre_tokenizer", sequence("pretokenizers", &metaspace, 40)),
        ("decoder", sequence("decoders", &replace(json!({"String": "a"}), &"a".repeat(100)), 6)),
        ("decoder", replace(json!({"Regex": ""}), &"a".repeat(1 << 20))),
        ("decoder", sequence("decoders", &json!({"type": "BPEDecoder", "suffix": ""}), 60)),
    ] {
        let error = refused(part, value);
        says(&error, &["tokenizer.json", part, "at most 256 times as long"]);
    }
    let piece = json!({"SpecialToken": {"id": "x", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    for (pieces, ids) in [(5000, 1), (2, 5000), (1000, 1000)] {
        let mut single = vec![piece.clone(); pieces];
        single.push(text.clone());
        let special = json!({"x": {"id": "x", "ids": vec![1; ids], "tokens": vec!["x"; ids]}});
        let template = json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special});
        let error = refused("post_processor", template);
        says(&error, &["post_processor", "at most 1024 pieces"]);
    }
}

#[test]
fn truncation_and_padding_of_a_file_are_not_used() {
    let padding = json!({
        "strategy": {"Fixed": 1_000_000_000}, "direction": "Right", "pad_to_multiple_of": 1_000_000_000, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x",
    });
    let tokenizer = open("padding", padding).unwrap();
    assert!(tokenizer.encode_prompt("abc").unwrap().len() <= 4);
    let truncation = json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0});
    let tokenizer = open("truncation", truncation).unwrap();
    assert!(tokenizer.encode_prompt("a b c d").unwrap().len() > 1);
}

#[test]
fn tokens_that_are_too_long_are_refused() {
    let long = "y".repeat(70_000);
    let mut tokenizer = source();
    let mut added = tokenizer["added_tokens"].as_array().unwrap().clone();
    added[0]["content"] = json!(long);
    let error = refused("added_tokens", added.into());
    says(&error, &["at most 65536 bytes", "70000", "yyyy"]);
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let id = vocabulary.remove("Z").unwrap();
    vocabulary.insert(long, id);
    let error = open_text(&tokenizer.to_string()).map(|_| ()).unwrap_err();
    says(&error, &["at most 65536 bytes", "70000"]);
}

/// The library indexes tables of characters without a look, and reserves memory for what they say.
#[test]
fn tables_of_characters_that_are_broken_are_refused() {
    // 4 GB of entries, and none there.
    let error = refused("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="}));
    says(&error, &["precompiled_charsmap", "4294967295 bytes"]);
    // No entry at all, and one that leads out of the table.
    for table in ["AAAAAA==", "BAAAAP///38="] {
        let opened = open("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": table}));
        let error = opened.and_then(|tokenizer| tokenizer.encode("abc").map_err(whole_text)).map(|_| ()).unwrap_err();
        says(&error, &["the library `tokenizers` failed"]);
    }
}

#[test]
fn patterns_that_backtrack_without_end_are_stopped() {
    let text = "a".repeat(5000) + "b";
    for pattern in ["(a+)+$", "(a|a)*\\1c", "(?=(a+))*\\1$", "(.*)*(?!x)c", "((a{0,1000}){0,1000}){0,1000}\\1"] {
        let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let normalizer = replace(json!({"Regex": pattern}), "x");
        for (part, value) in [("pre_tokenizer", split), ("normalizer", normalizer)] {
            let begin = Instant::now();
            // A pattern may be refused as too large; what matters is that it ends.
            if let Ok(tokenizer) = open(part, value) {
                let _ = tokenizer.encode(&text);
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "{pattern}: {:?}", begin.elapsed());
        }
    }
}

#[test]
fn duplicate_token_ids_are_refused() {
    let refused = |text: &str| open_text(text).map(|_| ()).unwrap_err();
    let mut vocabulary = source();
    vocabulary["model"]["vocab"]["b"] = vocabulary["model"]["vocab"]["a"].clone();
    says(&refused(&vocabulary.to_string()), &["tokenizer.json", "\"a\" and \"b\" both have the id"]);
    let mut added = source();
    let mut token = added["added_tokens"][0].clone();
    token["content"] = json!("<|other|>");
    added["added_tokens"].as_array_mut().unwrap().push(token);
    says(&refused(&added.to_string()), &["the added tokens", "\"<|other|>\" both have the id"]);
    let twice = source().to_string().replacen("\"vocab\":{", "\"vocab\":{\"a\":5,", 1);
    says(&refused(&twice), &["the key \"a\" is there twice"]);
}
