//! The activations that layers save for the backward pass, counted in the programs that save them.

use super::TrainShape;
use crate::decoder::{Axis, AxisRules, Decoder, ParameterValues, Role, Rows};
use crate::error::Result;
use crate::leaves::first;
use crate::modules::program_error;
use crate::pjrt_policy::PjrtPolicyOptions;
use grpo_models::ModelConfig;
use grpo_stablehlo::{Builder, Dtype, Kind, Save, TensorType, Value, try_trace};

/// Returns the bytes of the activations that all layers save for the backward pass of a row of `length` tokens, in addition to the inputs of
/// layers and of groups of layers. They are counted in the derivative of the layers of a model without adapters, on one device; all weights count as
/// trained. It is traced twice: call this once per setting and model.
///
/// ```
/// use grpo_policy_pjrt::{PjrtPolicyOptions, saved_bytes};
/// use grpo_stablehlo::Save;
///
/// let of = |save| {
///     let options = PjrtPolicyOptions { save, ..PjrtPolicyOptions::default() };
///     saved_bytes(&grpo_models::ModelConfig::default(), &options, 64)
/// };
/// assert_eq!(of(Save::Carry)?, 0);
/// assert!(of(Save::Products)? < of(Save::Everything)?);
/// # Ok::<(), grpo_policy_pjrt::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Program`] if the program of the layers cannot be built.
pub fn saved_bytes(config: &ModelConfig, options: &PjrtPolicyOptions, length: usize) -> Result<u64> {
    if let Save::Carry | Save::Every(_) = options.save {
        return Ok(0);
    }
    let decoder = Decoder::new(config, options.compute)
        .with_attention(options.attention)
        .with_expert_products(options.expert_products);
    let of = |save: &Save| stacked_bytes(&decoder, save, length).map_err(program_error("layers"));
    Ok(of(&options.save)?.saturating_sub(of(&Save::Carry)?))
}

/// Returns the bytes of saved activations on each device for a micro-batch of this shape, whose rows save `of_row` bytes each ([`saved_bytes`]), on a
/// mesh with these rules.
///
/// ```
/// use grpo_policy_pjrt::decoder::AxisRules;
/// use grpo_policy_pjrt::{TrainShape, saved_on_device};
///
/// let shape = TrainShape::uniform(6, 16, 16);
/// assert_eq!(saved_on_device(1000, shape, &AxisRules::default()), 6000);
/// // Eight rows with two empty ones: two for each of four groups of two devices, and half of a row's activations for a device.
/// let mesh = grpo_stablehlo::Mesh::new("mesh", [("fsdp", 4), ("tensor", 2)])?;
/// assert_eq!(saved_on_device(1000, shape, &AxisRules::new(&mesh)), 1000);
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
pub fn saved_on_device(of_row: u64, shape: TrainShape, rules: &AxisRules) -> u64 {
    let rows = shape.sharded(rules).rows / rules.parts(Axis::Batch);
    // Nearly all of them have heads or columns of the MLP, which have the same shards unless a rule says otherwise.
    (rows as u64).saturating_mul(of_row) / rules.parts(Axis::Mlp) as u64
}

