//! The rotary embedding in `config.json`: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of transformers 5.

use super::fields::Fields;
use crate::config::{ModelConfig, RopeScaling, RopeType};
use crate::error::{Error, Result};
use serde_json::{Value, json};

/// The entry of [`super::family::FamilyTable::reads`] of a family with `rope_parameters` by layer type.
pub(super) const BY_LAYER_TYPE: &str = "rope_parameters.full_attention";

/// The entry of [`super::family::FamilyTable::reads`] of a family with three positions per token (M-RoPE, arXiv 2409.12191), which are equal
/// in text, so that every pair of columns is turned by the same position.
pub(super) const MROPE: &str = "rope_parameters.mrope_section";

/// Returns `rope_scaling` or else `rope_parameters`; `transformers` has the same precedence.
pub(super) fn object(fields: &Fields) -> Result<Option<Fields>> {
    Ok(match scaling(fields)? {
        Some(rope) => Some(rope),
        None => fields.object("rope_parameters")?,
    })
}

/// Returns `rope_scaling`. An empty object is missing, as in `transformers`.
fn scaling(fields: &Fields) -> Result<Option<Fields>> {
    Ok(fields.object("rope_scaling")?.filter(|rope| rope.keys().next().is_some()))
}

/// Reads the rotary embedding of all layers; `reads` lists fields of the family. `config` has the theta of a file without one.
pub(super) fn read(fields: &Fields, config: &mut ModelConfig, reads: &[&str]) -> Result<()> {
    config.rope_theta = fields.number("rope_theta")?.unwrap_or(config.rope_theta);
    let is_partial = reads.contains(&"partial_rotary_factor");
    if let (true, Some(share)) = (is_partial, fields.number("partial_rotary_factor")?) {
        config.partial_rotary_factor = share;
    }
    let Some(rope) = object(fields)? else { return Ok(()) };
    if rope.get("full_attention").is_some() || rope.get("sliding_attention").is_some() {
        if reads.contains(&BY_LAYER_TYPE) {
            return Ok(());
        }
        return Err(
            rope.unsupported("full_attention", "the same rotary positions in every layer, not nested by layer type")
        );
    }
    let share = rope.number("partial_rotary_factor")?;
    if let (true, Some(share)) = (is_partial, share) {
        config.partial_rotary_factor = share;
    } else if share.is_some_and(|share| share != 1.0) {
        return Err(rope.unsupported("partial_rotary_factor", "1: every column of a head is turned by its position"));
    }
    let is_mrope = reads.contains(&MROPE);
    if rope.get("mrope_section").is_some() && !is_mrope {
        return Err(rope.unsupported("mrope_section", "null: every column of a head is turned by its position"));
    }
    // The name of the unscaled embedding in files of version 4.
    if is_mrope && [rope.text("rope_type")?, rope.text("type")?].contains(&Some("mrope")) {
        config.rope_theta = rope.number("rope_theta")?.unwrap_or(config.rope_theta);
        return Ok(());
    }
    read_scaling(fields, &rope, config)
}

