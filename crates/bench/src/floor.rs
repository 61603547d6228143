//! The floor of a variant, a lower bound on its step time measured in the same run: its matrix products, or its memory traffic.
//!
//! On PJRT devices the floor is a program of bare products. On this CPU it is computed: useful operations at the fastest rate
//! of multiply-adds on registers, or, for precomputed logits, one read and one write of the logits at the bandwidth of memory.

use super::protocol::Role;
use crate::config::{BenchConfig, ProgramKind};
use grpo_backend_cpu::peak::{Traffic, Unit};
use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::program::{Numerics, Pass};
use grpo_core::{Dtype, GradientSpec, Implementation, PlanRequest, PolicySpec, Tiling};

/// Tokens per chunk: large enough for peak speed of products, small enough for small logits.
const CHUNK: usize = 2048;

/// Largest buffer for the bandwidth measurement. It is far larger than any cache, so that a larger buffer has the same bandwidth.
const MOST_BYTES: usize = 1 << 30;

/// Returns the machine's floors of a variant on this CPU, as jobs with names. There are several if only a measurement shows
/// which one is the fastest.
pub fn of_machine(variant: &Variant, threads: usize) -> Vec<(String, Role)> {
    let suffix = if threads == 0 { String::new() } else { format!("_{threads}t") };
    let PlanRequest { policy, max_tokens, .. } = &variant.request;
    match *policy {
        PolicySpec::Hidden { dtype, .. } => {
            // bf16 may be widened and multiplied as f32; rounding f32 to bf16 would change the result.
            let mut units = Unit::available();
            units.retain(|unit| unit.dtype() == Dtype::F32 || dtype == Dtype::Bf16);
            if units.len() > 1 {
                units.retain(|unit| *unit != Unit::Portable);
            }
            units.into_iter().map(|unit| (format!("{}{suffix}", unit.name()), Role::Multiply(unit))).collect()
        }
        PolicySpec::Logits { vocab, dtype } => {
            let bytes = max_tokens.saturating_mul(vocab).saturating_mul(dtype.bytes()).min(MOST_BYTES);
            let score = variant.pass == Pass::Score;
            let (name, traffic) = if score { ("read", Traffic::Read) } else { ("read_write", Traffic::Update) };
            vec![(format!("{name}_{}{suffix}", dtype.name()), Role::Stream { traffic, bytes })]
        }
    }
}

/// Returns the smallest amount of work of a variant of `config`, in the unit of the jobs of [`of_machine`]: useful operations, or bytes
/// of the logits, read once and, for a gradient, written once.
pub fn least_work(config: &BenchConfig, variant: &Variant) -> f64 {
    match variant.request.policy {
        PolicySpec::Hidden { .. } => useful_flops(config, variant),
        PolicySpec::Logits { dtype, .. } => {
            let ways = if variant.pass == Pass::Score { 1.0 } else { 2.0 };
            ways * variant.request.max_tokens as f64 * columns(config, variant) as f64 * dtype.bytes() as f64
        }
    }
}

/// Returns the variant whose bare products are the floor of `variant`, with its name; `None` for variants without
/// gradients. `kind` is the program of `variant`.
pub fn bare_products(variant: &Variant, kind: ProgramKind) -> Option<(String, Variant)> {
    let dtype = variant.request.policy.dtype();
    let GradientSpec { hidden, lm_head, .. } = variant.request.gradients;
    if matches!(kind, ProgramKind::Score | ProgramKind::Bare) || !(hidden || lm_head) {
        return None;
    }
    let mut floor = Variant {
        numerics: Numerics { logits: dtype, dlogits: dtype, entropy: false, ..Numerics::default() },
        mosaic: None,
        pass: ProgramKind::Bare.pass(variant.request.policy),
        build: ProgramKind::Bare.build(),
        ..variant.clone()
    };
    floor.request.tiling = Tiling { token_chunk: Some(CHUNK), ..Tiling::default() };
    let name = match &mut floor.request.policy {
        PolicySpec::Logits { .. } => {
            floor.request.implementation = Implementation::Logits;
            "floor_logits".to_owned()
        }
        PolicySpec::Hidden { bias, .. } => {
            *bias = false;
            floor.request.implementation = Implementation::Fused;
            floor.request.gradients = GradientSpec { hidden, lm_head, bias: false };
            let made = [(hidden, "_hidden"), (lm_head, "_lm_head")].map(|(made, name)| if made { name } else { "" });
            format!("floor{}", made.concat())
        }
    };
    Some((name, floor))
}

