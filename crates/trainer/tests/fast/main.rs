//! The training loop with custom parts.

mod agents;
mod ahead;
mod conversations;
mod documents;
// The server of the tests of grpo-engines, which use all of it.
#[allow(dead_code)]
#[path = "../../../engines/tests/fast/fake.rs"]
mod fake;
mod history;
mod losses;
mod own_policy;
mod ppo;
mod processes;
mod rollout;
mod routers;
mod steps;
mod stop_tokens;

testkit::tiers!();

use rewards::{RewardFn, RewardInput, Rewards};
use trainer::{Phase, Trainer};

/// A reward function from a closure.
struct Scored<F>(&'static str, F);

impl<F: Fn(&RewardInput<'_>) -> Option<f32> + Send + Sync> RewardFn for Scored<F> {
    fn name(&self) -> &str {
        self.0
    }
    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        self.1(input)
    }
}

/// Returns the rewards of a run with a single reward function.
fn scored<F>(name: &'static str, score: F) -> Rewards
where
    F: Fn(&RewardInput<'_>) -> Option<f32> + Send + Sync + 'static,
{
    Rewards::from_terms(vec![(Box::new(Scored(name, score)), 1.0)]).unwrap()
}

/// Returns a run after its warm-up.
fn warm(mut run: Trainer) -> Trainer {
    while run.phase() == Phase::Warmup {
        run.warmup_step().unwrap();
    }
    run
}
