//! Names of tensors and modules: of a decoder, in the files of a model of images and text, and with PEFT's prefix.

use std::borrow::Cow;

/// The name of the embedding matrix, which is also the head of a tied model.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The name of the head of an untied model.
pub(crate) const HEAD: &str = "lm_head.weight";
/// The end of the name of a router's correction bias, which is f32 in files.
pub(crate) const CORRECTION_BIAS: &str = "e_score_correction_bias";
/// The path of the experts within a layer.
pub(crate) const EXPERTS: &str = "mlp.experts";
/// The module name of the head.
pub(crate) const HEAD_MODULE: &str = "lm_head";
/// PEFT's prefix of module names.
pub(crate) const PEFT_PREFIX: &str = "base_model.model.";

/// The names of the text decoder's tensors in the files of a wrapper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TextNames {
    /// The prefix that replaces `model.`.
    body: &'static str,
    head: &'static str,
}

/// The prefix of the text decoder's modules in `transformers`.
const MODULES: &str = "model.language_model.";
/// The prefixes of the text decoder's tensors, each with the name of the head: of modules, of files since version 4.50,
/// and of Qwen2.5-VL's files.
const LAYOUTS: [(&str, &str); 3] =
    [(MODULES, HEAD), ("language_model.model.", "language_model.lm_head.weight"), (BODY, HEAD)];
/// The prefix of a decoder's tensors, except the head.
const BODY: &str = "model.";

impl TextNames {
    /// Finds the names that files with the tensors for which `has` returns `true` use.
    pub(crate) fn find(has: impl Fn(&str) -> bool) -> Option<Self> {
        let (body, usual) = LAYOUTS.into_iter().find(|(body, _)| has(&format!("{body}embed_tokens.weight")))?;
        let head = LAYOUTS.into_iter().map(|(_, head)| head).find(|head| has(head)).unwrap_or(usual);
        Some(Self { body, head })
    }

    /// Returns the name of the embedding in each layout, for errors.
    pub(crate) fn embeddings() -> String {
        LAYOUTS.map(|(body, _)| format!("{body}embed_tokens.weight")).join(", ")
    }

    /// Returns the name in the decoder of a tensor in a file; `None` if it is not the decoder's.
    pub(crate) fn own(self, stored: &str) -> Option<String> {
        if stored == self.head {
            return Some(HEAD.to_owned());
        }
        stored.strip_prefix(self.body).map(|rest| format!("{BODY}{rest}"))
    }

    /// Returns the name in files of a tensor of the decoder.
    pub(crate) fn stored(self, own: &str) -> String {
        match own.strip_prefix(BODY) {
            Some(rest) => format!("{}{rest}", self.body),
            None if own == HEAD => self.head.to_owned(),
            None => own.to_owned(),
        }
    }
}

/// Returns the name in `transformers` of a module or tensor of a wrapper's text decoder: `model.layers.0` is `model.language_model.layers.0`.
/// PEFT's prefix is kept.
pub(crate) fn wrapped(own: &str) -> String {
    if let Some(of_adapter) = own.strip_prefix(PEFT_PREFIX) {
        return format!("{PEFT_PREFIX}{}", wrapped(of_adapter));
    }
    match own.strip_prefix(BODY) {
        Some(rest) => format!("{MODULES}{rest}"),
        None => own.to_owned(),
    }
}

/// Returns the name in the text decoder of a tensor with the name that `transformers` or PEFT gives it in a model of images and text; other
/// names are returned unchanged.
///
/// ```
/// let name = grpo_models::text_tensor("model.language_model.layers.0.self_attn.q_proj.weight");
/// assert_eq!(name, "model.layers.0.self_attn.q_proj.weight");
/// assert_eq!(grpo_models::text_tensor("lm_head.weight"), "lm_head.weight");
/// ```
pub fn text_tensor(name: &str) -> Cow<'_, str> {
    if let Some(of_adapter) = name.strip_prefix(PEFT_PREFIX) {
        return format!("{PEFT_PREFIX}{}", text_tensor(of_adapter)).into();
    }
    for (body, head) in LAYOUTS {
        if name == head {
            return HEAD.into();
        }
        if let Some(rest) = name.strip_prefix(body) {
            return format!("{BODY}{rest}").into();
        }
    }
    name.into()
}
