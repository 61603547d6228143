//! Times one step of the loss of precomputed logits, and compares it with one pass over the same memory:
//! `cargo run --release -p grpo-backend-cpu --example logits_speed -- N V threads steps [softcap]`.
//!
//! Prints the best of `steps` in wall time and in processor time (of all threads; other processes affect wall time
//! more). The floor reads every logit once and writes every entry of the gradient once, in the same buffers with the
//! same threads.

use grpo_backend_cpu::{CpuBackend, advise_huge_pages};
use grpo_core::*;
use half::bf16;
use rayon::prelude::*;
use std::time::Instant;

/// Logits with a standard deviation of about 2.
fn logits(count: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(count);
    advise_huge_pages(out.spare_capacity_mut());
    let mut state = 1_u64;
    out.extend((0..count).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 3.4
    }));
    out
}

/// Copies `from` into large pages.
fn huge<T: Copy>(from: impl ExactSizeIterator<Item = T>) -> Vec<T> {
    let mut out = Vec::with_capacity(from.len());
    advise_huge_pages(out.spare_capacity_mut());
    out.extend(from);
    out
}

/// Returns the processor time of this process in seconds, over all threads.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec` to a valid one.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The best wall time and the best processor time, in seconds.
struct Best(f64, f64);

impl Best {
    fn of(&mut self, step: impl FnOnce()) {
        let (start, used) = (Instant::now(), processor_seconds());
        step();
        (self.0, self.1) = (self.0.min(start.elapsed().as_secs_f64()), self.1.min(processor_seconds() - used));
    }
}

/// Runs `walk` on `threads` equal parts of `data`, each with its start index.
fn in_parts<T: Send>(pool: &rayon::ThreadPool, threads: usize, data: &mut [T], walk: impl Fn(&mut [T], usize) + Sync) {
    let part = data.len().div_ceil(threads);
    pool.install(|| data.par_chunks_mut(part).enumerate().for_each(|(i, data)| walk(data, i * part)));
}

fn main() -> Result<()> {
    let args: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let final_logit_softcapping = std::env::args().any(|a| a == "softcap").then_some(30.0);
    let number = |i: usize, default: usize| args.get(i).copied().unwrap_or(default);
    let (n, v, threads, steps) = (number(0, 1024), number(1, 151_936), number(2, 2), number(3, 10));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let original = logits(n * v);
    let mut buffer = huge(original.iter().copied());
    let original16 = huge(original.iter().map(|z| bf16::from_f32(*z)));
    let mut buffer16 = original16.clone();
    let mut grad = huge(vec![0.0_f32; n * v].into_iter());
    let batch = TokenBatch::packed((0..n).map(|i| (i * 7919 % v) as i64).collect(), vec![0, n / 2, n])?
        .with_advantages(Advantages::PerSequence(vec![1.0, -1.0]))?;
    let backend = CpuBackend::with_threads(threads)?;
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let request = PlanRequest {
            loss: LossConfig { final_logit_softcapping, ..LossConfig::default() }.into(),
            implementation: Implementation::Logits,
            tiling: Tiling {
                token_chunk: args.get(4).copied(),
                vocab_block: args.get(5).copied(),
                ..Tiling::default()
            },
            max_tokens: n,
            policy: PolicySpec::Logits { vocab: v, dtype },
            gradients: GradientSpec::default(),
        };
        let mut plan = backend.plan(&request)?;
        let mut best = [(); 5].map(|()| Best(f64::INFINITY, f64::INFINITY));
        let [in_place, separate, score, floor, floor_separate] = &mut best;
        for _ in 0..steps {
            floor.of(|| match dtype {
                Dtype::F32 => in_parts(&pool, threads, &mut buffer, |z, _| z.iter_mut().for_each(|z| *z = -*z)),
                Dtype::Bf16 => in_parts(&pool, threads, &mut buffer16, |z, _| z.iter_mut().for_each(|z| *z = -*z)),
            });
            floor_separate.of(|| {
                in_parts(&pool, threads, &mut grad, |out, at| match dtype {
                    Dtype::F32 => out.iter_mut().zip(&original[at..]).for_each(|(out, z)| *out += z),
                    Dtype::Bf16 => out.iter_mut().zip(&original16[at..]).for_each(|(out, z)| *out += z.to_f32()),
                });
            });
            let mut failed = None;
            match dtype {
                Dtype::F32 => buffer.copy_from_slice(&original),
                Dtype::Bf16 => buffer16.copy_from_slice(&original16),
            }
            in_place.of(|| {
                let place = match dtype {
                    Dtype::F32 => buffer.as_mut_slice().into(),
                    Dtype::Bf16 => buffer16.as_mut_slice().into(),
                };
                failed = plan.value_and_grad_in_place(place, &batch).err();
            });
            let given = || match dtype {
                Dtype::F32 => PolicyInput::Logits(original[..].into()),
                Dtype::Bf16 => PolicyInput::Logits(original16[..].into()),
            };
            separate.of(|| {
                let grads = GradsMut { logits: Some(grad.as_mut_slice().into()), ..GradsMut::default() };
                failed = plan.value_and_grad(given(), &batch, grads).err();
            });
            score.of(|| failed = plan.score(given(), &batch).err());
            if let Some(error) = failed {
                return Err(error);
            }
        }
        let show = |name: &str, best: &Best, floor: &Best| {
            let ratio = |time: f64, floor: f64| {
                format!("{:6.1} ms = {:4.2} x {:5.1} ms", time * 1e3, time / floor, floor * 1e3)
            };
            let (wall, processor) = (ratio(best.0, floor.0), ratio(best.1, floor.1));
            println!("{:4} {name:9} {wall}, processor {processor}", dtype.name());
        };
        show("in place", in_place, floor);
        show("separate", separate, floor_separate);
        show("score", score, floor);
    }
    Ok(())
}
