//! Shows a run to the user: a bar and tables on a terminal, plain lines elsewhere.

use crate::compiling::Compiling;
use crate::completions;
use crate::output::emit;
use crate::overview;
use crate::progress::{Field, fitted, joined};
use crate::table::Sheet;
use crate::terminal;
use anyhow::Context;
use console::{Term, style};
use grpo_files::{Layers, counted, noun, printable};
use grpo_run::dir::RunDir;
use grpo_run::jsonl::{MetricsRow, RowKind};
use grpo_run::summary::Summary;
use grpo_run::{Event, Observer};
use grpo_trainer::{Overview, TrainConfig};
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The number of lines per phase without a terminal.
const LINES_PER_PHASE: u64 = 20;
/// The longest time between two lines of a slow phase.
const LONGEST_SILENCE: Duration = Duration::from_secs(15);

/// The width of the bar in characters.
const BAR: usize = 12;

/// Shows the events of a run on the terminal, or as lines.
pub(crate) struct Display {
    quiet: bool,
    /// The bar, which is drawn on a terminal only.
    bar: Option<ProgressBar>,
    /// The fields of the last step on the bar's line.
    last_step: Arc<Mutex<Vec<Field>>>,
    /// The compilations in progress, which the bar shows instead of the last step.
    compiling: Compiling,
    terminal: bool,
    phase: Phase,
    last_line: Instant,
    /// `true` if the block with the settings was shown.
    introduced: bool,
    /// `true` if the loss of a GRPO step is informative.
    shows_loss: bool,
}

/// The current phase.
struct Phase {
    first: u64,
    steps: u64,
    began: Instant,
}

impl Display {
    pub(crate) fn new(quiet: bool, compiling: Compiling) -> Self {
        let now = Instant::now();
        let phase = Phase { first: 0, steps: 1, began: now };
        let last_step = Arc::default();
        Self {
            quiet,
            bar: None,
            last_step,
            compiling,
            terminal: std::io::stdout().is_terminal(),
            phase,
            last_line: now,
            introduced: false,
            shows_loss: false,
        }
    }

    /// Prints the block with the settings of a run. `layers` are the user's; `None` for a resumed run, whose config.yaml has every key.
    pub(crate) fn introduce(&mut self, config: &TrainConfig, overview: &Overview, layers: Option<&Layers>) {
        if !self.introduced {
            self.introduced = true;
            self.line(&overview::text(config, overview, layers));
        }
    }

