//! Losses as traced programs: every golden file and every variant once, with the dense implementation. The other files of this folder
//! compare every head with the oracle, for the losses that differ in their requirements on heads.

use crate::backend;
use grpo_check::parity::Check;
use grpo_core::{Dtype, Implementation};
use grpo_tests::{assert_parity, golden, variants};

#[test]
fn golden_files_match_on_pjrt() {
    golden::assert_golden(&backend(), &[Implementation::Reference], Dtype::F32);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn variants_match_the_oracle_on_pjrt() {
    for (name, loss) in variants::LOSSES {
        let check = Check { implementations: vec![Implementation::Reference], ..Check::default() };
        assert_parity(&backend(), name, &variants::file(loss), &check);
    }
}
