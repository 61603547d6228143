//! Known traps of other systems. Each test has a naive version that fails by an asserted margin, and compares this
//! backend with the f64 oracle or with a number computed by hand.
//!
//! docs/traps.md lists all traps, including those tested elsewhere.

mod collapse;
mod denominators;
mod groups;
mod masks;
mod not_finite;
mod overflow;
mod rounding;
mod sampler;
mod sizes;
mod steps;
mod tiles;

use grpo_backend_cpu::oracle::{Evaluation, Policy, evaluate};
use grpo_backend_cpu::{CpuBackend, Isa};
use grpo_core::*;
use grpo_testkit::cpu::{implementations, plan, takes_logits};
use grpo_testkit::{Case, Tensor, run, transposed};

/// The results of one implementation for precomputed logits.
struct Found {
    /// The name of the implementation.
    how: String,
    loss: f64,
    scores: Scores,
    /// dL/dlogits `[N, V]`.
    dz: Vec<f32>,
}

/// Makes a head with exactly the logits `z` `[N, V]`: the hidden states are rows of the identity matrix, and dL/dhead
/// is the transpose of dL/dlogits. Values of masked tokens are NaN.
fn identity(z: &[f32], v: usize, batch: &TokenBatch) -> Case {
    let n = batch.tokens();
    let (mut hidden, mut lm_head) = (vec![f32::NAN; n * n], vec![0.0; v * n]);
    for &i in batch.active_rows() {
        hidden[i * n..(i + 1) * n].fill(0.0);
        hidden[i * n + i] = 1.0;
        (0..v).for_each(|j| lm_head[j * n + i] = z[i * v + j]);
    }
    let layout = HeadLayout::VocabHidden;
    let (hidden, lm_head) = (Tensor::new(hidden, Dtype::F32), Tensor::new(lm_head, Dtype::F32));
    Case { hidden, lm_head, bias: None, h: n, v, layout, batch: batch.clone() }
}

/// Runs the logits `z` `[N, V]` through every implementation, blocking and instruction set of this machine.
fn everywhere(loss: &LossConfig, z: &[f32], v: usize, batch: &TokenBatch) -> Vec<Found> {
    let (n, case) = (batch.tokens(), identity(z, v, batch));
    let mut found = Vec::new();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with_threads(2).unwrap().with_isa(isa);
        for (name, implementation, tiling) in implementations() {
            let how = format!("{} {name}", isa.name());
            let mut request = case.request(loss, implementation, tiling);
            let out = run(&mut *plan(&backend, &request), &case);
            let dz = transposed(&out.lm_head, v, n);
            found.push(Found { how: how.clone(), loss: out.loss, scores: out.scores, dz });
            if !takes_logits(&implementation) {
                continue;
            }
            request.policy = PolicySpec::Logits { vocab: v, dtype: Dtype::F32 };
            let mut dz = vec![0.0; n * v];
            let mut plan = plan(&backend, &request);
            let out = plan.value_and_grad(PolicyInput::Logits(z.into()), batch, Grads::of_logits(&mut dz)).unwrap();
            let how = format!("{how}, given logits");
            found.push(Found { how, loss: out.loss, scores: out.scores, dz });
        }
    }
    found
}

/// Runs the oracle on precomputed logits; logits of masked tokens may be anything.
fn oracle(loss: &LossConfig, z: &[f32], v: usize, batch: &TokenBatch) -> Evaluation<f64> {
    let wide: Vec<f64> = z.iter().copied().map(f64::from).collect();
    evaluate(loss, &Policy::logits(&wide, v), batch).unwrap()
}

/// Makes one sequence of `targets` with one advantage.
fn sequence(targets: &[i64], advantage: f32) -> TokenBatch {
    TokenBatch::packed(targets.to_vec(), vec![0, targets.len()])
        .and_then(|batch| batch.with_advantages(Advantages::PerSequence(vec![advantage])))
        .unwrap()
}

/// The naive log-softmax: in f32, with the target in the sum.
fn naive_logp(z: &[f32], target: usize) -> f32 {
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    z[target] - (max + z.iter().map(|z| (z - max).exp()).sum::<f32>().ln())
}

/// Returns `true` if `got` is within a relative `tolerance` of `expected`.
fn close(got: f32, expected: f64, tolerance: f64) -> bool {
    (f64::from(got) - expected).abs() <= tolerance * expected.abs()
}
