//! Two whole PPO updates match torch with verl's functions: both losses, the value head, and one optimizer for both.

use crate::families::policy_loss;
use crate::ppo_of_torch::Ppo;
use policy_cpu::{CpuPolicy, PolicyLoss};

#[test]
fn two_ppo_updates_match_torch() {
    let ppo = Ppo::open();
    let loss = PolicyLoss { config: ppo.loss().into(), ..policy_loss() };
    let policy = CpuPolicy::from_weights(ppo.checkpoint.config(), &ppo.checkpoint.weights, loss).unwrap();
    ppo.check(&mut policy.with_value_head(ppo.of_values()).unwrap());
}
