//! Measures the sampling of a model folder on this CPU: tokens per second, and processor time per token.
//!
//!     scripts/random_model.py FOLDER
//!     cargo run --release -p grpo-policy-cpu --example generate -- FOLDER ROWS PROMPT TOKENS [float32|bfloat16] [BATCH]
//!
//! ROWS prompts of PROMPT tokens are continued by TOKENS tokens each; at most BATCH sequences decode together. Every run is measured once
//! with one token, which packs the weights and computes the prompts, and once with all tokens; the difference is the time of decoding. Prints
//! JSON: seconds of the first token and tokens per second after it, in wall time and in processor time (user and system, all threads); the
//! floor of a step, which is the larger of the weights' bytes over the measured bandwidth and the multiply-adds over the measured peak; and a
//! digest of the samples. Linux only, because processor time comes from `/proc`. `peers/bench_generate.py` compares other systems.

use backend_cpu::peak::{Stream, Traffic, flops};
use backend_cpu::{CpuBackend, keep_freed_memory};
use grpo_core::{Dtype, Implementation, LossConfig};
use models::ModelFolder;
use policy::{LogitsProcessors, Policy, RolloutRequest, Sampling};
use policy_cpu::{CpuPolicy, PolicyLoss};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Returns the user and system seconds of this process.
fn processor_time() -> Result<f64, Box<dyn Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // In units of 10 ms.
    Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / 100.0)
}

/// Returns (bytes per second, flop/s) of this machine.
fn rates(dtype: Dtype, threads: usize) -> (f64, f64) {
    let mut read = Stream::new(Traffic::Read, threads, 1 << 28);
    let seconds = (0..5).map(|_| read.run()).fold(f64::INFINITY, f64::min);
    (read.bytes() / seconds, flops(dtype, threads))
}

fn main() -> Result<(), Box<dyn Error>> {
    keep_freed_memory();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, rows, prompt, tokens, rest @ ..] = arguments.as_slice() else {
        return Err("expected FOLDER ROWS PROMPT TOKENS [float32|bfloat16] [BATCH]".into());
    };
    let (rows, prompt, tokens): (usize, usize, usize) = (rows.parse()?, prompt.parse()?, tokens.parse()?);
    let dtype = match rest.first().map(String::as_str) {
        None | Some("float32") => Dtype::F32,
        Some("bfloat16") => Dtype::Bf16,
        Some(other) => return Err(format!("expected float32 or bfloat16, got {other}").into()),
    };
    let batch = rest.get(1).map_or(Ok(rows), |batch| batch.parse())?;
    let folder = ModelFolder::open(Path::new(folder))?;
    let loss = PolicyLoss {
        config: LossConfig::default().into(),
        backend: Arc::new(CpuBackend::new().with_products(dtype)),
        implementation: Implementation::Fused,
        max_tokens: 64,
    };
    let policy = CpuPolicy::from_weights(folder.config(), &folder.weights()?, loss)?;
    let mut policy = policy.with_products(dtype)?.with_rollout_batch_size(batch);
    let token = |row: usize, i: usize| ((37 * i + 101 * row) % 250 + 3) as u32;
    let prompts: Vec<Vec<u32>> = (0..rows).map(|row| (0..prompt).map(|i| token(row, i)).collect()).collect();
    let sampling = Sampling::Random {
        temperature: 1.0,
        processors: LogitsProcessors::default(),
        seed: 1,
        purpose: rng::Purpose::Rollout,
        step: 0,
        first: 0,
    };
    let mut measure = |tokens: usize| -> Result<(f64, f64, u64), Box<dyn Error>> {
        let request = RolloutRequest {
            prompts: &prompts,
            num_generations: 1,
            max_completion_length: tokens,
            stop_ids: &[],
            stop: None,
            sampling,
            return_sampling_mask: false,
            return_routed_experts: false,
            turn: None,
        };
        let (busy, began) = (processor_time()?, Instant::now());
        let completions = policy.generate(&request)?;
        let digest = |sum: u64, id: &u32| sum.wrapping_mul(1_000_003).wrapping_add(u64::from(*id));
        let digest = completions.iter().flat_map(|completion| &completion.ids).fold(0, digest);
        Ok((began.elapsed().as_secs_f64(), processor_time()? - busy, digest))
    };
    // The first pass allocates.
    measure(1)?;
    let (start, busy_start, _) = measure(1)?;
    let (wall, busy, digest) = measure(tokens)?;
    let decoded = (rows * (tokens - 1)) as f64;
    let config = folder.config();
    // A separate embedding is only read for the rows of the tokens.
    let embedding = if config.tie_word_embeddings { 0 } else { config.vocab_size * config.hidden_size };
    let weights = (config.parameter_count() - embedding as u64) as f64;
    let threads = std::thread::available_parallelism()?.get();
    let (bandwidth, peak) = rates(dtype, threads);
    let (of_bytes, of_flops) = (weights * dtype.bytes() as f64 / bandwidth, 2.0 * weights * rows as f64 / peak);
    println!(
        "{{\"system\": \"grpo\", \"dtype\": \"{}\", \"rows\": {rows}, \"prompt\": {prompt}, \"tokens\": {tokens}, \
         \"first_token_s\": {start:.3}, \"first_token_processor_s\": {busy_start:.2}, \"tokens_per_s\": {:.2}, \
         \"tokens_per_processor_s\": {:.2}, \"floor_bytes_ms\": {:.2}, \"floor_flops_ms\": {:.2}, \"floor_tokens_per_s\": {:.1}, \
         \"gb_per_s\": {:.1}, \"gflop_per_s\": {:.1}, \"digest\": \"{digest:016x}\"}}",
        dtype.name(),
        decoded / (wall - start),
        decoded / (busy - busy_start),
        1e3 * of_bytes,
        1e3 * of_flops,
        rows as f64 / of_bytes.max(of_flops),
        1e-9 * bandwidth,
        1e-9 * peak
    );
    Ok(())
}
