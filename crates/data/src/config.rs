//! The section `data` of a run's configuration: tasks, how often each is drawn, and what is held out.

use crate::error::{Result, check};
use serde::{Deserialize, Serialize};

/// The largest number of letters or digits that a task asks for.
const MAX_LENGTH: usize = 1 << 10;

/// The mixture of problems, and the share of them that is held out.
///
/// ```
/// let mut config = data::DataConfig::default();
/// config.tasks.sorting.weight = 1.0; // as often as additions
/// config.validate()?;
/// # Ok::<(), data::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// The share of all prompts, chosen by a hash of their text, that is never trained on; in (0, 1).
    pub held_out_fraction: f64,
    /// The built-in tasks, and how often each is drawn.
    pub tasks: TasksConfig,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self { held_out_fraction: 0.1, tasks: TasksConfig::default() }
    }
}

/// The built-in tasks, a section each; a weight of 0 leaves the task out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TasksConfig {
    /// Addition, `37+48=` -> `085`, or `85` without `zero_pad`.
    pub addition: AdditionConfig,
    /// Comparison, `37?48=` -> `<`.
    pub comparison: ComparisonConfig,
    /// Sorting of digits, `sort:3142=` -> `1234`.
    pub sorting: SortingConfig,
    /// Reversal of a word, `rev:abc=` -> `cba`.
    pub reverse: ReverseConfig,
    /// Countdown, `2,3,4:14=` -> `2*(3+4)`, or any other expression that reaches the target.
    pub countdown: CountdownConfig,
}

/// The task of adding two non-negative integers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdditionConfig {
    /// The relative frequency, at least 0; 0 leaves the task out.
    pub weight: f64,
    /// The largest summand.
    pub max_number: u32,
    /// Whether numbers have leading zeros up to a fixed width, `37+08=` -> `045`, which is much easier to learn.
    pub zero_pad: bool,
}

impl Default for AdditionConfig {
    fn default() -> Self {
        Self { weight: 1.0, max_number: 99, zero_pad: true }
    }
}

/// The task of saying which of two integers is larger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ComparisonConfig {
    /// The relative frequency, at least 0; 0 leaves the task out.
    pub weight: f64,
    /// The largest number.
    pub max_number: u32,
}

impl Default for ComparisonConfig {
    fn default() -> Self {
        Self { weight: 0.0, max_number: 99 }
    }
}

/// The task of sorting decimal digits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SortingConfig {
    /// The relative frequency, at least 0; 0 leaves the task out.
    pub weight: f64,
    /// The smallest number of digits.
    pub min_length: usize,
    /// The largest number of digits.
    pub max_length: usize,
}

impl Default for SortingConfig {
    fn default() -> Self {
        Self { weight: 0.0, min_length: 3, max_length: 4 }
    }
}

/// The task of reversing a word of random lowercase letters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReverseConfig {
    /// The relative frequency, at least 0; 0 leaves the task out.
    pub weight: f64,
    /// The smallest number of letters.
    pub min_length: usize,
    /// The largest number of letters.
    pub max_length: usize,
}

impl Default for ReverseConfig {
    fn default() -> Self {
        Self { weight: 0.0, min_length: 3, max_length: 4 }
    }
}

/// The task of reaching a target with each of the given numbers once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CountdownConfig {
    /// The relative frequency, at least 0; 0 leaves the task out.
    pub weight: f64,
    /// How many numbers are given, 2 to 4.
    pub count: usize,
    /// The largest given number.
    pub max_number: u32,
}

impl Default for CountdownConfig {
    fn default() -> Self {
        Self { weight: 0.0, count: 3, max_number: 9 }
    }
}

impl DataConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`crate::Error::Config`] that names the key, what would be legal and what was given.
    pub fn validate(&self) -> Result<()> {
        let f = self.held_out_fraction;
        check(f > 0.0 && f < 1.0, "data.held_out_fraction", "strictly between 0 and 1", f)?;
        let t = &self.tasks;
        let weights = [
            ("data.tasks.addition.weight", t.addition.weight),
            ("data.tasks.comparison.weight", t.comparison.weight),
            ("data.tasks.sorting.weight", t.sorting.weight),
            ("data.tasks.reverse.weight", t.reverse.weight),
            ("data.tasks.countdown.weight", t.countdown.weight),
        ];
        for (key, weight) in weights {
            check(weight.is_finite() && weight >= 0.0, key, "a finite number >= 0", weight)?;
        }
        for (key, min, max) in [
            ("data.tasks.sorting", t.sorting.min_length, t.sorting.max_length),
            ("data.tasks.reverse", t.reverse.min_length, t.reverse.max_length),
        ] {
            let expected = format!("1 <= min_length <= max_length <= {MAX_LENGTH}");
            check(1 <= min && min <= max && max <= MAX_LENGTH, key, &expected, format!("{min} and {max}"))?;
        }
        for (key, n) in [
            ("data.tasks.addition.max_number", t.addition.max_number),
            ("data.tasks.comparison.max_number", t.comparison.max_number),
            ("data.tasks.countdown.max_number", t.countdown.max_number),
        ] {
            check((1..=999_999).contains(&n), key, "between 1 and 999999", n)?;
        }
        check((2..=4).contains(&t.countdown.count), "data.tasks.countdown.count", "between 2 and 4", t.countdown.count)
    }
}
