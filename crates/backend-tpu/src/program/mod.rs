//! StableHLO programs of the loss.
//!
//! [`Spec`] describes the computation, [`Pass`] selects a program. The implementations
//! `reference` and `logits` are in the folder `dense`, `fused` in the folder of that name. Every program is a pure
//! function; [`Program`] lists its arguments.
//!
//! Programs can be built and inspected without a plugin:
//!
//! ```
//! use grpo_backend_tpu::program::{Blocking, MeshShape, Numerics, Pass, Spec};
//! use grpo_core::*;
//!
//! # fn main() -> Result<()> {
//! let spec = Spec {
//!     loss: LossConfig::default().into(),
//!     implementation: Implementation::Logits,
//!     tokens: 4,
//!     policy: PolicySpec::Logits { vocab: 32, dtype: Dtype::F32 },
//!     vocab_padding: 0,
//!     gradients: GradientSpec::default(),
//!     blocking: Blocking::TokenChunks(1), // only `fused` reads it
//!     mosaic: None,
//!     sampling_mask: false,
//!     numerics: Numerics::default(),
//!     mesh: MeshShape::default(),
//! };
//! let text = spec.program(Pass::Score)?.module.to_string();
//! assert!(text.contains("tensor<4x32xf32>"), "{text}");
//! # Ok(())
//! # }
//! ```
//!
//! [`Spec::operations`] adds the same operations to a larger program, such as a decoder and its derivative.
//!
//! Legend: N tokens, V vocabulary, H hidden size.

mod blocking;
mod dense;
mod frame;
mod fused;
mod numerics;
mod pass;
mod products;
mod role;
mod sampling_mask;
mod sharding;
mod softmax;
mod spec;
mod tokens;
mod traced;
mod transform;
mod value;

use crate::error::unsupported;
pub use blocking::Blocking;
pub use frame::{Frame, Program};
use grpo_core::Implementation;
use grpo_core::error::Result;
use grpo_stablehlo::{Builder, Value};
pub use numerics::{MosaicBlocks, Numerics};
pub use pass::Pass;
pub use products::{Head, HeadSplit};
pub use role::Role;
pub(crate) use sampling_mask::bits;
pub use sharding::MeshShape;
pub use softmax::Factors;
pub(crate) use spec::IDS;
pub use spec::Spec;
pub use tokens::TokenLoss;
pub use value::{ValueTable, value_gradient};

impl Spec {
    /// Builds the program of `pass`.
    ///
    /// # Errors
    /// [`grpo_core::Error::Config`] or [`grpo_core::Error::Unsupported`] if no program computes the spec.
    pub fn program(&self, pass: Pass) -> Result<Program> {
        self.validate(pass)?;
        let frame = Frame::new(self, pass);
        let results = self.results(&frame, pass)?;
        let name = if self.implementation == Implementation::Fused { "fused" } else { "dense" };
        frame.finish(name, self, &results)
    }

    /// Adds the operations of `pass` to the program that `builder` builds. Returns its results by role, in the order of
    /// [`Program::results`]. `arguments` are values of that program, one for each role in [`Program::arguments`], in
    /// any order. Gradients are added to the accumulators among the arguments (zeros, or sums of earlier
    /// micro-batches). In a program that is sharded over a mesh, `split` has the shardings of the operands of logits.
    ///
    /// ```
    /// use grpo_backend_tpu::program::{Blocking, MeshShape, Numerics, Pass, Role, Spec};
    /// use grpo_core::*;
    /// use grpo_stablehlo::{Builder, Value};
    ///
    /// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// let (dtype, layout) = (Dtype::F32, HeadLayout::VocabHidden);
    /// let spec = Spec {
    ///     loss: LossConfig::default().into(),
    ///     implementation: Implementation::Fused,
    ///     tokens: 4,
    ///     policy: PolicySpec::Hidden { hidden: 8, vocab: 32, dtype, layout, bias: false },
    ///     vocab_padding: 0,
    ///     gradients: GradientSpec { hidden: true, lm_head: true, bias: false },
    ///     blocking: Blocking::TokenChunks(4),
    ///     mosaic: None,
    ///     sampling_mask: false,
    ///     numerics: Numerics::default(),
    ///     mesh: MeshShape::default(),
    /// };
    /// let f = Builder::new();
    /// let x = f.argument("x", spec.type_of(Role::Hidden));
    /// let mut arguments = vec![(Role::Hidden, x.tanh())];
    /// for role in [Role::LmHead, Role::TokenIds, Role::TokenNumbers, Role::OnPolicy, Role::GradHidden, Role::GradLmHead] {
    ///     arguments.push((role, f.argument(role.name(), spec.type_of(role))));
    /// }
    /// let results = spec.operations(&f, Pass::Gradient, arguments, None)?;
    /// let named: Vec<(&str, &Value)> = results.iter().map(|(role, value)| (role.name(), value)).collect();
    /// assert_eq!(results[3].0, Role::GradHidden);
    /// f.finish("layer_and_loss", &named)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Spec::program`]; [`grpo_core::Error::Shape`] for a missing argument, or one of another type.
    pub fn operations(
        &self,
        builder: &Builder,
        pass: Pass,
        arguments: Vec<(Role, Value)>,
        split: Option<HeadSplit>,
    ) -> Result<Vec<(Role, Value)>> {
        self.validate(pass)?;
        self.results(&Frame::of(self, pass, builder, arguments, split)?, pass)
    }

    /// Computes the results of `pass` from the arguments in `frame`.
    fn results(&self, frame: &Frame, pass: Pass) -> Result<Vec<(Role, Value)>> {
        let head = frame.head(self);
        match (self.implementation, head) {
            (Implementation::Reference | Implementation::Logits, head) => dense::results(self, frame, pass, head),
            (Implementation::Fused, Some(head)) => Ok(fused::results(self, frame, pass, head)),
            (Implementation::Fused, None) => Err(unsupported(
                "implementation `fused` on given logits",
                "there is no head to fuse with; use `logits`, or pass hidden states and the head",
            )),
            (other, _) => {
                Err(unsupported(&format!("implementation `{}`", other.name()), "use `fused`, `logits` or `reference`"))
            }
        }
    }
}
