//! The committed checkpoints, and what transformers and torch made of them.

use models::{ModelConfig, NamedTensor, RopeScaling};
use policy::Sequence;
use policy_burn::decoder::TensorSource;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub(crate) const ALL: [&str; 6] = ["qwen2", "qwen2_5_sharded", "qwen3", "qwen3_f16", "llama3", "llama3_bf16"];

pub(crate) struct Checkpoint {
    pub(crate) config: ModelConfig,
    pub(crate) weights: Tensors,
    pub(crate) expected: Tensors,
    pub(crate) folder: PathBuf,
}

/// Tensors by name, in f32.
pub(crate) struct Tensors(pub(crate) BTreeMap<String, NamedTensor>);

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/checkpoints").join(name)
}

impl Checkpoint {
    pub(crate) fn open(name: &str) -> Self {
        let folder = folder(name);
        let mut weights = BTreeMap::new();
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap().to_str().unwrap();
            if file.starts_with("model") && file.ends_with(".safetensors") {
                weights.extend(Tensors::read(&path).0);
            }
        }
        let expected = Tensors::read(&folder.join("expected.safetensors"));
        Self { config: config(&folder.join("config.json")), weights: Tensors(weights), expected, folder }
    }

    /// The sequences of the expected values, without their padding.
    pub(crate) fn sequences(&self) -> Vec<Vec<u32>> {
        let (ids, mask) = (&self.expected.0["ids"], &self.expected.0["mask"]);
        let rows = ids.data.chunks_exact(ids.shape[1]).zip(mask.data.chunks_exact(ids.shape[1]));
        rows.map(|(ids, mask)| ids.iter().zip(mask).filter(|(_, m)| **m != 0.0).map(|(id, _)| *id as u32).collect())
            .collect()
    }

    /// The logits `[length, V]` of sequence `i`.
    pub(crate) fn logits(&self, i: usize, length: usize) -> &[f32] {
        let logits = &self.expected.0["expected.logits"];
        let row = logits.shape[1] * logits.shape[2];
        &logits.data[i * row..i * row + length * logits.shape[2]]
    }

    /// The sequences as prompts of one token with completions of all others; those of one token have nothing to predict.
    pub(crate) fn completions(&self) -> Vec<Sequence> {
        let whole = self.sequences().into_iter().filter(|ids| ids.len() > 1);
        whole.map(|ids| Sequence { prompt: ids[..1].to_vec(), completion: ids[1..].to_vec() }).collect()
    }
}

fn config(path: &Path) -> ModelConfig {
    let json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let size = |key: &str| json[key].as_u64().unwrap() as usize;
    let rope = if json["rope_parameters"].is_object() { &json["rope_parameters"] } else { &json["rope_scaling"] };
    let family = json["model_type"].as_str().unwrap();
    ModelConfig {
        vocab_size: size("vocab_size"),
        hidden_size: size("hidden_size"),
        intermediate_size: size("intermediate_size"),
        num_hidden_layers: size("num_hidden_layers"),
        num_attention_heads: size("num_attention_heads"),
        num_key_value_heads: size("num_key_value_heads"),
        head_dim: json["head_dim"].as_u64().map(|d| d as usize),
        max_position_embeddings: size("max_position_embeddings"),
        rope_theta: rope["rope_theta"].as_f64().or(json["rope_theta"].as_f64()).unwrap(),
        rope_scaling: (rope["rope_type"] == "llama3").then(|| RopeScaling {
            factor: rope["factor"].as_f64().unwrap(),
            low_freq_factor: rope["low_freq_factor"].as_f64().unwrap(),
            high_freq_factor: rope["high_freq_factor"].as_f64().unwrap(),
            original_max_position_embeddings: rope["original_max_position_embeddings"].as_u64().unwrap() as usize,
        }),
        attention_bias: family == "qwen2",
        qk_norm: family == "qwen3",
        rms_norm_eps: json["rms_norm_eps"].as_f64().unwrap(),
        tie_word_embeddings: json["tie_word_embeddings"].as_bool().unwrap(),
        initializer_range: 0.02,
    }
}

impl Tensors {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            let words = |width: usize| view.data().chunks_exact(width);
            let half = |word: &[u8]| u16::from_le_bytes(word.try_into().unwrap());
            let data: Vec<f32> = match view.dtype() {
                Dtype::F32 => words(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect(),
                Dtype::BF16 => words(2).map(|word| half::bf16::from_bits(half(word)).to_f32()).collect(),
                Dtype::F16 => words(2).map(|word| half::f16::from_bits(half(word)).to_f32()).collect(),
                Dtype::I64 => words(8).map(|word| i64::from_le_bytes(word.try_into().unwrap()) as f32).collect(),
                Dtype::U8 => view.data().iter().map(|word| f32::from(*word)).collect(),
                other => panic!("{name}: {other:?}"),
            };
            (name.clone(), NamedTensor { name, shape: view.shape().to_vec(), data })
        });
        Self(tensors.collect())
    }
}

impl TensorSource for Tensors {
    fn read(&self, name: &str, shape: &[usize], rows: Range<usize>, to: &mut [f32]) -> policy::Result<()> {
        let tensor = self.0.get(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!(tensor.shape, shape, "{name}");
        let width = shape[1..].iter().product::<usize>() * if shape.len() > 1 { 1 } else { shape[0] };
        to.copy_from_slice(&tensor.data[rows.start * width..rows.end * width]);
        Ok(())
    }
}