    /// Removes the bar, so that later output starts on its own line.
    pub(crate) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            self.compiling.is_shown_elsewhere(false);
        }
    }

    /// Prints the result of a finished run.
    pub(crate) fn finished(&mut self, summary: &Summary, dir: &RunDir) -> anyhow::Result<()> {
        self.clear();
        if self.quiet {
            return Ok(());
        }
        let complete = || format!("the run is complete, and {} has its results", dir.summary_path().display());
        emit(&summary_text(summary, dir)).with_context(complete)
    }

    /// Prints how to resume a stopped run.
    pub(crate) fn stopped(&mut self, checkpoint: &Path, root: &Path) -> anyhow::Result<()> {
        self.clear();
        if self.quiet {
            return Ok(());
        }
        let (checkpoint, root) = (checkpoint.display(), root.display());
        emit(&format!("stopped; saved {checkpoint}\ncontinue with: grpo train --resume {root}\n"))
            .with_context(|| format!("the run is stopped and saved, and `grpo train --resume {root}` continues it"))
    }

    /// Prints a line, above the bar if there is one.
    fn line(&self, text: &str) {
        match &self.bar {
            _ if self.quiet => {}
            Some(bar) => bar.println(printable(text)),
            // The run continues even if standard output was closed.
            None => drop(emit(&format!("{text}\n"))),
        }
    }

    fn begin_phase(&mut self, kind: RowKind, done: u64, steps: u64) {
        let title = match kind {
            RowKind::Warmup => "warm-up (supervised)",
            RowKind::Grpo => "GRPO",
            // Evaluations are short and only shown on the bar.
            RowKind::Eval => {
                self.say(vec![Field::new(1, "evaluating held-out problems ...")]);
                return;
            }
        };
        self.clear();
        self.phase = Phase { first: done, steps, began: Instant::now() };
        self.line(&format!("{title}: step {} of {steps}", done + 1));
        if self.terminal && !self.quiet {
            let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stdout()).with_position(done);
            self.say(vec![]);
            let (name, last_step) =
                (if kind == RowKind::Warmup { "warm-up" } else { "GRPO" }, Arc::clone(&self.last_step));
            let compiling = self.compiling.clone();
            let line = move |state: &ProgressState, out: &mut dyn Write| {
                let mut fields = phase_fields(name, state);
                let step = || last_step.lock().unwrap_or_else(PoisonError::into_inner).clone();
                fields.extend(compiling.fields(1).unwrap_or_else(step));
                // Errors of writing to a terminal are ignored.
                let _ = out.write_str(&fitted(&fields, terminal::of(&Term::stdout())));
            };
            if let Ok(style) = ProgressStyle::with_template("{line}") {
                bar.set_style(style.with_key("line", line));
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            self.bar = Some(bar);
            self.compiling.is_shown_elsewhere(true);
        }
    }

    /// Shows `fields` on the bar's line.
    fn say(&self, fields: Vec<Field>) {
        *self.last_step.lock().unwrap_or_else(PoisonError::into_inner) = fields;
        if let Some(bar) = &self.bar {
            bar.tick();
        }
    }

    fn row(&mut self, row: &MetricsRow) {
        if row.phase == RowKind::Eval {
            self.line(&eval_line(row));
            return;
        }
        let fields = step_fields(row, self.shows_loss);
        if let Some(bar) = &self.bar {
            bar.set_position(row.step);
            self.say(fields);
            return;
        }
        let message = joined(&fields);
        let Phase { first, steps, began } = self.phase;
        let every = (steps / LINES_PER_PHASE).max(1);
        let due = row.step == first + 1 || row.step == steps || row.step.is_multiple_of(every);
        if due || self.last_line.elapsed() > LONGEST_SILENCE {
            self.last_line = Instant::now();
            let name = if row.phase == RowKind::Warmup { "warm-up" } else { "grpo" };
            let per_step = began.elapsed().as_secs_f64() / row.step.saturating_sub(first).max(1) as f64;
            let left = duration(per_step * steps.saturating_sub(row.step) as f64);
            self.line(&format!("{name:8} {:>5}/{steps}  {message}  left {left}", row.step));
        }
    }
}

impl Observer for Display {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Started { dir, config, overview, resumed, changes, set_aside, .. } => {
                if let Some(overview) = overview {
                    self.introduce(config, overview, None);
                }
                self.shows_loss = config.loss_says_something();
                let from = resumed.map(|p| format!(", continued from {p}")).unwrap_or_default();
                self.line(&format!("run {}{from}, seed {}; Ctrl-C saves and stops", dir.display(), config.seed));
                for change in changes {
                    self.line(&format!("changed: {change}"));
                }
                for path in set_aside {
                    self.line(&format!("kept as {}: the run goes on from before it", path.display()));
                }
            }
            Event::Phase { kind, done, steps } => self.begin_phase(kind, done, steps),
            Event::Row(row) => self.row(row),
            Event::Completions(rows) if self.terminal => self.line(&completions::text(rows, terminal::columns())),
            Event::Completions(_) => {}
            Event::Exported(path) => tracing::info!("the model is in {}", path.display()),
            Event::Saved(path) => tracing::info!("saved {}", path.display()),
            Event::Note(text) => self.line(text),
        }
    }
}

