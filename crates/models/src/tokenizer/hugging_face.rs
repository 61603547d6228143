//! The tokenizer of a Hugging Face model folder.

use super::Tokenizer;
use super::checks::{TokenizerFile, beyond, caught, check_added, check_tokens};
use super::growth::Growth;
use super::marks::{Piece, SpecialStrings};
use super::special::{ChatTemplates, TokenizerConfig};
use crate::chat_template::{self, ChatTemplate};
use crate::error::{Error, Result};
use grpo_files::UniqueKeys;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;
use tokenizers::{
    AddedToken, Model, ModelWrapper, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer,
};

/// The size limit of tokenizer.json in bytes. A vocabulary of 256 000 tokens takes about 34 million.
const LIMIT: u64 = 1 << 30;

/// The marker by which transformers finds the end of a message after rendering.
const CONTINUED: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The tokenizer of a model folder: tokenizer.json, with special tokens and chat templates from tokenizer_config.json,
/// special_tokens_map.json and chat_template.jinja.
///
/// Texts and conversations get the same ids as in `transformers`, except that special-token strings in a text or a message
/// (`<|im_end|>`) are encoded as text. `transformers` does so only with `apply_chat_template(..., sanitize_control_tokens=True)`;
/// otherwise a user's message can end itself and continue in another role. Added tokens that are not special, such as Qwen3's `<think>`,
/// are always parsed as tokens. An added token with an id outside the model's vocabulary, such as Gemma 3's for images at 270M and 1B
/// weights, makes the texts that have it an error ([`Error::MissingToken`]).
///
/// ```no_run
/// use grpo_models::{HfTokenizer, Tokenizer};
/// use serde_json::json;
///
/// # fn main() -> grpo_models::Result<()> {
/// // The stop ids are those of generation_config.json; config.json's vocab_size says how many ids the model knows.
/// let tokenizer = HfTokenizer::open("Qwen2.5-0.5B-Instruct".as_ref(), &[151645, 151643], 151936)?;
/// let ids = tokenizer.encode_messages(&[json!({"role": "user", "content": "What is 6 x 7?"})], None, None)?;
/// println!("{}", tokenizer.decode_with_special(&ids)?);
/// # Ok(())
/// # }
/// ```
pub struct HfTokenizer {
    inner: tokenizers::Tokenizer,
    growth: Growth,
    /// The vocabulary size of the model. Added tokens of the tokenizer may have ids beyond it.
    vocab_size: usize,
    eos_id: u32,
    pad_id: u32,
    stop_ids: Vec<u32>,
    /// The ids at the start of a text: BOS, or none.
    prefix: Vec<u32>,
    special: SpecialStrings,
    templates: ChatTemplates,
    /// Special tokens by name, for templates.
    named: Map<String, Value>,
    /// Variables for templates, set by the user.
    options: Map<String, Value>,
    /// The largest number of tokens of a byte of text, where the parts of the tokenizer say so: 1, or 3 where normalization can make three
    /// bytes of one. Of ASCII it is 1. `None` if the tokenizer has tokens that the model lacks.
    tokens_per_byte: Option<usize>,
}

