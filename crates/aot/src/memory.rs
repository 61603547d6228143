//! Device memory of the programs of a run.

use crate::{Error, ProgramName, Result, RunPrograms};
use backend_tpu::aot::{Chip, Report};
use models::TrainedMemory;
use serde::Serialize;
use std::collections::BTreeMap;

/// Memory of each device at the same time, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Memory that is kept between programs, by content.
    pub state: Vec<(String, u64)>,
    /// Memory during each program: all that the program uses, and state that is not among its arguments.
    pub totals: BTreeMap<String, u64>,
    /// The program with the largest memory use.
    pub largest: String,
    /// The memory use of that program.
    pub total_bytes: u64,
    /// The largest memory use without the copy for a rollback.
    pub total_bytes_without_roll_back: u64,
    /// Memory during a micro-batch or an update, without the reference policy and without the copy for a rollback: the memory of a training
    /// loop without rollouts.
    pub train_bytes: u64,
}

impl Memory {
    /// Checks that the memory fits on `chip`.
    ///
    /// # Errors
    /// [`Error::DoesNotFit`].
    pub fn expect_room(&self, chip: Chip) -> Result<()> {
        match self.total_bytes <= chip.memory {
            true => Ok(()),
            false => {
                Err(Error::DoesNotFit { program: self.largest.clone(), needed: self.total_bytes, there: chip.memory })
            }
        }
    }
}

impl RunPrograms {
    /// Returns the device memory, from the reports of the programs that a run executes; `None` if a report is missing.
    pub fn memory<'a>(&self, report: impl Fn(ProgramName) -> Option<&'a Report>) -> Option<Memory> {
        let sizes = self.sizes();
        let trained = TrainedMemory::of(sizes.trained_of_device as u64);
        let moments = trained.moments;
        // An update that is one program needs no gradient accumulators.
        let sums = if self.steps_at_once() { 0 } else { trained.gradients };
        let (weights, remainders) = (sizes.weight_bytes as u64, sizes.remainder_bytes as u64);
        let reference = sizes.ref_policy_bytes as u64;
        let of_rollout = sizes.rollout_weight_bytes as u64;
        let twice = if sizes.can_roll_back { trained.roll_back } else { 0 };
        let mut totals = BTreeMap::new();
        let (mut largest, mut without, mut train) = ((0, String::new()), 0, 0);
        for name in self.names().into_iter().filter(|name| !self.is_part(*name)) {
            let own = report(name)?.total_bytes;
            // State that is not among the arguments.
            let beside = match name {
                ProgramName::Gradient => remainders + moments,
                // Frozen weights below adapters.
                ProgramName::Apply => weights + remainders - trained.weights,
                // All state is among the arguments.
                ProgramName::Step => 0,
                ProgramName::Admit => weights + remainders + moments + sums + of_rollout,
                // Rollouts on a mesh of their own have a copy of the weights among their arguments.
                ProgramName::Prefill | ProgramName::Decode(_) if of_rollout > 0 => {
                    weights + remainders + moments + sums
                }
                _ => remainders + moments + sums,
            };
            let again = if matches!(name, ProgramName::Apply | ProgramName::Step) { twice } else { 0 };
            let total = own + beside + reference + again;
            totals.insert(name.to_string(), total);
            if total > largest.0 {
                largest = (total, name.to_string());
            }
            without = without.max(total - again);
            if matches!(name, ProgramName::Gradient | ProgramName::Apply | ProgramName::Step) {
                train = train.max(own + beside);
            }
        }
        let state = [
            ("weights", weights),
            ("remainders of weights", remainders),
            ("moments", moments),
            ("sums of gradients", sums),
            ("reference policy", reference),
            ("weights on the mesh of the rollout", of_rollout),
        ];
        let state = state.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(what, bytes)| (what.to_owned(), bytes));
        Some(Memory {
            state: state.collect(),
            totals,
            largest: largest.1,
            total_bytes: largest.0,
            total_bytes_without_roll_back: without,
            train_bytes: train,
        })
    }
}
