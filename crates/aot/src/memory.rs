//! Device memory of the programs of a run.

use crate::{Error, ProgramName, Result, RunPrograms};
use grpo_backend_tpu::aot::{Chip, Report};
use grpo_models::TrainedMemory;
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
    /// Checks that the memory fits into the memory of `chip` that programs may use.
    ///
    /// # Errors
    /// [`Error::DoesNotFit`].
    pub fn expect_room(&self, chip: Chip) -> Result<()> {
        match self.total_bytes <= chip.usable_memory {
            true => Ok(()),
            false => {
                let there = chip.usable_memory;
                Err(Error::DoesNotFit { program: self.largest.clone(), needed: self.total_bytes, there })
            }
        }
    }
}

impl RunPrograms {
    /// Returns the device memory, from the reports of the programs that a run executes; `None` if a report is missing.
    pub fn memory<'a>(&self, report: impl Fn(ProgramName) -> Option<&'a Report>) -> Option<Memory> {
        let sizes = self.sizes();
        let reference = sizes.ref_policy_bytes as u64;
        let mut totals = BTreeMap::new();
        let (mut largest, mut largest_without_copy, mut train) = ((0, String::new()), 0, 0);
        for name in self.names().into_iter().filter(|name| !self.is_part(*name)) {
            let (total, again) = (self.bytes_during(name, report(name)?), self.copy_to_roll_back(name));
            totals.insert(name.to_string(), total);
            if total > largest.0 {
                largest = (total, name.to_string());
            }
            largest_without_copy = largest_without_copy.max(total - again);
            if self.names_of_update().contains(&name) {
                train = train.max(total - reference - again);
            }
        }
        let trained = self.trained_memory();
        let state = [
            ("weights", sizes.weight_bytes as u64),
            ("remainders of weights", sizes.remainder_bytes as u64),
            ("moments", trained.moments),
            ("sums of gradients", self.accumulators()),
            ("reference policy", reference),
            ("weights on the mesh of the rollout", sizes.rollout_weight_bytes as u64),
        ];
        let state = state.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(what, bytes)| (what.to_owned(), bytes));
        Some(Memory {
            state: state.collect(),
            totals,
            largest: largest.1,
            total_bytes: largest.0,
            total_bytes_without_roll_back: largest_without_copy,
            train_bytes: train,
        })
    }

    /// Returns the largest device memory during these programs, from their reports; `None` if one is missing.
    pub fn largest_bytes<'a>(
        &self,
        names: &[ProgramName],
        report: impl Fn(ProgramName) -> Option<&'a Report>,
    ) -> Option<u64> {
        let during = |name: &ProgramName| Some(self.bytes_during(*name, report(*name)?));
        names.iter().map(during).try_fold(0, |largest, bytes| Some(bytes?.max(largest)))
    }

    /// Returns the device memory during a program with this report.
    fn bytes_during(&self, name: ProgramName, report: &Report) -> u64 {
        report.total_bytes + self.beside(name) + self.sizes().ref_policy_bytes as u64 + self.copy_to_roll_back(name)
    }

    fn trained_memory(&self) -> TrainedMemory {
        TrainedMemory::of(self.sizes().trained_of_device as u64, self.config.largest_optimizer())
    }

    /// Returns the bytes of gradient accumulators. An update that is one program needs none.
    fn accumulators(&self) -> u64 {
        if self.names_of_update() == [ProgramName::Step] { 0 } else { self.trained_memory().gradients }
    }

    /// Returns the bytes of the copy for a rollback, which exists during an update.
    fn copy_to_roll_back(&self, name: ProgramName) -> u64 {
        let is_update = matches!(name, ProgramName::Apply | ProgramName::Step);
        if is_update && self.sizes().can_roll_back { self.trained_memory().roll_back } else { 0 }
    }

    /// Returns the bytes of state that is not among the arguments of a program, without the reference policy.
    fn beside(&self, name: ProgramName) -> u64 {
        let sizes = self.sizes();
        let (trained, sums) = (self.trained_memory(), self.accumulators());
        let (weights, remainders) = (sizes.weight_bytes as u64, sizes.remainder_bytes as u64);
        let rollout_weights = sizes.rollout_weight_bytes as u64;
        match name {
            ProgramName::Gradient => remainders + trained.moments,
            // Frozen weights below adapters.
            ProgramName::Apply => weights + remainders - trained.weights,
            // All state is among the arguments.
            ProgramName::Step => 0,
            ProgramName::Admit => weights + remainders + trained.moments + sums + rollout_weights,
            // Rollouts on a mesh of their own have a copy of the weights among their arguments.
            ProgramName::Prefill | ProgramName::Decode(_) if rollout_weights > 0 => {
                weights + remainders + trained.moments + sums
            }
            _ => remainders + trained.moments + sums,
        }
    }
}
