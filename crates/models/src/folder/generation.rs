//! Reads `generation_config.json`, the sampling defaults of a model.

use super::fields::{Fields, Neutral};
use crate::error::Result;
use serde_json::{Map, Value, json};

/// Sampling defaults of a model folder, by the names of `generation_config.json`; `None` for missing fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Every token that ends a completion: those of `generation_config.json`, then those of `config.json`, without duplicates.
    pub eos_token_id: Vec<u32>,
    /// The token that pads batches.
    pub pad_token_id: Option<u32>,
    /// The token that begins a text.
    pub bos_token_id: Option<u32>,
    /// `true` if tokens are sampled; `false` for greedy decoding.
    pub do_sample: Option<bool>,
    /// The divisor of the logits.
    pub temperature: Option<f64>,
    /// The number of most probable tokens to sample from; 0 for all.
    pub top_k: Option<usize>,
    /// The probability mass of the most probable tokens to sample from (nucleus sampling).
    pub top_p: Option<f64>,
    /// The minimum probability of a token relative to the most probable one.
    pub min_p: Option<f64>,
    /// The texts that end a completion.
    pub stop_strings: Vec<String>,
    /// The divisor of positive logits, and factor of negative ones, of tokens that already occurred.
    pub repetition_penalty: Option<f64>,
}

impl GenerationDefaults {
    /// Reads the defaults from `generation_config.json`, if it exists, and from the objects `configs` of `config.json`.
    pub(crate) fn read(generation: Option<&Fields>, configs: &[&Fields], vocab_size: usize) -> Result<Self> {
        let mut defaults = Self::default();
        for fields in generation.into_iter().chain(configs.iter().copied()) {
            fields.refuse(OTHER_SAMPLING)?;
            for id in tokens(fields, "eos_token_id", vocab_size)? {
                if !defaults.eos_token_id.contains(&id) {
                    defaults.eos_token_id.push(id);
                }
            }
            let one = |key| -> Result<_> { Ok(tokens(fields, key, vocab_size)?.first().copied()) };
            defaults.pad_token_id = defaults.pad_token_id.or(one("pad_token_id")?);
            defaults.bos_token_id = defaults.bos_token_id.or(one("bos_token_id")?);
        }
        if let Some(fields) = generation {
            let positive = |key| range(fields, key, "a number above 0", |n| n > 0.0);
            let share = |key| range(fields, key, "a number between 0 and 1", |n| (0.0..=1.0).contains(&n));
            defaults.do_sample = fields.flag("do_sample")?;
            // Some folders write 0 for greedy decoding.
            defaults.temperature = range(fields, "temperature", "a number that is not negative", |n| n >= 0.0)?;
            defaults.top_k = fields.count("top_k")?;
            defaults.top_p = share("top_p")?;
            defaults.min_p = share("min_p")?;
            defaults.repetition_penalty = positive("repetition_penalty")?;
            let texts = fields.typed("stop_strings", "a text or a list of texts that are not empty", |value| {
                let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
                list.iter().map(text).collect::<Option<Vec<_>>>()
            });
            defaults.stop_strings = texts?.unwrap_or_default();
        }
        Ok(defaults)
    }
}

/// Fields that forbid or force tokens. Sampling here can return every token.
const OTHER_SAMPLING: &[(&str, Neutral, &str)] = &[
    ("suppress_tokens", Neutral::Off, NO_TOKENS),
    ("begin_suppress_tokens", Neutral::Off, NO_TOKENS),
    ("bad_words_ids", Neutral::Off, NO_TOKENS),
    ("sequence_bias", Neutral::Off, NO_TOKENS),
    ("forced_bos_token_id", Neutral::Off, "null or no such field: no token is forced"),
    ("forced_eos_token_id", Neutral::Off, "null or no such field: no token is forced"),
    ("forced_decoder_ids", Neutral::Off, "null or no such field: no token is forced"),
    ("no_repeat_ngram_size", Neutral::Off, "0 or no such field: sequences of tokens may occur again"),
];
const NO_TOKENS: &str = "null, an empty list, or no such field: every token of the vocabulary can be sampled";

fn range(fields: &Fields, key: &str, supported: &str, legal: fn(f64) -> bool) -> Result<Option<f64>> {
    fields.typed(key, supported, |value| value.as_f64().filter(|&n| n.is_finite() && legal(n)))
}

/// Reads a token id or a list of them. -1 means none, which is invalid for the tokens that end a completion.
fn tokens(fields: &Fields, key: &str, vocab_size: usize) -> Result<Vec<u32>> {
    let may_be_none = key != "eos_token_id";
    let supported = format!("a token id below vocab_size ({vocab_size}), or a list of different ones");
    let ids = fields.typed(key, &supported, |value| {
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let mut ids = vec![];
        for id in list.iter().filter(|id| !(may_be_none && id.as_i64() == Some(-1))) {
            let id = id.as_u64().filter(|&id| id < vocab_size as u64).and_then(|id| u32::try_from(id).ok())?;
            if ids.contains(&id) {
                return None;
            }
            ids.push(id);
        }
        Some(ids)
    })?;
    Ok(ids.unwrap_or_default())
}

impl GenerationDefaults {
    /// Returns the fields with values as a `generation_config.json`.
    pub(crate) fn to_json(&self) -> Map<String, Value> {
        let list = |values: Vec<Value>| (!values.is_empty()).then_some(Value::Array(values));
        let eos = match self.eos_token_id.as_slice() {
            [one] => Some(json!(one)),
            several => list(several.iter().map(|id| json!(id)).collect()),
        };
        let fields = [
            ("eos_token_id", eos),
            ("pad_token_id", self.pad_token_id.map(Value::from)),
            ("bos_token_id", self.bos_token_id.map(Value::from)),
            ("do_sample", self.do_sample.map(Value::from)),
            ("temperature", self.temperature.map(Value::from)),
            ("top_k", self.top_k.map(Value::from)),
            ("top_p", self.top_p.map(Value::from)),
            ("min_p", self.min_p.map(Value::from)),
            ("repetition_penalty", self.repetition_penalty.map(Value::from)),
            ("stop_strings", list(self.stop_strings.iter().map(|text| json!(text)).collect())),
        ];
        fields.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    }
}
