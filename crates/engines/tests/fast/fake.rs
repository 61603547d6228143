//! A server that speaks the protocols of vLLM and SGLang, samples from real weights, and misbehaves on request.

use grpo_backend_cpu::CpuBackend;
use grpo_core::{Implementation, LossConfig};
use grpo_models::{Adapter, ModelFolder};
use grpo_policy::{Completion, LogitsProcessors, Policy, RolloutRequest, Sampling};
use grpo_policy_cpu::{CpuPolicy, PolicyLoss};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Vllm,
    Sglang,
}

/// A reply, possibly other than the right one.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    /// A status and a body.
    Say(u16, String),
    /// Nothing: the connection ends.
    Close,
    /// Nothing, while the client waits.
    Hang,
}

impl Reply {
    pub(crate) fn json(value: Value) -> Self {
        Self::Say(200, value.to_string())
    }
}

/// Returns the reply to a request, from the number of earlier requests to the same path, the path, and the right reply.
type Behave = dyn Fn(&Fake, usize, &str, Reply) -> Reply + Send + Sync;

/// A running server.
#[derive(Clone)]
pub(crate) struct Fake {
    pub(crate) url: String,
    shared: Arc<Shared>,
}

struct Shared {
    program: Program,
    folder: PathBuf,
    /// The facts that the server reports about itself.
    info: Mutex<Value>,
    state: Mutex<State>,
    resumed: Condvar,
    requests: Mutex<Vec<(String, Value)>>,
    heads: Mutex<Vec<String>>,
    behave: Box<Behave>,
}

/// The state that a restart loses.
struct State {
    current: CpuPolicy,
    name: String,
    /// Weights that are loaded, and used once the prefix cache is reset.
    loaded: Option<CpuPolicy>,
    is_paused: bool,
    adapters: BTreeMap<String, CpuPolicy>,
}

fn loss() -> PolicyLoss {
    let config = LossConfig::default().into();
    PolicyLoss { config, backend: Arc::new(CpuBackend::new()), implementation: Implementation::Fused, max_tokens: 64 }
}

pub(crate) fn whole(folder: &Path) -> Result<CpuPolicy, String> {
    let folder = ModelFolder::open(folder).map_err(|error| error.to_string())?;
    let weights = folder.weights().map_err(|error| error.to_string())?;
    CpuPolicy::from_weights(folder.config(), &weights, loss()).map_err(|error| error.to_string())
}

fn adapted(folder: &Path, adapter: &Path) -> Result<CpuPolicy, String> {
    let model = ModelFolder::open(folder).map_err(|error| error.to_string())?;
    let adapter = Adapter::open(adapter, model.config()).map_err(|error| error.to_string())?;
    whole(folder)?.with_adapter(&adapter).map_err(|error| error.to_string())
}

impl State {
    fn new(folder: &Path) -> Self {
        let (name, adapters) = ("default".to_owned(), BTreeMap::new());
        Self { current: whole(folder).unwrap(), name, loaded: None, is_paused: false, adapters }
    }
}

impl Fake {
    /// Starts a server of the model in `folder`, which behaves.
    pub(crate) fn start(program: Program, folder: &Path) -> Self {
        Self::behaving(program, folder, |_, _, _, right| right)
    }

