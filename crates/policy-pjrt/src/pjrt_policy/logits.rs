//! Logits at every position, to compare a model with its original implementation.
//!
//! Legend: B rows, one per shard of rows, T tokens of a row, H hidden size, V vocabulary.

use super::PjrtPolicy;
use crate::Argument;
use crate::decoder::{Axis, Decoder, Rows};
use crate::error::Result;
use crate::modules::program_error;
use crate::rollout::check_sequences;
use grpo_stablehlo::{Builder, Dtype, Module, Save, TensorType};

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
        let length = longest.next_multiple_of(ROWS * decoder.axis_rules().parts(Axis::Length));
        let rows = decoder.axis_rules().parts(Axis::Batch);
        let forward = runtime.compile(&hidden_module(decoder, weights.dtype(), [rows, length])?)?;
        let head = runtime.compile(&head_module(decoder, weights.dtype(), [rows, length])?)?;
        let vocab = self.config().vocab_size;
        for (chunk, in_rows) in sequences.chunks(rows).enumerate() {
            let mut padded = vec![0; rows * length];
            for (row, ids) in padded.chunks_mut(length).zip(in_rows) {
                row.iter_mut().zip(*ids).for_each(|(to, id)| *to = *id as i32);
            }
            let padded = runtime.upload_sharded(&padded, &[rows, length], &[Some(Axis::Batch), None])?;
            let mut arguments = weights.arguments();
            arguments.push(Argument::from(&padded));
            let hidden = forward.run_one(arguments)?;
            for (row, ids) in in_rows.iter().enumerate() {
                for first in (0..ids.len()).step_by(ROWS) {
                    let from = runtime.upload(&[(row * length + first) as i32], &[])?;
                    let mut arguments = weights.arguments();
                    arguments.extend([Argument::from(&hidden), Argument::from(&from)]);
                    let logits: Vec<f32> = head.run_one(arguments)?.read("logits")?;
                    see(chunk * rows + row, first, &logits[..ROWS.min(ids.len() - first) * vocab]);
                }
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

/// Builds a program from weights and token ids `[B, T]`, i32, to the hidden states `[B T, H]` after the final norm.
fn hidden_module(decoder: &Decoder, weights: Dtype, [rows, length]: [usize; 2]) -> Result<Module> {
    const NAME: &str = "hidden";
    let f = Builder::new();
    let weights = decoder.declare(&f, weights);
    let ids = f.argument("ids", TensorType::new(Dtype::I32, [rows, length]));
    decoder.axis_rules().argument(&ids, &[Some(Axis::Batch), None]);
    let hidden = decoder.hidden(&weights, &Rows::of_sequences(&ids), Save::Carry);
    let hidden = hidden.map_err(program_error(NAME))?;
    let hidden = hidden.reshape(&[rows * length, decoder.config().hidden_size]);
    decoder.axis_rules().finish(f.clone(), NAME, [("hidden", &hidden)])
}

/// Builds a program from weights, hidden states `[B T, H]` and a first position, i32, to the logits `[ROWS, V]` of the positions from there
/// on, f32.
fn head_module(decoder: &Decoder, weights: Dtype, [rows, length]: [usize; 2]) -> Result<Module> {
    let (f, width) = (Builder::new(), decoder.config().hidden_size);
    let weights = decoder.declare(&f, weights);
    let hidden = f.argument("hidden", TensorType::new(decoder.compute().dtype(), [rows * length, width]));
    let first = f.argument("first", TensorType::scalar(Dtype::I32));
    let chunk = hidden.dynamic_slice(&[&first, &first.like(0)], &[ROWS, width]);
    let logits = decoder.without_padding(&decoder.logits(&weights, &chunk));
    decoder.axis_rules().finish(f.clone(), "logits", [("logits", &logits)])
}
