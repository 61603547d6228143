//! The floor under a variant: the products that its results need and nothing else, measured in the same run.

use crate::bench_config::BenchConfig;
use backend_tpu::aot::{Variant, What};
use backend_tpu::program::Numerics;
use grpo_core::{GradientSpec, Implementation, PolicySpec, Tiling};

/// Tokens of a chunk: products are at their peak, and logits still small.
const CHUNK: usize = 2048;

/// The floor under `variant`, with its name; `None` under what makes no gradient.
pub fn under(config: &BenchConfig, variant: &Variant) -> Option<(String, Variant)> {
    if matches!(variant.what, What::Score | What::Bare) {
        return None;
    }
    let dtype = config.dtype;
    let GradientSpec { hidden, lm_head, .. } = variant.request.gradients;
    if !hidden && !lm_head {
        return None;
    }
    let mut floor = Variant {
        numerics: Numerics { logits: dtype, dlogits: dtype, entropy: false, ..Numerics::default() },
        mosaic: None,
        what: What::Bare,
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
    let gradients = match variant.what {
        What::Score => 0,
        _ => [request.gradients.hidden, request.gradients.lm_head].iter().filter(|made| **made).count(),
    };
    (1 + gradients) as f64 * 2.0 * request.max_tokens as f64 * vocab as f64 * hidden as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_layers::Layers;

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
        let floor = |name| under(&config, &variant(name)).map(|(floor, v)| (floor, useful_flops(&v) / 1024.0));
        assert_eq!(floor("full"), Some(("floor_hidden_lm_head".into(), 3.0)));
        assert_eq!(floor("dense"), floor("full"));
        assert_eq!(floor("frozen"), Some(("floor_hidden".into(), 2.0)));
        assert_eq!(floor("score"), None);
        assert_eq!(useful_flops(&variant("score")) / 1024.0, 1.0);
        let (_, floor) = under(&config, &variant("full")).expect("a floor");
        floor.program(&floor.spec().expect("legal")).expect("a program");
    }
}
