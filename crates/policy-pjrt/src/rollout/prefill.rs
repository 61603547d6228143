//! Programs that prepare slots: the prefill, which computes keys and values of prompts, and the admission, which copies them to the KV
//! cache. The states of Gated DeltaNets are handled in the same way.
//!
//! Legend: L layers of a cache, P prompts, T tokens of a prompt's row, B slots, S columns of a cache, K key/value heads, D head dimension, V
//! vocabulary.

use super::cache::{CachedLayers, Columns, columns_of_prompts};
use super::decode::Window;
use super::routed::RoutedLayers;
use super::state::{CACHE, ROWS, Shape, StateValues, TABLE};
use crate::decoder::{
    Axis, Broadcast, Compute, DELTA, Decoder, DeltaStates, Layers, NextTokens, Role, Rows, put_layer, zeros,
};
use crate::error::Result;
use crate::program::program_error;
use models::Mixer;
use stablehlo::{Builder, Dtype, Module, Reducer, Save, ScatterDimensions, TensorType, Value};

/// Shape of a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Prompts {
    /// P, the number of prompts.
    pub(crate) rows: usize,
    /// T, the length of rows, padded on the right.
    pub(crate) tokens: usize,
    /// The columns of the caches to which prompts are copied.
    pub(crate) columns: Columns,
    /// `true` if the program returns the set of tokens of each prompt.
    pub(crate) seen: bool,
    /// `true` if the program returns the experts of each token.
    pub(crate) routed_experts: bool,
}

impl Prompts {
    /// Returns the type of keys, and of values, of prompts.
    fn ty(self, of: &CachedLayers, compute: Compute) -> TensorType {
        of.ty(compute, self.rows, self.columns.of(of.window).min(self.tokens))
    }
}

