//! Errors name values that are not finite.

use grpo_backend_cpu::CpuBackend;
use grpo_check::parity;
use grpo_core::{Implementation, PolicyOutput};
use grpo_tests::golden::files;
use grpo_tests::not_finite::{poison, tokens};

/// `grpo parity` and the loss file refuse such a batch and name the token.
#[test]
fn evaluation_error_names_the_non_finite_token() {
    let file = files().into_iter().find(|file| file.name == "trl_grpo_default").unwrap();
    let row = tokens(&file)[0];
    let mut policy = file.policy.clone();
    let PolicyOutput::Hidden { hidden, .. } = &mut policy else { panic!("hidden states") };
    poison(hidden, row * file.hidden, f32::NAN);
    for implementation in Implementation::ALL {
        let backend = CpuBackend::new();
        let error = parity::evaluate(&backend, implementation, &file.loss, &file, &policy).unwrap_err();
        assert!(error.to_string().contains(&format!("logp at token {row} (sequence ")), "{error}");
    }
}
