//! The protocol of SGLang: `/generate` with token ids, adapters at `/load_lora_adapter`, and whole models by `/update_weights_from_disk`.

use crate::completion::{Finish, Sampled};
use crate::http::{Fault, Http, MAX_REPLY, Reply};
use crate::protocol::{Facts, Flags, Job, LoraLimits, Needs, Protocol, Random};
use crate::weights::Weights;
use serde::Deserialize;
use serde_json::{Value, json};

pub(crate) struct Sglang;

#[derive(Deserialize)]
struct Generated {
    output_ids: Vec<u64>,
    meta_info: MetaInfo,
}

#[derive(Deserialize)]
struct MetaInfo {
    finish_reason: FinishReason,
    /// Log-probability, id and text of each token.
    output_token_logprobs: Vec<(Option<f64>, u64, Option<String>)>,
    /// The kept ids of each token, and its log-probability over them; only if a request asks for masks.
    output_token_sampling_mask: Option<Vec<Vec<u64>>>,
    output_token_sampling_logprobs: Option<Vec<Option<f64>>>,
}

#[derive(Deserialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
    /// The stop token, or the stop text.
    matched: Option<Value>,
}

impl Protocol for Sglang {
    fn program(&self) -> &'static str {
        "SGLang"
    }

    fn flags(&self) -> Flags {
        Flags {
            context: "--context-length",
            max_rank: "--max-lora-rank",
            max_adapters: "--max-loras-per-batch",
            lora: "--enable-lora",
            masks: None,
        }
    }

    fn command(&self, model: &str, port: &str, needs: &Needs<'_>) -> String {
        let Flags { max_rank, max_adapters, lora, .. } = self.flags();
        let server = "python3 -m sglang.launch_server";
        let mut command = format!("{server} --model-path {model}{port} --enable-deterministic-inference");
        if let Some((rank, adapters)) = needs.lora {
            command.push_str(&format!(" {lora} {max_rank} {rank} {max_adapters} {adapters}"));
        }
        command
    }

    fn facts(&self, http: &Http, model: Option<&str>) -> Result<Facts, Fault> {
        http.ok("/health", http.get("/health")?)?;
        let info = http.json("/server_info", http.get("/server_info")?)?;
        let text = |key: &str| info[key].as_str().map(str::to_owned);
        let number = |key: &str| info[key].as_u64().map(|number| number as usize);
        let name = text("served_model_name").or(text("model_path")).unwrap_or_default();
        if let Some(model) = model.filter(|model| *model != name) {
            let found = http.show(&name);
            return Err(Fault::Permanent(format!(
                "/server_info: expected the model `{model}` of rollout.server.model, got `{found}`"
            )));
        }
        let has_adapters = info["enable_lora"] == true;
        let mut facts = Facts {
            model: name,
            version: text("version").unwrap_or_default(),
            context: number("context_length"),
            dtype: text("dtype").filter(|dtype| dtype != "auto"),
            keeps_tied_head: false,
            quantization: text("quantization"),
            weights: Some(self.weights_name(http)?).filter(|name| !name.is_empty()),
            lora: has_adapters
                .then(|| LoraLimits { max_rank: number("max_lora_rank"), max_adapters: number("max_loras_per_batch") }),
            // Requests ask for them; a version without them ignores the key, and its replies are refused.
            returns_masks: true,
            needs_top_k: false,
            wrong: None,
        };
        if info["enable_deterministic_inference"] != true {
            facts.wrong = Some((
                "sampling with the seeds of requests".into(),
                "a server that ignores them".into(),
                "start SGLang with `--enable-deterministic-inference`".into(),
            ));
        }
        Ok(facts)
    }

    fn replace_weights(&self, http: &Http, weights: &Weights) -> Result<(), Fault> {
        // Running requests go back to the queue and recompute their keys and values with the new weights.
        success(http, "/pause_generation", &json!({ "mode": "retract" }))?;
        let update = json!({
            "model_path": weights.folder.to_string_lossy(),
            "weight_version": weights.name,
            "flush_cache": true,
            "abort_all_requests": false,
        });
        success(http, "/update_weights_from_disk", &update)?;
        success(http, "/continue_generation", &json!({}))
    }

    fn weights_name(&self, http: &Http) -> Result<String, Fault> {
        let info = http.json("/model_info", http.get("/model_info")?)?;
        Ok(info["weight_version"].as_str().unwrap_or_default().to_owned())
    }

    fn load_adapter(&self, http: &Http, weights: &Weights) -> Result<(), Fault> {
        let route = "/load_lora_adapter";
        let body = json!({ "lora_name": weights.name, "lora_path": weights.folder.to_string_lossy() });
        let reply = http.post(route, &body, MAX_REPLY)?;
        // An earlier attempt has loaded the adapter, and its reply was lost: names are never used twice.
        if reply.text.contains("already exists") {
            return Ok(());
        }
        succeeded(http, route, reply)
    }

    fn unload_adapter(&self, http: &Http, name: &str) -> Result<(), Fault> {
        success(http, "/unload_lora_adapter", &json!({ "lora_name": name }))
    }

    fn sample(&self, http: &Http, _: &Facts, job: &Job, adapter: Option<&str>) -> Result<Vec<Sampled>, Fault> {
        let path = "/generate";
        let reply = http.post(path, &request(job, adapter), job.max_reply())?;
        if reply.status == 400 && adapter.is_some_and(|name| reply.text.contains(name)) {
            // The server was restarted.
            return Err(Fault::Forgotten(format!("{path}: status 400: {}", http.show(&reply.text))));
        }
        let value = http.json(path, reply)?;
        let all: Vec<Generated> = serde_json::from_value(value)
            .map_err(|error| Fault::Permanent(format!("{path}: expected a list of completions: {error}")))?;
        if all.len() != job.count {
            return Err(Fault::Permanent(format!("{path}: expected {} completions, got {}", job.count, all.len())));
        }
        all.into_iter().map(|generated| sampled(path, job, generated)).collect()
    }
}

