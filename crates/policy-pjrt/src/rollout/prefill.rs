//! Programs that prepare slots: the prefill, which computes keys and values of prompts, and the admission, which copies them to the KV
//! cache. The states of Gated DeltaNets are handled in the same way.
//!
//! Legend: L layers of a cache, P prompts, T tokens of a prompt's row, B slots, S columns of a cache, K key/value heads, D head dimension, V
//! vocabulary with padding.

use super::cache::{CachedLayers, columns_of_prompts};
use super::columns::Columns;
use super::layers::{Carry, KvCache, empty_record};
use super::state::{Shape, SlotRows, StateValues};
use super::window::{CACHE, ROWS, TABLE, Window};
use crate::decoder::{
    Axis, Broadcast, ByWindow, Compute, DELTA, Decoder, DeltaStates, Dims, Heads, Layer, Layers, Mask, NextTokens,
    Role, Rotaries, Rows, put_layer, zeros,
};
use crate::error::Result;
use crate::leaves::{Leaves, leaves};
use crate::modules::program_error;
use grpo_stablehlo::{Builder, Dtype, Module, Reducer, Save, ScatterDimensions, TensorType, Value};

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
    fn ty(self, layers: &CachedLayers, compute: Compute) -> TensorType {
        layers.ty(compute, self.rows, self.columns.of(layers.window).min(self.tokens))
    }
}

/// The inputs of the layers of a prefill, which has no tokens in a cache.
struct PromptCache {
    rotaries: Rotaries,
    /// `true` for tokens whose keys and values are written, `[P, T]`.
    kept: Value,
    /// The number of these tokens, `[P]`, i32.
    counts: Value,
    /// The position of each token, `[P, T]`, i32, for a model with Gated DeltaNets.
    positions: Option<Value>,
    masks: ByWindow<Mask>,
    prompts: Prompts,
}

leaves!(PromptCache { rotaries, kept, counts, positions, masks }, copied: prompts);

impl KvCache for PromptCache {
    fn rotaries(&self) -> &Rotaries {
        &self.rotaries
    }

    fn next_tokens(&self) -> Option<NextTokens> {
        let positions = self.positions.clone()?;
        Some(NextTokens { positions, counts: self.counts.clone() })
    }

