//! Writes a model folder again, with weights of another number type or in other files; an adapter of PEFT likewise:
//!
//!     cargo run -p grpo-models --example rewrite_folder -- FOLDER NEW_FOLDER float32|bfloat16|float16 BYTES_PER_FILE
//!     cargo run -p grpo-models --example rewrite_folder -- FOLDER --adapter ADAPTER NEW_ADAPTER
//!
//! or a small model that comes from no folder:
//!
//!     cargo run -p grpo-models --example rewrite_folder -- --new qwen2|qwen3|llama NEW_FOLDER
//!
//! `tests/python/libraries.py` beside it compares what comes out with what `transformers` and `peft` make of it.

use models::{
    Adapter, AdapterOptions, AdapterWriter, Dtype, ExportOptions, FolderWriter, GenerationDefaults, ModelConfig,
    ModelFolder, RopeScaling,
};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [folder, "--adapter", from, to] => adapter(folder, from, to),
        ["--new", family, to] => new(family, to),
        [folder, to, dtype, bytes] => model(folder, to, dtype, bytes.parse()?),
        _ => Err("expected FOLDER NEW_FOLDER DTYPE BYTES_PER_FILE, FOLDER --adapter ADAPTER NEW_ADAPTER, or --new FAMILY NEW_FOLDER"
            .into()),
    }
}

fn model(folder: &str, to: &str, dtype: &str, max_shard_size: u64) -> Result<(), Box<dyn Error>> {
    let source = ModelFolder::open(folder.as_ref())?;
    let weights = source.weights()?;
    weights.check(source.config())?;
    weights.check_finite()?;
    let dtype = Dtype::ALL.into_iter().find(|known| known.torch_name() == dtype).ok_or("an unknown number type")?;
    let options = ExportOptions { dtype, max_shard_size, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(to.as_ref(), source.config(), Some(&source), options)?;
    for parameter in source.config().parameters() {
        writer.write(&parameter.name, &weights.tensor(&parameter.name)?.to_vec())?;
    }
    Ok(writer.finish()?)
}

fn adapter(folder: &str, from: &str, to: &str) -> Result<(), Box<dyn Error>> {
    let base = ModelFolder::open(folder.as_ref())?;
    let adapter = Adapter::open(from.as_ref(), base.config())?;
    adapter.check_base(&base.weights()?)?;
    let options = AdapterOptions { base_model: Some(folder.into()), ..AdapterOptions::default() };
    let mut writer = AdapterWriter::create(to.as_ref(), adapter.config(), base.config(), Some(&base), options)?;
    for matrix in adapter.matrices() {
        writer.write(&matrix.lora_a(), &adapter.lora_a(matrix)?.to_vec())?;
        writer.write(&matrix.lora_b(), &adapter.lora_b(matrix)?.to_vec())?;
    }
    Ok(writer.finish()?)
}

fn new(family: &str, to: &str) -> Result<(), Box<dyn Error>> {
    let qwen2 = ModelConfig { attention_bias: true, tie_word_embeddings: true, ..ModelConfig::default() };
    let scaling =
        RopeScaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 32 };
    let config = match family {
        "qwen2" => qwen2,
        "qwen3" => ModelConfig { attention_bias: false, qk_norm: true, head_dim: Some(32), ..qwen2 },
        "llama" => ModelConfig { attention_bias: false, rope_scaling: Some(scaling), rope_theta: 5e5, ..qwen2 },
        other => return Err(format!("expected qwen2, qwen3 or llama, got {other}").into()),
    };
    let generation = GenerationDefaults { eos_token_id: vec![2, 3], ..GenerationDefaults::default() };
    let options = ExportOptions { dtype: Dtype::F32, generation, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(to.as_ref(), &config, None, options)?;
    for parameter in config.parameters() {
        let values: Vec<f32> = (0..parameter.len()).map(|index| (index % 251) as f32 / 251.0 - 0.5).collect();
        writer.write(&parameter.name, &values)?;
    }
    Ok(writer.finish()?)
}