/// Returns the body of a request: the prompt once per completion, because each has its own seed.
fn request(job: &Job, adapter: Option<&str>) -> Value {
    let params = |index: usize| {
        let mut params = json!({
            "max_new_tokens": job.max_tokens,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": job.stop_ids,
            "stop": job.stop_texts,
            "no_stop_trim": true,
            "skip_special_tokens": false,
        });
        if let Some(Random { temperature, processors, seed }) = job.random {
            params["sampling_seed"] = (seed + index as u64).into();
            params["temperature"] = temperature.into();
            params["top_p"] = processors.top_p.unwrap_or(1.0).into();
            params["top_k"] = processors.top_k.filter(|k| *k > 0).map_or(json!(-1), |k| k.into());
            params["min_p"] = processors.min_p.unwrap_or(0.0).into();
            params["repetition_penalty"] = processors.repetition_penalty.unwrap_or(1.0).into();
        }
        params
    };
    let mut body = json!({
        "input_ids": vec![&job.prompt; job.count],
        "sampling_params": (0..job.count).map(params).collect::<Vec<_>>(),
        "return_logprob": true,
        "logprob_start_len": -1,
        "stream": false,
    });
    if job.masks {
        body["return_sampling_mask"] = true.into();
    }
    if let Some(name) = adapter {
        body["lora_path"] = vec![name; job.count].into();
    }
    body
}

fn sampled(path: &str, job: &Job, generated: Generated) -> Result<Sampled, Fault> {
    let Generated { output_ids: ids, meta_info } = generated;
    let MetaInfo { finish_reason, output_token_logprobs, .. } = meta_info;
    if !output_token_logprobs.iter().map(|(_, id, _)| id).eq(&ids) {
        return Err(Fault::Permanent(format!(
            "{path}: expected the log-probabilities of output_ids, got those of other ids"
        )));
    }
    // SGLang ends a completion with non-finite logits in this way, and replaces its last token.
    let is_text = |text: &str| job.stop_texts.iter().any(|stop| stop == text);
    if finish_reason.matched.as_ref().and_then(Value::as_str).is_some_and(|text| !is_text(text)) {
        let found = finish_reason.matched.unwrap_or_default();
        return Err(Fault::Permanent(format!(
            "{path}: expected a completion that ends with a stop of the run, got {found}"
        )));
    }
    let (masks, logps) = (meta_info.output_token_sampling_mask, meta_info.output_token_sampling_logprobs);
    let logps: Vec<Option<f64>> = match (job.masks, logps) {
        // The others are over the whole vocabulary.
        (true, Some(logps)) => logps,
        (true, None) => {
            let found = "none: install SGLang 0.5.20 or later";
            return Err(Fault::Permanent(format!("{path}: expected output_token_sampling_logprobs, got {found}")));
        }
        (false, _) => output_token_logprobs.into_iter().map(|(logp, _, _)| logp).collect(),
    };
    Ok(Sampled {
        ids,
        logps: logps.into_iter().map(|logp| logp.unwrap_or(f64::NAN)).collect(),
        masks,
        finish: Finish::named(&finish_reason.kind),
        weights: None,
    })
}

/// Posts a command, whose reply must not have `success: false`.
fn success(http: &Http, path: &str, body: &Value) -> Result<(), Fault> {
    succeeded(http, path, http.post(path, body, MAX_REPLY)?)
}

/// Checks a reply that says whether a request has succeeded.
fn succeeded(http: &Http, path: &str, reply: Reply) -> Result<(), Fault> {
    let reply = http.json(path, reply)?;
    match reply["success"] == false {
        true => Err(Fault::Permanent(format!("{path}: {}", http.show(&reply.to_string())))),
        false => Ok(()),
    }
}
