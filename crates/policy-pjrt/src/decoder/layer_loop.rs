//! The loop over the layers of a decoder.
//!
//! Layers may differ in their mixers, windows and rotary embeddings ([`models::ModelConfig::layers`]), and the differences repeat. An iteration
//! of the loop therefore computes a whole period of layers, so a program has each kind of layer once:
//!
//! ```text
//! for each of the L / P periods:        # weights [n L / P, ...] as [L / P, n, ...], for the n layers of a period that have them
//!     for each of the P layers of a period, unrolled:
//!         x = layer(x)
//! for the L mod P layers of the last, incomplete period: the same
//! ```
//!
//! Legend: L layers, P layers of a period.

use super::{Decoder, ParameterValues, Role};
use models::LayerSpec;
use stablehlo::{Builder, Dtype, Result, Save, TensorType, Traced, Value, try_trace};

/// How a program iterates over the layers.
#[derive(Clone, Debug, PartialEq)]
pub enum Layers {
    /// A loop; [`Save`] selects the activations that are saved for the backward pass.
    Loop(Save),
    /// Unrolled. Inside another loop, slices of stacked weights are then loop-invariant, and compilers hoist them.
    Unrolled,
}

/// The inputs of the body of a loop over layers, apart from the layer's parameters.
#[derive(Clone, Copy, Debug)]
pub struct LayerValues<'a> {
    /// The results of the layer before.
    pub carry: &'a [Value],
    /// The number of the layer among the layers with the same mixer, an i32 scalar.
    pub number: &'a Value,
    /// Inputs that are the same for all layers.
    pub constants: &'a [Value],
}

/// A layer of a period.
struct Layer {
    /// From the carry, slices of stacks and constants to the carry.
    body: Traced,
    /// The indices of the stacks of which the layer gets slices.
    stacks: Vec<usize>,
}

