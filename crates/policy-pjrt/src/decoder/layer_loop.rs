//! The loop over the layers of a decoder.
//!
//! Layers may differ in their mixers, windows, rotary embeddings, heads and MLPs ([`grpo_models::ModelConfig::layers`]), and the differences repeat,
//! in some models behind first layers of another kind. An iteration of the loop therefore computes a whole period of layers, so a program has each
//! kind of layer once:
//!
//! ```text
//! for each of the F first layers, unrolled:
//!     x = layer(x)
//! for each of the (L - F) / P periods:        # weights [S (L - F) / P, ...] as [(L - F) / P, S, ...]
//!     for each of the P layers of a period, unrolled:
//!         x = layer(x)
//! for the (L - F) mod P layers of the last, incomplete period: the same
//! ```
//!
//! Legend: L layers, F first layers that do not repeat, P layers of a period, S <= P layers of a period in a stack: layers without the weights, or
//! with weights of another shape, are not in it.

use super::{Axis, Decoder, Matrix, ParameterValues, Role};
use crate::leaves::Leaves;
use grpo_models::LayerSpec;
use grpo_stablehlo::{Builder, Dtype, Result, Save, TensorType, Traced, Value, try_trace};
use std::ops::Range;

/// How a program iterates over the layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Layers {
    /// A loop; [`Save`] selects the activations that are saved for the backward pass.
    Loop(Save),
    /// Unrolled. Inside another loop, slices of stacked weights are then loop-invariant: compilers hoist them, or products read them in place.
    Unrolled,
}

/// A layer in the body of a loop over layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer<'a> {
    /// Its mixer, window, rotary embedding and heads.
    pub(crate) spec: LayerSpec,
    /// Its parameters.
    pub(crate) parameters: &'a ParameterValues,
    /// The number of the layer among the layers with the same mixer, heads and sliding window, an i32 scalar.
    pub(crate) number: &'a Value,
    place: Place,
}

/// The place of a layer among the first layers and in the period of layers.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The number of layers with experts before the layer, in its first iteration.
    router: usize,
    /// The number of first layers with the same mixer, heads and sliding window.
    before: usize,
    /// The number of layers of the period with the same mixer, heads and sliding window; 0 for first layers, which do not repeat.
    alike: usize,
    /// The number of layers of the period with experts.
    routers: usize,
}

impl Layer<'_> {
    /// Returns the number of the layer among the layers with experts, an i32 scalar.
    pub(crate) fn router(&self) -> Value {
        let Place { router, before, alike, routers } = self.place;
        let of = |count: usize| self.number.like(count as i64);
        let number = if before == 0 { self.number.clone() } else { self.number - of(before) };
        if alike == 0 { of(router) } else { (number / of(alike)) * of(routers) + of(router) }
    }
}

/// A tensor with a slice for each of some layers.
struct Stack {
    value: Value,
    /// In ascending order.
    layers: Vec<usize>,
    /// Logical axes of a slice; of the matrix, if it is quantised.
    axes: Vec<Axis>,
}

impl Stack {
    /// Returns the number of slices of these layers.
    fn count(&self, layers: Range<usize>) -> usize {
        self.layers.iter().filter(|layer| layers.contains(layer)).count()
    }

    fn has(&self, layer: usize) -> bool {
        self.layers.contains(&layer)
    }

    /// Returns the type of a slice.
    fn slice_type(&self) -> TensorType {
        TensorType::new(self.value.dtype(), &self.value.shape()[1..])
    }
}

