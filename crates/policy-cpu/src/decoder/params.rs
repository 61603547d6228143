//! Parameters by name: initialisation, export, import, update.
//!
//! A parameter's name is its path of field names, for example `layers.0.attn.qkv_proj.weight`; parameters are visited in the order of the
//! fields. Checkpoints and the optimizer depend on both.

use super::lora::{is_adapter, is_value_head};
use super::model::Decoder;
use super::weight::{CONTAINER, STORED};
use burn::backend::flex::FlexTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use grpo_burn::custom_op::{Operand, values};
use models::NamedTensor;
use policy::{Error, Result, TensorSink, TensorSource};
use rand::RngExt;
use rng::{Purpose, stable_hash, stream};
use std::collections::HashMap;

/// Returns independent normal values from the random stream of (`seed`, `name`), which does not depend on the model's other parameters.
///
/// Box-Muller is written out instead of using `rand_distr`: another transform of the same random bits would give other initial weights for
/// a seed, and published runs could not be reproduced.
pub(crate) fn normal(count: usize, std: f64, seed: u64, name: &str) -> Vec<f32> {
    let mut rng = stream(seed, Purpose::Weights, 0, stable_hash(name));
    (0..count)
        .map(|_| {
            let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
            (std * radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()) as f32
        })
        .collect()
}

/// Copies the values of a tensor to a list.
pub(crate) fn to_host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    // All tensors of this crate are f32, so the conversion cannot fail.
    tensor.into_data().convert::<f32>().try_into_vec().unwrap_or_default()
}

/// Selects parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// All parameters.
    All,
    /// Trained parameters: with adapters, the adapters and the value head; otherwise all.
    Trained,
}

/// Returns `true` if a parameter is trained although the model has adapters.
fn is_trained_beside_a_base(name: &str) -> bool {
    is_adapter(name) || is_value_head(name)
}

/// Passes name, shape and values of parameters to `see`, in the order of fields and without copying. With [`Which::All`], memory-mapped
/// weights are included as f32 copies.
///
/// # Errors
/// The first error of `see`; [`Error::Other`] if a parameter is not on burn's CPU backend.
pub(crate) fn for_each_parameter(
    model: &Decoder,
    which: Which,
    see: impl FnMut(&str, &[usize], &[f32]) -> Result<()>,
) -> Result<()> {
    struct See<'a, F> {
        model: &'a Decoder,
        see: F,
        done: Result<()>,
    }
    impl<F: FnMut(&str, &[usize], &[f32]) -> Result<()>> ParameterVisitor for See<'_, F> {
        fn stored(&mut self, name: &str) {
            if self.done.is_ok() {
                let copy = self.model.stored_weight(name);
                self.done = copy.and_then(|(shape, values)| (self.see)(name, &shape, &values));
            }
        }

        fn visit<const D: usize>(&mut self, name: &str, parameter: &Param<Tensor<D>>) {
            if self.done.is_ok() {
                let storage = storage(parameter.val());
                self.done = storage.and_then(|values| (self.see)(name, &parameter.dims(), read(&values)?));
            }
        }
    }
    let mut see = See { model, see, done: Ok(()) };
    visit_parameters(model, which, &mut see);
    see.done
}

/// Returns the number of trained values.
pub(crate) fn trained_values(model: &Decoder) -> usize {
    struct Count(usize);
    impl ParameterVisitor for Count {
        fn visit<const D: usize>(&mut self, _: &str, parameter: &Param<Tensor<D>>) {
            self.0 += parameter.shape().num_elements();
        }
    }
    let mut count = Count(0);
    visit_parameters(model, Which::Trained, &mut count);
    count.0
}

/// Returns the row-major storage of a tensor, without a copy if it is already row-major.
pub(super) fn storage<const D: usize>(tensor: Tensor<D>) -> Result<FlexTensor> {
    Ok(Operand::new("weight", tensor).map_err(Error::other)?.row_major().storage)
}

/// Returns the values of a storage from [`storage`].
pub(super) fn read(storage: &FlexTensor) -> Result<&[f32]> {
    values("weight", storage).map_err(Error::other)
}

/// Passes name and values of every trained parameter to `sink`, in the order of fields.
///
/// # Errors
/// The sink's error.
pub(crate) fn export_parameters(model: &Decoder, sink: &mut dyn TensorSink) -> Result<()> {
    struct Export<'a> {
        sink: &'a mut dyn TensorSink,
        done: Result<()>,
    }
    impl ParameterVisitor for Export<'_> {
        fn visit<const D: usize>(&mut self, name: &str, parameter: &Param<Tensor<D>>) {
            if self.done.is_ok() {
                let value = parameter.val();
                let shape = value.dims().to_vec();
                self.done = self.sink.tensor(NamedTensor { name: name.to_owned(), shape, data: to_host(value) });
            }
        }
    }
    let mut export = Export { sink, done: Ok(()) };
    visit_parameters(model, Which::Trained, &mut export);
    export.done
}

