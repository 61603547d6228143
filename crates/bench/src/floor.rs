//! The floor under a variant, measured in the same run: the products that its results need, or the memory that they move.
//!
//! On PJRT devices it is a program of bare products. On this CPU it is a calculation: useful operations at the fastest rate
//! of multiply-adds out of registers, or, of given logits, one read and one write of them at the rate of memory.

use super::protocol::Role;
use backend_cpu::peak::{Traffic, Unit};
use backend_tpu::aot::Variant;
use backend_tpu::program::{Numerics, ProgramKind};
use grpo_core::{Dtype, GradientSpec, Implementation, PlanRequest, PolicySpec, Tiling};

/// Tokens of a chunk: products are at their peak, and logits still small.
const CHUNK: usize = 2048;

/// Memory that is walked at most, far more than any cache: the rate of more is the same.
const MOST_BYTES: usize = 1 << 30;

/// What a variant on this CPU is held against: jobs with their names. More than one where it takes a measurement to know
/// which is the fastest.
pub fn of_machine(variant: &Variant, threads: usize) -> Vec<(String, Role)> {
    let suffix = if threads == 0 { String::new() } else { format!("_{threads}t") };
    let PlanRequest { policy, max_tokens, .. } = &variant.request;
    match *policy {
        PolicySpec::Hidden { dtype, .. } => {
            // What is bf16 may be widened and multiplied as f32; the other way around would be another result.
            let mut units = Unit::available();
            units.retain(|unit| unit.dtype() == Dtype::F32 || dtype == Dtype::Bf16);
            if units.len() > 1 {
                units.retain(|unit| *unit != Unit::Portable);
            }
            units.into_iter().map(|unit| (format!("{}{suffix}", unit.name()), Role::Multiply(unit))).collect()
        }
        PolicySpec::Logits { vocab, dtype } => {
            let bytes = max_tokens.saturating_mul(vocab).saturating_mul(dtype.bytes()).min(MOST_BYTES);
            let score = variant.program == ProgramKind::Score;
            let (name, traffic) = if score { ("read", Traffic::Read) } else { ("read_write", Traffic::Update) };
            vec![(format!("{name}_{}{suffix}", dtype.name()), Role::Stream { traffic, bytes })]
        }
    }
}

/// What a variant cannot do without, in the unit of the jobs of [`of_machine`]: useful operations, or bytes of the logits,
/// read once and, for a gradient, written once.
pub fn least_work(variant: &Variant) -> f64 {
    match variant.request.policy {
        PolicySpec::Hidden { .. } => useful_flops(variant),
        PolicySpec::Logits { vocab, dtype } => {
            let ways = if variant.program == ProgramKind::Score { 1.0 } else { 2.0 };
            ways * variant.request.max_tokens as f64 * vocab as f64 * dtype.bytes() as f64
        }
    }
}

/// The program of bare products under `variant`, with its name; `None` under what makes no gradient.
pub fn bare_products(variant: &Variant) -> Option<(String, Variant)> {
    if matches!(variant.program, ProgramKind::Score | ProgramKind::Bare) {
        return None;
    }
    let dtype = variant.request.policy.dtype();
    let GradientSpec { hidden, lm_head, .. } = variant.request.gradients;
    if !hidden && !lm_head {
        return None;
    }
    let mut floor = Variant {
        numerics: Numerics { logits: dtype, dlogits: dtype, entropy: false, ..Numerics::default() },
        mosaic: None,
        program: ProgramKind::Bare,
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

/// Floating-point operations that a result cannot do without: logits, and one product per gradient. Recomputing is not
/// among them.
pub fn useful_flops(variant: &Variant) -> f64 {
    let (PolicySpec::Hidden { hidden, vocab, .. }, request) = (variant.request.policy, &variant.request) else {
        return 0.0;
    };
    let gradients = match variant.program {
        ProgramKind::Score => 0,
        _ => [request.gradients.hidden, request.gradients.lm_head].iter().filter(|made| **made).count(),
    };
    (1 + gradients) as f64 * 2.0 * request.max_tokens as f64 * vocab as f64 * hidden as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BenchConfig;
    use grpo_files::Layers;

    #[test]
    fn a_floor_has_the_products_of_what_stands_on_it() {
        let text = "shape: { tokens: 8, hidden: 4, vocab: 16 }
variants:
  full: { tiling: { vocab_block: 4 } }
  frozen: { gradients: { lm_head: false } }
  dense: { implementation: reference, pass: materialised }
  score: { pass: score }";
        let config: BenchConfig = Layers::new().text("text", text).expect("YAML").resolve().expect("legal");
        let variant = |name| config.variant(name).expect("there");
        let floor = |name| bare_products(&variant(name)).map(|(floor, v)| (floor, useful_flops(&v) / 1024.0));
        assert_eq!(floor("full"), Some(("floor_hidden_lm_head".into(), 3.0)));
        assert_eq!(floor("dense"), floor("full"));
        assert_eq!(floor("frozen"), Some(("floor_hidden".into(), 2.0)));
        assert_eq!(floor("score"), None);
        assert_eq!(useful_flops(&variant("score")) / 1024.0, 1.0);
        let (_, floor) = bare_products(&variant("full")).expect("a floor");
        floor.program(&floor.spec().expect("legal")).expect("a program");
    }

    #[test]
    fn the_machine_is_asked_for_what_a_variant_moves_or_multiplies() {
        let text = "shape: { batch: 1, tokens: 8, hidden: null, vocab: 16 }\ndtype: bf16
variants: { logits: { implementation: logits }, wide: { implementation: logits, dtype: f32 }, score: { implementation: logits, pass: score } }";
        let config: BenchConfig = Layers::new().text("text", text).expect("YAML").resolve().expect("legal");
        let of = |name| {
            let variant = config.variant(name).expect("there");
            (of_machine(&variant, 2).remove(0), least_work(&variant))
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
    }
}
