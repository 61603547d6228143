//! Checks a configuration beyond the types of its keys.

mod algorithm;
mod distributed;
mod engine;
mod mesh;
mod multi_turn;
mod policy;
mod sampling;

use crate::{
    EVAL_PROBLEMS, LrSchedulerKwargs, LrSchedulerType, ModelSource, OptimizerConfig, Result, TrainConfig, check,
};
use grpo_core::{LossAggMode, LossConfig};
use grpo_models::{CharTokenizer, ModelConfig};
use grpo_policy::{adapter_optimizers, trains_adapters};
use grpo_rewards::Rewards;

/// The maximum number of sequences of a step or an evaluation.
pub const MAX_SEQUENCES: usize = 1 << 20;

impl TrainConfig {
    /// Checks every field and every combination. Limits of a pretrained model (vocabulary, context) are checked when the run starts.
    ///
    /// # Errors
    /// [`crate::Error::Key`], [`crate::Error::Model`], [`crate::Error::Data`] or [`crate::Error::Rewards`] with the key and the reason; [`crate::Error::Loss`] for the
    /// section `loss`.
    pub fn validate(&self) -> Result<()> {
        self.validate_sources()?;
        Rewards::new(&self.rewards)?;
        let context = self.model.shape().map_or(usize::MAX, |shape| shape.max_position_embeddings);
        let vocab = self.model.shape().map_or(usize::MAX, |_| CharTokenizer::VOCAB_SIZE);
        self.validate_for(vocab, context)
    }

    /// Checks that the configuration names both a model and its data: a pretrained model is not trained on the default built-in tasks, and a
    /// new model is not trained on files.
    pub fn validate_sources(&self) -> Result<()> {
        const FILES: &str =
            "rows to train the model on, e.g. `data: {files: train.jsonl}` or `--set data.files=train.jsonl`";
        const MODEL: &str = "the model to train, a folder or a name on Hugging Face, e.g. `model: Qwen/Qwen2.5-0.5B-Instruct` or \
                             `--set model=FOLDER`";
        let has_files = !self.data.files.is_empty();
        let has_data = has_files || self.data.tasks.weights().iter().any(|(_, weight)| *weight != 0.0);
        match &self.model {
            ModelSource::Pretrained(name) => {
                check(has_data, "data.files", FILES, format!("no data for the model {name}"))
            }
            ModelSource::New(shape) if **shape == ModelConfig::default() => {
                check(!has_files, "model", MODEL, "data.files without a model")?;
                check(has_data, "model", MODEL, "neither a model nor data")
            }
            ModelSource::New(_) => check(has_data, "data.files", FILES, "no data for the new model"),
        }
    }

    /// Like [`TrainConfig::validate`], for a tokenizer with `vocab` tokens and a policy with a context of `context` tokens.
    pub fn validate_for(&self, vocab: usize, context: usize) -> Result<()> {
        self.run.validate()?;
        self.wandb.validate()?;
        match &self.model {
            ModelSource::New(shape) => {
                shape.validate()?;
                let expected = format!("the tokenizer's {vocab}");
                check(shape.vocab_size == vocab, "model.vocab_size", &expected, shape.vocab_size)?;
            }
            ModelSource::Pretrained(name) => {
                check(!name.trim().is_empty(), "model", "a model folder or the name of a model", "an empty text")?;
            }
        }
        self.data.validate()?;
        self.optimizer.validate("optimizer")?;
        self.warmup.optimizer.validate("warmup.optimizer")?;
        let name = self.optimizer.settings.name;
        let expected = format!("{} with `lora`", adapter_optimizers());
        check(self.lora.is_none() || trains_adapters(name), "optimizer.name", &expected, name)?;
        if let Some(target) = self.warmup.until_pass_at_1 {
            check((0.0..=1.0).contains(&target), "warmup.until_pass_at_1", "in [0, 1]", target)?;
        }
        self.rewards.validate()?;
        let scale = self.grpo.advantage_scale;
        check(scale.is_finite(), "grpo.advantage_scale", "a finite number", scale)?;
        if let Some(overlong) = &self.rewards.soft_overlong_punishment {
            let longest = self.rollout.max_completion_length();
            check(
                overlong.max_completion_len - overlong.soft_punish_cache < longest,
                "rewards.soft_overlong_punishment",
                &format!("a penalty that begins below rollout.max_completion_length, {longest}"),
                format!("{} - {}", overlong.max_completion_len, overlong.soft_punish_cache),
            )?;
        }
        self.validate_policy()?;
        self.validate_distributed()?;
        self.validate_sampling()?;
        self.validate_engine()?;
        self.validate_logits()?;
        self.validate_counts()?;
        self.validate_ends(vocab, context)?;
        self.validate_parts_of_a_step()?;
        self.validate_algorithm()?;
        self.loss().validate()?;
        self.validate_environments()
    }

