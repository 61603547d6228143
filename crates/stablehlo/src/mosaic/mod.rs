//! Mosaic TPU kernels as typed graphs that print themselves and can be interpreted on the CPU.
//!
//! A kernel runs once for every point of a grid; the last dimension changes fastest. It accesses each operand through a
//! window: a block of the tensor, selected by an affine map of the grid indices. [`Builder`] makes a kernel operation
//! by operation and checks shapes and dtypes. The result is plain data ([`Kernel`]): [`Kernel::custom_call`] gives the
//! call for a StableHLO program, `Display` prints the text, and [`interpret`] runs it without a TPU.
//!
//! ```
//! use grpo_stablehlo::mosaic::{Affine, Builder, Reducer, Semantics, Window, interpret};
//! use grpo_stablehlo::{Array, Dtype, TensorType};
//!
//! let k = Builder::new("row_max", &[(2, Semantics::Parallel)]);
//! let rows = |columns| Window::new([8, columns], [Affine::grid(0), Affine::constant(0)]);
//! let x = k.input(TensorType::new(Dtype::F32, [16, 256]), rows(256));
//! let y = k.output(TensorType::new(Dtype::F32, [16, 128]), rows(128));
//! y.store_all(&x.load_all().reduce(Reducer::Max, 1).broadcast(&[8, 128]));
//! let kernel = k.finish()?;
//!
//! let input = Array::floats(Dtype::F32, [16, 256], (0..16 * 256).map(f64::from))?;
//! assert_eq!(interpret(&kernel, &[input])?[0].to_floats()[128], 511.0);
//! # Ok::<(), grpo_stablehlo::Error>(())
//! ```

mod build;
mod elementwise;
mod interpret;
mod kernel;
mod memory;
mod print;

pub use crate::graph::Reducer;
pub use build::{Builder, Value};
pub use interpret::interpret;
pub use kernel::{Affine, Block, Cost, Kernel, Kind, Offset, Operand, Operation, RefId, Semantics, Space, Window};
pub use memory::Ref;
