//! A loss with all choices of an implementation.

use super::chip::Chip;
use super::report::Floor;
use crate::program::{Blocking, MeshShape, MosaicBlocks, Numerics, Pass, Program, Spec};
use crate::tiling;
use grpo_core::error::{Error, Result};
use grpo_core::{Implementation, PlanRequest, PolicySpec};

/// A loss with all choices of an implementation.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The loss, its shapes and its tiling.
    pub request: PlanRequest,
    /// The roundings, and the optional results.
    pub numerics: Numerics,
    /// The blocks of the TPU kernels for `logits`, if it runs them.
    pub mosaic: Option<MosaicBlocks>,
    /// The mesh over which tokens and vocabulary are sharded.
    pub mesh: MeshShape,
    /// The pass whose program is compiled.
    pub pass: Pass,
    /// The function that builds the program: [`Spec::program`], or one of another program with the same arguments.
    pub build: fn(&Spec, Pass) -> Result<Program>,
}

impl Variant {
    /// Returns the computation, with the blocking of the request's tiling.
    ///
    /// # Errors
    /// The errors of [`PlanRequest::validate`]; [`grpo_core::Error::Budget`] if no tile fits the workspace budget.
    pub fn spec(&self) -> Result<Spec> {
        self.request.validate()?;
        self.mesh.mesh()?;
        Ok(Spec {
            loss: self.request.loss.clone(),
            implementation: self.request.implementation,
            tokens: self.request.max_tokens,
            policy: self.request.policy,
            vocab_padding: 0,
            gradients: self.request.gradients,
            blocking: tiling::choose(&self.request, &self.numerics, self.mesh)?,
            mosaic: self.mosaic,
            sampling_mask: false,
            numerics: self.numerics,
            mesh: self.mesh,
        })
    }

    /// Builds the program of `spec`.
    ///
    /// # Errors
    /// The errors of [`Spec::program`].
    pub fn program(&self, spec: &Spec) -> Result<Program> {
        (self.build)(spec, self.pass)
    }

    /// Returns `true` if the program has tiles.
    pub fn has_tiles(&self) -> bool {
        self.request.implementation == Implementation::Fused
    }

    /// Calls `compile`, which also returns the bytes of workspace. Unless the caller has set a tile size, tiles shrink
    /// until the workspace fits the budget.
    ///
    /// # Errors
    /// [`Error::Budget`] if no tile fits; the errors of `compile`.
    pub(crate) fn compile_within_budget<T>(
        &self,
        spec: &mut Spec,
        mut compile: impl FnMut(&Spec) -> Result<(usize, T)>,
    ) -> Result<T> {
        let tiling = &self.request.tiling;
        let budget = tiling.workspace_budget;
        loop {
            let (workspace, compiled) = compile(spec)?;
            // A size for the other loop order does not apply.
            let given = match spec.blocking {
                Blocking::TokenChunks(_) => tiling.token_chunk,
                Blocking::VocabPanels(_) => tiling.vocab_block,
            };
            if !self.has_tiles() || given.is_some() || workspace <= budget {
                return Ok(compiled);
            }
            let Some(smaller) = spec.blocking.scaled(budget as f64 / workspace as f64) else {
                return Err(Error::Budget { what: "a fused tile".into(), budget, minimum: workspace });
            };
            spec.blocking = match smaller {
                Blocking::TokenChunks(size) => Blocking::TokenChunks(tiling::even(spec.padded_tokens(), size)),
                Blocking::VocabPanels(size) => Blocking::VocabPanels(tiling::even(spec.local_vocab(), size)),
            };
            tracing::info!(workspace, budget, blocking = ?spec.blocking, "the compiler needs more than the budget");
        }
    }

    /// Returns the operations of the required products for `tokens` tokens and `vocab` vocabulary entries: logits, and
    /// one product per gradient of hidden states and head, without recomputation; 0 for precomputed logits.
    pub fn useful_flops(&self, tokens: usize, vocab: usize) -> f64 {
        let (PolicySpec::Hidden { hidden, .. }, made) = (self.request.policy, self.request.gradients) else {
            return 0.0;
        };
        let gradients = if self.pass == Pass::Score { 0 } else { u8::from(made.hidden) + u8::from(made.lm_head) };
        f64::from(1 + gradients) * 2.0 * tokens as f64 * vocab as f64 * hidden as f64
    }

    /// Returns the lower bound of all programs with these arguments and results on `chip`: the required products, or
    /// every argument read once and every result written once.
    pub(super) fn floor(&self, spec: &Spec, program: &Program, chip: Chip) -> Floor {
        // Each device computes the logits of all tokens for its part of the vocabulary.
        Floor::of_module(&program.module, self.useful_flops(spec.padded_tokens(), spec.local_vocab()), chip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_core::{Dtype, GradientSpec, HeadLayout, LoopOrder, LossConfig, Tiling};

    fn variant(tiling: Tiling) -> Variant {
        let (dtype, layout) = (Dtype::Bf16, HeadLayout::VocabHidden);
        Variant {
            request: PlanRequest {
                loss: LossConfig::default().into(),
                implementation: Implementation::Fused,
                tiling,
                max_tokens: 8192,
                policy: PolicySpec::Hidden { hidden: 64, vocab: 1000, dtype, layout, bias: false },
                gradients: GradientSpec::default(),
            },
            numerics: Numerics::default(),
            mosaic: None,
            mesh: MeshShape::default(),
            pass: Pass::Gradient,
            build: Spec::program,
        }
    }

    /// Simulates a compiler that allocates `fixed` bytes and 5000 per row or 9000 per column.
    fn fitted(tiling: Tiling, fixed: usize) -> Result<Blocking> {
        let variant = variant(tiling);
        let mut spec = variant.spec()?;
        variant.compile_within_budget(&mut spec, |spec| {
            let tile = match spec.blocking {
                Blocking::TokenChunks(rows) => 5000 * rows,
                Blocking::VocabPanels(columns) => 9000 * columns,
            };
            Ok((fixed + tile, spec.blocking))
        })
    }

    #[test]
    fn tiles_shrink_to_register_multiples_within_the_budget() {
        let budget = |workspace_budget| Tiling { workspace_budget, ..Tiling::default() };
        let Ok(Blocking::TokenChunks(rows)) = fitted(budget(4_000_000), 500_000) else { panic!("chunks") };
        assert!(500_000 + 5000 * rows <= 4_000_000 && rows >= 512 && rows.is_multiple_of(8), "{rows}");
        assert!(matches!(fitted(budget(4_000_000), 4_000_000), Err(Error::Budget { budget: 4_000_000, .. })));
    }

    #[test]
    fn set_tile_sizes_stay_and_sizes_of_the_other_order_are_refused() {
        let given = Tiling { workspace_budget: 4_000_000, token_chunk: Some(4000), ..Tiling::default() };
        assert_eq!(fitted(given.clone(), 0), Ok(Blocking::TokenChunks(4000)));
        let other = Tiling { loop_order: Some(LoopOrder::VocabPanels), ..given };
        assert!(matches!(fitted(other.clone(), 0), Err(Error::Unsupported { .. })));
        let panels = Tiling { token_chunk: None, ..other };
        let Ok(Blocking::VocabPanels(columns)) = fitted(panels, 3_100_000) else { panic!("panels") };
        assert!(3_100_000 + 9000 * columns <= 4_000_000, "{columns}");
    }
}