/// Returns the progress of a phase, with ranks that leave room for the fields of [`step_fields`].
fn phase_fields(name: &str, state: &ProgressState) -> Vec<Field> {
    let (done, steps) = (state.pos(), state.len().unwrap_or(0));
    let full = ((state.fraction() * BAR as f32) as usize).min(BAR);
    let (head, rest) = if full < BAR { ("╸", BAR - full - 1) } else { ("", 0) };
    let bar = format!("{}{}", style("━".repeat(full) + head).cyan(), style("─".repeat(rest)).dim());
    vec![
        Field::new(3, name),
        Field::new(5, bar),
        Field::new(0, format!("{done:>4}/{steps}")),
        Field::new(2, format!("{:#} left", HumanDuration(state.eta()))),
    ]
}

/// Returns the fields of a step's line, with the loss of a GRPO step if `shows_loss`.
fn step_fields(row: &MetricsRow, shows_loss: bool) -> Vec<Field> {
    let number = |rank: u8, name: &str, digits: usize| {
        row.get(name).map(|value| Field::new(rank, format!("{name} {}", unsigned_zero(format!("{value:.digits$}")))))
    };
    let speed = row.get("tokens").zip(row.get("step_time"));
    let speed = speed.map(|(tokens, seconds)| format!("{} tok/s", count(tokens / seconds.max(1e-9))));
    let is_grpo = row.phase == RowKind::Grpo;
    let share = |rank: u8, name: &str, metric: &str| {
        row.get(metric).map(|share| Field::new(rank, format!("{name} {:.0} %", 100.0 * share)))
    };
    let length = row.get("completions/mean_length").map(|length| Field::new(5, format!("length {length:.0}")));
    let fields = [
        number(1, "reward", 3),
        // The share of groups whose completions all have the same reward and therefore advantages of 0.
        share(4, "no signal", "frac_reward_zero_std"),
        length,
        share(6, "clipped", "completions/clipped_ratio"),
        number(7, "loss", 4).filter(|_| !is_grpo || shows_loss),
        speed.map(|speed| Field::new(8, speed)),
        number(9, "entropy", 3).filter(|_| is_grpo),
        number(10, "kl", 4).filter(|_| is_grpo),
    ];
    fields.into_iter().flatten().collect()
}

fn eval_line(row: &MetricsRow) -> String {
    let mut text = format!("eval at step {}: ", row.step);
    let _ = write!(text, "pass@1 {:.1} %", 100.0 * row.get("eval/pass@1").unwrap_or(f64::NAN));
    if let Some(reward) = row.get("eval/reward") {
        let _ = write!(text, ", sampled reward {}", unsigned_zero(format!("{reward:.3}")));
    }
    let _ = write!(text, " on {}", counted(row.get("eval/problems").unwrap_or(0.0) as u64, "held-out problem"));
    text
}

fn summary_text(summary: &Summary, dir: &RunDir) -> String {
    let mut table = Sheet::new(["", "before GRPO", "after GRPO", "change"], 1..4).named();
    for (name, after) in summary.eval_after.iter().filter(|(name, _)| *name != "problems") {
        let (label, before) = (format!("held-out {}", name.replace('/', " ")), summary.eval_before.get(name));
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let row = match (name.starts_with("pass@"), before) {
            (true, Some(before)) => {
                let change = unsigned_zero(format!("{:+.1}", 100.0 * (after - before))) + " points";
                [label, percent(*before), percent(*after), change]
            }
            // The rule by which completions pass was changed.
            (true, None) => [label, "-".into(), percent(*after), "-".into()],
            (false, Some(before)) => plain_row(format!("held-out {name} (sampled)"), *before, *after),
            (false, None) => continue,
        };
        table.row(row);
    }
    if let (Some(first), Some(last)) = (summary.reward_first, summary.reward_last) {
        table.row(plain_row("training reward, first and last steps".into(), first, last));
    }
    let mut text = format!("\n{}\n", table.text());
    if let Some(sentence) = summary.pass_sentence() {
        let _ = writeln!(text, "{sentence}");
    }
    let after = match summary.warmup_steps {
        0 => String::new(),
        steps => format!(" after {}", counted(steps, "warm-up step")),
    };
    let (tokens, time) = (count(summary.tokens as f64), duration(summary.seconds));
    let nouns = (noun(summary.steps, "GRPO step"), noun(summary.tokens, "token"));
    let _ = writeln!(text, "{} {}{after}, {tokens} {}, {time}", summary.steps, nouns.0, nouns.1);
    if summary.stopped_early {
        let _ = writeln!(text, "the run ended early: run.early_stopping_patience evaluations in a row were no better");
    }
    if let (Some(step), Some(best)) = (summary.weights_of_step, &summary.best) {
        let metric = &best.metric;
        let value = unsigned_zero(format!("{:.3}", best.value.0));
        let _ = writeln!(text, "the weights are those after step {step}, the best by {metric}: {value}");
    }
    // Only runs of pretrained models have a model folder.
    let model = dir.model_path();
    let model = model.is_dir().then_some(("model", model));
    for (what, path) in model.into_iter().chain([
        ("curves", dir.curves_path()),
        ("metrics", dir.metrics_path()),
        ("completions", dir.completions_path()),
        ("checkpoints", dir.checkpoints_path()),
        ("summary", dir.summary_path()),
    ]) {
        let _ = writeln!(text, "  {what:12} {}", path.display());
    }
    text
}