impl Decoder {
    /// Runs all layers, in a loop or unrolled, and returns the last carry. `body` gets a layer, the results of the layer before, and the
    /// constants, which are the same for all layers; it returns the next carry. Each layer's weights are sliced from their stacks and rounded, or dequantised, to the compute dtype
    /// inside the loop body, so there is never such a copy of all weights.
    ///
    /// # Errors
    /// An operation of `body` cannot be built.
    pub(crate) fn over_layers<C: Leaves, K: Leaves>(
        &self,
        weights: &ParameterValues,
        carry: &C,
        constants: &K,
        layers: Layers,
        mut body: impl FnMut(&Layer<'_>, C, K) -> Result<C>,
    ) -> Result<C> {
        let (count, builder) = (self.config.num_hidden_layers, weights[Role::Norm].builder());
        let numbers = Stack { value: self.numbers(&builder), layers: (0..count).collect(), axes: Vec::new() };
        let (roles, stacks) = self.stacks(weights);
        let all: Vec<Stack> = std::iter::once(numbers).chain(stacks).collect();
        let mut traced = |(layer, spec): (usize, LayerSpec)| {
            let slices = all.iter().filter(|stack| stack.has(layer)).map(Stack::slice_type).collect();
            let parameters = roles.iter().copied().zip(&all[1..]).filter(|(_, stack)| stack.has(layer));
            let parameters: Vec<(Role, &Stack)> = parameters.collect();
            try_trace(&[carry.types(), slices, constants.types()].concat(), |builder, values| {
                let mut values = values.iter();
                let (carry, number) = (carry.take(&mut values), all[0].value.take(&mut values));
                let (slices, rest) = values.as_slice().split_at(parameters.len());
                let constants = K::from_leaves(constants, rest);
                let parameters = &self.layer_parameters(builder, weights, &parameters, slices);
                let layer = Layer { spec, parameters, number: &number, place: self.place(layer) };
                Ok(body(&layer, carry, constants)?.to_leaves())
            })
        };
        let (lead, period) = self.config.repetition();
        let different = (0..lead + period).map(|layer| (layer, self.config.layer(layer)));
        let bodies = different.map(&mut traced).collect::<Result<Vec<_>>>()?;
        let parts = bodies.split_at(lead);
        let (first, constants) = (carry.leaves(), constants.leaves());
        let last = match (layers, &bodies[..]) {
            (Layers::Loop(save), [body]) => {
                let all: Vec<&Value> = all.iter().map(|stack| &stack.value).collect();
                builder.scan(count, body, &first, &all, &constants, save).carry
            }
            (Layers::Loop(save), _) => over_periods(&builder, count, parts, &first, &all, &constants, &save)?,
            (Layers::Unrolled, _) => unrolled(&builder, count, parts, &first, &all, &constants),
        };
        Ok(C::from_leaves(carry, &last))
    }

    /// Returns the stacks of the layers' parameters, with their roles.
    fn stacks(&self, weights: &ParameterValues) -> (Vec<Role>, Vec<Stack>) {
        let table = self.parameters();
        let stack = |((role, number), value): ((Role, usize), &Value)| {
            let parameter = table.iter().find(|parameter| parameter.id() == (role, number))?;
            let axes = parameter.axes[1..].iter().map(|axis| axis.unpacked()).collect();
            Some((role, Stack { value: value.clone(), layers: parameter.layers.clone(), axes }))
        };
        weights.iter().filter(|((role, _), _)| role.is_of_layers()).filter_map(stack).unzip()
    }

    /// Returns the parameters of a layer in the compute dtype, given its slices of these stacks.
    fn layer_parameters(
        &self,
        builder: &Builder,
        weights: &ParameterValues,
        stacks: &[(Role, &Stack)],
        slices: &[Value],
    ) -> ParameterValues {
        let scales = |role: Role| {
            let role = Role::Scales(Matrix::of(role)?);
            stacks.iter().position(|(other, _)| *other == role).map(|at| &slices[at])
        };
        let values = stacks.iter().zip(slices).filter(|((role, _), _)| !matches!(role, Role::Scales(_)));
        let (roles, slices): (Vec<Role>, Vec<Value>) = values
            .map(|(&(role, stack), slice)| {
                let slice = match self.quantization.zip(scales(role)) {
                    Some((quantization, scales)) => self.dequantized(quantization, slice, scales),
                    None => slice.clone(),
                };
                (role, self.sharded_slice(weights, role, &stack.axes, &slice))
            })
            .unzip();
        let is_matrix = |slice: &Value| slice.shape().len() > 1;
        let converts = slices.iter().any(|slice| is_matrix(slice) && slice.dtype() != self.compute.dtype());
        let slices = match converts || self.quantization.is_some() {
            true => {
                let rounded = slices.iter().map(|slice| match is_matrix(slice) {
                    true => slice.convert(self.compute.dtype()),
                    false => slice.clone(),
                });
                let rounded: Vec<Value> = rounded.collect();
                // Without the barrier, compilers round the slice again for every product.
                builder.optimization_barrier(&rounded.iter().collect::<Vec<_>>())
            }
            false => slices,
        };
        weights.of_layer(roles.into_iter().zip(slices))
    }

    /// Constrains a layer's slice of a parameter of this role, whose dimensions in files have these logical axes, to the sharding of the
    /// parameter.
    #[track_caller]
    fn sharded_slice(&self, weights: &ParameterValues, role: Role, axes: &[Axis], slice: &Value) -> Value {
        let mut axes = axes.to_vec();
        if Matrix::of(role).is_some() && weights.summed(role) == 0 {
            axes.reverse();
        }
        self.rules.constrain(slice, &axes)
    }

    /// Returns the number of each layer among the layers with the same mixer, heads and sliding window, `[L]`, i32.
    fn numbers(&self, builder: &Builder) -> Value {
        let count = self.config.num_hidden_layers;
        let numbers = (0..count).map(|layer| self.alike(layer, 0..layer) as i64);
        builder.dense(numbers, TensorType::new(Dtype::I32, [count]))
    }

    /// Returns the place of the layer with this index, which is a first layer or in the first period.
    fn place(&self, index: usize) -> Place {
        let (lead, period) = self.config.repetition();
        let repeated = if index < lead { lead..lead } else { lead..lead + period };
        Place {
            router: self.config.routers_before(index),
            before: self.alike(index, 0..lead),
            alike: self.alike(index, repeated),
            routers: self.config.routers_before(lead + period) - self.config.routers_before(lead),
        }
    }

    /// Returns how many of these layers have the mixer, heads and sliding window of `layer`.
    fn alike(&self, layer: usize, others: Range<usize>) -> usize {
        let kind = |layer: usize| {
            let layer = self.config.layer(layer);
            (layer.mixer, self.config.heads(layer), layer.sliding_window)
        };
        others.filter(|other| kind(*other) == kind(layer)).count()
    }
}

fn type_of(value: &&Value) -> TensorType {
    value.ty().clone()
}

/// Unrolls the loop over layers, given the bodies of the first layers and of a period.
fn unrolled(
    builder: &Builder,
    count: usize,
    (lead, period): (&[Traced], &[Traced]),
    carry: &[&Value],
    stacks: &[Stack],
    constants: &[&Value],
) -> Vec<Value> {
    let mut carried: Vec<Value> = carry.iter().copied().cloned().collect();
    for layer in 0..count {
        let own = stacks.iter().filter(|stack| stack.has(layer));
        let slices: Vec<Value> = own.map(|stack| slice(&stack.value, stack.count(0..layer))).collect();
        let arguments: Vec<&Value> = carried.iter().chain(&slices).chain(constants.iter().copied()).collect();
        let body = lead.get(layer).unwrap_or_else(|| &period[(layer - lead.len()) % period.len()]);
        carried = builder.call(body, &arguments);
    }
    carried
}

/// Runs a scan of one iteration over the first layers, a scan over whole periods, and a scan of one iteration over the remaining layers.
fn over_periods(
    builder: &Builder,
    count: usize,
    (lead, bodies): (&[Traced], &[Traced]),
    carry: &[&Value],
    stacks: &[Stack],
    constants: &[&Value],
    save: &Save,
) -> Result<Vec<Value>> {
    let repeated = count - lead.len();
    let (whole, rest) = (repeated / bodies.len(), repeated % bodies.len());
    let mut carried: Vec<Value> = carry.iter().copied().cloned().collect();
    for (first, trips, bodies) in [(0, 1, lead), (lead.len(), whole, bodies), (count - rest, 1, &bodies[..rest])] {
        if trips == 0 || bodies.is_empty() {
            continue;
        }
        let layers = first..first + bodies.len();
        let own: Vec<&Stack> = stacks.iter().filter(|stack| stack.count(layers.clone()) > 0).collect();
        let group = |stack: &&Stack| grouped(&stack.value, stack.count(0..first), [trips, stack.count(layers.clone())]);
        let groups: Vec<Value> = own.iter().map(group).collect();
        let body = period(bodies, first, &carried, (&own, &groups), constants)?;
        let (carry, groups): (Vec<&Value>, Vec<&Value>) = (carried.iter().collect(), groups.iter().collect());
        carried = builder.scan(trips, &body, &carry, &groups, constants, saved(save, trips, bodies.len())).carry;
    }
    Ok(carried)
}

/// Traces the layers of a period, which begins with layer `first`, one after the other: from the carry, slices `[S, ...]` of the groups of
/// stacks, and constants, to the carry.
fn period(
    bodies: &[Traced],
    first: usize,
    carry: &[Value],
    (stacks, groups): (&[&Stack], &[Value]),
    constants: &[&Value],
) -> Result<Traced> {
    let slice_type = |group: &Value| TensorType::new(group.dtype(), &group.shape()[1..]);
    let types = carry.iter().map(|value| value.ty().clone()).chain(groups.iter().map(slice_type));
    let types: Vec<TensorType> = types.chain(constants.iter().map(type_of)).collect();
    grpo_stablehlo::trace(&types, |f, values| {
        let (carry, rest) = values.split_at(carry.len());
        let (groups, constants) = rest.split_at(groups.len());
        let mut carried = carry.to_vec();
        for (layer, body) in (first..).zip(bodies) {
            let own = stacks.iter().zip(groups).filter(|(stack, _)| stack.has(layer));
            let slices: Vec<Value> = own.map(|(stack, group)| slice(group, stack.count(first..layer))).collect();
            let arguments: Vec<&Value> = carried.iter().chain(&slices).chain(constants).collect();
            carried = f.call(body, &arguments);
        }
        carried
    })
}

/// Returns the activations that a scan over periods saves: groups of layers become groups of periods that divide their number.
fn saved(save: &Save, trips: usize, layers: usize) -> Save {
    match save {
        Save::Every(group) => {
            let periods = (1..=(group / layers).max(1)).rev().find(|periods| trips.is_multiple_of(*periods));
            Save::Every(periods.unwrap_or(1))
        }
        save => save.clone(),
    }
}

/// Returns the slices from `first` on of a stack as `[trips, S, ...]`.
fn grouped(stack: &Value, first: usize, [trips, size]: [usize; 2]) -> Value {
    let (mut start, mut limit) = (vec![0; stack.shape().len()], stack.shape().to_vec());
    (start[0], limit[0]) = (first, first + trips * size);
    let part = if first == 0 && limit == stack.shape() { stack.clone() } else { stack.slice(&start, &limit) };
    part.reshape(&[&[trips, size], &stack.shape()[1..]].concat())
}

/// Returns the slice `[...]` with this index of a stack.
fn slice(stack: &Value, index: usize) -> Value {
    let (mut start, mut limit) = (vec![0; stack.shape().len()], stack.shape().to_vec());
    (start[0], limit[0]) = (index, index + 1);
    stack.slice(&start, &limit).reshape(&stack.shape()[1..])
}

#[cfg(test)]
mod tests {
    use crate::decoder::{AxisRules, Compute, Decoder, Rows};
    use grpo_models::{LayerRope, LayerSpec, ModelConfig};
    use grpo_stablehlo::{Array, Builder, Dtype, Mesh, Module, Reducer, Save, TensorType, Value};

