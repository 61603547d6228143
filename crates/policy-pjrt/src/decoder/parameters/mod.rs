//! A decoder's parameters: shapes, logical axes, and names of their Hugging Face tensors.
//!
//! Legend: L layers, E experts, V vocabulary, H hidden size, I intermediate size of the MLP, A query heads, K key/value heads, D head dimension;
//! of a Gated DeltaNet: Hv value heads, Dv their width, C channels of the convolution.

mod table;
mod values;

pub use table::parameters;
pub use values::ParameterValues;

use grpo_models::{Axis, ParameterSpec, Quantization, Role};
use grpo_stablehlo::Dtype;

/// The role of a parameter and the index of its stack: 0 unless layers have different shapes for the role.
pub type ParameterId = (Role, usize);

/// The contents of the tensors of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Floating-point values.
    Values,
    /// Codes of quantised values, in words of 32 bits.
    Codes(Quantization),
    /// Scales of quantised values, f32.
    Scales(Quantization),
}

/// A parameter on a device: one Hugging Face tensor, or a stack of the tensors of all layers in which they have this shape. If each expert
/// has a tensor, the stack has all experts of these layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its role in the decoder.
    pub role: Role,
    /// Its number among the stacks of this role.
    pub number: usize,
    /// The layers of the stack, in ascending order; empty for a parameter that is not of layers.
    pub layers: Vec<usize>,
    /// The shape; `[L, ...]` for a parameter of L layers, `[L, E, ...]` if each of E experts has a tensor. Matrices are `[out, in]`, as in Hugging Face files.
    pub shape: Vec<usize>,
    /// The logical axis of each dimension.
    pub axes: Vec<Axis>,
    /// The number of rows at the end of each tensor that files do not have: zeros on the devices of a mesh that does not divide the vocabulary
    /// ([`AxisRules::padded`](crate::decoder::AxisRules::padded)).
    pub padding: usize,
    /// The contents of its tensors.
    pub format: Format,
    /// The short name.
    pub(super) path: String,
    /// The names of its tensors.
    pub(super) names: Names,
    /// The number of leading dimensions that stack tensors: layers and, if each expert has a tensor, experts.
    pub(super) stacked: usize,
}

/// The names of the tensors of a parameter. A model of experts has tens of thousands, which are built when they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// A tensor of every layer of the stack, or of this number of experts of every layer.
    OfLayers { row: &'static ParameterSpec, experts: usize },
    /// Tensors, each with its index in the stack.
    Listed(Vec<(usize, String)>),
}

impl Parameter {
    /// Returns the parameter's key in [`ParameterValues`].
    pub fn id(&self) -> ParameterId {
        (self.role, self.number)
    }

    /// Returns `true` if it stacks the tensors of layers.
    pub fn is_stacked(&self) -> bool {
        self.stacked > 0
    }

    /// Returns the number of leading dimensions that stack tensors.
    pub(crate) fn stacked(&self) -> usize {
        self.stacked
    }

    /// Returns the names of its tensors in `transformers`, each with its index in the stack, in row-major order. Tensors of adapters have PEFT's names; layers without an
    /// adapter have no name, and zeros in the stack.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, String)> {
        (0..self.tensor_count()).map(|at| match &self.names {
            Names::Listed(names) => names[at].clone(),
            Names::OfLayers { row, experts } => (at, row.name(self.layers[at / experts], at % experts)),
        })
    }

    /// Returns `true` if the stack has a tensor at this index; layers without an adapter have none.
    pub(crate) fn has_tensor(&self, index: usize) -> bool {
        match &self.names {
            Names::OfLayers { .. } => index < self.tensor_count(),
            Names::Listed(names) => names.iter().any(|(at, _)| *at == index),
        }
    }

    /// Returns the number of its tensors.
    fn tensor_count(&self) -> usize {
        match &self.names {
            Names::OfLayers { experts, .. } => self.layers.len() * experts,
            Names::Listed(names) => names.len(),
        }
    }

    /// Returns the number of weights, without padding.
    pub fn count(&self) -> usize {
        self.tensor_count() * self.file_shape().iter().product::<usize>()
    }

    /// Returns `true` if its tensors are matrices; norms and biases are vectors.
    pub fn has_matrices(&self) -> bool {
        self.tensor_shape().len() > 1
    }

    /// Returns the dtype in programs for a model whose matrices have dtype `model`, f32 or bf16. Norms, biases, adapters and value heads
    /// are always f32; words of codes are u32, and their scales f32.
    pub fn dtype(&self, model: Dtype) -> Dtype {
        match self.format {
            Format::Values => {}
            Format::Codes(_) => return Dtype::U32,
            Format::Scales(_) => return Dtype::F32,
        }
        if self.role.is_of_model() && self.has_matrices() { model } else { Dtype::F32 }
    }

    /// Returns the shape of one of its tensors.
    pub fn tensor_shape(&self) -> &[usize] {
        &self.shape[self.stacked..]
    }

    /// Returns the shape of one of its tensors in files, which have no padding. It also differs for adapters of experts: PEFT's A `[E r, I]` and B
    /// `[O, r E]` have the ranks of all experts in one dimension, in the same order of values.
    pub fn file_shape(&self) -> Vec<usize> {
        let mut shape = self.tensor_shape().to_vec();
        if let Some(rows) = shape.first_mut() {
            *rows -= self.padding;
        }
        let (before, rest) = shape.split_at(self.joined().unwrap_or(shape.len()).min(shape.len()));
        match rest {
            [rank, experts, rest @ ..] => [before, &[rank * experts], rest].concat(),
            _ => shape,
        }
    }

    /// Returns the number of dimensions of one of its tensors that are its first `count` dimensions in files.
    pub(crate) fn dimensions_of(&self, count: usize) -> usize {
        count + usize::from(self.joined().is_some_and(|joined| count > joined))
    }

    /// Returns the dimension of its tensors that is joined with the next one in files.
    fn joined(&self) -> Option<usize> {
        match self.role {
            Role::LoraA(matrix) if matrix.is_of_experts() => Some(0),
            Role::LoraB(matrix) if matrix.is_of_experts() => Some(1),
            _ => None,
        }
    }

    /// Returns the logical axes of one of its tensors.
    pub fn tensor_axes(&self) -> &[Axis] {
        &self.axes[self.stacked..]
    }

    /// Returns the parameter with other sizes.
    pub(crate) fn with_shape(&self, shape: Vec<usize>, axes: Vec<Axis>) -> Self {
        Self { shape, axes, ..self.clone() }
    }

    /// Returns the short name, which programs use.
    pub fn name(&self) -> &str {
        &self.path
    }
}
