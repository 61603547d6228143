//! A loss with everything that is chosen about it.

use super::{Chip, Floor};
use crate::blocking;
use crate::program::{Mesh, MosaicBlocks, Numerics, Pass, Program, Spec};
use grpo_core::error::Result;
use grpo_core::{Implementation, PlanRequest, PolicySpec};
use serde::{Deserialize, Serialize};

/// Which program of a loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Log-probabilities and entropies.
    Score,
    /// Loss and gradients.
    #[default]
    Gradient,
    /// Loss, and dL/dlogits in place of the given logits.
    GradientInPlace,
    /// The dense loss as automatic differentiation leaves it, whatever the implementation.
    Materialised,
}

/// A loss with everything that is chosen about it.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Loss, shapes, tiling.
    pub request: PlanRequest,
    /// Rounding.
    pub numerics: Numerics,
    /// TPU kernels for `logits`.
    pub mosaic: Option<MosaicBlocks>,
    /// Devices.
    pub mesh: Mesh,
    /// Which program.
    pub what: What,
}

impl Variant {
    /// What a device computes, with the blocking that the request's tiling asks for.
    ///
    /// # Errors
    /// Those of [`PlanRequest::validate`]; [`grpo_core::Error::Budget`] when no tile fits the workspace budget.
    pub fn spec(&self) -> Result<Spec> {
        self.request.validate()?;
        Ok(Spec {
            loss: self.request.loss.clone(),
            implementation: self.request.implementation,
            tokens: self.request.max_tokens,
            policy: self.request.policy,
            gradients: self.request.gradients,
            blocking: blocking::choose(&self.request, &self.numerics, self.mesh)?,
            mosaic: self.mosaic,
            numerics: self.numerics,
            mesh: self.mesh,
        })
    }

    /// The program of `spec`.
    ///
    /// # Errors
    /// Those of [`Spec::program`].
    pub fn program(&self, spec: &Spec) -> Result<Program> {
        match self.what {
            What::Score => spec.program(Pass::Score),
            What::Gradient => spec.program(Pass::Gradient),
            What::GradientInPlace => spec.program(Pass::GradientInPlace),
            What::Materialised => spec.materialised_baseline(),
        }
    }

    /// Whether the program is cut into tiles.
    pub(super) fn has_tiles(&self) -> bool {
        self.what != What::Materialised && self.request.implementation == Implementation::Fused
    }

    /// Whether the caller has said how large a tile is.
    pub(super) fn tile_is_given(&self) -> bool {
        self.request.tiling.token_chunk.or(self.request.tiling.vocab_block).is_some()
    }

    /// What no program with these arguments and results can do without on `chip`. Useful are the products without which
    /// there is no result: logits, and one per gradient of hidden states and head; recomputing logits is not. Every
    /// argument is read once, every result written once.
    pub(super) fn floor(&self, spec: &Spec, program: &Program, chip: Chip) -> Floor {
        let products = match (spec.policy, self.what) {
            (PolicySpec::Logits { .. }, _) => 0,
            (PolicySpec::Hidden { .. }, What::Score) => 1,
            (PolicySpec::Hidden { .. }, _) => {
                1 + [spec.gradients.hidden, spec.gradients.lm_head].iter().filter(|g| **g).count()
            }
        };
        let hidden = match spec.policy {
            PolicySpec::Hidden { hidden, .. } => hidden,
            PolicySpec::Logits { .. } => 0,
        };
        let product = 2.0 * spec.local_tokens() as f64 * spec.local_vocab() as f64 * hidden as f64;
        let main = &program.module.main;
        let tensors = main.body.arguments.iter().chain(&main.body.results);
        let bytes: usize = tensors.map(|id| main.type_of(*id).bytes()).sum();
        Floor::new(products as f64 * product, bytes as f64, chip)
    }
}
