//! Reductions over sliding windows.

use super::Value;
use super::contract::combines;
use crate::graph::{Kind, Reducer, Window};
use crate::types::TensorType;

impl Value {
    /// Reduces each window that slides over the value; positions outside of the value are ignored. Dimension d of the
    /// result has (low + size + high - window) / stride + 1 elements, or 0 if the window is larger than the padded
    /// size.
    #[track_caller]
    pub fn reduce_window(&self, window: &Window, reducer: Reducer) -> Self {
        let init = self.builder().scalar(reducer.identity(self.dtype()), self.dtype());
        let check = combines(reducer, self.ty()).and(windows(self.ty(), window));
        self.then(Kind::ReduceWindow(window.clone(), reducer), &[&init], check)
    }

    /// Reduces element i along `dimension` with all elements before it. The result has the same shape.
    #[track_caller]
    pub fn cumulative(&self, reducer: Reducer, dimension: usize) -> Self {
        let rank = self.shape().len();
        let size = self.shape().get(dimension).copied().unwrap_or(0);
        if dimension < rank && size == 0 {
            return self.clone();
        }
        let along = |n: usize, other: usize| (0..rank).map(|d| if d == dimension { n } else { other }).collect();
        let (low, high) = (along(size.saturating_sub(1), 0), vec![0; rank]);
        let window = Window { sizes: along(size, 1), strides: vec![1; rank], low, high };
        if dimension < rank {
            return self.reduce_window(&window, reducer);
        }
        let check = Err(format!("dimension {dimension} of {}", self.ty()));
        self.then(Kind::ReduceWindow(window, reducer), &[], check)
    }

    /// Computes the cumulative sum along `dimension`.
    ///
    /// ```
    /// use stablehlo::{Array, Builder, Dtype, TensorType};
    ///
    /// let f = Builder::new();
    /// let x = f.argument("x", TensorType::new(Dtype::F32, [2, 3]));
    /// let module = f.finish("cumsum", &[("sums", &x.cumsum(1))])?;
    ///
    /// let x = Array::floats(Dtype::F32, [2, 3], [1.0, 2.0, 3.0, 10.0, 20.0, 30.0])?;
    /// assert_eq!(module.interpret(&[x])?[0].to_floats(), [1.0, 3.0, 6.0, 10.0, 30.0, 60.0]);
    /// # Ok::<(), stablehlo::Error>(())
    /// ```
    #[track_caller]
    pub fn cumsum(&self, dimension: usize) -> Self {
        self.cumulative(Reducer::Add, dimension)
    }

    /// Computes the cumulative maximum along `dimension`.
    #[track_caller]
    pub fn cummax(&self, dimension: usize) -> Self {
        self.cumulative(Reducer::Max, dimension)
    }
}

fn windows(ty: &TensorType, window: &Window) -> Result<TensorType, String> {
    let Window { sizes, strides, low, high } = window;
    let rank = ty.rank();
    let legal = rank > 0
        && [sizes.len(), strides.len(), low.len(), high.len()] == [rank; 4]
        && (0..rank).all(|d| sizes[d] > 0 && strides[d] > 0);
    if !legal {
        return Err(format!("one window, stride and padding per dimension of {ty} expected, got {window:?}"));
    }
    let size = |d: usize| {
        let padded = low[d].checked_add(ty.shape[d])?.checked_add(high[d])?;
        Some(padded.checked_sub(sizes[d]).map_or(0, |room| room / strides[d] + 1))
    };
    let shape: Option<Vec<usize>> = (0..rank).map(size).collect();
    shape.map(|shape| TensorType::new(ty.dtype, shape)).ok_or_else(|| format!("{ty} with {window:?} overflows"))
}
