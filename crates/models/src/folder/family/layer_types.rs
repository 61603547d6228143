//! The attention windows of layers in `config.json`.

use super::super::fields::Fields;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::layer::{LayerRope, LayerSpec};
use serde_json::Value;

/// Returns `true` for each layer with a sliding window: the entries of `layer_types`, or `usual` for each layer if there are none.
///
/// # Errors
/// An entry for another type of attention; a list of another length; a sliding layer without a `window`.
pub(super) fn sliding_layers(
    fields: &Fields,
    config: &ModelConfig,
    window: Option<usize>,
    usual: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    let count = config.num_hidden_layers;
    let Some(types) = fields.typed("layer_types", "a list of texts", Value::as_array)? else {
        return Ok((0..count).map(|layer| window.is_some() && usual(layer)).collect());
    };
    let sliding = types.iter().map(|kind| match kind.as_str() {
        Some("full_attention") => Some(false),
        Some("sliding_attention") if window.is_some() => Some(true),
        _ => None,
    });
    let sliding = sliding.collect::<Option<Vec<_>>>().ok_or_else(|| {
        fields.unsupported(
            "layer_types",
            match window {
                Some(_) => "full_attention or sliding_attention in every layer",
                None => "full_attention in every layer, because no sliding_window is in use",
            },
        )
    })?;
    if sliding.len() != count {
        return Err(fields.unsupported("layer_types", format!("one entry for each of the {count} layers")));
    }
    Ok(sliding)
}

/// Returns the size of the window if sequences can be longer.
pub(super) fn effective(window: Option<usize>, config: &ModelConfig) -> Option<usize> {
    window.filter(|window| *window < config.max_position_embeddings)
}

/// Sets the layers of a model whose layers differ in their windows only.
pub(super) fn set_windows(config: &mut ModelConfig, window: Option<usize>, sliding: &[bool]) {
    let window = effective(window, config);
    let layer =
        |is_sliding: &bool| LayerSpec { sliding_window: window.filter(|_| *is_sliding), ..LayerSpec::default() };
    config.layers = ModelConfig::shortest(sliding.iter().map(layer).collect());
}

/// Reads a window that all layers have; a missing field is `default`, and null is no window.
pub(super) fn read_one_window(fields: &Fields, config: &mut ModelConfig, default: Option<usize>) -> Result<()> {
    let is_missing = !fields.keys().any(|key| key == "sliding_window");
    let window = if is_missing { default } else { positive_window(fields)? };
    let sliding = sliding_layers(fields, config, window, |_| true)?;
    // The class ignores `layer_types`.
    if sliding.iter().any(|is_sliding| *is_sliding != window.is_some()) {
        let supported = "sliding_attention in every layer: the class applies sliding_window to all layers";
        return Err(fields.unsupported("layer_types", supported));
    }
    set_windows(config, window, &sliding);
    Ok(())
}

/// Reads `sliding_window`, if it is not null.
pub(super) fn positive_window(fields: &Fields) -> Result<Option<usize>> {
    match fields.count("sliding_window")? {
        Some(0) => Err(fields.unsupported("sliding_window", "at least 1, or null for none")),
        window => Ok(window),
    }
}

/// Writes the window that all layers have.
pub(super) fn write_one_window(config: &ModelConfig, json: &mut Value) {
    json["sliding_window"] = config.layer(0).sliding_window.into();
}

/// Sets the layers of a model whose sliding layers have unscaled frequencies of base `local_theta`. If all frequencies are equal, layers
/// differ in their windows only. `window` is in tokens; `sliding` has one entry per layer.
pub(super) fn set_layers_with_ropes(
    config: &mut ModelConfig,
    window: Option<usize>,
    sliding: &[bool],
    local_theta: f64,
) {
    let window = effective(window, config);
    // Equal frequencies in all layers need no second table.
    let is_local = local_theta != config.rope_theta || config.rope_scaling.is_some();
    let local = if is_local { LayerRope::Local } else { LayerRope::Global };
    let layer = |is_sliding: &bool| match is_sliding {
        true => LayerSpec { sliding_window: window, rope: local, ..LayerSpec::default() },
        false => LayerSpec::default(),
    };
    config.layers = ModelConfig::shortest(sliding.iter().map(layer).collect());
    config.rope_local_theta = Some(local_theta).filter(|_| is_local && sliding.contains(&true));
}

/// Writes `layer_types`, `sliding_window` and `rope_parameters` by layer type, in the layout of transformers 5.
pub(super) fn write_layers_with_ropes(config: &ModelConfig, json: &mut Value) {
    let layers: Vec<LayerSpec> = (0..config.num_hidden_layers).map(|index| config.layer(index)).collect();
    let is_sliding = |layer: &LayerSpec| layer.sliding_window.is_some() || layer.rope == LayerRope::Local;
    let name = |layer: &LayerSpec| if is_sliding(layer) { "sliding_attention" } else { "full_attention" };
    let window = layers.iter().find_map(|layer| layer.sliding_window).unwrap_or(config.max_position_embeddings);
    json["layer_types"] = layers.iter().map(name).collect();
    json["sliding_window"] = window.into();
    let mut full = super::super::rope_json::written(config);
    if full.is_null() {
        full = serde_json::json!({"rope_type": "default"});
    }
    full["rope_theta"] = config.rope_theta.into();
    let theta = config.rope_local_theta.unwrap_or(config.rope_theta);
    json["rope_parameters"] = serde_json::json!({
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    });
    if let Value::Object(json) = json {
        ["rope_theta", "rope_scaling"].iter().for_each(|key| drop(json.remove(*key)));
    }
}
