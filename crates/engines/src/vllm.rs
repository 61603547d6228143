//! The protocol of vLLM: `/v1/completions` with token ids, or `/inference/v1/generate`, which also returns sampling masks; adapters at
//! `/v1/load_lora_adapter`, and whole models by `reload_weights`.

use crate::completion::{Finish, NamedSpan, Sampled};
use crate::http::{Fault, Http, MAX_REPLY};
use crate::protocol::{Facts, Flags, Job, LoraLimits, Needs, Protocol, Random};
use crate::weights::Weights;
use serde::Deserialize;
use serde_json::{Value, json};

/// The first version with all endpoints that a run uses.
const OLDEST: (u64, u64) = (0, 32);

pub(crate) struct Vllm;

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    /// The model that an adapter belongs to.
    parent: Option<String>,
    max_model_len: Option<usize>,
}

/// A reply of `/v1/completions` or `/inference/v1/generate`.
#[derive(Deserialize)]
struct Completions {
    model: String,
    choices: Vec<Choice>,
    /// Of `/inference/v1/generate`; `/v1/completions` has it in every choice.
    prompt_token_ids: Option<Vec<u64>>,
}

#[derive(Deserialize)]
struct Choice {
    index: usize,
    finish_reason: Option<String>,
    token_ids: Option<Vec<u64>>,
    prompt_token_ids: Option<Vec<u64>>,
    logprobs: Option<Logprobs>,
    weight_versions: Option<Vec<NamedSpan>>,
    /// The kept ids of each token, only of `/inference/v1/generate`.
    sampling_mask: Option<Vec<Vec<u64>>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Logprobs {
    /// Of `/v1/completions`.
    Numbers { token_logprobs: Vec<Option<f64>> },
    /// Of `/inference/v1/generate`.
    Tokens { content: Vec<TokenLogprob> },
}

#[derive(Deserialize)]
struct TokenLogprob {
    token_id: u64,
    logprob: Option<f64>,
}

impl Protocol for Vllm {
    fn program(&self) -> &'static str {
        "vLLM"
    }

    fn flags(&self) -> Flags {
        Flags {
            context: "--max-model-len",
            max_rank: "--max-lora-rank",
            max_adapters: "--max-loras",
            lora: "--enable-lora",
            masks: Some("--return-sampling-mask --enable-scale-out"),
        }
    }

    fn command(&self, model: &str, port: &str, needs: &Needs<'_>) -> String {
        let Flags { max_rank, max_adapters, lora, masks, .. } = self.flags();
        let mut command = format!("vllm serve {model}{port} --logprobs-mode processed_logprobs");
        let mut variables = "VLLM_SERVER_DEV_MODE=1 ".to_owned();
        if let Some((rank, adapters)) = needs.lora {
            variables.push_str("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 ");
            // vLLM takes powers of two from 8 on.
            let rank = rank.next_power_of_two().max(8);
            command.push_str(&format!(" {lora} {max_rank} {rank} {max_adapters} {adapters}"));
        }
        if let Some(masks) = masks.filter(|_| needs.masks) {
            command.push_str(&format!(" {masks}"));
        }
        variables + &command
    }

    fn facts(&self, http: &Http, model: Option<&str>) -> Result<Facts, Fault> {
        http.ok("/health", http.get("/health")?)?;
        let version = http.json("/version", http.get("/version")?)?;
        let version = version["version"].as_str().unwrap_or_default().to_owned();
        let models: Models = parsed("/v1/models", http.json("/v1/models", http.get("/v1/models")?)?)?;
        let model = named(&models.data, model)?;
        let mut facts = Facts { model: model.id.clone(), context: model.max_model_len, ..Facts::default() };
        let numbers: Vec<u64> = version.split('.').take(2).map_while(|part| part.parse().ok()).collect();
        let wrong = |expected: &str, found: &str, fix: &str| Some((expected.into(), found.to_owned(), fix.to_owned()));
        if !matches!(numbers[..], [major, minor] if (major, minor) >= OLDEST) {
            facts.wrong = wrong("vLLM 0.32 or later", &http.show(&version), "install a later vLLM");
            return Ok(facts);
        }
        facts.version = version;
        let path = "/server_info?config_format=json";
        let info = http.get(path)?;
        if info.status == 404 {
            let found = "a server without these routes";
            let fix = "start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1, in a network that only this run reaches";
            facts.wrong = wrong("the routes for weight updates", found, fix);
            return Ok(facts);
        }
        let info = http.json(path, info)?;
        let config = &info["vllm_config"];
        let (model_config, lora) = (&config["model_config"], &config["lora_config"]);
        let text = |value: &Value| value.as_str().map(|text| text.trim_start_matches("torch.").to_owned());
        facts.dtype = text(&model_config["dtype"]);
        facts.quantization = text(&model_config["quantization"]);
        facts.returns_masks = model_config["return_sampling_mask"] == true;
        facts.needs_top_k = facts.returns_masks;
        // On a CPU, vLLM packs a copy of the head for its products. `reload_weights` packs again only what the folder has under the head's name.
        facts.keeps_tied_head = config["device_config"]["device"] == "cpu";
        let number = |value: &Value| value.as_u64().map(|number| number as usize);
        facts.weights = Some(self.weights_name(http)?).filter(|name| !name.is_empty());
        facts.lora = lora
            .is_object()
            .then(|| LoraLimits { max_rank: number(&lora["max_lora_rank"]), max_adapters: number(&lora["max_loras"]) });
        if let Some(mode) = text(&model_config["logprobs_mode"]).filter(|mode| mode != "processed_logprobs") {
            let expected = "log-probabilities of the distribution that tokens are sampled from";
            facts.wrong = wrong(expected, &mode, "start vLLM with `--logprobs-mode processed_logprobs`");
        }
        Ok(facts)
    }

