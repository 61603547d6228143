//! transformers and peft load the folders and adapters that this crate writes.

use models::{
    Adapter, AdapterOptions, AdapterWriter, Dtype, ExportOptions, FolderWriter, GenerationDefaults, ModelConfig,
    ModelFolder, RopeScaling,
};
use std::path::Path;

/// The checkpoints that libraries.py makes.
const CHECKPOINTS: [&str; 4] = ["qwen2", "qwen2-untied", "qwen3", "llama"];
/// The checkpoints of the adapters that libraries.py makes.
const ADAPTED: [&str; 5] = ["qwen2", "qwen2", "qwen2-untied", "qwen3", "llama"];

#[test]
fn transformers_and_peft_load_exported_folders_and_adapters() {
    let place = tempfile::tempdir().unwrap();
    let place = place.path();
    libraries("make", place);
    for name in CHECKPOINTS {
        for dtype in Dtype::ALL {
            for bytes in [5_000_000_000, 20_000] {
                let target = place.join(format!("{name}-{}-{bytes}", dtype.torch_name()));
                rewrite(&place.join(name), &target, dtype, bytes).unwrap();
            }
        }
    }
    for (number, name) in ADAPTED.into_iter().enumerate() {
        let [theirs, ours] = ["theirs", "ours"].map(|whose| place.join(format!("{whose}-{number}")));
        rewrite_adapter(&place.join(name), &theirs, &ours).unwrap();
    }
    let (qwen2, qwen3, llama) = new_models();
    for (family, config) in [("qwen2", qwen2), ("qwen3", qwen3), ("llama", llama)] {
        write_new(&config, &place.join(format!("new-{family}"))).unwrap();
    }
    let said = libraries("compare", place);
    // Each of 4 checkpoints in 3 dtypes and 2 sizes of files, 3 new models, 5 adapters.
    assert_eq!(said.lines().count(), 4 * 3 * 2 + 3 + 5, "{said}");
}

/// Runs libraries.py and returns its output.
fn libraries(command: &str, place: &Path) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/libraries.py");
    let output = testkit::python::Python::install()
        .command()
        .arg(script)
        .arg(command)
        .arg(place)
        .output()
        .expect("python3 starts");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{errors}");
    said.into_owned()
}

/// Rewrites a folder with another dtype or shard size.
fn rewrite(folder: &Path, to: &Path, dtype: Dtype, max_shard_size: u64) -> models::Result<()> {
    let source = ModelFolder::open(folder)?;
    let weights = source.weights()?;
    weights.check(source.config())?;
    weights.check_finite()?;
    let options = ExportOptions { dtype, max_shard_size, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(to, source.config(), Some(&source), options)?;
    for parameter in source.config().parameters() {
        writer.write(&parameter.name, &weights.tensor(&parameter.name)?.to_vec())?;
    }
    writer.finish()
}

/// Rewrites an adapter of PEFT.
fn rewrite_adapter(folder: &Path, from: &Path, to: &Path) -> models::Result<()> {
    let base = ModelFolder::open(folder)?;
    let adapter = Adapter::open(from, base.config())?;
    adapter.check_base(&base.weights()?)?;
    let options = AdapterOptions { base_model: Some(folder.display().to_string()), ..AdapterOptions::default() };
    let mut writer = AdapterWriter::create(to, adapter.config(), base.config(), Some(&base), options)?;
    for matrix in adapter.matrices() {
        writer.write(&matrix.lora_a(), &adapter.lora_a(matrix)?.to_vec())?;
        writer.write(&matrix.lora_b(), &adapter.lora_b(matrix)?.to_vec())?;
    }
    writer.finish()
}

/// Returns a Qwen2, a Qwen3 and a Llama without a source folder.
fn new_models() -> (ModelConfig, ModelConfig, ModelConfig) {
    let qwen2 = ModelConfig { attention_bias: true, tie_word_embeddings: true, ..ModelConfig::default() };
    let qwen3 = ModelConfig { attention_bias: false, qk_norm: true, head_dim: Some(32), ..qwen2.clone() };
    let scaling =
        RopeScaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 32 };
    let llama = ModelConfig { attention_bias: false, rope_scaling: Some(scaling), rope_theta: 5e5, ..qwen2.clone() };
    (qwen2, qwen3, llama)
}

fn write_new(config: &ModelConfig, to: &Path) -> models::Result<()> {
    let generation = GenerationDefaults { eos_token_id: vec![2, 3], ..GenerationDefaults::default() };
    let options = ExportOptions { dtype: Dtype::F32, generation, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(to, config, None, options)?;
    for parameter in config.parameters() {
        let values: Vec<f32> = (0..parameter.len()).map(|index| (index % 251) as f32 / 251.0 - 0.5).collect();
        writer.write(&parameter.name, &values)?;
    }
    writer.finish()
}
