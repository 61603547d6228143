//! Each prompt is prefilled once, for all its samples.

use crate::checkpoint::Checkpoint;
use crate::support::{device_weights, random, request, rollout};
use policy::LogitsProcessors;
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
    let weights = device_weights(&checkpoint, Dtype::F32);
    let prompts = [vec![1, 9, 4], vec![7], vec![1, 20, 21, 22, 23, 24, 25], vec![3, 2], vec![8; 11], vec![2, 30]];
    let request = request(&prompts, 5, 11, &[5, 6, 7], random(1.0, LogitsProcessors::default(), 0));
    let prefilled = |slots| {
        let mut rollout = rollout(&checkpoint, slots, 4);
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
