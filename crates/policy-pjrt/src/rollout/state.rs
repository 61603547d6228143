//! The state that the programs of a rollout pass on.
//!
//! Legend: L layers of a cache, B slots, S columns of the cache, K key/value heads, D head dimension, M tokens of a completion, V vocabulary with padding.

use super::cache::CachedLayers;
use super::columns::Columns;
use super::window::{CACHE, ROWS, TABLE, Window};
use crate::DeviceTensor;
use crate::decoder::{Axis, DELTA, Decoder, DeltaStates, zeros};
use crate::error::{Error, Result};
use crate::leaves::{Leaves, leaves};
use crate::modules::unnamed;
use crate::runtime::Runtime;
use grpo_stablehlo::{Builder, Dtype, Module, TensorType, Value};

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

/// The tensors of a state, in the order of a program's arguments and results.
#[derive(Clone, Debug)]
pub(crate) struct StateValues {
    pub(crate) rows: SlotRows,
    /// Keys and values `[L, B, K, S, D]` of each of [`CachedLayers::of`].
    pub(crate) caches: Window,
}

leaves!(StateValues { rows, caches });

/// The tensors of a state without keys and values.
#[derive(Clone, Debug)]
pub(crate) struct SlotRows {
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

leaves!(SlotRows { ids, logps, last, length, count, ended, random, seen, delta });

/// Logical axes of a tensor of the state.
type Axes = &'static [Option<Axis>];

impl Shape {
    /// Creates the state with the value of each tensor, given its index, name, type and logical axes.
    fn state(
        self,
        decoder: &Decoder,
        mut create: impl FnMut(usize, &'static str, TensorType, Axes) -> Value,
    ) -> StateValues {
        let mut index = 0;
        let mut value = |name, ty, axes| {
            index += 1;
            create(index - 1, name, ty, axes)
        };
        let Self { slots, columns, tokens, seen } = self;
        let (config, compute) = (decoder.config(), decoder.compute());
        let row = |dtype| TensorType::new(dtype, [slots]);
        let table = |dtype, columns| TensorType::new(dtype, [slots, columns]);
        let rows = SlotRows {
            ids: value("ids", table(Dtype::I32, tokens), &TABLE),
            logps: value("logps", table(Dtype::F32, tokens), &TABLE),
            last: value("last", row(Dtype::I32), &ROWS),
            length: value("length", row(Dtype::I32), &ROWS),
            count: value("count", row(Dtype::I32), &ROWS),
            ended: value("ended", row(Dtype::Pred), &ROWS),
            random: value("random", table(Dtype::U32, 2), &TABLE),
            seen: seen.then(|| value("seen", table(Dtype::Pred, decoder.logit_columns()), &TABLE)),
            delta: DeltaStates::types(config, slots, compute).map(|[inputs, memory]| DeltaStates {
                inputs: value("delta_inputs", inputs, &DELTA),
                memory: value("delta_memory", memory, &DELTA),
            }),
        };
        let caches = CachedLayers::of(config);
        let ty = |layers: &CachedLayers| layers.ty(compute, slots, columns.of(layers.window));
        let [keys, values] =
            ["keys", "values"].map(|name| caches.iter().map(|layers| value(name, ty(layers), &CACHE)).collect());
        StateValues { rows, caches: Window { keys, values } }
    }

    /// Declares a state as the next arguments of a program. The program's first results are the next state, in the same buffers.
    pub(crate) fn arguments(self, f: &Builder, decoder: &Decoder) -> StateValues {
        self.state(decoder, |index, name, ty, axes| {
            let argument = f.argument(name, ty);
            f.alias(&argument, index);
            decoder.axis_rules().argument(&argument, axes);
            decoder.axis_rules().result(f, index, axes);
            argument
        })
    }

    /// Builds the program without arguments that returns a state of empty slots.
    pub(crate) fn empty(self, decoder: &Decoder) -> Result<Module> {
        let f = Builder::new();
        let rules = decoder.axis_rules();
        let state = self.state(decoder, |index, name, ty, axes| {
            rules.result(&f, index, axes);
            match name {
                "ended" => f.splat(true, ty),
                "length" => f.splat(1, ty),
                _ => zeros(&f, ty.dtype, &ty.shape),
            }
        });
        rules.finish(f.clone(), "rollout_empty", state.results())
    }
}

impl StateValues {
    /// Returns the results of a program that returns this state.
    pub(crate) fn results(&self) -> impl Iterator<Item = (&str, &Value)> {
        unnamed(self.leaves())
    }
}

/// A state on the devices.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) shape: Shape,
    pub(crate) tensors: Vec<DeviceTensor>,
}

impl State {
    fn part<T: grpo_pjrt::Element>(&self, runtime: &Runtime, index: usize, what: &str) -> Result<Vec<T>> {
        let nothing = grpo_pjrt::Error::Nothing { operation: "PJRT_LoadedExecutable_Execute" };
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
