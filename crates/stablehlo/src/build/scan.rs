//! Loops over slices.

use super::trace::{Traced, listed};
use super::{Builder, Value};
use crate::graph::{Kind, Save, Scan};
use crate::types::TensorType;

/// The results of [`Builder::scan`].
#[derive(Clone, Debug)]
pub struct Scanned {
    /// The carried values after the last iteration.
    pub carry: Vec<Value>,
    /// The other results of all iterations, stacked along a new first dimension.
    pub ys: Vec<Value>,
}

impl Builder {
    /// Repeats `body` for each of the `n` slices along the first dimension of `xs`, in order.
    ///
    /// `body` takes the carried values, a slice `[...]` of each of `xs` `[n, ...]`, and the constants. It returns the
    /// next carried values, of the same types, then results to stack (`ys`, `[n, ...]`). Its derivative is a scan from
    /// the last slice to the first; `save` selects the residuals.
    ///
    /// ```
    /// use grpo_stablehlo::{Builder, DotDimensions, Dtype, Precision, Save, TensorType, trace};
    ///
    /// // Three layers with stacked weights.
    /// let (hidden, weight) = (TensorType::new(Dtype::F32, [2, 8]), TensorType::new(Dtype::F32, [8, 8]));
    /// let layer = trace(&[hidden.clone(), weight], |_, a| {
    ///     vec![a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F32, Precision::Default).tanh()]
    /// })?;
    /// let f = Builder::new();
    /// let x = f.argument("x", hidden);
    /// let weights = f.argument("weights", TensorType::new(Dtype::F32, [3, 8, 8]));
    /// let out = f.scan(3, &layer, &[&x], &[&weights], &[], Save::Carry);
    /// let module = f.finish("layers", &[("hidden", &out.carry[0])])?;
    /// assert_eq!(module.to_string().matches("dot_general").count(), 1);
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    #[track_caller]
    pub fn scan(
        &self,
        n: usize,
        body: &Traced,
        carry: &[&Value],
        xs: &[&Value],
        constants: &[&Value],
        save: Save,
    ) -> Scanned {
        let scan = Scan { trips: n, carry: carry.len(), xs: xs.len(), reverse: false, save };
        let operands: Vec<&Value> = [carry, xs, constants].concat();
        self.scan_over(scan, body, &operands)
    }

    #[track_caller]
    pub(crate) fn scan_over(&self, scan: Scan, body: &Traced, operands: &[&Value]) -> Scanned {
        let (carried, results) = (scan.carry, body.result_types());
        let check = scan_types(&scan, body, operands);
        let region = self.state.borrow_mut().body(body);
        let fallback = || results.iter().enumerate().map(|(i, ty)| stacked(&scan, i, ty)).collect();
        let mut carry = self.emit_all(Kind::Scan(scan.clone()), operands, vec![region], check, fallback);
        let ys = carry.split_off(carried.min(carry.len()));
        Scanned { carry, ys }
    }
}

/// Returns the type of a result of the scan from the type of the body's result.
fn stacked(scan: &Scan, index: usize, ty: &TensorType) -> TensorType {
    let mut ty = ty.clone();
    if index >= scan.carry {
        ty.shape.insert(0, scan.trips);
    }
    ty
}

fn scan_types(scan: &Scan, body: &Traced, operands: &[&Value]) -> Result<Vec<TensorType>, String> {
    if scan.trips == 0 || i32::try_from(scan.trips).is_err() {
        return Err(format!("a number of iterations from 1 to {} expected, got {}", i32::MAX, scan.trips));
    }
    if let Save::Every(turns) = scan.save
        && (turns == 0 || !scan.trips.is_multiple_of(turns))
    {
        return Err(format!("{} iterations do not divide into groups of {turns}", scan.trips));
    }
    let mut slices = Vec::with_capacity(operands.len());
    for (i, operand) in operands.iter().enumerate() {
        let mut ty = operand.ty().clone();
        if i >= scan.carry && i < scan.carry + scan.xs {
            if ty.shape.first() != Some(&scan.trips) {
                return Err(format!("xs with {} slices expected, got {ty}", scan.trips));
            }
            ty.shape.remove(0);
        }
        slices.push(ty);
    }
    let (expected, results) = (body.argument_types(), body.result_types());
    if slices != expected {
        return Err(format!("the body takes ({}), got ({})", listed(&expected), listed(&slices)));
    }
    let next = results.get(..scan.carry);
    if next != Some(&slices[..scan.carry]) {
        let carried = listed(&slices[..scan.carry]);
        return Err(format!("the body should return ({carried}) first, got ({})", listed(&results)));
    }
    if results.is_empty() {
        return Err("the body returns nothing".into());
    }
    Ok(results.iter().enumerate().map(|(i, ty)| stacked(scan, i, ty)).collect())
}
