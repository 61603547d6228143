//! `grpo data`: shows the prompts and rewards that a policy will get from data files.

use crate::data_text;
use crate::layers;
use crate::output::{Outcome, emit, emit_json};
use anyhow::Context;
use grpo_data::{DataReport, Item, Prompt, PromptEncoder};
use grpo_files::Layers;
use grpo_models::{HfTokenizer, ModelFolder, Tokenizer};
use grpo_rewards::{RewardInput, Rewards};
use grpo_trainer::{ModelSource, TrainConfig};
use serde_json::json;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The limit of rows over which sources are counted.
const MOST_ROWS: usize = 10_000;

/// Arguments of `grpo data`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Every row is read as in `grpo train`: a row that is not JSON, lacks its prompt, or is rejected by the chat template \
    is an error with its file and line, and the exit code is 2. Every reward function, programs and endpoints included, is tried on \
    the rows on which `grpo train` tries it; one that fails is named with its error, and the exit code is 1. Nothing is sampled, and no \
    weights are read. The section `data` of a configuration defines how rows become prompts, `rewards` how answers are scored."
)]
pub(crate) struct Args {
    /// Files of rows (JSON lines, JSON, Parquet), or a data set on the Hugging Face Hub [default: data.files of the configuration].
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The model folder, or a model's name, whose tokenizer and chat template are used [default: the configuration's model].
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// YAML or JSON file as for `grpo train`; its sections data, rewards and rollout are used.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Set one key, after the file and the environment; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    set: Vec<String>,
    /// The number of prompts that are shown, from the beginning of the training stream.
    #[arg(long, value_name = "N", default_value_t = 3)]
    show: usize,
    /// The number of rows whose reference answers are scored.
    #[arg(long, value_name = "N", default_value_t = 64)]
    judge: usize,
    /// Print one JSON document instead of text.
    #[arg(long)]
    json: bool,
}

/// The document of `--json`.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Summary {
    pub(crate) files: Vec<File>,
    /// The number of tokens of every prompt, including dropped ones, in file order.
    pub(crate) prompt_lengths: Vec<usize>,
    /// The largest number of tokens of a prompt, and the key or property of the model that limits it.
    pub(crate) max_prompt_length: Option<usize>,
    /// The number of tokens of every reference completion in the inspected rows, including its last token; of the answer, if a row has no
    /// completion.
    pub(crate) completion_lengths: Vec<usize>,
    /// The number of tokens after which completions are cut off.
    pub(crate) max_completion_length: usize,
    pub(crate) sources: BTreeMap<String, usize>,
    pub(crate) prompts: Vec<Row>,
    /// The result of every reward function on the rows on which a run tries it.
    pub(crate) tried: Vec<Tried>,
    pub(crate) rewards: Vec<Judged>,
    /// The number of prompts that contain special-token strings.
    pub(crate) special_text: usize,
    /// The column that most likely has the right answers, if rows have none and no reward needs one.
    pub(crate) likely_answer_column: Option<String>,
    /// The reason for which `grpo train` refuses these rows.
    pub(crate) problem: Option<String>,
}

/// Counts of a file's rows.
#[derive(Debug, serde::Serialize)]
pub(crate) struct File {
    pub(crate) path: PathBuf,
    pub(crate) rows: usize,
    pub(crate) training: usize,
    pub(crate) held_out: usize,
    pub(crate) dropped: BTreeMap<String, usize>,
}

/// A row as the policy receives it.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Row {
    pub(crate) source: String,
    /// The prompt's tokens as text, including special ones.
    pub(crate) prompt: String,
    pub(crate) tokens: usize,
    pub(crate) answer: Option<String>,
}

/// The result of a reward function on one row.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Tried {
    pub(crate) reward: String,
    /// The section of a program or an endpoint.
    pub(crate) section: Option<String>,
    /// The completion that was scored: the row's reference answer, or an empty text.
    pub(crate) completion: String,
    /// The reward; `None` if the function does not apply, or failed.
    pub(crate) value: Option<f32>,
    pub(crate) failure: Option<String>,
}

