//! Meshes of devices.

use super::Sharding;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Devices along named axes, numbered in row-major order: the device at coordinates (i, j) of `data` = 2 and `tensor` =
/// 4 is partition 4 i + j. Cheap to clone.
///
/// ```
/// use grpo_stablehlo::Mesh;
///
/// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 4)])?;
/// assert_eq!((mesh.devices(), mesh.size("tensor")), (8, Some(4)));
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mesh(Arc<Inner>);

#[derive(Debug, PartialEq, Eq, Hash)]
struct Inner {
    name: String,
    axes: Vec<(String, usize)>,
}

impl Mesh {
    /// Creates a mesh with these axes; the first one changes slowest.
    ///
    /// # Errors
    /// [`Error::Mesh`] for a name that is not an MLIR identifier, no axes, an axis with zero devices, a duplicate axis,
    /// or more than `i32::MAX` devices.
    pub fn new<S: Into<String>>(name: &str, axes: impl IntoIterator<Item = (S, usize)>) -> Result<Self> {
        let axes: Vec<(String, usize)> = axes.into_iter().map(|(axis, size)| (axis.into(), size)).collect();
        let repeated = |i: &usize| axes[..*i].iter().any(|(axis, _)| *axis == axes[*i].0);
        let reason = if !is_name(name) {
            Some(format!("a name of letters, digits and underscores expected, got `{name}`"))
        } else if axes.is_empty() {
            Some("at least one axis expected, got none".into())
        } else if let Some((axis, _)) = axes.iter().find(|(axis, _)| !is_name(axis)) {
            Some(format!("names of letters, digits and underscores expected for axes, got `{axis}`"))
        } else if let Some((axis, _)) = axes.iter().find(|(_, size)| *size == 0) {
            Some(format!("axis `{axis}` of at least one device expected, got 0"))
        } else if let Some(i) = (0..axes.len()).find(repeated) {
            Some(format!("two axes `{}`", axes[i].0))
        } else {
            let devices = axes.iter().try_fold(1_usize, |n, (_, size)| n.checked_mul(*size));
            let fits = devices.is_some_and(|n| i32::try_from(n).is_ok());
            (!fits).then(|| format!("at most {} devices expected, got axes {axes:?}", i32::MAX))
        };
        match reason {
            Some(reason) => Err(Error::Mesh { mesh: name.into(), reason }),
            None => Ok(Self(Arc::new(Inner { name: name.into(), axes }))),
        }
    }

    /// Returns the name of the mesh.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the axes with their numbers of devices; the first one changes slowest.
    pub fn axes(&self) -> &[(String, usize)] {
        &self.0.axes
    }

    /// Returns the number of devices along an axis, or `None` if there is no such axis.
    pub fn size(&self, axis: &str) -> Option<usize> {
        self.0.axes.iter().find(|(name, _)| name == axis).map(|(_, size)| *size)
    }

    /// Returns the total number of devices.
    pub fn devices(&self) -> usize {
        self.0.axes.iter().map(|(_, size)| size).product()
    }

    /// Makes a sharding from the axes of each dimension; the first axis of a dimension splits it into the largest
    /// parts. The tensor is replicated along other axes.
    ///
    /// ```
    /// use grpo_stablehlo::{Dtype, Mesh, TensorType};
    ///
    /// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 4)])?;
    /// let weight = mesh.sharding(&[&["tensor"], &[]])?;
    /// let part = weight.part(&TensorType::new(Dtype::F32, [64, 16]))?;
    /// assert_eq!(part.shape, [16, 16]);
    /// assert!(mesh.sharding(&[&["model"]]).is_err());
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Axis`] for an axis that the mesh does not have, or that is used twice.
    pub fn sharding(&self, dimensions: &[&[&str]]) -> Result<Sharding> {
        let mut used = vec![];
        let mut found = vec![];
        for names in dimensions {
            let first = used.len();
            for name in *names {
                self.use_axis(name, &mut used)?;
            }
            found.push(used[first..].to_vec());
        }
        Ok(Sharding { mesh: self.clone(), dimensions: found, replicated: vec![] })
    }

    /// Makes a sharding that replicates a tensor of this rank on every device.
    pub fn replicated(&self, rank: usize) -> Sharding {
        Sharding { mesh: self.clone(), dimensions: vec![vec![]; rank], replicated: vec![] }
    }

    /// Adds the index of an axis, which must not be in `used`.
    fn use_axis(&self, name: &str, used: &mut Vec<usize>) -> Result<()> {
        let Some(index) = self.0.axes.iter().position(|(axis, _)| axis == name) else {
            let names: Vec<&str> = self.0.axes.iter().map(|(name, _)| name.as_str()).collect();
            return Err(self.refuse(name, format!("one of {} expected", names.join(", "))));
        };
        if used.contains(&index) {
            return Err(self.refuse(name, "it is used twice in one sharding".into()));
        }
        used.push(index);
        Ok(())
    }

    fn refuse(&self, axis: &str, reason: String) -> Error {
        Error::Axis { mesh: self.name().into(), axis: axis.into(), reason }
    }

    /// Returns the name of an axis by its index.
    pub(crate) fn axis(&self, index: usize) -> &str {
        self.0.axes.get(index).map_or("", |(name, _)| name)
    }

    /// Returns the number of devices along an axis, by its index.
    pub(crate) fn length(&self, index: usize) -> usize {
        self.0.axes.get(index).map_or(1, |(_, size)| *size)
    }

    /// Returns the position of a device along every axis. The last axis is the innermost.
    pub fn coordinates(&self, device: usize) -> Vec<usize> {
        let (mut coordinates, mut rest) = (vec![0; self.0.axes.len()], device);
        for (coordinate, (_, size)) in coordinates.iter_mut().zip(&self.0.axes).rev() {
            *coordinate = rest % size;
            rest /= size;
        }
        coordinates
    }
}

/// Returns `true` if the name is an identifier: letters, digits and underscores.
fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}
