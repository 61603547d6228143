//! A small model folder on disk.

use grpo_models::{ModelConfig, ModelFolder};
use half::{bf16, f16};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A tensor to be written.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    pub(crate) fn of(dtype: Dtype, shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|&value| match dtype {
            Dtype::F32 => value.to_le_bytes().to_vec(),
            Dtype::F64 => f64::from(value).to_le_bytes().to_vec(),
            Dtype::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::I8 => vec![value as i8 as u8],
            other => panic!("{other} is not written here"),
        });
        Self { dtype, shape: shape.to_vec(), bytes: bytes.collect() }
    }
}

pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// A folder with a Qwen2 of two layers, which tests then damage.
pub(crate) struct Folder {
    pub(crate) root: TempDir,
    pub(crate) config: Value,
}

impl Folder {
    /// Creates a folder with `config.json` and without weights.
    pub(crate) fn new(config: Value) -> Self {
        let folder = Self { root: tempfile::tempdir().unwrap(), config };
        folder.json("config.json", &folder.config);
        folder
    }

    /// Creates a folder with weights in one file.
    pub(crate) fn whole() -> Self {
        let folder = Self::new(qwen2());
        folder.safetensors("model.safetensors", &folder.tensors(Dtype::F32));
        folder
    }

    /// Creates a folder with weights in two shards and an index.
    pub(crate) fn sharded() -> Self {
        let folder = Self::new(qwen2());
        let (first, second) = folder.halves();
        folder.shards(&first, &second);
        folder
    }

    /// Returns the two halves of the weights.
    pub(crate) fn halves(&self) -> (Tensors, Tensors) {
        self.tensors(Dtype::BF16).into_iter().partition(|(name, _)| name.contains("layers.0"))
    }

    pub(crate) fn shards(&self, first: &Tensors, second: &Tensors) {
        self.safetensors("model-00001-of-00002.safetensors", first);
        self.safetensors("model-00002-of-00002.safetensors", second);
        let place =
            |tensors: &Tensors, file: &str| tensors.keys().map(|n| (n.clone(), json!(file))).collect::<Vec<_>>();
        let mut map = place(first, "model-00001-of-00002.safetensors");
        map.extend(place(second, "model-00002-of-00002.safetensors"));
        let map: serde_json::Map<_, _> = map.into_iter().collect();
        self.json("model.safetensors.index.json", &json!({"metadata": {"total_size": 0}, "weight_map": map}));
    }

    pub(crate) fn path(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub(crate) fn open(&self) -> grpo_models::Result<ModelFolder> {
        ModelFolder::open(self.path())
    }

    pub(crate) fn model(&self) -> ModelConfig {
        self.open().unwrap().config().clone()
    }

    /// Returns values that differ between tensors and indices and are exact in bf16.
    pub(crate) fn tensors(&self, dtype: Dtype) -> Tensors {
        let parameters = self.model().parameters();
        let tensors = parameters.iter().enumerate().map(|(place, parameter)| {
            let values: Vec<f32> =
                (0..parameter.len()).map(|index| ((place * 31 + index * 7) % 255) as f32 / 64.0 - 2.0).collect();
            (parameter.name.clone(), Tensor::of(dtype, &parameter.shape, &values))
        });
        tensors.collect()
    }

    pub(crate) fn json(&self, name: &str, value: &Value) {
        std::fs::write(self.file(name), serde_json::to_string_pretty(value).unwrap()).unwrap();
    }

    pub(crate) fn safetensors(&self, name: &str, tensors: &Tensors) {
        let views =
            tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
        std::fs::write(self.file(name), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// Opens the weights and runs all checks. Returns the error's text.
    pub(crate) fn refused(&self) -> String {
        let open = || -> grpo_models::Result<()> {
            let folder = self.open()?;
            let weights = folder.weights()?;
            weights.check(folder.config())?;
            weights.check_finite()
        };
        whole_text(open().expect_err("the folder is damaged"))
    }
}

/// Returns a file or folder of the fixtures for tokenizers and chat templates.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(name)
}

/// Reads a JSON file of the fixtures.
pub(crate) fn fixture_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

/// Returns the configuration of a small Qwen2 as transformers 4 writes it.
pub(crate) fn qwen2() -> Value {
    json!({
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 16,
        "initializer_range": 0.02,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "max_window_layers": 2,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": null,
        "rope_theta": 1000000.0,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": true,
        "use_mrope": false,
        "use_sliding_window": false,
        "vocab_size": 32
    })
}

/// Returns `value` with the fields replaced; null removes a field.
pub(crate) fn with(mut value: Value, fields: Value) -> Value {
    for (key, field) in fields.as_object().unwrap() {
        if field.is_null() {
            value.as_object_mut().unwrap().remove(key);
        } else {
            value[key] = field.clone();
        }
    }
    value
}

/// Checks that `text` contains all of `parts`.
#[track_caller]
pub(crate) fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// Returns an error with its causes, as the command line shows it.
pub(crate) fn whole_text(error: impl std::error::Error + 'static) -> String {
    let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