    /// Checks that the loss transforms logits as rollouts do.
    fn validate_logits(&self) -> Result<()> {
        let t = self.rollout.temperature();
        check(
            self.loss.temperature == LossConfig::default().temperature || self.loss.temperature == t,
            "loss.temperature",
            "the value of rollout.temperature (or leave it out: the loss is taken at the sampling temperature)",
            self.loss.temperature,
        )?;
        let plain = "left out: rollouts sample from the model's logits as they are";
        check(self.loss.logit_scale == 1.0, "loss.logit_scale", plain, self.loss.logit_scale)?;
        let cap = self.loss.final_logit_softcapping;
        check(cap.is_none(), "loss.final_logit_softcapping", plain, cap.unwrap_or_default())
    }

    /// Checks the numbers of sequences, tokens and steps.
    fn validate_counts(&self) -> Result<()> {
        // Limits are far above trainable sizes and far below sizes that overflow an allocation.
        for (key, count, limit) in [
            ("warmup.batch_size", self.warmup.batch_size, MAX_SEQUENCES),
            ("rollout.max_completion_length", self.rollout.max_completion_length(), usize::MAX),
            ("eval.max_completion_length", self.eval.max_completion_length(&self.rollout), usize::MAX),
            ("rollout.batch_size", self.rollout.batch_size, usize::MAX),
            ("grpo.prompts_per_step", self.grpo.prompts_per_step, MAX_SEQUENCES),
            ("grpo.num_generations", self.grpo.num_generations, MAX_SEQUENCES),
            ("grpo.num_iterations", self.grpo.num_iterations, 1 << 10),
            ("grpo.steps_per_generation", self.grpo.steps_per_generation, MAX_SEQUENCES),
            ("grpo.gradient_accumulation_steps", self.grpo.gradient_accumulation_steps, usize::MAX),
        ] {
            check(count > 0, key, "at least 1", count)?;
            check(count <= limit, key, &format!("at most {limit}"), count)?;
        }
        if let Some(epochs) = self.grpo.num_train_epochs {
            let key = "grpo.num_train_epochs";
            check(epochs.is_finite() && epochs > 0.0, key, "a finite number above 0", epochs)?;
            let expected = "left out without data.files: tasks have rows without end, and grpo.max_steps says how many steps there are";
            check(!self.data.files.is_empty(), key, expected, epochs)?;
        }
        let problems = self.eval.num_problems.unwrap_or(EVAL_PROBLEMS);
        check(problems <= MAX_SEQUENCES, "eval.num_problems", &format!("at most {MAX_SEQUENCES}"), problems)?;
        for (key, groups, per_group) in [
            ("grpo.num_generations", self.grpo.prompts_per_step, self.grpo.num_generations),
            ("eval.num_generations", problems, self.eval.num_generations),
        ] {
            let expected = format!("at most {MAX_SEQUENCES} sequences in all");
            let few = groups.checked_mul(per_group).is_some_and(|all| all <= MAX_SEQUENCES);
            check(few, key, &expected, format!("{per_group} for each of {groups} prompts"))?;
        }
        Ok(())
    }

    /// Checks what ends a completion.
    fn validate_ends(&self, vocab: usize, context: usize) -> Result<()> {
        // A prompt has at least two tokens, and the last token of a completion is never an input.
        for (key, longest) in [
            ("rollout.max_completion_length", self.rollout.max_completion_length),
            ("eval.max_completion_length", self.eval.max_completion_length),
        ] {
            if let Some(longest) = longest {
                let expected = format!("less than model.max_position_embeddings, {context}");
                check(longest < context, key, &expected, longest)?;
            }
        }
        if let Some(id) = self.rollout.stop_token_ids.iter().find(|id| **id as usize >= vocab) {
            check(false, "rollout.stop_token_ids", &format!("ids below {vocab}, the size of the vocabulary"), id)?;
        }
        let has_empty = self.rollout.stop.iter().flatten().any(String::is_empty);
        check(!has_empty, "rollout.stop", "texts that are not empty", "an empty text")
    }

    /// Checks that a step is divided evenly, and by the section `grpo` alone.
    fn validate_parts_of_a_step(&self) -> Result<()> {
        let splits = self.grpo.steps_per_generation;
        check(
            self.grpo.prompts_per_step.is_multiple_of(splits),
            "grpo.steps_per_generation",
            "a divisor of grpo.prompts_per_step",
            splits,
        )?;
        let parts = [
            ("loss.gradient_accumulation_steps", self.loss.gradient_accumulation_steps != 1),
            ("loss.steps_per_generation", self.loss.steps_per_generation.is_some()),
            ("loss.num_processes", self.loss.num_processes != 1),
            ("loss.dp_size", self.loss.dp_size != 1),
            ("loss.num_generations", self.loss.num_generations.is_some()),
            ("loss.micro_batch_size", self.loss.micro_batch_size.is_some()),
        ];
        for (key, is_set) in parts {
            check(!is_set, key, "nothing: the trainer knows how a step is cut", "a value")?;
        }
        let update = self.grpo.prompts_per_step / splits * self.grpo.num_generations;
        check(
            ![self.loss.loss_agg_mode, self.loss.kl_agg_mode].contains(&Some(LossAggMode::TokenMeanLegacy))
                || update.is_multiple_of(self.grpo.micro_batch_sequences()),
            "grpo.gradient_accumulation_steps",
            &format!("a divisor of the {update} sequences of an update, for loss_agg_mode token-mean-legacy"),
            self.grpo.gradient_accumulation_steps,
        )
    }
}

