#![doc = include_str!("../README.md")]
//! # Functions, loops and derivatives
//!
//! [`trace`] builds a function once; [`Builder::call`] adds it to a program, [`Builder::scan`] repeats it over the
//! slices of stacked weights, and [`Builder::vjp`] or [`Builder::value_and_grad`] build its reverse-mode derivative out
//! of ordinary operations. [`Save`] selects the values that a derivative saves and the values that it recomputes, for a
//! scan; [`Builder::custom_vjp`] takes a custom derivative.
//!
//! ```
//! use grpo_stablehlo::{Builder, DotDimensions, Dtype, Precision, Reducer, Save, TensorType, trace};
//!
//! let (hidden, weight) = (TensorType::new(Dtype::F32, [4, 8]), TensorType::new(Dtype::F32, [8, 8]));
//! let layer = trace(&[hidden.clone(), weight], |_, a| {
//!     vec![a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F32, Precision::Default).tanh()]
//! })?;
//! let stacked = TensorType::new(Dtype::F32, [12, 8, 8]);
//! let loss = trace(&[hidden.clone(), stacked.clone()], |f, a| {
//!     let out = f.scan(12, &layer, &[&a[0]], &[&a[1]], &[], Save::Carry).carry.remove(0);
//!     vec![(&out * &out).reduce(Reducer::Add, &[0, 1])]
//! })?;
//!
//! let f = Builder::new();
//! let (x, weights) = (f.argument("x", hidden), f.argument("weights", stacked));
//! let (results, gradients) = f.value_and_grad(&loss, &[&x, &weights], &[1])?;
//! let module = f.finish("step", &[("loss", &results[0]), ("gradient", &gradients[0])])?;
//! // Two loops, forward and backward, for any number of layers.
//! assert_eq!(module.to_string().matches("stablehlo.while").count(), 2);
//! # Ok::<(), grpo_stablehlo::Error>(())
//! ```
//!
//! # Many devices
//!
//! A program is written for whole tensors and annotated with shardings over a [`Mesh`]: [`Builder::shard`] for
//! arguments, [`Builder::shard_result`] for results, [`Value::constrain`] for intermediate values. The compiler's
//! partitioner (Shardy: compile with `use_shardy_partitioner` and as many partitions as the mesh has devices) does the
//! rest; the executable then takes and returns each device's shard ([`Sharding::range`]). Shardings have
//! derivatives. [`Builder::manual`] bypasses the partitioner with a body for one device, which does not communicate; the
//! interpreter runs it for every device.
//!
//! ```
//! use grpo_stablehlo::{Builder, DotDimensions, Dtype, Mesh, Precision, Reducer, TensorType, trace};
//!
//! let mesh = Mesh::new("mesh", [("data", 4)])?;
//! let (x, w) = (TensorType::new(Dtype::F32, [32, 8]), TensorType::new(Dtype::F32, [8, 8]));
//! let (rows, whole) = (mesh.sharding(&[&["data"], &[]])?, mesh.replicated(2));
//! let loss = trace(&[x.clone(), w.clone()], |_, a| {
//!     let hidden = a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F32, Precision::Default);
//!     vec![hidden.constrain(&rows).tanh().reduce(Reducer::Add, &[0, 1])]
//! })?;
//! let f = Builder::new();
//! let (x, w) = (f.argument("x", x), f.argument("w", w));
//! f.shard(&x, &rows);
//! f.shard(&w, &whole);
//! let (results, gradients) = f.value_and_grad(&loss, &[&x, &w], &[1])?;
//! f.shard_result(0, &mesh.replicated(0));
//! f.shard_result(1, &whole);
//! let module = f.finish("step", &[("loss", &results[0]), ("gradient", &gradients[0])])?;
//! assert!(module.to_string().contains("sdy.mesh @mesh = <[\"data\"=4]>"));
//! # Ok::<(), grpo_stablehlo::Error>(())
//! ```
#![forbid(unsafe_code)]

mod build;
mod error;
mod graph;
mod interpret;
mod loops;
mod lower;
pub mod mosaic;
mod operators;
mod print;
mod reverse;
mod sharding;
mod types;

pub use build::{Builder, Scanned, Traced, Value, trace, try_trace};
pub use error::{Error, Result};
pub use graph::{
    Argument, Binary, Comparison, CustomCall, DotDimensions, Function, GatherDimensions, Kind, Literal, Module, Number,
    Operation, Output, Precision, Reducer, Region, Save, Scan, ScatterDimensions, Unary, ValueId,
};
pub use interpret::{Array, Interpreter, Rounding};
pub use loops::Loop;
pub use reverse::Pullback;
pub use sharding::{Manual, Mesh, Sharding};
pub use types::{Dtype, TensorType};
