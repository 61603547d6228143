//! transformers and peft load the folders and adapters that this crate writes.

use grpo_models::{
    Activation, Adapter, AdapterOptions, AdapterWriter, ClampedSwiglu, Dtype, Experts, ExportOptions, Family,
    FolderWriter, GenerationDefaults, LayerRope, LayerSpec, LinearAttention, ModelConfig, ModelFolder, NormPlacement,
    RopeScaling, RopeType, SharedExpert, SigmoidRouter,
};
use std::path::Path;

grpo_testkit::tiers!();

/// The checkpoints that libraries.py makes.
const CHECKPOINTS: [&str; 25] = [
    "qwen2",
    "qwen2-untied",
    "qwen3",
    "llama",
    "mistral",
    "ministral3",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "phi3",
    "gemma3",
    "gemma4",
    "glm4_moe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_5",
    "gpt_oss",
    "gemma3-vision",
    "gemma4-vision",
    "qwen2-vl",
    "qwen3-vl",
    "qwen3_5-vision",
    "mistral3",
    "ministral3-vision",
];
/// The checkpoints of the adapters that libraries.py makes.
const ADAPTED: [&str; 19] = [
    "qwen2",
    "qwen2",
    "qwen2-untied",
    "qwen3",
    "llama",
    "phi3",
    "gemma3",
    "gemma3-vision",
    "qwen2-vl",
    "qwen3_moe",
    "gpt_oss",
    "gemma4",
    "qwen3_5",
    "qwen3_5-vision",
    "qwen3_moe",
    "gpt_oss",
    "qwen2_moe",
    "qwen2_moe",
    "gpt_oss",
];

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
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
    for config in new_models() {
        let family = Family::of(&config).unwrap();
        write_new(&config, &place.join(format!("new-{family}"))).unwrap();
    }
    let said = libraries("compare", place);
    // Each checkpoint in 3 dtypes and 2 sizes of files, new models of all families, adapters.
    assert_eq!(said.lines().count(), CHECKPOINTS.len() * 3 * 2 + Family::ALL.len() + ADAPTED.len(), "{said}");
}

