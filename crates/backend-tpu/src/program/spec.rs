//! The specification of a program.
//!
//! Legend: N tokens and V vocabulary entries, both with the padding of a mesh, H hidden size.

use super::blocking::Blocking;
use super::numerics::{MosaicBlocks, Numerics};
use super::pass::Pass;
use super::role::Role;
use super::sampling_mask::words;
use super::sharding::MeshShape;
use crate::error::unsupported;
use grpo_core::backend_api::token_columns::{LossSums, TokenColumns};
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PolicySpec};
use grpo_stablehlo::TensorType;
use std::sync::Arc;

/// The rows of the table of ids, i32 `[IDS, N]`: the target (-1 at masked tokens) and the sequence of every token.
pub(crate) const IDS: usize = 2;

/// The hint for features that TPU kernels do not support.
const NO_KERNELS: &str = "leave `mosaic` out: the plain program does it";

/// A loss with its shapes, roundings and mesh.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The loss.
    pub loss: Arc<LossConfig>,
    /// The implementation, which determines how the program stores logits.
    pub implementation: Implementation,
    /// The tokens.
    pub tokens: usize,
    /// Shapes and dtype of the policy's inputs.
    pub policy: PolicySpec,
    /// The number of vocabulary entries behind the last one of the policy that its arguments have: padding, with zeros in the head.
    pub vocab_padding: usize,
    /// The gradients that the program computes.
    pub gradients: GradientSpec,
    /// The blocking of the fused loops.
    pub blocking: Blocking,
    /// The blocks of the Mosaic TPU kernels, if `logits` runs them instead of plain operations.
    pub mosaic: Option<MosaicBlocks>,
    /// `true` if the program takes the sampling mask of the tokens as an argument.
    pub sampling_mask: bool,
    /// The roundings, and the optional results.
    pub numerics: Numerics,
    /// The mesh over which tokens and vocabulary are sharded.
    pub mesh: MeshShape,
}

impl Spec {
    pub(super) fn validate(&self, pass: Pass) -> Result<()> {
        self.mesh.mesh()?;
        let Numerics { logits, dlogits, gradients, .. } = self.numerics;
        if [logits, dlogits, gradients].contains(&Dtype::Bf16) && self.policy.dtype() == Dtype::F32 {
            return Err(Error::Config("logits, dlogits or gradients in bf16 need inputs in bf16".into()));
        }
        if self.loss.entropy_coef != 0.0 && !self.numerics.entropy {
            return Err(Error::Config(
                "entropy_coef needs the entropy, which `numerics.entropy: false` leaves out".into(),
            ));
        }
        if self.mosaic.is_some() {
            if self.implementation != Implementation::Logits {
                let what = format!("TPU kernels in the implementation `{}`", self.implementation.name());
                return Err(unsupported(&what, "they belong to `logits`"));
            }
            if self.loss.final_logit_softcapping.is_some() || self.loss.logit_scale < 0.0 {
                let what = match self.loss.final_logit_softcapping {
                    Some(cap) => format!("TPU kernels with final_logit_softcapping {cap}"),
                    None => format!("TPU kernels with logit_scale {}, below 0", self.loss.logit_scale),
                };
                return Err(unsupported(&what, NO_KERNELS));
            }
            if self.mesh.devices() > 1 {
                return Err(unsupported(&format!("TPU kernels on a mesh of {}", self.mesh), NO_KERNELS));
            }
        }
        if pass == Pass::GradientInPlace && !matches!(self.policy, PolicySpec::Logits { .. }) {
            return Err(Error::Config("only given logits can be overwritten with their gradient".into()));
        }
        Ok(())
    }

    /// Checks that the programs support `batch`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for TPU kernels with per-token temperatures, because kernels are compiled for one temperature, or with a
    /// sampling mask.
    pub fn check_batch(&self, batch: &TokenBatch) -> Result<()> {
        let what = match (batch.temperatures(), batch.sampling_mask()) {
            _ if self.mosaic.is_none() => return Ok(()),
            (Some(_), _) => "TPU kernels with `temperatures` of tokens",
            (_, Some(_)) => "TPU kernels with a sampling mask",
            (None, None) => return Ok(()),
        };
        Err(unsupported(what, NO_KERNELS))
    }

    /// Returns the specification of the program for `batch`, which may have a sampling mask.
    pub fn for_batch(&self, batch: &TokenBatch) -> Self {
        Self { sampling_mask: batch.sampling_mask().is_some(), ..self.clone() }
    }

    /// Returns N, the tokens with padding: a multiple of the mesh's `data`.
    pub fn padded_tokens(&self) -> usize {
        self.mesh.padded_tokens(self.tokens)
    }

