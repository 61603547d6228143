//! StableHLO programs and Mosaic TPU kernels as typed graphs that print themselves.
//!
//! Use it to write programs for XLA (or kernels for TPUs) from Rust without MLIR's libraries: it depends on no compiler, and
//! `pjrt` compiles and runs what it prints. A program is built operation by operation ([`Builder`]), which checks shapes and
//! dtypes; it is then plain data ([`Module`]) that can be inspected, rewritten and interpreted ([`Module::interpret`]), and
//! its `Display` is the text that XLA parses.
//!
//! ```
//! use stablehlo::{Array, Builder, Dtype, Reducer, TensorType};
//!
//! let f = Builder::new();
//! let logits = f.argument("logits", TensorType::new(Dtype::F32, [8, 100]));
//! let max = logits.reduce(Reducer::Max, &[1]);
//! let shifted = &logits - max.broadcast_in_dim(&[8, 100], &[0]);
//! let lse = shifted.exp().reduce(Reducer::Add, &[1]).log() + max;
//! let module = f.finish("logsumexp", &[("lse", &lse)])?;
//! assert!(module.to_string().contains("stablehlo.exponential"));
//!
//! // What it means, without a compiler: in f64, for tests and derivatives.
//! let logits = Array::floats(Dtype::F32, [8, 100], (0..800).map(|i| f64::from(i % 7)))?;
//! let lse = &module.interpret(&[logits.clone()])?[0];
//! let sum: f64 = logits.to_floats()[..100].iter().map(|x| x.exp()).sum();
//! assert!((lse.to_floats()[0] - sum.ln()).abs() < 1e-12);
//! # Ok::<(), stablehlo::Error>(())
//! ```
#![forbid(unsafe_code)]

mod build;
mod error;
mod graph;
mod interpret;
mod loops;
mod lower;
pub mod mosaic;
mod print;
mod reverse;
mod types;

pub use build::{Builder, Scanned, Traced, Value, trace};
pub use error::{Error, Result};
pub use graph::{
    Argument, Binary, Comparison, CustomCall, DotDimensions, Function, GatherDimensions, Kind, Literal, Module, Number,
    Operation, Order, Output, Precision, Reducer, Region, Save, Scan, ScatterDimensions, Sharding, Unary, ValueId,
    Window,
};
pub use interpret::{Array, Elements, Interpreter, Rounding};
pub use loops::Loop;
pub use reverse::Pullback;
pub use types::{Dtype, TensorType};
