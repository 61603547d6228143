//! The backend `pjrt` compared with the f64 oracle: tilings, masks, meshes, rounding, and tensors that
//! stay on the devices. Runs on XLA's CPU plugin, which is installed if missing.

mod evaluation;
mod exactness;
mod golden;
mod grpo_loss;
mod logits;
mod masks;
mod mesh;
mod metrics;
mod not_finite;
mod numerics;
mod plans;
mod resident;
mod shapes;
mod tilings;
mod transforms;

use grpo_backend_tpu::PjrtBackend;
use grpo_backend_tpu::plugins::{self, Kind};
use grpo_backend_tpu::program::MeshShape;
use grpo_core::{Dtype, HeadLayout, Implementation, LossConfig, Tiling};
use grpo_pjrt::Client;
use grpo_testkit::xla_cpu::{flags, mesh_flags, program_cache};
use grpo_testkit::{Shape, config};
use std::sync::LazyLock;

/// The smallest cases that can be tiled, because programs take long to compile. The last sequence is fully masked, and
/// the ratios of the other sequences are biased to one side.
const SMALL: Shape<'static> = Shape {
    lengths: &[5, 0, 1, 7, 3],
    h: 12,
    v: 61,
    dtype: Dtype::F32,
    layout: HeadLayout::VocabHidden,
    bias: false,
    mask_every: 5,
    mask_last: true,
    temperatures: false,
    sampling_mask: false,
    lean: 0.1,
};

/// Returns a tiling with token chunks of this size.
fn chunks(size: usize) -> Tiling {
    Tiling { token_chunk: Some(size), ..Tiling::default() }
}

/// Returns a tiling with vocabulary panels of this size.
fn panels(size: usize) -> Tiling {
    Tiling { vocab_block: Some(size), ..Tiling::default() }
}

/// An implementation for hidden states and its name in messages.
type Named = (&'static str, Implementation, Tiling);

/// Returns every implementation, with tiles that do not divide the tokens and the vocabulary of [`SMALL`].
fn implementations() -> [Named; 4] {
    [
        ("reference", Implementation::Reference, Tiling::default()),
        ("logits", Implementation::Logits, Tiling::default()),
        ("chunks", Implementation::Fused, chunks(5)),
        ("panels", Implementation::Fused, panels(16)),
    ]
}

/// Returns a client with eight virtual devices, shared by all tests.
fn client() -> Client {
    static CLIENT: LazyLock<Client> = LazyLock::new(|| {
        plugins::install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
        plugins::client(Kind::Cpu, None, &[("cpu_device_count", 8.into())]).unwrap()
    });
    CLIENT.clone()
}

/// Returns a backend on one device with the compiler's defaults. Executables are cached.
fn optimised() -> PjrtBackend {
    let backend = PjrtBackend::new(Kind::Cpu, client()).unwrap();
    backend.with_compile_cache(program_cache())
}

/// Returns a backend on one device with quick compilation, for hundreds of programs that compile for longer than they run.
fn backend() -> PjrtBackend {
    flags().into_iter().fold(optimised(), |backend, (flag, value)| backend.with_compile_flag(flag, value))
}

fn on_mesh(data: usize, tensor: usize) -> PjrtBackend {
    let flags = mesh_flags().into_iter();
    let backend = flags.fold(optimised(), |backend, (flag, value)| backend.with_compile_flag(flag, value));
    backend.on_mesh(MeshShape { data, tensor }).unwrap()
}

/// Returns a loss with independent tokens and with every term enabled.
fn grpo() -> LossConfig {
    config(
        r#"{"loss_type": "grpo", "epsilon_high": 0.28, "delta": 1.33, "beta": 0.04, "entropy_coef": 0.02,
            "temperature": 0.9}"#,
    )
}

fn cispo() -> LossConfig {
    config(
        r#"{"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.1, "kl_estimator": "k2", "temperature": 0.7,
            "temperature_mode": "scale_logprobs"}"#,
    )
}

/// Returns a loss with a sequence-level ratio.
fn gspo() -> LossConfig {
    grpo_testkit::loss("gspo")
}

/// Returns a loss with a logit scale and a softcap before the temperature.
fn softcap() -> LossConfig {
    config(
        r#"{"loss_type": "grpo", "epsilon_high": 0.28, "beta": 0.04, "entropy_coef": 0.02, "temperature": 0.9,
            "logit_scale": 1.7, "final_logit_softcapping": 4.0}"#,
    )
}

/// Returns the same loss at sequence level, with the temperature after the softmax.
fn softcap_logprobs() -> LossConfig {
    config(
        r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.06, "beta": 0.1, "entropy_coef": -0.01,
            "logit_scale": -0.6, "final_logit_softcapping": 30.0, "temperature_mode": "scale_logprobs"}"#,
    )
}

grpo_testkit::tiers!();
