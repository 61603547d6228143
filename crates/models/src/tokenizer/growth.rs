//! Bounds on what a tokenizer.json of others makes of a text.
//!
//! A few bytes of it can ask for all memory: normalizers that replace `a` by a thousand letters, one after another; a table of
//! characters that says it has billions of entries; a post-processor that puts thousands of special tokens around a text. So each part
//! that makes texts longer is read before the library `tokenizers` builds a tokenizer of it, because building one normalizes the added tokens:
//!
//! | part | bound |
//! |---|---|
//! | normalizer | no step may make more than [`MAX_TEXT`] bytes of a text; checked with each text that is long enough for it |
//! | pre-tokenizer, decoder | a text may become [`MAX_FACTOR`] times as long at most |
//! | post-processor | [`MAX_PIECES`] pieces and special tokens |
//! | tokens | [`MAX_TOKEN`] bytes each |

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{
    DecoderWrapper, NormalizedString, Normalizer, NormalizerWrapper, PostProcessor, PostProcessorWrapper,
    PreTokenizerWrapper,
};

/// The longest normalized text in bytes. The library has 17 bytes of memory for each.
const MAX_TEXT: usize = 32 << 20;
/// How much longer a text may become in a pre-tokenizer or a decoder.
const MAX_FACTOR: usize = 256;
/// The largest number of pieces of a post-processor, and of the special tokens that it adds.
const MAX_PIECES: usize = 1024;
/// The longest token in bytes. Tokens of today's models have at most some hundreds.
pub(super) const MAX_TOKEN: usize = 1 << 16;

/// What a normalizer makes of the length of a text.
#[derive(Default)]
pub(super) struct Growth {
    steps: Vec<Step>,
}

struct Step {
    name: String,
    normalizer: NormalizerWrapper,
    /// How much longer a text becomes at most.
    factor: usize,
}

/// The parts of a tokenizer.json that make texts longer.
#[derive(Deserialize)]
pub(super) struct Parts {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
}

impl Parts {
    /// Checks everything that needs no text.
    pub(super) fn growth(&self) -> Result<Growth, String> {
        let mut growth = Growth::default();
        if let Some(given) = &self.normalizer {
            check_tables(given)?;
            for value in steps(canonical::<NormalizerWrapper>("normalizer", given)?, "normalizers") {
                let factor = normalizer_factor(&value)?;
                let normalizer = serde_json::from_value(value.clone()).map_err(|e| format!("normalizer: {e}"))?;
                growth.steps.push(Step { name: name(&value), normalizer, factor });
            }
        }
        let pre_tokenizer = self.pre_tokenizer.as_ref();
        bound::<PreTokenizerWrapper>("pre_tokenizer", pre_tokenizer, "pretokenizers", pre_tokenizer_factor)?;
        bound::<DecoderWrapper>("decoder", self.decoder.as_ref(), "decoders", decoder_factor)?;
        if let Some(given) = &self.post_processor {
            let processor: PostProcessorWrapper =
                PostProcessorWrapper::deserialize(given).map_err(|e| format!("post_processor: {e}"))?;
            let added = processor.added_tokens(false).max(pieces(given));
            if added > MAX_PIECES {
                return Err(format!(
                    "post_processor: expected at most {MAX_PIECES} pieces and special tokens around a text, got {added}"
                ));
            }
        }
        Ok(growth)
    }
}

impl Growth {
    /// Checks that `text` does not become too long.
    pub(super) fn check(&self, text: &str) -> Result<(), String> {
        let all = self.steps.iter().fold(1_usize, |all, step| all.saturating_mul(step.factor));
        if text.len().saturating_mul(all) <= MAX_TEXT {
            return Ok(());
        }
        let mut normalized = NormalizedString::from(text);
        for Step { name, normalizer, factor } in &self.steps {
            let length = normalized.get().len();
            if length.saturating_mul(*factor) > MAX_TEXT {
                return Err(format!(
                    "normalizer: `{name}` may make a text {factor} times as long, and the limit is {} MiB: it has {length} bytes of a \
                     text of {}",
                    MAX_TEXT >> 20,
                    text.len()
                ));
            }
            normalizer.normalize(&mut normalized).map_err(|e| format!("normalizer: `{name}`: {e}"))?;
        }
        Ok(())
    }
}

/// A part as the library writes it: with its type, and with the values that it really has.
fn canonical<T: Serialize + for<'de> Deserialize<'de>>(part: &str, given: &Value) -> Result<Value, String> {
    let error = |e: serde_json::Error| format!("{part}: {e}");
    serde_json::to_value(T::deserialize(given).map_err(error)?).map_err(error)
}