/// Reads `rope_parameters` by layer type: sets theta and scaling of layers with full attention, and returns the theta of sliding layers;
/// `None` if the parameters are not nested.
///
/// # Errors
/// Scaled frequencies of sliding layers, which no model has; fields that the classes of `transformers` ignore or merge.
pub(super) fn read_by_layer_type(fields: &Fields, config: &mut ModelConfig) -> Result<Option<f64>> {
    let scaling = scaling(fields)?;
    let Some(rope) = fields.object("rope_parameters")? else {
        if scaling.is_some_and(|rope| rope.get("full_attention").is_some() || rope.get("sliding_attention").is_some()) {
            let supported = "the scaling of full attention; parameters by layer type are rope_parameters";
            return Err(fields.unsupported("rope_scaling", supported));
        }
        return Ok(None);
    };
    if scaling.is_some() {
        return Err(fields.unsupported("rope_scaling", "null beside rope_parameters"));
    }
    let [full, sliding] = [rope.object("full_attention")?, rope.object("sliding_attention")?];
    if full.is_none() && sliding.is_none() {
        let supported = "full_attention and sliding_attention: the class ignores other keys";
        return Err(fields.unsupported("rope_parameters", supported));
    }
    for part in [&full, &sliding].into_iter().flatten() {
        let is_proportional = part.text("rope_type")? == Some(RopeType::Proportional.name());
        if !is_proportional && part.number("partial_rotary_factor")?.is_some_and(|share| share != 1.0) {
            return Err(
                part.unsupported("partial_rotary_factor", "1: every column of a head is turned by its position")
            );
        }
        if part.get("mrope_section").is_some() {
            return Err(part.unsupported("mrope_section", "null: every column of a head is turned by its position"));
        }
    }
    if let Some(full) = full {
        if full.text("rope_type")? == Some(RopeType::Proportional.name()) {
            config.rope_theta = full.number("rope_theta")?.unwrap_or(config.rope_theta);
            config.rope_scaling = Some(proportional(&full)?);
        } else {
            read_scaling(fields, &full, config)?;
        }
    }
    let Some(sliding) = sliding else { return Ok(None) };
    let key = if sliding.get("rope_type").is_some() { "rope_type" } else { "type" };
    match sliding.text(key)? {
        None | Some("default") => sliding.number("rope_theta"),
        Some(_) => Err(sliding.unsupported(key, "default: unscaled frequencies in layers with a window")),
    }
}

/// Reads the scaling of partly rotated heads.
fn proportional(rope: &Fields) -> Result<RopeScaling> {
    Ok(RopeScaling {
        rope_type: RopeType::Proportional,
        factor: rope.number("factor")?.unwrap_or(1.0),
        partial_rotary_factor: rope.number("partial_rotary_factor")?.unwrap_or(1.0),
        ..RopeScaling::default()
    })
}

fn read_scaling(fields: &Fields, rope: &Fields, config: &mut ModelConfig) -> Result<()> {
    config.rope_theta = rope.number("rope_theta")?.unwrap_or(config.rope_theta);
    // Named `type` before version 4.43.
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let number = |key| rope.required(key, rope.number(key)?, "a number");
    let plain = RopeScaling::default();
    config.rope_scaling = match rope.text(key)? {
        // Dynamic scaling changes the frequencies of sequences above `max_position_embeddings`, which are errors here.
        None | Some("default" | "dynamic") => None,
        Some("linear") => Some(RopeScaling { rope_type: RopeType::Linear, factor: number("factor")?, ..plain }),
        Some("llama3") => Some(RopeScaling {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: original(fields, rope)?.unwrap_or(config.max_position_embeddings),
            ..plain
        }),
        Some("yarn") => Some(yarn(fields, rope, config)?),
        Some("longrope" | "su") => Some(longrope(fields, rope, config)?),
        Some(_) => return Err(rope.unsupported(key, "default, linear, dynamic, yarn, longrope, llama3")),
    };
    Ok(())
}

/// Returns the number of tokens of the original context.
fn original(fields: &Fields, rope: &Fields) -> Result<Option<usize>> {
    let key = "original_max_position_embeddings";
    let (inner, beside) = (rope.count(key)?, fields.count(key)?);
    match (inner, beside) {
        (Some(inner), Some(beside)) if inner != beside => Err(fields.unsupported(
            key,
            format!("{inner}, which rope scaling says; versions of transformers differ in which of both they take"),
        )),
        _ => Ok(inner.or(beside)),
    }
}

