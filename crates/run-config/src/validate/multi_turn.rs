//! Checks conversations and their environments.

use crate::{Result, TrainConfig, check};
use grpo_agents::Environments;
use grpo_core::LossAggMode;
use grpo_data::History;

impl TrainConfig {
    /// Checks the sections `environments` and `rollout.multi_turn`.
    pub(crate) fn validate_environments(&self) -> Result<()> {
        let multi_turn = &self.rollout.multi_turn;
        for (key, count) in [
            ("max_assistant_turns", multi_turn.max_assistant_turns),
            ("max_tool_response_length", multi_turn.max_tool_response_length),
            ("max_consecutive_failures", Some(multi_turn.max_consecutive_failures as usize)),
        ] {
            check(count != Some(0), &format!("rollout.multi_turn.{key}"), "at least 1", 0)?;
        }
        if self.environments.is_empty() {
            return self.validate_agents(false, false);
        }
        let environments = Environments::described(&self.environments)?;
        self.validate_agents(environments.has_agents(), self.data.history == History::Fork)?;
        let files = "given with environments: conversations begin with the messages of rows, and tasks have none";
        check(!self.data.files.is_empty(), "data.files", files, "none")
    }

    /// Checks the keys that depend on agents, and on conversations of several rows.
    fn validate_agents(&self, has_agents: bool, forks: bool) -> Result<()> {
        if let Some(address) = &self.rollout.endpoint {
            grpo_agents::endpoint::socket_address(address)?;
            check(has_agents, "rollout.endpoint", "left out: no environment is an agent", address)?;
        }
        let (mode, groups) = (self.loss.loss_agg_mode, [LossAggMode::PromptMean, LossAggMode::TokenMeanLegacy]);
        let is_grouped = [mode, self.loss.kl_agg_mode].iter().flatten().any(|mode| groups.contains(mode));
        let expected = "another one with agents or data.history=fork: it averages over a fixed number of sequences, and a conversation may have \
                        several";
        let has_rows = has_agents || forks;
        check(!(has_rows && is_grouped), "loss.loss_agg_mode", expected, "prompt-mean or token-mean-legacy")
    }
}