    fn replace_weights(&self, http: &Http, weights: &Weights) -> Result<(), Fault> {
        // Requests that are running stand still and go on with the new weights.
        done(http, "/pause?mode=keep", &json!({}))?;
        let folder = weights.folder.to_string_lossy();
        let reload = json!({ "method": "reload_weights", "kwargs": { "weights_path": folder } });
        done(http, "/collective_rpc", &reload)?;
        // Otherwise later requests would read keys and values of the old weights.
        let path = "/reset_prefix_cache?reset_running_requests=true";
        let reset = http.json(path, http.post(path, &json!({}), MAX_REPLY)?)?;
        if reset["success"] != true {
            return Err(Fault::temporary(format!(
                "{path}: expected {{\"success\": true}}, got {}",
                http.show(&reset.to_string())
            )));
        }
        done(http, "/update_weight_version", &json!({ "new_version": weights.name }))?;
        done(http, "/resume", &json!({}))
    }

    fn weights_name(&self, http: &Http) -> Result<String, Fault> {
        let info = http.json("/weight_info", http.get("/weight_info")?)?;
        Ok(info["weight_version"].as_str().unwrap_or_default().to_owned())
    }

    fn load_adapter(&self, http: &Http, weights: &Weights) -> Result<(), Fault> {
        let path = "/v1/load_lora_adapter";
        let body = json!({ "lora_name": weights.name, "lora_path": weights.folder.to_string_lossy() });
        let reply = http.post(path, &body, MAX_REPLY)?;
        match reply.status {
            // An earlier attempt, whose reply was lost, has loaded the adapter: names are never used twice.
            400 if reply.text.contains("already been loaded") => Ok(()),
            404 if reply.text.contains("Not Found") => Err(Fault::Permanent(format!(
                "{path}: expected a server that loads adapters at any time, got status 404; start vLLM with the environment variable \
                 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and with --enable-lora"
            ))),
            404 => Err(Fault::Permanent(format!(
                "{path}: {}; the server must see {} under the same path (rollout.server.weights_dir)",
                http.show(&reply.text),
                weights.folder.display()
            ))),
            _ => http.ok(path, reply).map(drop),
        }
    }

    fn unload_adapter(&self, http: &Http, name: &str) -> Result<(), Fault> {
        done(http, "/v1/unload_lora_adapter", &json!({ "lora_name": name }))
    }

    fn sample(&self, http: &Http, facts: &Facts, job: &Job, adapter: Option<&str>) -> Result<Vec<Sampled>, Fault> {
        let model = adapter.unwrap_or(&facts.model);
        let (path, body) = match facts.returns_masks {
            true => ("/inference/v1/generate", masked_request(model, job)),
            false => ("/v1/completions", request(model, job)),
        };
        let reply = http.post(path, &body, job.max_reply())?;
        if reply.status == 404 && adapter.is_some() {
            // The server was restarted.
            return Err(Fault::Forgotten(format!("{path}: status 404: {}", http.show(&reply.text))));
        }
        if reply.status == 403 && facts.returns_masks {
            let reason = http.show(&reply.text);
            return Err(Fault::Permanent(format!(
                "{path}: status 403: {reason}; start vLLM with `--enable-scale-out`, and rollout.server.api_key_env names the variable with \
                 the key, if there is one"
            )));
        }
        let Completions { model: found, mut choices, prompt_token_ids } = parsed(path, http.json(path, reply)?)?;
        if found != model {
            let (expected, found) = (http.show(model), http.show(&found));
            return Err(Fault::Permanent(format!(
                "{path}: expected completions of the model `{expected}`, got `{found}`"
            )));
        }
        check_prompt(path, job, prompt_token_ids)?;
        choices.sort_by_key(|choice| choice.index);
        if choices.len() != job.count {
            let found = choices.len();
            return Err(Fault::Permanent(format!("{path}: expected {} completions, got {found}", job.count)));
        }
        if let Some((expected, choice)) =
            choices.iter().enumerate().find(|(expected, choice)| choice.index != *expected)
        {
            let (last, found) = (job.count - 1, choice.index);
            return Err(Fault::Permanent(format!(
                "{path}: expected each `index` from 0 to {last} once in the completions, got {found} in the place of {expected}"
            )));
        }
        choices.into_iter().map(|choice| sampled(path, job, choice)).collect()
    }
}

