//! `grpo init`: writes a run's configuration for a model and rows, derived from their properties.

mod columns;
mod file;
mod rows;
mod settings;

use crate::output::{Outcome, emit, emit_document, is_stdout};
use crate::overview::weighted;
use anyhow::{Context, bail, ensure};
use columns::Roles;
use grpo_data::Columns;
use grpo_files::{Layers, check_output, counted, printable, printable_line, redacted, write_output, write_private};
use grpo_models::{ModelFolder, Tokenizer};
use grpo_trainer::{ModelSource, TrainConfig};
use rows::Rows;
use serde_json::json;
use settings::Settings;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Arguments of `grpo init`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Prompt and answer are found by the names of columns, the reward is chosen to fit the answers, and the length of \
    completions to fit the model's context; other keys have the defaults of `grpo train`. Every key of the file has a comment. For \
    a model on Hugging Face, only config.json, the tokenizer and the chat template are downloaded. If a setting cannot be derived, \
    nothing is written, and the error names the key to set, e.g. `--set data.prompt_column=text`."
)]
pub(crate) struct Args {
    /// The model to train: a folder or a name on Hugging Face.
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    /// A file of rows (JSONL; Parquet if the build supports it); repeatable.
    #[arg(long, value_name = "FILE", required = true)]
    data: Vec<PathBuf>,
    /// Where to write the configuration [default: train.yaml]. `-` is standard output.
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Set one key in the written file; repeatable.
    #[arg(long, value_name = "A.B=VALUE")]
    set: Vec<String>,
    /// Replace an existing file.
    #[arg(long)]
    force: bool,
}

/// The default file name.
const DEFAULT_OUT: &str = "train.yaml";

/// Findings about model and rows: subjects with a line each.
type Seen = Vec<(&'static str, String)>;

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let out = args.out.clone().unwrap_or_else(|| DEFAULT_OUT.into());
    let to_stdout = is_stdout(&out);
    if !to_stdout {
        if out.is_file() && !args.force {
            bail!("{} is there already: name another file with --out, or replace this one with --force", out.display());
        }
        check_output(&out)?;
    }
    let (settings, seen) = choose(&args)?;
    let place = if to_stdout { DEFAULT_OUT.into() } else { out.display().to_string() };
    let next = file::next(&place, &settings.run_name());
    let text = file::text(&settings.values()?, &seen, &next)?;
    // Parsed as `grpo train` will do.
    let config = TrainConfig::from_layers(Layers::new().text(&place, &text)?)?;
    config.validate()?;
    let shown: String = seen.iter().map(|(subject, line)| format!("  {subject:11}{line}\n")).collect();
    if to_stdout {
        // A closed standard error is ignored.
        let _ = write!(std::io::stderr(), "{}", printable(&shown));
        emit_document(&text)?;
        return Ok(Outcome::Done);
    }
    let (_, has_secrets) = redacted(&config)?;
    if has_secrets {
        write_private(&out, text.as_bytes())?
    } else {
        write_output(&out, text.as_bytes())?
    }
    let next: String = next.iter().map(|line| format!("  {line}\n")).collect();
    emit(&format!("{shown}wrote {place}; next:\n{next}")).with_context(|| format!("{place} is complete"))?;
    Ok(Outcome::Done)
}

/// Returns the settings for model and rows.
fn choose(args: &Args) -> anyhow::Result<(Settings, Seen)> {
    let text =
        |path: &Path| path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()));
    let files = args.data.iter().map(|file| text(file)).collect::<anyhow::Result<Vec<_>>>()?;
    let files = if let [file] = files.as_slice() { json!(file) } else { json!(files) };
    let start = json!({ "run": {}, "model": text(&args.model)?, "lora": null, "data": { "files": files } });
    let mut settings = Settings::new(start, &args.set)?;
    let config = settings.config()?;
    config.data.validate()?;
    config.data.check_files()?;
    let ModelSource::Pretrained(name) = &config.model else {
        bail!("`model`: expected a model folder, or the name of a model on Hugging Face")
    };
    let folder =
        ModelFolder::open(&grpo_models::Hub::from_env().locate_tokenizer(name, config.model_revision.as_deref())?)?;
    let tokenizer = grpo_setup::open_tokenizer(&folder, &config.data)?;
    let columns = Columns::read(&config.data.files)?;
    let files = config.data.files.iter().map(|file| file.path.display().to_string()).collect::<Vec<_>>().join(", ");
    ensure!(columns.rows > 0, "{files}: expected rows, got an empty file");
    let roles = Roles::of(&columns, &config.data).with_context(|| files.clone())?;
    settings.choose_data(name, &roles, &columns, tokenizer.has_chat_template());
    let rows = Rows::read(&settings.config()?, folder.config(), &tokenizer)?;
    settings.choose_rewards(&roles, &rows, &columns).with_context(|| files.clone())?;
    let trained = settings.choose_training(folder.config(), &rows, grpo_models::available_memory());
    let config = settings.config()?;
    let rewards = grpo_rewards::Rewards::new(&config.rewards)?;
    grpo_setup::check_rows(&config.data, &rows.report, &rewards, tokenizer.has_chat_template())?;
    let template = if tokenizer.has_chat_template() { "a chat template" } else { "no chat template" };
    let shape = folder.config();
    let weights = counted(shape.parameter_count(), "weight");
    let seen = [
        (
            "model",
            format!(
                "{name}: {} with {weights}, a context of {} and {template}; {trained}",
                folder.family(),
                counted(shape.max_position_embeddings, "token")
            ),
        ),
        ("rows", rows.text(&config, &columns)),
        ("prompt", roles.prompt_text(&config, &columns, tokenizer.has_chat_template())),
        ("answer", roles.answer_text()),
        ("rewards", weighted(rewards.names().zip(rewards.weights()))),
        ("lengths", rows.lengths_text(&config, shape.max_position_embeddings)),
        ("evaluation", rows.evaluation_text(&config)),
    ];
    Ok((settings, seen.map(|(subject, line)| (subject, printable_line(&line).into_owned())).into()))
}
