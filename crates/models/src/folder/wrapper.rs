//! Models of images and text, whose text decoder is read and trained alone.
//!
//! `config.json` has the decoder's fields in `text_config`, and the files also have other tensors, such as a vision tower's.

use super::family::{Family, FamilyTable, gemma3, gemma4, mistral, qwen, qwen3_5};
use super::fields::{Fields, has_name};
use crate::error::Result;
use serde_json::Value;
use std::fmt;

/// A supported model of images and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wrapper {
    /// Gemma 3 from 4B on.
    Gemma3,
    /// Gemma 4, dense, with its vision tower.
    Gemma4,
    /// Qwen2.5-VL.
    Qwen2_5Vl,
    /// Qwen3-VL.
    Qwen3Vl,
    /// Qwen3.5 without experts.
    Qwen3_5,
    /// Mistral Small 3.1 and Ministral 3.
    Mistral3,
}

/// The reading of a wrapper's `config.json`.
pub(super) struct WrapperTable {
    model_type: &'static str,
    architecture: &'static str,
    /// The text decoders by `model_type` of `text_config`; a missing field selects the first.
    texts: &'static [(Family, &'static FamilyTable)],
    /// `true` if the outermost object may have the fields of the text decoder, as in files of older versions.
    pub(super) may_be_flat: bool,
    /// `true` if `tie_word_embeddings: true` of `text_config` overrides `false` of the outermost object.
    inner_tie_holds: bool,
    /// `tie_word_embeddings` of the class.
    ties_by_default: bool,
}

impl Wrapper {
    /// Every wrapper.
    pub const ALL: [Self; 6] =
        [Self::Gemma3, Self::Gemma4, Self::Qwen2_5Vl, Self::Qwen3Vl, Self::Qwen3_5, Self::Mistral3];

    /// Returns `model_type` of `config.json`.
    pub fn model_type(self) -> &'static str {
        self.table().model_type
    }

    /// Returns the only entry of `architectures` in `config.json`.
    pub fn architecture(self) -> &'static str {
        self.table().architecture
    }

    pub(super) fn table(self) -> &'static WrapperTable {
        const fn table(
            model_type: &'static str,
            architecture: &'static str,
            texts: &'static [(Family, &'static FamilyTable)],
        ) -> WrapperTable {
            WrapperTable {
                model_type,
                architecture,
                texts,
                may_be_flat: false,
                inner_tie_holds: false,
                ties_by_default: false,
            }
        }
        const GEMMA3: WrapperTable = WrapperTable {
            ties_by_default: true,
            ..table("gemma3", "Gemma3ForConditionalGeneration", &[(Family::Gemma3, &gemma3::TABLE)])
        };
        const GEMMA4: WrapperTable = WrapperTable {
            ties_by_default: true,
            ..table("gemma4", "Gemma4ForConditionalGeneration", &[(Family::Gemma4, &gemma4::TABLE)])
        };
        const QWEN2_5_VL: WrapperTable = WrapperTable {
            may_be_flat: true,
            inner_tie_holds: true,
            ..table("qwen2_5_vl", qwen::QWEN2_5_VL.architecture, &[(Family::Qwen2, &qwen::QWEN2_5_VL)])
        };
        const QWEN3_VL: WrapperTable =
            table("qwen3_vl", qwen::QWEN3_VL.architecture, &[(Family::Qwen3, &qwen::QWEN3_VL)]);
        const QWEN3_5: WrapperTable =
            table("qwen3_5", "Qwen3_5ForConditionalGeneration", &[(Family::Qwen3_5, &qwen3_5::TABLE)]);
        const MISTRAL3: WrapperTable = WrapperTable {
            ties_by_default: true,
            ..table(
                "mistral3",
                "Mistral3ForConditionalGeneration",
                &[(Family::Mistral, &mistral::MISTRAL), (Family::Ministral3, &mistral::MINISTRAL3)],
            )
        };
        match self {
            Self::Gemma3 => &GEMMA3,
            Self::Gemma4 => &GEMMA4,
            Self::Qwen2_5Vl => &QWEN2_5_VL,
            Self::Qwen3Vl => &QWEN3_VL,
            Self::Qwen3_5 => &QWEN3_5,
            Self::Mistral3 => &MISTRAL3,
        }
    }
}

impl fmt::Display for Wrapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

impl WrapperTable {
    /// Returns the text decoder's family and table.
    pub(super) fn text(&self, fields: &Fields) -> Result<(Family, &'static FamilyTable)> {
        // A flat file has the wrapper's name.
        let name = fields.text("model_type")?.filter(|name| *name != self.model_type);
        let Some(name) = name else { return Ok(self.texts[0]) };
        let found = self.texts.iter().find(|(_, table)| table.model_type == name);
        let known = || self.texts.iter().map(|(_, table)| table.model_type).collect::<Vec<_>>().join(", ");
        found.copied().ok_or_else(|| fields.unsupported("model_type", known()))
    }

    /// Returns `true` if the head is the embedding. `has_head` returns `true` if the files have a head, and `None` without files.
    pub(super) fn tie(&self, outer: &Fields, text: &Fields, has_head: impl FnOnce() -> Option<bool>) -> Result<bool> {
        let key = "tie_word_embeddings";
        let inner = text.flag(key)?;
        Ok(match outer.flag(key)? {
            Some(false) | None if self.inner_tie_holds && inner == Some(true) => true,
            Some(outer) => outer,
            // transformers' class ignores the field of `text_config`, and a stored head stays separate from the embedding.
            None => match (has_head(), inner) {
                (Some(true), _) => false,
                (Some(false), Some(inner)) => inner || self.ties_by_default,
                (Some(false), None) => true,
                (None, inner) => inner.unwrap_or(self.ties_by_default),
            },
        })
    }
}

/// Returns the object with the text decoder's fields.
pub(super) fn text_fields(outer: &Fields, wrapper: Wrapper) -> Result<Option<Fields>> {
    let text = outer.object("text_config")?;
    if text.is_none() && !wrapper.table().may_be_flat {
        return Err(outer.unsupported("text_config", "an object with the fields of the text decoder"));
    }
    Ok(text)
}

/// Returns the wrapper that `model_type` and `architectures` name.
pub(super) fn find(fields: &Fields) -> Result<Option<Wrapper>> {
    let by_type = fields.text("model_type")?.map(|name| Wrapper::ALL.into_iter().find(|w| w.model_type() == name));
    let architectures = fields.get("architectures").and_then(Value::as_array).filter(|list| !list.is_empty());
    let is_class = |wrapper: &Wrapper| has_name(architectures, wrapper.architecture());
    match by_type {
        Some(Some(kind)) if architectures.is_some() && !is_class(&kind) => {
            Err(fields.unsupported("architectures", format!("{} for model_type {kind}", kind.architecture())))
        }
        Some(kind) => Ok(kind),
        None => Ok(Wrapper::ALL.into_iter().find(is_class)),
    }
}
