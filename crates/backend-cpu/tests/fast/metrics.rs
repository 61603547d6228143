//! docs/losses/metrics.md, which is written by hand, must list exactly the metrics of all losses.

use grpo_core::batch::{Rows, StepData};
use grpo_testkit::family::{LOSSES, others};
use grpo_testkit::*;
use std::collections::BTreeSet;

/// Returns the names in the first column of the tables. A name without a slash has the prefix of the previous name in
/// its row.
fn documented() -> BTreeSet<String> {
    let rows = include_str!("../../../../docs/losses/metrics.md").lines().filter(|line| line.starts_with("| `"));
    let mut names = BTreeSet::new();
    for row in rows {
        let cell = row.split('|').nth(1).unwrap();
        let mut prefix = "";
        for name in cell.split('`').skip(1).step_by(2) {
            let (own, last) = name.split_at(name.rfind('/').map_or(0, |slash| slash + 1));
            prefix = if own.is_empty() { prefix } else { own };
            names.insert(format!("{prefix}{last}"));
        }
    }
    names
}

#[test]
fn documented_metrics_equal_computed_metrics() {
    let imitation = config(r#"{"positive_example_nll_weight": 0.2}"#);
    let mut made = BTreeSet::new();
    for loss in LOSSES.into_iter().chain(others()).map(loss).chain([imitation]) {
        let mut case = Case::new(&loss, &Shape { lengths: &[4, 1, 5], h: 12, v: 41, ..Shape::default() }, 5);
        let step = StepData { positive_rows: Rows::Indices(vec![0]), ..StepData::default() };
        case.batch = case.batch.with_step(step).unwrap();
        made.extend(case.oracle(&loss).metrics.values().map(|(name, _)| name.to_owned()));
    }
    let documented = documented();
    let of = |a: &BTreeSet<String>, b: &BTreeSet<String>| a.difference(b).cloned().collect::<Vec<_>>();
    assert_eq!(of(&made, &documented), [""; 0], "docs/losses/metrics.md has no row of these");
    assert_eq!(of(&documented, &made), [""; 0], "docs/losses/metrics.md names these, which no loss makes");
}