/// Returns the body of a request to `/v1/completions`.
fn request(model: &str, job: &Job) -> Value {
    let mut body = params(job);
    body["model"] = model.into();
    body["prompt"] = job.prompt.clone().into();
    body["return_token_ids"] = true.into();
    body["return_weight_versions"] = true.into();
    body
}

/// Returns the body of a request to `/inference/v1/generate` of a server with `--return-sampling-mask`.
fn masked_request(model: &str, job: &Job) -> Value {
    let mut params = params(job);
    if job.random.is_none() {
        // Such a server refuses a temperature of 0, and requests without top_k.
        params["temperature"] = 1.0.into();
        params["top_k"] = 1.into();
    }
    // vLLM looks for stop texts in the text.
    params["detokenize"] = (!job.stop_texts.is_empty()).into();
    json!({ "model": model, "token_ids": job.prompt, "sampling_params": params, "return_token_ids": true })
}

/// Returns the sampling options of a request. All options are given, because the server takes others from the model's generation_config.json.
fn params(job: &Job) -> Value {
    let mut params = json!({
        "n": job.count,
        "max_tokens": job.max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        // The run's stop tokens, and no others.
        "ignore_eos": true,
        "stop_token_ids": job.stop_ids,
        "stop": job.stop_texts,
        "include_stop_str_in_output": true,
        "skip_special_tokens": false,
        "logprobs": 0,
    });
    if let Some(Random { temperature, processors, seed }) = job.random {
        params["seed"] = seed.into();
        params["temperature"] = temperature.into();
        params["top_p"] = processors.top_p.unwrap_or(1.0).into();
        params["top_k"] = processors.top_k.filter(|k| *k > 0).map_or(json!(-1), |k| k.into());
        params["min_p"] = processors.min_p.unwrap_or(0.0).into();
        params["repetition_penalty"] = processors.repetition_penalty.unwrap_or(1.0).into();
    }
    params
}

fn sampled(path: &str, job: &Job, choice: Choice) -> Result<Sampled, Fault> {
    let Choice { index, finish_reason, token_ids, prompt_token_ids, logprobs, weight_versions, sampling_mask } = choice;
    let missing = |what: &str| Fault::Permanent(format!("{path}: expected {what} in completion {index}, got none"));
    check_prompt(path, job, prompt_token_ids)?;
    let (logprobs, ids) =
        (logprobs.ok_or_else(|| missing("logprobs"))?, token_ids.ok_or_else(|| missing("token_ids"))?);
    let logps: Vec<Option<f64>> = match logprobs {
        Logprobs::Numbers { token_logprobs } => token_logprobs,
        Logprobs::Tokens { content } if content.iter().map(|token| &token.token_id).ne(&ids) => {
            let message = format!("{path}: expected the log-probabilities of token_ids, got those of other ids");
            return Err(Fault::Permanent(message));
        }
        Logprobs::Tokens { content } => content.into_iter().map(|token| token.logprob).collect(),
    };
    Ok(Sampled {
        ids,
        logps: logps.into_iter().map(|logp| logp.unwrap_or(f64::NAN)).collect(),
        finish: Finish::named(&finish_reason.unwrap_or_default()),
        weights: weight_versions,
        masks: sampling_mask,
    })
}

/// Checks that a reply is about the prompt of the request, if it says so.
fn check_prompt(path: &str, job: &Job, found: Option<Vec<u64>>) -> Result<(), Fault> {
    match found.is_some_and(|found| !found.iter().copied().eq(job.prompt.iter().map(|id| u64::from(*id)))) {
        true => {
            let message = format!("{path}: expected completions of the prompt of the request, got another prompt");
            Err(Fault::Permanent(message))
        }
        false => Ok(()),
    }
}

/// Returns the model of this name or, without one, the only model that is no adapter.
fn named<'a>(models: &'a [Model], name: Option<&str>) -> Result<&'a Model, Fault> {
    let bases: Vec<&Model> = models.iter().filter(|model| model.parent.is_none()).collect();
    let found = match name {
        Some(name) => bases.iter().find(|model| model.id == name),
        None => bases.first().filter(|_| bases.len() == 1),
    };
    found.copied().ok_or_else(|| {
        let ids: Vec<&str> = bases.iter().map(|model| &*model.id).collect();
        let expected =
            name.map_or("one model".to_owned(), |name| format!("the model `{name}` of rollout.server.model"));
        Fault::Permanent(format!("/v1/models: expected {expected}, got {ids:?}; rollout.server.model chooses one"))
    })
}

/// Posts a command whose reply has no content of interest.
fn done(http: &Http, path: &str, body: &Value) -> Result<(), Fault> {
    http.ok(path, http.post(path, body, MAX_REPLY)?).map(drop)
}

fn parsed<T: serde::de::DeserializeOwned>(path: &str, value: Value) -> Result<T, Fault> {
    serde_json::from_value(value).map_err(|error| Fault::Permanent(format!("{path}: expected another reply: {error}")))
}
