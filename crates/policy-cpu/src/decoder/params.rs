//! Parameters by name: export, import, update.
//!
//! A parameter's name is its path of field names, for example `layers.0.attn.qkv_proj.weight`; parameters are visited in the order of the
//! fields. Gradients and moments depend on both; checkpoints have the tensors of transformers.

use super::host::{read, storage, to_host};
use super::hugging_face::Tensors;
use super::model::Decoder;
use super::names::{Part, is_adapter, is_constant, is_router, is_value_head, parts};
use super::weight::{CONTAINER, STORED};
use burn::backend::flex::FlexTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor, TensorData};
use grpo_models::{NamedTensor, Parameter};
use grpo_policy::{Result, TensorSink, TensorSource, check_tensors};

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

/// Returns the tensors of transformers that the trained parameters of `model` consist of.
pub(crate) fn trained_tensors(model: &Decoder) -> Vec<Parameter> {
    let mut tensors = Vec::new();
    visit_parameters(model, Which::Trained, |name, parameter| {
        let parts = parameter.map(|of| parts(model.config(), &model.adapted, name, &of.shape()));
        tensors.extend(parts.into_iter().flatten().map(|Part { name, shape, .. }| Parameter { name, shape }));
    });
    tensors
}

/// Passes the tensors of transformers that a parameter consists of to `sink`, one by one, with `prefix` before their names. Each is a copy,
/// which is dropped before the next one is made unless the sink keeps it.
pub(crate) fn export_parts(
    of: &Decoder,
    prefix: &str,
    (name, shape, values): (&str, &[usize], &[f32]),
    sink: &mut dyn TensorSink,
) -> Result<()> {
    let columns = shape.last().copied().unwrap_or(1);
    for part in parts(of.config(), &of.adapted, name, shape) {
        let data = part.tensor(values, columns);
        sink.tensor(NamedTensor { name: format!("{prefix}{}", part.name), shape: part.shape, data })?;
    }
    Ok(())
}

impl Decoder {
    /// Returns the trained tensors, with the names and layout of `transformers` (adapters: PEFT).
    pub fn parameters(&self) -> Vec<NamedTensor> {
        let mut tensors = Vec::new();
        // Exporting to a list cannot fail.
        let _ = export_parameters(self, Which::Trained, &mut tensors);
        tensors
    }

    /// Returns this decoder with the given values; restores the result of [`Decoder::parameters`] bit for bit.
    ///
    /// # Errors
    /// [`grpo_policy::Error::State`] if a name or shape does not fit.
    pub fn with_parameters(self, tensors: &dyn TensorSource) -> Result<Self> {
        check_tensors(&trained_tensors(&self), "", tensors)?;
        let (model, replaced) = replace_parameters(self, tensors);
        replaced.map(|()| model)
    }
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
