//! Manual computations on the shards of devices, and the conversion of tensors to and from shards.

use super::array::{Array, each_index, joined, place, strides};
use super::machine::{Machine, Values};
use super::{Fault, Rounding};
use crate::error::{Error, Result};
use crate::graph::Operation;
use crate::sharding::{Manual, Sharding};
use crate::types::{Dtype, TensorType};
use std::ops::Range;
use std::rc::Rc;

impl<'a> Machine<'a> {
    /// Runs the body for one device after the other.
    pub(super) fn manual(
        &mut self,
        manual: &Manual,
        op: &'a Operation,
        operands: &[Rc<Array>],
        types: &[&TensorType],
    ) -> Result<Values> {
        let name = op.kind.name();
        let malformed = |reason: String| Fault::Malformed(reason).of(name);
        let devices = manual.mesh().devices();
        // The shards of all devices exist at once.
        self.fits(operands.iter().map(|operand| &operand.ty), devices)?;
        let mut arguments: Vec<Values> = vec![vec![]; devices];
        for (operand, sharding) in operands.iter().zip(manual.inputs()) {
            let parts = operand.parts(sharding).map_err(|error| malformed(error.to_string()))?;
            arguments.iter_mut().zip(parts).for_each(|(list, part)| list.push(Rc::new(part)));
        }
        let mut results = Vec::with_capacity(devices);
        for arguments in arguments {
            results.push(self.region(&op.regions[0], arguments, name)?);
        }
        let slack = |dtype: Dtype| match (self.settings.rounding, dtype) {
            (Rounding::Dtypes, Dtype::Bf16) => 3e-2,
            (Rounding::Dtypes, Dtype::F16) => 4e-3,
            (Rounding::Dtypes, Dtype::F32) => 1e-5,
            _ => 1e-9,
        };
        let whole = manual.outputs().iter().zip(types).enumerate().map(|(i, (sharding, ty))| {
            let parts: Vec<&Array> = results.iter().map(|list| &*list[i]).collect();
            put_together(&parts, sharding, slack(ty.dtype)).map(Rc::new).map_err(|error| match error {
                Apart::Different(reason) => {
                    Error::Disagreement { operation: name, reason: format!("result {i}: {reason}") }
                }
                Apart::Wrong(reason) => malformed(reason),
            })
        });
        whole.collect()
    }
}

/// The reason why shards do not form a tensor.
enum Apart {
    Different(String),
    Wrong(String),
}

/// Returns the offsets of a shard's elements in the whole tensor.
fn places(whole: &TensorType, part: &TensorType, range: &[Range<usize>]) -> Vec<usize> {
    let distances = strides(&whole.shape);
    let begin: usize = range.iter().zip(&distances).map(|(range, step)| range.start * step).sum();
    let mut places = Vec::with_capacity(part.elements());
    each_index(&part.shape, |index| places.push(begin + place(index, &distances)));
    places
}

/// Assembles a tensor from the shards of devices. Copies of one shard may differ by `slack` times the largest
/// magnitude.
fn put_together(parts: &[&Array], sharding: &Sharding, slack: f64) -> Result<Array, Apart> {
    let Some(first) = parts.first() else { return Err(Apart::Wrong("no parts".into())) };
    if let Some(other) = parts.iter().find(|part| part.ty != first.ty) {
        return Err(Apart::Wrong(format!("parts of one type expected, got {} and {}", first.ty, other.ty)));
    }
    let ty = sharding.whole(&first.ty).map_err(|error| Apart::Wrong(error.to_string()))?;
    let elements = joined(&parts.iter().map(|part| &part.elements).collect::<Vec<_>>());
    let all = Array { ty: ty.clone(), elements };
    let numbers = all.to_floats();
    let largest = numbers.iter().filter(|x| x.is_finite()).fold(0.0_f64, |m, x| m.max(x.abs()));
    let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= slack * largest;
    let count = first.elements.len();
    let mut from: Vec<Option<usize>> = vec![None; ty.elements()];
    for device in 0..parts.len() {
        let range = sharding.range_of(&first.ty, device);
        for (i, at) in places(&ty, &first.ty, &range).into_iter().enumerate() {
            let index = device * count + i;
            let Some(known) = from[at] else {
                from[at] = Some(index);
                continue;
            };
            if !same(numbers[known], numbers[index]) {
                let (other, copied) = (known / count, sharding.to_string());
                let (one, two) = (numbers[known], numbers[index]);
                let reason = format!("element {at} of {ty} is {one} on device {other} and {two} on device {device}");
                return Err(Apart::Different(format!("{reason}, and should be the same by {copied}")));
            }
        }
    }
    // Every element has a part: the shards of all devices cover the tensor.
    let elements = all.take(&from.into_iter().flatten().collect::<Vec<_>>());
    Ok(Array { ty, elements })
}

impl Array {
    /// Splits the tensor into the shards of the sharding's mesh, by device number: the arguments of a compiled
    /// executable.
    ///
    /// ```
    /// use grpo_stablehlo::{Array, Dtype, Mesh};
    ///
    /// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 2)])?;
    /// let columns = mesh.sharding(&[&[], &["tensor"]])?;
    /// let a = Array::floats(Dtype::F32, [2, 4], (0..8).map(f64::from))?;
    /// let parts = a.parts(&columns)?;
    /// assert_eq!((parts.len(), parts[1].to_floats()), (4, vec![2.0, 3.0, 6.0, 7.0]));
    /// assert_eq!(Array::whole(&parts, &columns)?, a);
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Split`] if the sharding does not divide the tensor evenly.
    pub fn parts(&self, sharding: &Sharding) -> Result<Vec<Self>> {
        let ty = sharding.part(&self.ty)?;
        let part = |device: usize| {
            let range = sharding.range_of(&ty, device);
            Self { ty: ty.clone(), elements: self.take(&places(&self.ty, &ty, &range)) }
        };
        Ok((0..sharding.mesh().devices()).map(part).collect())
    }

    /// Assembles a tensor from the shards of all devices of the sharding's mesh, by device number.
    ///
    /// # Errors
    /// [`Error::Array`] if there is not one shard per device, or the shards differ in type; [`Error::Disagreement`] if
    /// copies of one shard differ.
    pub fn whole(parts: &[Self], sharding: &Sharding) -> Result<Self> {
        let devices = sharding.mesh().devices();
        if parts.len() != devices {
            let reason = format!("a part of each of {devices} devices expected, got {}", parts.len());
            return Err(Error::Array { reason });
        }
        put_together(&parts.iter().collect::<Vec<_>>(), sharding, 0.0).map_err(|error| match error {
            Apart::Different(reason) => Error::Disagreement { operation: "sdy.sharding", reason },
            Apart::Wrong(reason) => Error::Array { reason },
        })
    }
}
