//! Fixtures of tests on meshes of eight virtual devices of XLA's CPU plugin.

use crate::support::moved;
use grpo_core::LossConfig;
use grpo_models::{LoraConfig, ModelConfig};
use grpo_pjrt::install::{Kind, install};
use grpo_policy::contract::Setup;
use grpo_policy::{Policy, Sequence};
use grpo_policy_pjrt::decoder::AxisRules;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use grpo_stablehlo::Mesh;
use grpo_testkit::xla_cpu::{mesh_flags, program_cache};
use std::sync::OnceLock;

pub(crate) fn rules(axes: &[(&str, usize)]) -> AxisRules {
    AxisRules::new(&Mesh::new("mesh", axes.iter().copied()).unwrap())
}

/// Returns eight virtual devices, which round differently from [`runtime`](crate::support::runtime). There is one client for all tests:
/// collectives of two clients in one process are mixed up.
pub(crate) fn eight() -> &'static Runtime {
    static EIGHT: OnceLock<Runtime> = OnceLock::new();
    EIGHT.get_or_init(|| {
        let installed = install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
        let runtime = Runtime::open_mesh(Kind::Cpu, Some(&installed.path), rules(&[("fsdp", 8)])).expect("8 devices");
        let runtime = runtime.with_compile_cache(program_cache());
        mesh_flags().into_iter().fold(runtime, |runtime, (flag, value)| runtime.with_compile_flag(flag, value))
    })
}

/// Returns the first ones of eight devices with this mesh.
pub(crate) fn on_mesh(axes: &[(&str, usize)]) -> Runtime {
    eight().clone().on_mesh(rules(axes)).unwrap()
}

/// Returns a model whose dimensions are divisible by eight, and whose heads are by two.
pub(crate) fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 32,
        hidden_size: 16,
        intermediate_size: 16,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        initializer_range: 0.3,
        ..ModelConfig::default()
    }
}

pub(crate) fn sequences() -> Vec<Sequence> {
    let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() };
    vec![of(&[1, 5, 6], &[7, 2]), of(&[1, 9], &[8, 10, 2])]
}

pub(crate) fn loss() -> LossConfig {
    Setup::default().loss
}

pub(crate) fn policy(runtime: &Runtime, lora: Option<&LoraConfig>, options: PjrtPolicyOptions) -> PjrtPolicy {
    with_moved_adapters(PjrtPolicy::new(runtime, &config(), 1, loss(), options).unwrap(), lora)
}

pub(crate) fn with_moved_adapters(policy: PjrtPolicy, lora: Option<&LoraConfig>) -> PjrtPolicy {
    let Some(lora) = lora else { return policy };
    let mut policy = policy.with_lora(lora, 1).unwrap();
    // Fresh adapters have gradients of 0.
    policy.import_weights(&moved(&policy, 0.05)).unwrap();
    policy
}
