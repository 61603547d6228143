//! `grpo loss`: loss, log-probabilities, entropies and gradients of a batch file, written to a file.

use super::{Outcome, emit, loss_input::LossInput};
use anyhow::Context;
use grpo_core::{Dtype, Implementation};
use std::path::PathBuf;
use trainer::{loss_file, parity};

/// Arguments of `grpo loss`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Batch file (grpo-batch/1).
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Where to write the results (safetensors; gradients are f32, the loss f64).
    #[arg(long, short, value_name = "FILE", alias = "output")]
    out: PathBuf,
    #[command(flatten)]
    input: LossInput,
    /// Implementation to evaluate [default: fused, or logits when the file holds logits].
    #[arg(long, value_parser = ["reference", "logits", "fused"])]
    implementation: Option<String>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let backend = args.input.open()?;
    let file = super::loss_input::read(&args.file)?;
    let policy = match args.input.dtype {
        Some(dtype) => file.policy.to_dtype(Dtype::from(dtype)),
        None => file.policy.clone(),
    };
    let default = if file.hidden == 0 { Implementation::Logits } else { Implementation::Fused };
    let implementation = args.implementation.as_deref().and_then(Implementation::from_name).unwrap_or(default);
    let loss = args.input.loss()?.unwrap_or_else(|| file.loss.clone());
    let evaluated = parity::evaluate(backend.as_ref(), implementation, &loss, &file, &policy)
        .with_context(|| args.file.display().to_string())?;
    let value = evaluated.values.loss.unwrap_or(f64::NAN);
    anyhow::ensure!(
        value.is_finite(),
        "{}: the loss is {value}: hidden states, head or logits are not finite at active tokens; nothing was written",
        args.file.display()
    );
    let origin = loss_file::Origin { backend: backend.name(), implementation, loss: &loss };
    let bytes = loss_file::to_bytes(&file, &evaluated, &origin)?;
    trainer::run::dir::write_atomically(&args.out, &bytes)?;
    let mut text = format!("loss {:.9}\n", value);
    for (name, value) in evaluated.metrics.values() {
        text.push_str(&format!("{name} {value:.6}\n"));
    }
    text.push_str(&format!("wrote {} ({} on {})\n", args.out.display(), implementation.name(), backend.name()));
    emit(&text)?;
    Ok(Outcome::Done)
}
