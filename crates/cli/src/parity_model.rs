//! `grpo parity --model`: the decoder of a Hugging Face folder against what `transformers` computes.

use crate::{Outcome, emit, parity};
use anyhow::Context;
use backend_cpu::CpuBackend;
use grpo_check::Error;
use grpo_check::model::{Forward, ModelFile, ModelPolicy, ModelReport, ModelTolerances, SeeGradient, SeeLogits, check};
use grpo_core::{Implementation, LossConfig};
use models::{Adapter, ModelFolder, NamedTensor};
use policy::{Policy, Sequence, SequenceBatch, StepLoss, TensorSink, token_batch};
use policy_burn::{BurnPolicy, PolicyLoss};
use std::path::Path;
use std::sync::Arc;

pub(crate) fn run(folder: &Path, args: &parity::Args) -> anyhow::Result<Outcome> {
    let folder = ModelFolder::open(folder)?;
    let adapter = args.adapter.as_ref().map(|path| Adapter::open(path, folder.config())).transpose()?;
    let lora = adapter.as_ref().map(Adapter::config);
    let files = args.files.iter().map(|path| ModelFile::open(path, folder.config(), lora));
    let files = files.collect::<Result<Vec<_>, _>>()?;
    let standard = ModelTolerances::default();
    let tolerances = ModelTolerances {
        logits: args.tolerance.unwrap_or(standard.logits),
        gradient: args.gradient_tolerance.unwrap_or(standard.gradient),
    };
    let mut reports: Vec<ModelReport> = Vec::new();
    // One policy at a time: each has the weights in its own way.
    for open in POLICIES {
        let mut policy = open(&folder, adapter.as_ref())?;
        for (i, file) in files.iter().enumerate() {
            let report =
                check(file, policy.as_mut(), &tolerances).with_context(|| args.files[i].display().to_string())?;
            match reports.get_mut(i) {
                Some(earlier) => earlier.rows.extend(report.rows),
                None => reports.push(report),
            }
        }
    }
    let passed = reports.iter().all(ModelReport::passed);
    if args.json {
        let model = folder.path().display().to_string();
        let document = serde_json::json!({ "model": model, "passed": passed, "files": reports });
        emit(&format!("{}\n", serde_json::to_string_pretty(&document)?))?;
    } else {
        emit(&text(&folder, &reports, passed))?;
    }
    Ok(if passed { Outcome::Done } else { Outcome::CheckFailed })
}

fn text(folder: &ModelFolder, reports: &[ModelReport], passed: bool) -> String {
    let mut out = format!("{} ({})\n\n", folder.path().display(), folder.family());
    for report in reports {
        out.push_str(&format!("{}\n{}\n\n", report.file, parity::table_of("policy", &report.rows)));
    }
    let rows: usize = reports.iter().map(|report| report.rows.len()).sum();
    let failed: usize = reports.iter().flat_map(|report| &report.rows).filter(|row| !row.passed).count();
    let verdict = if passed { "PASS" } else { "FAIL" };
    out.push_str(&format!("{verdict}: {} files, {rows} comparisons, {failed} out of tolerance\n", reports.len()));
    out
}

/// Makes a policy of a folder's weights, and of an adapter.
type Open = fn(&ModelFolder, Option<&Adapter>) -> anyhow::Result<Box<dyn ModelPolicy>>;

/// Every policy there is. One on a device joins here.
const POLICIES: [Open; 1] = [host];

fn host(folder: &ModelFolder, adapter: Option<&Adapter>) -> anyhow::Result<Box<dyn ModelPolicy>> {
    // The supervised loss, which is compared here, is its own; GRPO's is not used.
    let loss = PolicyLoss {
        config: LossConfig::default(),
        backend: Arc::new(CpuBackend::new()),
        implementation: Implementation::Fused,
        max_tokens: 0,
    };
    let weights = folder.weights()?;
    let policy = BurnPolicy::from_weights(folder.config(), &weights, loss)?;
    let Some(adapter) = adapter else { return Ok(Box::new(Host(policy))) };
    adapter.check_base(&weights)?;
    Ok(Box::new(Host(policy.with_adapter(adapter)?)))
}

/// The policy in burn on this CPU.
struct Host(BurnPolicy);

impl ModelPolicy for Host {
    fn name(&self) -> &str {
        "host"
    }

    fn logits(&mut self, sequences: &[Vec<u32>], forward: Forward, see: &mut SeeLogits<'_>) -> Result<(), Error> {
        let tokens: Vec<(usize, &[u32])> =
            sequences.iter().enumerate().filter(|(_, ids)| !ids.is_empty()).map(|(i, ids)| (i, &ids[..])).collect();
        let mut seen = Ok(());
        let mut see = |sequence: usize, position: usize, logits: &[f32]| {
            if seen.is_ok() {
                seen = see(sequence, position, logits);
            }
        };
        match forward {
            Forward::Whole => {
                for (sequence, ids) in tokens {
                    self.0.logits(ids, |position, logits| see(sequence, position, logits)).map_err(Error::policy)?;
                }
            }
            Forward::Cached => {
                let (numbers, ids): (Vec<usize>, Vec<&[u32]>) = tokens.into_iter().unzip();
                let see = |i: usize, position: usize, logits: &[f32]| see(numbers[i], position, logits);
                self.0.cached_logits(&ids, see).map_err(Error::policy)?;
            }
        }
        seen
    }

    fn loss(&mut self, sequences: &[Vec<u32>], gradients: Option<&mut SeeGradient<'_>>) -> Result<f64, Error> {
        let of = |ids: &Vec<u32>| Sequence { prompt: ids[..1].to_vec(), completion: ids[1..].to_vec() };
        let sequences: Vec<Sequence> = sequences.iter().filter(|ids| ids.len() > 1).map(of).collect();
        let tokens = sequences.iter().map(|sequence| sequence.completion.len()).sum();
        let batches =
            sequences.chunks(1).map(|sequences| Ok(SequenceBatch { sequences, tokens: token_batch(sequences)? }));
        let batches = batches.collect::<Result<Vec<_>, grpo_core::Error>>()?;
        let loss = self.0.accumulate(&batches, StepLoss::CrossEntropy { tokens }).map_err(Error::policy)?.loss;
        if let Some(see) = gradients {
            let mut sink = Gradients { see, seen: Ok(()) };
            let exported = self.0.model().export_values(self.0.gradients().parameters(), &mut sink);
            sink.seen?;
            exported.map_err(Error::policy)?;
        }
        self.0.skip().map_err(Error::policy)?;
        Ok(loss)
    }
}

/// Gradients on their way to a comparison.
struct Gradients<'a, 'b> {
    see: &'a mut SeeGradient<'b>,
    seen: Result<(), Error>,
}

impl TensorSink for Gradients<'_, '_> {
    fn tensor(&mut self, tensor: NamedTensor) -> policy::Result<()> {
        if self.seen.is_ok() {
            self.seen = (self.see)(tensor);
        }
        Ok(())
    }
}
