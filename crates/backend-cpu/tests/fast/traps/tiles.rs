//! Tiles beyond the vocabulary's edge.

use super::*;
use grpo_testkit::{EXACT, config, difference, normal};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

/// Naive: a last tile that is padded with zeros has additional logits of 0.
#[rstest]
fn padding_columns_do_not_count(#[values(1, 2, 3, 511, 512, 513, 1023, 1025)] v: usize) {
    let mut rng = ChaCha8Rng::seed_from_u64(67);
    let z: Vec<f32> = (0..3 * v).map(|_| (normal(&mut rng) - 12.0) as f32).collect();
    let (loss, batch) = (config(r#"{"loss_type": "bnpo"}"#), sequence(&[0, (v - 1) as i64, (v / 2) as i64], 1.0));
    let expected = oracle(&loss, &z, v, &batch);

    let mut padded = z[..v].to_vec();
    padded.resize(v.next_multiple_of(512), 0.0);
    let off = (f64::from(naive_logp(&padded, 0)) - expected.logp[0]).abs();
    assert!(if v == 512 { off < 1e-5 } else { off > 0.1 }, "naive: logp is {off} off");

    for found in everywhere(&loss, &z, v, &batch) {
        for (got, expected) in found.scores.logp.iter().zip(&expected.logp) {
            assert!((f64::from(*got) - expected).abs() <= 3e-6 * expected.abs().max(1.0), "{}: {got}", found.how);
        }
        let off = difference(&found.dz, &expected.grad_logits);
        assert!(off <= EXACT, "{}: gradients are {off:e} off", found.how);
    }
}