/// Builds the prefill program: weights, ids `[P, T]` and lengths `[P]`, both i32, to keys and values `[L, P, K, C, D]` of each cache, the first
/// C = min(S, T) columns of a row; with `seen`, also to the set of tokens `[P, V]` of each prompt; with Gated DeltaNets, also to the tensors of
/// [`DeltaStates`]; with `routed_experts`, also to the experts of all tokens, `[L, P, T, k]`, i32.
///
/// The last token of a prompt has no keys and values, and does not change states: the decode loop processes this token first, so that one
/// program computes all logits. Keys and values after a prompt are zero.
pub(crate) fn module(decoder: &Decoder, weights: Dtype, prompts: Prompts) -> Result<Module> {
    let (f, config) = (Builder::new(), decoder.config());
    let weights = decoder.declare(&f, weights);
    let ids = f.argument("ids", TensorType::new(Dtype::I32, [prompts.rows, prompts.tokens]));
    decoder.split().argument(&ids, &[Some(Axis::Batch), None]);
    let lengths = f.argument("lengths", TensorType::new(Dtype::I32, [prompts.rows]));
    let rows = Rows::of_sequences(&ids);
    let (rotaries, masks) = (decoder.rotaries(&rows.distinct_positions()), decoder.masks(&rows));
    let counts = &lengths - lengths.like(1);
    let kept = rows.positions.lt(&counts.along_first(&ids));
    let x = decoder.embed(&weights, &ids);
    let delta = DeltaStates::types(config, prompts.rows, decoder.compute());
    let positions = delta.is_some().then_some(&rows.positions);
    let constants = [rotaries.values(), vec![&kept, &counts], positions.into_iter().collect(), masks.values()].concat();
    let of_caches = CachedLayers::of(config);
    let empty = |ty: &TensorType, axes| decoder.split().constrain(&zeros(&f, ty.dtype, &ty.shape), axes);
    let empty_cache = |of: &CachedLayers| empty(&prompts.ty(of, decoder.compute()), &CACHE);
    let caches: Vec<Value> = of_caches.iter().map(empty_cache).collect();
    let states: Vec<Value> = delta.iter().flatten().map(|ty| empty(ty, &DELTA)).collect();
    let routed = RoutedLayers::of(config, prompts.routed_experts, [prompts.rows, prompts.tokens]);
    let record = routed.empty(&f);
    let carry = [&x].into_iter().chain(&caches).chain(&caches).chain(&states).chain(&record);
    let carry: Vec<&Value> = carry.collect();
    let carried =
        decoder.over_layers(&weights, &carry, &constants, Layers::Loop(Save::Carry), |spec, layer, values| {
            let mut constants = values.constants;
            let rotaries = rotaries.take(&mut constants);
            let [kept, counts, constants @ ..] = constants else { unreachable!("as many as were passed in") };
            let (positions, of_masks) = constants.split_at(positions.iter().len());
            let masks = masks.take(&mut &*of_masks);
            let [x, carried @ ..] = values.carry else { unreachable!("as many as are carried") };
            let (caches, delta) = carried.split_at(2 * of_caches.len());
            let (delta, of_experts) = delta.split_at(states.len());
            let (mut caches, mut delta) = (Window::of(caches), DeltaStates::of(delta));
            let (x, routing) = decoder.block(layer, x, None, |x| match (spec.mixer, &mut delta, positions) {
                (Mixer::GatedDeltaNet, Some(states), [positions]) => {
                    decoder.continue_delta_net(layer, x, NextTokens { positions, counts }, states, values.number)
                }
                _ => Ok(decoder.attention(spec, layer, x, rotaries.get(spec.rope), |heads| {
                    let cache = CachedLayers::position(&of_caches, config, spec);
                    let columns = prompts.columns.of(spec.sliding_window);
                    for (all, part) in
                        [(&mut caches.keys[cache], &heads.keys), (&mut caches.values[cache], &heads.values)]
                    {
                        *all = put_layer(all, values.number, &columns_of_prompts(part, kept, columns));
                    }
                    decoder.attend(heads, masks.of(spec.sliding_window), layer.get(Role::Sinks))
                })),
            })?;
            let delta = delta.iter().flat_map(DeltaStates::parts);
            let of_experts = routed.put(of_experts, values, routing.as_ref());
            Ok([&x].into_iter().chain(caches.parts()).chain(delta).cloned().chain(of_experts).collect())
        });
    let name = "rollout_prefill";
    let carried = carried.map_err(program_error(name))?;
    let (caches, delta) = carried[1..].split_at(2 * of_caches.len());
    let (delta, of_experts) = delta.split_at(states.len());
    let caches = Window::of(caches);
    let seen = prompts.seen.then(|| marks(&ids, &rows.positions.lt(&lengths.along_first(&ids)), config.vocab_size));
    let keys = caches.keys.iter().map(|keys| ("keys", keys, &CACHE[..]));
    let results = keys.chain(caches.values.iter().map(|values| ("values", values, &CACHE[..])));
    let results = results.chain(seen.iter().map(|seen| ("seen", seen, &[None, None][..])));
    let of_delta = ["delta_inputs", "delta_memory"].into_iter().zip(delta);
    let results = results.chain(of_delta.map(|(name, part)| (name, part, &DELTA[..])));
    let of_experts = of_experts.iter().map(|record| ("routed_experts", record, &[None; 4][..]));
    let results: Vec<_> = results.chain(of_experts).collect();
    results.iter().enumerate().for_each(|(index, (.., axes))| decoder.split().result(&f, index, axes));
    decoder.split().finish(f.clone(), name, results.into_iter().map(|(name, value, _)| (name, value)))
}

/// Returns the sets of tokens `[P, V]` among the ids `[P, T]` where `there` is true.
fn marks(ids: &Value, there: &Value, vocab: usize) -> Value {
    let f = ids.builder();
    let [rows, tokens] = ids.shape() else { unreachable!("ids have two dimensions") };
    let row = f.iota(0, ids.ty().clone()).reshape(&[*rows, *tokens, 1]);
    // Padding gets an id outside the vocabulary, which the scatter ignores.
    let column = there.select(ids, &ids.like(vocab as i64)).reshape(&[*rows, *tokens, 1]);
    let dimensions = ScatterDimensions {
        inserted_window_dims: vec![0, 1],
        scatter_dims_to_operand_dims: vec![0, 1],
        index_vector_dim: 2,
        ..ScatterDimensions::default()
    };
    let none = zeros(&f, Dtype::Pred, &[*rows, vocab]);
    let updates = f.splat(true, TensorType::new(Dtype::Pred, [*rows, *tokens]));
    none.scatter(&f.concatenate(&[&row, &column], 2), &updates, dimensions, Reducer::Or)
}

