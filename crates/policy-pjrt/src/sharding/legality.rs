//! The question whether a mesh is legal for a model: whether all dimensions shard evenly.

use super::rules::AxisRules;
use crate::decoder::{Axis, Parameter, parameters};
use crate::error::{Error, Result};
use grpo_models::{AttentionHeads, ModelConfig};
use grpo_stablehlo::{Dtype, TensorType};

impl AxisRules {
    /// Checks that a model shards evenly.
    ///
    /// # Errors
    /// [`Error::Split`] if a parameter, the query heads or the key heads of Gated DeltaNets do not shard evenly.
    pub fn check_model(&self, config: &ModelConfig) -> Result<()> {
        let rules = self.clone().for_model(config);
        rules.check_decoder(config, &rules.all_padded(parameters(config)))
    }

    /// Checks that the parameters of `table`, and the heads of a model, shard evenly by its rules ([`AxisRules::for_model`]).
    ///
    /// # Errors
    /// See [`AxisRules::check_model`].
    pub(crate) fn check_decoder(&self, config: &ModelConfig, table: &[Parameter]) -> Result<()> {
        self.check_parameters(table)?;
        for AttentionHeads { query, key_value: kv, .. } in config.heads_of_layers() {
            self.check("the query heads of key/value heads", &[(Axis::Kv, kv), (Axis::Heads, query / kv.max(1))])?;
        }
        config.linear_attention.map_or(Ok(()), |linear| {
            self.check("the key heads of Gated DeltaNets", &[(Axis::LinearHeads, linear.linear_num_key_heads)])
        })
    }

    /// Checks that all parameters of `table` shard evenly.
    ///
    /// # Errors
    /// [`Error::Split`] with the name of the parameter.
    pub(crate) fn check_parameters(&self, table: &[Parameter]) -> Result<()> {
        table.iter().try_for_each(|parameter| {
            let dimensions: Vec<(Axis, usize)> =
                parameter.axes.iter().copied().zip(parameter.shape.iter().copied()).collect();
            self.check(&format!("the parameter `{}`", parameter.name()), &dimensions)
        })
    }

    /// Checks that a tensor with these dimensions shards evenly.
    ///
    /// # Errors
    /// [`Error::Split`] with the name `what`.
    pub(crate) fn check(&self, what: &str, dimensions: &[(Axis, usize)]) -> Result<()> {
        let (axes, shape): (Vec<Axis>, Vec<usize>) = dimensions.iter().copied().unzip();
        let Some(sharding) = self.sharding(&axes) else { return Ok(()) };
        let part = sharding.part(&TensorType::new(Dtype::F32, shape));
        part.map(|_| ()).map_err(|source| Error::Split { what: what.into(), source })
    }
}
