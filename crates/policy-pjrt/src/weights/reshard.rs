//! Weights on another mesh of the same devices.

use super::DeviceWeights;
use crate::decoder::{AxisRules, Parameter, zeros};
use crate::error::{Error, Result};
use crate::modules::unnamed;
use crate::program::Programs;
use crate::runtime::Runtime;
use grpo_backend_tpu::devices::{DeviceTensor, Layout};
use grpo_stablehlo::{Builder, Mesh, Module, Sharding, TensorType, Value};
use std::sync::Arc;

impl DeviceWeights {
    /// Returns the weights on the mesh of `to`, which has the same devices. The tensors are shared if the meshes are equal; otherwise a
    /// program, cached in `programs`, copies them.
    ///
    /// # Errors
    /// [`Error::Split`] if the meshes have no common refinement, or if a parameter does not shard evenly; [`Error::Device`].
    pub(crate) fn on(self, to: &Runtime, programs: &mut Programs<()>) -> Result<Self> {
        let (from, into) = (self.runtime.axis_rules(), to.axis_rules());
        if from == into || !from.is_sharded() {
            return Ok(self);
        }
        let mesh = common_refinement(from.mesh(), into.mesh())?;
        let program = programs.get(&self.runtime, (), |()| module(&self, [from, into], &mesh))?;
        let moved = program.run(self.arguments())?;
        let table = into.all_padded(self.table);
        // Every program compares the layouts of its arguments, which is fast if both name the same mesh.
        let layout = |p: &Parameter| Layout::new(&p.shape, into.sharding(&p.axes).as_ref());
        let moved = moved.into_iter().zip(&table).map(|(tensor, p)| Arc::new(tensor.with_layout(layout(p))));
        let moved: Vec<Arc<DeviceTensor>> = moved.collect();
        Ok(Self::of_tensors(to, table, self.storage, moved))
    }
}

/// Builds the program from weights to the same weights. Arguments are sharded and padded by the first rules, results by the second.
fn module(weights: &DeviceWeights, [from, into]: [&AxisRules; 2], mesh: &Mesh) -> Result<Module> {
    let f = Builder::new();
    let argument = |p: &Parameter| {
        let ty = TensorType::new(weights.storage.of(p).dtype(), &p.shape[..]);
        f.argument(p.name(), ty)
    };
    let values: Vec<Value> = weights.table.iter().map(argument).collect();
    for (i, (value, parameter)) in values.iter().zip(&weights.table).enumerate() {
        let sharding =
            |rules: &AxisRules| rules.sharding(&parameter.axes).map(|sharding| refined(&sharding, mesh)).transpose();
        let (Some(old), Some(new)) = (sharding(from)?, sharding(into)?) else { continue };
        f.shard(value, &old);
        f.shard_result(i, &new);
    }
    let results = values.iter().zip(&weights.table).zip(into.all_padded(weights.table.clone()));
    let results: Vec<Value> = results.map(|((value, from), into)| with_padding(value, from, &into)).collect();
    crate::modules::finish(f.clone(), "reshard", unnamed(&results))
}

/// Returns a parameter with the padding of `into`.
fn with_padding(value: &Value, from: &Parameter, into: &Parameter) -> Value {
    let ([none, mut more], zero) =
        ([(); 2].map(|()| vec![0; value.shape().len()]), zeros(&value.builder(), value.dtype(), &[]));
    match into.padding.checked_sub(from.padding) {
        Some(0) => value.clone(),
        Some(rows) => {
            more[from.stacked()] = rows;
            value.pad(&zero, &none, &more)
        }
        None => value.slice(&none, &into.shape),
    }
}

/// Returns the mesh of the same devices, in the same order, of whose axes the axes of both meshes are products. Weights move from one
/// mesh to the other through it.
///
/// # Errors
/// [`Error::Split`] if there is none: {tensor 2, fsdp 3} and {tensor 3, fsdp 2} have none.
pub fn common_refinement(a: &Mesh, b: &Mesh) -> Result<Mesh> {
    let mut strides: Vec<usize> = [a, b].into_iter().flat_map(strides).chain([1, a.devices()]).collect();
    strides.sort_unstable();
    strides.dedup();
    let refuse = |reason: String| Error::Split {
        what: format!("weights on {a}, moved to {b}"),
        source: grpo_stablehlo::Error::Mesh { mesh: "refinement".into(), reason },
    };
    let uneven = strides.windows(2).find(|pair| pair[1] % pair[0] != 0);
    if let Some([small, large]) = uneven {
        return Err(refuse(format!("groups of {small} and of {large} neighbouring devices overlap")));
    }
    let axes = strides.windows(2).rev().map(|pair| (format!("stride_{}", pair[0]), pair[1] / pair[0]));
    Mesh::new("mesh", axes.collect::<Vec<_>>()).map_err(|error| refuse(error.to_string()))
}