impl HfTokenizer {
    /// Opens the tokenizer in `folder` for a model with `vocab_size` tokens. `stop_ids` are the ids that end a completion according to
    /// generation_config.json and config.json (`eos_token_id`); the tokenizer's own EOS is always added.
    ///
    /// # Errors
    /// [`Error::TokenizerFile`] if tokenizer.json is missing or damaged, has an id outside the model's vocabulary for a token that is not
    /// added, EOS or BOS that the model lacks, or an id that the library `tokenizers` gives to another token, has a part that lengthens texts
    /// without bound, lacks the EOS token, or if no token ends a completion; [`Error::File`], [`Error::Json`] and [`Error::Field`] for the
    /// other files.
    pub fn open(folder: &Path, stop_ids: &[u32], vocab_size: usize) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let fault = |reason: String| Error::TokenizerFile { path: path.clone(), reason };
        if !path.exists() {
            return Err(fault(missing(folder)));
        }
        let bytes = grpo_files::read_regular(&path, LIMIT).map_err(|e| Error::io("read", &path, e))?;
        let file = serde_json::from_slice::<TokenizerFile>(&bytes);
        // The library reports invalid files.
        let growth = file.as_ref().map_or_else(|_| Ok(Growth::default()), TokenizerFile::growth).map_err(fault)?;
        let expected = |e| fault(format!("expected a tokenizer of the crate or package `tokenizers`: {e}"));
        let mut inner = caught(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(expected)?;
        let UniqueKeys = serde_json::from_slice(&bytes).map_err(|e| fault(e.to_string()))?;
        check_tokens(&inner, vocab_size).map_err(fault)?;
        file.map_err(|e| e.to_string()).and_then(|file| file.check_added_ids(&inner)).map_err(fault)?;
        let config = TokenizerConfig::read(folder)?;
        // `true` if the files define the token with an id; otherwise it gets the next id below, as in transformers.
        let eos_token = config.named.get("eos_token").and_then(Value::as_str);
        let has_eos = eos_token.is_none_or(|eos| {
            inner.token_to_id(eos).is_some()
                || config.added.iter().any(|(id, token)| id.is_some() && token.content == eos)
        });
        config.added.iter().try_for_each(|(_, token)| check_added(&token.content, &growth)).map_err(fault)?;
        caught(|| add_tokens(&mut inner, &config)).map_err(|e| fault(e.to_string()))?;
        // Truncation and padding for training batches are not used here.
        inner.with_truncation(None).map_err(|e| fault(e.to_string()))?.with_padding(None);

        let highest = inner.get_vocab(true).into_values().max();
        let highest = highest.ok_or_else(|| fault("expected tokens, got an empty vocabulary".into()))?;
        let named = |name: &str| match config.named.get(name).and_then(Value::as_str) {
            None => Ok(None),
            Some(token) => inner.token_to_id(token).map(Some).ok_or_else(|| {
                fault(format!("tokenizer_config.json names {token:?} as `{name}`, and there is no such token"))
            }),
        };
        let (bos, eos, pad) = (named("bos_token")?, named("eos_token")?, named("pad_token")?);
        let known = |id: &u32| (*id as usize) < vocab_size;
        if let Some(id) = eos.filter(|id| !known(id)) {
            return Err(fault(beyond(eos_token.unwrap_or_default(), id, vocab_size)));
        }
        if let Some(id) = stop_ids.iter().find(|id| !known(id)) {
            return Err(fault(format!("`eos_token_id` is {id}, but the model knows ids below {vocab_size} only")));
        }
        if let (false, Some(token), Some(id)) = (has_eos, eos_token, eos)
            && !stop_ids.contains(&id)
        {
            return Err(fault(format!(
                "expected the end token {token:?}, which tokenizer_config.json names as `eos_token`, and there is no such token; a model \
                 that was trained with it has its id, which would be {id}, in `eos_token_id` of generation_config.json or config.json"
            )));
        }
        let Some(eos_id) = eos.or(stop_ids.first().copied()) else {
            return Err(fault(
                "no token ends a completion: expected `eos_token` in tokenizer_config.json, or `eos_token_id` in \
                 generation_config.json or config.json"
                    .into(),
            ));
        };
        let mut all_stops = vec![eos_id];
        all_stops.extend(stop_ids.iter().filter(|id| **id != eos_id));
        let prefix = match config.add_bos_token {
            Some(true) => bos.into_iter().collect(),
            Some(false) => vec![],
            None => caught(|| prefix(&inner)).map_err(Error::Tokenizer)?,
        };
        // Every prompt begins with these tokens.
        if let Some(id) = prefix.iter().find(|id| !known(id)) {
            return Err(fault(beyond(&inner.id_to_token(*id).unwrap_or_default(), *id, vocab_size)));
        }
        let added = inner.get_added_tokens_decoder();
        let is_control = |content: &String| config.chat_control_tokens.contains(content);
        let special: Vec<String> = added
            .into_values()
            .filter(|token| token.special || is_control(&token.content))
            .map(|token| token.content)
            .collect();
        let special = SpecialStrings::new(&special).map_err(|e| fault(e.to_string()))?;
        let templates = config.chat_templates(folder)?;
        // Padding is neither attended to nor trained on, so any token that the model knows will do.
        let pad_id = pad.filter(known).unwrap_or(eos_id);
        let (named, options) = (config.named, Map::new());
        // A text is refused for a token that the model lacks, so every text must be encoded if there are such tokens.
        let tokens_per_byte = if known(&highest) { tokens_per_byte(&inner) } else { None };
        Ok(Self {
            inner,
            growth,
            vocab_size,
            eos_id,
            pad_id,
            stop_ids: all_stops,
            prefix,
            special,
            templates,
            named,
            options,
            tokens_per_byte,
        })
    }

