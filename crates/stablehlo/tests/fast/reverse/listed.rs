//! Which operations have been held to differences, and which have been refused: every one is in one of the two lists.

use super::{devices, own, refusals, rules, scans};
use crate::interpret::{cases::form, every_form};
use stablehlo::{Region, Traced, ValueId};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};

/// Operations that read nothing, so that nothing depends on an argument through them.
const WITHOUT_OPERANDS: [&str; 5] = ["axis_index", "constant", "iota", "partition_id", "replica_id"];
/// An operation that is there for what it does not pass on, which differences do not show.
const STOPPED: &str = "stop_gradient";

thread_local! {
    /// The forms that this thread's tests have seen.
    static SEEN: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

fn see(form: Option<String>) {
    SEEN.with_borrow_mut(|seen| seen.extend(form));
}

/// Notes the operations through which the function depends on the arguments that it is differentiated by.
pub(super) fn checked(function: &Traced, with_respect_to: &[usize]) {
    let body = &function.function().body;
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

/// Notes the operation of that name, of which the function has no derivative.
pub(super) fn refused(function: &Traced, name: &str) {
    function.function().visit(|operation| {
        if operation.kind.name() == name {
            see(form(&operation.kind));
        }
    });
}

#[test]
fn every_operation_is_held_to_differences_or_refused() {
    rules::operations_on_elements();
    rules::what_has_no_slope();
    rules::a_clamp_passes_at_its_bounds();
    rules::products();
    rules::reductions_and_broadcasts();
    rules::moves();
    rules::windows_that_slide();
    rules::windows_at_places_that_are_values();
    rules::gathers_and_scatters();
    scans::a_scan_has_the_derivative_of_differences();
    scans::code_that_is_computed_again_has_the_same_derivative();
    own::a_function_with_a_derivative_of_its_own();
    devices::devices_that_meet();
    devices::constraints();
    refusals::a_loop_without_a_known_end_has_no_derivative();
    refusals::only_what_adds_up_has_a_derivative_of_scatters_windows_and_devices();
    refusals::sorts_choices_of_code_and_bits_have_no_derivative();

    let mut seen = SEEN.with_borrow(BTreeSet::clone);
    seen.extend(WITHOUT_OPERANDS.into_iter().chain([STOPPED]).map(str::to_owned));
    let every = every_form();
    assert_eq!(every.difference(&seen).collect::<Vec<_>>(), Vec::<&String>::new(), "neither checked nor refused");
}
