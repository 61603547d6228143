//! Rewards in a run of several processes.
//!
//! All processes run the same programs in the same order, with the same random numbers. Rewards are not a function of the seed, so the
//! leader computes them and sends them to the others, with a digest of the completions that it has scored.

use crate::error::{Error, Result};
use crate::factory::Parts;
use distributed::Store;
use rewards::{Reward, RewardFailure, RewardInput};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The name of the broadcast.
const REWARDS: &str = "the rewards of a rollout";

/// The rewards of a rollout, as the leader sends them.
#[derive(Serialize, Deserialize)]
struct Scored {
    /// The SHA-256 of the completions.
    completions: Vec<u8>,
    rewards: Vec<Row>,
}

/// A [`Reward`], with the texts of its failures.
#[derive(Serialize, Deserialize)]
struct Row {
    total: Option<f32>,
    terms: Vec<Option<f32>>,
    failures: Vec<(usize, String)>,
}

impl Parts {
    /// Scores completions with all functions, or only with `functions`, by index.
    ///
    /// # Errors
    /// With several processes: [`Error::Processes`]; [`Error::OtherCompletions`] if this process has sampled other completions than the
    /// leader.
    pub(crate) fn score(&self, functions: Option<&[usize]>, inputs: &[RewardInput<'_>]) -> Result<Vec<Reward>> {
        let score = || match functions {
            Some(functions) => self.rewards.score_some(functions, inputs),
            None => self.rewards.score(inputs),
        };
        match &self.store {
            Some(store) => shared(store, inputs, self.rewards.names().count(), score),
            None => Ok(score()),
        }
    }
}

/// Returns the leader's rewards, for a run with `terms` functions.
fn shared(
    store: &Store,
    inputs: &[RewardInput<'_>],
    terms: usize,
    score: impl FnOnce() -> Vec<Reward>,
) -> Result<Vec<Reward>> {
    let completions = digest(inputs);
    let mut failed = None;
    let bytes = store.broadcast(REWARDS, || {
        let rewards = score().into_iter().map(|Reward { total, terms, failures }| {
            let failures = failures.into_iter().map(|(index, failure)| (index, failure.to_string()));
            Row { total, terms, failures: failures.collect() }
        });
        let scored = Scored { completions: completions.clone(), rewards: rewards.collect() };
        serde_json::to_vec(&scored).map_err(|error| failed = Some(error)).unwrap_or_default()
    })?;
    let unreadable = |found: String| Error::argument(REWARDS, "the rewards of all completions", found);
    if let Some(error) = failed {
        return Err(unreadable(error.to_string()));
    }
    let scored: Scored = serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
    if scored.completions != completions {
        return Err(Error::OtherCompletions { process: store.process_id() });
    }
    if scored.rewards.len() != inputs.len() || scored.rewards.iter().any(|row| row.terms.len() != terms) {
        return Err(unreadable(format!("{} rewards", scored.rewards.len())));
    }
    let reward = |Row { total, terms, failures }: Row| Reward {
        total,
        terms,
        failures: failures.into_iter().map(|(index, text)| (index, RewardFailure::new(text))).collect(),
    };
    Ok(scored.rewards.into_iter().map(reward).collect())
}

/// Returns the SHA-256 of the token ids of completions.
fn digest(inputs: &[RewardInput<'_>]) -> Vec<u8> {
    let mut hash = Sha256::new();
    for input in inputs {
        hash.update((input.completion_ids.len() as u64).to_le_bytes());
        hash.update([u8::from(input.truncated)]);
        input.completion_ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
    }
    hash.finalize().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use data::task::Addition;
    use data::{Item, Problem};
    use distributed::Options;
    use std::net::TcpListener;
    use std::sync::Arc;

    fn reward() -> Reward {
        let failures = vec![(1, RewardFailure::new("status 1"))];
        Reward { total: None, terms: vec![Some(0.1), None, Some(f32::MIN_POSITIVE)], failures }
    }

    /// Returns the results of two processes that have sampled these completions.
    fn run(completions: [Vec<u32>; 2]) -> Vec<Result<Vec<Reward>>> {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let one = |(process, ids): (usize, Vec<u32>)| {
            let store = Store::open(&Options::new(&address, 2, process), &[]).unwrap();
            let problem = Problem { prompt: "1+1=".into(), answer: "2".into() };
            let item = Item::from_task(Arc::new(Addition { max_number: 9, zero_pad: false }), problem);
            let input = RewardInput { completion_ids: &ids, ..RewardInput::new(&item, "") };
            let result = shared(&store, &[input, input], 3, || {
                assert!(store.is_leader());
                vec![reward(), Reward { total: Some(0.3), ..reward() }]
            });
            if result.is_ok() {
                // Ends for the leader when the follower has read its message, or has refused it.
                let _ = store.close();
            }
            result
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = completions.into_iter().enumerate().map(|each| scope.spawn(|| one(each))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn followers_get_the_leaders_rewards_bit_for_bit() {
        for result in run([vec![1, 2], vec![1, 2]]) {
            assert_eq!(result.unwrap(), [reward(), Reward { total: Some(0.3), ..reward() }]);
        }
    }

    #[test]
    fn other_completions_are_refused() {
        let [_, follower] = &run([vec![1, 2], vec![1, 3]])[..] else { panic!("two processes") };
        assert!(matches!(follower, Err(Error::OtherCompletions { process: 1 })), "{follower:?}");
    }
}