/// The results of a reward function on reference answers.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Judged {
    pub(crate) reward: String,
    /// The scored text: the answer, or the whole completion of a row.
    pub(crate) of: &'static str,
    /// The number of rows with such a text.
    pub(crate) rows: usize,
    /// The mean over the rows for which the function returned a reward.
    pub(crate) mean: Option<f64>,
    /// The number of rows for which it returned none.
    pub(crate) none: usize,
    /// The number of rows on which it failed, and its first error.
    pub(crate) failed: usize,
    pub(crate) failure: Option<String>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let mut config = TrainConfig::from_layers(layers(&args)?)?;
    anyhow::ensure!(!config.data.files.is_empty(), "no data: expected files, or data.files in the configuration");
    config.data.validate()?;
    grpo_setup::expand_paths(&mut config.data)?;
    config.data.check_files()?;
    let ModelSource::Pretrained(model) = &config.model else {
        anyhow::bail!("no model: expected --model FOLDER, or `model` in the configuration")
    };
    let model = grpo_data::at_home(model.as_str().as_ref()).to_string_lossy().into_owned();
    let folder =
        ModelFolder::open(&grpo_models::Hub::from_env().locate_tokenizer(&model, config.model_revision.as_deref())?)?;
    let config = config.with_context(folder.config().max_position_embeddings);
    let tokenizer = grpo_setup::open_tokenizer(&folder, &config.data)?;
    let (mut summary, report, items, tried) = summarise(&args, &config, &folder, &tokenizer)?;
    // A reward program may be missing, or never answer. Everything else is printed first.
    if !args.json {
        emit(&data_text::rows(&summary))?;
    }
    let rewards = Rewards::new(&config.rewards)?;
    let checked = grpo_setup::check_rows(&config.data, &report, &rewards, tokenizer.has_chat_template());
    summary.problem = checked.err().map(|error| format!("{:#}", anyhow::Error::from(error)));
    if rewards.needing_answers().next().is_none() {
        summary.likely_answer_column = report.likely_answer_column().map(str::to_owned);
    }
    if !args.json && !tried.is_empty() {
        emit(&data_text::trial(tried.len()))?;
    }
    for (index, name) in rewards.names().enumerate() {
        for item in &tried {
            let tried = try_reward(&rewards, index, name, &config, &tokenizer, item);
            if !args.json {
                emit(&data_text::tried(&tried))?;
            }
            summary.tried.push(tried);
        }
    }
    let failed = summary.tried.iter().find(|tried| tried.failure.is_some());
    if let Some((tried, failure)) = failed.and_then(|tried| Some((tried, tried.failure.as_ref()?))) {
        let problem = format!("the reward `{}` cannot judge a completion: {failure}", tried.reward);
        summary.problem = summary.problem.or(Some(problem));
    }
    let works = |name: &str| summary.tried.iter().all(|tried| tried.reward != name || tried.failure.is_none());
    let works: Vec<usize> =
        rewards.names().enumerate().filter(|(_, name)| works(name)).map(|(index, _)| index).collect();
    summary.rewards = judge(&rewards, &works, &tokenizer, &items.iter().take(args.judge).collect::<Vec<_>>())?;
    match args.json {
        true => emit_json(&summary)?,
        false => emit(&data_text::judged(&summary))?,
    }
    let Some(problem) = summary.problem else { return Ok(Outcome::Done) };
    tracing::error!("{problem}");
    Ok(Outcome::CheckFailed)
}

/// Returns the layers of `grpo train`, overridden by the arguments.
fn layers(args: &Args) -> anyhow::Result<Layers> {
    let mut layers = layers::of_run(args.config.as_ref(), &args.set)?;
    if let Some(model) = &args.model {
        layers = layers.value("--model", json!({"model": model}))?;
    }
    if !args.files.is_empty() {
        layers = layers.value("FILE", json!({"data": {"files": args.files}}))?;
    }
    Ok(layers)
}

/// Returns the summary without rewards, the counts of rows, the inspected rows, and the rows on which a run tries reward functions.
fn summarise(
    args: &Args,
    config: &TrainConfig,
    folder: &ModelFolder,
    tokenizer: &HfTokenizer,
) -> anyhow::Result<(Summary, DataReport, Vec<Item>, Vec<Item>)> {
    let longest = folder.config().max_position_embeddings.saturating_sub(config.rollout.max_completion_length());
    // As conversations begin, with the tools that the configuration names. Programs and servers are not started.
    let environments = grpo_trainer::agents::Environments::described(&config.environments)?;
    let shown = |item: &Item| grpo_conversations::with_tools(&environments, item).into_owned();
    let seen = RefCell::new((vec![], 0));
    let count = |prompts: &[&Prompt], _| {
        // A prompt alone does not name one of several environments.
        let prompts: Vec<Prompt> = prompts.iter().map(|prompt| shown(&Item::new((*prompt).clone()))).collect();
        let prompts: Vec<&Prompt> = prompts.iter().collect();
        let prompts = &prompts[..];
        // Not up to a limit: all lengths are shown.
        let found = grpo_setup::count_tokens(tokenizer, &config.data, prompts, 0);
        let (lengths, special) = &mut *seen.borrow_mut();
        for (prompt, length) in prompts.iter().zip(&found) {
            lengths.extend(length.as_ref().ok());
            let is_text = !matches!(prompt, Prompt::Rendered(_));
            *special += usize::from(is_text && tokenizer.special_token(&prompt.to_string()).is_some());
        }
        found
    };
    let encoder = PromptEncoder {
        has_chat_template: tokenizer.has_chat_template(),
        max_tokens: Some(longest),
        count: &count,
        is_exact: true,
    };
    let (mut rows, report) = grpo_data::open(&config.data, config.seed, &encoder, None)?;
    let report = report.context("the data set has no files")?;
    let (prompt_lengths, special_text) = seen.take();
    let items = rows.next_batch(report.training().min(MOST_ROWS))?;
    let mut sources = BTreeMap::new();
    for item in &items {
        *sources.entry(item.source.to_string()).or_default() += 1;
    }
    let prompts = items.iter().take(args.show).map(|item| {
        let ids = grpo_conversations::encode_prompt(tokenizer, &shown(item))?;
        let prompt = tokenizer.decode_with_special(&ids)?;
        Ok(Row { source: item.source.to_string(), prompt, tokens: ids.len(), answer: item.answer.clone() })
    });
    let prompts = prompts.collect::<anyhow::Result<Vec<_>>>()?;
    let right = items.iter().filter_map(|item| item.completion.as_deref().or(item.answer.as_deref()));
    let completion_lengths = right.map(|text| Ok(tokenizer.encode_completion(text)?.len()));
    let completion_lengths = completion_lengths.collect::<anyhow::Result<Vec<_>>>()?;
    let max_prompt_length = Some(config.data.max_prompt_length.map_or(longest, |limit| limit.min(longest)));
    // 0 would be all of them.
    let held_out = if report.held_out() > 0 { rows.held_out(1)? } else { vec![] };
    let tried = grpo_trainer::rows_to_try(held_out.first(), rows.probe(1)?.first()).into_iter().cloned().collect();
    let summary = Summary {
        files: files(&report),
        prompt_lengths,
        max_prompt_length,
        completion_lengths,
        max_completion_length: config.rollout.max_completion_length(),
        sources,
        prompts,
        tried: vec![],
        rewards: vec![],
        special_text,
        likely_answer_column: None,
        problem: None,
    };
    Ok((summary, report, items, tried))
}

