//! Memory estimate of a training run on a device, available before weights are loaded: the sum of the tables of weights, micro-batches
//! and sampling.

use crate::bytes::SINGLE;
use crate::decoder::{Axis, Compute, Decoder, Format, quantized_parameters};
use crate::error::Result;
use crate::pjrt_policy::PjrtPolicyOptions;
use crate::rollout::RolloutSizes;
use crate::sharding::AxisRules;
use crate::train::{TrainShape, saved_bytes};
use grpo_models::{MemoryTable, ModelConfig, OptimizerName, QuantizedMemory, Trained, TrainedMemory, TrainingMemory};

/// Sizes of a training run that determine its memory, apart from the weights.
///
/// ```
/// use grpo_models::ModelConfig;
/// use grpo_policy_pjrt::decoder::AxisRules;
/// use grpo_policy_pjrt::{PjrtPolicyOptions, RolloutSizes, TrainShape, TrainingSizes};
///
/// let sizes = TrainingSizes {
///     micro_batch: TrainShape { rows: 8, length: 256, tokens: 1024, ..TrainShape::default() },
///     rollout: RolloutSizes { prompts: 8, longest_prompt: 128, num_generations: 8, max_completion_length: 128, conversations: false },
///     weights: grpo_models::Dtype::F32,
///     trained: grpo_models::Trained::All,
///     optimizer: grpo_models::OptimizerName::AdamW,
///     ref_policy: false,
///     mixes_ref_policy: false,
/// };
/// let table = sizes.memory(&ModelConfig::default(), &PjrtPolicyOptions::default(), &AxisRules::default())?;
/// assert!(table.to_string().contains("first moments (float32)"));
/// # Ok::<(), grpo_policy_pjrt::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingSizes {
    /// Rows and tokens of a micro-batch.
    pub micro_batch: TrainShape,
    /// The sizes of a rollout.
    pub rollout: RolloutSizes,
    /// Dtype of the model's weights; f32 if they are trained.
    pub weights: grpo_models::Dtype,
    /// The trained weights.
    pub trained: Trained,
    /// The optimizer.
    pub optimizer: OptimizerName,
    /// `true` if there is a reference policy with its own weights, as opposed to the frozen model below adapters.
    pub ref_policy: bool,
    /// `true` if [`grpo_policy::Policy::mix_ref_policy`] moves the reference policy, which then keeps f32 precision.
    pub mixes_ref_policy: bool,
}

impl TrainingSizes {
    /// Returns the dtype in which [`PjrtPolicy::from_weights_with_lora`](crate::PjrtPolicy::from_weights_with_lora) holds stored
    /// weights: bf16 if all of them are stored in bf16, otherwise f32.
    pub fn frozen_dtype(weights: &grpo_models::Weights) -> grpo_models::Dtype {
        match weights.mapped_dtype() {
            grpo_models::Dtype::Bf16 => grpo_models::Dtype::Bf16,
            _ => grpo_models::Dtype::F32,
        }
    }

    /// Returns a lower bound of the memory of each device, part by part, without the compiler's temporary buffers. `rules` are the axis
    /// rules of training. Every device holds whole adapters; adapters of experts are sharded like the experts.
    ///
    /// # Errors
    /// The errors of [`saved_bytes`].
    pub fn memory(&self, config: &ModelConfig, options: &PjrtPolicyOptions, rules: &AxisRules) -> Result<MemoryTable> {
        Ok(self.memory_with(config, options, rules, saved_bytes(config, options, self.micro_batch.length)?))
    }

    /// Returns [`TrainingSizes::memory`], given the [`saved_bytes`] of a row of the micro-batch.
    pub fn memory_with(
        &self,
        config: &ModelConfig,
        options: &PjrtPolicyOptions,
        rules: &AxisRules,
        saved_bytes: u64,
    ) -> MemoryTable {
        let training = rules.clone().for_model(config);
        let rollout = options.rollout_rules.as_ref().unwrap_or(rules).clone().for_model(config);
        let state = self.state(config, options, &training);
        let of_state = state.table();
        let mut table = MemoryTable::new();
        // The gradient accumulators stay on the device between updates.
        let of_updates = of_state.phases().iter().flat_map(|(_, rows)| rows);
        of_state.rows().iter().chain(of_updates).for_each(|(part, bytes)| table.push(part.as_str(), *bytes));
        self.micro_batch.memory(config, options, &training, saved_bytes, &mut table);
        if options.can_roll_back {
            let TrainedMemory { roll_back, .. } = TrainedMemory::of(state.trained_weights(), self.optimizer);
            table.push_in("updates", "weights and moments to go back to", roll_back);
        }
        if rollout.is_sharded() && rollout != training {
            self.moved_weights(config, options, &rollout, &mut table);
        }
        self.rollout.memory(config, options, &rollout, self.micro_batch, &mut table);
        table
    }

