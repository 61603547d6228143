//! Timing of contenders that take turns.

use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Something that solves the problem again and again.
pub trait Contender {
    /// Puts back what the last step has used up. Not timed.
    ///
    /// # Errors
    /// Whatever goes wrong.
    fn prepare(&mut self) -> Result<()>;

    /// One step, from its call to the moment when all of its results are there.
    ///
    /// # Errors
    /// Whatever goes wrong; the contender is out then.
    fn step(&mut self) -> Result<()>;
}

/// How long and how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rounds {
    /// Steps of every contender before any is timed, beside the first call.
    pub warmup: usize,
    /// Steps that are timed.
    pub steps: usize,
}

/// Seconds of the timed steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Of the fastest.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// Nine of ten are no slower.
    pub p90: f64,
    /// Mean.
    pub mean: f64,
    /// In the order in which they were taken.
    pub all: Vec<f64>,
}

impl Timing {
    /// Of `seconds`; `None` when there are none.
    pub fn of(seconds: Vec<f64>) -> Option<Self> {
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, count) = (*sorted.first()?, sorted.len());
        // The smallest that a share of all does not exceed.
        let quantile = |share: f64| sorted[((share * count as f64).ceil() as usize).clamp(1, count) - 1];
        let (p50, p90) = (quantile(0.5), quantile(0.9));
        Some(Self { min, p50, p90, mean: seconds.iter().sum::<f64>() / count as f64, all: seconds })
    }
}

/// Seconds of one step.
///
/// # Errors
/// The contender's.
pub fn timed(contender: &mut dyn Contender) -> Result<f64> {
    contender.prepare()?;
    let began = Instant::now();
    contender.step()?;
    Ok(began.elapsed().as_secs_f64())
}

/// Lets `contenders` take turns, a step each, so that whatever else the machine does meets them all alike. Seconds of the
/// timed steps, in their order; one that fails takes no further turns.
pub fn take_turns(contenders: &mut [&mut dyn Contender], rounds: Rounds) -> Vec<Result<Vec<f64>>> {
    let mut seconds: Vec<Result<Vec<f64>>> = contenders.iter().map(|_| Ok(vec![])).collect();
    for round in 0..rounds.warmup + rounds.steps {
        for (contender, seconds) in contenders.iter_mut().zip(&mut seconds) {
            let Ok(list) = seconds else { continue };
            match timed(*contender) {
                Ok(step) if round >= rounds.warmup => list.push(step),
                Ok(_) => {}
                Err(error) => *seconds = Err(error),
            }
        }
    }
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::cell::RefCell;

    struct Logged<'a> {
        name: char,
        log: &'a RefCell<String>,
        fails_at: Option<usize>,
        steps: usize,
    }

    impl Contender for Logged<'_> {
        fn prepare(&mut self) -> Result<()> {
            self.log.borrow_mut().push('.');
            Ok(())
        }
        fn step(&mut self) -> Result<()> {
            self.steps += 1;
            self.log.borrow_mut().push(self.name);
            match self.fails_at {
                Some(step) if step == self.steps => Err(Error::argument("step", "memory", "none")),
                _ => Ok(()),
            }
        }
    }

    #[test]
    fn contenders_take_turns_and_a_failure_stops_only_its_own() {
        let log = RefCell::default();
        let contender = |name, fails_at| Logged { name, log: &log, fails_at, steps: 0 };
        let (mut a, mut b, mut c) = (contender('a', None), contender('b', Some(2)), contender('c', None));
        let seconds = take_turns(&mut [&mut a, &mut b, &mut c], Rounds { warmup: 1, steps: 2 });
        assert_eq!(log.borrow().as_str(), ".a.b.c.a.b.c.a.c");
        assert_eq!(seconds.iter().map(|s| s.as_ref().map_or(0, Vec::len)).collect::<Vec<_>>(), [2, 0, 2]);
    }

    #[test]
    fn no_rounds_are_legal() {
        assert!(take_turns(&mut [], Rounds { warmup: 0, steps: 0 }).is_empty());
        assert_eq!(Timing::of(vec![]), None);
    }

    #[test]
    fn quantiles_are_steps_that_were_taken() {
        let timing = Timing::of(vec![4.0, 1.0, 3.0, 2.0]).expect("steps");
        assert_eq!((timing.min, timing.p50, timing.p90, timing.mean), (1.0, 2.0, 4.0, 2.5));
        let ten = Timing::of((1..=10).map(f64::from).collect()).expect("steps");
        assert_eq!((ten.p50, ten.p90), (5.0, 9.0));
    }
}
