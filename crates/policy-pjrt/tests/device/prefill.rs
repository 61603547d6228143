//! Each prompt is prefilled once, for all its samples.

use crate::checkpoint::Checkpoint;
use crate::support::runtime;
use policy::{LogitsProcessors, RolloutRequest, Sampling};
use policy_pjrt::decoder::Compute;
use policy_pjrt::{DeviceRollout, DeviceWeights, RolloutOptions};
use rng::Purpose;
use stablehlo::Dtype;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Records the number of rows of every prefill.
#[derive(Clone, Default)]
struct Prefills(Arc<Mutex<Vec<u64>>>);

impl Visit for Prefills {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "prefill_rows" {
            self.0.lock().unwrap().push(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

impl Subscriber for Prefills {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.fields().field("prefill_rows").is_some()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn samples_of_a_prompt_share_its_prefill() {
    let checkpoint = Checkpoint::open("qwen2");
    let weights = DeviceWeights::from_weights(runtime(), checkpoint.config(), &checkpoint.weights, Dtype::F32).unwrap();
    let prompts = [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], vec![8; 11], vec![2, 30]];
    let request = RolloutRequest {
        prompts: &prompts,
        num_generations: 5,
        max_completion_length: 11,
        stop_ids: &[5, 6, 7],
        stop: None,
        sampling: Sampling::Random {
            temperature: 1.0,
            processors: LogitsProcessors::default(),
            seed: 5,
            purpose: Purpose::Rollout,
            step: 3,
            first: 0,
        },
    };
    let prefilled = |slots| {
        let options = RolloutOptions { slots, tokens_per_call: 4 };
        let mut rollout = DeviceRollout::new(runtime(), checkpoint.config(), Compute::F32, options).unwrap();
        let prefills = Prefills::default();
        let generate = || rollout.generate(&weights, &request).unwrap();
        let completions = tracing::subscriber::with_default(prefills.clone(), generate);
        assert_eq!(completions.len(), 30);
        prefills.0.lock().unwrap().clone()
    };
    // All thirty samples have slots: one prefill of six prompts, rounded up to eight rows.
    assert_eq!(prefilled(64), [8]);
    // Eight slots hold the samples of one prompt at a time, so each prompt has its own prefill.
    assert_eq!(prefilled(8), [1; 6]);
    // Sixteen slots hold the samples of three prompts at a time.
    assert_eq!(prefilled(16), [4, 4]);
}
