//! The state that the programs of a rollout pass on.
//!
//! Legend: L layers, B slots, S columns of the cache, K key/value heads, D head dimension, M tokens of a completion, V vocabulary.

use crate::DeviceTensor;
use crate::decoder::{Axis, Compute, Decoder, zeros};
use crate::error::{Error, Result};
use crate::program::unnamed;
use crate::runtime::Runtime;
use models::{AttentionHeads, ModelConfig};
use stablehlo::{Builder, Dtype, Module, TensorType, Value};

/// Shape of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// B, the number of sequences that decode concurrently.
    pub(crate) slots: usize,
    /// S, the number of tokens of a sequence with keys and values.
    pub(crate) columns: usize,
    /// M, the largest number of tokens of a completion.
    pub(crate) tokens: usize,
    /// `true` if the state has the set of tokens of each sequence, for the repetition penalty.
    pub(crate) seen: bool,
}

/// Logical axes of keys and values `[L, B, K, S, D]`. Columns are never sharded, even if the tokens of rows are.
pub(crate) const CACHE: [Option<Axis>; 5] = [None, Some(Axis::Batch), Some(Axis::Kv), None, None];

/// Logical axes of a tensor with one element per slot, `[B]`.
pub(crate) const ROWS: [Option<Axis>; 1] = [Some(Axis::Batch)];

/// Layers whose keys and values have the same shape, and therefore one cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CachedLayers {
    /// K.
    pub(super) key_value: usize,
    /// D.
    pub(super) width: usize,
    pub(super) layers: Vec<usize>,
}

impl CachedLayers {
    /// Returns the caches of a model, in the order of the first layer of each.
    pub(super) fn of(config: &ModelConfig) -> Vec<Self> {
        let mut caches: Vec<Self> = Vec::new();
        for (layer, AttentionHeads { key_value, width, .. }) in config.heads_of_layers().enumerate() {
            match caches.iter_mut().find(|cache| (cache.key_value, cache.width) == (key_value, width)) {
                Some(cache) => cache.layers.push(layer),
                None => caches.push(Self { key_value, width, layers: vec![layer] }),
            }
        }
        caches
    }

    /// Returns the index of the cache of layers with these heads.
    pub(super) fn position(caches: &[Self], heads: AttentionHeads) -> usize {
        let is_own = |cache: &Self| (cache.key_value, cache.width) == (heads.key_value, heads.width);
        caches.iter().position(is_own).unwrap_or_else(|| unreachable!("every layer has a cache"))
    }

    /// Returns the index of each layer in its cache, `[L]`, i32.
    pub(super) fn indices(f: &Builder, config: &ModelConfig) -> Value {
        let caches = Self::of(config);
        let index = |layer: usize| caches.iter().find_map(|cache| cache.layers.iter().position(|own| *own == layer));
        let indices = (0..config.num_hidden_layers).map(|layer| index(layer).unwrap_or(0) as i64);
        f.dense(indices, TensorType::new(Dtype::I32, [config.num_hidden_layers]))
    }
}

/// The tensors of a state, in the order of a program's arguments and results.
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
}

impl Shape {
    /// Returns name and type of every tensor.
    fn parts(self, config: &ModelConfig, compute: Compute) -> Vec<(&'static str, TensorType)> {
        let Self { slots, columns, tokens, seen } = self;
        let cache = |of: &CachedLayers| {
            TensorType::new(compute.dtype(), [of.layers.len(), slots, of.key_value, columns, of.width])
        };
        let caches = CachedLayers::of(config);
        let row = |dtype| TensorType::new(dtype, [slots]);
        let mut parts = vec![
            ("ids", TensorType::new(Dtype::I32, [slots, tokens])),
            ("logps", TensorType::new(Dtype::F32, [slots, tokens])),
            ("last", row(Dtype::I32)),
            ("length", row(Dtype::I32)),
            ("count", row(Dtype::I32)),
            ("ended", row(Dtype::Pred)),
            ("random", TensorType::new(Dtype::U32, [slots, 2])),
        ];
        if seen {
            parts.push(("seen", TensorType::new(Dtype::Pred, [slots, config.vocab_size])));
        }
        parts.extend(["keys", "values"].into_iter().flat_map(|name| caches.iter().map(move |of| (name, cache(of)))));
        parts
    }

    /// Declares a state as the next arguments of a program. The program's first results are the next state, in the same buffers.
    pub(crate) fn arguments(self, f: &Builder, decoder: &Decoder) -> StateValues {
        let parts =
            self.parts(decoder.config(), decoder.compute()).into_iter().enumerate().map(|(index, (name, ty))| {
                let argument = f.argument(name, ty);
                f.alias(&argument, index);
                let dimensions = dimensions(&argument);
                decoder.split().argument(&argument, dimensions);
                decoder.split().result(f, index, dimensions);
                argument
            });
        StateValues::new(parts.collect(), self.seen)
    }

    /// Builds the program without arguments that returns a state of empty slots.
    pub(crate) fn empty(self, decoder: &Decoder) -> Result<Module> {
        let f = Builder::new();
        let parts = self.parts(decoder.config(), decoder.compute()).into_iter().map(|(name, ty)| match name {
            "ended" => f.splat(true, ty),
            "length" => f.splat(1, ty),
            _ => zeros(&f, ty.dtype, &ty.shape),
        });
        let state = StateValues::new(parts.collect(), self.seen);
        let split = decoder.split();
        state.parts().into_iter().enumerate().for_each(|(index, part)| split.result(&f, index, dimensions(part)));
        split.finish(f, "rollout_empty", state.results())
    }
}

/// Returns the logical axes of a tensor of the state.
pub(super) fn dimensions(part: &Value) -> &'static [Option<Axis>] {
    match part.shape().len() {
        5 => &CACHE,
        1 => &ROWS,
        _ => &[Some(Axis::Batch), None],
    }
}

impl StateValues {
    /// Creates the state from its tensors in order; `seen` is `true` if there are sets of tokens.
    pub(crate) fn new(parts: Vec<Value>, seen: bool) -> Self {
        let mut parts = parts.into_iter();
        let mut next = || parts.next().unwrap_or_else(|| unreachable!("a state has seven parts or eight, and caches"));
        let [ids, logps, last, length, count, ended, random] = std::array::from_fn(|_| next());
        let seen = seen.then(next);
        let mut keys: Vec<Value> = parts.collect();
        let values = keys.split_off(keys.len() / 2);
        Self { keys, values, ids, logps, last, length, count, ended, random, seen }
    }

    /// Returns the tensors in order.
    pub(crate) fn parts(&self) -> Vec<&Value> {
        let Self { keys, values, ids, logps, last, length, count, ended, random, seen } = self;
        let all = [ids, logps, last, length, count, ended, random];
        all.into_iter().chain(seen).chain(keys).chain(values).collect()
    }

    /// Returns the tensors without keys and values.
    pub(crate) fn rows(&self) -> Vec<&Value> {
        let mut parts = self.parts();
        parts.truncate(parts.len() - self.keys.len() - self.values.len());
        parts
    }

    /// Returns a state with the same keys and values and other tensors, in the order of [`StateValues::rows`].
    pub(crate) fn with_rows(&self, rows: &[Value]) -> Self {
        Self::new(rows.iter().chain(&self.keys).chain(&self.values).cloned().collect(), self.seen.is_some())
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
