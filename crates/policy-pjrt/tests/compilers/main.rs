//! Attention and the programs of rollout and training, compiled for TPU.

mod attention;
mod split;
mod training;

use grpo_backend_tpu::aot::{Analysis, Compiler, Target, user_cache};
use grpo_backend_tpu::compile_options::options_for;
use grpo_models::ModelConfig;
use grpo_pjrt::install::{Kind, install};
use grpo_pjrt::{CompileOptions, OptimizationLevel};
use grpo_policy::{LogitsProcessors, Sampling};
use grpo_policy_pjrt::decoder::{Compute, Decoder};
use grpo_policy_pjrt::{RequestOptions, RolloutOptions, RolloutPrograms, RolloutSizes};
use grpo_rng::Purpose;
use grpo_stablehlo::{Dtype, Module};
use std::sync::LazyLock;

grpo_testkit::tiers!();

/// Compiles at a given optimisation level; large programs compile much faster at a low one. Results are cached for this user.
pub(crate) fn compile_at(module: &Module, optimization_level: Option<OptimizationLevel>) -> Analysis {
    static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
        install(Kind::Tpu, |_| {}).expect("the TPU compiler can be installed");
        let compiler = Compiler::open(Target::parse("v6e:1x1").expect("a target"), None).expect("a compiler");
        compiler.with_cache(user_cache().expect("this user has a cache"))
    });
    let options = CompileOptions { optimization_level, ..options_for(Kind::Tpu, 1) };
    COMPILER.analyse(&module.to_string(), &options).unwrap_or_else(|error| panic!("{error}\n{module}"))
}

/// A small model whose rows and columns fill tiles of a TPU.
pub(crate) fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 4096,
        hidden_size: 512,
        intermediate_size: 2048,
        num_attention_heads: 4,
        max_position_embeddings: 1024,
        ..ModelConfig::default()
    }
}

#[test]
fn rollout_programs_compile_and_do_not_copy_the_kv_cache() {
    let config = ModelConfig { vocab_size: 1024, intermediate_size: 512, ..config() };
    let sizes = RolloutSizes {
        prompts: 8,
        longest_prompt: 128,
        num_generations: 8,
        max_completion_length: 385,
        conversations: false,
    };
    let processors = LogitsProcessors { top_k: Some(50), top_p: Some(0.9), ..LogitsProcessors::default() };
    let sampling =
        Sampling::Random { temperature: 0.8, processors, seed: 0, purpose: Purpose::Rollout, step: 0, first: 0 };
    let options = RolloutOptions::default();
    let decoder = Decoder::new(&config, Compute::Bf16);
    let modules =
        RolloutPrograms::of(Kind::Tpu, &decoder, Dtype::Bf16, options, sizes, RequestOptions::new(&sampling, 1))
            .expect("programs");
    // Keys and values of 2 layers, 64 slots, 2 heads, 512 columns of 128 numbers of 2 bytes.
    let cache = 2 * (2 * 64 * 2 * 512 * 128 * 2);
    let decode = modules.decode.iter().map(|(_, module)| ("decode", module));
    for (name, module) in [("prefill", &modules.prefill), ("admit", &modules.admit)].into_iter().chain(decode) {
        let memory = compile_at(module, None);
        assert!(memory.code_bytes > 0, "{name}: {memory:?}");
        if name != "prefill" {
            assert!(memory.alias_bytes >= cache && memory.temp_bytes < cache / 2, "{name}: {memory:?}");
        }
    }
}
