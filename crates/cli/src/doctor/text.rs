//! The report as lines: a status, a name and a finding, with the advice below it.

use super::Report;
use super::check::{Check, Status};
use crate::table::wrapped;
use crate::terminal;
use console::style;
use grpo_files::{counted, printable};
use std::fmt::Write;

/// The widths of the columns with the status and with the name.
const STATUS: usize = 7;
const NAME: usize = 13;
/// On a terminal with fewer columns, findings begin on a line of their own.
const NARROW: usize = 60;

/// Formats the report for standard output, fitted to a terminal's width.
pub(super) fn text(report: &Report) -> String {
    fitted(report, terminal::columns())
}

/// Formats the report in `columns`; without a limit if it is `None`. Writing to a string cannot fail.
fn fitted(report: &Report, columns: Option<usize>) -> String {
    let mut out = format!("grpo {} on {}\n", report.version, report.system);
    let mut last = "";
    for check in &report.checks {
        let (group, name) = check.id.split_once('.').unwrap_or((&check.id, ""));
        if group != last {
            let _ = writeln!(out, "\n{}", style(group).bold());
        }
        last = group;
        out.push_str(&lines(check, name, columns.unwrap_or(usize::MAX)));
    }
    let _ = writeln!(out, "\n{}, {}", counted(report.problems, "problem"), counted(report.notes, "note"));
    out
}

fn lines(check: &Check, name: &str, columns: usize) -> String {
    let status = style(format!("{:STATUS$}", check.status.name()));
    let status = match check.status {
        Status::Ok => status.green(),
        Status::Note => status.yellow(),
        Status::Problem => status.red().bold(),
    };
    let head = format!("  {status}  {name:NAME$}");
    let is_narrow = columns < NARROW;
    let indent = if is_narrow { 4 } else { 2 + STATUS + 2 + NAME + 2 };
    let below = format!("\n{:indent$}", "");
    let advice = check.advice.iter().map(|advice| format!("-> {advice}"));
    // Findings may have texts of plugins and of the environment.
    let texts = [check.found.clone()].into_iter().chain(advice).map(|text| printable(&text).into_owned());
    let texts: Vec<String> = texts.map(|text| wrapped(&text, columns, indent, indent)).collect();
    let first = if is_narrow { below.as_str() } else { "  " };
    format!("{}{first}{}\n", if is_narrow { head.trim_end() } else { &head }, texts.join(&below))
}

#[cfg(test)]
mod tests {
    use super::*;
    use console::{measure_text_width, strip_ansi_codes};

    fn report() -> Report {
        let advice = "run `grpo plugin install cpu --force`, and then load the plugin again with `grpo plugin list`";
        let checks = vec![
            Check::ok("threads.number", "2 threads; 2 of 2 processors may be used by this process and by its children"),
            Check::problem("plugins.cpu", "the plugin has ended\n its process\u{1b}[2J", advice),
            Check::note("plugins.tpu", "not installed"),
        ];
        Report { format: "", version: "1", system: "linux".into(), problems: 1, notes: 1, checks }
    }

    #[test]
    fn a_report_has_one_line_per_finding_and_advice_without_a_terminal() {
        let expected = "grpo 1 on linux\n\nthreads\n  ok       number         2 threads; 2 of 2 processors may be used by this process \
            and by its children\n\nplugins\n  problem  cpu            the plugin has ended its process\\u{1b}[2J\n                          -> \
            run `grpo plugin install cpu --force`, and then load the plugin again with `grpo plugin list`\n  note     tpu            not \
            installed\n\n1 problem, 1 note\n";
        assert_eq!(strip_ansi_codes(&fitted(&report(), None)), expected);
    }

    #[test]
    fn lines_fit_the_terminal() {
        for columns in [30, 40, 60, 80, 120] {
            let text = fitted(&report(), Some(columns));
            let widest = text.lines().map(measure_text_width).max();
            assert!(widest.is_some_and(|widest| widest <= columns), "{columns}:\n{text}");
        }
    }
}
