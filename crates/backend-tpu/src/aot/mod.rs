//! Ahead-of-time compilation of the loss for devices that are not present.
//!
//! [`Target`] names the devices, [`Compiler`] compiles for them, [`Variant`] is a loss with all choices, and [`Report`]
//! is the result: the memory that the compiler allocates, the time that it estimates, and the lower bound of the time
//! on that [`Chip`].
//!
//! ```no_run
//! use grpo_backend_tpu::aot::{Compiler, Target, Variant};
//! use grpo_backend_tpu::program::{MeshShape, Numerics, Pass, Spec};
//! use grpo_core::*;
//!
//! # fn main() -> Result<()> {
//! let (hidden, vocab, dtype) = (4096, 151_936, Dtype::Bf16);
//! let request = PlanRequest {
//!     loss: LossConfig::default().into(),
//!     implementation: Implementation::Fused,
//!     tiling: Tiling::default(),
//!     max_tokens: 8192,
//!     policy: PolicySpec::Hidden { hidden, vocab, dtype, layout: HeadLayout::VocabHidden, bias: false },
//!     gradients: GradientSpec::default(),
//! };
//! let (numerics, mesh, pass, build) = (Numerics::default(), MeshShape::default(), Pass::Gradient, Spec::program);
//! let variant = Variant { request, numerics, mosaic: None, mesh, pass, build };
//! let report = Compiler::open(Target::parse("v6e")?, None)?.report(&variant)?;
//! println!("{} bytes, estimated {:?} s", report.total_bytes, report.estimate_seconds);
//! # Ok(())
//! # }
//! ```

mod analysis;
mod chip;
mod compile;
mod cost;
mod cycles;
mod fit;
mod module;
mod report;
mod slice;
mod target;
mod traffic;
mod variant;

pub use analysis::{Analysis, user_cache};
pub use chip::{Chip, Host};
pub use compile::Compiler;
pub use cost::Cost;
pub use fit::Fit;
pub use report::{Floor, LoopReport, Report};
pub use target::Target;
pub use traffic::Traffic;
pub use variant::Variant;