/// Returns the floating-point operations that the result of a variant requires. With a sampling mask, only the kept ids count.
pub fn useful_flops(config: &BenchConfig, variant: &Variant) -> f64 {
    variant.useful_flops(variant.request.max_tokens, columns(config, variant))
}

/// Returns the number of logits of a token that the loss of `config` depends on.
fn columns(config: &BenchConfig, variant: &Variant) -> usize {
    match config.inputs.kept_ids {
        0 => variant.request.policy.vocab(),
        kept => kept,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_files::Layers;

    #[test]
    fn floor_has_the_products_of_its_variant() {
        let text = "shape: { tokens: 8, hidden: 4, vocab: 16 }
variants:
  full: { tiling: { vocab_block: 4 } }
  frozen: { gradients: { lm_head: false } }
  dense: { implementation: reference, pass: materialised }
  score: { pass: score }";
        let config: BenchConfig = Layers::new().text("text", text).expect("YAML").resolve().expect("legal");
        let variant = |name| config.variant(name).expect("there");
        let kind = |name: &str| config.variants.as_ref().expect("variants")[name].pass;
        let floor = |name| {
            bare_products(&variant(name), kind(name)).map(|(floor, v)| (floor, useful_flops(&config, &v) / 1024.0))
        };
        assert_eq!(floor("full"), Some(("floor_hidden_lm_head".into(), 3.0)));
        assert_eq!(floor("dense"), floor("full"));
        assert_eq!(floor("frozen"), Some(("floor_hidden".into(), 2.0)));
        assert_eq!(floor("score"), None);
        assert_eq!(useful_flops(&config, &variant("score")) / 1024.0, 1.0);
        let (_, floor) = bare_products(&variant("full"), ProgramKind::Gradient).expect("a floor");
        floor.program(&floor.spec().expect("legal")).expect("a program");
    }

    #[test]
    fn floor_of_a_cpu_variant_is_its_traffic_or_its_products() {
        let text = "shape: { batch: 1, tokens: 8, hidden: null, vocab: 16 }\ndtype: bf16
variants: { logits: { implementation: logits }, wide: { implementation: logits, dtype: f32 }, score: { implementation: logits, pass: score } }";
        let config: BenchConfig = Layers::new().text("text", text).expect("YAML").resolve().expect("legal");
        let of = |name| {
            let variant = config.variant(name).expect("there");
            (of_machine(&variant, 2).remove(0), least_work(&config, &variant))
        };
        let update = |bytes| Role::Stream { traffic: Traffic::Update, bytes };
        assert_eq!(of("logits"), (("read_write_bf16_2t".into(), update(256)), 512.0));
        assert_eq!(of("wide"), (("read_write_f32_2t".into(), update(512)), 1024.0));
        assert_eq!(of("score"), (("read_bf16_2t".into(), Role::Stream { traffic: Traffic::Read, bytes: 256 }), 256.0));
        let text = "shape: { tokens: 8, hidden: 4, vocab: 16 }\nvariants: { a: { dtype: f32 } }";
        let config: BenchConfig = Layers::new().text("text", text).expect("YAML").resolve().expect("legal");
        let units = of_machine(&config.variant("a").expect("there"), 0);
        assert!(units.iter().all(|(_, role)| matches!(role, Role::Multiply(unit) if unit.dtype() == Dtype::F32)));
        assert!(!units.is_empty());
        let text = "shape: { tokens: 8, hidden: 4, vocab: 16 }\ninputs: { kept_ids: 2 }\nvariants: { a: {} }";
        let config: BenchConfig = Layers::new().text("text", text).expect("YAML").resolve().expect("legal");
        assert_eq!(least_work(&config, &config.variant("a").expect("there")), 3.0 * 2.0 * 8.0 * 4.0 * 2.0);
    }
}