impl OptimizerConfig {
    pub(super) fn validate(&self, section: &str) -> Result<()> {
        let unit = 0.0..=1.0;
        let positive = |x: f64| x.is_finite() && x >= 0.0;
        let settings = &self.settings;
        let momentum = settings.momentum.unwrap_or_default();
        for (name, ok, expected, value) in [
            ("learning_rate", positive(self.learning_rate), "a finite number >= 0", self.learning_rate),
            ("adam_beta1", (0.0..1.0).contains(&settings.adam_beta1), "in [0, 1)", settings.adam_beta1),
            ("momentum", (0.0..1.0).contains(&momentum), "in [0, 1)", momentum),
            ("adam_beta2", (0.0..1.0).contains(&settings.adam_beta2), "in [0, 1)", settings.adam_beta2),
            (
                "adam_epsilon",
                settings.adam_epsilon.is_finite() && settings.adam_epsilon > 0.0,
                "a number above 0",
                settings.adam_epsilon,
            ),
            ("weight_decay", positive(settings.weight_decay), "a finite number >= 0", settings.weight_decay),
            ("max_grad_norm", positive(settings.max_grad_norm), "a finite number >= 0", settings.max_grad_norm),
            ("warmup_ratio", unit.contains(&self.warmup_ratio), "in [0, 1]", self.warmup_ratio),
            ("min_lr_ratio", unit.contains(&self.min_lr_ratio), "in [0, 1]", self.min_lr_ratio),
        ] {
            check(ok, &format!("{section}.{name}"), expected, value)?;
        }
        let steps = self.warmup_steps;
        check(positive(steps), &format!("{section}.warmup_steps"), "a finite number, at least 0", steps)?;
        let alone = steps == 0.0 || self.warmup_ratio == 0.0;
        check(alone, &format!("{section}.warmup_steps"), "one of warmup_steps and warmup_ratio", "both")?;
        self.validate_schedule(section)?;
        if let Some(limit) = settings.skip_grad_norm {
            let ok = limit.is_finite() && limit > 0.0;
            check(ok, &format!("{section}.skip_grad_norm"), "a finite number above 0, or null", limit)?;
        }
        let most = self.max_consecutive_skips;
        check(most > 0, &format!("{section}.max_consecutive_skips"), "at least 1", most)
    }

    /// Checks that the schedule has its required parameters and none of other schedules.
    fn validate_schedule(&self, section: &str) -> Result<()> {
        let name = |schedule| {
            serde_json::to_value(schedule).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
        };
        let (key, schedule) = (format!("{section}.lr_scheduler_kwargs"), self.lr_scheduler_type);
        for (field, value, of) in self.lr_scheduler_kwargs.given() {
            let of_schedule = of.contains(&schedule);
            let names: Vec<String> = of.iter().map(|schedule| name(*schedule)).collect();
            let found = format!("{value} with lr_scheduler_type {}", name(schedule));
            check(
                of_schedule,
                &format!("{key}.{field}"),
                &format!("left out unless lr_scheduler_type is {}", names.join(" or ")),
                found,
            )?;
            check(value.is_finite() && value >= 0.0, &format!("{key}.{field}"), "a finite number, at least 0", value)?;
        }
        let LrSchedulerKwargs { min_lr, min_lr_rate, lr_end, timescale, .. } = &self.lr_scheduler_kwargs;
        if schedule == LrSchedulerType::CosineWithMinLr {
            let expected = "one of min_lr and min_lr_rate for cosine_with_min_lr, e.g. `{min_lr_rate: 0.1}`";
            let found = if min_lr.is_some() { "both" } else { "neither" };
            check(min_lr.is_some() != min_lr_rate.is_some(), &key, expected, found)?;
        }
        for (field, end) in [("min_lr", min_lr), ("lr_end", lr_end)] {
            if let Some(end) = end {
                let expected = format!("below {section}.learning_rate, {}", self.learning_rate);
                check(*end < self.learning_rate, &format!("{key}.{field}"), &expected, end)?;
            }
        }
        // As in transformers, the default of lr_end must be below the learning rate, too.
        let end = lr_end.unwrap_or(1e-7);
        if schedule == LrSchedulerType::Polynomial {
            let expected = format!("above lr_scheduler_kwargs.lr_end, {end}, for polynomial");
            check(self.learning_rate > end, &format!("{section}.learning_rate"), &expected, self.learning_rate)?;
        }
        if let Some(scale) = timescale {
            check(*scale > 0.0, &format!("{key}.timescale"), "above 0", scale)?;
        }
        Ok(())
    }
}
