//! Checks of the program that samples completions.

use crate::{EngineKind, Error, ModelSource, Result, TrainConfig, check};
use grpo_files::KeyError;
use grpo_policy::Sampling;

/// The maximum number of steps that completions may be behind.
const MAX_STALENESS: u64 = 64;

impl TrainConfig {
    /// Checks that `rollout.engine` supports the rest of the configuration.
    pub(super) fn validate_engine(&self) -> Result<()> {
        let rollout = &self.rollout;
        let (engine, staleness) = (rollout.engine, rollout.max_staleness);
        rollout.server.iter().try_for_each(|server| server.validate()).map_err(of_server)?;
        let expected = format!("at most {MAX_STALENESS}");
        check(staleness <= MAX_STALENESS, "rollout.max_staleness", &expected, staleness)?;
        let expected = "0 with environments: conversations are not sampled in the background";
        check(staleness == 0 || self.environments.is_empty(), "rollout.max_staleness", expected, staleness)?;
        if !engine.is_server() {
            let owner = "left out: it is for rollout.engine vllm or sglang";
            return check(rollout.server.is_none(), "rollout.server", owner, "a server");
        }
        let name = engine.name();
        let expected =
            format!("the servers of rollout.engine {name}, e.g. `server: {{base_urls: [http://127.0.0.1:8000]}}`");
        check(rollout.server.is_some(), "rollout.server", &expected, "null")?;
        let of_policy = |reason: &str| format!("policy: {reason}");
        let refused = |ok: bool, reason: &str| check(ok, "rollout.engine", &of_policy(reason), name);
        let is_pretrained = matches!(self.model, ModelSource::Pretrained(_));
        refused(is_pretrained, "a server needs the folder of a pretrained `model`, and this one is new")?;
        refused(
            self.grpo.value_loss().is_none(),
            "grpo.advantages.estimator gae trains a value head, which servers lack",
        )?;
        let is_exact = self.policy.quantization.is_none();
        refused(
            is_exact,
            "servers sample from the weights of the model's folder, and policy.quantization trains on quantised ones",
        )?;
        let distributed = self.distributed.coordinator_address.is_some();
        refused(!distributed, "the processes of distributed.coordinator_address sample themselves")?;
        let expected = format!("left out: rollout.engine {name} shards its model itself");
        check(rollout.mesh.is_none(), "rollout.mesh", &expected, "a mesh")?;
        if rollout.replay_sampling_mask {
            // Otherwise sampling options may come from the model's generation_config.json.
            if !rollout.use_generation_config {
                self.validate_masks()?;
            }
        } else if engine == EngineKind::Sglang {
            // Its log-probabilities are over the whole softmax.
            let active = rollout.processors().active();
            let truncating = active.iter().find(|(name, ..)| ["top_k", "top_p", "min_p"].contains(name));
            if let Some((option, value, off)) = truncating {
                let expected = format!(
                    "{off}, or rollout.replay_sampling_mask: true; SGLang reports log-probabilities without this option"
                );
                check(false, &format!("rollout.{option}"), &expected, value)?;
            }
        }
        Ok(())
    }

