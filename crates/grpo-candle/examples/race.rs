//! Compares one step (loss and gradients of hidden states and head) with candle's own operations: time and peak memory, in alternation.
//!
//!     cargo run --release -p grpo-candle --example race -- N H V [f32 | bf16] [rounds]
//!
//! Every step runs in a process of its own, after a step that warms up. The peak is the process's largest resident memory (`VmHWM`) minus
//! hidden states and head.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use grpo_candle::GrpoLoss;
use grpo_core::{LossConfig, TokenBatch};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

const VARIANTS: [&str; 2] = ["grpo", "candle"];

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).and_then(|arg| arg.parse().ok()).unwrap_or(default);
    let (n, h, v) = (number(0, 512), number(1, 256), number(2, 8192));
    let dtype = if args.iter().any(|arg| arg == "bf16") { DType::BF16 } else { DType::F32 };
    if let Some(variant) = args.last().filter(|last| VARIANTS.contains(&last.as_str())) {
        let (seconds, bytes) = step(variant, (n, h, v), dtype)?;
        println!("{seconds} {bytes}");
        return Ok(());
    }
    let mut results: [Vec<(f64, f64)>; 2] = Default::default();
    for _ in 0..number(4, 5) {
        for (variant, list) in VARIANTS.iter().zip(&mut results) {
            let output = Command::new(std::env::current_exe()?).args(&args).arg(variant).output()?;
            let text = String::from_utf8(output.stdout)?;
            let (seconds, bytes) = text.trim().split_once(' ').ok_or_else(|| format!("{variant} failed: {text}"))?;
            list.push((seconds.parse()?, bytes.parse()?));
        }
    }
    for (variant, list) in VARIANTS.iter().zip(&mut results) {
        list.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (median, first, last) = (list[list.len() / 2].0, list[0].0, list[list.len() - 1].0);
        let peak = list.iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max) / f64::from(1 << 20);
        println!("{variant:6} {median:7.3} s ({first:.3} to {last:.3}), {peak:7.0} MiB");
    }
    Ok(())
}

/// Runs one step and returns its seconds and the peak of memory.
fn step(variant: &str, (n, h, v): (usize, usize, usize), dtype: DType) -> Result<(f64, u64)> {
    let normal = |rows: usize, columns: usize, scale: f32| -> Result<Var> {
        Var::from_tensor(&Tensor::randn(0f32, scale, (rows, columns), &Device::Cpu)?.to_dtype(dtype)?)
    };
    let (hidden, lm_head) = (normal(n, h, 1.0)?, normal(v, h, 2.0 / (h as f32).sqrt())?);
    let targets: Vec<i64> = (0..n).map(|i| (i * 7919 % v) as i64).collect();
    let batch = TokenBatch::packed(targets.clone(), vec![0, n / 2, n])
        .and_then(|batch| batch.with_advantages(vec![1.0, -1.0]))
        .map_err(grpo_candle::Error::from)?;
    let grpo = GrpoLoss::new(Arc::new(backend_cpu::CpuBackend::new()), LossConfig::default())?;
    let once = || {
        let loss = match variant {
            "grpo" => grpo.loss(&hidden, &lm_head, None, &batch)?.loss,
            _ => plain(&hidden, &lm_head, &targets)?,
        };
        let gradients = loss.backward()?;
        assert!(gradients.get(&hidden).is_some() && gradients.get(&lm_head).is_some());
        Ok::<_, candle_core::Error>(())
    };
    once()?;
    let start = Instant::now();
    once()?;
    let seconds = start.elapsed().as_secs_f64();
    let inputs = (n * h + v * h) * dtype.size_in_bytes();
    Ok((seconds, high_water().saturating_sub(inputs as u64)))
}

/// The clipped loss of two sequences of equal length, on-policy, with one advantage each.
fn plain(hidden: &Tensor, lm_head: &Tensor, targets: &[i64]) -> Result<Tensor> {
    let n = targets.len();
    let logits = hidden.matmul(&lm_head.t()?)?.to_dtype(DType::F32)?;
    let lse = logits.log_sum_exp(D::Minus1)?;
    let target = logits.gather(&Tensor::from_slice(targets, (n, 1), &Device::Cpu)?, 1)?.squeeze(1)?;
    let logp = (target - lse)?;
    let ratio = (&logp - logp.detach())?.exp()?;
    let advantages: Vec<f32> = (0..n).map(|i| if i < n / 2 { 1.0 } else { -1.0 }).collect();
    let advantages = Tensor::from_vec(advantages, n, &Device::Cpu)?;
    (&ratio * &advantages)?.minimum(&(ratio.clamp(0.8, 1.2)? * &advantages)?)?.mean_all()?.neg()
}

/// Returns the largest resident memory of this process in bytes; 0 on systems without `/proc`.
fn high_water() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}