fn files(report: &DataReport) -> Vec<File> {
    let file = |file: &grpo_data::FileReport| File {
        path: file.path.clone(),
        rows: file.rows,
        training: file.training,
        held_out: file.held_out,
        dropped: file.dropped.clone(),
    };
    report.files.iter().map(file).collect()
}

/// Returns the result of the reward function at `index` for a row, as a run tries it at its start: on the reference answer, or on an empty text.
fn try_reward(
    rewards: &Rewards,
    index: usize,
    name: &str,
    config: &TrainConfig,
    tokenizer: &HfTokenizer,
    item: &Item,
) -> Tried {
    let completion = item.answer.as_deref().unwrap_or_default();
    // Text that cannot be encoded is an error of the reference answers.
    let completion_ids = tokenizer.encode_completion(completion).unwrap_or_default();
    let input = RewardInput { completion_ids: &completion_ids, ..RewardInput::new(item, completion) };
    let score = rewards.score_some(&[index], &[input]).pop();
    let section = |kind: &str, is_known: bool| is_known.then(|| format!("rewards.{kind}.{name}"));
    let external = &config.rewards;
    Tried {
        reward: name.to_owned(),
        section: section("programs", external.programs.contains_key(name))
            .or(section("http", external.http.contains_key(name))),
        completion: completion.to_owned(),
        value: score.as_ref().and_then(|score| score.terms[index]),
        failure: score.and_then(|score| score.failures.first().map(|(_, failure)| failure.to_string())),
    }
}

/// Returns the rewards of reference answers and, if rows have them, reference completions, by the functions at `works`.
fn judge(rewards: &Rewards, works: &[usize], tokenizer: &HfTokenizer, items: &[&Item]) -> anyhow::Result<Vec<Judged>> {
    let answer: fn(&Item) -> Option<&str> = |item| item.answer.as_deref();
    let completion: fn(&Item) -> Option<&str> = |item| item.completion.as_deref();
    let mut judged = vec![];
    for (of, text) in [("answer", answer), ("completion", completion)] {
        let rows = items.iter().filter_map(|item| Some((*item, text(item)?)));
        let rows = rows.map(|(item, completion)| {
            let opens_think = grpo_conversations::opens_think(
                tokenizer,
                &grpo_conversations::encode_prompt(tokenizer, &item.prompt)?,
            );
            Ok((item, completion, tokenizer.encode_completion(completion)?, opens_think))
        });
        let rows = rows.collect::<anyhow::Result<Vec<_>>>()?;
        let inputs: Vec<_> = rows
            .iter()
            .map(|(item, completion, ids, opens_think)| RewardInput {
                item,
                completion,
                truncated: false,
                completion_ids: ids,
                opens_think: *opens_think,
                conversation: None,
            })
            .collect();
        let scores = rewards.score_some(works, &inputs);
        let names = rewards.names().enumerate().filter(|(index, _)| works.contains(index) && !inputs.is_empty());
        for (index, name) in names {
            let terms: Vec<f64> = scores.iter().filter_map(|score| score.terms[index].map(f64::from)).collect();
            let mut failures = scores.iter().flat_map(|score| &score.failures).filter(|(term, _)| *term == index);
            let failure = failures.next().map(|(_, failure)| failure.to_string());
            let failed = usize::from(failure.is_some()) + failures.count();
            judged.push(Judged {
                reward: name.to_owned(),
                of,
                rows: inputs.len(),
                mean: (!terms.is_empty()).then(|| terms.iter().sum::<f64>() / terms.len() as f64),
                none: inputs.len() - terms.len() - failed,
                failed,
                failure,
            });
        }
    }
    Ok(judged)
}