    /// Starts a server that replies with the results of `behave`.
    pub(crate) fn behaving(
        program: Program,
        folder: &Path,
        behave: impl Fn(&Fake, usize, &str, Reply) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Shared {
            program,
            folder: folder.to_owned(),
            info: Mutex::new(info(program, folder)),
            state: Mutex::new(State::new(folder)),
            resumed: Condvar::new(),
            requests: Mutex::default(),
            heads: Mutex::default(),
            behave: Box::new(behave),
        };
        let fake = Self { url, shared: Arc::new(shared) };
        let server = fake.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = server.clone();
                std::thread::spawn(move || drop(server.answer(&stream)));
            }
        });
        fake
    }

    /// Changes what the server says about itself.
    pub(crate) fn with_info(self, change: impl FnOnce(&mut Value)) -> Self {
        change(&mut self.shared.info.lock().unwrap());
        self
    }

    /// Forgets all weights that were sent, as a restart does.
    pub(crate) fn restart(&self) {
        *self.state() = State::new(&self.shared.folder);
    }

    /// Returns the requests to a path, in order.
    pub(crate) fn requests(&self, path: &str) -> Vec<Value> {
        let requests = self.shared.requests.lock().unwrap();
        requests.iter().filter(|(found, _)| found == path).map(|(_, body)| body.clone()).collect()
    }

    /// Returns the paths of all requests, in order.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.shared.requests.lock().unwrap().iter().map(|(path, _)| path.clone()).collect()
    }

    /// Returns the heads of all requests, in lower case.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.shared.heads.lock().unwrap().clone()
    }

    /// Returns the names of the loaded adapters.
    pub(crate) fn adapters(&self) -> Vec<String> {
        self.state().adapters.keys().cloned().collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    fn answer(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        let (mut first, mut head, mut length) = (String::new(), String::new(), 0);
        reader.read_line(&mut first)?;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 || line == "\r\n" {
                break;
            }
            head += &line.to_lowercase();
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        self.shared.heads.lock().unwrap().push(head);
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let path = first.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap_or_default().to_owned();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let number = {
            let mut requests = self.shared.requests.lock().unwrap();
            let number = requests.iter().filter(|(found, _)| *found == path).count();
            requests.push((path.clone(), body.clone()));
            number
        };
        let right = self.right(&path, &body).unwrap_or_else(|message| Reply::Say(500, message));
        match (self.shared.behave)(self, number, &path, right) {
            Reply::Say(status, text) => {
                let length = text.len();
                write!(
                    stream,
                    "HTTP/1.1 {status} Said\r\nContent-Length: {length}\r\nRetry-After: 0\r\nConnection: close\r\n\r\n{text}"
                )
            }
            Reply::Close => Ok(()),
            Reply::Hang => {
                std::thread::sleep(std::time::Duration::from_secs(30));
                Ok(())
            }
        }
    }

    /// Returns the right reply to a request.
    fn right(&self, path: &str, body: &Value) -> Result<Reply, String> {
        let done = || Reply::json(json!({ "success": true, "message": "" }));
        let folder = |value: &Value| PathBuf::from(value.as_str().unwrap_or_default());
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(match (self.shared.program, path) {
            (_, "/health") => Reply::Say(200, String::new()),
            (_, "/server_info") => Reply::json(self.shared.info.lock().unwrap().clone()),
            (Program::Vllm, "/version") => {
                Reply::json(json!({ "version": self.shared.info.lock().unwrap()["version"] }))
            }
            (Program::Vllm, "/v1/models") => {
                let info = self.shared.info.lock().unwrap().clone();
                let mut models = vec![json!({"id": "m", "parent": null, "max_model_len": info["max_model_len"]})];
                models.extend(self.adapters().iter().map(|name| json!({"id": name, "parent": "m"})));
                Reply::json(json!({ "data": models }))
            }
            (Program::Vllm, "/weight_info") => Reply::json(json!({ "weight_version": self.state().name })),
            (Program::Sglang, "/model_info") => Reply::json(json!({ "weight_version": self.state().name })),
            (Program::Vllm, "/pause") | (Program::Sglang, "/pause_generation") => {
                self.state().is_paused = true;
                done()
            }
            (Program::Vllm, "/resume") | (Program::Sglang, "/continue_generation") => {
                self.state().is_paused = false;
                self.shared.resumed.notify_all();
                done()
            }
            (Program::Vllm, "/collective_rpc") => {
                assert_eq!(body["method"], "reload_weights");
                let mut state = self.state();
                if !state.is_paused {
                    return Err("weights are reloaded while requests run".into());
                }
                state.loaded = Some(whole(&folder(&body["kwargs"]["weights_path"]))?);
                Reply::json(json!({ "results": [null] }))
            }
            (Program::Vllm, "/reset_prefix_cache") => {
                let mut state = self.state();
                if let Some(loaded) = state.loaded.take() {
                    state.current = loaded;
                }
                done()
            }
            (Program::Vllm, "/update_weight_version") => {
                self.state().name = text(&body["new_version"]);
                done()
            }
            (Program::Sglang, "/update_weights_from_disk") => {
                let mut state = self.state();
                if !state.is_paused {
                    return Err("weights are updated while requests run".into());
                }
                (state.current, state.name) = (whole(&folder(&body["model_path"]))?, text(&body["weight_version"]));
                done()
            }
            (Program::Vllm, "/v1/load_lora_adapter") | (Program::Sglang, "/load_lora_adapter") => {
                let (name, path) = (text(&body["lora_name"]), folder(&body["lora_path"]));
                if !path.exists() {
                    return Ok(Reply::Say(404, "Loading lora failed: No adapter found".into()));
                }
                if self.state().adapters.contains_key(&name) {
                    let error = match self.shared.program {
                        Program::Vllm => format!("The lora adapter '{name}' has already been loaded."),
                        Program::Sglang => format!("LoRA with name {name} already exists."),
                    };
                    return Ok(Reply::Say(400, error));
                }
                let adapter = adapted(&self.shared.folder, &path)?;
                self.state().adapters.insert(name, adapter);
                done()
            }
            (Program::Vllm, "/v1/unload_lora_adapter") | (Program::Sglang, "/unload_lora_adapter") => {
                match self.state().adapters.remove(body["lora_name"].as_str().unwrap_or_default()) {
                    Some(_) => done(),
                    None => Reply::Say(404, "unknown adapter".into()),
                }
            }
            (Program::Vllm, "/v1/completions") => self.completions(body)?,
            (Program::Vllm, "/inference/v1/generate") => self.masked_completions(body)?,
            (Program::Sglang, "/generate") => self.generated(body)?,
            _ => Reply::Say(404, "{\"detail\":\"Not Found\"}".into()),
        })
    }

    /// Waits while the server is paused.
    fn running(&self) -> MutexGuard<'_, State> {
        let state = self.state();
        self.shared.resumed.wait_while(state, |state| state.is_paused).unwrap()
    }

    /// Replies as a server with `--return-sampling-mask`.
    fn masked_completions(&self, body: &Value) -> Result<Reply, String> {
        if self.shared.info.lock().unwrap()["enable_scale_out"] == false {
            return Ok(Reply::Say(403, "Scale-out endpoints are disabled".into()));
        }
        let params = &body["sampling_params"];
        if params["top_k"].as_i64() < Some(1) || params["temperature"].as_f64() <= Some(0.0) {
            return Ok(Reply::Say(400, "sampling distribution replay requires temperature > 0 and top_k > 0".into()));
        }
        let mut state = self.running();
        let (name, model) = (state.name.clone(), body["model"].as_str().unwrap().to_owned());
        let stops: Vec<u32> = serde_json::from_value(params["stop_token_ids"].clone()).unwrap();
        let prompt: Vec<u32> = serde_json::from_value(body["token_ids"].clone()).unwrap();
        let mut choices = Vec::new();
        for index in 0..params["n"].as_u64().unwrap() {
            // A seed of its own, as vLLM has for requests without one.
            let seed = params["seed"].as_u64().unwrap_or(77) + index;
            let completion = sampled(&mut state.current, &prompt, params, Some(seed), &stops, "max_tokens")?;
            let pairs = completion.ids.iter().zip(&completion.logps);
            let tokens: Vec<Value> =
                pairs.map(|(id, logp)| json!({"token_id": id, "logprob": logp, "rank": 1})).collect();
            choices.push(json!({
                "index": index,
                "finish_reason": if completion.truncated { "length" } else { "stop" },
                "weight_versions": [{"version": name, "start": 0, "end": completion.ids.len()}],
                "token_ids": completion.ids,
                "sampling_mask": masks(&completion),
                "logprobs": {"content": tokens},
            }));
        }
        Ok(Reply::json(json!({ "model": model, "choices": choices, "prompt_token_ids": prompt })))
    }

    fn completions(&self, body: &Value) -> Result<Reply, String> {
        let model = body["model"].as_str().unwrap_or_default().to_owned();
        let mut state = self.running();
        let name = state.name.clone();
        let policy = match model == "m" {
            true => &mut state.current,
            false => match state.adapters.get_mut(&model) {
                Some(adapter) => adapter,
                None => return Ok(Reply::Say(404, format!("The model `{model}` does not exist."))),
            },
        };
        let stops: Vec<u32> = serde_json::from_value(body["stop_token_ids"].clone()).unwrap();
        let prompt: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
        let count = body["n"].as_u64().unwrap();
        let mut choices = Vec::new();
        for index in 0..count {
            let seed = body["seed"].as_u64().map(|seed| seed + index);
            let Completion { ids, logps, truncated, .. } = sampled(policy, &prompt, body, seed, &stops, "max_tokens")?;
            choices.push(json!({
                "index": index,
                "finish_reason": if truncated { "length" } else { "stop" },
                "weight_versions": [{"version": name, "start": 0, "end": ids.len()}],
                "token_ids": ids,
                "prompt_token_ids": prompt,
                "logprobs": {"token_logprobs": logps},
            }));
        }
        // Not in order, as clients must expect.
        choices.reverse();
        Ok(Reply::json(json!({ "model": model, "choices": choices })))
    }

    fn generated(&self, body: &Value) -> Result<Reply, String> {
        let mut state = self.running();
        let mut all = Vec::new();
        for (index, params) in body["sampling_params"].as_array().unwrap().iter().enumerate() {
            let adapter = body["lora_path"][index].as_str().map(str::to_owned);
            let policy = match &adapter {
                None => &mut state.current,
                Some(name) => match state.adapters.get_mut(name) {
                    Some(adapter) => adapter,
                    None => return Ok(Reply::Say(400, format!("LoRA adapter {name} is not loaded"))),
                },
            };
            let stops: Vec<u32> = serde_json::from_value(params["stop_token_ids"].clone()).unwrap();
            let prompt: Vec<u32> = serde_json::from_value(body["input_ids"][index].clone()).unwrap();
            let seed = params["sampling_seed"].as_u64();
            let completion = sampled(policy, &prompt, params, seed, &stops, "max_new_tokens")?;
            let masks = masks(&completion);
            let Completion { ids, logps, truncated, .. } = completion;
            let tokens: Vec<Value> = ids.iter().zip(&logps).map(|(id, logp)| json!([logp, id, null])).collect();
            let finish = match truncated {
                true => json!({"type": "length", "length": ids.len()}),
                false => json!({"type": "stop", "matched": ids.last()}),
            };
            let mut meta = json!({"finish_reason": finish, "output_token_logprobs": tokens, "weight_version": "?"});
            if body["return_sampling_mask"] == true {
                meta["output_token_sampling_mask"] = masks.into();
                meta["output_token_sampling_logprobs"] = logps.into();
                // Those over the whole vocabulary are others.
                let others = meta["output_token_logprobs"].as_array_mut().unwrap();
                others.iter_mut().for_each(|token| token[0] = json!(token[0].as_f64().unwrap() - 1.0));
            }
            all.push(json!({ "output_ids": ids, "meta_info": meta }));
        }
        Ok(Reply::json(all.into()))
    }
}