/// Logical axes of keys and values of prompts `[L, P, K, C, D]` where they are copied to slots: a prompt may start samples on any device.
const PROMPTS: [Option<Axis>; 5] = [None, None, Some(Axis::Kv), None, None];
/// The same of states of Gated DeltaNets.
const PROMPT_STATES: [Option<Axis>; 5] = [None, None, Some(Axis::LinearHeads), None, None];

/// Builds the admission program. Arguments: state; keys and values of prompts of each cache (and their sets of tokens, and their states); for every
/// shard of slots the number of new samples (`[N]`, i32, for N shards), and for each new sample its slot within the shard and the row of its prompt (`[B]`, i32: each
/// shard has B / N entries, and uses the first ones); for all slots whether a sample begins (`[B]`), the last token and the length of its prompt
/// (`[B]`, i32) and its random key (`[B, 2]`, u32). Result: the state.
///
/// Every device copies rows to its own slots. Whole rows of the cache are written, so nothing remains of the slot's previous sequence.
pub(crate) fn admit(decoder: &Decoder, shape: Shape, prompts: Prompts) -> Result<Module> {
    let (f, config, compute, split) = (Builder::new(), decoder.config(), decoder.compute(), decoder.split());
    let state = shape.arguments(&f, decoder);
    let caches = CachedLayers::of(config);
    let of_cache = |name| {
        let types = caches.iter().map(|of| prompts.ty(of, compute));
        types.map(|ty| f.argument(name, ty)).collect::<Vec<Value>>()
    };
    let [keys, values] = ["prompt_keys", "prompt_values"].map(of_cache);
    keys.iter().chain(&values).for_each(|part| split.argument(part, &CACHE));
    let seen_type = TensorType::new(Dtype::Pred, [prompts.rows, config.vocab_size]);
    let seen = prompts.seen.then(|| f.argument("prompt_seen", seen_type));
    let delta = DeltaStates::types(config, prompts.rows, compute).into_iter().flatten();
    let delta: Vec<Value> = ["prompt_delta_inputs", "prompt_delta_memory"]
        .into_iter()
        .zip(delta)
        .map(|(name, ty)| f.argument(name, ty))
        .collect();
    delta.iter().for_each(|part| split.argument(part, &DELTA));
    let of_slots = |dtype| TensorType::new(dtype, [shape.slots]);
    let counts = f.argument("admitted", TensorType::new(Dtype::I32, [split.parts(Axis::Batch)]));
    let slots = f.argument("slots", of_slots(Dtype::I32));
    let sources = f.argument("sources", of_slots(Dtype::I32));
    [&counts, &slots, &sources].into_iter().for_each(|list| split.argument(list, &ROWS));
    let begun = Begun::arguments(&f, shape);

    // The tensors to copy row by row: source, its axes, destination, its axes, row dimension.
    let of_caches = keys.iter().chain(&values).zip(state.keys.iter().chain(&state.values));
    let mut moves: Vec<_> = of_caches.map(|(from, to)| (from, &PROMPTS[..], to, &CACHE[..], 1)).collect();
    let of_sets = seen.iter().zip(&state.seen);
    moves.extend(of_sets.map(|(from, to)| (from, &[None, None][..], to, &TABLE[..], 0)));
    let of_states = delta.iter().zip(state.delta.iter().flat_map(DeltaStates::parts));
    moves.extend(of_states.map(|(from, to)| (from, &PROMPT_STATES[..], to, &DELTA[..], 1)));
    let lists = [&counts, &slots, &sources].map(|list| (list, &ROWS[..]));
    let from = moves.iter().map(|(from, axes, ..)| (*from, *axes));
    let to = moves.iter().map(|(_, _, to, axes, _)| (*to, *axes));
    let operands: Vec<_> = lists.into_iter().chain(from).chain(to).collect();
    let results: Vec<_> = moves.iter().map(|(_, _, _, axes, _)| *axes).collect();
    let row_dimensions: Vec<usize> = moves.iter().map(|(.., dimension)| *dimension).collect();
    let moved = split.on_shards(&f, &operands, &results, |f, shards| {
        let (lists, tensors) = shards.split_at(3);
        let (from, to) = tensors.split_at(row_dimensions.len());
        copy_rows(f, lists, from, to, &row_dimensions)
    });
    let name = "rollout_admit";
    let moved = moved.map_err(program_error(name))?;
    let (copied, others) = moved.split_at(2 * caches.len());
    let Window { keys, values } = Window::of(copied);
    let (seen, delta) = others.split_at(state.seen.iter().len());
    let (seen, delta) = (seen.first().cloned(), DeltaStates::of(delta));
    let next = begun.state(&StateValues { keys, values, seen, delta, ..state });
    split.finish(f, name, next.results())
}

