//! Times one step of the fused head:
//! `cargo run --release -p grpo-backend-cpu --example speed -- N H V threads [bf16] [chunks | panels] [32MiB] [logits] [huge] [softcap] [avx2]`.
//! `huge` puts head and gradient on large pages; `avx2` and similar names select the instruction set.

use grpo_backend_cpu::CpuBackend;
use grpo_core::*;
use half::bf16;
use std::time::Instant;

fn noise(n: usize, scale: f32) -> Vec<f32> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..n).map(|_| next()).collect()
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (n, h, v, threads) = (number(0, 2048), number(1, 2048), number(2, 32_768), number(3, 2));
    let dtype = if args.iter().any(|a| a == "bf16") { Dtype::Bf16 } else { Dtype::F32 };
    let implementation =
        if args.iter().any(|a| a == "logits") { Implementation::Logits } else { Implementation::Fused };
    let loop_order = match () {
        () if args.iter().any(|a| a == "chunks") => Some(LoopOrder::TokenChunks),
        () if args.iter().any(|a| a == "panels") => Some(LoopOrder::VocabPanels),
        () => None,
    };
    let workspace_budget = args.iter().find_map(|a| a.strip_suffix("MiB")?.parse::<usize>().ok()).unwrap_or(128) << 20;
    let hidden = Tensor::F32(noise(n * h, 1.7)).to_dtype(dtype);
    let mut head = Tensor::F32(noise(v * h, 3.4 / (h as f32).sqrt())).to_dtype(dtype);
    let huge = args.iter().any(|a| a == "huge");
    if let (true, Tensor::Bf16(from)) = (huge, &head) {
        let mut to = vec![bf16::ZERO; v * h];
        grpo_backend_cpu::advise_huge_pages(&mut to);
        to.copy_from_slice(from);
        head = Tensor::Bf16(to);
    }
    let batch = TokenBatch::packed((0..n).map(|i| (i * 7919 % v) as i64).collect(), vec![0, n / 2, n])?
        .with_advantages(Advantages::PerSequence(vec![1.0, -1.0]))?;
    let request = PlanRequest {
        loss: LossConfig {
            final_logit_softcapping: args.iter().any(|a| a == "softcap").then_some(30.0),
            ..LossConfig::default()
        }
        .into(),
        implementation,
        tiling: Tiling { loop_order, workspace_budget, ..Tiling::default() },
        max_tokens: n,
        policy: PolicySpec::Hidden { hidden: h, vocab: v, dtype, layout: HeadLayout::VocabHidden, bias: false },
        gradients: GradientSpec::default(),
    };
    let isa =
        args.iter().find_map(|a| grpo_backend_cpu::Isa::from_name(a)).unwrap_or_else(grpo_backend_cpu::Isa::detect);
    let mut plan = CpuBackend::with_threads(threads)?.with_isa(isa).plan(&request)?;
    let (mut dh, mut dw) = (vec![0.0_f32; n * h], vec![0.0_f32; v * h]);
    if huge {
        grpo_backend_cpu::advise_huge_pages(&mut dw);
    }
    let flops = 6.0 * n as f64 * h as f64 * v as f64;
    for _ in 0..3 {
        let (policy, grads) = (PolicyInput::head(hidden.as_ref(), head.as_ref()), Grads::new(&mut dh, &mut dw));
        let start = Instant::now();
        let out = plan.value_and_grad(policy, &batch, grads)?;
        let seconds = start.elapsed().as_secs_f64();
        let workspace = plan.memory().workspace >> 20;
        println!(
            "{seconds:.3} s  {:.0} GF/s of 3 products  loss {:.6}  workspace {workspace} MiB",
            flops / seconds / 1e9,
            out.loss
        );
    }
    Ok(())
}