    /// Returns the program of the hidden states, and of the gradients of all parameters.
    fn module(layers: &[LayerSpec], count: usize, save: Save) -> Module {
        let config = ModelConfig {
            num_hidden_layers: count,
            layers: layers.to_vec(),
            hidden_size: 8,
            intermediate_size: 4,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            vocab_size: 6,
            ..ModelConfig::default()
        };
        let decoder = Decoder::new(&config, Compute::F32);
        let table = decoder.parameters();
        let types: Vec<TensorType> = table.iter().map(|p| TensorType::new(Dtype::F32, &p.shape[..])).collect();
        let loss = grpo_stablehlo::trace(&types, |f, values| {
            let weights =
                crate::decoder::ParameterValues::new(table.iter().map(|p| p.id()).zip(values.iter().cloned()));
            let ids = f.dense([1, 5, 2, 3, 0, 4], TensorType::new(Dtype::I32, [2, 3]));
            let hidden = decoder.hidden(&weights, &Rows::of_sequences(&ids), save.clone());
            let hidden = hidden.unwrap();
            let factors = f.dense((0..48).map(|i| f64::from(i % 7) - 2.5), hidden.ty().clone());
            vec![(&hidden * factors).reduce(Reducer::Add, &[0, 1, 2])]
        });
        let f = Builder::new();
        let arguments: Vec<Value> = types.iter().map(|ty| f.argument("", ty.clone())).collect();
        let arguments: Vec<&Value> = arguments.iter().collect();
        let all: Vec<usize> = (0..types.len()).collect();
        let (results, gradients) = f.value_and_grad(&loss.unwrap(), &arguments, &all).unwrap();
        let named: Vec<(&str, &Value)> = results.iter().chain(&gradients).map(|value| ("", value)).collect();
        f.finish("hidden", &named).unwrap()
    }

