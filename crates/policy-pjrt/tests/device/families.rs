//! Every model family: logits match transformers.

use crate::checkpoint::{self, Checkpoint};
use crate::support::{BF16, narrow, on_device, relative_difference};
use grpo_policy_pjrt::decoder::Compute;
use grpo_policy_pjrt::{Error, PjrtPolicyOptions, RolloutOptions};
use grpo_testkit::margin::{assert_below, assert_below_without_margin};

#[test]
fn logits_match_transformers_with_and_without_cache() {
    // Several calls of the decode loop, so that their windows are written to the cache.
    let rollout = RolloutOptions { tokens_per_call: 5, ..RolloutOptions::default() };
    let exact = checkpoint::ALL.into_iter().chain(checkpoint::GATED_DELTA_NETS);
    let exact = exact.map(|name| (name, PjrtPolicyOptions::default(), 1e-5));
    let rounded = [("llama3_bf16", narrow(), 3e-2), ("qwen3_5", narrow(), 1e-1)];
    for (name, options, tolerance) in exact.chain(rounded) {
        let checkpoint = Checkpoint::open(name);
        let sequences = checkpoint.sequences();
        let sequences: Vec<&[u32]> = sequences.iter().map(|ids| &ids[..]).collect();
        let is_rounded = options.compute == Compute::Bf16;
        let mut policy = on_device(&checkpoint, PjrtPolicyOptions { rollout, ..options });
        let vocab = checkpoint.config().vocab_size;
        let none = || -> Vec<Vec<f32>> { sequences.iter().map(|ids| vec![f32::NAN; ids.len() * vocab]).collect() };
        let put = |all: &mut Vec<Vec<f32>>, sequence: usize, position: usize, logits: &[f32]| {
            let row = &mut all[sequence][position * vocab..][..logits.len()];
            assert!(row.iter().all(|x| x.is_nan()), "{name}: position {position} of {sequence} twice");
            row.copy_from_slice(logits);
        };
        let (mut whole, mut cached) = (none(), none());
        policy.logits(&sequences, |sequence, position, logits| put(&mut whole, sequence, position, logits)).unwrap();
        policy.cached_logits(&sequences, |i, position, logits| put(&mut cached, i, position, logits)).unwrap();
        for (i, ids) in sequences.iter().enumerate() {
            let expected = checkpoint.logits(i, ids.len());
            for (what, found) in
                [(format!("{name}, sequence {i}"), &whole[i]), (format!("{name}, {i}, cached"), &cached[i])]
            {
                let off = relative_difference(&what, found, expected);
                if is_rounded {
                    assert_below_without_margin(&format!("{what} in bf16"), off, tolerance, BF16);
                } else {
                    assert_below(&what, off, tolerance);
                }
            }
        }
    }
}

#[test]
fn logits_of_invalid_sequences_are_errors() {
    let checkpoint = Checkpoint::open("qwen2");
    let config = checkpoint.config();
    let mut policy = on_device(&checkpoint, PjrtPolicyOptions::default());
    let long = vec![0; config.max_position_embeddings + 1];
    for (sequences, words) in [
        (vec![], "an empty one"),
        (vec![&[1, 2][..], &[]], "an empty one"),
        (vec![&long[..]], "max_position_embeddings"),
        (vec![&[config.vocab_size as u32][..]], "vocab"),
    ] {
        let errors: [Error; 2] = [
            policy.logits(&sequences, |_, _, _| {}).unwrap_err(),
            policy.cached_logits(&sequences, |_, _, _| {}).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| error.to_string().contains(words)), "{errors:?}");
    }
}