impl Decoder {
    /// Runs all layers, in a loop or unrolled, and returns the last carry. `body` gets the specification of a layer, its parameters and
    /// [`LayerValues`]; it returns the next carry. Each layer's weights are sliced from their stacks and rounded to the compute dtype inside
    /// the loop body, so there is never a rounded copy of all weights.
    ///
    /// # Errors
    /// An operation of `body` cannot be built.
    pub fn over_layers(
        &self,
        weights: &ParameterValues,
        carry: &[&Value],
        constants: &[&Value],
        layers: Layers,
        mut body: impl FnMut(LayerSpec, &ParameterValues, &LayerValues<'_>) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let (count, builder) = (self.config.num_hidden_layers, weights[Role::Norm].builder());
        // Matrices of experts are stacked as `[L E, ...]`.
        let table = self.parameters();
        let by_layer = |role: Role, stack: &Value| {
            let is_apart = table.iter().any(|parameter| parameter.role == role && parameter.has_experts_apart());
            match stack.shape() {
                [first, rest @ ..] if is_apart => stack.reshape(&[&[count, first / count], rest].concat()),
                _ => stack.clone(),
            }
        };
        let stacks = weights.iter().filter(|(role, _)| role.is_of_layers());
        let (roles, stacks): (Vec<Role>, Vec<Value>) =
            stacks.map(|(role, stack)| (role, by_layer(role, stack))).unzip();
        let numbers = self.numbers(&builder);
        let xs: Vec<&Value> = std::iter::once(&numbers).chain(&stacks).collect();
        let slice = |stack: &&Value| TensorType::new(stack.dtype(), &stack.shape()[1..]);
        let mut of_layer = |spec: LayerSpec| {
            let has = |role: &Role| role.mixer().is_none_or(|mixer| mixer == spec.mixer);
            let own: Vec<usize> = (0..roles.len()).filter(|index| has(&roles[*index])).collect();
            let stacks: Vec<usize> = std::iter::once(0).chain(own.iter().map(|index| index + 1)).collect();
            let slices = stacks.iter().map(|index| slice(&xs[*index]));
            let types = carry.iter().map(type_of).chain(slices).chain(constants.iter().map(type_of));
            let types: Vec<TensorType> = types.collect();
            let body = try_trace(&types, |builder, values| {
                let (carry, rest) = values.split_at(carry.len());
                let [number, rest @ ..] = rest else { unreachable!("a layer has a number") };
                let (slices, constants) = rest.split_at(own.len());
                let of_roles = own.iter().map(|index| roles[*index]);
                let slices: Vec<Value> =
                    of_roles.clone().zip(slices).map(|(role, slice)| self.split_slice(weights, role, slice)).collect();
                let matrix = |slice: &Value| slice.shape().len() > 1;
                let slices = match slices.iter().any(|slice| matrix(slice) && slice.dtype() != self.compute.dtype()) {
                    true => {
                        let of_products = |slice: &Value| {
                            if matrix(slice) { slice.convert(self.compute.dtype()) } else { slice.clone() }
                        };
                        let rounded: Vec<Value> = slices.iter().map(of_products).collect();
                        // Without the barrier, compilers round the slice again for every product.
                        builder.optimization_barrier(&rounded.iter().collect::<Vec<_>>())
                    }
                    false => slices,
                };
                let of_layer = weights.of_layer(of_roles.zip(slices));
                body(spec, &of_layer, &LayerValues { carry, number, constants })
            })?;
            Ok(Layer { body, stacks })
        };
        let period = self.config.period().into_iter().map(&mut of_layer).collect::<Result<Vec<_>>>()?;
        match (layers, &period[..]) {
            (Layers::Loop(save), [layer]) => Ok(builder.scan(count, &layer.body, carry, &xs, constants, save).carry),
            (Layers::Loop(save), period) => over_periods(&builder, count, period, carry, &xs, constants, &save),
            (Layers::Unrolled, period) => Ok(unrolled(&builder, count, period, carry, &xs, constants)),
        }
    }

    /// Returns the number of each layer among the layers with the same mixer, `[L]`, i32.
    fn numbers(&self, builder: &Builder) -> Value {
        let (config, count) = (&self.config, self.config.num_hidden_layers);
        let before = |layer: usize| (0..layer).filter(|i| config.layer(*i).mixer == config.layer(layer).mixer).count();
        builder.dense((0..count).map(|layer| before(layer) as i64), TensorType::new(Dtype::I32, [count]))
    }
}

fn type_of(value: &&Value) -> TensorType {
    value.ty().clone()
}

/// Returns the number of the first `layers` layers that get slices of a stack. Layer i is layer i modulo P of a period.
fn layers_with(stack: usize, period: &[Layer], layers: usize) -> usize {
    let of_period = |layers: usize| period[..layers].iter().filter(|layer| layer.stacks.contains(&stack)).count();
    layers / period.len() * of_period(period.len()) + of_period(layers % period.len())
}

/// Unrolls the loop over layers.
fn unrolled(
    builder: &Builder,
    count: usize,
    period: &[Layer],
    carry: &[&Value],
    xs: &[&Value],
    constants: &[&Value],
) -> Vec<Value> {
    let mut carried: Vec<Value> = carry.iter().copied().cloned().collect();
    for index in 0..count {
        let layer = &period[index % period.len()];
        let slices: Vec<Value> =
            layer.stacks.iter().map(|stack| slice(xs[*stack], layers_with(*stack, period, index))).collect();
        let arguments: Vec<&Value> = carried.iter().chain(&slices).chain(constants.iter().copied()).collect();
        carried = builder.call(&layer.body, &arguments);
    }
    carried
}

/// Runs a scan over whole periods, then a scan of one iteration over the remaining layers.
fn over_periods(
    builder: &Builder,
    count: usize,
    period: &[Layer],
    carry: &[&Value],
    xs: &[&Value],
    constants: &[&Value],
    save: &Save,
) -> Result<Vec<Value>> {
    let (whole, rest) = (count / period.len(), count % period.len());
    let mut carried: Vec<Value> = carry.iter().copied().cloned().collect();
    for (first, trips, layers) in [(0, whole, period), (count - rest, 1, &period[..rest])] {
        if trips == 0 || layers.is_empty() {
            continue;
        }
        let used = (0..xs.len()).filter(|stack| layers_with(*stack, layers, layers.len()) > 0);
        let groups: Vec<(usize, Value)> = used
            .map(|stack| {
                let (before, of_each) = (layers_with(stack, period, first), layers_with(stack, layers, layers.len()));
                (stack, grouped(xs[stack], before, [trips, of_each]))
            })
            .collect();
        let body = of_period(layers, &carried, &groups, constants)?;
        let (carry, groups): (Vec<&Value>, Vec<&Value>) =
            (carried.iter().collect(), groups.iter().map(|(_, group)| group).collect());
        carried = builder.scan(trips, &body, &carry, &groups, constants, saved(save, trips, layers.len())).carry;
    }
    Ok(carried)
}

/// Traces the layers of a period one after the other: from the carry, slices `[n, ...]` of the groups of stacks, and constants, to the carry.
fn of_period(layers: &[Layer], carry: &[Value], groups: &[(usize, Value)], constants: &[&Value]) -> Result<Traced> {
    let of_group = |(_, group): &(usize, Value)| TensorType::new(group.dtype(), &group.shape()[1..]);
    let types = carry.iter().map(|value| value.ty().clone()).chain(groups.iter().map(of_group));
    let types: Vec<TensorType> = types.chain(constants.iter().map(type_of)).collect();
    stablehlo::trace(&types, |f, values| {
        let (carry, rest) = values.split_at(carry.len());
        let (slices, constants) = rest.split_at(groups.len());
        let mut carried = carry.to_vec();
        for (index, layer) in layers.iter().enumerate() {
            let of_layer = groups.iter().zip(slices).filter(|((stack, _), _)| layer.stacks.contains(stack));
            let own: Vec<Value> =
                of_layer.map(|((stack, _), group)| slice(group, layers_with(*stack, layers, index))).collect();
            let arguments: Vec<&Value> = carried.iter().chain(&own).chain(constants).collect();
            carried = f.call(&layer.body, &arguments);
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

/// Returns the slices from `first` on of a stack as `[trips, n, ...]`.
fn grouped(stack: &Value, first: usize, [trips, size]: [usize; 2]) -> Value {
    let (mut start, mut limit) = (vec![0; stack.shape().len()], stack.shape().to_vec());
    (start[0], limit[0]) = (first, first + trips * size);
    let part = if first == 0 && limit == stack.shape() { stack.clone() } else { stack.slice(&start, &limit) };
    part.reshape(&[&[trips, size], &stack.shape()[1..]].concat())
}

/// Returns slice `index` `[...]` of a stack `[n, ...]`.
fn slice(stack: &Value, index: usize) -> Value {
    let (mut start, mut limit) = (vec![0; stack.shape().len()], stack.shape().to_vec());
    (start[0], limit[0]) = (index, index + 1);
    stack.slice(&start, &limit).reshape(&stack.shape()[1..])
}

#[cfg(test)]
mod tests {
    use crate::decoder::{Compute, Decoder, Rows};
    use models::{LayerRope, LayerSpec, ModelConfig};
    use stablehlo::{Array, Builder, Dtype, Module, Reducer, Save, TensorType, Value};

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
        let loss = stablehlo::trace(&types, |f, values| {
            let weights =
                crate::decoder::ParameterValues::new(table.iter().map(|p| p.role).zip(values.iter().cloned()));
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

    #[test]
    fn a_program_has_each_layer_of_a_period_once() {
        let layers = [LayerRope::Global, LayerRope::None].map(|rope| LayerSpec { rope, ..LayerSpec::default() });
        let size = |count| module(&layers, count, Save::Carry).to_string().len();
        assert!(size(8) < size(4) + size(4) / 50, "{} {}", size(8), size(4));
        assert!(size(5) < 2 * size(4), "the incomplete period is one more loop");
    }
}