/// Returns the bytes of everything that the forward loops over layers stack for the backward loops.
fn stacked_bytes(decoder: &Decoder, save: &Save, length: usize) -> Result<u64, grpo_stablehlo::Error> {
    let (table, model) = (decoder.parameters(), decoder.compute().dtype());
    let of_parameters = table.iter().map(|p| TensorType::new(p.dtype(model), &p.shape[..]));
    let types: Vec<TensorType> =
        std::iter::once(TensorType::new(Dtype::I32, [1, length])).chain(of_parameters).collect();
    let forward = try_trace(&types, |_, values| {
        let ([ids], parameters) = first(values);
        let weights = ParameterValues::new(table.iter().map(|p| p.id()).zip(parameters.iter().cloned()));
        Ok::<_, grpo_stablehlo::Error>(vec![decoder.residual(&weights, &Rows::of_sequences(ids), save.clone())?.0])
    })?;
    let f = Builder::new();
    let arguments: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
    let of_residual = |role: Role| role.is_of_layers() || role == Role::EmbedTokens;
    let asked: Vec<usize> = (0..table.len()).filter(|i| of_residual(table[*i].role)).map(|i| i + 1).collect();
    let (results, _) = f.vjp_unrounded(&forward, &arguments.iter().collect::<Vec<_>>(), &asked)?;
    let module = f.finish("layers", &[("residual", &results[0])])?;
    let stacks = module.main.body().operations.iter().filter_map(|operation| match &operation.kind {
        Kind::Scan(scan) => Some(&operation.results[scan.carry..]),
        _ => None,
    });
    Ok(stacks.flatten().map(|id| module.main.type_of(*id).bytes() as u64).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{ATTENTION, Attention, Compute};
    use rstest::rstest;
    use std::num::NonZeroUsize;

    const LENGTH: u64 = 32;

    /// Returns the bytes per token and layer. Sizes: H 64, I 96, A 4, K 2, D 16.
    fn of(save: Save, change: impl Fn(ModelConfig, &mut PjrtPolicyOptions) -> ModelConfig) -> u64 {
        let config = ModelConfig {
            hidden_size: 64,
            intermediate_size: 96,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            num_hidden_layers: 3,
            ..ModelConfig::default()
        };
        let attention = Attention::Blockwise { block: NonZeroUsize::new(16).unwrap() };
        let mut options = PjrtPolicyOptions { compute: Compute::Bf16, attention, save, ..PjrtPolicyOptions::default() };
        let config = change(config, &mut options);
        let all = saved_bytes(&config, &options, LENGTH as usize).unwrap();
        assert_eq!(all % (3 * LENGTH), 0);
        all / (3 * LENGTH)
    }

    /// Queries, keys and values, the output of attention's projection, gate and up.
    const PRODUCTS: u64 = (4 + 2 * 2) * 16 + 64 + 2 * 96;

    #[test]
    fn products_are_saved_once() {
        assert_eq!(of(Save::Products, |config, _| config), 2 * PRODUCTS);
        let wide = |config, options: &mut PjrtPolicyOptions| {
            options.compute = Compute::F32;
            config
        };
        assert_eq!(of(Save::Products, wide), 4 * PRODUCTS);
        let normed = |config: ModelConfig, _: &mut PjrtPolicyOptions| ModelConfig { qk_norm: true, ..config };
        assert_eq!(of(Save::Products, normed), 2 * PRODUCTS);
        // f32 scores of every pair of tokens, and the attention output.
        let pairs = |config, options: &mut PjrtPolicyOptions| {
            options.attention = Attention::Materialised;
            config
        };
        assert_eq!(of(Save::Products, pairs), 2 * PRODUCTS + 4 * 4 * LENGTH + 4 * 64);
    }

    #[test]
    fn attention_is_saved_in_the_compute_dtype_with_its_sums() {
        let saved = |change: fn(ModelConfig, &mut PjrtPolicyOptions) -> ModelConfig| {
            of(Save::Named(vec![ATTENTION.into()]), change)
        };
        assert_eq!(saved(|config, _| config), 2 * 64 + 4 * 4);
        let pairs = |config, options: &mut PjrtPolicyOptions| {
            options.attention = Attention::Materialised;
            config
        };
        assert_eq!(saved(pairs), 0);
    }

    #[rstest]
    #[case::plain(ModelConfig::default())]
    #[case::experts(grpo_models::ModelConfig { experts: Some(grpo_models::Experts::default()), ..ModelConfig::default() })]
    fn everything_is_more_than_products(#[case] config: ModelConfig) {
        let of = |save| {
            let options = PjrtPolicyOptions { save, ..PjrtPolicyOptions::default() };
            saved_bytes(&config, &options, 16).unwrap()
        };
        assert!(of(Save::Everything) > of(Save::Products) && of(Save::Products) > 0);
        assert_eq!(of(Save::Every(2)), 0);
    }
}
