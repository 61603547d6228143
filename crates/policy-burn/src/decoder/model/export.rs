//! What leaves a decoder: weights and adapters as `transformers` and PEFT have them.

use super::Decoder;
use crate::decoder::block::Block;
use crate::decoder::hugging_face::export_parts;
use crate::decoder::layers::Linear;
use crate::decoder::lora::{is_adapter, is_value_head};
use crate::decoder::params::{Which, for_each_parameter, to_host};
use crate::decoder::weight::{Weight, widened};
use models::NamedTensor;
use policy::{Error, Result, TensorSink};

impl Decoder {
    /// Hands every weight to `sink` under Hugging Face's name and in its layout, one by one: what `transformers` loads. Adapters are
    /// merged into their matrices. That of a head that is the embedding, too, is merged into a copy, the `lm_head.weight` of a model with a
    /// head of its own: the configuration of what comes out is [`models::LoraConfig::merged_into`]'s.
    ///
    /// # Errors
    /// That of the sink.
    pub fn export(&self, sink: &mut dyn TensorSink) -> Result<()> {
        for_each_parameter(self, Which::All, |name, shape, values| {
            // transformers' causal models have no value head.
            if is_adapter(name) || is_value_head(name) {
                return Ok(());
            }
            let merged = match (name, self.linear(name)) {
                ("lm_head", _) if self.lora_head.is_some() => Some(to_host(self.lm_head()?)),
                (_, Some(linear)) if !linear.adapters.is_empty() => Some(linear.merged()?),
                _ => None,
            };
            export_parts(self, name, shape, merged.as_deref().unwrap_or(values), sink)
        })?;
        match (&self.lora_head, &self.lm_head) {
            (Some(_), None) => {
                let shape = [self.config.vocab_size, self.config.hidden_size];
                export_parts(self, "lm_head", &shape, &to_host(self.lm_head()?), sink)
            }
            _ => Ok(()),
        }
    }

    /// Shape and values of the matrix of this name, which stays in its file.
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
        let weight = &self.linear(name).ok_or_else(missing)?.weight;
        Ok((weight.dims().to_vec(), weight.to_vec()?))
    }

    /// The linear layer whose weight has this name.
    fn linear(&self, name: &str) -> Option<&Linear> {
        let (layer, rest) = name.strip_prefix("layers.")?.split_once('.')?;
        let Block { attn, mlp, .. } = self.layers.get(layer.parse::<usize>().ok()?)?;
        match rest {
            "attn.qkv_proj.weight" => Some(&attn.qkv_proj),
            "attn.o_proj.weight" => Some(&attn.o_proj),
            "mlp.gate_up_proj.weight" => Some(&mlp.gate_up_proj),
            "mlp.down_proj.weight" => Some(&mlp.down_proj),
            _ => None,
        }
    }

    /// Hands the adapters to `sink` under PEFT's names and in its layout, one by one; none where there are none.
    ///
    /// # Errors
    /// That of the sink.
    pub fn export_adapter(&self, sink: &mut dyn TensorSink) -> Result<()> {
        for_each_parameter(self, Which::All, |name, shape, values| {
            if is_adapter(name) { export_parts(self, name, shape, values, sink) } else { Ok(()) }
        })
    }

    /// Hands values of the parameters under their names here, such as [`crate::GradientSum::parameters`], to `sink` under Hugging Face's
    /// names and in its layout; those of adapters under PEFT's.
    ///
    /// # Errors
    /// That of the sink.
    pub fn export_values(&self, values: &[NamedTensor], sink: &mut dyn TensorSink) -> Result<()> {
        for NamedTensor { name, shape, data } in values {
            export_parts(self, name, shape, data, sink)?;
        }
        Ok(())
    }
}
