//! The committed checkpoints with the results of transformers and torch.

use grpo_models::{ModelConfig, ModelFolder, NamedTensor, Weights};
use grpo_policy::{OptimizerSettings, Sequence};
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

pub(crate) const ALL: [&str; 38] = [
    "qwen2",
    "qwen2_5_sharded",
    "qwen2_pad",
    "qwen3",
    "qwen3_f16",
    "qwen3_bias",
    "llama3",
    "llama3_bf16",
    "qwen2_window",
    "qwen2_yarn",
    "mistral",
    "ministral3",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "phi3",
    "llama_linear",
    "gemma3",
    "llama_dynamic",
    "gemma3_vision",
    "qwen2_5_vl",
    "qwen3_vl",
    "mistral3",
    "ministral3_vision",
    "qwen3_moe",
    "qwen3_moe_fused",
    "qwen3_moe_one",
    "qwen3_moe_idle",
    "qwen3_moe_sparse_step",
    "qwen2_moe",
    "qwen2_moe_fused",
    "glm4_moe",
    "glm4_moe_fused",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "gemma4",
    "gemma4_vision",
];

/// The checkpoints of models with Gated DeltaNets.
pub(crate) const GATED_DELTA_NETS: [&str; 2] = ["qwen3_5", "qwen3_5_vision"];

/// Returns `true` for experts without tokens, and for the router of one expert.
pub(crate) fn has_no_gradient(checkpoint: &str, parameter: &str) -> bool {
    let is_idle = |expert: usize| parameter.contains(&format!(".experts.{expert}."));
    (checkpoint == "qwen3_moe_idle" && [0, 1, 3].into_iter().any(is_idle))
        || (checkpoint == "qwen3_moe_one" && parameter.ends_with("mlp.gate.weight"))
}

/// The checkpoints with `router.safetensors`.
pub(crate) const ROUTERS: [&str; 7] = [
    "qwen3_moe",
    "qwen3_moe_fused",
    "qwen3_moe_one",
    "qwen3_moe_idle",
    "qwen3_moe_sparse_step",
    "qwen2_moe",
    "gpt_oss",
];

/// Returns `true` for the factors of layers and the correction biases of routers, which are never trained.
pub(crate) fn is_constant(parameter: &str) -> bool {
    parameter.ends_with("layer_scalar") || parameter.ends_with("e_score_correction_bias")
}

/// The checkpoints with an adapter in PEFT's layout.
pub(crate) const ADAPTED: [&str; 9] =
    ["llama3", "phi3", "gemma3", "gemma3_vision", "qwen3_vl", "qwen2_moe", "qwen3_moe", "gpt_oss", "gemma4"];

pub(crate) struct Checkpoint {
    pub(crate) folder: ModelFolder,
    pub(crate) weights: Weights,
    pub(crate) expected: Tensors,
}

/// Tensors by name, in f32.
pub(crate) struct Tensors(pub(crate) BTreeMap<String, NamedTensor>);

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/checkpoints").join(name)
}

impl Checkpoint {
    pub(crate) fn open(name: &str) -> Self {
        let folder = ModelFolder::open(&folder(name)).unwrap();
        let expected = Tensors::read(&folder.path().join("expected.safetensors"));
        Self { weights: folder.weights().unwrap(), expected, folder }
    }

    pub(crate) fn config(&self) -> &ModelConfig {
        self.folder.config()
    }

    /// Returns the sequences of the expected values, without padding.
    pub(crate) fn sequences(&self) -> Vec<Vec<u32>> {
        let (ids, mask) = (&self.expected.0["ids"], &self.expected.0["mask"]);
        let rows = ids.data.chunks_exact(ids.shape[1]).zip(mask.data.chunks_exact(ids.shape[1]));
        rows.map(|(ids, mask)| ids.iter().zip(mask).filter(|(_, m)| **m != 0.0).map(|(id, _)| *id as u32).collect())
            .collect()
    }

    /// Returns the logits `[length, V]` of sequence `i`.
    pub(crate) fn logits(&self, i: usize, length: usize) -> &[f32] {
        let logits = &self.expected.0["expected.logits"];
        let row = logits.shape[1] * logits.shape[2];
        &logits.data[i * row..i * row + length * logits.shape[2]]
    }

    /// Returns the sequences as prompts of one token and completions of the rest, without sequences of one token.
    pub(crate) fn completions(&self) -> Vec<Sequence> {
        let whole = self.sequences().into_iter().filter(|ids| ids.len() > 1);
        whole.map(|ids| Sequence { prompt: ids[..1].to_vec(), completion: ids[1..].to_vec() }).collect()
    }
}

/// The settings in the metadata of a file of expected values.
pub(crate) struct Settings(HashMap<String, String>);

impl Settings {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        Self(SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap())
    }

    pub(crate) fn number(&self, key: &str) -> f64 {
        self.0[key].parse().unwrap()
    }

    pub(crate) fn adamw(&self) -> OptimizerSettings {
        OptimizerSettings {
            adam_beta1: self.number("beta1"),
            adam_beta2: self.number("beta2"),
            adam_epsilon: self.number("eps"),
            weight_decay: self.number("weight_decay"),
            max_grad_norm: self.number("max_grad_norm"),
            ..OptimizerSettings::default()
        }
    }
}

impl Tensors {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            let words = |width: usize| view.data().chunks_exact(width);
            let data: Vec<f32> = match view.dtype() {
                Dtype::F32 => words(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect(),
                Dtype::I64 => words(8).map(|word| i64::from_le_bytes(word.try_into().unwrap()) as f32).collect(),
                Dtype::U8 => view.data().iter().map(|word| f32::from(*word)).collect(),
                other => panic!("{name}: {other:?}"),
            };
            // Models of images and text have other names for the gradients of their decoders.
            let name = match name.strip_prefix("expected.grad.") {
                Some(parameter) => format!("expected.grad.{}", grpo_models::text_tensor(parameter)),
                None => name,
            };
            (name.clone(), NamedTensor { name, shape: view.shape().to_vec(), data })
        });
        Self(tensors.collect())
    }
}
