use super::*;

#[test]
fn temperatures_are_checked_at_active_tokens_and_cut_with_their_sequences() {
    let batch = || TokenBatch::packed(vec![1, 2, 3], vec![0, 1, 3]).unwrap().with_mask(&[1.0, 0.0, 1.0]).unwrap();
    for wrong in [0.0, -1.0, 1e-7, 1e7, f32::NAN, f32::INFINITY] {
        let message = batch().with_temperatures(vec![0.5, 1.0, wrong]).unwrap_err().to_string();
        assert!(message.contains("temperatures") && message.contains("token 2 (sequence 1, position 1)"), "{message}");
        assert!(batch().with_temperatures(vec![0.5, wrong, 1.0]).is_ok(), "masked tokens may hold anything");
    }
    assert!(batch().with_temperatures(vec![1.0; 2]).is_err());
    let batch = batch().with_temperatures(vec![1e-6, 0.0, 1e6]).unwrap();
    assert_eq!((batch.temperature(0), batch.select_independent(1..2).unwrap().temperature(1)), (Some(1e-6), Some(1e6)));
}

#[test]
fn impossible_log_probabilities_are_refused_with_their_position() {
    let batch = || TokenBatch::packed(vec![1, 2, 3], vec![0, 1, 3]).unwrap().with_mask(&[1.0, 0.0, 1.0]).unwrap();
    type Set = fn(TokenBatch, Vec<f32>) -> Result<TokenBatch>;
    let setters: [(&str, Set); 3] = [
        ("old_logp", TokenBatch::with_old_logp),
        ("ref_logp", TokenBatch::with_ref_logp),
        ("sampler_logp", TokenBatch::with_sampler_logp),
    ];
    for (name, set) in setters {
        for wrong in [5.0, 2.25, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let masked = set(batch(), vec![-1.0, wrong, -2.0]).unwrap();
            let at_active = set(batch(), vec![-1.0, -1.0, wrong]);
            if name == "sampler_logp" && wrong.is_nan() {
                assert!(at_active.is_ok() && masked.with_mask(&[1.0; 3]).is_ok(), "a sampler may say nothing");
                continue;
            }
            let place = |row, position| format!("{name} at token {row} (sequence 1, position {position})");
            let message = at_active.unwrap_err().to_string();
            assert!(message.contains(&place(2, 1)) && message.contains(&wrong.to_string()), "{message}");
            let message = masked.with_mask(&[1.0; 3]).unwrap_err().to_string();
            assert!(message.contains(&place(1, 0)), "a token that becomes active: {message}");
        }
        // Possible results of rounding log(1).
        for rounded in [0.0, 1e-6, 1e-3, 0.5] {
            assert!(set(batch(), vec![-1.0, f32::NAN, rounded]).is_ok(), "{name} {rounded}");
        }
    }
}

#[test]
fn mask_cannot_activate_a_token_with_a_non_finite_value() {
    let masked = || TokenBatch::packed(vec![1, 2], vec![0, 2]).unwrap().with_mask(&[1.0, 0.0]).unwrap();
    let nan = || vec![-1.0, f32::NAN];
    let batches = [
        ("old_logp", masked().with_old_logp(nan()).unwrap()),
        ("ref_logp", masked().with_ref_logp(nan()).unwrap()),
        ("advantages", masked().with_advantages(Advantages::PerToken(nan())).unwrap()),
        ("temperatures", masked().with_temperatures(vec![0.7, 0.0]).unwrap()),
    ];
    for (name, batch) in batches {
        assert!(batch.clone().with_mask(&[1.0, 0.0]).is_ok());
        let message = batch.with_mask(&[1.0, 1.0]).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains("token 1"), "{message}");
    }
    let weights = TokenWeights { policy: vec![1.0, f64::NAN], kl: vec![1.0; 2], ..TokenWeights::zeros(2) };
    assert!(masked().with_weights(weights).unwrap().with_mask(&[1.0; 2]).is_err());
}
