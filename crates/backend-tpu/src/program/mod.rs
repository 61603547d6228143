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
//! [`Spec::operations`] adds the same operations to a program that computes more than the loss: a decoder in front of it, and
//! its derivative behind.
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
mod value;

use crate::error::unsupported;
pub use blocking::Blocking;
use frame::Frame;
pub use frame::Program;
use grpo_core::error::Result;
use grpo_core::{Implementation, PolicySpec};
pub use kind::{Pass, ProgramKind};
pub use mesh::Mesh;
pub use numerics::{MosaicBlocks, Numerics};
pub use products::HeadSplit;
pub use role::Role;
pub(crate) use spec::IDS;
pub use spec::Spec;
use stablehlo::{Builder, Value};
pub use value::{ValueTable, value_gradient};

impl Spec {
    /// The program of `pass`.
    ///
    /// # Errors
    /// [`grpo_core::Error::Config`] or [`grpo_core::Error::Unsupported`] for what no program does.
    pub fn program(&self, pass: Pass) -> Result<Program> {
        self.validate(pass)?;
        let frame = Frame::new(self, pass);
        let results = self.results(&frame, pass)?;
        let name = if self.implementation == Implementation::Fused { "fused" } else { "dense" };
        frame.finish(name, self, &results)
    }

    /// The operations of `pass` as a part of the program that `builder` builds: its results, by role, in the order of
    /// [`Program::results`]. `arguments` are values of that program, one for each role that [`Program::arguments`] of the pass has, in
    /// any order; gradients begin as the sums that are given (zeros, or those of earlier micro-batches).
    ///
    /// ```
    /// use backend_tpu::program::{Blocking, Mesh, Numerics, Pass, Role, Spec};
    /// use grpo_core::*;
    /// use stablehlo::{Builder, Value};
    ///
    /// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// let (dtype, layout) = (Dtype::F32, HeadLayout::VocabHidden);
    /// let spec = Spec {
    ///     loss: LossConfig::default(),
    ///     implementation: Implementation::Fused,
    ///     tokens: 4,
    ///     policy: PolicySpec::Hidden { hidden: 8, vocab: 32, dtype, layout, bias: false },
    ///     gradients: GradientSpec { hidden: true, lm_head: true, bias: false },
    ///     blocking: Blocking::TokenChunks(4),
    ///     mosaic: None,
    ///     numerics: Numerics::default(),
    ///     mesh: Mesh::default(),
    /// };
    /// let f = Builder::new();
    /// let x = f.argument("x", spec.type_of(Role::Hidden));
    /// let mut arguments = vec![(Role::Hidden, x.tanh())];
    /// for role in [Role::LmHead, Role::TokenIds, Role::TokenNumbers, Role::OnPolicy, Role::GradHidden, Role::GradLmHead] {
    ///     arguments.push((role, f.argument(role.name(), spec.type_of(role))));
    /// }
    /// let results = spec.operations(&f, Pass::Gradient, arguments)?;
    /// let named: Vec<(&str, &Value)> = results.iter().map(|(role, value)| (role.name(), value)).collect();
    /// assert_eq!(results[3].0, Role::GradHidden);
    /// f.finish("layer_and_loss", &named)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Spec::program`]; [`grpo_core::Error::Shape`] for an argument that is missing or of another type.
    pub fn operations(
        &self,
        builder: &Builder,
        pass: Pass,
        arguments: Vec<(Role, Value)>,
    ) -> Result<Vec<(Role, Value)>> {
        self.validate(pass)?;
        self.results(&Frame::of(self, pass, builder, arguments)?, pass)
    }

    /// [`Spec::operations`] in a program that is split over a mesh, with operands of logits that are split like `split`.
    ///
    /// # Errors
    /// As [`Spec::operations`].
    pub fn operations_on_mesh(
        &self,
        builder: &Builder,
        pass: Pass,
        arguments: Vec<(Role, Value)>,
        split: &HeadSplit,
    ) -> Result<Vec<(Role, Value)>> {
        self.validate(pass)?;
        self.results(&Frame::of(self, pass, builder, arguments)?.with_split(split), pass)
    }

    /// The results of `pass` for the arguments in `frame`.
    fn results(&self, frame: &Frame, pass: Pass) -> Result<Vec<(Role, Value)>> {
        match (self.implementation, self.policy) {
            (Implementation::Reference, _) => dense::results(self, frame, pass),
            (Implementation::Logits, _) => logits::results(self, frame, pass),
            (Implementation::Fused, PolicySpec::Hidden { .. }) => Ok(fused::results(self, frame, pass)),
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
