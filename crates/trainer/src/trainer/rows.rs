//! The rows that a run fixes at its start, and their checks.

use crate::error::Result;
use crate::pass_rule::PassRule;
use grpo_agents::Environments;
use grpo_conversations::{CheckedEnvironments, check_environments, encode_prompt};
use grpo_data::{Dataset, Item};
use grpo_distributed::Store;
use grpo_models::Tokenizer;
use grpo_rewards::{RewardInput, Rewards};
use grpo_run_config::{EVAL_PROBLEMS, MAX_SEQUENCES, REWARD, TrainConfig, check};
use std::collections::BTreeSet;

/// The number of training problems that decide when the warm-up may end.
const PROBE_PROBLEMS: usize = 128;

/// The rows of a run that are fixed at its start.
#[derive(Default)]
pub struct Rows {
    /// The rows of evaluations; empty if evaluation is off.
    pub(super) held_out: Vec<Item>,
    /// The training rows that decide when the warm-up may end.
    pub(super) probe: Vec<Item>,
    /// The result of the check of environments and chat template on some rows.
    checked: CheckedEnvironments,
}

impl Rows {
    /// Selects the rows from a data set, and checks that the model has room for them (unless `lengths_fit`) and, if this process leads the run,
    /// that every reward function works on one.
    ///
    /// # Errors
    /// [`crate::Error::Config`] and [`crate::Error::Data`] for rows; [`crate::Error::Rewards`] for a failing function.
    pub fn checked(
        config: &TrainConfig,
        tokenizer: &dyn Tokenizer,
        context: usize,
        dataset: &dyn Dataset,
        rewards: &Rewards,
        lengths_fit: bool,
        leads: bool,
    ) -> Result<Self> {
        check_filter(config, rewards)?;
        PassRule::of(config, rewards)?;
        let held_out = held_out(config, dataset)?;
        let metric = config.run.metric_for_best_model.as_deref();
        let off = "left out: nothing is held out, so evaluation is off (data.held_out_fraction, data.eval_files)";
        let has_evaluations = metric.is_none() || !held_out.is_empty();
        check(has_evaluations, "run.metric_for_best_model", off, metric.unwrap_or_default())?;
        let probe = dataset.probe(PROBE_PROBLEMS)?;
        let target = config.warmup.until_pass_at_1.filter(|_| config.warmup.steps > 0 && probe.is_empty());
        let off = "left out: the data set has no rows that monitor the warm-up (Dataset::probe)";
        check(target.is_none(), "warmup.until_pass_at_1", off, target.unwrap_or_default())?;
        if !lengths_fit {
            let rollout = ("rollout.max_completion_length", config.rollout.max_completion_length());
            check_lengths(rollout, tokenizer, context, held_out.iter().chain(&probe))?;
        }
        if let Some(longest) = config.eval.max_completion_length {
            check_lengths(("eval.max_completion_length", longest), tokenizer, context, held_out.iter())?;
        }
        // Only the leader scores completions.
        if leads {
            for item in rows_to_try(held_out.first(), probe.first()) {
                probe_rewards(rewards, tokenizer, item)?;
            }
        }
        Ok(Self { held_out, probe, checked: CheckedEnvironments::default() })
    }

    /// Checks the environments of these rows, and that the model has room for what they add to prompts.
    ///
    /// # Errors
    /// [`crate::Error::Environments`], [`crate::Error::Model`] and [`crate::Error::Config`].
    pub fn with_environments(
        mut self,
        config: &TrainConfig,
        tokenizer: &dyn Tokenizer,
        context: usize,
        environments: &mut Environments,
        store: Option<&Store>,
    ) -> Result<Self> {
        if environments.is_empty() {
            return Ok(self);
        }
        let limits = &config.rollout.multi_turn;
        let rows = self.held_out.iter().chain(&self.probe);
        self.checked = check_environments(environments, tokenizer, limits, config.data.history, rows, store)?;
        let added = self.checked.added_tokens;
        let longest = config.rollout.max_completion_length();
        let found = longest + added;
        let expected =
            format!("room for it in the context, {context} tokens, behind {added} tokens of tools and environments",);
        check(found < context, "rollout.max_completion_length", &expected, longest)?;
        Ok(self)
    }

    /// Returns the number of rows of an evaluation; 0 if evaluation is off.
    pub fn num_held_out(&self) -> usize {
        self.held_out.len()
    }

    /// Returns the result of the check of environments and chat template.
    pub fn environments(&self) -> &CheckedEnvironments {
        &self.checked
    }
}

