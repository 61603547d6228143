//! Reads special tokens and chat templates from the files in the folder of tokenizer.json.

use crate::chat_template::ChatTemplate;
use crate::error::{Error, Result};
use crate::folder::fields::Fields;
use serde_json::{Map, Value};
use std::path::Path;
use tokenizers::AddedToken;

/// The names of special tokens in the order of `transformers`.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The size limit of chat templates in bytes. Current models have a few thousand.
const TEMPLATE_LIMIT: u64 = 4 << 20;

/// The contents of tokenizer_config.json and special_tokens_map.json.
#[derive(Default)]
pub(super) struct TokenizerConfig {
    /// Special tokens by name (`eos_token`), as a template sees them.
    pub(super) named: Map<String, Value>,
    /// All tokens that the files call special, and added tokens that tokenizer.json may lack, by id.
    pub(super) added: Vec<(Option<u32>, AddedToken)>,
    /// `true` if the file adds BOS to texts; `None` leaves this to the post-processor of tokenizer.json.
    pub(super) add_bos_token: Option<bool>,
    /// Added tokens that are treated as special in a user's text.
    pub(super) chat_control_tokens: Vec<String>,
    templates: Vec<(String, String)>,
}

impl TokenizerConfig {
    /// Reads the files of `folder`; both may be missing.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let mut config = Self::default();
        let path = folder.join("tokenizer_config.json");
        if path.exists() {
            let fields = Fields::read(&path)?;
            config.read_tokens(&fields)?;
            config.add_bos_token = fields.flag("add_bos_token")?;
            let texts = "a list of texts";
            for token in fields.typed("chat_control_tokens", texts, Value::as_array)?.into_iter().flatten() {
                let text = token.as_str().ok_or_else(|| fields.unsupported("chat_control_tokens", texts))?;
                config.chat_control_tokens.push(text.to_owned());
            }
            config.read_added(&fields)?;
            config.read_templates(&fields)?;
        }
        let path = folder.join("special_tokens_map.json");
        if path.exists() {
            config.read_tokens(&Fields::read(&path)?)?;
        }
        Ok(config)
    }

    /// Reads special tokens by name; the first file that names one takes precedence.
    fn read_tokens(&mut self, fields: &Fields) -> Result<()> {
        for name in NAMES {
            let token = fields.typed(name, "a text, or an object with `content`", token)?;
            if let (Some(token), false) = (token, self.named.contains_key(name)) {
                self.named.insert(name.into(), token.content.clone().into());
                self.added.push((None, token));
            }
        }
        for key in ["additional_special_tokens", "extra_special_tokens"] {
            let tokens = match fields.get(key) {
                Some(Value::Array(tokens)) => tokens.iter().collect(),
                // Special tokens with custom names.
                Some(Value::Object(tokens)) => tokens.values().collect(),
                _ => vec![],
            };
            self.added.extend(tokens.into_iter().filter_map(token).map(|token| (None, token)));
        }
        Ok(())
    }

    /// Reads `added_tokens_decoder`: tokens by id.
    fn read_added(&mut self, fields: &Fields) -> Result<()> {
        let expected = "an object of tokens by their ids";
        let Some(decoder) = fields.typed("added_tokens_decoder", expected, Value::as_object)? else { return Ok(()) };
        let mut tokens = vec![];
        for (id, value) in decoder {
            let flag = |key: &str| value.get(key).and_then(Value::as_bool);
            match (id.parse(), token(value)) {
                (Ok(id), Some(token)) => tokens.push((Some(id), token.special(flag("special").unwrap_or(false)))),
                _ => return Err(fields.unsupported("added_tokens_decoder", expected)),
            }
        }
        tokens.sort_by_key(|(id, _): &(Option<u32>, AddedToken)| *id);
        // Inserted before the tokens by name, because only these entries have flags.
        self.added.splice(0..0, tokens);
        Ok(())
    }

    fn read_templates(&mut self, fields: &Fields) -> Result<()> {
        let expected = "a text, or a list of objects with `name` and `template`";
        match fields.get("chat_template") {
            None => {}
            Some(Value::String(source)) => self.templates.push(("default".into(), source.clone())),
            Some(Value::Array(list)) => {
                for entry in list {
                    let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                    let template = text("name").zip(text("template"));
                    self.templates.push(template.ok_or_else(|| fields.unsupported("chat_template", expected))?);
                }
            }
            Some(_) => return Err(fields.unsupported("chat_template", expected)),
        }
        Ok(())
    }

    /// Returns the templates of `folder`: chat_template.jinja and the folder additional_chat_templates take precedence over tokenizer_config.json.
    pub(super) fn chat_templates(&self, folder: &Path) -> Result<ChatTemplates> {
        let mut templates = ChatTemplates::default();
        let path = folder.join("chat_template.jinja");
        if path.exists() {
            templates.default = Some(ChatTemplate::new(&read_text(&path)?, "chat_template.jinja"));
        }
        let path = folder.join("additional_chat_templates").join("tool_use.jinja");
        if path.exists() {
            templates.tool_use =
                Some(ChatTemplate::new(&read_text(&path)?, "additional_chat_templates/tool_use.jinja"));
        }
        if templates.default.is_none() && templates.tool_use.is_none() {
            for (name, source) in &self.templates {
                let template = Some(ChatTemplate::new(source, "chat_template of tokenizer_config.json"));
                match name.as_str() {
                    "default" => templates.default = template,
                    "tool_use" => templates.tool_use = template,
                    _ => {}
                }
            }
        }
        Ok(templates)
    }
}

/// The templates that `transformers` chooses from.
#[derive(Default)]
pub(super) struct ChatTemplates {
    pub(super) default: Option<ChatTemplate>,
    /// The template for conversations with tools, if the model has a separate one.
    pub(super) tool_use: Option<ChatTemplate>,
}

impl ChatTemplates {
    pub(super) fn choose(&self, has_tools: bool) -> Result<&ChatTemplate> {
        let tool_use = self.tool_use.as_ref().filter(|_| has_tools);
        tool_use.or(self.default.as_ref()).ok_or(Error::NoChatTemplate)
    }
}

/// Reads a file as UTF-8.
fn read_text(path: &Path) -> Result<String> {
    let bytes = grpo_files::read_regular(path, TEMPLATE_LIMIT).map_err(|e| Error::io("read", path, e))?;
    String::from_utf8(bytes).map_err(|e| Error::TokenizerFile {
        path: path.to_owned(),
        reason: format!("expected UTF-8, which ends at byte {}", e.utf8_error().valid_up_to()),
    })
}

/// Parses a special token: its text, or an object with its text and flags.
fn token(value: &Value) -> Option<AddedToken> {
    let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(false);
    match value {
        Value::String(content) => Some(AddedToken::from(content.clone(), true)),
        Value::Object(fields) => {
            let token = AddedToken::from(fields.get("content")?.as_str()?, true);
            Some(
                token
                    .single_word(flag("single_word"))
                    .lstrip(flag("lstrip"))
                    .rstrip(flag("rstrip"))
                    .normalized(flag("normalized")),
            )
        }
        _ => None,
    }
}