/// New samples, per slot: whether one begins (`[B]`), the last token and the length of its prompt (`[B]`, i32), and its random key (`[B, 2]`, u32).
pub(super) struct Begun {
    begins: Value,
    last: Value,
    length: Value,
    random: Value,
}

impl Begun {
    /// Declares the arguments of a program.
    pub(super) fn arguments(f: &Builder, shape: Shape) -> Self {
        let of_slots = |dtype| TensorType::new(dtype, [shape.slots]);
        Self {
            begins: f.argument("begins", of_slots(Dtype::Pred)),
            last: f.argument("last", of_slots(Dtype::I32)),
            length: f.argument("length", of_slots(Dtype::I32)),
            random: f.argument("random", TensorType::new(Dtype::U32, [shape.slots, 2])),
        }
    }

    /// Returns the state with these samples, whose keys, values, sets of tokens and states of Gated DeltaNets it has.
    pub(super) fn state(&self, state: &StateValues) -> StateValues {
        let chosen = |new: &Value, old: &Value| self.begins.along_first(old).select(new, old);
        let none = |old: &Value| chosen(&zeros(&old.builder(), old.dtype(), old.shape()), old);
        StateValues {
            ids: none(&state.ids),
            logps: none(&state.logps),
            last: chosen(&self.last, &state.last),
            length: chosen(&self.length, &state.length),
            count: none(&state.count),
            ended: none(&state.ended),
            random: chosen(&self.random, &state.random),
            ..state.clone()
        }
    }
}

/// Copies rows of `from` to rows of `to` and returns `to`. `lists` are the number of copies `[1]`, and the row of `to` and of `from` of each
/// copy; `dimensions` are the dimensions of rows of each tensor.
fn copy_rows(f: &Builder, lists: &[Value], from: &[Value], to: &[Value], dimensions: &[usize]) -> Vec<Value> {
    let [count, slots, sources] = lists else { unreachable!("three lists") };
    let (zero, count) = (f.scalar(0, Dtype::I32), count.reshape(&[]));
    let carried: Vec<&Value> = std::iter::once(&zero).chain(to).collect();
    let mut copied = f.while_loop(
        &carried,
        |carried| carried[0].lt(&count),
        |carried| {
            let at = |of: &Value| of.dynamic_slice(&[&carried[0]], &[1]).reshape(&[]);
            let (slot, source) = (at(slots), at(sources));
            let rows = from.iter().zip(&carried[1..]).zip(dimensions).map(|((from, to), dimension)| {
                let index =
                    |row| (0..to.shape().len()).map(|d| if d == *dimension { row } else { &zero }).collect::<Vec<_>>();
                let mut sizes = from.shape().to_vec();
                sizes[*dimension] = 1;
                let row = from.dynamic_slice(&index(&source), &sizes);
                to.dynamic_update_slice(&widened(&row, to, *dimension), &index(&slot))
            });
            std::iter::once(&carried[0] + carried[0].like(1)).chain(rows).collect()
        },
    );
    copied.split_off(1)
}

/// Pads a row with zeros to the shape of the rows of `to`.
fn widened(row: &Value, to: &Value, dimension: usize) -> Value {
    let high: Vec<usize> = (0..to.shape().len())
        .map(|d| if d == dimension { 0 } else { to.shape()[d].saturating_sub(row.shape()[d]) })
        .collect();
    if high.iter().all(|size| *size == 0) {
        return row.clone();
    }
    let zero = zeros(&row.builder(), row.dtype(), &[]);
    row.pad(&zero, &vec![0; high.len()], &high)
}
