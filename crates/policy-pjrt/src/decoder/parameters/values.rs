//! Parameters as values of a program.

use super::{Parameter, ParameterId};
use grpo_models::{Matrix, Role};
use grpo_stablehlo::{Dtype, TensorType, Value};
use std::collections::BTreeMap;

/// The parameters of a decoder or of one of its layers, as values of a program.
#[derive(Clone, Debug)]
pub struct ParameterValues {
    values: BTreeMap<ParameterId, Value>,
    /// `true` if the model's matrices are `[in, out]`.
    transposed: bool,
}

impl ParameterValues {
    /// Declares the parameters of `table` as the next arguments of a program. `dtype` is the dtype of the model's matrices
    /// ([`Parameter::dtype`]).
    pub fn arguments(builder: &grpo_stablehlo::Builder, table: &[Parameter], dtype: Dtype) -> Self {
        let ty = |p: &Parameter| TensorType::new(p.dtype(dtype), &p.shape[..]);
        let argument = |p: &Parameter| (p.id(), builder.argument(p.name(), ty(p)));
        Self::new(table.iter().map(argument))
    }

    /// Creates the map from parameters to values.
    pub fn new(values: impl IntoIterator<Item = (ParameterId, Value)>) -> Self {
        Self { values: values.into_iter().collect(), transposed: false }
    }

    /// Returns the parameters of one layer, given its slices of these stacks.
    pub(in crate::decoder) fn of_layer(&self, values: impl IntoIterator<Item = (Role, Value)>) -> Self {
        Self { transposed: self.transposed, ..Self::new(values.into_iter().map(|(role, value)| ((role, 0), value))) }
    }

    /// Returns the same parameters with the model's matrices transposed to `[in, out]`. A tied head becomes a separate value.
    pub(crate) fn transposed(&self) -> Self {
        let mut values = self.values.clone();
        values.insert((Role::LmHead, 0), self.head().clone());
        for (_, value) in values.iter_mut().filter(|((role, _), _)| Matrix::of(*role).is_some()) {
            let mut dimensions: Vec<usize> = (0..value.shape().len()).collect();
            let first = dimensions.len() - 2;
            dimensions.swap(first, first + 1);
            *value = value.transpose(&dimensions);
        }
        Self { values, transposed: true }
    }

    /// Returns the contracted dimension of the matrix of this role.
    pub(in crate::decoder) fn summed(&self, role: Role) -> usize {
        if self.transposed && Matrix::of(role).is_some() { 0 } else { 1 }
    }

    /// Returns the parameter of this role, if the model has it.
    pub fn get(&self, role: Role) -> Option<&Value> {
        self.values.get(&(role, 0))
    }

    /// Returns the role of the LM head; if it is tied, the role of the embedding.
    pub(in crate::decoder) fn head_role(&self) -> Role {
        if self.values.contains_key(&(Role::LmHead, 0)) { Role::LmHead } else { Role::EmbedTokens }
    }

    /// Returns the LM head `[V, H]`; if it is tied, the embedding.
    pub fn head(&self) -> &Value {
        &self[self.head_role()]
    }

    /// Returns the value of a parameter.
    ///
    /// # Panics
    /// Panics if the model has no such parameter.
    #[track_caller]
    pub fn of(&self, id: ParameterId) -> &Value {
        self.values.get(&id).unwrap_or_else(|| panic!("{id:?} is a parameter of the model"))
    }

    /// Iterates over all parameters, in the order of their roles.
    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Value)> {
        self.values.iter().map(|(id, value)| (*id, value))
    }
}

impl std::ops::Index<Role> for ParameterValues {
    type Output = Value;

    /// # Panics
    /// Panics if the model has no such parameter; [`ParameterValues::get`] returns `None` instead.
    fn index(&self, role: Role) -> &Value {
        self.get(role).unwrap_or_else(|| panic!("{role:?} is a parameter of every model"))
    }
}
