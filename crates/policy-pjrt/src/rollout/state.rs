//! The state that the programs of a rollout pass on.
//!
//! Legend: L layers of a cache, B slots, S columns of the cache, K key/value heads, D head dimension, M tokens of a completion, V vocabulary.

use super::cache::{CachedLayers, Columns};
use crate::DeviceTensor;
use crate::decoder::{Axis, Compute, DELTA, Decoder, DeltaStates, zeros};
use crate::error::{Error, Result};
use crate::program::unnamed;
use crate::runtime::Runtime;
use models::ModelConfig;
use stablehlo::{Builder, Dtype, Module, TensorType, Value};

/// Shape of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// B, the number of sequences that decode concurrently.
    pub(crate) slots: usize,
    /// S of each cache.
    pub(crate) columns: Columns,
    /// M, the largest number of tokens of a completion.
    pub(crate) tokens: usize,
    /// `true` if the state has the set of tokens of each sequence, for the repetition penalty.
    pub(crate) seen: bool,
}

/// Logical axes of keys and values `[L, B, K, S, D]`. Columns are never sharded, even if the tokens of rows are.
pub(crate) const CACHE: [Option<Axis>; 5] = [None, Some(Axis::Batch), Some(Axis::Kv), None, None];

/// Logical axes of a tensor with one element per slot, `[B]`.
pub(crate) const ROWS: [Option<Axis>; 1] = [Some(Axis::Batch)];

/// The tensors of a state, in the order of a program's arguments and results: keys and values are the last ones.
#[derive(Clone, Debug)]
pub(crate) struct StateValues {
    /// Keys and values `[L, B, K, S, D]` of each of [`CachedLayers::of`].
    pub(crate) keys: Vec<Value>,
    pub(crate) values: Vec<Value>,
    /// Tokens of the completions, `[B, M]`, i32.
    pub(crate) ids: Value,
    /// Their log-probabilities, `[B, M]`, f32.
    pub(crate) logps: Value,
    /// Last token of each sequence, which has no keys and values yet: `[B]`, i32.
    pub(crate) last: Value,
    /// Number of tokens of each sequence, prompt and completion together: `[B]`, i32, at least 1.
    pub(crate) length: Value,
    /// Number of tokens of each completion: `[B]`, i32.
    pub(crate) count: Value,
    /// Finished sequences and empty slots: `[B]`.
    pub(crate) ended: Value,
    /// Random keys: `[B, 2]`, u32.
    pub(crate) random: Value,
    /// The set of tokens of each sequence: `[B, V]`.
    pub(crate) seen: Option<Value>,
    /// The states of Gated DeltaNets after all tokens with keys and values, if the model has them.
    pub(crate) delta: Option<DeltaStates>,
}

/// Name, type and logical axes of a tensor of the state.
type Part = (&'static str, TensorType, &'static [Option<Axis>]);

/// Logical axes of a tensor with a row per slot, `[B, ...]`.
pub(super) const TABLE: [Option<Axis>; 2] = [Some(Axis::Batch), None];

impl Shape {
    /// Returns every tensor.
    fn parts(self, config: &ModelConfig, compute: Compute) -> Vec<Part> {
        let Self { slots, columns, tokens, seen } = self;
        let caches = CachedLayers::of(config);
        let row = |name, dtype| (name, TensorType::new(dtype, [slots]), &ROWS[..]);
        let table = |name, dtype, columns| (name, TensorType::new(dtype, [slots, columns]), &TABLE[..]);
        let mut parts = vec![
            table("ids", Dtype::I32, tokens),
            table("logps", Dtype::F32, tokens),
            row("last", Dtype::I32),
            row("length", Dtype::I32),
            row("count", Dtype::I32),
            row("ended", Dtype::Pred),
            table("random", Dtype::U32, 2),
        ];
        parts.extend(seen.then(|| table("seen", Dtype::Pred, config.vocab_size)));
        let delta = DeltaStates::types(config, slots, compute).into_iter().flatten();
        parts.extend(["delta_inputs", "delta_memory"].into_iter().zip(delta).map(|(name, ty)| (name, ty, &DELTA[..])));
        let ty = |of: &CachedLayers| of.ty(compute, slots, columns.of(of.window));
        let of_caches = |name| caches.iter().map(move |of| (name, ty(of), &CACHE[..]));
        parts.extend(["keys", "values"].into_iter().flat_map(of_caches));
        parts
    }

    /// Creates the state from the values of [`Shape::parts`].
    fn state(self, parts: impl Iterator<Item = Value>, config: &ModelConfig) -> StateValues {
        let has_delta = config.linear_attention.is_some();
        StateValues::new(parts, self.seen, has_delta, CachedLayers::of(config).len())
    }

