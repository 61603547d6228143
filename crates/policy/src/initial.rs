//! Initial weights of new models, adapters and value heads: the same for every policy.

use crate::error::{Error, Result};
use crate::state::TensorSource;
use grpo_models::{AdaptedMatrix, Initial, LoraConfig, ModelConfig, PARAMETERS, Parameter, ParameterSpec};
use grpo_rng::{normal_weights, uniform_weights};
use std::borrow::Cow;

/// Initial weights as a [`TensorSource`] with the names and shapes of `transformers` and PEFT. Values are computed when they are read, and
/// depend on the configuration and the seed only.
///
/// ```
/// use grpo_policy::{InitialWeights, TensorSource};
///
/// # fn main() -> grpo_policy::Result<()> {
/// let weights = InitialWeights::of_model(&grpo_models::ModelConfig::default(), 0)?;
/// assert!(weights.values("model.norm.weight")?.iter().all(|weight| *weight == 1.0));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct InitialWeights {
    seed: u64,
    tensors: Vec<(Parameter, Distribution)>,
}

/// The distribution of the values of a tensor.
#[derive(Clone, Debug)]
enum Distribution {
    Constant(f32),
    /// ln(x) with x uniform between `low` and `high`.
    LogOfUniform {
        stream: String,
        low: f64,
        high: f64,
    },
    /// Uniform values up to `bound`.
    Uniform {
        stream: String,
        bound: f64,
    },
    /// Normal values, row by row.
    Normal {
        stream: String,
        std: f64,
    },
    /// The transposed columns from `first` on of a normal matrix with `width` columns.
    Columns {
        stream: String,
        std: f64,
        first: usize,
        width: usize,
    },
}

impl InitialWeights {
    /// Returns the weights of a new model: normal matrices with the standard deviation `initializer_range`, divided by sqrt(2 L) for the
    /// outputs of attention and MLP in a model of L layers; norms that multiply by 1; biases of 0. Of a Gated DeltaNet, `A_log` is
    /// ln(x) with x uniform between 0.01 and 16, and `dt_bias` is 1.
    ///
    /// # Errors
    /// [`Error::Model`] for an invalid configuration.
    pub fn of_model(config: &ModelConfig, seed: u64) -> Result<Self> {
        config.validate()?;
        let tensors = config.tensors().map(|(row, layer, parameter)| {
            let distribution = of_model(config, row, layer, &parameter.name);
            (parameter, distribution)
        });
        Ok(Self { seed, tensors: tensors.collect() })
    }

    /// Returns the weights of fresh adapters, which do not change outputs: as in PEFT, A is uniform within 1 / sqrt(in), and B is zero.
    ///
    /// # Errors
    /// [`Error::Model`] for an invalid configuration or target modules that the model does not have.
    pub fn of_adapters(config: &ModelConfig, lora: &LoraConfig, seed: u64) -> Result<Self> {
        let (matrices, mut tensors) = (lora.resolve(config)?, Vec::new());
        for matrix in &matrices {
            let stream = adapter_stream(&matrices, matrix);
            let a = Distribution::Uniform { stream, bound: 1.0 / (matrix.input as f64).sqrt() };
            tensors.push((Parameter { name: matrix.lora_a(), shape: vec![matrix.rank(lora.r), matrix.input] }, a));
            let b = Parameter { name: matrix.lora_b(), shape: vec![matrix.output, matrix.rank(lora.r)] };
            tensors.push((b, Distribution::Constant(0.0)));
        }
        Ok(Self { seed, tensors })
    }

    /// Returns the weights of a value head, which are zero: every state has value 0.
    pub fn of_value_head(config: &ModelConfig) -> Self {
        let tensors = [("value_head.weight", vec![config.hidden_size, 1]), ("value_head.bias", vec![1])];
        let zeros = |(name, shape): (&str, _)| (Parameter { name: name.into(), shape }, Distribution::Constant(0.0));
        Self { seed: 0, tensors: tensors.map(zeros).into() }
    }
}

impl TensorSource for InitialWeights {
    fn shapes(&self) -> Vec<(&str, &[usize])> {
        self.tensors.iter().map(|(parameter, _)| (&*parameter.name, &*parameter.shape)).collect()
    }

    fn values(&self, name: &str) -> Result<Cow<'_, [f32]>> {
        let Some((parameter, distribution)) = self.tensors.iter().find(|(parameter, _)| parameter.name == name) else {
            return Err(Error::state(name, "a tensor of the new model", "none"));
        };
        let (count, seed) = (parameter.len(), self.seed);
        Ok(Cow::Owned(match distribution {
            Distribution::Constant(value) => vec![*value; count],
            Distribution::Uniform { stream, bound } => uniform_weights(count, *bound, seed, stream),
            Distribution::LogOfUniform { stream, low, high } => {
                let (middle, bound) = ((low + high) / 2.0, (high - low) / 2.0);
                let uniform = uniform_weights(count, bound, seed, stream);
                uniform.into_iter().map(|value| ((middle + f64::from(value)).max(*low) as f32).ln()).collect()
            }
            Distribution::Normal { stream, std } => normal_weights(0..count, *std, seed, stream),
            Distribution::Columns { stream, std, first, width } => {
                let (outputs, inputs) = (parameter.shape[0], parameter.shape[1]);
                let mut values = vec![0.0; count];
                for input in 0..inputs {
                    let start = input * width + first;
                    let row = normal_weights(start..start + outputs, *std, seed, stream);
                    values[input..].iter_mut().step_by(inputs).zip(row).for_each(|(to, value)| *to = value);
                }
                values
            }
        }))
    }
}

