//! Steps of optimizers by torch: tests/golden/optimizers.json, which optimizers.py writes.

use crate::margin::assert_below;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::Path;

/// The steps of one tensor. `S` are the settings of the optimizer.
#[derive(Debug, Deserialize)]
pub struct OptimizerSteps<S> {
    /// The settings.
    pub settings: S,
    /// The learning rate of all steps.
    pub learning_rate: f64,
    /// Largest difference from torch, relative to the value, or to 0.01 if the value is smaller.
    #[serde(default = "bound")]
    bound: f64,
    /// The shape of the tensor.
    pub shape: Vec<usize>,
    /// The tensor before the first step.
    pub weight: Vec<f64>,
    /// The gradient of each step.
    pub gradients: Vec<Vec<f64>>,
    /// The tensor after each step.
    pub weights: Vec<Vec<f64>>,
    /// The optimizer's state after the last step, by torch's names.
    pub state: BTreeMap<String, Vec<f64>>,
}

fn bound() -> f64 {
    2e-6
}

impl<S: DeserializeOwned> OptimizerSteps<S> {
    /// Reads all cases.
    ///
    /// # Panics
    /// Panics if the file is missing or damaged.
    pub fn all() -> Vec<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/optimizers.json");
        serde_json::from_str(&std::fs::read_to_string(path).expect("the golden file")).expect("cases")
    }
}

impl<S> OptimizerSteps<S> {
    /// Compares the tensor after `step`, counted from 1.
    ///
    /// # Panics
    /// Panics if a value is too far from torch's.
    pub fn assert_weight(&self, step: usize, found: &[impl Copy + Into<f64>]) {
        self.assert_close(&format!("the weight after step {step}"), found, &self.weights[step - 1]);
    }

    /// Compares a tensor of the state after the last step.
    ///
    /// # Panics
    /// Panics if torch's state has no tensor of this name, or a value is too far from torch's.
    pub fn assert_state(&self, name: &str, found: &[impl Copy + Into<f64>]) {
        self.assert_close(name, found, &self.state[name]);
    }

    #[track_caller]
    fn assert_close(&self, what: &str, found: &[impl Copy + Into<f64>], expected: &[f64]) {
        assert_eq!(found.len(), expected.len(), "{what}");
        let off =
            found.iter().zip(expected).map(|(found, value)| ((*found).into() - value).abs() / value.abs().max(1e-2));
        // `max` ignores NaN.
        let most = off.fold(0.0, |most: f64, off| if off.is_nan() { f64::INFINITY } else { most.max(off) });
        assert_below(what, most, self.bound);
    }
}

/// Returns the numbers in f32.
pub fn to_f32(numbers: &[f64]) -> Vec<f32> {
    numbers.iter().map(|number| *number as f32).collect()
}