/// Returns the distance of neighbouring devices along each axis.
fn strides(mesh: &Mesh) -> Vec<usize> {
    let sizes = mesh.axes().iter().map(|(_, size)| *size);
    let mut strides: Vec<usize> = sizes.rev().scan(1, |all, size| Some(std::mem::replace(all, *all * size))).collect();
    strides.reverse();
    strides
}

/// Returns the same sharding on a refinement of its mesh.
fn refined(sharding: &Sharding, mesh: &Mesh) -> Result<Sharding> {
    let old = sharding.mesh();
    let of_axis = |name: &str| {
        let axis = old.axes().iter().position(|(axis, _)| axis == name);
        let range = axis.map(|axis| strides(old)[axis]..strides(old)[axis] * old.axes()[axis].1);
        let fine = mesh.axes().iter().zip(strides(mesh));
        fine.filter(move |(_, stride)| range.as_ref().is_some_and(|range| range.contains(stride)))
            .map(|((name, _), _)| name.as_str())
            .collect::<Vec<_>>()
    };
    let dimensions: Vec<Vec<&str>> =
        (0..sharding.rank()).map(|d| sharding.axes(d).into_iter().flat_map(of_axis).collect()).collect();
    let refined = mesh.sharding(&dimensions.iter().map(Vec::as_slice).collect::<Vec<_>>());
    refined.map_err(|source| Error::Split { what: "weights on another mesh".into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{AxisRules, parameters};
    use grpo_stablehlo::{Array, Dtype};

    fn mesh(axes: &[(&str, usize)]) -> Mesh {
        Mesh::new("mesh", axes.iter().copied()).unwrap()
    }

    #[test]
    fn a_refined_sharding_gives_every_device_the_same_part() {
        let train = mesh(&[("data", 1), ("fsdp", 4), ("tensor", 2)]);
        let rollout = mesh(&[("data", 2), ("tensor", 4)]);
        let both = common_refinement(&train, &rollout).unwrap();
        assert_eq!(both.axes().iter().map(|(_, size)| *size).collect::<Vec<_>>(), [2, 2, 2]);
        let ty = TensorType::new(Dtype::F32, [16, 24]);
        for (mesh, axes) in [
            (&train, [&["fsdp"][..], &["tensor"]]),
            (&train, [&["tensor", "fsdp"], &[]]),
            (&train, [&[], &["data", "fsdp", "tensor"]]),
            (&rollout, [&["tensor"], &["data"]]),
            (&rollout, [&[], &[]]),
        ] {
            let sharding = mesh.sharding(&axes).unwrap();
            let refined = refined(&sharding, &both).unwrap();
            for device in 0..8 {
                assert_eq!(refined.range(&ty, device), sharding.range(&ty, device), "{sharding}");
            }
        }
    }

    #[test]
    fn weights_get_the_padding_of_their_mesh() {
        let config = grpo_models::ModelConfig { vocab_size: 6, hidden_size: 2, ..grpo_models::ModelConfig::default() };
        let rules = |axes| AxisRules::new(&mesh(axes));
        // Two shards of the vocabulary need no padding, four need two rows.
        let [two, four] = [rules(&[("data", 2), ("fsdp", 2)]), rules(&[("fsdp", 4)])]
            .map(|rules| rules.padded(parameters(&config).swap_remove(0)));
        assert_eq!([two.padding, four.padding], [0, 2]);
        let f = Builder::new();
        let embedding = f.argument("embedding", TensorType::new(Dtype::F32, [6, 2]));
        let padded = with_padding(&embedding, &two, &four);
        let back = with_padding(&padded, &four, &two);
        let module = f.finish("both", &[("padded", &padded), ("back", &back)]).unwrap();
        let values: Vec<f64> = (1..=12).map(f64::from).collect();
        let found = module.interpret(&[Array::floats(Dtype::F32, [6, 2], values.clone()).unwrap()]).unwrap();
        assert_eq!(found[0].to_floats(), [&values[..], &[0.0; 4]].concat());
        assert_eq!(found[1].to_floats(), values);
    }

    #[test]
    fn meshes_without_a_common_refinement_are_refused() {
        let error =
            common_refinement(&mesh(&[("fsdp", 3), ("tensor", 2)]), &mesh(&[("data", 2), ("tensor", 3)])).unwrap_err();
        assert!(error.to_string().contains("groups of 2 and of 3 neighbouring devices"), "{error}");
    }
}
