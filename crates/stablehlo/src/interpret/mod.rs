//! Running a program without a compiler: what it means, at toy sizes.
//!
//! It is the oracle of programs: numbers of f64, so that differences of a function say what its derivative is, and each
//! operation as the StableHLO specification defines it, one element after the other.

mod array;
mod collective;
mod contract;
mod control;
mod elementwise;
mod gather;
mod machine;
mod manual;
mod shape;

pub use array::{Array, Elements};

use crate::error::{Error, Result};
use crate::graph::{Function, Module};
use machine::Machine;

/// What becomes of the digits that a dtype does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Every float is an f64, whatever its dtype: conversions between floats do nothing, nothing overflows f32. Only
    /// [`Kind::BitcastConvert`](crate::Kind::BitcastConvert) rounds, because it reads the bits.
    #[default]
    None,
    /// Every result is rounded to its dtype. Within an operation (the sum of a product or of a reduction, say) numbers
    /// stay f64.
    Dtypes,
}

/// Runs programs on the host, operation by operation, with limits so that a program that is too large, or never ends, is
/// an error.
///
/// Integers wrap at the width of their dtype. Where the specification leaves a result open, it is XLA's: an integer divided
/// by 0 has all bits set, its remainder is itself; floats beyond the range of an integer dtype become its bounds, and NaN 0.
/// Floats sort in their total order (see [`Kind::Sort`](crate::Kind::Sort)).
///
/// ```
/// use stablehlo::{Array, Builder, Dtype, Interpreter, Rounding, TensorType};
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
/// # Ok::<(), stablehlo::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Interpreter {
    /// What becomes of the digits that a dtype does not have.
    pub rounding: Rounding,
    /// The elements that all values of a program may have together; 2^26, half a gigabyte, unless said otherwise.
    pub elements: usize,
    /// The elements that operations may read and write until the end, each counted at least once however small it is;
    /// 2^34, about a minute, unless said otherwise.
    pub work: u64,
}

impl Default for Interpreter {
    fn default() -> Self {
        Self { rounding: Rounding::None, elements: 1 << 26, work: 1 << 34 }
    }
}

impl Interpreter {
    /// The results of the module's main for these arguments, which are whole: how they are split over devices changes
    /// nothing, and what a [`Builder::manual`](crate::Builder::manual) body does is done by all devices together, an
    /// operation at a time.
    ///
    /// # Errors
    /// [`Error::Uninterpreted`] for custom calls, and for whatever takes part of several replicas, which
    /// [`Interpreter::run_replicas`] runs; [`Error::Disagreement`] for devices with different results that should be the
    /// same; [`Error::Malformed`] for arguments that are not the function's, and for a program that is none, also
    /// one in which not all devices that should meet get there; [`Error::Limit`] beyond the limits.
    pub fn run(&self, module: &Module, arguments: &[Array]) -> Result<Vec<Array>> {
        let machine = Machine::new(self, &module.main, module.replicas, module.partitions)?;
        Ok(machine.run(&[arguments.to_vec()])?.remove(0))
    }

    /// The results of each replica, given the arguments of each: all run together, an operation at a time, and meet in
    /// collectives.
    ///
    /// ```
    /// use stablehlo::{Array, Builder, Dtype, Interpreter, Reducer, TensorType};
    ///
    /// let f = Builder::new();
    /// let x = f.argument("x", TensorType::scalar(Dtype::F32));
    /// let sum = x.all_reduce(Reducer::Add, &[vec![0, 1]]);
    /// let mut module = f.finish("sum", &[("sum", &sum)])?;
    /// module.replicas = 2;
    ///
    /// let number = |x: f64| Array::floats(Dtype::F32, [], [x]);
    /// let results = Interpreter::default().run_replicas(&module, &[vec![number(1.0)?], vec![number(2.0)?]])?;
    /// assert_eq!(results[1][0].to_floats(), [3.0]);
    /// # Ok::<(), stablehlo::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Interpreter::run`]; [`Error::Malformed`] for lists that are not one of each replica.
    pub fn run_replicas(&self, module: &Module, arguments: &[Vec<Array>]) -> Result<Vec<Vec<Array>>> {
        if arguments.len() != module.replicas {
            let reason = format!("arguments of {} replicas expected, got {}", module.replicas, arguments.len());
            return Err(Fault::malformed(reason).of("func.func"));
        }
        Machine::new(self, &module.main, module.replicas, module.partitions)?.run(arguments)
    }
}

impl Module {
    /// The results of main for these arguments, in f64: see [`Interpreter`], of which this is the default.
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn interpret(&self, arguments: &[Array]) -> Result<Vec<Array>> {
        Interpreter::default().run(self, arguments)
    }
}

impl Function {
    /// The results for these arguments, in f64, as the only replica: see [`Interpreter`].
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn interpret(&self, arguments: &[Array]) -> Result<Vec<Array>> {
        Ok(Machine::new(&Interpreter::default(), self, 1, 1)?.run(&[arguments.to_vec()])?.remove(0))
    }

    /// The results of each of several replicas, given the arguments of each, in f64: see [`Interpreter::run_replicas`].
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn interpret_replicas(&self, arguments: &[Vec<Array>]) -> Result<Vec<Vec<Array>>> {
        Machine::new(&Interpreter::default(), self, arguments.len(), 1)?.run(arguments)
    }
}

/// Why an operation has no result; [`Machine`] adds which one it was.
enum Fault {
    Uninterpreted(String),
    Malformed(String),
    Limit(String),
}

impl Fault {
    fn malformed(reason: impl Into<String>) -> Self {
        Self::Malformed(reason.into())
    }

    fn of(self, operation: &'static str) -> Error {
        match self {
            Self::Uninterpreted(reason) => Error::Uninterpreted { operation, reason },
            Self::Malformed(reason) => Error::Malformed { operation, reason },
            Self::Limit(reason) => Error::Limit { operation, reason },
        }
    }
}