    /// Declares a state as the next arguments of a program. The program's first results are the next state, in the same buffers.
    pub(crate) fn arguments(self, f: &Builder, decoder: &Decoder) -> StateValues {
        let parts = self.parts(decoder.config(), decoder.compute()).into_iter().enumerate();
        let parts = parts.map(|(index, (name, ty, axes))| {
            let argument = f.argument(name, ty);
            f.alias(&argument, index);
            decoder.split().argument(&argument, axes);
            decoder.split().result(f, index, axes);
            argument
        });
        self.state(parts, decoder.config())
    }

    /// Builds the program without arguments that returns a state of empty slots.
    pub(crate) fn empty(self, decoder: &Decoder) -> Result<Module> {
        let f = Builder::new();
        let split = decoder.split();
        let parts = self.parts(decoder.config(), decoder.compute()).into_iter().enumerate();
        let parts = parts.map(|(index, (name, ty, axes))| {
            split.result(&f, index, axes);
            match name {
                "ended" => f.splat(true, ty),
                "length" => f.splat(1, ty),
                _ => zeros(&f, ty.dtype, &ty.shape),
            }
        });
        let state = self.state(parts, decoder.config());
        split.finish(f, "rollout_empty", state.results())
    }
}

impl StateValues {
    /// Creates the state from its tensors, in the order of [`Shape::parts`]. `has_seen` and `has_delta` are `true` if there are sets of tokens and
    /// states of Gated DeltaNets; `caches` is the number of caches of keys and values.
    fn new(mut parts: impl Iterator<Item = Value>, has_seen: bool, has_delta: bool, caches: usize) -> Self {
        let mut next = || parts.next().unwrap_or_else(|| unreachable!("as many tensors as `Shape::parts` lists"));
        let [ids, logps, last, length, count, ended, random] = std::array::from_fn(|_| next());
        let seen = has_seen.then(&mut next);
        let delta = has_delta.then(|| DeltaStates { inputs: next(), memory: next() });
        let [keys, values] = [(); 2].map(|()| (0..caches).map(|_| next()).collect());
        Self { keys, values, ids, logps, last, length, count, ended, random, seen, delta }
    }

    /// Returns the tensors in order.
    pub(crate) fn parts(&self) -> Vec<&Value> {
        self.rows().into_iter().chain(&self.keys).chain(&self.values).collect()
    }

    /// Returns the tensors without keys and values.
    pub(crate) fn rows(&self) -> Vec<&Value> {
        let Self { ids, logps, last, length, count, ended, random, seen, delta, .. } = self;
        let all = [ids, logps, last, length, count, ended, random];
        all.into_iter().chain(seen).chain(delta.iter().flat_map(DeltaStates::parts)).collect()
    }

    /// Returns a state with the same keys and values and other tensors, in the order of [`StateValues::rows`].
    pub(crate) fn with_rows(&self, rows: &[Value]) -> Self {
        let (keys, values) = (self.keys.clone(), self.values.clone());
        let rows = rows.iter().cloned();
        Self { keys, values, ..Self::new(rows, self.seen.is_some(), self.delta.is_some(), 0) }
    }

    /// Returns the results of a program that returns this state.
    pub(crate) fn results(&self) -> impl Iterator<Item = (&str, &Value)> {
        unnamed(self.parts())
    }
}

/// A state on the devices.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) shape: Shape,
    pub(crate) tensors: Vec<DeviceTensor>,
}

impl State {
    fn part<T: pjrt::Element>(&self, runtime: &Runtime, index: usize, what: &str) -> Result<Vec<T>> {
        let nothing = pjrt::Error::Nothing { operation: "PJRT_LoadedExecutable_Execute" };
        let tensor = self.tensors.get(index).ok_or(nothing).map_err(Error::device("reading a rollout's state"))?;
        runtime.read(tensor, what)
    }

    /// Reads the ids `[B, M]`.
    pub(crate) fn ids(&self, runtime: &Runtime) -> Result<Vec<i32>> {
        self.part(runtime, 0, "ids of completions")
    }

    /// Reads the log-probabilities `[B, M]`.
    pub(crate) fn logps(&self, runtime: &Runtime) -> Result<Vec<f32>> {
        self.part(runtime, 1, "log-probabilities of completions")
    }

    /// Reads the numbers of tokens of the completions, `[B]`.
    pub(crate) fn counts(&self, runtime: &Runtime) -> Result<Vec<i32>> {
        self.part(runtime, 4, "lengths of completions")
    }

    /// Reads which slots are finished or empty, `[B]`.
    pub(crate) fn ended(&self, runtime: &Runtime) -> Result<Vec<bool>> {
        self.part(runtime, 5, "ends of completions")
    }
}
