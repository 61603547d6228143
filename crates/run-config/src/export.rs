//! The section `export`: the model folder that a run leaves.

use crate::PolicyDtype;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The section `export`: the folder `RUN/model` in Hugging Face's layout, which a run of a pretrained model writes.
///
/// ```
/// let config = grpo_run_config::ExportConfig { merge_adapters: true, ..Default::default() };
/// assert_eq!(config.dtype, None);
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExportConfig {
    /// The dtype of exported weights, `float32` or `bfloat16`; `None` is the dtype of the pretrained model (f32 for f16 and for new
    /// models).
    pub dtype: Option<PolicyDtype>,
    /// The size of a weight file in bytes above which a new file is started.
    #[default(5_000_000_000)]
    pub max_shard_size: u64,
    /// `true` if adapters are merged into the weights, for a complete model; `false` for an adapter in PEFT's layout. Merging an adapter of
    /// a head that is tied to the embedding unties it (`tie_word_embeddings: false`).
    pub merge_adapters: bool,
}
