//! The names of checkpoints.

use std::fmt;

/// A checkpoint, identified by the step after which it was taken. It has the name of its folder.
///
/// ```
/// use grpo_run::checkpoint::CheckpointId;
///
/// assert_eq!(CheckpointId::Grpo(50).to_string(), "step-000050");
/// assert_eq!(CheckpointId::from_name("warmup-000020"), Some(CheckpointId::Warmup(20)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckpointId {
    /// Taken after this many warm-up steps.
    Warmup(u64),
    /// Taken after this many GRPO steps and the evaluation that was due there.
    Grpo(u64),
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Warmup(step) => write!(f, "warmup-{step:06}"),
            Self::Grpo(step) => write!(f, "step-{step:06}"),
        }
    }
}

impl CheckpointId {
    /// Returns the checkpoint with the folder name `name`; `None` for any other name.
    pub fn from_name(name: &str) -> Option<Self> {
        let (phase, step) = name.split_once('-')?;
        let step = step.parse().ok()?;
        let id = match phase {
            "warmup" => Self::Warmup(step),
            "step" => Self::Grpo(step),
            _ => return None,
        };
        (id.to_string() == name).then_some(id)
    }
}
