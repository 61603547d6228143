//! Tokenizer folders that are damaged, do not match their model, or use alternative layouts.

use crate::support::{fixture, fixture_json, says};
use grpo_models::{Error, HfTokenizer, Tokenizer};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Returns a copy of a family's folder, with tokenizer_config.json changed.
fn folder(family: &str, change: impl FnOnce(&mut Value)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(family)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let mut config = fixture_json(&format!("{family}/tokenizer_config.json"));
    change(&mut config);
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

fn open(folder: &TempDir) -> grpo_models::Result<HfTokenizer> {
    HfTokenizer::open(folder.path(), &[], 512)
}

fn refusal(folder: &TempDir) -> String {
    open(folder).err().expect("the folder is damaged").to_string()
}

fn user(text: &str) -> Vec<Value> {
    vec![json!({"role": "user", "content": text})]
}

#[test]
fn token_ids_outside_the_vocabulary_are_refused() {
    let folder = folder("qwen3", |_| {});
    // The last token that is not added.
    let error = HfTokenizer::open(folder.path(), &[], 399).err().unwrap();
    assert!(matches!(error, Error::TokenizerFile { .. }), "{error:?}");
    says(&error.to_string(), &["tokenizer.json: token ", "has the id 399", "ids below 399"]);
    // EOS, which ends every completion, is <|im_end|>.
    let error = HfTokenizer::open(folder.path(), &[], 402).err().unwrap();
    says(&error.to_string(), &["tokenizer.json: token \"<|im_end|>\" has the id 402", "ids below 402"]);
    let error = HfTokenizer::open(folder.path(), &[600], 512).err().unwrap();
    says(&error.to_string(), &["`eos_token_id` is 600"]);
    let tokenizer = HfTokenizer::open(folder.path(), &[7], 512).unwrap();
    assert!(matches!(tokenizer.decode(&[512]), Err(Error::UnknownToken { id: 512, vocab_size: 512 })));
    assert_eq!((tokenizer.vocab_size(), tokenizer.decode(&[511]).unwrap()), (512, String::new()));
}

/// Qwen3's added tokens: 402 is `<|im_end|>`, 403 to 408 are not special, and 408 is `</think>`.
#[test]
fn added_tokens_that_the_model_lacks_are_refused_where_a_text_has_them() {
    let folder = folder("qwen3", |config| config["pad_token"] = "<image>".into());
    let mut file = fixture_json("qwen3/tokenizer.json");
    let token = json!({"id": 409, "content": "<image>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    file["added_tokens"].as_array_mut().unwrap().push(token);
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let tokenizer = HfTokenizer::open(folder.path(), &[], 408).unwrap();
    // The padding token is <image>, which the model lacks.
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id(), tokenizer.pad_id()), (408, 402, 402));

    let refused = |result: grpo_models::Result<Vec<u32>>, name: &str, missing: u32| {
        let error = result.unwrap_err();
        assert!(matches!(&error, Error::MissingToken { id, vocab_size: 408, .. } if *id == missing), "{error:?}");
        says(&error.to_string(), &[&format!("token {name:?} has the id {missing}"), "ids below 408 only"]);
    };
    // Added tokens that are not special are parsed in texts and messages; every count must find them, too.
    let (text, thought) = ("a </think> b", user("a </think> b"));
    refused(tokenizer.encode(text), "</think>", 408);
    refused(tokenizer.encode_prompt(text), "</think>", 408);
    refused(tokenizer.encode_completion(text), "</think>", 408);
    refused(tokenizer.encode_rendered(text), "</think>", 408);
    refused(tokenizer.encode_messages(&thought, None, None), "</think>", 408);
    refused(tokenizer.encode_messages(&user("<|im_end|> </think>"), None, None), "</think>", 408);
    refused(tokenizer.count_prompt(text, 1000).map(|_| vec![]), "</think>", 408);
    refused(tokenizer.count_messages(&thought, None, None, 1000).map(|_| vec![]), "</think>", 408);
    // Special tokens are parsed in rendered texts only; in a message they are text.
    refused(tokenizer.encode_rendered("a <image> b"), "<image>", 409);
    for ids in [tokenizer.encode("a <image> b"), tokenizer.encode_messages(&user("a <image> b"), None, None)] {
        assert!(ids.unwrap().iter().all(|id| *id < 408));
    }
    let image = "{{ messages[0].content }}<image>";
    let tokenizer = tokenizer.with_chat_template(image, "mine.jinja");
    refused(tokenizer.encode_messages(&user("a"), None, None), "<image>", 409);
}

/// Families by the folder of their template, their added tokens within the embedding, EOS last, and one beyond it as in their released
/// files: Gemma 3 270M and 1B have `<image_soft_token>` at the vocabulary size, as Llama 3 has `<|image|>`.
const ADDED_TOKENS: [(&str, &str, &str); 13] = [
    ("chat/llama3/template.jinja", "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>", "<|image|>"),
    ("chat/qwen2_5/template.jinja", "<|endoftext|> <|im_start|> <|im_end|>", "<|image_pad|>"),
    ("chat/qwen3/chat_template.jinja", "<|endoftext|> <|im_start|> <think> </think> <|im_end|>", "<|video_pad|>"),
    ("styles/qwen3_5.jinja", "<|endoftext|> <|im_start|> <think> </think> <|im_end|>", "<|vision_pad|>"),
    ("styles/gemma3.jinja", "<pad> <eos> <bos> <start_of_turn> <end_of_turn>", "<image_soft_token>"),
    ("styles/gemma4.jinja", "<pad> <eos> <bos> <|turn> <|channel> <channel|> <turn|>", "<|audio|>"),
    (
        "styles/gpt_oss.jinja",
        "<|startoftext|> <|start|> <|channel|> <|message|> <|end|> <|return|>",
        "<|reserved_201087|>",
    ),
    ("styles/granite.jinja", "<|start_of_role|> <|end_of_role|> <|tool_call|> <|end_of_text|>", "<|start_of_cite|>"),
    ("styles/mistral.jinja", "<unk> <s> [INST] [/INST] [TOOL_CALLS] </s>", "[IMG]"),
    ("styles/ministral3.jinja", "<unk> <s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] </s>", "[IMG_BREAK]"),
    ("styles/olmo.jinja", "<|endoftext|> <|im_start|> <|im_end|>", "|||EMAIL_ADDRESS|||"),
    ("styles/phi4.jinja", "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>", "<|dummy_85|>"),
    ("styles/smollm3.jinja", "<|begin_of_text|> <|im_start|> <|im_end|>", "<|reserved_special_token_247|>"),
];

#[test]
fn every_family_takes_prompts_without_the_tokens_that_the_model_lacks() {
    for (template, inside, beyond) in ADDED_TOKENS {
        let inside: Vec<&str> = inside.split(' ').collect();
        let eos = *inside.last().unwrap();
        let bos = inside.iter().find(|token| ["<bos>", "<s>", "<|begin_of_text|>", "<|endoftext|>"].contains(*token));
        let folder = folder("qwen3", |config| {
            config["added_tokens_decoder"] = json!({});
            config["additional_special_tokens"] = json!([]);
            config["eos_token"] = eos.into();
            config["pad_token"] = beyond.into();
            config["bos_token"] = bos.copied().into();
        });
        let mut file = fixture_json("qwen3/tokenizer.json");
        let tokens = inside.iter().chain([&beyond]).zip(400..).map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        });
        file["added_tokens"] = tokens.collect();
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        let path = fixture("").join("..").join(template);
        let size = 400 + inside.len() as u32;
        let opened =
            HfTokenizer::open(folder.path(), &[], size as usize).unwrap_or_else(|error| panic!("{template}: {error}"));
        let tokenizer = opened.with_chat_template(&std::fs::read_to_string(path).unwrap(), template);
        assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id()), (size as usize, size - 1), "{template}");

        // A prompt has added tokens of the family, and the token's name in a message is text.
        for text in ["How many clips?", beyond] {
            let ids = tokenizer.encode_messages(&user(text), None, None).unwrap();
            let added = ids.iter().filter(|id| **id >= 400).count();
            assert!(added >= 2 && ids.iter().all(|id| *id < size), "{template}: {ids:?}");
        }
        let error = tokenizer.encode_rendered(&format!("a {beyond} b")).unwrap_err();
        assert!(matches!(&error, Error::MissingToken { id, .. } if *id == size), "{template}: {error:?}");
        says(&error.to_string(), &[beyond, &format!("has the id {size}")]);
    }
}