/// Returns name and values of every trained parameter, in the order of fields.
pub(crate) fn named_parameters(model: &Decoder) -> Vec<NamedTensor> {
    let mut tensors = Vec::new();
    // Exporting to a list cannot fail.
    let _ = export_parameters(model, &mut tensors);
    tensors
}

/// Replaces every trained parameter by the tensor of the same name.
///
/// # Errors
/// [`Error::State`] if a parameter has no tensor or one of another shape, or if a tensor has no parameter.
pub(crate) fn load_parameters(model: Decoder, tensors: &dyn TensorSource) -> Result<Decoder> {
    check_parameters(&model, tensors)?;
    let (model, replaced) = replace_parameters(model, tensors);
    replaced.map(|()| model)
}

/// Checks that trained parameters and tensors match one to one.
///
/// # Errors
/// See [`load_parameters`].
pub(crate) fn check_parameters(model: &Decoder, tensors: &dyn TensorSource) -> Result<()> {
    let mut left: HashMap<&str, &[usize]> = tensors.shapes().into_iter().collect();
    for_each_parameter(model, Which::Trained, |name, shape, values| {
        let expected = || format!("a tensor of shape {shape:?}");
        match left.remove(name) {
            None => Err(Error::state(name, expected(), "none")),
            Some(found) if found != shape => Err(Error::state(name, expected(), format!("shape {found:?}"))),
            Some(_) => match tensors.values(name)?.len() {
                found if found != values.len() => Err(Error::state(name, expected(), format!("{found} values"))),
                _ => Ok(()),
            },
        }
    })?;
    match left.keys().next() {
        Some(extra) => Err(Error::state(*extra, "a name that the model has", "a tensor that no parameter uses")),
        None => Ok(()),
    }
}

/// Replaces the values of parameters by tensors that passed [`check_parameters`], in place if the parameters have no other owner. Also
/// returns the first error of a source that fails to deliver its values.
pub(crate) fn replace_parameters(model: Decoder, tensors: &dyn TensorSource) -> (Decoder, Result<()>) {
    let mut done = Ok(());
    let model = update_parameters(model, |name, values| match tensors.values(name) {
        _ if done.is_err() => (),
        Ok(found) if found.len() == values.len() => values.copy_from_slice(&found),
        Ok(found) => done = Err(Error::state(name, format!("{} values", values.len()), found.len())),
        Err(error) => done = Err(error),
    });
    (model, done)
}

/// Updates the values of every trained parameter, in the order of fields.
pub(crate) fn update_parameters(model: Decoder, update: impl FnMut(&str, &mut [f32])) -> Decoder {
    struct Update<F> {
        path: Vec<String>,
        has_adapters: bool,
        update: F,
    }
    impl<F: FnMut(&str, &mut [f32])> ModuleMapper for Update<F> {
        fn enter_module(&mut self, name: &str, container: &str) {
            if container != CONTAINER {
                self.path.push(name.to_owned());
            }
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            if container != CONTAINER {
                self.path.pop();
            }
        }
        fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let name = self.path.join(".");
            if self.has_adapters && !is_trained_beside_a_base(&name) {
                return parameter;
            }
            parameter.map(|value| {
                let (shape, device, trained) = (value.dims(), value.device(), value.is_require_grad());
                let mut data = to_host(value);
                (self.update)(&name, &mut data);
                Tensor::from_data(TensorData::new(data, shape), &device).set_require_grad(trained)
            })
        }
    }
    let has_adapters = model.has_adapters();
    model.map(&mut Update { path: Vec::new(), has_adapters, update })
}

/// A visitor of float parameters and their names.
pub(crate) trait ParameterVisitor {
    fn visit<const D: usize>(&mut self, name: &str, parameter: &Param<Tensor<D>>);

    /// Visits a memory-mapped weight.
    fn stored(&mut self, name: &str) {
        let _ = name;
    }
}

/// Visits the parameters of `model`.
pub(crate) fn visit_parameters(model: &Decoder, which: Which, visitor: &mut impl ParameterVisitor) {
    struct Walk<'a, V> {
        path: Vec<String>,
        adapters_only: bool,
        visitor: &'a mut V,
    }
    impl<V: ParameterVisitor> ModuleVisitor for Walk<'_, V> {
        fn enter_module(&mut self, name: &str, container: &str) {
            if container != CONTAINER {
                self.path.push(name.to_owned());
            } else if !self.adapters_only && name == STORED {
                self.visitor.stored(&self.path.join("."));
            }
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            if container != CONTAINER {
                self.path.pop();
            }
        }
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
            let name = self.path.join(".");
            if !self.adapters_only || is_trained_beside_a_base(&name) {
                self.visitor.visit(&name, parameter);
            }
        }
    }
    let adapters_only = which == Which::Trained && model.has_adapters();
    model.visit(&mut Walk { path: Vec::new(), adapters_only, visitor });
}