    fn evaluate(module: &Module) -> Vec<Vec<f64>> {
        let of = |(n, ty): (usize, &TensorType)| {
            let numbers = (0..ty.elements()).map(|i| ((i * 37 + 11 + 1000 * n) % 101) as f64 / 50.0 - 1.0);
            Array::floats(ty.dtype, &ty.shape[..], numbers).unwrap()
        };
        let types: Vec<TensorType> =
            module.main.body().arguments.iter().map(|id| module.main.type_of(*id).clone()).collect();
        let arguments: Vec<Array> = types.iter().enumerate().map(of).collect();
        module.interpret(&arguments).unwrap().iter().map(Array::to_floats).collect()
    }

    /// Six devices divide the 48 columns of the first layer's key bias, and not the 16 columns of the second layer's.
    #[test]
    fn slices_are_sharded_like_their_own_stacks() {
        let mesh = Mesh::new("mesh", [("fsdp", 3), ("tensor", 2)]).unwrap();
        let wide = LayerSpec { head_dim: Some(24), rope: LayerRope::None, ..LayerSpec::default() };
        let config = ModelConfig {
            num_hidden_layers: 2,
            layers: vec![wide, LayerSpec::default()],
            hidden_size: 48,
            intermediate_size: 48,
            num_attention_heads: 6,
            num_key_value_heads: 2,
            vocab_size: 60,
            attention_bias: true,
            ..ModelConfig::default()
        };
        let decoder = Decoder::new(&config, Compute::F32).with_axis_rules(AxisRules::new(&mesh)).unwrap();
        let f = Builder::new();
        let weights = decoder.declare(&f, Dtype::F32);
        let ids = f.argument("ids", TensorType::new(Dtype::I32, [6, 16]));
        let hidden = decoder.hidden(&weights, &Rows::of_sequences(&ids), Save::Carry).unwrap();
        f.finish("hidden", &[("hidden", &hidden)]).unwrap();
    }

