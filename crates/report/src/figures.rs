//! Summary numbers of a run, and number formatting.

use crate::phase::{Phase, is_share};
use crate::run::Run;
use std::time::Duration;

/// The limit of rows over which the first and last mean reward is computed, as in summary.json.
const WINDOW: usize = 10;

pub(crate) struct Evaluated {
    pub first: f64,
    pub last: f64,
    /// The largest value with its step.
    pub best: (u64, f64),
}

/// Returns the evaluations of a run by one metric; `None` if there are none.
pub(crate) fn evaluated(run: &Run, metric: &str) -> Option<Evaluated> {
    let phase = run.phase("eval")?;
    // Values of an earlier rule by which completions passed are not compared.
    let since = if metric.starts_with("eval/pass@") { phase.pass_rule_since() } else { 0 };
    let values = || phase.finite(metric).filter(|(step, _)| *step >= since);
    let (first, last) = (values().next()?.1, values().next_back()?.1);
    let best = values().reduce(|best, next| if next.1 > best.1 { next } else { best })?;
    Some(Evaluated { first, last, best })
}

/// Returns the figures of a run as names and texts; `None` for missing ones.
pub(crate) fn figures(run: &Run) -> Vec<(&'static str, Option<String>)> {
    let grpo = run.phase("grpo");
    let last = |metric: &str| grpo.and_then(|phase| Some(phase.finite(metric).next_back()?.1));
    let pass = evaluated(run, "eval/pass@1");
    let change = |unit: fn(f64) -> String, first: f64, last: f64| format!("{} → {}", unit(first), unit(last));
    let rewards: Vec<f64> = grpo.map(|phase| phase.finite("reward").map(|(_, v)| v).collect()).unwrap_or_default();
    let window = (rewards.len() / 10).clamp(1, WINDOW).min(rewards.len());
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let tokens = last("num_tokens");
    let speed = grpo.and_then(|phase| Some(phase.clock.last()?.tokens / phase.seconds().filter(|s| *s > 0.0)?));
    vec![
        ("status", Some(status(run))),
        ("seed", run.setting("seed").map(ToString::to_string)),
        ("GRPO steps", Some(steps(grpo, run, "grpo.max_steps"))),
        ("warm-up steps", run.phase("warmup").map(|phase| steps(Some(phase), run, "warmup.steps"))),
        ("time", time(run)),
        ("tokens", tokens.map(count)),
        ("tokens/s, mean over GRPO", speed.map(count)),
        ("pass@1, before → last", pass.as_ref().map(|pass| change(percent, pass.first, pass.last))),
        ("pass@1, best", pass.as_ref().map(|pass| format!("{} at step {}", percent(pass.best.1), pass.best.0))),
        ("held-out reward, before → last", evaluated(run, "eval/reward").map(|e| change(number, e.first, e.last))),
        (
            "training reward, first → last steps",
            (window > 0).then(|| change(number, mean(&rewards[..window]), mean(&rewards[rewards.len() - window..]))),
        ),
        ("completion length, last", last("completions/mean_length").map(|v| format!("{} tokens", number(v)))),
        ("entropy, last", last("entropy").map(number)),
        ("KL, last", last("kl").map(number)),
    ]
}

fn steps(phase: Option<&Phase>, run: &Run, most: &str) -> String {
    let done = phase.map_or(0, Phase::last_step);
    match run.setting(most).and_then(serde_json::Value::as_u64) {
        Some(most) if most != done => format!("{done} of {most}"),
        _ => done.to_string(),
    }
}

fn status(run: &Run) -> String {
    match (&run.summary, run.phases.is_empty()) {
        _ if run.failure.is_some() => "failed".to_owned(),
        (Some(_), _) => "finished".to_owned(),
        (None, true) => "no rows yet".to_owned(),
        (None, false) => "not finished: still running, or stopped".to_owned(),
    }
}

fn time(run: &Run) -> Option<String> {
    if let Some(seconds) = run.summary.as_ref().and_then(|summary| summary.seconds) {
        return Some(duration(seconds));
    }
    let phases: Vec<f64> = run.phases.values().filter_map(Phase::seconds).collect();
    (!phases.is_empty()).then(|| format!("{} in steps", duration(phases.iter().sum())))
}

/// Formats a number with four significant digits.
pub(crate) fn number(value: f64) -> String {
    // Rounded first, because 0.99999 has as many digits as 1.
    let value = format!("{value:.3e}").parse().unwrap_or(value);
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if value.fract() == 0.0 && size < 1e7 {
        format!("{value:.0}")
    } else if (1e-3..1e7).contains(&size) {
        let digits = (3.0 - size.log10().floor()).clamp(0.0, 6.0) as usize;
        format!("{value:.digits$}")
    } else {
        format!("{value:.3e}")
    }
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.1}\u{a0}%", 100.0 * share)
}

/// Formats a short time with its unit.
pub(crate) fn seconds_text(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s == 0.0 || s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (1e3 * s, "ms"),
        s => (1e6 * s, "µs"),
    };
    format!("{}\u{a0}{unit}", number(value))
}

/// Formats a value of a metric with its unit.
pub(crate) fn value_of(metric: &str, value: f64) -> String {
    if is_share(metric) { percent(value) } else { number(value) }
}

pub(crate) fn change_of(metric: &str, change: f64) -> String {
    let sign = if change > 0.0 { "+" } else { "" };
    if is_share(metric) { format!("{sign}{:.1} points", 100.0 * change) } else { format!("{sign}{}", number(change)) }
}

/// Formats a count in short form: `1234567` as `1.2M`.
fn count(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.1}G", v / 1e9),
        v if v >= 1e6 => format!("{:.1}M", v / 1e6),
        v if v >= 1e4 => format!("{:.0}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// Formats a duration in short form: `36 d 11 h`, `1 h 02 min`, `2 min 05 s` or `7.1 s`.
fn duration(seconds: f64) -> String {
    let Ok(whole) = Duration::try_from_secs_f64(seconds.round()).map(|d| d.as_secs()) else { return number(seconds) };
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, _) => format!("{seconds:.1} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h @ ..100, m, _) => format!("{h} h {m:02} min"),
        (h, _, _) => format!("{} d {} h", h / 24, h % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let texts = [0.0, 0.515_625, 60.0, 1234.5678, 6.98e-10, -0.25, 1.0e9, 0.999_99].map(number);
        assert_eq!(texts, ["0", "0.5156", "60", "1235", "6.980e-10", "-0.2500", "1.000e9", "1"]);
        let durations = [0.44, 125.0, 3720.0, 3.15e6, f64::INFINITY].map(duration);
        assert_eq!(durations, ["0.4 s", "2 min 05 s", "1 h 02 min", "36 d 11 h", "inf"]);
        assert_eq!([999.0, 45_678.0, 2.5e6, 3e9].map(count), ["999", "46k", "2.5M", "3.0G"]);
        assert_eq!((percent(0.625), change_of("eval/pass@1", 0.25)), ("62.5\u{a0}%".into(), "+25.0 points".into()));
        assert_eq!([0.0, 1.5e-5, 0.25, 2.0].map(seconds_text), ["0\u{a0}s", "15\u{a0}µs", "250\u{a0}ms", "2\u{a0}s"]);
        assert_eq!(change_of("eval/reward", -0.125), "-0.1250");
    }
}