/// Checks that the reward that dynamic sampling filters by exists.
fn check_filter(config: &TrainConfig, rewards: &Rewards) -> Result<()> {
    let filter = &config.grpo.filter_groups;
    let known: Vec<&str> = std::iter::once(REWARD).chain(rewards.names()).collect();
    let is_known = !filter.enable || known.contains(&filter.metric.as_str());
    Ok(check(is_known, "grpo.filter_groups.metric", &format!("one of {}", known.join(", ")), &filter.metric)?)
}

/// Returns the rows on which reward functions are tried before a run: one, or two if held-out rows have other columns than training rows,
/// because reward functions may read columns.
pub fn rows_to_try<'a>(held_out: Option<&'a Item>, training: Option<&'a Item>) -> Vec<&'a Item> {
    let columns = |item: &Item| item.columns.keys().cloned().collect::<BTreeSet<_>>();
    let first = held_out.or(training);
    let other = training.filter(|training| first.map(columns) != Some(columns(training)));
    first.into_iter().chain(other).collect()
}

/// Checks that every reward function can score a completion, here the reference answer of a row, so that a program that does not start or
/// an endpoint that does not answer is found before training.
fn probe_rewards(rewards: &Rewards, tokenizer: &dyn Tokenizer, item: &Item) -> Result<()> {
    let completion = item.answer.as_deref().unwrap_or_default();
    // Text that cannot be encoded is reported by the training step.
    let completion_ids = tokenizer.encode_completion(completion).unwrap_or_default();
    Ok(rewards.probe(&RewardInput {
        item,
        completion,
        truncated: false,
        completion_ids: &completion_ids,
        opens_think: false,
        conversation: None,
    })?)
}

/// Returns the held-out problems of an evaluation; empty if the data set holds none out, which turns evaluation off.
fn held_out(config: &TrainConfig, dataset: &dyn Dataset) -> Result<Vec<Item>> {
    let (key, there) = ("eval.num_problems", dataset.num_held_out());
    let off = there == Some(0) && (config.eval.num_problems.is_none() || !config.data.holds_out());
    if off {
        if config.data.holds_out() {
            let share = config.data.held_out_fraction;
            tracing::warn!(
                "no row is held out with data.held_out_fraction {share}, so evaluation is off: raise it, or name data.eval_files"
            );
        }
        return Ok(Vec::new());
    }
    let count = match (config.eval.num_problems, there) {
        (None, there) => there.map_or(EVAL_PROBLEMS, |all| all.min(EVAL_PROBLEMS)),
        (Some(0), None) => {
            check(false, key, "a number above 0: the data set makes problems without end, so there are no `all`", 0)?;
            0
        }
        (Some(0), Some(all)) => all,
        (Some(wanted), there) => {
            let all = there.unwrap_or(usize::MAX);
            let expected = format!(
                "at most {all}, the held-out rows that there are (0 takes all of them), as in `eval: {{ num_problems: {all} }}`; \
                 data.held_out_fraction and data.eval_files hold out more"
            );
            check(wanted <= all, key, &expected, wanted)?;
            wanted
        }
    };
    let of_each = config.eval.num_generations.max(1);
    let larger = if of_each > count { "eval.num_generations" } else { key };
    let expected = format!("at most {MAX_SEQUENCES} sequences in all");
    let few = count.saturating_mul(of_each) <= MAX_SEQUENCES;
    check(few, larger, &expected, format!("{of_each} for each of {count} problems"))?;
    match dataset.held_out(count) {
        // By default, tasks with few problems are evaluated on all of them.
        Err(grpo_data::Error::TooFewProblems { found, .. }) if config.eval.num_problems.is_none() && found > 0 => {
            Ok(dataset.held_out(found)?)
        }
        items => Ok(items?),
    }
}

/// Checks that the model's context has room for the prompts of `items` and full completions, before the warm-up.
fn check_lengths<'a>(
    (key, longest): (&str, usize),
    tokenizer: &dyn Tokenizer,
    positions: usize,
    items: impl Iterator<Item = &'a Item>,
) -> Result<()> {
    for item in items {
        let prompt = encode_prompt(tokenizer, &item.prompt)?.len();
        // The last token is never an input.
        check(
            (prompt + longest).saturating_sub(1) <= positions,
            key,
            &format!("room for it in model.max_position_embeddings, {positions}, behind a prompt of {prompt} tokens"),
            longest,
        )?;
    }
    Ok(())
}
