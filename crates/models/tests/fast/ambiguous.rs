//! Files with duplicate entries and unsupported sampling fields are errors, instead of silently using one of the values.

use crate::support::{Folder, qwen2, says, with};
use serde_json::{Value, json};

#[test]
fn invalid_stop_tokens_and_suppressed_tokens_are_refused() {
    for (field, value) in [
        ("eos_token_id", json!(-1)),
        ("eos_token_id", json!([2, -1])),
        ("eos_token_id", json!([2, 2])),
        ("eos_token_id", json!(32)),
        ("pad_token_id", json!(-2)),
        ("suppress_tokens", json!([1])),
        ("begin_suppress_tokens", json!([1, 2])),
        ("bad_words_ids", json!([[3]])),
        ("sequence_bias", json!([[[3], -1.0]])),
        ("forced_eos_token_id", json!(2)),
        ("no_repeat_ngram_size", json!(3)),
    ] {
        for file in ["generation_config.json", "config.json"] {
            let folder = Folder::whole();
            let fields = json!({field: value});
            folder.json(file, &if file == "config.json" { with(qwen2(), fields) } else { fields });
            let text = folder.open().unwrap_err().to_string();
            says(&text, &[file, &format!("`{field}` is {value}"), "supported:"]);
        }
    }
    // An empty list suppresses nothing. -1 is no padding token for sampling, and the last row of torch's `nn.Embedding`.
    let folder = Folder::new(with(qwen2(), json!({"pad_token_id": -1})));
    folder.json("generation_config.json", &json!({"suppress_tokens": [], "bad_words_ids": null, "pad_token_id": -1}));
    let opened = folder.open().unwrap();
    assert_eq!((opened.config().pad_token_id, opened.generation().pad_token_id), (Some(31), None));
}

#[test]
fn non_finite_numbers_in_unused_fields_are_ignored() {
    let whole = |name: &str, text: String| {
        let folder = Folder::new(qwen2());
        std::fs::write(folder.root.path().join(name), text).unwrap();
        folder.open().map_err(|error| error.to_string())
    };
    let config = |fields: Value| {
        let text = with(qwen2(), fields).to_string();
        text.replace("\"@\"", "NaN").replace("\"+\"", "Infinity").replace("\"-\"", "-Infinity")
    };
    whole("config.json", config(json!({"time_step_limit": [0.0, "+"], "x": {"y": "@", "z": "-"}}))).unwrap();
    whole("generation_config.json", r#"{"max_time": Infinity, "top_k": 3}"#.into()).unwrap();
    let text = whole("config.json", config(json!({"initializer_range": "@"})));
    says(&text.unwrap_err(), &["config.json", "initializer_range", "NaN"]);
    let text = whole("generation_config.json", r#"{"temperature": Infinity}"#.into());
    says(&text.unwrap_err(), &["generation_config.json", "`temperature` is \"Infinity\""]);
}

#[test]
fn duplicate_json_keys_are_refused() {
    let folder = Folder::whole();
    let config = std::fs::read_to_string(folder.file("config.json")).unwrap();
    let twice = config.replacen('{', "{\"rope_theta\": 5.0,", 1);
    std::fs::write(folder.file("config.json"), twice).unwrap();
    says(&folder.open().unwrap_err().to_string(), &["config.json, line", "the key \"rope_theta\" is there twice"]);

    let folder = Folder::whole();
    let mut bytes = std::fs::read(folder.file("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    let parsed: serde_json::Value = serde_json::from_str(&header).unwrap();
    let first = format!("\"lm_head.weight\":{},", parsed["lm_head.weight"]);
    let header = header.trim_end().replacen('{', &format!("{{{first}"), 1);
    bytes.splice(..8 + length, (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()));
    std::fs::write(folder.file("model.safetensors"), bytes).unwrap();
    says(&folder.refused(), &["model.safetensors", "the key \"lm_head.weight\" is there twice"]);
}
