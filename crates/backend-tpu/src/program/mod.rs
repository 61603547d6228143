//! StableHLO programs of the loss: what is compiled for a device.
//!
//! [`Spec`] says what is wanted of one device's part, [`ProgramKind`] which of its programs; the implementations `dense`
//! (which users call `reference`), `logits` and `fused` are folders of the same names. Every program is a pure function of
//! its arguments, whose order [`Program`] tells.
//!
//! A program needs no plugin to be written and looked at:
//!
//! ```
//! use backend_tpu::program::{Blocking, Mesh, Numerics, Pass, Spec};
//! use grpo_core::*;
//!
//! # fn main() -> Result<()> {
//! let spec = Spec {
//!     loss: LossConfig::default(),
//!     implementation: Implementation::Logits,
//!     tokens: 4,
//!     policy: PolicySpec::Logits { vocab: 32, dtype: Dtype::F32 },
//!     gradients: GradientSpec::default(),
//!     blocking: Blocking::TokenChunks(1), // of no meaning but for `fused`
//!     mosaic: None,
//!     numerics: Numerics::default(),
//!     mesh: Mesh::default(),
//! };
//! let text = spec.program(Pass::Score)?.module.to_string();
//! assert!(text.contains("tensor<4x32xf32>"), "{text}");
//! # Ok(())
//! # }
//! ```
//!
//! Legend: N tokens and V vocabulary entries of one device, H hidden size.

mod bare;
mod baseline;
mod blocking;
mod dense;
mod frame;
mod fused;
mod kind;
mod logits;
mod mesh;
mod numerics;
mod products;
mod role;
mod softmax;
mod spec;
mod tokens;
mod traced;
mod transform;

use crate::error::unsupported;
pub use blocking::Blocking;
pub use frame::Program;
use grpo_core::error::Result;
use grpo_core::{Implementation, PolicySpec};
pub use kind::{Pass, ProgramKind};
pub use mesh::Mesh;
pub use numerics::{MosaicBlocks, Numerics};
pub use role::Role;
pub(crate) use spec::IDS;
pub use spec::Spec;

impl Spec {
    /// The program of `pass`.
    ///
    /// # Errors
    /// [`grpo_core::Error::Config`] or [`grpo_core::Error::Unsupported`] for what no program does.
    pub fn program(&self, pass: Pass) -> Result<Program> {
        self.validate(pass)?;
        match (self.implementation, self.policy) {
            (Implementation::Reference, _) => dense::program(self, pass),
            (Implementation::Logits, _) => logits::program(self, pass),
            (Implementation::Fused, PolicySpec::Hidden { .. }) => fused::program(self, pass),
            (Implementation::Fused, PolicySpec::Logits { .. }) => Err(unsupported(
                "implementation `fused` on given logits",
                "there is no head to fuse with; use `logits`, or hand over hidden states and the head",
            )),
        }
    }

    /// What automatic differentiation makes of the dense loss, with every intermediate that it keeps: for comparison
    /// only.
    ///
    /// # Errors
    /// As [`Spec::program`].
    pub fn materialised_baseline(&self) -> Result<Program> {
        self.validate(Pass::Gradient)?;
        baseline::program(self)
    }

    /// The products of `pass` and nothing else, with its arguments and results: for comparison only. Of given logits, one
    /// pass over them.
    ///
    /// # Errors
    /// As [`Spec::program`].
    pub fn bare(&self, pass: Pass) -> Result<Program> {
        self.validate(pass)?;
        bare::program(self, pass)
    }
}

impl ProgramKind {
    /// The program of `pass`.
    pub(crate) fn program(self, spec: &Spec, pass: Pass) -> Result<Program> {
        match self {
            Self::Materialised | Self::Bare if pass != self.pass(spec.policy) => Err(unsupported(
                &format!("the pass {pass:?} in a plan of {self:?}"),
                "that plan is there to be compared with: make another one",
            )),
            Self::Score | Self::Gradient | Self::GradientInPlace => spec.program(pass),
            Self::Materialised => spec.materialised_baseline(),
            Self::Bare => spec.bare(pass),
        }
    }
}
