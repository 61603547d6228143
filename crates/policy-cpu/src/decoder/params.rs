//! Parameters by name: export, import, update.
//!
//! A parameter's name is its path of field names, for example `layers.0.attn.qkv_proj.weight`; parameters are visited in the order of the
//! fields. Gradients and moments depend on both; checkpoints have the tensors of transformers.

use super::hugging_face::{Tensors, export_parts, trained_tensors};
use super::lora::{is_adapter, is_value_head};
use super::model::Decoder;
use super::weight::{CONTAINER, STORED};
use burn::backend::flex::FlexTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use grpo_burn::custom_op::{Operand, values};
use models::NamedTensor;
use policy::{Error, Result, TensorSink, TensorSource, check_tensors};

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

/// Passes the tensors of the parameters to `sink`, with the names and layout of transformers (adapters: PEFT), in the order of fields.
///
/// # Errors
/// The sink's error.
pub(crate) fn export_parameters(model: &Decoder, which: Which, sink: &mut dyn TensorSink) -> Result<()> {
    for_each_parameter(model, which, |name, shape, values| export_parts(model, "", (name, shape, values), sink))
}

/// Returns the tensors of every trained parameter, in the order of fields.
pub(crate) fn named_parameters(model: &Decoder) -> Vec<NamedTensor> {
    let mut tensors = Vec::new();
    // Exporting to a list cannot fail.
    let _ = export_parameters(model, Which::Trained, &mut tensors);
    tensors
}

/// Replaces every trained parameter by its tensors.
///
/// # Errors
/// See [`check_tensors`]; the source's error.
pub(crate) fn load_parameters(model: Decoder, tensors: &dyn TensorSource) -> Result<Decoder> {
    check_tensors(&trained_tensors(&model), "", tensors)?;
    let (model, replaced) = replace_parameters(model, tensors);
    replaced.map(|()| model)
}

/// Replaces the values of trained parameters by tensors with matching names and shapes, in place if the parameters have no other owner.
/// Also returns the first error of a source that fails to deliver its values.
pub(crate) fn replace_parameters(model: Decoder, tensors: &dyn TensorSource) -> (Decoder, Result<()>) {
    let (config, adapted) = (model.config().clone(), model.adapted().clone());
    let tensors = Tensors { config: &config, adapted: &adapted, prefix: "", tensors };
    let mut done = Ok(());
    let model = update_parameters(model, |name, shape, values| {
        if done.is_ok() {
            done = tensors.read(name, shape, values);
        }
    });
    (model, done)
}

/// Updates the values of every trained parameter, in the order of fields.
pub(crate) fn update_parameters(model: Decoder, update: impl FnMut(&str, &[usize], &mut [f32])) -> Decoder {
    struct Update<F> {
        path: Vec<String>,
        has_adapters: bool,
        update: F,
    }
    impl<F: FnMut(&str, &[usize], &mut [f32])> ModuleMapper for Update<F> {
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
                (self.update)(&name, &shape, &mut data);
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
