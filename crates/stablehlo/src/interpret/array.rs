//! Tensors of the interpreter.

use crate::error::{Error, Result};
use crate::types::{Dtype, TensorType};
use half::{bf16, f16};

/// A dense tensor on the host, row-major: an argument or a result of [`Function::interpret`](crate::Function::interpret).
///
/// ```
/// use grpo_stablehlo::{Array, Dtype};
///
/// let a = Array::floats(Dtype::F32, [2, 2], [1.0, 2.0, 3.0, 4.0])?;
/// assert_eq!(a.ty().to_string(), "tensor<2x2xf32>");
/// assert_eq!(a.to_floats(), [1.0, 2.0, 3.0, 4.0]);
/// assert!(Array::ints(Dtype::I32, [3], [1, 2]).is_err());
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    pub(crate) ty: TensorType,
    pub(crate) elements: Elements,
}

/// The elements of an [`Array`], row-major.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Elements {
    /// Elements of a floating-point type, in f64 precision.
    Float(Vec<f64>),
    /// Elements of an integer type, each within its range.
    Int(Vec<i64>),
    /// Elements that are predicates.
    Pred(Vec<bool>),
}

/// Maps the vector of any variant into a vector of the same variant.
macro_rules! map_elements {
    ($elements:expr, $x:ident => $map:expr) => {
        match $elements {
            Elements::Float($x) => Elements::Float($map),
            Elements::Int($x) => Elements::Int($map),
            Elements::Pred($x) => Elements::Pred($map),
        }
    };
}

/// Ends the interpretation of an operation that [`crate::Builder`] refuses.
#[track_caller]
pub(super) fn ill_typed(expected: &str) -> ! {
    unreachable!("the builder has checked the types: {expected}")
}

/// Maps the vectors of two operands of one dtype.
macro_rules! map_pairs {
    ($a:expr, $b:expr, ($x:ident, $y:ident) => $map:expr) => {
        match ($a, $b) {
            (Elements::Float($x), Elements::Float($y)) => Elements::Float($map),
            (Elements::Int($x), Elements::Int($y)) => Elements::Int($map),
            (Elements::Pred($x), Elements::Pred($y)) => Elements::Pred($map),
            _ => $crate::interpret::array::ill_typed("operands of one dtype"),
        }
    };
}

pub(super) use map_pairs;

impl Elements {
    /// Returns the number of elements.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Float(x) => x.len(),
            Self::Int(x) => x.len(),
            Self::Pred(x) => x.len(),
        }
    }
}

impl Array {
    /// Makes a tensor of a floating-point dtype. The numbers are not rounded to the dtype.
    ///
    /// # Errors
    /// Returns an error if the dtype is not a floating-point type, or the number of elements does not match the shape.
    pub fn floats(dtype: Dtype, shape: impl Into<Vec<usize>>, numbers: impl IntoIterator<Item = f64>) -> Result<Self> {
        Self::new(TensorType::new(dtype, shape), Elements::Float(numbers.into_iter().collect()))
    }

    /// Makes a tensor of an integer dtype.
    ///
    /// # Errors
    /// Returns an error if the dtype is not an integer type, a number is out of its range, or the number of elements
    /// does not match the shape.
    pub fn ints(dtype: Dtype, shape: impl Into<Vec<usize>>, numbers: impl IntoIterator<Item = i64>) -> Result<Self> {
        Self::new(TensorType::new(dtype, shape), Elements::Int(numbers.into_iter().collect()))
    }

    /// Makes a tensor of predicates.
    ///
    /// # Errors
    /// Returns an error if the number of elements does not match the shape.
    pub fn preds(shape: impl Into<Vec<usize>>, predicates: impl IntoIterator<Item = bool>) -> Result<Self> {
        Self::new(TensorType::new(Dtype::Pred, shape), Elements::Pred(predicates.into_iter().collect()))
    }

    fn new(ty: TensorType, elements: Elements) -> Result<Self> {
        let legal = match &elements {
            Elements::Float(_) => ty.dtype.is_float(),
            Elements::Int(x) => ty.dtype.is_integer() && x.iter().all(|x| wrap(*x, ty.dtype) == *x),
            Elements::Pred(_) => ty.dtype == Dtype::Pred,
        };
        let count = elements.len();
        if legal && count == ty.elements() {
            return Ok(Self { ty, elements });
        }
        let kind = match elements {
            Elements::Float(_) => "floating-point numbers",
            Elements::Int(_) => "integers",
            Elements::Pred(_) => "predicates",
        };
        Err(Error::Array { reason: format!("{} elements of {ty} expected, got {count} {kind}", ty.elements()) })
    }

