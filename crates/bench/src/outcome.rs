//! Outcomes of variants from the replies of their workers: rates, shares of floors, agreement.

use super::case::{Entry, Kind, Running, State};
use super::floor;
use super::measure::Timing;
use super::protocol::{Role, Stepped};
use super::report::{DeviceReport, Measured, Outcome, StepBytes};
use grpo_core::Dtype;
use serde_json::json;
use std::collections::BTreeMap;

/// Returns the devices of the jobs by backend.
pub(crate) fn devices(entries: &[Entry]) -> BTreeMap<String, DeviceReport> {
    let device = |entry: &Entry| match &entry.state {
        State::Running(running) => Some((entry.job.backend.clone(), running.planned.device.clone()?)),
        _ => None,
    };
    entries.iter().filter_map(device).collect()
}

/// Returns the outcomes of the entries of a kind.
pub(crate) fn outcomes(entries: &[Entry], dtype: Dtype, of: impl Fn(Kind) -> bool) -> BTreeMap<String, Outcome> {
    let reference = reference(entries, dtype);
    let selected = entries.iter().filter(|entry| of(entry.kind));
    selected.map(|entry| (entry.job.name.clone(), outcome(entry, entries, reference))).collect()
}

/// Returns the result that all others are compared with: the first variant in the problem's dtype that has gradients.
fn reference(entries: &[Entry], dtype: Dtype) -> Option<&Stepped> {
    let mut variants = entries.iter().filter(|entry| entry.kind == Kind::Variant);
    let fits = |entry: &&Entry| entry.variant.request.policy.dtype() == dtype;
    let candidates: Vec<&Stepped> =
        variants.by_ref().filter(fits).filter_map(first).filter(|s| s.loss.is_some()).collect();
    candidates.iter().copied().max_by_key(|step| step.grad_norms.len())
}

fn first(entry: &Entry) -> Option<&Stepped> {
    match &entry.state {
        State::Running(running) => running.first.as_ref(),
        _ => None,
    }
}

/// Returns `true` if two steps computed the same result up to rounding to `dtype`: for logits of 8, bf16 loses 0.02.
fn agrees(step: &Stepped, reference: &Stepped, dtype: Dtype) -> Option<bool> {
    let bound = if dtype == Dtype::Bf16 { 0.05 } else { 2e-3 };
    let near = |a: f64, b: f64, scale: f64| (a - b).abs() <= bound * scale;
    // Token losses are about 1; the loss is a mean of terms of both signs.
    let loss = near(step.loss?, reference.loss?, 1.0);
    let norms = step.grad_norms.iter().filter_map(|(name, norm)| Some((*norm, *reference.grad_norms.get(name)?)));
    Some(loss && norms.into_iter().all(|(norm, expected)| near(norm, expected, expected)))
}

fn outcome(entry: &Entry, entries: &[Entry], reference: Option<&Stepped>) -> Outcome {
    match &entry.state {
        State::Running(running) => match &running.first {
            Some(first) => Outcome::Measured(Box::new(measured(entry, running, first, entries, reference))),
            None => Outcome::Failed { error: "it was never called".into() },
        },
        State::Failed { error, not_offered: true } => Outcome::NotOffered { error: error.clone() },
        State::Failed { error, .. } => Outcome::Failed { error: error.clone() },
        State::Waiting => Outcome::Failed { error: "it was never planned".into() },
    }
}

