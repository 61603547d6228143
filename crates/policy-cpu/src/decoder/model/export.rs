//! Export of weights and adapters in the layouts of `transformers` and PEFT.

use super::Decoder;
use crate::decoder::experts::dims;
use crate::decoder::host::to_host;
use crate::decoder::layers::{Block, Linear, Mlp};
use crate::decoder::names::{is_adapter, is_value_head, split};
use crate::decoder::params::{Which, export_parts, for_each_parameter};
use crate::decoder::weight::{Stored, Weight, widened};
use grpo_models::NamedTensor;
use grpo_policy::{Error, Result, TensorSink};
use std::sync::Arc;

impl Decoder {
    /// Passes every weight to `sink`, one by one, with the names and layout of `transformers`. Adapters are merged into their matrices. If
    /// the head is tied to the embedding and has an adapter, the merged head becomes a separate `lm_head.weight`;
    /// [`grpo_models::LoraConfig::merged_into`] returns the configuration of the exported model.
    ///
    /// # Errors
    /// The sink's error; [`Error::Argument`] if the weights are quantised ([`Decoder::quantized`]): their values are not those of the model.
    pub fn export(&self, sink: &mut dyn TensorSink) -> Result<()> {
        if self.is_quantized() {
            let expected = "weights that are not quantised: export the adapter, or merge it into the weights of the model's folder";
            return Err(Error::argument("export", expected, "quantised weights"));
        }
        for_each_parameter(self, Which::All, |name, shape, values| {
            // transformers' causal models have no value head.
            if is_adapter(name) || is_value_head(name) {
                return Ok(());
            }
            let merged = match (name, self.linear(name)) {
                ("lm_head", _) if self.lora_head.is_some() => Some(to_host(self.lm_head()?)),
                (_, Some(linear)) if !linear.adapters.is_empty() => Some(linear.merged()?),
                _ => self.merged_experts(name, values)?,
            };
            export_parts(self, "", (name, shape, merged.as_deref().unwrap_or(values)), sink)
        })?;
        match (&self.lora_head, &self.lm_head) {
            (Some(_), None) => {
                let shape = [self.config.vocab_size, self.config.hidden_size];
                export_parts(self, "", ("lm_head", &shape, &to_host(self.lm_head()?)), sink)
            }
            _ => Ok(()),
        }
    }

    /// Returns `true` if matrices of layers are quantised.
    pub fn is_quantized(&self) -> bool {
        let is_quantized = |linear: &Linear| matches!(&linear.weight, Weight::Stored(stored) if stored.is_quantized());
        self.layers.iter().any(|layer| layer.attn.linears().iter().any(|(_, linear)| is_quantized(linear)))
    }

    /// Returns shape and values of the frozen matrix `name`.
    pub(in crate::decoder) fn stored_weight(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let missing = || Error::argument("Decoder", "the name of a matrix", name);
        let table = match name {
            "embed_tokens" => Some(&self.embed_tokens),
            "lm_head" => self.lm_head.as_ref(),
            _ => None,
        };
        if let Some(Weight::Stored(table)) = table {
            let [width, vocab] = table.dims();
            let values = table.elements().next().ok_or_else(missing)??;
            return Ok((vec![vocab, width], widened(values)));
        }
        if let Some(experts) = self.stored_experts(name) {
            // The matrices of experts are below each other.
            let [input, output] = experts.first().ok_or_else(missing)?.dims();
            let values = experts.iter().map(Stored::to_vec).collect::<Result<Vec<_>>>()?.concat();
            return Ok((vec![experts.len() * input, output], values));
        }
        let weight = &self.linear(name).ok_or_else(missing)?.weight;
        Ok((weight.dims().to_vec(), weight.to_vec()?))
    }

    /// Returns the values of a parameter of experts with its adapter merged; `None` for another parameter, or without an adapter.
    fn merged_experts(&self, name: &str, values: &[f32]) -> Result<Option<Vec<f32>>> {
        let Some((layer, name)) = split(name) else { return Ok(None) };
        let Some(Block { mlp: Mlp::Experts(mlp), .. }) = self.layers.get(layer) else { return Ok(None) };
        mlp.merged(name, values)
    }

    /// Returns the memory-mapped matrices of experts whose parameter is called `name`.
    fn stored_experts(&self, name: &str) -> Option<Arc<[Stored]>> {
        let (layer, rest) = split(name)?;
        let Mlp::Experts(mlp) = &self.layers.get(layer)?.mlp else { return None };
        let [gate_up, down] = dims(self.config.experts.as_ref()?, self.config.hidden_size);
        match (rest, &mlp.experts_gate_up, &mlp.experts_down) {
            ("mlp.experts_gate_up", Weight::Stored(stored), _) => Some(stored.of_experts(gate_up[1])),
            ("mlp.experts_down", _, Weight::Stored(stored)) => Some(stored.of_experts(down[1])),
            _ => None,
        }
    }

    /// Returns the linear layer whose weight is called `name`.
    fn linear(&self, name: &str) -> Option<&Linear> {
        let (layer, rest) = split(name)?;
        let Block { attn, mlp, .. } = self.layers.get(layer)?;
        let mut linears = attn.linears().into_iter().chain(mlp.linears());
        linears.find(|(name, _)| rest.strip_suffix(".weight") == Some(name)).map(|(_, linear)| linear)
    }

    /// Passes the adapters to `sink`, one by one, with the names and layout of PEFT; nothing if there are none.
    ///
    /// # Errors
    /// The sink's error.
    pub fn export_adapter(&self, sink: &mut dyn TensorSink) -> Result<()> {
        // Adapters are trained. All parameters would include copies of memory-mapped weights.
        for_each_parameter(self, Which::Trained, |name, shape, values| {
            if is_adapter(name) { export_parts(self, "", (name, shape, values), sink) } else { Ok(()) }
        })
    }

    /// Passes values of parameters, for example of [`crate::GradientSum::parameters`], to `sink` with the names and layout of
    /// `transformers` (adapters: PEFT).
    ///
    /// # Errors
    /// The sink's error.
    pub fn export_values(&self, values: &[NamedTensor], sink: &mut dyn TensorSink) -> Result<()> {
        for NamedTensor { name, shape, data } in values {
            export_parts(self, "", (name, shape, data), sink)?;
        }
        Ok(())
    }
}