fn yarn(fields: &Fields, rope: &Fields, config: &ModelConfig) -> Result<RopeScaling> {
    let original = original(fields, rope)?.unwrap_or(config.max_position_embeddings);
    let ratio = config.max_position_embeddings as f64 / original.max(1) as f64;
    let factor = rope.number("factor")?.unwrap_or(ratio);
    // 0 is a missing number.
    let given = |key| Ok::<_, Error>(rope.number(key)?.filter(|value| *value != 0.0));
    let growth = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let attention_factor = match (rope.number("attention_factor")?, given("mscale")?, given("mscale_all_dim")?) {
        (Some(factor), ..) => factor,
        (None, Some(scale), Some(all)) => growth(scale) / growth(all),
        (None, ..) => growth(1.0),
    };
    Ok(RopeScaling {
        rope_type: RopeType::Yarn,
        factor,
        original_max_position_embeddings: original,
        beta_fast: given("beta_fast")?.unwrap_or(32.0),
        beta_slow: given("beta_slow")?.unwrap_or(1.0),
        truncate: rope.flag("truncate")?.unwrap_or(true),
        attention_factor,
        ..RopeScaling::default()
    })
}

/// Reads LongRoPE for sequences within the original context, and limits `config` to it. Beyond, `transformers` uses other frequencies for
/// all tokens of a batch with a longer sequence, so tokens that were sampled before would have other log-probabilities.
fn longrope(fields: &Fields, rope: &Fields, config: &mut ModelConfig) -> Result<RopeScaling> {
    let key = "original_max_position_embeddings";
    let original = rope.required(key, original(fields, rope)?, "a whole number above 0")?;
    let ratio = config.max_position_embeddings as f64 / original.max(1) as f64;
    let factor = rope.number("factor")?.unwrap_or(ratio);
    let grown = || if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
    let numbers = |list: &Vec<Value>| list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>();
    let short = rope.typed("short_factor", "a list of numbers", |value| value.as_array().and_then(numbers))?;
    config.max_position_embeddings = config.max_position_embeddings.min(original);
    Ok(RopeScaling {
        rope_type: RopeType::Longrope,
        attention_factor: rope.number("attention_factor")?.unwrap_or_else(grown),
        short_factor: rope.required("short_factor", short, "a list of numbers")?,
        ..RopeScaling::default()
    })
}

/// Returns `rope_scaling` of a `config.json`; null without scaling.
pub(super) fn written(config: &ModelConfig) -> Value {
    let Some(scaling) = &config.rope_scaling else { return Value::Null };
    let mut json = json!({"rope_type": scaling.rope_type.name()});
    let original = scaling.original_max_position_embeddings;
    let mut put = |key: &str, value: Value| json[key] = value;
    match scaling.rope_type {
        RopeType::Linear => put("factor", scaling.factor.into()),
        RopeType::Proportional => {
            put("factor", scaling.factor.into());
            put("partial_rotary_factor", scaling.partial_rotary_factor.into());
        }
        RopeType::Llama3 => {
            put("factor", scaling.factor.into());
            put("low_freq_factor", scaling.low_freq_factor.into());
            put("high_freq_factor", scaling.high_freq_factor.into());
            put("original_max_position_embeddings", original.into());
        }
        RopeType::Yarn => {
            put("factor", scaling.factor.into());
            put("beta_fast", scaling.beta_fast.into());
            put("beta_slow", scaling.beta_slow.into());
            if !scaling.truncate {
                put("truncate", false.into());
            }
            put("attention_factor", scaling.attention_factor.into());
            put("original_max_position_embeddings", original.into());
        }
        RopeType::Longrope => {
            put("short_factor", scaling.short_factor.clone().into());
            // Frequencies of longer sequences, which a model of this configuration does not have.
            put("long_factor", scaling.short_factor.clone().into());
            put("attention_factor", scaling.attention_factor.into());
            put("original_max_position_embeddings", config.max_position_embeddings.into());
        }
    }
    if let Some(beta) = scaling.llama_4_scaling_beta {
        put("llama_4_scaling_beta", beta.into());
    }
    json
}
