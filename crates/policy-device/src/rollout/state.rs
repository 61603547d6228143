//! What a rollout carries from program to program.
//!
//! Legend: L layers, B slots, S columns of the cache, K key/value heads, D width of a head, M tokens of a completion, V vocabulary.

use crate::decoder::{Axis, Compute, Decoder, zeros};
use crate::error::{Error, Result};
use crate::runtime::{finish, read};
use models::ModelConfig;
use pjrt::Buffer;
use stablehlo::{Builder, Dtype, Module, TensorType, Value};

/// The sizes of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// B, the number of sequences that decode side by side.
    pub(crate) slots: usize,
    /// S, the number of tokens of a sequence that have keys and values.
    pub(crate) columns: usize,
    /// M, the largest number of tokens of a completion.
    pub(crate) tokens: usize,
    /// Whether the tokens that a sequence has already are marked, for the repetition penalty.
    pub(crate) seen: bool,
}

/// What the dimensions of keys and values `[L, B, K, S, D]` count. Columns are whole, also where the tokens of rows are not.
pub(crate) const CACHE: [Option<Axis>; 5] = [None, Some(Axis::Batch), Some(Axis::Kv), None, None];

/// The parts of a state, in the order in which programs take and return them.
#[derive(Clone, Debug)]
pub(crate) struct StateValues {
    /// Keys and values `[L, B, K, S, D]`; zeros behind what a sequence has.
    pub(crate) keys: Value,
    pub(crate) values: Value,
    /// The tokens of the completions, `[B, M]`, i32.
    pub(crate) ids: Value,
    /// Their log-probabilities, `[B, M]`, f32.
    pub(crate) logps: Value,
    /// The last token of each sequence, which has no keys and values yet: `[B]`, i32.
    pub(crate) last: Value,
    /// The number of tokens of each sequence, prompt and completion together: `[B]`, i32, at least 1.
    pub(crate) length: Value,
    /// The number of tokens of each completion: `[B]`, i32.
    pub(crate) count: Value,
    /// Whether nothing is to be added: `[B]`. An empty slot has ended, too.
    pub(crate) ended: Value,
    /// The keys of the random numbers: `[B, 2]`, u32.
    pub(crate) random: Value,
    /// The tokens that each sequence has already: `[B, V]`.
    pub(crate) seen: Option<Value>,
}

impl Shape {
    /// Name and type of every part.
    fn parts(self, config: &ModelConfig, compute: Compute) -> Vec<(&'static str, TensorType)> {
        let Self { slots, columns, tokens, seen } = self;
        let cache = [config.num_hidden_layers, slots, config.num_key_value_heads, columns, config.head_dim()];
        let cache = TensorType::new(compute.dtype(), cache);
        let row = |dtype| TensorType::new(dtype, [slots]);
        let mut parts = vec![
            ("keys", cache.clone()),
            ("values", cache),
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
        parts
    }

    /// Declares a state as the next arguments of a program, which returns the next state as its first results, in the same memory.
    pub(crate) fn arguments(self, f: &Builder, decoder: &Decoder) -> StateValues {
        let parts =
            self.parts(decoder.config(), decoder.compute()).into_iter().enumerate().map(|(index, (name, ty))| {
                let argument = f.argument(name, ty);
                f.alias(&argument, index);
                let dimensions = match argument.shape().len() {
                    5 => &CACHE[..],
                    _ => &[Some(Axis::Batch), None][..argument.shape().len()],
                };
                decoder.split().named_argument(&argument, dimensions);
                decoder.split().named_result(f, index, dimensions);
                argument
            });
        StateValues::new(parts.collect())
    }

    /// The program without arguments that makes a state of empty slots.
    pub(crate) fn empty(self, config: &ModelConfig, compute: Compute) -> Result<Module> {
        let f = Builder::new();
        let parts = self.parts(config, compute).into_iter().map(|(name, ty)| match name {
            "ended" => f.splat(true, ty),
            "length" => f.splat(1, ty),
            _ => zeros(&f, ty.dtype, &ty.shape),
        });
        let state = StateValues::new(parts.collect());
        state.finish(f, "rollout_empty")
    }
}

impl StateValues {
    /// The parts in their order.
    pub(crate) fn new(parts: Vec<Value>) -> Self {
        let mut parts = parts.into_iter();
        let mut next = || parts.next().unwrap_or_else(|| unreachable!("a state has nine parts or ten"));
        Self {
            keys: next(),
            values: next(),
            ids: next(),
            logps: next(),
            last: next(),
            length: next(),
            count: next(),
            ended: next(),
            random: next(),
            seen: parts.next(),
        }
    }

    /// The parts in their order.
    pub(crate) fn parts(&self) -> Vec<&Value> {
        let Self { keys, values, ids, logps, last, length, count, ended, random, seen } = self;
        let all = [keys, values, ids, logps, last, length, count, ended, random];
        all.into_iter().chain(seen).collect()
    }

    /// The parts but for the cache.
    pub(crate) fn rows(&self) -> Vec<&Value> {
        self.parts().split_off(2)
    }

    /// The same cache with other parts, in the order of [`StateValues::rows`].
    pub(crate) fn with_rows(&self, rows: &[Value]) -> Self {
        Self::new([&self.keys, &self.values].into_iter().chain(rows).cloned().collect())
    }

    /// The module that returns this state.
    pub(crate) fn finish(&self, f: Builder, name: &str) -> Result<Module> {
        let results: Vec<(&str, &Value)> = self.parts().into_iter().map(|value| ("", value)).collect();
        finish(f, name, &results)
    }
}

/// A state on the device.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) shape: Shape,
    pub(crate) buffers: Vec<Buffer>,
}

impl State {
    fn part<T: pjrt::Element>(&self, index: usize, what: &str) -> Result<Vec<T>> {
        let nothing = pjrt::Error::Nothing { operation: "PJRT_LoadedExecutable_Execute" };
        let buffer = self.buffers.get(index).ok_or(nothing).map_err(Error::device("reading a rollout's state"))?;
        read(buffer, what)
    }

    /// The ids `[B, M]`.
    pub(crate) fn ids(&self) -> Result<Vec<i32>> {
        self.part(2, "ids of completions")
    }

    /// The log-probabilities `[B, M]`.
    pub(crate) fn logps(&self) -> Result<Vec<f32>> {
        self.part(3, "log-probabilities of completions")
    }

    /// The numbers of tokens of the completions, `[B]`.
    pub(crate) fn counts(&self) -> Result<Vec<i32>> {
        self.part(6, "lengths of completions")
    }

    /// Which slots have ended, `[B]`.
    pub(crate) fn ended(&self) -> Result<Vec<bool>> {
        self.part(7, "ends of completions")
    }
}