    /// Replaces the chat template; `origin` names it in errors, such as its file.
    #[must_use]
    pub fn with_chat_template(mut self, source: &str, origin: &str) -> Self {
        self.templates = ChatTemplates { default: Some(ChatTemplate::new(source, origin)), tool_use: None };
        self
    }

    /// Sets the date of the chat templates, see [`ChatTemplate::with_date`].
    ///
    /// # Errors
    /// [`Error::Date`] for an invalid date.
    pub fn with_template_date(mut self, date: &str) -> Result<Self> {
        let ChatTemplates { default, tool_use } = self.templates;
        let dated = |template: Option<ChatTemplate>| template.map(|template| template.with_date(date)).transpose();
        self.templates = ChatTemplates { default: dated(default)?, tool_use: dated(tool_use)? };
        Ok(self)
    }

    /// Returns `true` if a chat template writes the date, so that prompts depend on the day.
    pub fn writes_date(&self) -> bool {
        let ChatTemplates { default, tool_use } = &self.templates;
        default.iter().chain(tool_use).any(ChatTemplate::is_dated)
    }

    /// Sets variables for the chat template, such as Qwen3's `enable_thinking` or Llama's `date_string` (`chat_template_kwargs` in
    /// `transformers` and TRL).
    #[must_use]
    pub fn with_chat_template_kwargs(mut self, options: Map<String, Value>) -> Self {
        self.options = options;
        self
    }

    /// Renders a conversation like `apply_chat_template(..., tokenize=False)`: up to the start of the answer, or, if the last message is the
    /// assistant's, up to the end of that message, which the policy continues.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode_messages`].
    pub fn render(&self, messages: &[Value], tools: Option<&Value>, documents: Option<&Value>) -> Result<String> {
        self.rendered(chat_template::normalized(messages)?, tools.cloned(), documents.cloned(), &self.options)
    }

    fn rendered(
        &self,
        mut messages: Vec<Value>,
        tools: Option<Value>,
        documents: Option<Value>,
        options: &Map<String, Value>,
    ) -> Result<String> {
        let template = self.templates.choose(tools.is_some())?;
        let is_assistant = messages.last().and_then(|message| message.get("role")?.as_str()) == Some("assistant");
        let end = messages.last_mut().filter(|_| is_assistant).and_then(end_of_content);
        let is_continued = end.map(|text| text.push_str(CONTINUED)).is_some();
        let mut variables = self.named.clone();
        variables.extend(options.clone());
        variables.insert("messages".into(), messages.into());
        variables.insert("tools".into(), tools.unwrap_or_default());
        let option_documents = variables.remove("documents");
        variables.insert("documents".into(), documents.or(option_documents).unwrap_or_default());
        variables.insert("add_generation_prompt".into(), (!is_continued).into());
        let mut text = template.render(&variables.into())?;
        if is_continued {
            let Some(at) = text.rfind(CONTINUED.trim_end()) else {
                let message = "the template leaves out the last message, which is the assistant's and to be continued";
                return Err(Error::Messages(message.into()));
            };
            let is_whole = text[at..].starts_with(CONTINUED);
            text.truncate(at);
            if !is_whole {
                text.truncate(text.trim_end().len());
            }
        }
        Ok(text)
    }

