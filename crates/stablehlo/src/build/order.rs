//! Sorts, and what is the largest.

use super::{Builder, Value};
use crate::graph::{Comparison, Kind, Order, Reducer};
use crate::types::{Dtype, TensorType};

impl Builder {
    /// Values of one shape, reordered along `dimension` so that the first is sorted; the others follow it. `stable` keeps
    /// the order of elements with equal keys. Floats have their total order, in which NaN is larger than infinity, and a NaN
    /// with a sign smaller than its negative.
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
    /// The index of the largest element along `dimension`, which vanishes, as i32: the smallest index among equal ones, and
    /// that of the first NaN where there is one.
    #[track_caller]
    pub fn argmax(&self, dimension: usize) -> Self {
        let Some(size) = self.shape().get(dimension).copied().filter(|size| *size > 0) else {
            let check = Err(format!("a dimension with elements expected, got dimension {dimension} of {}", self.ty()));
            return self.then(Kind::Reduce { reducers: vec![Reducer::Max], dimensions: vec![dimension] }, &[], check);
        };
        let kept: Vec<usize> = (0..self.shape().len()).filter(|d| *d != dimension).collect();
        let largest = self.reduce(Reducer::Max, &[dimension]).broadcast_in_dim(self.shape(), &kept);
        let mut hit = self.eq(&largest);
        if self.dtype().is_float() {
            hit = hit | self.ne(self);
        }
        let index = self.builder().iota(dimension, self.ty().with_dtype(Dtype::I32));
        let found = hit.select(&index, &index.like(i64::try_from(size).unwrap_or(i64::MAX)));
        found.reduce(Reducer::Min, &[dimension])
    }

    /// Ones of `dtype` where the index along a new last dimension is the element of this value, of an integer dtype; zeros
    /// elsewhere. `[...]` becomes `[..., classes]`; elements that are no class give zeros only.
    #[track_caller]
    pub fn one_hot(&self, classes: usize, dtype: Dtype) -> Self {
        let shape = [self.shape(), &[classes]].concat();
        if !self.dtype().is_integer() {
            let check = Err(format!("indices of an integer dtype expected, got {}", self.ty()));
            return self.then(Kind::Compare(Comparison::Eq), &[], check);
        }
        let rank = self.shape().len();
        let classes = self.builder().iota(rank, TensorType::new(self.dtype(), &shape[..]));
        let here = self.broadcast_in_dim(&shape, &(0..rank).collect::<Vec<_>>());
        here.eq(&classes).convert(dtype)
    }
}
