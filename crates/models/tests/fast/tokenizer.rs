//! Tokenizer folders that are damaged, do not match their model, or use alternative layouts.

use models::{Error, HfTokenizer, Tokenizer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Returns a copy of a family's folder, with tokenizer_config.json changed.
fn folder(family: &str, change: impl FnOnce(&mut Value)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(family);
    for entry in std::fs::read_dir(source).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = folder.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    folder
}

fn open(folder: &TempDir) -> models::Result<HfTokenizer> {
    HfTokenizer::open(folder.path(), &[], 512)
}

fn refusal(folder: &TempDir) -> String {
    match open(folder) {
        Ok(_) => panic!("taken"),
        Err(error) => error.to_string(),
    }
}

fn user(text: &str) -> Vec<Value> {
    vec![json!({"role": "user", "content": text})]
}

#[test]
fn token_ids_outside_the_vocabulary_are_refused() {
    let folder = folder("qwen3", |_| {});
    let error = HfTokenizer::open(folder.path(), &[], 300).err().unwrap();
    assert!(matches!(error, Error::TokenizerFile { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("tokenizer.json: token \"</think>\" has the id") && text.contains("ids below 300"), "{text}");
    let text = HfTokenizer::open(folder.path(), &[600], 512).err().unwrap().to_string();
    assert!(text.contains("`eos_token_id` is 600"), "{text}");
    let tokenizer = HfTokenizer::open(folder.path(), &[7], 512).unwrap();
    assert!(matches!(tokenizer.decode(&[512]), Err(Error::UnknownToken { id: 512, vocab_size: 512 })));
    assert_eq!((tokenizer.vocab_size(), tokenizer.decode(&[511]).unwrap()), (512, String::new()));
}

/// Returns the highest id of a family's tokenizer.
fn last_id(family: &str) -> u32 {
    let inner = tokenizers::Tokenizer::from_file(folder(family, |_| {}).path().join("tokenizer.json")).unwrap();
    inner.get_vocab(true).into_values().max().unwrap()
}

/// The library would renumber these tokens.
#[test]
fn added_tokens_keep_the_ids_of_their_file() {
    let last = last_id("qwen3");
    let with = |id: u32| {
        let folder = folder("qwen3", |_| {});
        let path = folder.path().join("tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let token = json!({"id": id, "content": "<extra>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        file["added_tokens"].as_array_mut().unwrap().push(token);
        std::fs::write(&path, file.to_string()).unwrap();
        open(&folder).map(|tokenizer| tokenizer.encode_messages(&user("a"), None, None).unwrap())
    };
    with(last + 1).unwrap();
    for id in [512, 100_000] {
        let text = with(id).unwrap_err().to_string();
        assert!(
            text.contains(&format!("token \"<extra>\" has the id {id}, but the model knows ids below 512")),
            "{text}"
        );
    }
    let text = with(last + 5).unwrap_err().to_string();
    assert!(text.contains(&format!("\"<extra>\" has the id {}", last + 5)), "{text}");
    assert!(text.contains(&format!("gives it {}", last + 1)), "{text}");
}

#[test]
fn a_tokenizer_without_eos_needs_a_stop_token_of_the_model() {
    let none = folder("llama3", |config| config["eos_token"] = Value::Null);
    let text = refusal(&none);
    assert!(text.contains("no token ends a completion: expected `eos_token` in tokenizer_config.json"), "{text}");
    let tokenizer = HfTokenizer::open(none.path(), &[5, 9], 512).unwrap();
    assert_eq!((tokenizer.eos_id(), tokenizer.stop_ids(), tokenizer.pad_id()), (5, vec![5, 9], 5));
    let unknown = folder("llama3", |config| config["eos_token"] = "</s>".into());
    let text = refusal(&unknown);
    assert!(text.contains("expected the end token \"</s>\"") && text.contains("there is no such token"), "{text}");
    // As in transformers, a named special token that is missing is added: the model may use the next id as EOS.
    let next = last_id("llama3") + 1;
    assert!(text.contains(&format!("which would be {next}")), "{text}");
    assert_eq!(HfTokenizer::open(unknown.path(), &[next], 512).unwrap().eos_id(), next);
    let text = HfTokenizer::open(unknown.path(), &[], next as usize).err().unwrap().to_string();
    assert!(text.contains("\"</s>\" has the id"), "{text}");
    let both = folder("llama3", |_| {});
    let eos = open(&both).unwrap().eos_id();
    assert_eq!(HfTokenizer::open(both.path(), &[9, eos, 5], 512).unwrap().stop_ids(), [eos, 9, 5]);
}

#[test]
fn missing_and_damaged_tokenizer_files_are_errors() {
    let broken = folder("qwen3", |_| {});
    let path = broken.path().join("tokenizer.json");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    assert!(
        refusal(&broken).contains("tokenizer.json: expected a tokenizer of the crate or package `tokenizers`: EOF")
    );
    std::fs::remove_file(&path).unwrap();
    assert!(refusal(&broken).contains("tokenizer.json: no such file; it is part of a model folder"));
    std::fs::write(broken.path().join("tokenizer.model"), "").unwrap();
    assert!(
        refusal(&broken).contains("tokenizer.model is there: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained")
    );
    let wrong = folder("qwen3", |config| config["pad_token"] = 3.into());
    assert!(refusal(&wrong).contains("tokenizer_config.json: `pad_token` is 3"), "{}", refusal(&wrong));
    let template = folder("llama3", |config| config["chat_template"] = json!([{"name": "default"}]));
    assert!(refusal(&template).contains("`chat_template` is"), "{}", refusal(&template));
    let moved =
        folder("qwen3", |config| config["added_tokens_decoder"]["77"] = json!({"content": "<new>", "special": true}));
    assert!(refusal(&moved).contains("\"<new>\" has the id 77 in tokenizer_config.json and"), "{}", refusal(&moved));
}

#[test]
fn messages_need_a_valid_template_and_form_a_conversation() {
    let none = folder("llama3", |config| config["chat_template"] = Value::Null);
    let tokenizer = open(&none).unwrap();
    assert!(!tokenizer.has_chat_template());
    assert!(matches!(tokenizer.encode_messages(&user("Hi"), None, None), Err(Error::NoChatTemplate)));
    assert_eq!(tokenizer.encode_prompt("Hi").unwrap().len(), 1 + tokenizer.encode("Hi").unwrap().len());

    let given = tokenizer.with_chat_template("{% for m in messages %}\n{{ m.content }}{% endif %}", "mine.jinja");
    let text = given.encode_messages(&user("Hi"), None, None).unwrap_err().to_string();
    assert!(text.contains("chat template (mine.jinja), line 2: "), "{text}");
    let good = given.with_chat_template("{{ messages[0].content }}", "mine.jinja");
    assert_eq!(good.render(&user("Hi"), None, None).unwrap(), "Hi");
    let empty = good.encode_messages(&[], None, None).unwrap_err().to_string();
    assert!(empty.contains("expected at least one message"), "{empty}");
    let text = good.encode_messages(&[json!("Hi")], None, None).unwrap_err().to_string();
    assert!(text.contains("message 1: expected an object"), "{text}");
}

#[test]
fn named_templates_are_chosen_as_in_transformers() {
    let named = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]);
    let tokenizer = open(&folder("llama3", |config| config["chat_template"] = named)).unwrap();
    assert_eq!(tokenizer.render(&user("Hi"), None, None).unwrap(), "plain");
    assert_eq!(tokenizer.render(&user("Hi"), Some(&json!([])), None).unwrap(), "tools");
    // The file takes precedence over the configuration.
    let file = folder("qwen3", |config| config["chat_template"] = "from the configuration".into());
    assert!(open(&file).unwrap().render(&user("Hi"), None, None).unwrap().starts_with("<|im_start|>user"));
}

#[test]
fn bos_is_added_if_the_folder_asks_for_it() {
    let bos = |value: Value| {
        let tokenizer = open(&folder("llama3", |config| config["add_bos_token"] = value)).unwrap();
        tokenizer.encode_prompt("Hi").unwrap().len() - tokenizer.encode("Hi").unwrap().len()
    };
    assert_eq!([bos(Value::Null), bos(true.into()), bos(false.into())], [1, 1, 0]);
}
