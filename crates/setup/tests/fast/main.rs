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
mod own_policy;
mod processes;
mod rollout;
mod routers;
mod steps;
mod stop_tokens;
#[path = "../support/mod.rs"]
mod support;

grpo_testkit::tiers!();

use support::{Scored, scored};
