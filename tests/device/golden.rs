//! Losses as traced programs: every golden file and every variant once. The program is the dense one, because what a loss asks of a
//! head is held to the oracle in the other files here, for the losses that differ in it.

use crate::backend;
use grpo_check::parity::Check;
use grpo_core::{Dtype, Implementation};
use grpo_tests::{assert_parity, golden, variants};

#[test]
fn golden() {
    golden::assert_golden(&backend(), &[Implementation::Reference], Dtype::F32);
}

#[test]
fn variants() {
    for (name, loss) in variants::LOSSES {
        let check = Check { implementations: vec![Implementation::Reference], ..Check::default() };
        assert_parity(&backend(), name, &variants::file(loss), &check);
    }
}
