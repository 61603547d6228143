//! Logits at every position, to compare a model with its original implementation.
//!
//! Legend: T tokens of a row, H hidden size, V vocabulary.

use super::PjrtPolicy;
use crate::decoder::{Decoder, Rows};
use crate::error::Result;
use crate::rollout::check_sequences;
use crate::runtime::{finish, program_error, read};
use pjrt::Argument;
use stablehlo::{Builder, Dtype, Module, Save, TensorType};

/// Number of positions whose logits `[ROWS, V]` are computed per call.
const ROWS: usize = 64;

impl PjrtPolicy {
    /// Passes the logits `[n, V]` of every position of every sequence to `see`, in chunks, with the index of the sequence and the first
    /// position of the chunk. The forward pass runs over whole sequences, as in training.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] for a sequence that is empty or too long, [`crate::Error::Model`] for an unknown token,
    /// [`crate::Error::Lost`], [`crate::Error::Device`].
    pub fn logits(&self, sequences: &[&[u32]], mut see: impl FnMut(usize, usize, &[f32])) -> Result<()> {
        check_sequences(self.config(), sequences)?;
        let (runtime, weights, decoder) = (&self.runtime, self.weights()?, self.modules.decoder());
        let longest = sequences.iter().map(|ids| ids.len()).max().unwrap_or(0);
        // One length for all sequences, so that only two executables are compiled.
        let length = longest.next_multiple_of(ROWS);
        let forward = runtime.compile(&hidden_module(decoder, weights.dtype(), length)?)?;
        let head = runtime.compile(&head_module(decoder, weights.dtype(), length)?)?;
        let vocab = self.config().vocab_size;
        for (sequence, ids) in sequences.iter().enumerate() {
            let mut row = vec![0; length];
            row.iter_mut().zip(*ids).for_each(|(to, id)| *to = *id as i32);
            let row = runtime.upload(&row, &[1, length])?;
            let mut arguments = weights.arguments();
            arguments.push(Argument::from(&row));
            let hidden = forward.run_one(arguments)?;
            for first in (0..ids.len()).step_by(ROWS) {
                let from = runtime.upload(&[first as i32], &[])?;
                let mut arguments = weights.arguments();
                arguments.extend([Argument::from(&hidden), Argument::from(&from)]);
                let logits: Vec<f32> = read(&head.run_one(arguments)?, "logits")?;
                see(sequence, first, &logits[..ROWS.min(ids.len() - first) * vocab]);
            }
        }
        Ok(())
    }

    /// Computes the same logits position by position, as in sampling: with the rollout's KV cache and its dtype. See
    /// [`DeviceRollout::logits`](crate::DeviceRollout::logits).
    ///
    /// # Errors
    /// See [`PjrtPolicy::logits`].
    pub fn cached_logits(&mut self, sequences: &[&[u32]], see: impl FnMut(usize, usize, &[f32])) -> Result<()> {
        let weights = self.sampled()?;
        self.rollout.logits(&weights, sequences, see)
    }
}

/// Builds a program from weights and token ids `[1, T]`, i32, to the hidden states `[T, H]` after the final norm.
fn hidden_module(decoder: &Decoder, weights: Dtype, length: usize) -> Result<Module> {
    const NAME: &str = "hidden";
    let f = Builder::new();
    let weights = decoder.declare(&f, weights);
    let ids = f.argument("ids", TensorType::new(Dtype::I32, [1, length]));
    let hidden = decoder.hidden(&weights, &Rows::of_sequences(&ids), Save::Carry);
    let hidden = hidden.map_err(program_error(NAME))?;
    let hidden = hidden.reshape(&[length, decoder.config().hidden_size]);
    finish(f.clone(), NAME, [("hidden", &hidden)])
}

/// Builds a program from weights, hidden states `[T, H]` and a first position, i32, to the logits `[ROWS, V]` of the positions from there
/// on, f32.
fn head_module(decoder: &Decoder, weights: Dtype, length: usize) -> Result<Module> {
    let (f, width) = (Builder::new(), decoder.config().hidden_size);
    let weights = decoder.declare(&f, weights);
    let hidden = f.argument("hidden", TensorType::new(decoder.compute().dtype(), [length, width]));
    let first = f.argument("first", TensorType::scalar(Dtype::I32));
    let rows = hidden.dynamic_slice(&[&first, &first.like(0)], &[ROWS, width]);
    let logits = decoder.logits(&weights, &rows);
    finish(f.clone(), "logits", [("logits", &logits)])
}