    /// The same layers, as a period of one and as longer periods with and without a remainder.
    #[test]
    fn periods_of_equal_layers_match_a_loop_over_layers() {
        let [same, other] = [LayerRope::Global, LayerRope::None].map(|rope| LayerSpec {
            rope,
            sliding_window: Some(2),
            ..LayerSpec::default()
        });
        for (count, period) in [(4, 2), (5, 2), (2, 3), (7, 3)] {
            for save in [Save::Carry, Save::Every(1), Save::Everything] {
                let expected = evaluate(&module(&[same], count, save.clone()));
                let found = evaluate(&module(&vec![same; period], count, save.clone()));
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    assert!(
                        (found - expected).abs() < 1e-9 * (1.0 + expected.abs()),
                        "{count}, {period}: {found} {expected}"
                    );
                }
                let mixed = evaluate(&module(&[same, other], count, save));
                assert_ne!(mixed[0], expected[0], "layers without rotary embedding have other results");
            }
        }
    }

    /// Layers of other shapes have stacks of their own. With weights that do not depend on the layer, only the pattern of layers matters.
    #[test]
    fn layers_of_other_heads_are_in_other_stacks() {
        let plain = LayerSpec::default();
        let wide = LayerSpec { head_dim: Some(8), rope: LayerRope::None, keys_are_values: true, ..plain };
        let config = |layers: Vec<LayerSpec>, count| ModelConfig {
            num_hidden_layers: count,
            layers,
            hidden_size: 8,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            ..ModelConfig::default()
        };
        let stacks = |config: &ModelConfig| {
            let of = |p: &crate::decoder::Parameter| {
                p.name().contains("v_proj.weight") || p.name().contains("k_proj.weight")
            };
            let named = |p: crate::decoder::Parameter| (p.name().to_owned(), p.shape.clone(), p.layers.clone());
            crate::decoder::parameters(config).into_iter().filter(of).map(named).collect::<Vec<_>>()
        };
        assert_eq!(
            stacks(&config(vec![plain, wide, wide], 5)),
            [
                ("self_attn.k_proj.weight".to_owned(), vec![2, 4, 8], vec![0, 3]),
                ("self_attn.k_proj.weight.1".to_owned(), vec![3, 8, 8], vec![1, 2, 4]),
                ("self_attn.v_proj.weight".to_owned(), vec![2, 4, 8], vec![0, 3]),
            ]
        );
        // A period is repeated, and then written out.
        for count in [5, 7, 6] {
            let pattern = [plain, wide, wide];
            let all: Vec<LayerSpec> = (0..count).map(|layer| pattern[layer % 3]).collect();
            for save in [Save::Carry, Save::Every(1)] {
                let [found, expected] =
                    [pattern.to_vec(), all.clone()].map(|layers| evaluate(&module(&layers, count, save.clone())));
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    assert!((found - expected).abs() < 1e-9 * (1.0 + expected.abs()), "{count}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn first_layers_of_another_kind_are_outside_of_the_loop() {
        let [first, other] =
            [LayerRope::Global, LayerRope::None].map(|rope| LayerSpec { rope, ..LayerSpec::default() });
        let layers = |count: usize| [vec![first; 2], vec![other; count - 2]].concat();
        let size = |count| module(&layers(count), count, Save::Carry).to_string().len();
        assert!(size(12) < size(6) + size(6) / 50, "{} {}", size(12), size(6));
        // The pattern of another order is one long period.
        let period = [first, first, other, first, other, other];
        let [found, expected] = [&layers(5), &period[..5]].map(|layers| evaluate(&module(layers, 5, Save::Carry)));
        assert_ne!(found[0], expected[0]);
        // Layers that do not differ: the same function with and without first layers.
        let same = LayerSpec { sliding_window: Some(3), rope: LayerRope::None, ..LayerSpec::default() };
        let ways =
            [vec![other, same, same, same], vec![same]].map(|layers| evaluate(&module(&layers, 4, Save::Every(2))));
        for (found, expected) in ways[0].iter().flatten().zip(ways[1].iter().flatten()) {
            assert!((found - expected).abs() < 1e-9 * (1.0 + expected.abs()), "{found} {expected}");
        }
    }

    #[test]
    fn a_program_has_each_layer_of_a_period_once() {
        let layers = [LayerRope::Global, LayerRope::None].map(|rope| LayerSpec { rope, ..LayerSpec::default() });
        let size = |count| module(&layers, count, Save::Carry).to_string().len();
        assert!(size(8) < size(4) + size(4) / 50, "{} {}", size(8), size(4));
        assert!(size(5) < 2 * size(4), "the incomplete period is one more loop");
    }
}
