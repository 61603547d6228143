//! Sorts and argmax.

use super::contract::combines;
use super::{Builder, Value};
use crate::graph::{Kind, Order, Reducer};
use crate::types::{Dtype, TensorType};

impl Builder {
    /// Sorts the first value along `dimension` and permutes the others, of the same shape, likewise. `stable` keeps the
    /// order of elements with equal keys. Floats have their total order, in which NaN with a positive sign is larger
    /// than infinity, and NaN with a negative sign smaller than negative infinity.
    ///
    /// ```
    /// use stablehlo::{Array, Builder, Dtype, Order, TensorType};
    ///
    /// let f = Builder::new();
    /// let logits = f.argument("logits", TensorType::new(Dtype::F32, [4]));
    /// let ids = f.iota(0, TensorType::new(Dtype::I32, [4]));
    /// let sorted = f.sort(&[&logits, &ids], 0, Order::Descending, true);
    /// let module = f.finish("sort", &[("logits", &sorted[0]), ("ids", &sorted[1])])?;
    ///
    /// let results = module.interpret(&[Array::floats(Dtype::F32, [4], [0.5, 2.0, -1.0, 2.0])?])?;
    /// assert_eq!(results[1].to_ints(), [1, 3, 0, 2]);
    /// # Ok::<(), stablehlo::Error>(())
    /// ```
    #[track_caller]
    pub fn sort(&self, values: &[&Value], dimension: usize, order: Order, stable: bool) -> Vec<Value> {
        let types: Vec<TensorType> = values.iter().map(|v| v.ty().clone()).collect();
        let check = match types.split_first() {
            None => Err("no operands".into()),
            Some((first, _)) if dimension >= first.rank() => Err(format!("dimension {dimension} of {first}")),
            Some((first, rest)) => match rest.iter().find(|ty| ty.shape != first.shape) {
                Some(other) => Err(format!("operands of one shape expected, got {first} and {other}")),
                None => Ok(types.clone()),
            },
        };
        self.emit_all(Kind::Sort { dimension, order, stable }, values, vec![], check, || types)
    }
}

impl Value {
    /// Returns the maximum along `dimension` and its index, in one pass. Both have the shape of this value without the
    /// dimension; the index is i32: the smallest one among equal elements, or the index of the first NaN if there is
    /// one. The maximum is NaN if there is a NaN. The element at the returned index gets the whole cotangent.
    ///
    /// ```
    /// use stablehlo::{Array, Builder, Dtype, TensorType};
    ///
    /// let f = Builder::new();
    /// let logits = f.argument("logits", TensorType::new(Dtype::F32, [2, 3]));
    /// let (largest, ids) = logits.largest(1);
    /// let module = f.finish("greedy", &[("largest", &largest), ("ids", &ids)])?;
    ///
    /// let results = module.interpret(&[Array::floats(Dtype::F32, [2, 3], [0.5, 2.0, 2.0, 1.0, -1.0, 0.0])?])?;
    /// assert_eq!((results[0].to_floats(), results[1].to_ints()), (vec![2.0, 1.0], vec![1, 0]));
    /// # Ok::<(), stablehlo::Error>(())
    /// ```
    #[track_caller]
    pub fn largest(&self, dimension: usize) -> (Self, Self) {
        let (f, kind) = (self.builder(), Kind::ArgMax { dimension });
        let ty = self.ty();
        let check = match ty.shape.get(dimension) {
            None | Some(0) => Err(format!("a dimension with elements expected, got dimension {dimension} of {ty}")),
            Some(size) if i32::try_from(*size).is_err() => Err(format!("indices of i32 expected, got {ty}")),
            Some(_) => combines(Reducer::Max, ty).map(|()| {
                let kept = (0..ty.rank()).filter(|d| *d != dimension).map(|d| ty.shape[d]).collect::<Vec<_>>();
                [ty.dtype, Dtype::I32].map(|dtype| TensorType::new(dtype, &kept[..])).to_vec()
            }),
        };
        let types = || [ty.dtype, Dtype::I32].map(TensorType::scalar).to_vec();
        let operands = match check {
            Ok(_) => {
                let (index, first) = (f.iota(dimension, ty.with_dtype(Dtype::I32)), Reducer::Max.identity(ty.dtype));
                vec![self.clone(), index, f.scalar(first, ty.dtype), f.scalar(i64::from(i32::MAX), Dtype::I32)]
            }
            Err(_) => vec![self.clone()],
        };
        let mut results = f.emit_all(kind, &operands.iter().collect::<Vec<_>>(), vec![], check, types).into_iter();
        let (Some(largest), Some(index)) = (results.next(), results.next()) else { unreachable!("two results") };
        (largest, index)
    }
}
