//! Checks that every operation is covered: its derivative is compared with finite differences, or refused.

use super::{devices, own, refusals, rules, scans};
use crate::interpret::cases::{every_form, form};
use grpo_stablehlo::{Region, Traced, ValueId};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};

/// Operations without operands: nothing depends on an argument through them.
const WITHOUT_OPERANDS: [&str; 2] = ["constant", "iota"];
/// An operation that finite differences cannot check, because it stops the derivative.
const STOPPED: &str = "stop_gradient";

thread_local! {
    /// The forms seen by the tests on this thread.
    static SEEN: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

fn see(form: Option<String>) {
    SEEN.with_borrow_mut(|seen| seen.extend(form));
}

/// Records the operations through which the function depends on the differentiated arguments.
pub(super) fn checked(function: &Traced, with_respect_to: &[usize]) {
    let body = &function.function().body();
    let mut reached = with_respect_to.iter().map(|index| body.arguments[*index]).collect();
    follow(body, &mut reached);
}

fn follow(region: &Region, reached: &mut HashSet<ValueId>) {
    for operation in &region.operations {
        if operation.operands.iter().any(|id| reached.contains(id)) {
            see(form(&operation.kind));
            reached.extend(&operation.results);
            reached.extend(operation.regions.iter().flat_map(|region| &region.arguments));
        }
        operation.regions.iter().for_each(|region| follow(region, reached));
    }
}

/// Records the operation of that name, for which the function has no derivative.
pub(super) fn refused(function: &Traced, name: &str) {
    function.function().visit(|operation| {
        if operation.kind.name() == name {
            see(form(&operation.kind));
        }
    });
}

#[test]
fn every_derivative_is_checked_or_refused() {
    rules::derivatives_of_elementwise_operations();
    rules::operations_with_zero_derivative();
    rules::products();
    rules::reductions_and_broadcasts();
    rules::moves();
    rules::derivatives_at_dynamic_positions();
    rules::gathers_and_scatters();
    scans::scan_gradients_match_finite_differences();
    scans::second_derivatives_of_scans();
    own::custom_vjp_matches_finite_differences();
    devices::constraints();
    devices::manual_computations_have_no_derivative();
    refusals::while_loops_have_no_derivative();
    refusals::only_additive_scatters_have_derivatives();
    refusals::operations_without_a_rule_are_refused();

    let mut seen = SEEN.with_borrow(BTreeSet::clone);
    seen.extend(WITHOUT_OPERANDS.into_iter().chain([STOPPED]).map(str::to_owned));
    let every = every_form();
    assert_eq!(every.difference(&seen).collect::<Vec<_>>(), Vec::<&String>::new(), "neither checked nor refused");
}