    /// Returns V, the vocabulary with all padding: a multiple of the mesh's devices.
    pub fn padded_vocab(&self) -> usize {
        self.mesh.padded_vocab(self.policy.vocab() + self.vocab_padding)
    }

    /// Returns the vocabulary entries of one device in loops over tiles.
    pub fn local_vocab(&self) -> usize {
        self.mesh.local_vocab(self.policy.vocab() + self.vocab_padding)
    }

    /// Returns the size of the vocabulary if it has padding.
    pub(crate) fn end_of_vocab(&self) -> Option<usize> {
        Some(self.policy.vocab()).filter(|vocab| *vocab < self.padded_vocab())
    }

    /// Returns the type of an argument or a result; for gradients, the type of the accumulator.
    pub fn type_of(&self, role: Role) -> TensorType {
        let input = dtype(self.policy.dtype());
        let (f32, sum) = (grpo_stablehlo::Dtype::F32, dtype(self.numerics.gradients));
        let dtype = match role {
            Role::Hidden | Role::LmHead | Role::Bias | Role::Logits => input,
            Role::TokenIds => grpo_stablehlo::Dtype::I32,
            Role::OnPolicy => grpo_stablehlo::Dtype::Pred,
            Role::SamplingMask => grpo_stablehlo::Dtype::U32,
            Role::GradHidden | Role::GradLmHead | Role::GradBias | Role::GradLogits => sum,
            Role::TokenNumbers | Role::Sums | Role::Logp | Role::Entropy => f32,
        };
        TensorType::new(dtype, self.shape_of(role, self.padded_tokens(), self.padded_vocab()))
    }

    /// Returns the shape of an argument or a result for `n` tokens and `v` vocabulary entries.
    pub(crate) fn shape_of(&self, role: Role, n: usize, v: usize) -> Vec<usize> {
        let (h, layout) = match self.policy {
            PolicySpec::Hidden { hidden, layout, .. } => (hidden, layout),
            PolicySpec::Logits { .. } => (0, HeadLayout::VocabHidden),
        };
        match (role, layout) {
            (Role::Hidden | Role::GradHidden, _) => vec![n, h],
            (Role::LmHead | Role::GradLmHead, HeadLayout::VocabHidden) => vec![v, h],
            (Role::LmHead | Role::GradLmHead, HeadLayout::HiddenVocab) => vec![h, v],
            (Role::Bias | Role::GradBias, _) => vec![v],
            (Role::Logits | Role::GradLogits, _) => vec![n, v],
            (Role::TokenIds, _) => vec![IDS, n],
            (Role::TokenNumbers, _) => vec![TokenColumns::<f32>::COUNT, n],
            (Role::OnPolicy, _) => vec![],
            (Role::SamplingMask, _) => vec![n, words(v)],
            (Role::Sums, _) => vec![LossSums::<f32>::COUNT],
            (Role::Logp | Role::Entropy, _) => vec![n],
        }
    }

    /// Returns the arguments of `pass`, in order.
    pub(super) fn arguments(&self, pass: Pass) -> Vec<Role> {
        let policy = match self.policy {
            PolicySpec::Logits { .. } => vec![Role::Logits],
            PolicySpec::Hidden { bias: false, .. } => vec![Role::Hidden, Role::LmHead],
            PolicySpec::Hidden { bias: true, .. } => vec![Role::Hidden, Role::LmHead, Role::Bias],
        };
        let tokens = [Role::TokenIds, Role::TokenNumbers, Role::OnPolicy];
        let mask = self.sampling_mask.then_some(Role::SamplingMask);
        policy.into_iter().chain(tokens).chain(mask).chain(self.accumulators(pass)).collect()
    }

    /// Returns the gradients that are arguments and results of `pass`, in the order of both.
    pub fn accumulators(&self, pass: Pass) -> Vec<Role> {
        let gradients = match (pass, self.policy) {
            (Pass::Gradient, PolicySpec::Hidden { .. }) => vec![
                (self.gradients.hidden, Role::GradHidden),
                (self.gradients.lm_head, Role::GradLmHead),
                (self.gradients.bias, Role::GradBias),
            ],
            (Pass::Gradient, PolicySpec::Logits { .. }) => vec![(self.gradients.hidden, Role::GradLogits)],
            (Pass::Score | Pass::GradientInPlace, _) => vec![],
        };
        gradients.into_iter().filter(|(is_requested, _)| *is_requested).map(|(_, role)| role).collect()
    }
}

/// Converts the loss's dtype into StableHLO's.
pub(crate) fn dtype(dtype: Dtype) -> grpo_stablehlo::Dtype {
    match dtype {
        Dtype::F32 => grpo_stablehlo::Dtype::F32,
        Dtype::Bf16 => grpo_stablehlo::Dtype::Bf16,
    }
}
