//! Rewards in a run of several processes.
//!
//! All processes run the same programs in the same order, with the same random numbers. Rewards are not a function of the seed, so the
//! leader computes them and sends them to the others, with a digest of the completions that it has scored.

use crate::error::{Error, Result};
use crate::parts::Parts;
use grpo_conversations::lockstep::{Sampled, share_list};
use grpo_distributed::Store;
use grpo_rewards::{Reward, RewardFailure, RewardInput};
use serde::{Deserialize, Serialize};

/// The name of the broadcast.
const REWARDS: &str = "the rewards of a rollout";

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
    let sampled = Sampled::of(inputs.iter().map(|input| (input.completion_ids, input.truncated)));
    let rows = || {
        let row = |Reward { total, terms, failures }: Reward| {
            let failures = failures.into_iter().map(|(index, failure)| (index, failure.to_string()));
            Row { total, terms, failures: failures.collect() }
        };
        score().into_iter().map(row).collect()
    };
    let rows: Vec<Row> = share_list(Some(store), REWARDS, &sampled, inputs.len(), rows)?;
    if rows.iter().any(|row| row.terms.len() != terms) {
        return Err(Error::argument(REWARDS, format!("the rewards of {terms} functions"), "another number"));
    }
    let reward = |Row { total, terms, failures }: Row| Reward {
        total,
        terms,
        failures: failures.into_iter().map(|(index, text)| (index, RewardFailure::new(text))).collect(),
    };
    Ok(rows.into_iter().map(reward).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_data::task::Addition;
    use grpo_data::{Item, Problem};
    use grpo_distributed::Options;
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