    /// Returns the rendered conversation, and `true` if special-token strings in messages are marked in it.
    fn marked(&self, messages: &[Value], tools: Option<&Value>, documents: Option<&Value>) -> Result<(String, bool)> {
        let messages = Value::Array(chat_template::normalized(messages)?);
        let options = Value::Object(self.options.clone());
        let given = [Some(&messages), tools, documents, Some(&options)];
        let is_marked = given.iter().flatten().any(|value| self.special.is_in_value(value));
        let mark = |value: Value| if is_marked { self.special.mark_value(&value) } else { value };
        let (Value::Array(messages), Value::Object(options)) = (mark(messages), mark(options)) else {
            return Err(Error::Messages("expected a list".into()));
        };
        let [tools, documents] = [tools, documents].map(|given| given.cloned().map(mark));
        Ok((self.rendered(messages, tools, documents, &options)?, is_marked))
    }

    /// Returns an upper bound on the number of tokens of a text, above 0; `None` if no bound is known.
    fn most_tokens(&self, text: &str) -> Option<usize> {
        let per_byte = if text.is_ascii() { 1 } else { self.tokens_per_byte? };
        Some(text.len() * self.tokens_per_byte.map(|_| per_byte)?).filter(|most| *most > 0)
    }

    /// Encodes a text and parses special tokens.
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        self.growth.check(text).map_err(|reason| Error::Tokenizer(reason.into()))?;
        self.known(caught(|| self.inner.encode_fast(text, false)).map_err(Error::Tokenizer)?.get_ids().to_vec())
    }

    /// Returns `ids` if the model has all of these tokens.
    fn known(&self, ids: Vec<u32>) -> Result<Vec<u32>> {
        match ids.iter().find(|id| **id as usize >= self.vocab_size) {
            None => Ok(ids),
            Some(&id) => Err(Error::MissingToken {
                token: self.inner.id_to_token(id).unwrap_or_default(),
                id,
                vocab_size: self.vocab_size,
            }),
        }
    }

    /// Encodes a text without parsing added tokens.
    fn ids_as_text(&self, text: &str) -> std::result::Result<Vec<u32>, tokenizers::Error> {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = self.inner.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut splits = PreTokenizedString::from(normalized.get());
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut splits)?;
        }
        let mut ids = vec![];
        for (split, _, _) in splits.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            ids.extend(self.inner.get_model().tokenize(split)?.into_iter().map(|token| token.id));
        }
        Ok(ids)
    }

    /// Encodes a text with marks (`encode_marked_chat` of transformers).
    fn ids_of_marked(&self, text: &str) -> Result<Vec<u32>> {
        let newline = self.ids("\n")?;
        let mut ids = vec![];
        for (index, piece) in self.special.pieces(text).into_iter().enumerate() {
            match piece {
                Piece::Template(text) if index == 0 => ids.extend(self.ids(text)?),
                Piece::Template("") => {}
                Piece::Template(text) => ids.extend(behind_newline(text, &newline, |text| self.ids(text))?),
                Piece::Marked(string) => {
                    let encode = |text: &str| {
                        self.growth.check(text).map_err(|reason| Error::Tokenizer(reason.into()))?;
                        self.known(caught(|| self.ids_as_text(text)).map_err(Error::Tokenizer)?)
                    };
                    let found = behind_newline(string, &newline, encode)?;
                    if self.inner.token_to_id(string).is_some_and(|id| found.contains(&id)) {
                        let reason = format!("{string:?} in a text cannot be told from the special token");
                        return Err(Error::Tokenizer(reason.into()));
                    }
                    ids.extend(found);
                }
            }
        }
        Ok(ids)
    }

    fn check(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|id| **id as usize >= self.vocab_size) {
            Some(id) => Err(Error::UnknownToken { id: *id, vocab_size: self.vocab_size }),
            None => Ok(()),
        }
    }
}