/// The steps of a part; `list` is the field of a sequence.
fn steps(value: Value, list: &str) -> Vec<Value> {
    match value {
        Value::Object(mut map) if map.contains_key(list) => {
            let inner = map.remove(list).unwrap_or_default();
            let inner = if let Value::Array(inner) = inner { inner } else { vec![] };
            inner.into_iter().flat_map(|value| steps(value, list)).collect()
        }
        value => vec![value],
    }
}

fn name(step: &Value) -> String {
    step["type"].as_str().unwrap_or("a step").to_owned()
}

/// Checks the product of the factors of a part's steps.
fn bound<T: Serialize + for<'de> Deserialize<'de>>(
    part: &str,
    given: Option<&Value>,
    list: &str,
    factor: fn(&Value) -> usize,
) -> Result<(), String> {
    let Some(given) = given else { return Ok(()) };
    let all = steps(canonical::<T>(part, given)?, list).iter().map(factor).fold(1, usize::saturating_mul);
    if all > MAX_FACTOR {
        return Err(format!("{part}: expected a text to become at most {MAX_FACTOR} times as long, got {all} times"));
    }
    Ok(())
}

/// How many bytes a normalizer makes of one at most.
fn normalizer_factor(step: &Value) -> Result<usize, String> {
    Ok(match step["type"].as_str() {
        Some("Replace") => replace_factor(step),
        Some("Prepend") => 1 + step["prepend"].as_str().map_or(0, str::len),
        // Unicode Standard Annex 15, table of expansion factors.
        Some("NFC" | "NFD") => 3,
        Some("NFKC" | "NFKD") => 11,
        Some("Lowercase" | "ByteLevel") => 2,
        Some("Strip" | "StripAccents" | "Nmt") => 1,
        Some("BertNormalizer") => 8,
        Some("Precompiled") => {
            let table = decoded(step["precompiled_charsmap"].as_str().unwrap_or_default(), usize::MAX);
            table.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(1).max(1)
        }
        _ => return Err(format!("normalizer: `{}` is not supported", name(step))),
    })
}

fn pre_tokenizer_factor(step: &Value) -> usize {
    match step["type"].as_str() {
        Some("ByteLevel") => 4,
        Some("Metaspace") => 2 * step["replacement"].as_str().map_or(1, str::len),
        _ => 1,
    }
}

fn decoder_factor(step: &Value) -> usize {
    match step["type"].as_str() {
        Some("Replace") => replace_factor(step),
        Some("ByteLevel") => 3,
        Some("BPEDecoder") if step["suffix"] == "" => 2,
        Some("WordPiece" | "CTC") => 2,
        _ => 1,
    }
}

/// A pattern may match at every byte, and without a byte.
fn replace_factor(step: &Value) -> usize {
    let content = step["content"].as_str().map_or(0, str::len);
    match step["pattern"]["String"].as_str() {
        Some(text) if !text.is_empty() => content.div_ceil(text.len()).max(1),
        _ => 1 + content,
    }
}

/// The largest number of entries of a list in `value`.
fn pieces(value: &Value) -> usize {
    match value {
        Value::Array(list) => list.iter().map(pieces).max().unwrap_or(0).max(list.len()),
        Value::Object(map) => map.values().map(pieces).max().unwrap_or(0),
        _ => 0,
    }
}

/// Checks that a table of characters (`Precompiled`) is as long as it says: the library reserves memory for the announced length.
fn check_tables(value: &Value) -> Result<(), String> {
    match value {
        Value::Array(list) => list.iter().try_for_each(check_tables),
        Value::Object(map) => map.iter().try_for_each(|(key, value)| match value.as_str() {
            Some(text) if key == "precompiled_charsmap" => {
                let announced = decoded(text, 4).first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize);
                if announced > text.len() {
                    return Err(format!(
                        "normalizer: `precompiled_charsmap` says that it has {announced} bytes, and it is shorter"
                    ));
                }
                Ok(())
            }
            _ => check_tables(value),
        }),
        _ => Ok(()),
    }
}

/// At most `most` bytes of a text in base64.
fn decoded(text: &str, most: usize) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bits, mut count, mut bytes) = (0_u32, 0, vec![]);
    for value in text.bytes().filter_map(digit) {
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
        if bytes.len() == most {
            break;
        }
    }
    bytes
}
