//! Ahead-of-time compilation: what a compiler says of the loss for devices that are not here.
//!
//! [`Target`] names the devices, [`Compiler`] compiles for them, [`Variant`] is a loss with everything that is chosen about
//! it, and [`Report`] is what came out: memory as the compiler has allotted it, time as it estimates it, and the floor that
//! no program can beat on that [`Chip`].

mod chip;
mod compile;
mod cost;
mod fit;
mod hlo;
mod report;
mod target;
mod variant;

pub use chip::Chip;
pub use compile::Compiler;
pub use cost::Cost;
pub use fit::Fit;
pub use report::{Floor, LoopReport, Report};
pub use target::Target;
pub use variant::Variant;