    /// Returns the state of the training on each device.
    fn state(&self, config: &ModelConfig, options: &PjrtPolicyOptions, rules: &AxisRules) -> TrainingMemory {
        // Trained weights in bf16 have separate remainders, which only updates read.
        let dtype = match (options.compute, self.trained) {
            (Compute::Bf16, Trained::All) => grpo_models::Dtype::Bf16,
            _ => self.weights,
        };
        let [weights, words] = weights_on(config, options, rules);
        let bytes = words.saturating_mul(size_of::<u32>() as u64);
        TrainingMemory {
            weights,
            dtype,
            quantized: options.quantization.map(|quantization| QuantizedMemory { quantization, values: 0, bytes }),
            trained: self.trained_on(rules),
            optimizer: self.optimizer,
            reference: self.ref_policy.then_some(if self.mixes_ref_policy { grpo_models::Dtype::F32 } else { dtype }),
        }
    }

    /// Adds the weights on the mesh of the rollout, if it is not the mesh of training.
    fn moved_weights(
        &self,
        config: &ModelConfig,
        options: &PjrtPolicyOptions,
        rules: &AxisRules,
        table: &mut MemoryTable,
    ) {
        let [weights, words] = weights_on(config, options, rules);
        let operand = options.compute.dtype();
        let words = words.saturating_mul(size_of::<u32>() as u64);
        let bytes = weights.saturating_mul(operand.bytes() as u64).saturating_add(words);
        table.push_in("sampling", format!("weights on the mesh of the rollout ({})", operand.name()), bytes);
        if let Trained::Adapters { weights, .. } = self.trained_on(rules) {
            let bytes = weights.saturating_mul(SINGLE);
            table.push_in("sampling", "adapters on the mesh of the rollout (float32)", bytes);
        }
    }

    /// Returns the trained weights of each device.
    fn trained_on(&self, rules: &AxisRules) -> Trained {
        match self.trained {
            Trained::Adapters { weights, of_experts } => {
                let here = of_experts.div_ceil(rules.parts(Axis::Experts) as u64);
                Trained::Adapters { weights: weights.saturating_sub(of_experts) + here, of_experts: here }
            }
            Trained::All => Trained::All,
        }
    }
}

/// Returns the number of weights on each device that are not quantised, and the number of 32-bit words of codes and scales.
fn weights_on(config: &ModelConfig, options: &PjrtPolicyOptions, rules: &AxisRules) -> [u64; 2] {
    let parameters = quantized_parameters(config, options.quantization);
    [true, false].map(|is_plain| {
        let parameters = parameters.iter().filter(|p| (p.format == Format::Values) == is_plain);
        parameters.map(|p| rules.elements(p) as u64).sum()
    })
}

