//! Compares one step (loss and gradients of hidden states and head) with candle's own operations: time and peak memory, in alternation.
//!
//!     cargo run --release -p grpo-candle --example race -- N H V [f32 | bf16] [rounds]
//!
//! `graph` calls candle's `backward` on the scalar of the loss, `grpo` calls `Loss::backward`. Every step runs in a process of its own,
//! after a step that warms up. The peak is the largest resident memory during the step (`VmHWM`, on Linux) minus hidden states and head;
//! the second number is without their gradients, too.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use grpo_candle::GrpoLoss;
use grpo_core::{LossConfig, TokenBatch};
use std::process::Command;
use std::time::Instant;

const VARIANTS: [&str; 3] = ["grpo", "graph", "candle"];

/// Wall time in seconds, processor time of all threads in seconds, peak of memory in MiB.
type Cost = [f64; 3];

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).and_then(|arg| arg.parse().ok()).unwrap_or(default);
    let (n, h, v) = (number(0, 512), number(1, 256), number(2, 8192));
    let dtype = if args.iter().any(|arg| arg == "bf16") { DType::BF16 } else { DType::F32 };
    if let Some(variant) = args.last().filter(|last| VARIANTS.contains(&last.as_str())) {
        println!("{}", step(variant, (n, h, v), dtype)?.map(|cost| cost.to_string()).join(" "));
        return Ok(());
    }
    let mut results: [Vec<Cost>; 3] = Default::default();
    for _ in 0..number(4, 5) {
        for (variant, list) in VARIANTS.iter().zip(&mut results) {
            let output = Command::new(std::env::current_exe()?).args(&args).arg(variant).output()?;
            let text = String::from_utf8(output.stdout)?;
            let costs: Vec<f64> = text.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>()?;
            list.push(costs.try_into().map_err(|_| format!("{variant} failed: {text}"))?);
        }
    }
    let gradients = ((n * h + v * h) * dtype.size_in_bytes()) as f64 / f64::from(1 << 20);
    for (variant, list) in VARIANTS.iter().zip(&mut results) {
        list.sort_by(|a, b| a[0].total_cmp(&b[0]));
        let ([median, busy, _], first, last) = (list[list.len() / 2], list[0][0], list[list.len() - 1][0]);
        let peak = list.iter().map(|[_, _, peak]| *peak).fold(0.0, f64::max);
        println!(
            "{variant:6} {median:7.3} s ({first:.3} to {last:.3}), {busy:.2} s of processor time, {peak:.0} MiB, {:.0} MiB",
            peak - gradients
        );
    }
    Ok(())
}

/// Returns the cost of one step.
fn step(variant: &str, (n, h, v): (usize, usize, usize), dtype: DType) -> Result<Cost> {
    let normal = |rows: usize, columns: usize, scale: f32| -> Result<Var> {
        Var::from_tensor(&Tensor::randn(0f32, scale, (rows, columns), &Device::Cpu)?.to_dtype(dtype)?)
    };
    let (hidden, lm_head) = (normal(n, h, 1.0)?, normal(v, h, 2.0 / (h as f32).sqrt())?);
    let targets: Vec<i64> = (0..n).map(|i| (i * 7919 % v) as i64).collect();
    let batch = TokenBatch::packed(targets.clone(), vec![0, n / 2, n])
        .and_then(|batch| batch.with_advantages(vec![1.0, -1.0]))
        .map_err(grpo_candle::Error::from)?;
    let grpo = GrpoLoss::builder(LossConfig::default()).build(&grpo_backend_cpu::CpuBackend::new())?;
    let once = || {
        let gradients = match variant {
            "grpo" => grpo.loss(&hidden, &lm_head, None, &batch)?.backward()?,
            "graph" => grpo.loss(&hidden, &lm_head, None, &batch)?.loss.backward()?,
            _ => plain(&hidden, &lm_head, &targets)?.backward()?,
        };
        assert!(gradients.get(&hidden).is_some() && gradients.get(&lm_head).is_some());
        Ok::<_, candle_core::Error>(())
    };
    once()?;
    std::fs::write("/proc/self/clear_refs", "5")?; // resets VmHWM
    let (start, busy) = (Instant::now(), processor_seconds()?);
    once()?;
    let (seconds, busy) = (start.elapsed().as_secs_f64(), processor_seconds()? - busy);
    let inputs = ((n * h + v * h) * dtype.size_in_bytes()) as f64 / f64::from(1 << 20);
    Ok([seconds, busy, high_water()? - inputs])
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

/// Returns the largest resident memory of this process in MiB.
fn high_water() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB"));
    Ok(line.and_then(|kib| kib.trim().parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0)
}

/// Returns the processor time of this process in user and system mode, in seconds.
fn processor_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The name of the program, in parentheses, may have spaces.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    Ok(fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0)
}