fn sampled(
    policy: &mut CpuPolicy,
    prompt: &[u32],
    params: &Value,
    seed: Option<u64>,
    stop_ids: &[u32],
    longest: &str,
) -> Result<Completion, String> {
    let processors = LogitsProcessors {
        top_p: params["top_p"].as_f64(),
        top_k: params["top_k"].as_u64().map(|k| k as usize),
        min_p: params["min_p"].as_f64(),
        repetition_penalty: params["repetition_penalty"].as_f64(),
    };
    let sampling = match seed {
        Some(seed) => Sampling::Random {
            temperature: params["temperature"].as_f64().unwrap(),
            processors,
            seed,
            purpose: grpo_rng::Purpose::Rollout,
            step: 0,
            first: 0,
        },
        None => Sampling::Greedy,
    };
    let prompts = [prompt.to_vec()];
    let max_completion_length = params[longest].as_u64().unwrap() as usize;
    let request = RolloutRequest {
        prompts: &prompts,
        num_generations: 1,
        max_completion_length,
        stop_ids,
        stop: None,
        sampling,
        return_sampling_mask: true,
        return_routed_experts: false,
        turn: None,
    };
    Ok(policy.generate(&request).map_err(|error| error.to_string())?.remove(0))
}

/// Returns the sampling mask of every token, with all ids where none was left out.
fn masks(completion: &Completion) -> Vec<Vec<u32>> {
    let kept = |token| completion.sampling_mask.kept(token).map(<[u32]>::to_vec);
    (0..completion.ids.len()).map(|token| kept(token).unwrap_or_else(|| (0..24).collect())).collect()
}

/// Returns what a server that fits a run says about itself.
fn info(program: Program, folder: &Path) -> Value {
    match program {
        Program::Vllm => json!({
            "version": "0.32.0",
            "max_model_len": 64,
            "vllm_config": {
                "model_config": {"dtype": "torch.float32", "quantization": null, "logprobs_mode": "processed_logprobs"},
                "lora_config": {"max_lora_rank": 8, "max_loras": 4},
            },
        }),
        Program::Sglang => json!({
            "version": "0.5.23",
            "model_path": folder,
            "served_model_name": "m",
            "context_length": 64,
            "dtype": "float32",
            "quantization": null,
            "enable_lora": true,
            "max_lora_rank": 8,
            "max_loras_per_batch": 4,
            "enable_deterministic_inference": true,
        }),
    }
}