/// Returns the distribution of the values of a tensor of a model.
fn of_model(config: &ModelConfig, row: &ParameterSpec, layer: usize, name: &str) -> Distribution {
    let std = if row.adds_to_residual() { (2.0 * config.num_hidden_layers as f64).sqrt() } else { 1.0 };
    let (std, stream) = (config.initializer_range / std, name.trim_start_matches("model.").trim_end_matches(".weight"));
    match row.initial {
        Initial::Zeros => Distribution::Constant(0.0),
        Initial::Scale if config.zero_centered_norms => Distribution::Constant(0.0),
        Initial::Scale | Initial::Ones => Distribution::Constant(1.0),
        Initial::LogOfUniform => Distribution::LogOfUniform { stream: stream.to_owned(), low: 0.01, high: 16.0 },
        Initial::Normal => Distribution::Normal { stream: stream.to_owned(), std },
        Initial::Linear => {
            let spec = config.layer(layer);
            let parts = || ParameterSpec::of_layer(config, spec).filter(|part| part.fused == row.fused);
            let columns = |part: &ParameterSpec| part.shape(config, spec)[0];
            Distribution::Columns {
                stream: format!("layers.{layer}.{}", row.fused),
                std,
                first: parts().take_while(|part| *part != row).map(columns).sum(),
                width: parts().map(columns).sum(),
            }
        }
    }
}

/// Returns the stream of the values of A of one of these adapted matrices. Adapters are numbered within the random matrix that contains their matrices.
fn adapter_stream(matrices: &[AdaptedMatrix], matrix: &AdaptedMatrix) -> String {
    let Some((layer, module)) = matrix.name.strip_prefix("model.layers.").and_then(|name| name.split_once('.')) else {
        return "lora_head.a".to_owned();
    };
    let is_own = |row: &&ParameterSpec| row.initial == Initial::Linear && row.module() == module;
    let Some(row) = PARAMETERS.iter().find(is_own) else { return format!("layers.{layer}.{module}.adapter.a") };
    let is_adapted = |part: &&ParameterSpec| {
        let name = format!("model.layers.{layer}.{}", part.module());
        part.fused == row.fused && matrices.iter().any(|matrix| matrix.name == name)
    };
    let index = PARAMETERS.iter().take_while(|part| *part != row).filter(is_adapted).count();
    format!("layers.{layer}.{}.adapters.{index}.a", row.fused.trim_end_matches(".weight"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_models::TargetModules;

    #[test]
    fn queries_keys_and_values_are_columns_of_one_random_matrix() {
        let config = ModelConfig { num_hidden_layers: 2, qk_norm: true, ..ModelConfig::default() };
        let weights = InitialWeights::of_model(&config, 5).unwrap();
        let listed: Vec<_> = config.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
        assert_eq!(weights.shapes().into_iter().map(|(n, s)| (n.to_owned(), s.to_vec())).collect::<Vec<_>>(), listed);
        let of = |part: &str| weights.values(&format!("model.layers.1.self_attn.{part}.weight")).unwrap().into_owned();
        let parts = ["q_proj", "k_proj", "v_proj"].map(of);
        let (hidden, width) = (config.hidden_size, parts.iter().map(Vec::len).sum::<usize>() / config.hidden_size);
        let whole = normal_weights(0..hidden * width, config.initializer_range, 5, "layers.1.attn.qkv_proj.weight");
        let rows: Vec<&[f32]> = parts.iter().flat_map(|part| part.chunks(hidden)).collect();
        for (at, value) in whole.iter().enumerate() {
            assert_eq!(rows[at % width][at / width], *value);
        }
        assert_eq!(of("q_norm"), vec![1.0; config.head_dim()]);
        assert!(weights.values("model.layers.0.self_attn.q_proj.bias").unwrap().iter().all(|bias| *bias == 0.0));
        assert!(weights.values("layers.0").is_err());
        assert!(InitialWeights::of_model(&ModelConfig { num_attention_heads: 0, ..config }, 5).is_err());
    }

    #[test]
    fn adapters_are_numbered_within_their_random_matrix() {
        let config = ModelConfig::default();
        let names = ["q_proj", "v_proj", "lm_head"].map(String::from).to_vec();
        let lora = LoraConfig { target_modules: TargetModules::Names(names), ..LoraConfig::default() };
        let weights = InitialWeights::of_adapters(&config, &lora, 5).unwrap();
        let of = |name: &str| weights.values(&format!("base_model.model.{name}.weight")).unwrap().into_owned();
        let expected = |stream: &str| uniform_weights(lora.r * 64, 0.125, 5, stream);
        assert_eq!(config.hidden_size, 64);
        assert_eq!(of("model.layers.1.self_attn.q_proj.lora_A"), expected("layers.1.attn.qkv_proj.adapters.0.a"));
        assert_eq!(of("model.layers.1.self_attn.v_proj.lora_A"), expected("layers.1.attn.qkv_proj.adapters.1.a"));
        assert_eq!(of("lm_head.lora_A"), expected("lora_head.a"));
        assert!(of("lm_head.lora_B").iter().all(|value| *value == 0.0));
    }
}
