//! Granite 3: Llama with four factors.

use super::layer_types::{set_windows, sliding_layers};
use super::table::{Defaults, FamilyTable, read_attention_bias};

pub(super) const TABLE: FamilyTable = FamilyTable {
    model_type: "granite",
    architecture: "GraniteForCausalLM",
    defaults: Defaults::USUAL,
    reads: &["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"],
    read: |fields, config| {
        read_attention_bias(fields, config)?;
        let sliding = sliding_layers(fields, config, None, |_| false)?;
        set_windows(config, None, &sliding);
        let factor = |key| fields.number(key).map(|factor| factor.unwrap_or(1.0));
        config.embedding_multiplier = factor("embedding_multiplier")?;
        config.residual_multiplier = factor("residual_multiplier")?;
        // Scores are not divided by sqrt(head_dim).
        config.attention_multiplier = Some(factor("attention_multiplier")?);
        config.logits_scaling = factor("logits_scaling")?;
        Ok(())
    },
    write: |config, json| {
        json["attention_bias"] = config.attention_bias.into();
        json["mlp_bias"] = false.into();
        json["embedding_multiplier"] = config.embedding_multiplier.into();
        json["residual_multiplier"] = config.residual_multiplier.into();
        let plain = (config.head_dim() as f64).powf(-0.5);
        json["attention_multiplier"] = config.attention_multiplier.unwrap_or(plain).into();
        json["logits_scaling"] = config.logits_scaling.into();
    },
};