    /// Checks that a server can return sampling masks with the run's sampling options, after those of a model's generation_config.json are
    /// known ([`TrainConfig::with_generation_defaults`]).
    ///
    /// # Errors
    /// [`Error::Key`] with the sampling option that the masks need.
    pub fn validate_masks(&self) -> Result<()> {
        let (rollout, eval) = (&self.rollout, &self.eval);
        let has_top_k = |top_k: Option<usize>| top_k.is_some_and(|k| k > 0);
        let of = rollout.processors();
        if rollout.engine == EngineKind::Policy || !rollout.replay_sampling_mask {
            return Ok(());
        }
        if rollout.engine == EngineKind::Sglang {
            let is_bounded = has_top_k(of.top_k) || of.top_p.is_some_and(|p| p < 1.0);
            let expected = "at least 1, or rollout.top_p below 1: SGLang returns no other sampling masks";
            return check(is_bounded, "rollout.top_k", expected, of.top_k.unwrap_or(0));
        }
        let expected = "at least 1 with rollout.replay_sampling_mask: vLLM returns masks of bounded size only";
        check(has_top_k(of.top_k), "rollout.top_k", expected, of.top_k.unwrap_or(0))?;
        match eval.sampling(rollout, self.seed) {
            Sampling::Random { processors, .. } if eval.num_generations > 0 => {
                let expected =
                    "at least 1 with rollout.replay_sampling_mask: a vLLM that returns masks takes no other requests";
                check(has_top_k(processors.top_k), "eval.top_k", expected, processors.top_k.unwrap_or(0))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the error of a key as an error of this crate.
fn of_server(error: grpo_engines::Error) -> Error {
    match error {
        grpo_engines::Error::Config(KeyError { key, expected, found }) => Error::Key { key, expected, found },
        other => Error::key("rollout.server", "servers that can be used", other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::vllm("{}", "")]
    #[case::sglang("{rollout: {engine: sglang}}", "")]
    #[case::behind("{rollout: {max_staleness: 4}}", "")]
    #[case::truncated("{rollout: {top_p: 0.9}}", "")]
    #[case::no_server("{rollout: {server: null}}", "`rollout.server`: expected the servers of rollout.engine vllm")]
    #[case::no_engine("{rollout: {engine: policy}}", "`rollout.server`: expected left out")]
    #[case::no_url("{rollout: {server: {base_urls: []}}}", "`rollout.server.base_urls`: expected the address")]
    #[case::twice("{rollout: {server: {base_urls: ['http://a', 'http://a/']}}}", "the same address twice")]
    #[case::time("{rollout: {server: {timeout: 0}}}", "`rollout.server.timeout`")]
    #[case::retries("{rollout: {server: {retries: 5000}}}", "`rollout.server.retries`: expected at most 1024")]
    #[case::name("{rollout: {server: {model: ' '}}}", "names that are not empty")]
    #[case::tools("{environments: {a: {built_in: calculator}}}", "")]
    #[case::tools_behind(
        "{environments: {a: {built_in: calculator}}, rollout: {max_staleness: 1}}",
        "`rollout.max_staleness`: expected 0 with environments"
    )]
    #[case::far("{rollout: {max_staleness: 65}}", "`rollout.max_staleness`: expected at most 64, got 65")]
    #[case::values(
        "{grpo: {advantages: {estimator: gae}}}",
        "`rollout.engine`: expected policy: grpo.advantages.estimator"
    )]
    #[case::processes(
        "{distributed: {coordinator_address: 'a:1', num_processes: 2, process_id: 0}}",
        "`rollout.engine`: expected policy: the processes of distributed.coordinator_address"
    )]
    #[case::quantized(
        "{lora: {r: 4}, policy: {quantization: nf4}}",
        "`rollout.engine`: expected policy: servers sample from the weights of the model's folder"
    )]
    #[case::mesh("{rollout: {mesh: {data: 1}}, policy: {device: 'pjrt:cpu', mesh: {fsdp: 2}}}", "`rollout.mesh`")]
    #[case::sglang_top_p(
        "{rollout: {engine: sglang, top_p: 0.9}}",
        "`rollout.top_p`: expected 1, or rollout.replay_sampling_mask: true"
    )]
    #[case::replay("{rollout: {top_k: 20, replay_sampling_mask: true}}", "")]
    #[case::replay_without_top_k(
        "{rollout: {top_p: 0.9, replay_sampling_mask: true}}",
        "`rollout.top_k`: expected at least 1 with rollout.replay_sampling_mask"
    )]
    #[case::replay_and_evaluation(
        "{rollout: {top_k: 20, replay_sampling_mask: true}, eval: {top_k: 0}}",
        "`eval.top_k`: expected at least 1 with rollout.replay_sampling_mask"
    )]
    #[case::replay_and_greedy_evaluation(
        "{rollout: {top_k: 20, replay_sampling_mask: true}, eval: {top_k: 0, num_generations: 0}}",
        ""
    )]
    #[case::replay_of_the_model("{rollout: {replay_sampling_mask: true, use_generation_config: true}}", "")]
    #[case::sglang_replay("{rollout: {engine: sglang, top_p: 0.9, replay_sampling_mask: true}}", "")]
    #[case::sglang_replay_of_min_p(
        "{rollout: {engine: sglang, min_p: 0.1, replay_sampling_mask: true}}",
        "`rollout.top_k`: expected at least 1, or rollout.top_p below 1"
    )]
    #[case::replay_routing(
        "{policy: {replay_routing: true}}",
        "`policy.replay_routing`: expected false with rollout.engine vllm"
    )]
    #[case::replay_routing_on_a_device(
        "{rollout: {engine: policy, server: null}, policy: {replay_routing: true, device: 'pjrt:cpu'}}",
        ""
    )]
    #[case::replay_routing_on_the_host("{rollout: {engine: policy, server: null}, policy: {replay_routing: true}}", "")]
    #[case::adapted_experts(
        "{lora: {target_parameters: [experts.down_proj]}}",
        "`lora.target_parameters`: expected [] with rollout.engine vllm"
    )]
    #[case::adapted_experts_on_a_device(
        "{rollout: {engine: policy, server: null}, lora: {target_parameters: [experts.down_proj]}, policy: {device: 'pjrt:cpu'}}",
        ""
    )]
    #[case::aux_loss(
        "{policy: {router_aux_loss_coef: -1}}",
        "`policy.router_aux_loss_coef`: expected a finite number from 0"
    )]
    #[case::replay_penalty(
        "{rollout: {engine: policy, server: null, repetition_penalty: 1.1, replay_sampling_mask: true}}",
        "`rollout.repetition_penalty`: expected 1 with rollout.replay_sampling_mask"
    )]
    #[case::replay_policy("{rollout: {engine: policy, server: null, min_p: 0.1, replay_sampling_mask: true}}", "")]
    #[case::sglang_penalty("{rollout: {engine: sglang, repetition_penalty: 1.1, top_k: 0}}", "")]
    fn unsupported_combinations_are_refused_by_key(#[case] layer: &str, #[case] words: &str) {
        let base = "{model: some/model, data: {files: rows.jsonl}, rollout: {engine: vllm, server: {base_urls: ['http://a:1']}}}";
        let layers = grpo_files::Layers::new().text("base", base).unwrap().text("a test", layer).unwrap();
        let result = TrainConfig::from_layers(layers).and_then(|config| config.validate_for(usize::MAX, usize::MAX));
        match result {
            Ok(()) => assert_eq!(words, ""),
            Err(error) => assert!(!words.is_empty() && error.to_string().contains(words), "{error}"),
        }
    }

    #[test]
    fn new_models_are_refused() {
        let mut config = TrainConfig::built_in();
        config.rollout.engine = EngineKind::Vllm;
        config.rollout.server =
            Some(crate::ServerConfig { base_urls: vec!["http://a".into()], ..crate::ServerConfig::default() });
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains("`rollout.engine`") && error.contains("pretrained `model`"), "{error}");
    }

    #[test]
    fn correction_for_the_sampler_is_on_with_an_engine_unless_switched_off() {
        let of = |layer: &str| {
            let base = "{model: some/model, data: {files: rows.jsonl}}";
            let layers = grpo_files::Layers::new().text("base", base).unwrap().text("a test", layer).unwrap();
            let loss = TrainConfig::from_layers(layers).unwrap().loss();
            (loss.asks_for_sampler_logp(), loss.vllm_importance_sampling_correction)
        };
        assert_eq!(of("{}"), (false, None));
        assert_eq!(of("{rollout: {engine: vllm}}"), (true, Some(true)));
        assert_eq!(of("{rollout: {engine: vllm}, loss: {semantics: verl}}"), (true, Some(true)));
        let off = "{rollout: {engine: vllm}, loss: {vllm_importance_sampling_correction: false}}";
        assert_eq!(of(off), (false, Some(false)));
        let verl = "{rollout: {engine: vllm}, loss: {semantics: verl, rollout_is: token, rollout_is_threshold: 2.0}}";
        assert_eq!(of(verl), (true, None));
    }
}
