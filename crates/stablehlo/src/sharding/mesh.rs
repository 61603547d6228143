//! Meshes of devices.

use super::{Dimension, Sharding};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Devices along named axes, numbered in row-major order: the device at coordinates (i, j) of `data` = 2 and `tensor` =
/// 4 is partition 4 i + j. Cheap to clone.
///
/// ```
/// use stablehlo::Mesh;
///
/// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 4)])?;
/// assert_eq!((mesh.devices(), mesh.size("tensor")), (8, Some(4)));
/// assert_eq!(mesh.along(&["data"])?.groups()[1], [1, 5]);
/// # Ok::<(), stablehlo::Error>(())
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
    /// parts. The tensor is replicated along other axes. `"?"` at the end of a dimension lets the partitioner split it
    /// further, so `&["?"]` leaves the dimension to it.
    ///
    /// ```
    /// use stablehlo::{Dtype, Mesh, TensorType};
    ///
    /// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 4)])?;
    /// let weight = mesh.sharding(&[&["tensor"], &[]])?;
    /// let part = weight.part(&TensorType::new(Dtype::F32, [64, 16]))?;
    /// assert_eq!(part.shape, [16, 16]);
    /// assert!(mesh.sharding(&[&["model"]]).is_err());
    /// # Ok::<(), stablehlo::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Axis`] for an axis that the mesh does not have, or that is used twice.
    pub fn sharding(&self, dimensions: &[&[&str]]) -> Result<Sharding> {
        let mut used = vec![];
        let mut found = vec![];
        for names in dimensions {
            let (names, open) = match names.split_last() {
                Some((&"?", names)) => (names, true),
                _ => (*names, false),
            };
            let first = used.len();
            for name in names {
                self.use_axis(name, &mut used)?;
            }
            found.push(Dimension { axes: used[first..].to_vec(), open });
        }
        Ok(Sharding { mesh: self.clone(), dimensions: found, replicated: vec![] })
    }

    /// Makes a sharding that replicates a tensor of this rank on every device.
    pub fn replicated(&self, rank: usize) -> Sharding {
        Sharding { mesh: self.clone(), dimensions: vec![Dimension::default(); rank], replicated: vec![] }
    }

    /// Selects axes for collectives: groups of devices that differ along these axes only.
    ///
    /// # Errors
    /// [`Error::Axis`] for an axis that the mesh does not have, or that is named twice.
    pub fn along(&self, axes: &[&str]) -> Result<MeshAxes> {
        let mut found = vec![];
        axes.iter().try_for_each(|axis| self.use_axis(axis, &mut found))?;
        found.sort_unstable();
        Ok(MeshAxes { mesh: self.clone(), axes: found })
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

    pub(crate) fn refuse(&self, axis: &str, reason: String) -> Error {
        Error::Axis { mesh: self.name().into(), axis: axis.into(), reason }
    }

    /// Returns the name of an axis by its index.
    pub(crate) fn axis(&self, index: usize) -> &str {
        self.0.axes.get(index).map_or("", |(name, _)| name)
    }

    /// Returns the distance between neighbours along an axis, in device numbers.
    pub(crate) fn step(&self, index: usize) -> usize {
        self.0.axes.iter().skip(index + 1).map(|(_, size)| size).product()
    }

    /// Returns the number of devices along an axis, by its index.
    pub(crate) fn length(&self, index: usize) -> usize {
        self.0.axes.get(index).map_or(1, |(_, size)| *size)
    }
}

/// Axes of a [`Mesh`]. Devices that differ along these axes only form a group. Positions in a group are row-major along
/// the axes, in the order of the mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MeshAxes {
    mesh: Mesh,
    /// In ascending order.
    axes: Vec<usize>,
}

impl MeshAxes {
    pub(crate) fn of(mesh: &Mesh, axes: Vec<usize>) -> Self {
        Self { mesh: mesh.clone(), axes }
    }

    /// Returns the mesh of the axes.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the names of the axes, in the order of the mesh.
    pub fn names(&self) -> Vec<&str> {
        self.axes.iter().map(|i| self.mesh.axis(*i)).collect()
    }

    /// Returns the number of devices in a group.
    pub fn size(&self) -> usize {
        self.axes.iter().map(|i| self.mesh.length(*i)).product()
    }

    /// Returns the groups as lists of device numbers; every device is in one group.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let others = (0..self.mesh.axes().len()).filter(|i| !self.axes.contains(i)).collect();
        let others = Self { mesh: self.mesh.clone(), axes: others };
        let (places, groups) = (self.offsets(), others.offsets());
        groups.into_iter().map(|group| places.iter().map(|place| group + place).collect()).collect()
    }

    /// Returns the numbers of the devices in the first group, by position.
    fn offsets(&self) -> Vec<usize> {
        (0..self.size()).map(|place| self.device(&self.coordinates(place))).collect()
    }

    /// Returns the indices of the axes.
    pub(crate) fn axes(&self) -> &[usize] {
        &self.axes
    }

    /// Returns the coordinates along every axis of the mesh of the device at a position in its group, with 0 along
    /// other axes.
    pub(crate) fn coordinates(&self, place: usize) -> Vec<usize> {
        let mut coordinates = vec![0; self.mesh.axes().len()];
        let mut rest = place;
        for axis in self.axes.iter().rev() {
            coordinates[*axis] = rest % self.mesh.length(*axis);
            rest /= self.mesh.length(*axis);
        }
        coordinates
    }

    /// Returns the position of a device in its group.
    pub(crate) fn place(&self, coordinates: &[usize]) -> usize {
        self.axes.iter().fold(0, |place, axis| place * self.mesh.length(*axis) + coordinates[*axis])
    }

    /// Returns the number of a device.
    pub(crate) fn device(&self, coordinates: &[usize]) -> usize {
        (0..coordinates.len()).fold(0, |device, axis| device * self.mesh.length(axis) + coordinates[axis])
    }

    /// Returns `true` if `others` contains all of these axes.
    pub(crate) fn within(&self, others: &Self) -> bool {
        self.mesh == others.mesh && self.axes.iter().all(|axis| others.axes.contains(axis))
    }
}

/// The groups of replicas or devices that communicate in a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Groups {
    /// Lists of replica ids; all groups have the same size.
    Replicas(Vec<Vec<usize>>),
    /// In a [`Kind::Manual`](crate::Kind::Manual): devices that differ along these axes only.
    Axes(MeshAxes),
}

impl Groups {
    /// Returns the number of devices in each group.
    pub(crate) fn size(&self) -> Result<usize, String> {
        match self {
            Self::Axes(axes) => Ok(axes.size()),
            Self::Replicas(groups) => match groups.first().map(Vec::len) {
                Some(size) if size > 0 && groups.iter().all(|g| g.len() == size) => Ok(size),
                _ => Err(format!("groups of one size expected, got {groups:?}")),
            },
        }
    }
}

impl<T: AsRef<[Vec<usize>]> + ?Sized> From<&T> for Groups {
    fn from(groups: &T) -> Self {
        Self::Replicas(groups.as_ref().to_vec())
    }
}

impl From<&MeshAxes> for Groups {
    fn from(axes: &MeshAxes) -> Self {
        Self::Axes(axes.clone())
    }
}

impl From<&Groups> for Groups {
    fn from(groups: &Groups) -> Self {
        groups.clone()
    }
}

/// Returns `true` if the name is an identifier: letters, digits and underscores.
fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}
