//! Metrics of evaluations with scripted completions.

use super::scripted::{Power, Script, TWO, scripted, with_parts};
use super::*;
use data::Item;
use data::task::Comparison;

/// Four samples, of which two return at least 1.
const FOUR: Script = Script { sampled: &["1.", "0.", "0.", "3."], greedy: "0." };

fn evaluated(change: impl FnOnce(&mut TrainConfig)) -> trainer::eval::EvalReport {
    let mut config = small();
    config.eval.num_generations = 4;
    config.eval.pass_reward = Some("number".into());
    change(&mut config);
    scripted(FOUR, config, true).evaluate().unwrap()
}

#[test]
fn evaluations_estimate_pass_at_k_from_their_samples() {
    let greedy = evaluated(|_| {});
    assert_eq!((greedy.pass_at_1, greedy.problems), (0.0, 16));
    assert!(greedy.pass_at.is_empty());
    let found = evaluated(|config| config.eval.pass_at = vec![1, 2, 3]);
    assert_eq!(found.pass_at_1, 0.5);
    // A pair has a passing completion unless it is the two failing ones: 1 - 1 / 6.
    assert!((found.pass_at[&2].all - 5.0 / 6.0).abs() < 1e-12);
    assert_eq!((found.pass_at[&3].all, found.pass_at[&3].by_source["comparison"]), (1.0, 1.0));
    assert_eq!(found.pass_at_1_by_task["comparison"], 0.5);
    for report in [greedy, found] {
        assert_eq!((report.mean_rewards["number"], report.mean_rewards["square"]), (1.0, 2.5));
        assert_eq!(report.mean_reward, Some(1.0 - 0.5 * 2.5));
    }
}

#[test]
fn greedy_evaluations_have_one_completion_per_problem() {
    let found = evaluated(|config| config.eval.temperature = Some(0.0));
    assert_eq!((found.pass_at_1, found.mean_reward), (0.0, Some(0.0)));
    let passed = evaluated(|config| {
        config.eval.temperature = Some(0.0);
        config.eval.pass_at = vec![1];
        config.eval.pass_reward = Some("square".into());
    });
    assert_eq!(passed.pass_at_1, 0.0);
}

#[test]
fn pass_reward_must_be_a_reward_of_the_run() {
    let mut config = small();
    config.eval.pass_reward = Some("nobody".into());
    let error = with_parts(config, vec![(Box::new(Power("number", 1)), 1.0)], TWO).err().unwrap().to_string();
    assert!(error.contains("`eval.pass_reward`") && error.contains("number"), "{error}");
}

#[test]
fn num_problems_0_evaluates_all_held_out_rows() {
    /// Five held-out rows.
    struct Finite(TaskMixture);
    impl data::Dataset for Finite {
        fn next_batch(&mut self, count: usize) -> data::Result<Vec<Item>> {
            self.0.next_batch(count)
        }
        fn held_out(&self, count: usize) -> data::Result<Vec<Item>> {
            self.0.held_out(count)
        }
        fn num_held_out(&self) -> Option<usize> {
            Some(5)
        }
        fn probe(&self, count: usize) -> data::Result<Vec<Item>> {
            self.0.probe(count)
        }
        fn cursor(&self) -> u64 {
            self.0.cursor()
        }
        fn set_cursor(&mut self, cursor: u64) {
            self.0.set_cursor(cursor);
        }
    }
    let mut config = small();
    config.eval.num_problems = Some(0);
    let endless = Trainer::new(config.clone()).err().unwrap().to_string();
    assert!(endless.contains("`eval.num_problems`") && endless.contains("without end"), "{endless}");
    let tasks: data::WeightedTasks = vec![(Arc::new(Comparison { max_number: 50 }), 1.0)];
    let dataset = Box::new(Finite(TaskMixture::from_tasks(tasks, 0.1, 0).unwrap()));
    let parts = Parts { dataset, ..Parts::from_config(&config).unwrap() };
    assert_eq!(Trainer::with_parts(config, parts).unwrap().evaluate().unwrap().problems, 5);
}
