//! Devices in rows and columns.

use super::Sharding;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Devices, numbered row-major along axes with names: the device at coordinates (i, j) of `data` = 2 and `tensor` = 4 is
/// partition 4 i + j. A cheap handle.
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
    /// A mesh with these axes, the first of which is the slowest.
    ///
    /// # Errors
    /// [`Error::Mesh`] for a name that is none in MLIR, for no axes, for an axis without devices, without a name or with that of
    /// another one, and for more devices than there are numbers.
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

    /// The name of the mesh in the text.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The axes with their numbers of devices, the slowest first.
    pub fn axes(&self) -> &[(String, usize)] {
        &self.0.axes
    }

    /// The number of devices along an axis, if there is such an axis.
    pub fn size(&self, axis: &str) -> Option<usize> {
        self.0.axes.iter().find(|(name, _)| name == axis).map(|(_, size)| *size)
    }

    /// The number of all devices.
    pub fn devices(&self) -> usize {
        self.0.axes.iter().map(|(_, size)| size).product()
    }

    /// How a tensor is split: for each dimension the axes over which it is, the first of which takes the largest parts. An
    /// axis that is not named has copies. `"?"` at the end of a dimension lets the partitioner split it further, so that
    /// `&["?"]` leaves a dimension to it.
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
        Sharding::new(self, dimensions)
    }

    /// Whole on every device.
    pub fn replicated(&self, rank: usize) -> Sharding {
        Sharding::whole(self, rank)
    }

    /// Some of the axes, for what is done along them: groups of devices that differ along these axes only.
    ///
    /// # Errors
    /// [`Error::Axis`] for an axis that the mesh does not have, or that is named twice.
    pub fn along(&self, axes: &[&str]) -> Result<MeshAxes> {
        let mut found: Vec<usize> = vec![];
        for axis in axes {
            let index = self.index(axis)?;
            if found.contains(&index) {
                return Err(self.twice(index));
            }
            found.push(index);
        }
        found.sort_unstable();
        Ok(MeshAxes { mesh: self.clone(), axes: found })
    }

    pub(crate) fn index(&self, axis: &str) -> Result<usize> {
        let found = self.0.axes.iter().position(|(name, _)| name == axis);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.0.axes.iter().map(|(name, _)| name.as_str()).collect();
            self.refuse(axis, format!("one of {} expected", names.join(", ")))
        })
    }

    pub(crate) fn twice(&self, axis: usize) -> Error {
        self.refuse(self.axis(axis), "it is used twice, and splits a tensor once".into())
    }

    pub(crate) fn refuse(&self, axis: &str, reason: String) -> Error {
        Error::Axis { mesh: self.name().into(), axis: axis.into(), reason }
    }

    /// The name of an axis by its number.
    pub(crate) fn axis(&self, index: usize) -> &str {
        self.0.axes.get(index).map_or("", |(name, _)| name)
    }

    /// The distance of neighbours along an axis, as numbers of devices.
    pub(crate) fn step(&self, index: usize) -> usize {
        self.0.axes.iter().skip(index + 1).map(|(_, size)| size).product()
    }

    /// The number of devices along an axis by its number.
    pub(crate) fn length(&self, index: usize) -> usize {
        self.0.axes.get(index).map_or(1, |(_, size)| *size)
    }
}

/// Axes of a [`Mesh`]. The devices that differ along these axes only are a group, in which each has a place: row-major along
/// the axes in the mesh's order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MeshAxes {
    mesh: Mesh,
    /// Ascending.
    axes: Vec<usize>,
}

impl MeshAxes {
    pub(crate) fn of(mesh: &Mesh, axes: Vec<usize>) -> Self {
        Self { mesh: mesh.clone(), axes }
    }

    /// The mesh that has the axes.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The names of the axes, in the mesh's order.
    pub fn names(&self) -> Vec<&str> {
        self.axes.iter().map(|i| self.mesh.axis(*i)).collect()
    }

    /// The number of devices of a group.
    pub fn size(&self) -> usize {
        self.axes.iter().map(|i| self.mesh.length(*i)).product()
    }

    /// The groups, each by the numbers of its devices; every device is in one.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let others = (0..self.mesh.axes().len()).filter(|i| !self.axes.contains(i)).collect();
        let others = Self { mesh: self.mesh.clone(), axes: others };
        let (places, groups) = (self.offsets(), others.offsets());
        groups.into_iter().map(|group| places.iter().map(|place| group + place).collect()).collect()
    }

    /// The numbers of the devices that are first along all other axes, by place.
    fn offsets(&self) -> Vec<usize> {
        (0..self.size()).map(|place| self.device(&self.coordinates(place))).collect()
    }

    /// By number.
    pub(crate) fn axes(&self) -> &[usize] {
        &self.axes
    }

    /// Coordinates along every axis of the mesh of the device at a place, 0 along other axes.
    pub(crate) fn coordinates(&self, place: usize) -> Vec<usize> {
        let mut coordinates = vec![0; self.mesh.axes().len()];
        let mut rest = place;
        for axis in self.axes.iter().rev() {
            coordinates[*axis] = rest % self.mesh.length(*axis);
            rest /= self.mesh.length(*axis);
        }
        coordinates
    }

    /// The place of a device in its group.
    pub(crate) fn place(&self, coordinates: &[usize]) -> usize {
        self.axes.iter().fold(0, |place, axis| place * self.mesh.length(*axis) + coordinates[*axis])
    }

    /// The number of a device.
    pub(crate) fn device(&self, coordinates: &[usize]) -> usize {
        (0..coordinates.len()).fold(0, |device, axis| device * self.mesh.length(axis) + coordinates[axis])
    }

    /// Whether all of these axes are among `others`.
    pub(crate) fn within(&self, others: &Self) -> bool {
        self.mesh == others.mesh && self.axes.iter().all(|axis| others.axes.contains(axis))
    }
}

/// The copies of the program that meet in a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Groups {
    /// Ids of replicas; every group has the same size.
    Replicas(Vec<Vec<usize>>),
    /// In a [`Kind::Manual`](crate::Kind::Manual): devices that differ along these axes only.
    Axes(MeshAxes),
}

impl Groups {
    /// The number of devices of every group.
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

impl From<&[Vec<usize>]> for Groups {
    fn from(groups: &[Vec<usize>]) -> Self {
        Self::Replicas(groups.to_vec())
    }
}

impl<const N: usize> From<&[Vec<usize>; N]> for Groups {
    fn from(groups: &[Vec<usize>; N]) -> Self {
        Self::Replicas(groups.to_vec())
    }
}

impl From<&Vec<Vec<usize>>> for Groups {
    fn from(groups: &Vec<Vec<usize>>) -> Self {
        Self::Replicas(groups.clone())
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

/// Whether MLIR and people take it as a name.
fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}
