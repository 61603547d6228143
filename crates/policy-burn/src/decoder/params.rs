//! Parameters by name: initialisation, export, import, update.
//!
//! A parameter's name is the path of field names to it, e.g. `layers.0.attn.qkv_proj.weight`; the order of a walk is
//! the order of the fields. Both are what checkpoints and the optimizer rely on.

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

/// Independent normal values from the stream of (`seed`, `name`): the same whatever else the model has.
///
/// The transform of Box and Muller is written out, and `rand_distr` is not used here: another transform of the same random
/// bits gives other initial weights for a seed, and the published runs of a seed would no longer be those that it makes.
pub(crate) fn normal(count: usize, std: f64, seed: u64, name: &str) -> Vec<f32> {
    let mut rng = stream(seed, Purpose::Weights, 0, stable_hash(name));
    (0..count)
        .map(|_| {
            let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
            (std * radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()) as f32
        })
        .collect()
}

/// Values of a tensor on the host.
pub(crate) fn to_host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    // The crate only makes f32 tensors, so the conversion cannot fail.
    tensor.into_data().convert::<f32>().try_into_vec().unwrap_or_default()
}

/// The parameters of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// All of them.
    All,
    /// Those that are trained: with adapters theirs and the value head's, otherwise all.
    Trained,
}

/// Whether a parameter is trained where the model beneath adapters is frozen.
fn is_trained_beside_a_base(name: &str) -> bool {
    is_adapter(name) || is_value_head(name)
}

/// Sees name, shape and values of parameters where they lie, in walk order; of weights in files, which are among all of them, a copy
/// in f32.
///
/// # Errors
/// Those of `see`, which ends the walk; [`Error::Other`] when a parameter is not on burn's CPU backend.
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

/// The number of values of the parameters that are trained.
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

/// The storage of a tensor in row-major order: its own where it has that already.
pub(super) fn storage<const D: usize>(tensor: Tensor<D>) -> Result<FlexTensor> {
    Ok(Operand::new("weight", tensor).map_err(Error::other)?.row_major().storage)
}

/// The values of a storage that [`storage`] has made.
pub(super) fn read(storage: &FlexTensor) -> Result<&[f32]> {
    values("weight", storage).map_err(Error::other)
}

/// Hands every parameter that is trained with its name and values to `sink`, one by one in walk order.
///
/// # Errors
/// That of the sink.
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

/// Every parameter that is trained with its name and values, in walk order.
pub(crate) fn named_parameters(model: &Decoder) -> Vec<NamedTensor> {
    let mut tensors = Vec::new();
    // A list takes every tensor.
    let _ = export_parameters(model, &mut tensors);
    tensors
}

/// Replaces every parameter that is trained by the tensor of the same name.
///
/// # Errors
/// [`Error::State`] when a parameter has no tensor, one of another shape, or a tensor has no parameter.
pub(crate) fn load_parameters(model: Decoder, tensors: &dyn TensorSource) -> Result<Decoder> {
    check_parameters(&model, tensors)?;
    let (model, replaced) = replace_parameters(model, tensors);
    replaced.map(|()| model)
}

/// Checks that every parameter that is trained has a tensor, and every tensor a parameter.
///
/// # Errors
/// As [`load_parameters`].
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
        Some(extra) => Err(Error::state(*extra, "a name that the model has", "a tensor that no parameter wants")),
        None => Ok(()),
    }
}

/// The model with the values of tensors that [`check_parameters`] has seen to fit, in place where nobody else holds its own; and the first
/// error of a source that no longer has them.
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

/// Rewrites the values of every parameter that is trained, in walk order.
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

/// Sees every float parameter with its name.
pub(crate) trait ParameterVisitor {
    fn visit<const D: usize>(&mut self, name: &str, parameter: &Param<Tensor<D>>);

    /// Sees the name of a weight that stays in its file.
    fn stored(&mut self, name: &str) {
        let _ = name;
    }
}

/// Walks the parameters of `model`.
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
