//! The backend `pjrt` against the f64 oracle: tilings, masks, meshes, rounding, tensors that
//! stay on the devices. Runs on XLA's CPU plugin, which is installed if it is not there.

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

use backend_tpu::PjrtBackend;
use backend_tpu::plugins::{self, Kind};
use backend_tpu::program::Mesh;
use grpo_core::{Dtype, HeadLayout, LossConfig, Tiling};
use pjrt::Client;
use std::sync::LazyLock;
use testkit::xla_cpu::QUICK;
use testkit::{Shape, config};

/// Cases as small as they can be and still be cut: programs take long to compile. The last sequence is masked as a whole, and
/// ratios of the others lean to one side.
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
    lean: 0.1,
};

/// Chunks of so many tokens.
fn chunks(size: usize) -> Tiling {
    Tiling { token_chunk: Some(size), ..Tiling::default() }
}

/// Panels of so many vocabulary entries.
fn panels(size: usize) -> Tiling {
    Tiling { vocab_block: Some(size), ..Tiling::default() }
}

/// Eight virtual devices, shared by all tests.
fn client() -> Client {
    static CLIENT: LazyLock<Client> = LazyLock::new(|| {
        plugins::install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
        plugins::client(Kind::Cpu, None, &[("cpu_device_count", 8.into())]).unwrap()
    });
    CLIENT.clone()
}

/// One of the devices, with the compiler's defaults. What was compiled once stays in the target folder; an entry is found by the program, the
/// options and the plugin's version.
fn optimised() -> PjrtBackend {
    let backend = PjrtBackend::new(Kind::Cpu, client()).unwrap();
    backend.with_compile_cache(concat!(env!("CARGO_TARGET_TMPDIR"), "/compiled"))
}

/// One of the devices, for hundreds of programs that are compiled for longer than they run.
fn backend() -> PjrtBackend {
    QUICK.iter().fold(optimised(), |backend, (flag, value)| backend.with_compile_flag(flag, *value))
}

fn on_mesh(data: usize, vocab: usize) -> PjrtBackend {
    backend().with_mesh(Mesh { data, vocab }).unwrap()
}

/// A loss whose derivative is a token's own business, with every term turned on.
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

/// A loss whose ratio is that of a sequence.
fn gspo() -> LossConfig {
    testkit::loss("gspo")
}

/// Logits that are scaled and capped before the temperature.
fn softcap() -> LossConfig {
    config(
        r#"{"loss_type": "grpo", "epsilon_high": 0.28, "beta": 0.04, "entropy_coef": 0.02, "temperature": 0.9,
            "logit_scale": 1.7, "final_logit_softcapping": 4.0}"#,
    )
}

/// The same at sequence level, and the temperature after the softmax.
fn softcap_logprobs() -> LossConfig {
    config(
        r#"{"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.06, "beta": 0.1, "entropy_coef": -0.01,
            "logit_scale": -0.6, "final_logit_softcapping": 30.0, "temperature_mode": "scale_logprobs"}"#,
    )
}
