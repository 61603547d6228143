//! Logits at every position, to compare a model with its original implementation.

use crate::cpu_policy::CpuPolicy;
use crate::decoder::{Decoder, PackedBatch, cap, to_host};
use burn::module::Module;
use grpo_backend_cpu::layers::{Add, StoredWeight};
use grpo_burn::custom_op::{Operand, elements};
use grpo_policy::{Error, Result};

/// Number of positions whose logits `[ROWS, V]` are computed per call.
const ROWS: usize = 64;

impl CpuPolicy {
    /// Passes the logits `[n, V]` of the positions of `ids` to `see`, in chunks, with the first position of the chunk. The forward pass
    /// runs over all tokens, as in training.
    ///
    /// # Errors
    /// [`Error::Argument`] if `ids` is empty, [`Error::TooLong`], [`Error::Model`] for an unknown token.
    pub fn logits(&self, ids: &[u32], mut see: impl FnMut(usize, &[f32])) -> Result<()> {
        let (model, kernels): (Decoder, _) = (self.model().valid(), self.model().kernels());
        let hidden = to_host(model.forward(&PackedBatch::new(&[ids])?)?);
        let [_, width] = model.lm_head()?.dims();
        let head = Operand::new("lm_head", model.lm_head()?).map_err(Error::other)?.row_major().storage;
        let head = StoredWeight::new(&[elements("lm_head", &head).map_err(Error::other)?], width)?;
        for (i, rows) in hidden.chunks(ROWS * width).enumerate() {
            let mut logits = kernels.linear_stored(rows, &head, Add::Nothing, rows.len() / width)?;
            cap(&mut logits, model.config().final_logit_softcapping);
            see(i * ROWS, &logits);
        }
        Ok(())
    }

    /// Computes the same logits for several sequences token by token with a KV cache, as in sampling. `see` gets the index of the sequence,
    /// the position and its logits `[V]`.
    ///
    /// # Errors
    /// See [`CpuPolicy::logits`].
    pub fn cached_logits(&self, sequences: &[&[u32]], mut see: impl FnMut(usize, usize, &[f32])) -> Result<()> {
        let longest = sequences.iter().map(|ids| ids.len()).max().unwrap_or(0);
        if sequences.iter().any(|ids| ids.is_empty()) || longest == 0 {
            return Err(Error::argument("cached_logits", "sequences of at least one token", "an empty one"));
        }
        let inference = self.model().valid().inference()?;
        let vocab = inference.vocab();
        let firsts: Vec<&[u32]> = sequences.iter().map(|ids| &ids[..1]).collect();
        let (mut logits, mut cache) = inference.prefill(&firsts, 1, longest - 1)?;
        logits.chunks_exact(vocab).enumerate().for_each(|(i, logits)| see(i, 0, logits));
        for position in 1..longest {
            let (open, ids): (Vec<usize>, Vec<u32>) =
                sequences.iter().enumerate().filter_map(|(i, ids)| Some((i, *ids.get(position)?))).unzip();
            inference.decode(&ids, &open, &mut cache, &mut logits)?;
            open.iter().zip(logits.chunks_exact(vocab)).for_each(|(i, logits)| see(*i, position, logits));
        }
        Ok(())
    }
}
