//! Access of `grpo parity --model` to the logits and gradients of every policy.

use grpo_check::Error;
use grpo_check::model::{Forward, ModelPolicy, SeeGradient, SeeLogits};
use grpo_models::NamedTensor;
use grpo_policy::{Policy, Sequence, SequenceBatch, StepLoss, TensorSink, token_batch};
use grpo_policy_cpu::CpuPolicy;
use grpo_policy_pjrt::PjrtPolicy;

/// A policy with access to logits and gradients, in addition to [`Policy`].
pub(super) trait Shown: Policy {
    /// The number of sequences of a micro-batch.
    const ROWS: usize;

    /// Passes the logits of every position of every sequence to `see`, in pieces of any size; no sequence is empty.
    fn show_logits(
        &mut self,
        sequences: &[&[u32]],
        forward: Forward,
        see: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> grpo_policy::Result<()>;

    /// Passes the accumulated gradients to `sink`.
    fn show_gradients(&mut self, sink: &mut dyn TensorSink) -> grpo_policy::Result<()>;
}

/// A policy with the name of its device.
pub(super) struct Compared<P> {
    pub(super) name: String,
    pub(super) policy: P,
}

impl<P: Shown> ModelPolicy for Compared<P> {
    fn name(&self) -> &str {
        &self.name
    }

    fn logits(&mut self, sequences: &[Vec<u32>], forward: Forward, see: &mut SeeLogits<'_>) -> Result<(), Error> {
        let not_empty = sequences.iter().enumerate().filter(|(_, ids)| !ids.is_empty());
        let (numbers, sequences): (Vec<usize>, Vec<&[u32]>) = not_empty.map(|(i, ids)| (i, &ids[..])).unzip();
        let mut seen = Ok(());
        let mut see = |i: usize, position: usize, logits: &[f32]| {
            if seen.is_ok() {
                seen = see(numbers[i], position, logits);
            }
        };
        self.policy.show_logits(&sequences, forward, &mut see).map_err(Error::policy)?;
        seen
    }

    fn loss(&mut self, sequences: &[Vec<u32>], gradients: Option<&mut SeeGradient<'_>>) -> Result<f64, Error> {
        // All tokens after the first are predicted.
        let of = |ids: &Vec<u32>| Sequence { prompt: ids[..1].to_vec(), completion: ids[1..].to_vec() };
        let sequences: Vec<Sequence> = sequences.iter().filter(|ids| ids.len() > 1).map(of).collect();
        let tokens = sequences.iter().map(|sequence| sequence.completion.len()).sum();
        let batches = sequences
            .chunks(P::ROWS)
            .map(|sequences| Ok(SequenceBatch { routed_experts: &[], sequences, tokens: token_batch(sequences)? }));
        let batches = batches.collect::<Result<Vec<_>, grpo_core::Error>>()?;
        let loss = self.policy.accumulate(&batches, StepLoss::CrossEntropy { tokens }).map_err(Error::policy)?.loss;
        if let Some(see) = gradients {
            let mut sink = Gradients { see, seen: Ok(()) };
            let shown = self.policy.show_gradients(&mut sink);
            sink.seen?;
            shown.map_err(Error::policy)?;
        }
        self.policy.skip().map_err(Error::policy)?;
        Ok(loss)
    }
}

/// A sink that collects gradients for a comparison.
struct Gradients<'a, 'b> {
    see: &'a mut SeeGradient<'b>,
    seen: Result<(), Error>,
}

impl TensorSink for Gradients<'_, '_> {
    fn tensor(&mut self, tensor: NamedTensor) -> grpo_policy::Result<()> {
        if self.seen.is_ok() {
            self.seen = (self.see)(tensor);
        }
        Ok(())
    }
}

impl Shown for CpuPolicy {
    const ROWS: usize = 1;

    fn show_logits(
        &mut self,
        sequences: &[&[u32]],
        forward: Forward,
        see: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> grpo_policy::Result<()> {
        match forward {
            Forward::Whole => (sequences.iter().enumerate())
                .try_for_each(|(i, ids)| self.logits(ids, |position, logits| see(i, position, logits))),
            Forward::Cached => self.cached_logits(sequences, see),
        }
    }

    fn show_gradients(&mut self, sink: &mut dyn TensorSink) -> grpo_policy::Result<()> {
        self.model().export_values(self.gradients().parameters(), sink)
    }
}

impl Shown for PjrtPolicy {
    /// Few, because long sequences take memory; more than one, because other lengths need another program.
    const ROWS: usize = 4;

    fn show_logits(
        &mut self,
        sequences: &[&[u32]],
        forward: Forward,
        see: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> grpo_policy::Result<()> {
        match forward {
            Forward::Whole => self.logits(sequences, see)?,
            Forward::Cached => self.cached_logits(sequences, see)?,
        }
        Ok(())
    }

    fn show_gradients(&mut self, sink: &mut dyn TensorSink) -> grpo_policy::Result<()> {
        Ok(self.export_gradients(sink)?)
    }
}
