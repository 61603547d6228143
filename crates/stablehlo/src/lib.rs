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
//!
//! # Functions, loops and derivatives
//!
//! [`trace`] builds a function once; [`Builder::call`] puts it into programs, [`Builder::scan`] repeats it over the slices of
//! stacked weights, and [`Builder::vjp`] or [`Builder::value_and_grad`] make its derivative, in reverse mode, of operations
//! like any others. What a derivative keeps, and what it computes again, is said by [`Save`] for a scan and by
//! [`Builder::remat`] elsewhere; [`Builder::custom_vjp`] is for derivatives of one's own.
//!
//! ```
//! use stablehlo::{Builder, DotDimensions, Dtype, Precision, Reducer, Save, TensorType, trace};
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
//! // Two loops, one each way, however many layers there are.
//! assert_eq!(module.to_string().matches("stablehlo.while").count(), 2);
//! # Ok::<(), stablehlo::Error>(())
//! ```
//!
//! # Many devices
//!
//! A program is written for whole tensors, and says how it is split over a [`Mesh`]: [`Builder::shard`] for arguments,
//! [`Builder::shard_result`] for results, [`Value::constrain`] for what is in between. The compiler's partitioner
//! (Shardy: compile with `use_shardy_partitioner` and as many partitions as the mesh has devices) does the rest; it then
//! takes and returns every device's part ([`Sharding::range`]). Where it should not choose, [`Builder::manual`] has a body
//! for one device, which meets others in collectives. All of it has derivatives, and the interpreter runs all devices of it
//! together.
//!
//! ```
//! use stablehlo::{Builder, DotDimensions, Dtype, Mesh, Precision, Reducer, TensorType, trace};
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
mod sharding;
mod types;

pub use build::{Builder, Scanned, Traced, Value, trace};
pub use error::{Error, Result};
pub use graph::{
    Argument, Binary, Comparison, CustomCall, DotDimensions, Function, GatherDimensions, Kind, Literal, Module, Number,
    Operation, Order, Output, Precision, Reducer, Region, Save, Scan, ScatterDimensions, Unary, ValueId, Window,
};
pub use interpret::{Array, Elements, Interpreter, Rounding};
pub use loops::Loop;
pub use reverse::Pullback;
pub use sharding::{Groups, Manual, Mesh, MeshAxes, Sharding};
pub use types::{Dtype, TensorType};