    fn attend(&self, decoder: &Decoder, layer: &Layer<'_>, heads: &Heads, window: &mut Window) -> Value {
        let sliding_window = layer.spec.sliding_window;
        let cache = CachedLayers::index(decoder.config(), layer.spec);
        let columns = self.prompts.columns.of(sliding_window);
        for (all, part) in [(&mut window.keys[cache], &heads.keys), (&mut window.values[cache], &heads.values)] {
            *all = put_layer(all, layer.number, &columns_of_prompts(part, &self.kept, columns));
        }
        decoder.attend(heads, self.masks.of(sliding_window), layer.parameters.get(Role::Sinks))
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
    decoder.axis_rules().argument(&ids, &[Some(Axis::Batch), None]);
    let lengths = f.argument("lengths", TensorType::new(Dtype::I32, [prompts.rows]));
    let rows = Rows::of_sequences(&ids);
    let (rotaries, masks) = (decoder.rotaries(&rows.distinct_positions()), decoder.masks(&rows));
    let counts = &lengths - lengths.like(1);
    let kept = rows.positions.lt(&counts.along_first(&ids));
    let x = decoder.embed(&weights, &ids);
    let delta = DeltaStates::types(config, prompts.rows, decoder.compute());
    let positions = delta.as_ref().map(|_| rows.positions.clone());
    let cache = PromptCache { rotaries, kept, counts, positions, masks, prompts };
    let empty = |ty: &TensorType, axes| decoder.axis_rules().constrain(&zeros(&f, ty.dtype, &ty.shape), axes);
    let caches = CachedLayers::of(config);
    let window = caches.iter().map(|layers| empty(&prompts.ty(layers, decoder.compute()), &CACHE));
    let window: Vec<Value> = window.collect();
    let window = Window { keys: window.clone(), values: window };
    let delta =
        delta.map(|[inputs, memory]| DeltaStates { inputs: empty(&inputs, &DELTA), memory: empty(&memory, &DELTA) });
    let sizes = [prompts.rows, prompts.tokens];
    let routed = prompts.routed_experts.then(|| empty_record(&f, config, sizes)).flatten();
    let carry = Carry { x, window, delta, routed };
    let carried = carry.over_layers(decoder, &weights, &cache, Layers::Loop(Save::Carry));
    let name = "rollout_prefill";
    let Carry { window, delta, routed, .. } = carried.map_err(program_error(name))?;
    let seen =
        prompts.seen.then(|| marks(&ids, &rows.positions.lt(&lengths.along_first(&ids)), decoder.logit_columns()));
    let keys = window.keys.iter().map(|keys| ("keys", keys, &CACHE[..]));
    let results = keys.chain(window.values.iter().map(|values| ("values", values, &CACHE[..])));
    let results = results.chain(seen.iter().map(|seen| ("seen", seen, &[None, None][..])));
    let delta = ["delta_inputs", "delta_memory"].into_iter().zip(delta.leaves());
    let results = results.chain(delta.map(|(name, part)| (name, part, &DELTA[..])));
    let routed = routed.iter().map(|record| ("routed_experts", record, &[None; 4][..]));
    let results: Vec<_> = results.chain(routed).collect();
    results.iter().enumerate().for_each(|(index, (.., axes))| decoder.axis_rules().result(&f, index, axes));
    decoder.axis_rules().finish(f.clone(), name, results.into_iter().map(|(name, value, _)| (name, value)))
}

/// Returns the sets of tokens `[P, V]` among the ids `[P, T]` where `is_token` is true.
fn marks(ids: &Value, is_token: &Value, vocab: usize) -> Value {
    let f = ids.builder();
    let [rows, tokens] = ids.dims();
    let row = f.iota(0, ids.ty().clone()).reshape(&[rows, tokens, 1]);
    // Padding gets an id outside the vocabulary, which the scatter ignores.
    let column = is_token.select(ids, &ids.like(vocab as i64)).reshape(&[rows, tokens, 1]);
    let dimensions = ScatterDimensions {
        inserted_window_dims: vec![0, 1],
        scatter_dims_to_operand_dims: vec![0, 1],
        index_vector_dim: 2,
        ..ScatterDimensions::default()
    };
    let none = zeros(&f, Dtype::Pred, &[rows, vocab]);
    let updates = f.splat(true, TensorType::new(Dtype::Pred, [rows, tokens]));
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
    let (f, config, compute, rules) = (Builder::new(), decoder.config(), decoder.compute(), decoder.axis_rules());
    let state = shape.arguments(&f, decoder);
    let caches = CachedLayers::of(config);
    let [keys, values] = ["prompt_keys", "prompt_values"].map(|name| {
        let types = caches.iter().map(|layers| prompts.ty(layers, compute));
        types.map(|ty| f.argument(name, ty)).collect::<Vec<Value>>()
    });
    let window = Window { keys, values };
    window.leaves().into_iter().for_each(|part| rules.argument(part, &CACHE));
    let seen_type = TensorType::new(Dtype::Pred, [prompts.rows, decoder.logit_columns()]);
    let seen = prompts.seen.then(|| f.argument("prompt_seen", seen_type));
    let delta = DeltaStates::types(config, prompts.rows, compute).map(|[inputs, memory]| DeltaStates {
        inputs: f.argument("prompt_delta_inputs", inputs),
        memory: f.argument("prompt_delta_memory", memory),
    });
    delta.leaves().into_iter().for_each(|part| rules.argument(part, &DELTA));
    let per_slot = |dtype| TensorType::new(dtype, [shape.slots]);
    let counts = f.argument("admitted", TensorType::new(Dtype::I32, [rules.parts(Axis::Batch)]));
    let slots = f.argument("slots", per_slot(Dtype::I32));
    let sources = f.argument("sources", per_slot(Dtype::I32));
    let lists = [counts, slots, sources];
    lists.iter().for_each(|list| rules.argument(list, &ROWS));
    let begun = Begun::arguments(&f, shape);

    let from = Copied { caches: window, seen, delta };
    let to = Copied { caches: state.caches, seen: state.rows.seen.clone(), delta: state.rows.delta.clone() };
    let lists_with_axes = lists.iter().map(|list| (list, &ROWS[..]));
    let from_with_axes = from.leaves().into_iter().zip(from.axes([&PROMPTS[..], &[None, None], &PROMPT_STATES]));
    let to_axes = to.axes([&CACHE[..], &TABLE, &DELTA]);
    let to_with_axes = to.leaves().into_iter().zip(to_axes.iter().copied());
    let operands: Vec<_> = lists_with_axes.chain(from_with_axes).chain(to_with_axes).collect();
    let all_operands = (lists.clone(), [from.clone(), to.clone()]);
    let moved = rules.on_shards(&f, &operands, &to_axes, |f, shards| {
        let (lists, [from, to]) = Leaves::from_leaves(&all_operands, shards);
        copy_rows(f, &lists, &from.leaves(), &to.leaves(), &to.axes([1, 0, 1]))
    });
    let name = "rollout_admit";
    let Copied { caches, seen, delta } = Copied::from_leaves(&to, &moved.map_err(program_error(name))?);
    let rows = begun.rows(&SlotRows { seen, delta, ..state.rows });
    rules.finish(f, name, StateValues { rows, caches }.results())
}

/// The tensors that an admission copies row by row.
#[derive(Clone)]
struct Copied {
    caches: Window,
    seen: Option<Value>,
    delta: Option<DeltaStates>,
}

leaves!(Copied { caches, seen, delta });

impl Copied {
    /// Returns a property of each tensor from the properties of caches, sets of tokens and states.
    fn axes<T: Copy>(&self, [caches, seen, delta]: [T; 3]) -> Vec<T> {
        let parts = [(self.caches.leaves(), caches), (self.seen.leaves(), seen), (self.delta.leaves(), delta)];
        parts.into_iter().flat_map(|(leaves, property)| vec![property; leaves.len()]).collect()
    }
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
        let per_slot = |dtype| TensorType::new(dtype, [shape.slots]);
        Self {
            begins: f.argument("begins", per_slot(Dtype::Pred)),
            last: f.argument("last", per_slot(Dtype::I32)),
            length: f.argument("length", per_slot(Dtype::I32)),
            random: f.argument("random", TensorType::new(Dtype::U32, [shape.slots, 2])),
        }
    }

    /// Returns the rows with these samples, whose sets of tokens and states of Gated DeltaNets they have.
    pub(super) fn rows(&self, state: &SlotRows) -> SlotRows {
        let chosen = |new: &Value, old: &Value| self.begins.along_first(old).select(new, old);
        let none = |old: &Value| chosen(&zeros(&old.builder(), old.dtype(), old.shape()), old);
        SlotRows {
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
fn copy_rows(
    f: &Builder,
    [count, slots, sources]: &[Value; 3],
    from: &[&Value],
    to: &[&Value],
    dimensions: &[usize],
) -> Vec<Value> {
    let (zero, count) = (f.scalar(0, Dtype::I32), count.reshape(&[]));
    let carried: Vec<&Value> = std::iter::once(&zero).chain(to.iter().copied()).collect();
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
