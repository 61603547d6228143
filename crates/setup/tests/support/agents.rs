//! Agents that hold conversations over the endpoint.

use super::conversations::{Questions, tokenizer};
use grpo_data::Item;
use grpo_policy::RolloutEngine;
use grpo_rewards::Rewards;
use grpo_trainer::agents::{Agent, Connection, Environments, Failure};
use grpo_trainer::{Result, TrainConfig, Trainer};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

/// A function as an agent: its arguments are the connection and the index of the conversation in the run.
pub(crate) struct Function(
    pub(crate) fn(&Client<'_>, usize) -> std::result::Result<Option<f32>, Failure>,
    pub(crate) Mutex<usize>,
);

impl Agent for Function {
    fn run(&self, _: &Item, connection: &Connection, _: usize) -> std::result::Result<Option<f32>, Failure> {
        let index = {
            let mut count = self.1.lock().unwrap();
            *count += 1;
            *count - 1
        };
        (self.0)(&Client(connection), index)
    }
}

pub(crate) struct Client<'a>(pub(crate) &'a Connection);

impl Client<'_> {
    /// Sends a request with more fields, and returns the status and the body.
    pub(crate) fn send(&self, messages: &[Value], more: Value) -> (u16, Value) {
        let mut body = json!({"model": "policy", "messages": messages});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        let agent = ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().new_agent();
        let request = agent.post(format!("{}/chat/completions", self.0.base_url())).content_type("application/json");
        let request = request.header("Authorization", format!("Bearer {}", self.0.api_key()));
        let mut response = request.send(body.to_string()).unwrap();
        let text = response.body_mut().read_to_string().unwrap();
        (response.status().as_u16(), serde_json::from_str(&text).unwrap())
    }

    /// Returns the message and the reason of its end.
    pub(crate) fn ask(&self, messages: &[Value], more: Value) -> (Value, String) {
        let (status, body) = self.send(messages, more);
        assert_eq!(status, 200, "{body}");
        let choice = &body["choices"][0];
        (choice["message"].clone(), choice["finish_reason"].as_str().unwrap().to_owned())
    }

    /// Returns the code of a refusal.
    pub(crate) fn refusal(&self, messages: &[Value], more: Value) -> (u16, String) {
        let (status, body) = self.send(messages, more);
        (status, body["error"]["code"].as_str().unwrap_or_else(|| panic!("{body}")).to_owned())
    }
}

pub(crate) fn user(content: &str) -> Value {
    json!({"role": "user", "content": content})
}

pub(crate) type Hold = fn(&Client<'_>, usize) -> std::result::Result<Option<f32>, Failure>;

pub(crate) fn trainer(
    config: TrainConfig,
    hold: Hold,
    rewards: Rewards,
    engine: Box<dyn RolloutEngine>,
) -> Result<Trainer> {
    let agent: Arc<dyn Agent> = Arc::new(Function(hold, Mutex::new(0)));
    let environments = Environments::from_agents(vec![("test".into(), agent)]);
    let mut parts =
        grpo_setup::parts_with_tokenizer(&config, Box::new(tokenizer())).unwrap().with_environments(environments);
    (parts.dataset, parts.rewards, parts.engine) = (Box::new(Questions(0)), rewards, engine);
    Trainer::with_parts(config, parts)
}