fn measured(
    entry: &Entry,
    running: &Running,
    first: &Stepped,
    entries: &[Entry],
    reference: Option<&Stepped>,
) -> Measured {
    let planned = &running.planned;
    let step_ms = Timing::of(running.steps.iter().map(|step| 1e3 * step.seconds).collect());
    let p50 = step_ms.as_ref().map(|timing| 1e-3 * timing.p50);
    let rate = |count: f64| p50.map(|seconds| count / seconds);
    let is_machine = matches!(entry.job.role, Role::Multiply(_) | Role::Stream { .. });
    let floor = fastest_floor(entry, entries);
    let floor_s = floor.as_ref().map(|(_, seconds)| *seconds);
    let times_floor = p50.zip(floor_s).map(|(seconds, floor)| seconds / floor);
    let useful_flops = if is_machine { 0.0 } else { floor::useful_flops(&entry.job.config, &entry.variant) };
    let steps = || std::iter::once(first).chain(&running.steps);
    let high_water = match first.device {
        // A separate device has its own measurement.
        Some(device) => device.step,
        None => steps().filter_map(|step| step.high_water).max(),
    };
    let bytes = planned.bytes;
    let last = running.steps.last().unwrap_or(first);
    let seed = [
        ("bench/step_s_mean", json!(step_ms.as_ref().map(|timing| 1e-3 * timing.mean))),
        ("bench/step_s_p50", json!(p50)),
        ("bench/step_s_p90", json!(step_ms.as_ref().map(|timing| 1e-3 * timing.p90))),
        ("bench/compile_s", json!(planned.plan_seconds)),
        ("avg_step_ms", json!(step_ms.as_ref().map(|timing| timing.mean))),
        ("first_call_s", json!(first.seconds)),
        ("mem/inputs_bytes", json!(bytes.inputs)),
        ("mem/outputs_bytes", json!(bytes.outputs)),
        ("mem/workspace_bytes", json!(bytes.workspace)),
        ("mem/high_water_bytes", json!(high_water)),
        // In use with inputs and outputs before the first step, and after the last one.
        ("mem_after_alloc", json!(first.device.map(|device| device.before).or(first.resident_before))),
        ("mem_after_run", json!(first.device.map(|device| device.after).or(last.resident_after))),
    ];
    Measured {
        backend: if entry.kind == Kind::Peer { "peer".into() } else { entry.job.backend.clone() },
        threads: entry.job.threads,
        version: planned.version.clone(),
        blocking: planned.blocking,
        loss: first.loss,
        grad_norms: first.grad_norms.clone(),
        agrees: reference.and_then(|reference| agrees(first, reference, entry.variant.request.policy.dtype())),
        plan_seconds: planned.plan_seconds,
        first_call_seconds: first.seconds,
        began_s: running.began.clone(),
        tokens_per_second: rate(entry.variant.request.max_tokens as f64).filter(|_| !is_machine),
        useful_flops,
        useful_flops_per_second: rate(useful_flops).filter(|rate| *rate > 0.0),
        rate_per_second: planned.work.and_then(rate),
        rate_of: match entry.job.role {
            Role::Multiply(_) => Some("FLOP"),
            Role::Stream { .. } => Some("B"),
            _ => None,
        },
        floor: floor.map(|(name, _)| name),
        floor_ms: floor_s.map(|seconds| 1e3 * seconds),
        share_of_floor: times_floor.map(|times| 1.0 / times),
        times_floor,
        bytes: StepBytes { planned: bytes, high_water },
        compiled_bytes: planned.compiled,
        device_bytes: first.device,
        step_ms,
        work_shares: work_shares(&running.steps),
        seed: seed.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    }
}

/// Returns the share of each kind of work in the time of all threads.
fn work_shares(steps: &[Stepped]) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for (name, seconds) in steps.iter().flat_map(|step| &step.work) {
        *sums.entry(name.clone()).or_insert(0.0) += seconds;
    }
    let all: f64 = sums.values().sum();
    sums.values_mut().for_each(|seconds| *seconds /= all);
    sums
}

/// Returns the fastest floor of `entry`, with its seconds per step.
fn fastest_floor(entry: &Entry, entries: &[Entry]) -> Option<(String, f64)> {
    let seconds = |name: &String| {
        let floor = entries.iter().find(|floor| floor.kind == Kind::Floor && floor.job.name == *name)?;
        let State::Running(running) = &floor.state else { return None };
        let p50 = Timing::of(running.steps.iter().map(|step| step.seconds).collect())?.p50;
        // A step of bare products is the floor itself; a rate is scaled to the work of the variant.
        let seconds =
            running.planned.work.map_or(p50, |work| p50 * floor::least_work(&entry.job.config, &entry.variant) / work);
        Some((name.clone(), seconds))
    };
    entry.floors.iter().filter_map(seconds).min_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agreement_allows_only_rounding_differences() {
        let step = |loss: f64, hidden: f64| Stepped {
            loss: Some(loss),
            grad_norms: [("hidden".to_owned(), hidden)].into(),
            ..Stepped::default()
        };
        let reference = step(0.1, 2.0);
        for (found, dtype, expected) in [
            (step(0.12, 2.05), Dtype::Bf16, true),
            (step(0.12, 2.05), Dtype::F32, false),
            (step(0.1001, 2.001), Dtype::F32, true),
            (step(0.1, 1.8), Dtype::Bf16, false),
            (step(0.2, 2.0), Dtype::Bf16, false),
            (step(f64::NAN, 2.0), Dtype::Bf16, false),
            (step(0.1, 0.0), Dtype::Bf16, false),
        ] {
            assert_eq!(agrees(&found, &reference, dtype), Some(expected), "{found:?} {dtype:?}");
        }
        // A step without values cannot be compared.
        assert_eq!(agrees(&Stepped::default(), &reference, Dtype::F32), None);
    }
}