fn plain_row(label: String, before: f64, after: f64) -> [String; 4] {
    let change = format!("{:+.3}", after - before);
    let [before, after, change] = [format!("{before:.3}"), format!("{after:.3}"), change].map(unsigned_zero);
    [label, before, after, change]
}

/// Returns a formatted number without its sign if it is 0: the sign of a number that rounds to 0 would only show rounding errors.
fn unsigned_zero(number: String) -> String {
    let is_zero = number.parse::<f64>().is_ok_and(|value| value == 0.0);
    if is_zero { number.trim_start_matches(['+', '-']).to_owned() } else { number }
}

/// Formats a count in short form: `1234567` as `1.2M`.
fn count(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.1}M", v / 1e6),
        v if v >= 1e4 => format!("{:.0}k", v / 1e3),
        v if v >= 1e3 => format!("{:.1}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// Formats a duration in short form: `1 h 02 min`, `2 min 05 s` or `7 s`.
fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([7.4, 1234.0, 45_678.0, 2.5e6].map(count), ["7", "1.2k", "46k", "2.5M"]);
        assert_eq!([0.4, 125.0, 3720.0].map(duration), ["0 s", "2 min 05 s", "1 h 02 min"]);
    }

    #[test]
    fn numbers_that_round_to_zero_have_no_sign() {
        let row = |before, after| plain_row(String::new(), before, after)[1..].join(" ");
        assert_eq!(row(-0.0001, 0.0001), "0.000 0.000 0.000");
        assert_eq!(row(0.5, 0.4998), "0.500 0.500 0.000");
        assert_eq!(row(-0.25, 0.5), "-0.250 0.500 +0.750");
        assert_eq!(row(0.001, f64::NAN), "0.001 NaN NaN");
        let line = eval_line(&MetricsRow::new(RowKind::Eval, 2, [("eval/reward", -1e-9), ("eval/pass@1", 0.0)]));
        assert!(line.contains("pass@1 0.0 %, sampled reward 0.000 on"), "{line}");
    }

    #[test]
    fn a_step_shows_reward_length_speed_and_only_an_informative_loss() {
        let values = [
            ("reward", 0.5),
            ("loss", 0.01),
            ("tokens", 3000.0),
            ("step_time", 0.5),
            ("completions/mean_length", 211.7),
            ("completions/clipped_ratio", 0.125),
            ("frac_reward_zero_std", 0.25),
        ];
        let row = MetricsRow::new(RowKind::Grpo, 3, values);
        let expected = "reward 0.500  no signal 25 %  length 212  clipped 12 %  6.0k tok/s";
        assert_eq!(joined(&step_fields(&row, false)), expected);
        assert!(joined(&step_fields(&row, true)).contains("clipped 12 %  loss 0.0100  6.0k tok/s"));
        assert_eq!(joined(&step_fields(&MetricsRow::new(RowKind::Warmup, 1, [("loss", -1e-9)]), false)), "loss 0.0000");
    }
}