/// BOS of Llama 3 is 400, and EOS is another stop token here.
#[test]
fn a_bos_token_that_the_model_lacks_is_refused_before_any_text() {
    let folder = folder("llama3", |config| config["eos_token"] = Value::Null);
    let error = HfTokenizer::open(folder.path(), &[5], 400).err().unwrap();
    says(&error.to_string(), &["token \"<|begin_of_text|>\" has the id 400", "ids below 400 only"]);
}

/// Returns the highest id of a family's tokenizer.
fn last_id(family: &str) -> u32 {
    let inner = tokenizers::Tokenizer::from_file(fixture(family).join("tokenizer.json")).unwrap();
    inner.get_vocab(true).into_values().max().unwrap()
}

/// The library would renumber these tokens.
#[test]
fn added_tokens_keep_the_ids_of_their_file() {
    let last = last_id("qwen3");
    let with = |id: u32| {
        let folder = folder("qwen3", |_| {});
        let mut file = fixture_json("qwen3/tokenizer.json");
        let token = json!({"id": id, "content": "<extra>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        file["added_tokens"].as_array_mut().unwrap().push(token);
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        open(&folder).map(|tokenizer| tokenizer.encode_messages(&user("a"), None, None).unwrap())
    };
    with(last + 1).unwrap();
    for id in [last + 5, 512, 100_000] {
        let (has, gives) = (format!("\"<extra>\" has the id {id}"), format!("gives it {}", last + 1));
        says(&with(id).unwrap_err().to_string(), &[&has, &gives]);
    }
}

#[test]
fn a_tokenizer_without_eos_needs_a_stop_token_of_the_model() {
    let none = folder("llama3", |config| config["eos_token"] = Value::Null);
    says(&refusal(&none), &["no token ends a completion: expected `eos_token` in tokenizer_config.json"]);
    let tokenizer = HfTokenizer::open(none.path(), &[5, 9], 512).unwrap();
    assert_eq!((tokenizer.eos_id(), tokenizer.stop_ids(), tokenizer.pad_id()), (5, vec![5, 9], 5));
    let unknown = folder("llama3", |config| config["eos_token"] = "</s>".into());
    // As in transformers, a named special token that is missing is added: the model may use the next id as EOS.
    let next = last_id("llama3") + 1;
    let parts = ["expected the end token \"</s>\"", "there is no such token", &format!("which would be {next}")];
    says(&refusal(&unknown), &parts);
    assert_eq!(HfTokenizer::open(unknown.path(), &[next], 512).unwrap().eos_id(), next);
    let error = HfTokenizer::open(unknown.path(), &[], next as usize).err().unwrap();
    says(&error.to_string(), &["\"</s>\" has the id"]);
    let both = folder("llama3", |_| {});
    let eos = open(&both).unwrap().eos_id();
    assert_eq!(HfTokenizer::open(both.path(), &[9, eos, 5], 512).unwrap().stop_ids(), [eos, 9, 5]);
}

#[test]
fn missing_and_damaged_tokenizer_files_are_errors() {
    let broken = folder("qwen3", |_| {});
    let refused = |part: &str| says(&refusal(&broken), &[part]);
    let path = broken.path().join("tokenizer.json");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    refused("tokenizer.json: expected a tokenizer of the crate or package `tokenizers`: EOF");
    std::fs::remove_file(&path).unwrap();
    refused("tokenizer.json: no such file; it is part of a model folder");
    std::fs::write(broken.path().join("tekken.json"), "").unwrap();
    refused("tekken.json is there, Mistral's own format: `transformers.integrations.mistral.convert_tekken_tokenizer(");
    std::fs::remove_file(broken.path().join("tekken.json")).unwrap();
    std::fs::write(broken.path().join("tokenizer.model"), "").unwrap();
    refused("tokenizer.model is there: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained");
    let new = json!({"content": "<new>", "special": true});
    for (family, pointer, value, part) in [
        ("qwen3", "/pad_token", json!(3), "tokenizer_config.json: `pad_token` is 3"),
        ("llama3", "/chat_template", json!([{"name": "default"}]), "`chat_template` is"),
        ("qwen3", "/added_tokens_decoder/77", new, "\"<new>\" has the id 77 in tokenizer_config.json and"),
    ] {
        let folder = folder(family, |config| {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            config.pointer_mut(parent).unwrap()[key] = value;
        });
        says(&refusal(&folder), &[part]);
    }
}

#[test]
fn messages_need_a_valid_template_and_form_a_conversation() {
    let none = folder("llama3", |config| config["chat_template"] = Value::Null);
    let tokenizer = open(&none).unwrap();
    assert!(!tokenizer.has_chat_template());
    assert!(matches!(tokenizer.encode_messages(&user("Hi"), None, None), Err(Error::NoChatTemplate)));
    assert_eq!(tokenizer.encode_prompt("Hi").unwrap().len(), 1 + tokenizer.encode("Hi").unwrap().len());

    let given = tokenizer.with_chat_template("{% for m in messages %}\n{{ m.content }}{% endif %}", "mine.jinja");
    let error = given.encode_messages(&user("Hi"), None, None).unwrap_err();
    says(&error.to_string(), &["chat template (mine.jinja), line 2: "]);
    let good = given.with_chat_template("{{ messages[0].content }}", "mine.jinja");
    assert_eq!(good.render(&user("Hi"), None, None).unwrap(), "Hi");
    for (messages, part) in
        [(&[][..], "expected at least one message"), (&[json!("Hi")], "message 1: expected an object")]
    {
        says(&good.encode_messages(messages, None, None).unwrap_err().to_string(), &[part]);
    }
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
