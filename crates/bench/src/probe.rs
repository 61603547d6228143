//! Measurements of the machine's limits, as jobs in alternation with the variants.

use super::protocol::{Planned, Stepped};
use super::runner::Runner;
use crate::error::{Error, Result};
use grpo_backend_cpu::peak::{Multiply, Stream, Traffic, Unit};

/// Long enough for the clock, and short compared with the measured steps.
const SECONDS: f64 = 0.05;

pub(crate) enum Probe {
    Multiply(Multiply),
    Stream(Stream),
}

impl Probe {
    pub(crate) fn multiply(unit: Unit, threads: usize) -> Result<(Planned, Box<dyn Runner>)> {
        let Some(work) = Multiply::new(unit, threads, SECONDS) else {
            return Err(Error::argument("bench worker", "a unit of this machine", unit.name()));
        };
        let planned = Planned { work: Some(work.flops()), ..Planned::default() };
        Ok((planned, Box::new(Self::Multiply(work))))
    }

    pub(crate) fn stream(traffic: Traffic, bytes: usize, threads: usize) -> (Planned, Box<dyn Runner>) {
        let walk = Stream::new(traffic, threads, bytes);
        let planned = Planned { work: Some(walk.bytes()), ..Planned::default() };
        (planned, Box::new(Self::Stream(walk)))
    }
}

impl Runner for Probe {
    fn step(&mut self, _check: bool) -> Result<Stepped> {
        let seconds = match self {
            Self::Multiply(work) => work.run(),
            Self::Stream(walk) => walk.run(),
        };
        Ok(Stepped { seconds, ..Stepped::default() })
    }

    fn score(&mut self) -> Result<Vec<f32>> {
        Err(Error::argument("bench worker", "a job with a policy", "a probe of the machine"))
    }
}
