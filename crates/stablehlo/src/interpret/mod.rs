//! An interpreter that runs small programs without a compiler.
//!
//! It is the reference for other implementations: it computes in f64, so that finite differences can check derivatives,
//! and follows the StableHLO specification element by element.

pub(crate) mod array;
pub(crate) mod contract;
mod control;
pub(crate) mod elementwise;
mod gather;
pub(crate) mod machine;
mod manual;
pub(crate) mod shape;

pub use array::Array;

use crate::error::{Error, Result};
use crate::graph::{Function, Module};
use machine::Machine;
use smart_default::SmartDefault;

/// How results are rounded to their dtypes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Floats of any dtype are f64: conversions between floats do nothing, and nothing overflows f32. Only
    /// [`Kind::BitcastConvert`](crate::Kind::BitcastConvert) rounds, because it reads the bits.
    #[default]
    None,
    /// Every result is rounded to its dtype. Numbers within an operation, such as the accumulator of a product or a
    /// reduction, stay f64.
    Dtypes,
}

/// Runs programs on the host, operation by operation. Limits turn programs that are too large, or do not end, into
/// errors.
///
/// Integers wrap at the width of their dtype. Where the specification leaves a result open, it follows XLA: an integer
/// divided by 0 has all bits set; floats out of range of an integer dtype are
/// clamped to its bounds, and NaN becomes 0.
///
/// ```
/// use grpo_stablehlo::{Array, Builder, Dtype, Interpreter, Rounding, TensorType};
///
/// let f = Builder::new();
/// let x = f.argument("x", TensorType::scalar(Dtype::F32));
/// let narrow = x.convert(Dtype::Bf16).convert(Dtype::F32);
/// let module = f.finish("narrow", &[("narrow", &narrow)])?;
///
/// let third = Array::floats(Dtype::F32, [], [1.0 / 3.0])?;
/// assert_eq!(module.interpret(&[third.clone()])?[0].to_floats(), [1.0 / 3.0]);
/// let rounding = Interpreter { rounding: Rounding::Dtypes, ..Interpreter::default() };
/// assert_eq!(rounding.run(&module, &[third])?[0].to_floats(), [0.333984375]);
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
#[derive(Clone, Copy, Debug, SmartDefault)]
pub struct Interpreter {
    /// How results are rounded.
    pub rounding: Rounding,
    /// The maximal number of elements of all values of a program together; by default 2^26, half a gigabyte.
    #[default(1 << 26)]
    pub elements: usize,
    /// The maximal number of elements that operations read and write during a run, with at least one per operation; by
    /// default 2^34, about a minute.
    #[default(1 << 34)]
    pub work: u64,
}

impl Interpreter {
    /// Runs the module's `main` on whole tensors and returns its results. Shardings change no numbers. The body of a
    /// [`Builder::manual`](crate::Builder::manual) runs for one device after the other.
    ///
    /// # Errors
    /// [`Error::Uninterpreted`] for custom calls; [`Error::Disagreement`] if devices differ in results that should be
    /// equal; [`Error::Malformed`] for arguments that do not match the function, or a malformed program;
    /// [`Error::Limit`] beyond the limits.
    pub fn run(&self, module: &Module, arguments: &[Array]) -> Result<Vec<Array>> {
        Machine::new(self, &module.main)?.run(arguments)
    }
}

impl Module {
    /// Runs `main` in f64 with the default [`Interpreter`] and returns its results.
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn interpret(&self, arguments: &[Array]) -> Result<Vec<Array>> {
        Interpreter::default().run(self, arguments)
    }
}

impl Function {
    /// Runs the function in f64 with the default [`Interpreter`] and returns its results.
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn interpret(&self, arguments: &[Array]) -> Result<Vec<Array>> {
        Machine::new(&Interpreter::default(), self)?.run(arguments)
    }
}

/// Why an operation failed; [`Machine`] adds the operation's name.
enum Fault {
    Uninterpreted(String),
    Malformed(String),
    Limit(String),
}

impl Fault {
    fn of(self, operation: &'static str) -> Error {
        match self {
            Self::Uninterpreted(reason) => Error::Uninterpreted { operation, reason },
            Self::Malformed(reason) => Error::Malformed { operation, reason },
            Self::Limit(reason) => Error::Limit { operation, reason },
        }
    }
}