impl Decoder {
    /// Returns the bytes of the parameters on each device, as arguments of programs.
    pub fn parameter_bytes(&self) -> usize {
        let bytes =
            |p: &crate::decoder::Parameter| self.axis_rules().elements(p) * p.dtype(self.compute().dtype()).bytes();
        self.parameters().iter().map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{ATTENTION, Attention};
    use grpo_models::LayerSpec;
    use grpo_stablehlo::Save;

    #[test]
    fn layers_have_keys_and_values_or_states() {
        let linear = grpo_models::LinearAttention::default();
        let layers = [vec![LayerSpec::GATED_DELTA_NET; 3], vec![LayerSpec::default()]].concat();
        let config =
            ModelConfig { num_hidden_layers: 9, linear_attention: Some(linear), layers, ..ModelConfig::default() };
        let rollout = RolloutSizes {
            prompts: 4,
            longest_prompt: 64,
            num_generations: 4,
            max_completion_length: 64,
            conversations: false,
        };
        let sizes = TrainingSizes {
            micro_batch: TrainShape { rows: 1, length: 16, tokens: 16, ..TrainShape::default() },
            rollout,
            weights: grpo_models::Dtype::F32,
            trained: Trained::All,
            optimizer: OptimizerName::AdamW,
            ref_policy: false,
            mixes_ref_policy: false,
        };
        let bytes = |table: &MemoryTable, part: &str| {
            let rows = table.phases().iter().flat_map(|(_, rows)| rows);
            rows.filter(|(name, _)| name.as_str() == part).map(|(_, bytes)| *bytes).sum::<u64>()
        };
        let options = PjrtPolicyOptions::default();
        let table = sizes.memory(&config, &options, &AxisRules::default()).unwrap();
        // Two layers with attention and seven with states, of 16 sequences of 128 tokens.
        assert_eq!(bytes(&table, "keys and values"), 2 * 2 * 16 * 128 * 2 * 16 * 4);
        let of_state = linear.state() + (linear.linear_conv_kernel_dim - 1) * linear.conv_channels();
        assert_eq!(bytes(&table, "states of Gated DeltaNets"), (7 * 16 * of_state * 4) as u64);
        let mesh = grpo_stablehlo::Mesh::new("mesh", [("data", 2), ("tensor", 2)]).unwrap();
        let on_mesh = sizes.memory(&config, &options, &AxisRules::new(&mesh)).unwrap();
        for part in ["keys and values", "states of Gated DeltaNets"] {
            assert_eq!(4 * bytes(&on_mesh, part), bytes(&table, part), "{part}");
        }
        // Two devices hold the same key/value head.
        let few = ModelConfig { num_attention_heads: 8, num_key_value_heads: 2, ..ModelConfig::default() };
        let one = bytes(&sizes.memory(&few, &options, &AxisRules::default()).unwrap(), "keys and values");
        let mesh = grpo_stablehlo::Mesh::new("mesh", [("tensor", 4)]).unwrap();
        let on_mesh = sizes.memory(&few, &options, &AxisRules::new(&mesh)).unwrap();
        assert_eq!(2 * bytes(&on_mesh, "keys and values"), one);
        // A window of 30 tokens: 29 earlier tokens and 16 of a call, rounded up. The other layers have wider heads.
        let sliding = LayerSpec { sliding_window: Some(30), ..LayerSpec::default() };
        let wide = LayerSpec { head_dim: Some(24), rope: grpo_models::LayerRope::None, ..LayerSpec::default() };
        let config =
            ModelConfig { num_hidden_layers: 5, layers: vec![sliding, sliding, wide], ..ModelConfig::default() };
        let table = sizes.memory(&config, &options, &AxisRules::default()).unwrap();
        assert_eq!(bytes(&table, "keys and values"), 2 * 16 * 2 * (4 * 48 * 16 + 128 * 24) * 4);
    }

    #[test]
    fn smaller_settings_reduce_the_memory() {
        let config = ModelConfig { max_position_embeddings: 4096, ..ModelConfig::default() };
        let sizes = TrainingSizes {
            micro_batch: TrainShape { rows: 64, length: 2048, tokens: 64 * 1024, ..TrainShape::default() },
            rollout: RolloutSizes {
                prompts: 1,
                longest_prompt: 8,
                num_generations: 1,
                max_completion_length: 8,
                conversations: false,
            },
            weights: grpo_models::Dtype::F32,
            trained: Trained::All,
            optimizer: OptimizerName::AdamW,
            ref_policy: false,
            mixes_ref_policy: false,
        };
        let options = PjrtPolicyOptions::default();
        let total = sizes.memory(&config, &options, &AxisRules::default()).unwrap().total();
        // Weights, two moments, gradients; the inputs of all layers for 64 rows of 2048 tokens.
        let state = 16 * config.parameter_count();
        let carried = (4 * 2 * 64 * 2048 * config.hidden_size) as u64;
        let logits = ((64 * 1024 * config.vocab_size * 4) as u64).min(options.tiling.workspace_budget as u64);
        assert_eq!(total, state + carried + logits);
        let half = TrainingSizes { micro_batch: TrainShape { rows: 32, ..sizes.micro_batch }, ..sizes };
        assert_eq!(half.memory(&config, &options, &AxisRules::default()).unwrap().total(), total - carried / 2);
        // 12 layers in groups of 3: saved are the inputs of four groups, and of the three layers of one group.
        let deep = ModelConfig { num_hidden_layers: 12, ..config.clone() };
        let grouped = PjrtPolicyOptions { save: Save::Every(3), ..options.clone() };
        let [all, seven] =
            [&options, &grouped].map(|options| sizes.memory(&deep, options, &AxisRules::default()).unwrap().total());
        assert_eq!(all - seven, 5 * carried / 2);
        // Saved outputs of blockwise attention: as large as the inputs of the layers, and a sum per head.
        let kept = PjrtPolicyOptions { save: Save::Named(vec![ATTENTION.into()]), ..options.clone() };
        let of_heads = carried / config.head_dim() as u64;
        assert_eq!(sizes.memory(&config, &kept, &AxisRules::default()).unwrap().total(), total + carried + of_heads);
        let materialised = PjrtPolicyOptions { attention: Attention::Materialised, ..kept };
        assert_eq!(sizes.memory(&config, &materialised, &AxisRules::default()).unwrap().total(), total);
        let narrow = PjrtPolicyOptions { compute: Compute::Bf16, ..options.clone() };
        // Weights need as much as in f32: there is no second copy in bf16 for sampling.
        assert_eq!(sizes.memory(&config, &narrow, &AxisRules::default()).unwrap().total(), total - carried / 2);

        // Weights dominate here; an update holds them twice.
        let small = TrainingSizes {
            micro_batch: TrainShape { rows: 1, length: 16, tokens: 16, ..TrainShape::default() },
            ..sizes
        };
        let wide = ModelConfig { hidden_size: 1024, intermediate_size: 4096, ..config.clone() };
        let once = PjrtPolicyOptions { can_roll_back: false, ..options.clone() };
        let [twice, once] =
            [&options, &once].map(|options| small.memory(&wide, options, &AxisRules::default()).unwrap().total());
        assert_eq!(twice, 28 * wide.parameter_count());
        assert!(once < 17 * wide.parameter_count());
        // Two moments of one byte and a scale per block, and as much to go back to.
        let eight_bit = TrainingSizes { optimizer: OptimizerName::AdamW8bit, ..small };
        let count = wide.parameter_count();
        assert_eq!(
            twice - eight_bit.memory(&wide, &options, &AxisRules::default()).unwrap().total(),
            2 * (6 * count - 8 * count.div_ceil(256))
        );
        let trained = Trained::Adapters { weights: 1000, of_experts: 0 };
        let adapted = TrainingSizes { trained, weights: grpo_models::Dtype::Bf16, ..small };
        assert!(adapted.memory(&wide, &options, &AxisRules::default()).unwrap().total() < 3 * wide.parameter_count());
        // Longer sequences need a larger KV cache.
        let longer = RolloutSizes { prompts: 8, num_generations: 8, max_completion_length: 3000, ..sizes.rollout };
        let sampled = TrainingSizes { rollout: longer, ..sizes };
        assert!(sampled.memory(&config, &options, &AxisRules::default()).unwrap().total() > total);
        let compared = TrainingSizes { ref_policy: true, ..small };
        assert_eq!(
            compared.memory(&wide, &options, &AxisRules::default()).unwrap().total(),
            32 * wide.parameter_count()
        );
        // A frozen reference policy needs the compute dtype only.
        let narrow = PjrtPolicyOptions { compute: Compute::Bf16, ..options };
        assert_eq!(
            compared.memory(&wide, &narrow, &AxisRules::default()).unwrap().total(),
            30 * wide.parameter_count()
        );
        let mixed = TrainingSizes { mixes_ref_policy: true, ..compared };
        assert_eq!(mixed.memory(&wide, &narrow, &AxisRules::default()).unwrap().total(), 32 * wide.parameter_count());
        let table = compared.memory(&wide, &narrow, &AxisRules::default()).unwrap().to_string();
        for part in ["weights (bfloat16)", "remainders of weights (16 bits)", "reference policy (bfloat16)"] {
            assert!(table.contains(part), "{part}: {table}");
        }
    }
}
