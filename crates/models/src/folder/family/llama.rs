//! Llama 2 and 3, SmolLM2, and models distilled into them.

use super::layer_types::{set_windows, sliding_layers};
use super::table::{Defaults, FamilyTable, read_attention_bias};

pub(super) const TABLE: FamilyTable = FamilyTable {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    defaults: Defaults::USUAL,
    reads: &[],
    read: |fields, config| {
        read_attention_bias(fields, config)?;
        // The class has no sliding window.
        let sliding = sliding_layers(fields, config, None, |_| false)?;
        set_windows(config, None, &sliding);
        Ok(())
    },
    write: |config, json| {
        json["attention_bias"] = config.attention_bias.into();
        json["mlp_bias"] = false.into();
    },
};