    /// Returns the dtype and shape of the tensor.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Returns the sizes of the tensor, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.ty.shape
    }

    /// Converts the elements of any dtype to floats; predicates become 0 and 1.
    pub fn to_floats(&self) -> Vec<f64> {
        match &self.elements {
            Elements::Float(x) => x.clone(),
            Elements::Int(x) => x.iter().map(|x| *x as f64).collect(),
            Elements::Pred(x) => x.iter().map(|x| f64::from(u8::from(*x))).collect(),
        }
    }

    /// Converts the elements to integers: floats are rounded towards 0, predicates become 0 and 1.
    pub fn to_ints(&self) -> Vec<i64> {
        match &self.elements {
            Elements::Float(x) => x.iter().map(|x| *x as i64).collect(),
            Elements::Int(x) => x.clone(),
            Elements::Pred(x) => x.iter().map(|x| i64::from(*x)).collect(),
        }
    }

    /// Converts the elements to predicates: `true` for elements that differ from 0.
    pub fn to_preds(&self) -> Vec<bool> {
        match &self.elements {
            Elements::Float(x) => x.iter().map(|x| *x != 0.0).collect(),
            Elements::Int(x) => x.iter().map(|x| *x != 0).collect(),
            Elements::Pred(x) => x.clone(),
        }
    }

    /// Returns the integers of a tensor that holds indices.
    pub(crate) fn integers(&self) -> &[i64] {
        match &self.elements {
            Elements::Int(x) => x,
            _ => ill_typed("indices are integers"),
        }
    }

    /// Returns the only element of a scalar predicate.
    pub(crate) fn predicate(&self) -> bool {
        self.elements == Elements::Pred(vec![true])
    }

    /// Repeats the only element of a scalar `count` times.
    pub(super) fn repeated(&self, count: usize) -> Elements {
        map_elements!(&self.elements, x => vec![x[0]; count])
    }

    /// Returns the elements at these offsets, in their order.
    pub(crate) fn take(&self, places: &[usize]) -> Elements {
        map_elements!(&self.elements, x => places.iter().map(|i| x[*i]).collect())
    }

    /// Returns the slice at an index of the first dimension, which is removed. The index must be in range.
    pub(super) fn slice(&self, at: usize) -> Self {
        let ty = TensorType::new(self.ty.dtype, self.ty.shape.get(1..).unwrap_or_default());
        let count = ty.elements();
        let elements = map_elements!(&self.elements, x => x[at * count..(at + 1) * count].to_vec());
        Self { ty, elements }
    }

    /// Rounds float elements to the dtype.
    pub(crate) fn rounded(mut self) -> Self {
        if let Elements::Float(x) = &mut self.elements {
            x.iter_mut().for_each(|x| *x = round(*x, self.ty.dtype));
        }
        self
    }
}

/// Concatenates elements of one dtype; there is at least one part.
pub(super) fn joined(parts: &[&Elements]) -> Elements {
    let mut all = parts[0].clone();
    for part in &parts[1..] {
        match (&mut all, part) {
            (Elements::Float(all), Elements::Float(part)) => all.extend(part),
            (Elements::Int(all), Elements::Int(part)) => all.extend(part),
            (Elements::Pred(all), Elements::Pred(part)) => all.extend(part),
            _ => ill_typed("parts of one dtype"),
        }
    }
    all
}

/// Rounds `x` to the nearest number of `dtype`.
pub(super) fn round(x: f64, dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(x as f32),
        Dtype::Bf16 => bf16::from_f64(x).to_f64(),
        Dtype::F16 => f16::from_f64(x).to_f64(),
        Dtype::F64 | Dtype::Pred | Dtype::I16 | Dtype::I32 | Dtype::I64 | Dtype::U8 | Dtype::U32 => x,
    }
}

/// Wraps `x` to the width of `dtype`.
pub(super) fn wrap(x: i64, dtype: Dtype) -> i64 {
    match dtype {
        Dtype::I16 => i64::from(x as i16),
        Dtype::I32 => i64::from(x as i32),
        Dtype::U8 => i64::from(x as u8),
        Dtype::U32 => i64::from(x as u32),
        Dtype::I64 | Dtype::Pred | Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 => x,
    }
}

/// Copies `count` neighbouring elements between tensors of one dtype.
pub(crate) fn put(target: &mut Elements, to: usize, source: &Elements, from: usize, count: usize) {
    let (to, from) = (to..to + count, from..from + count);
    match (target, source) {
        (Elements::Float(x), Elements::Float(y)) => x[to].copy_from_slice(&y[from]),
        (Elements::Int(x), Elements::Int(y)) => x[to].copy_from_slice(&y[from]),
        (Elements::Pred(x), Elements::Pred(y)) => x[to].copy_from_slice(&y[from]),
        _ => ill_typed("elements of one dtype"),
    }
}

/// Returns the distance in memory between neighbours along each dimension, also for shapes without elements.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1_usize; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d].saturating_mul(shape[d].max(1));
    }
    strides
}

/// Calls `see` with every index of a shape, row-major.
pub(crate) fn each_index(shape: &[usize], mut see: impl FnMut(&[usize])) {
    let mut index = vec![0; shape.len()];
    for _ in 0..shape.iter().fold(1, |n: usize, size| n.saturating_mul(*size)) {
        see(&index);
        for (i, size) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < *size {
                break;
            }
            *i = 0;
        }
    }
}

/// Returns the offsets of all indices along the given dimensions of a shape, row-major in the order of `dimensions`.
pub(crate) fn offsets(shape: &[usize], dimensions: &[usize]) -> Vec<usize> {
    let strides = strides(shape);
    dimensions.iter().fold(vec![0], |places, d| {
        let (size, step) = (shape[*d], strides[*d]);
        let along = |at: usize| (0..size).map(move |i| at + i * step);
        places.into_iter().flat_map(along).collect()
    })
}

/// Returns the offset of an index.
pub(crate) fn place(index: &[usize], strides: &[usize]) -> usize {
    index.iter().zip(strides).map(|(i, s)| i * s).sum()
}