/// Runs libraries.py and returns its output.
fn libraries(command: &str, place: &Path) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/libraries.py");
    let output = grpo_testkit::python::Python::install()
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
fn rewrite(folder: &Path, to: &Path, dtype: Dtype, max_shard_size: u64) -> grpo_models::Result<()> {
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
fn rewrite_adapter(folder: &Path, from: &Path, to: &Path) -> grpo_models::Result<()> {
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

/// Returns a model of every family without a source folder.
fn new_models() -> Vec<ModelConfig> {
    let qwen2 = ModelConfig { attention_bias: true, tie_word_embeddings: true, ..ModelConfig::default() };
    let plain = ModelConfig { attention_bias: false, ..qwen2.clone() };
    let qwen3 = ModelConfig { qk_norm: true, head_dim: Some(32), ..plain.clone() };
    let scaling = RopeScaling { factor: 8.0, original_max_position_embeddings: 32, ..RopeScaling::default() };
    let llama = ModelConfig { rope_scaling: Some(scaling.clone()), rope_theta: 5e5, ..plain.clone() };
    let layer = |sliding_window, rope| LayerSpec { sliding_window, rope, ..LayerSpec::default() };
    let mistral = ModelConfig { layers: vec![layer(Some(8), LayerRope::Global)], ..plain.clone() };
    let growing = RopeScaling { rope_type: RopeType::Yarn, llama_4_scaling_beta: Some(0.1), ..scaling };
    let ministral3 = ModelConfig { rope_scaling: Some(growing), head_dim: Some(16), ..plain.clone() };
    let smollm3 =
        ModelConfig { layers: vec![layer(None, LayerRope::Global), layer(None, LayerRope::None)], ..plain.clone() };
    let olmo2 =
        ModelConfig { norm_placement: NormPlacement::After, qk_norm: true, qk_norm_over_heads: true, ..plain.clone() };
    let olmo3 = ModelConfig { layers: vec![layer(Some(8), LayerRope::Global), LayerSpec::default()], ..olmo2.clone() };
    let granite = ModelConfig {
        residual_multiplier: 0.5,
        embedding_multiplier: 3.0,
        attention_multiplier: Some(0.2),
        logits_scaling: 2.0,
        ..plain.clone()
    };
    let pairs = RopeScaling { rope_type: RopeType::Longrope, short_factor: vec![1.5; 4], ..RopeScaling::default() };
    let phi3 =
        ModelConfig { fused_projections: true, partial_rotary_factor: 0.5, rope_scaling: Some(pairs), ..plain.clone() };
    let gemma3 = ModelConfig {
        layers: vec![layer(Some(8), LayerRope::Local), LayerSpec::default()],
        rope_theta: 1e6,
        rope_local_theta: Some(1e4),
        norm_placement: NormPlacement::Both,
        zero_centered_norms: true,
        hidden_act: Activation::GeluTanh,
        qk_norm: true,
        head_dim: Some(16),
        embedding_multiplier: 8.0,
        attention_multiplier: Some(0.25),
        ..plain.clone()
    };
    let wide =
        LayerSpec { head_dim: Some(24), num_key_value_heads: Some(1), keys_are_values: true, ..LayerSpec::default() };
    let half = RopeScaling { rope_type: RopeType::Proportional, partial_rotary_factor: 0.5, ..RopeScaling::default() };
    let gemma4 = ModelConfig {
        layers: vec![layer(Some(8), LayerRope::Local), wide],
        rope_scaling: Some(half),
        zero_centered_norms: false,
        value_norm: true,
        layer_scalars: true,
        attention_multiplier: Some(1.0),
        final_logit_softcapping: Some(30.0),
        ..gemma3.clone()
    };
    let qwen3_moe = ModelConfig { experts: Some(Experts::default()), ..qwen3.clone() };
    let with_shared = Experts { shared_expert: Some(SharedExpert::default()), ..Experts::default() };
    let shared_expert = Some(SharedExpert { is_gated: false, ..SharedExpert::default() });
    let of_glm = Experts { shared_expert, sigmoid: Some(SigmoidRouter::default()), ..Experts::default() };
    let dense = LayerSpec { dense_mlp: true, ..LayerSpec::default() };
    let glm4_moe = ModelConfig {
        experts: Some(of_glm),
        layers: vec![dense, LayerSpec::default()],
        partial_rotary_factor: 0.5,
        ..qwen3.clone()
    };
    let qwen2_moe = ModelConfig { experts: Some(with_shared), ..qwen2.clone() };
    let qwen3_5 = ModelConfig {
        layers: vec![LayerSpec::GATED_DELTA_NET, LayerSpec::default()],
        linear_attention: Some(LinearAttention::default()),
        attention_output_gate: true,
        zero_centered_norms: true,
        partial_rotary_factor: 0.25,
        ..qwen3.clone()
    };
    let clamped = Experts { clamped: Some(ClampedSwiglu::default()), ..Experts::default() };
    let gpt_oss = ModelConfig {
        intermediate_size: clamped.moe_intermediate_size,
        experts: Some(clamped),
        layers: vec![layer(Some(8), LayerRope::Global), LayerSpec::default()],
        attention_bias: true,
        attention_output_bias: true,
        attention_sinks: true,
        head_dim: Some(16),
        ..plain
    };
    vec![
        qwen2, qwen3, llama, mistral, ministral3, smollm3, olmo2, olmo3, granite, phi3, gemma3, gemma4, glm4_moe,
        qwen2_moe, qwen3_moe, qwen3_5, gpt_oss,
    ]
}

fn write_new(config: &ModelConfig, to: &Path) -> grpo_models::Result<()> {
    let generation = GenerationDefaults { eos_token_id: vec![2, 3], ..GenerationDefaults::default() };
    let options = ExportOptions { dtype: Dtype::F32, generation, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(to, config, None, options)?;
    for parameter in config.parameters() {
        let values: Vec<f32> = (0..parameter.len()).map(|index| (index % 251) as f32 / 251.0 - 0.5).collect();
        writer.write(&parameter.name, &values)?;
    }
    writer.finish()
}
