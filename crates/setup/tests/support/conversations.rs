//! Conversations with an environment, with the tokenizer and template of Qwen2.5.

use agents::{Environment, Environments, Episode, Failure, Reply, Start};
use grpo_data::{Dataset, Item, Prompt};
use grpo_models::{HfTokenizer, ModelConfig};
use grpo_policy::RolloutEngine;
use grpo_rewards::Rewards;
use grpo_trainer::{Result, TrainConfig, Trainer, agents};
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) const QUESTION: &str = "What is 6 x 7?";

pub(crate) fn tokenizer() -> HfTokenizer {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/chat/qwen2_5");
    HfTokenizer::open(folder.as_ref(), &[], 512).unwrap()
}

/// The same question again and again.
pub(crate) struct Questions(pub(crate) u64);

impl Dataset for Questions {
    fn next_batch(&mut self, count: usize) -> grpo_data::Result<Vec<Item>> {
        self.0 += count as u64;
        self.probe(count)
    }

    fn probe(&self, count: usize) -> grpo_data::Result<Vec<Item>> {
        let messages = vec![json!({"role": "user", "content": QUESTION})];
        let item = Item::new(Prompt::Messages { messages, tools: None, documents: None }).with_answer("42");
        Ok(vec![item; count])
    }

    fn cursor(&self) -> u64 {
        self.0
    }

    fn set_cursor(&mut self, cursor: u64) {
        self.0 = cursor;
    }
}

/// An environment from a function of the number of the turn, from 0 for the reset, and the message.
#[derive(Clone)]
pub(crate) struct Turns(pub(crate) fn(usize, &Value) -> std::result::Result<Reply, Failure>, pub(crate) usize);

impl Environment for Turns {
    fn reset(&self, _: &Item, _: usize) -> std::result::Result<Start, Failure> {
        let Reply { messages, .. } = (self.0)(0, &Value::Null)?;
        Ok(Start { messages, episode: Box::new(Turns(self.0, 1)) })
    }
}

impl Episode for Turns {
    fn step(&mut self, message: &Value) -> std::result::Result<Reply, Failure> {
        self.1 += 1;
        (self.0)(self.1 - 1, message)
    }
}

pub(crate) fn user(content: &str) -> Reply {
    Reply { messages: vec![json!({"role": "user", "content": content})], ..Reply::default() }
}

pub(crate) fn config(settings: Value) -> TrainConfig {
    let shape = ModelConfig {
        vocab_size: 512,
        hidden_size: 16,
        intermediate_size: 16,
        num_hidden_layers: 1,
        max_position_embeddings: 1024,
        ..ModelConfig::default()
    };
    let mut config = TrainConfig { model: shape.into(), ..TrainConfig::built_in() };
    config.warmup.steps = 0;
    config.grpo.max_steps = 3;
    (config.grpo.prompts_per_step, config.grpo.num_generations) = (1, 2);
    (config.grpo.steps_per_generation, config.grpo.gradient_accumulation_steps) = (1, 1);
    config.rollout.max_completion_length = Some(400);
    config.rollout.multi_turn = serde_json::from_value(settings).unwrap();
    config.data.held_out_fraction = 0.0;
    config
}

pub(crate) fn trainer(
    config: TrainConfig,
    environment: impl Environment + 'static,
    rewards: Rewards,
    engine: Box<dyn RolloutEngine>,
) -> Result<Trainer> {
    let environments = Environments::from_list(vec![("test".into(), Arc::new(environment))]);
    // Parts of a configuration need a vocabulary of the tokenizer's size.
    let mut parts =
        grpo_setup::parts_with_tokenizer(&config, Box::new(tokenizer())).unwrap().with_environments(environments);
    (parts.dataset, parts.rewards, parts.engine) = (Box::new(Questions(0)), rewards, engine);
    Trainer::with_parts(config, parts)
}

/// A game of three turns, whose reward is the number of times that the last message has an `e`.
pub(crate) fn letters() -> Turns {
    Turns(
        |turn, message| {
            let reward = message["content"].as_str().map(|text| text.matches('e').count() as f32);
            let next = user(&"again ".repeat(turn + 1));
            Ok(Reply { reward: reward.filter(|_| turn > 0), done: turn == 3, ..next })
        },
        0,
    )
}
