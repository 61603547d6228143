//! Each prompt is prefilled once, for all its samples.

use crate::checkpoint::Checkpoint;
use crate::prefills::rows_of_prefills;
use crate::support::{device_weights, random, request, rollout};
use grpo_policy::LogitsProcessors;
use grpo_stablehlo::Dtype;

#[test]
fn samples_of_a_prompt_share_its_prefill() {
    let checkpoint = Checkpoint::open("qwen2");
    let weights = device_weights(&checkpoint, Dtype::F32);
    let prompts = [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], vec![8; 11], vec![2, 30]];
    let request = request(&prompts, 5, 11, &[5, 6, 7], random(1.0, LogitsProcessors::default(), 0));
    let prefilled = |slots| {
        let mut rollout = rollout(&checkpoint, slots, 4);
        let (completions, rows) = rows_of_prefills(|| rollout.generate(&weights, &request).unwrap());
        assert_eq!(completions.len(), 30);
        rows
    };
    // All thirty samples have slots: one prefill of six prompts, rounded up to eight rows.
    assert_eq!(prefilled(64), [8]);
    // Eight slots hold the samples of one prompt at a time, so each prompt has its own prefill.
    assert_eq!(prefilled(8), [1; 6]);
    // Sixteen slots hold the samples of three prompts at a time.
    assert_eq!(prefilled(16), [4, 4]);
}
