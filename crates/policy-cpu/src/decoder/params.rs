//! Parameters by name: export, import, update.
//!
//! A parameter's name is its path of field names, for example `layers.0.attn.qkv_proj.weight`; parameters are visited in the order of the
//! fields. Gradients and moments depend on both; checkpoints have the tensors of transformers.

use super::experts::is_router;
use super::hugging_face::{Tensors, export_parts};
use super::layers::is_constant;
use super::lora::{is_adapter, is_value_head};
use super::model::Decoder;
use super::weight::{CONTAINER, STORED};
use burn::backend::flex::FlexTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor, TensorData};
use grpo_burn::custom_op::{Operand, values};
use grpo_policy::{Error, Result, TensorSink, TensorSource};

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
    /// Trained parameters: with adapters, the adapters and the value head; otherwise all but frozen routers and factors of layers.
    Trained,
}

/// The kinds of trained parameters of a model.
#[derive(Clone, Copy)]
struct Trained {
    has_adapters: bool,
    has_frozen_routers: bool,
}

impl Trained {
    fn of(model: &Decoder) -> Self {
        Self { has_adapters: model.has_adapters(), has_frozen_routers: model.has_frozen_routers() }
    }

    /// Returns `true` if the parameter `name` is trained.
    fn has(self, name: &str) -> bool {
        let is_frozen = is_constant(name) || self.has_frozen_routers && is_router(name);
        !is_frozen && (!self.has_adapters || is_adapter(name) || is_value_head(name))
    }
}

/// Passes name, shape and values of parameters to `see`, in the order of fields and without copying. With [`Which::All`], memory-mapped
/// weights are included as f32 copies.
pub(crate) fn for_each_parameter(
    model: &Decoder,
    which: Which,
    mut see: impl FnMut(&str, &[usize], &[f32]) -> Result<()>,
) -> Result<()> {
    let mut done = Ok(());
    visit_parameters(model, which, |name, parameter| {
        if done.is_ok() {
            done = match parameter {
                Some(parameter) => parameter.storage().and_then(|of| see(name, &parameter.shape(), read(&of)?)),
                None => model.stored_weight(name).and_then(|(shape, values)| see(name, &shape, &values)),
            };
        }
    });
    done
}

/// Returns the number of trained values.
pub(crate) fn trained_values(model: &Decoder) -> usize {
    let mut count = 0;
    visit_parameters(model, Which::Trained, |_, parameter| {
        count += parameter.map_or(0, |parameter| parameter.shape().iter().product());
    });
    count
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
pub(crate) fn export_parameters(model: &Decoder, which: Which, sink: &mut dyn TensorSink) -> Result<()> {
    for_each_parameter(model, which, |name, shape, values| export_parts(model, "", (name, shape, values), sink))
}

/// Replaces the values of trained parameters by tensors with matching names and shapes, in place if the parameters have no other owner.
/// Also returns the first error of a source that fails to deliver its values.
pub(crate) fn replace_parameters(model: Decoder, tensors: &dyn TensorSource) -> (Decoder, Result<()>) {
    let (config, adapted) = (model.config().clone(), model.adapted.clone());
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
        trained: Trained,
        update: F,
    }
    impl<F: FnMut(&str, &[usize], &mut [f32])> ModuleMapper for Update<F> {
        fn enter_module(&mut self, name: &str, container: &str) {
            if !container.starts_with(CONTAINER) {
                self.path.push(name.to_owned());
            }
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            if !container.starts_with(CONTAINER) {
                self.path.pop();
            }
        }
        fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let name = self.path.join(".");
            if !self.trained.has(&name) {
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
    let trained = Trained::of(&model);
    model.map(&mut Update { path: Vec::new(), trained, update })
}

/// A parameter in memory, with any number of dimensions.
pub(crate) trait AnyParameter {
    fn shape(&self) -> Vec<usize>;
    fn storage(&self) -> Result<FlexTensor>;
    /// Takes the gradient; `None` if the loss does not depend on the parameter.
    fn gradient(&self, of: &mut Gradients) -> Option<Vec<f32>>;
}

impl<const D: usize> AnyParameter for Param<Tensor<D>> {
    fn shape(&self) -> Vec<usize> {
        self.dims().to_vec()
    }

    fn storage(&self) -> Result<FlexTensor> {
        storage(self.val())
    }

    fn gradient(&self, of: &mut Gradients) -> Option<Vec<f32>> {
        self.val().grad_remove(of).map(to_host)
    }
}

/// Passes the parameters of `model` with their names to `see`; `None` for a memory-mapped weight.
pub(crate) fn visit_parameters(model: &Decoder, which: Which, see: impl FnMut(&str, Option<&dyn AnyParameter>)) {
    struct Walk<F> {
        path: Vec<String>,
        /// `None` selects all parameters.
        trained: Option<Trained>,
        see: F,
    }
    impl<F: FnMut(&str, Option<&dyn AnyParameter>)> Walk<F> {
        fn see(&mut self, parameter: Option<&dyn AnyParameter>) {
            let name = self.path.join(".");
            if self.trained.is_none_or(|trained| trained.has(&name)) {
                (self.see)(&name, parameter);
            }
        }
    }
    impl<F: FnMut(&str, Option<&dyn AnyParameter>)> ModuleVisitor for Walk<F> {
        fn enter_module(&mut self, name: &str, container: &str) {
            if !container.starts_with(CONTAINER) {
                self.path.push(name.to_owned());
            } else if name == STORED {
                self.see(None);
            }
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            if !container.starts_with(CONTAINER) {
                self.path.pop();
            }
        }
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
            self.see(Some(parameter));
        }
    }
    let trained = (which == Which::Trained).then(|| Trained::of(model));
    model.visit(&mut Walk { path: Vec::new(), trained, see });
}