impl Tokenizer for HfTokenizer {
    /// Returns the model's vocabulary size, which may include ids without a token.
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns `eos_token` of tokenizer_config.json, or the first stop id.
    fn eos_id(&self) -> u32 {
        self.eos_id
    }

    fn stop_ids(&self) -> Vec<u32> {
        self.stop_ids.clone()
    }

    /// Returns `pad_token` of tokenizer_config.json, or EOS if there is none that the model knows.
    fn pad_id(&self) -> u32 {
        self.pad_id
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if self.special.is_in(text) { self.ids_of_marked(&self.special.mark(text)) } else { self.ids(text) }
    }

    /// Encodes the text, with BOS first if the tokenizer adds it.
    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.prefix.clone();
        ids.extend(self.encode(text)?);
        Ok(ids)
    }

    fn has_chat_template(&self) -> bool {
        self.templates.default.is_some() || self.templates.tool_use.is_some()
    }

    /// Encodes exactly the template's text, without adding BOS. A last message of the assistant is continued (`continue_final_message`);
    /// other messages are answered (`add_generation_prompt`).
    fn encode_messages(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        documents: Option<&Value>,
    ) -> Result<Vec<u32>> {
        let (text, is_marked) = self.marked(messages, tools, documents)?;
        if is_marked { self.ids_of_marked(&text) } else { self.ids(&text) }
    }

    fn render_messages(&self, messages: &[Value], tools: Option<&Value>) -> Result<String> {
        self.render(messages, tools, None)
    }

    fn chat_template_name(&self, with_tools: bool) -> String {
        self.templates
            .choose(with_tools)
            .map_or_else(|error| error.to_string(), |template| template.origin().to_owned())
    }

    fn count_prompt(&self, text: &str, limit: usize) -> Result<usize> {
        match self.most_tokens(text).map(|most| most + self.prefix.len()).filter(|most| *most <= limit) {
            Some(most) => Ok(most),
            None => Ok(self.encode_prompt(text)?.len()),
        }
    }

    fn count_messages(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        documents: Option<&Value>,
        limit: usize,
    ) -> Result<usize> {
        let (text, is_marked) = self.marked(messages, tools, documents)?;
        // A special-token string in a message may be impossible to encode as text, which is an error, so marked texts are always encoded.
        match self.most_tokens(&text).filter(|most| !is_marked && *most <= limit) {
            Some(most) => Ok(most),
            None if is_marked => Ok(self.ids_of_marked(&text)?.len()),
            None => Ok(self.ids(&text)?.len()),
        }
    }

    /// Parses special tokens in the text. Puts BOS before the text unless the text begins with it.
    fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.ids(text)?;
        Ok(if ids.starts_with(&self.prefix) { ids } else { [self.prefix.clone(), ids].concat() })
    }

    fn special_token<'a>(&self, text: &'a str) -> Option<&'a str> {
        self.special.first(text)
    }

    fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        self.check(ids)?;
        caught(|| self.inner.decode(ids, false)).map_err(Error::Tokenizer)
    }

    /// Decodes like `decode(ids, skip_special_tokens=True)` of transformers, but without cleaning up spaces, so that rewards read the exact
    /// text. Added tokens that are not special are kept; ids of the model without a token are left out.
    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.check(ids)?;
        caught(|| self.inner.decode(ids, true)).map_err(Error::Tokenizer)
    }
}

/// Returns why tokenizer.json is missing, and how to fix it.
fn missing(folder: &Path) -> String {
    if folder.join("tekken.json").exists() {
        return "no such file; tekken.json is there, Mistral's own format: \
                `transformers.integrations.mistral.convert_tekken_tokenizer(\"FOLDER/tekken.json\").save_pretrained(\"FOLDER\")` \
                writes it, with the packages transformers and mistral-common"
            .to_owned();
    }
    let slow = ["tokenizer.model", "vocab.json", "spiece.model"].into_iter().find(|name| folder.join(name).exists());
    let hint = match slow {
        Some(name) => {
            format!("{name} is there: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` writes it")
        }
        None => "it is part of a model folder, beside config.json".to_owned(),
    };
    format!("no such file; {hint}")
}

