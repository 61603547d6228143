//! `grpo loss`: evaluates a batch file and writes loss, log-probabilities, entropies and gradients to a file.

use crate::loss_input::LossInput;
use crate::output::{Outcome, emit_document, is_stdout};
use anyhow::Context;
use grpo_check::{loss_file, parity};
use grpo_core::Implementation;
use grpo_files::{check_output, write_output};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `grpo loss`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The same batch gives the same bytes. If the loss is finite but a gradient is not, the exit code is \
    1, nothing is written, and each such tensor is listed with the number of its non-finite entries."
)]
pub(crate) struct Args {
    /// Batch file (grpo-batch/1).
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Where to write the results (safetensors; gradients are f32, the loss f64). `-` is standard output; the text then goes to standard
    /// error. Devices and pipes are written to directly; a file is replaced when all results are complete.
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    input: LossInput,
    /// Implementation to evaluate [default: fused, or logits when the file holds logits].
    #[arg(long, value_parser = crate::loss_input::implementations(&[]))]
    implementation: Option<String>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    let to_stdout = is_stdout(&args.out);
    if !to_stdout {
        check_output(&args.out)?;
    }
    let backend = args.input.open()?;
    let file = crate::loss_input::read(&args.file)?;
    let file = match args.input.loss()? {
        Some(loss) => file.with_loss(loss).with_context(|| args.file.display().to_string())?,
        None => file,
    };
    let policy = args.input.dtype.map_or_else(|| file.policy.clone(), |dtype| file.policy.to_dtype(dtype));
    let default = if file.hidden == 0 { Implementation::Logits } else { Implementation::Fused };
    let implementation = args.implementation.as_deref().and_then(Implementation::from_name).unwrap_or(default);
    let evaluated = parity::evaluate(backend.as_ref(), implementation, &file.loss, &file, &policy)
        .with_context(|| args.file.display().to_string())?;
    let value = evaluated.values.loss.unwrap_or(f64::NAN);
    anyhow::ensure!(
        value.is_finite(),
        "{}: the loss is {value}: hidden states, head or logits are not finite at active tokens; nothing was written",
        args.file.display()
    );
    let broken = loss_file::not_finite(&file, &evaluated);
    if !broken.is_empty() {
        let lines: Vec<String> = broken.iter().map(|tensor| format!("{tensor}\n")).collect();
        emit_beside(to_stdout, &format!("loss {value:.9}\n{}nothing was written\n", lines.concat()))?;
        return Ok(Outcome::CheckFailed);
    }
    let bytes = loss_file::to_bytes(&file, &evaluated, backend.name(), implementation)?;
    let place = if to_stdout {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(&bytes).and_then(|()| stdout.flush()).context("cannot write to standard output")?;
        "standard output".to_owned()
    } else {
        write_output(&args.out, &bytes)?;
        args.out.display().to_string()
    };
    let mut text = format!("loss {:.9}\n", value);
    for (name, value) in evaluated.metrics.values() {
        text.push_str(&format!("{name} {value:.6}\n"));
    }
    text.push_str(&format!("wrote {place} ({} on {})\n", implementation.name(), backend.name()));
    emit_beside(to_stdout, &text)?;
    Ok(Outcome::Done)
}

/// Writes `text` to standard output, or to standard error if the results are on standard output.
fn emit_beside(results_on_stdout: bool, text: &str) -> anyhow::Result<()> {
    if results_on_stdout {
        // Errors of writing are ignored.
        let _ = std::io::stderr().write_all(text.as_bytes());
        return Ok(());
    }
    emit_document(text)
}