/// Adds tokens that only tokenizer_config.json defines, and marks tokens as special that it calls special.
fn add_tokens(inner: &mut tokenizers::Tokenizer, config: &TokenizerConfig) -> Result<(), tokenizers::Error> {
    // Looked up once: Gemma has 6,400 added tokens.
    let mut added: HashMap<String, AddedToken> =
        inner.get_added_tokens_decoder().into_values().map(|token| (token.content.clone(), token)).collect();
    for (id, token) in &config.added {
        let new = match added.get(&token.content) {
            Some(known) if known.special || !token.special => continue,
            Some(known) => known.clone().special(true),
            None => token.clone(),
        };
        added.insert(new.content.clone(), new.clone());
        if new.special {
            inner.add_special_tokens([new])?
        } else {
            inner.add_tokens([new])?
        };
        let found = inner.token_to_id(&token.content);
        if let (Some(id), Some(found)) = (id, found)
            && *id != found
        {
            let text = &token.content;
            return Err(format!("token {text:?} has the id {id} in tokenizer_config.json and {found} here").into());
        }
    }
    Ok(())
}

/// Returns the maximum number of tokens per byte of text: a token of byte-level BPE has at least one byte. NFC does not change ASCII, and
/// at most triples the number of bytes. `None` for other tokenizers.
fn tokens_per_byte(inner: &tokenizers::Tokenizer) -> Option<usize> {
    let splits = serde_json::to_value(inner.get_pre_tokenizer()).ok()?;
    let is_plain = |split: &Value| match split["type"].as_str() {
        Some("ByteLevel") => split["add_prefix_space"] == false,
        Some("Split" | "Digits") => true,
        _ => false,
    };
    let is_bytes = match splits["pretokenizers"].as_array() {
        Some(list) => list.iter().all(is_plain) && list.iter().any(|split| split["type"] == "ByteLevel"),
        None => splits["type"] == "ByteLevel" && is_plain(&splits),
    };
    let normalizer = serde_json::to_value(inner.get_normalizer()).ok()?;
    let is_bpe = matches!(inner.get_model(), ModelWrapper::BPE(_));
    match (is_bpe && is_bytes, normalizer["type"].as_str()) {
        (true, None) if normalizer.is_null() => Some(1),
        (true, Some("NFC")) => Some(3),
        _ => None,
    }
}

/// Returns the special tokens that the post-processor puts before a text.
fn prefix(inner: &tokenizers::Tokenizer) -> Result<Vec<u32>, tokenizers::Error> {
    let encoding = inner.encode("a", true)?;
    let special = encoding.get_special_tokens_mask().iter().take_while(|is_special| **is_special == 1).count();
    Ok(encoding.get_ids()[..special].to_vec())
}

/// Encodes a text as the middle of another: with a newline before it, which is then removed, so that no tokenizer treats it as the start
/// of a text.
fn behind_newline(text: &str, newline: &[u32], encode: impl Fn(&str) -> Result<Vec<u32>>) -> Result<Vec<u32>> {
    let ids = encode(&format!("\n{text}"))?;
    match ids.strip_prefix(newline) {
        Some(ids) => Ok(ids.to_vec()),
        None => encode(text),
    }
}

/// Returns the text of the last message that the policy continues: its content, or the last text among its parts.
fn end_of_content(message: &mut Value) -> Option<&mut String> {
    let text = match message.get_mut("content")? {
        Value::Array(parts) => parts.iter_mut().rev().find_map(|part| part.get_mut("text"))?,
        content => content,
    };
    match text {
        Value::String(text) => Some(text),
        _ => None,
    }
}
