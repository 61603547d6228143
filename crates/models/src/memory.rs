//! How much memory a training takes, said before anything is loaded.

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::Dtype;
use grpo_core::readable_bytes;
use std::fmt;

/// Parts of a program's memory with their sizes in bytes: those that are there all the time, and those of phases, which follow one
/// another.
///
/// ```
/// use models::{Dtype, MemoryTable, ModelConfig, TrainingMemory};
///
/// let config = ModelConfig::default();
/// let mut table = TrainingMemory::full(&config, Dtype::F32).table();
/// table.push_in("updates", "activations", 1 << 20);
/// table.push_in("sampling", "keys and values", 1 << 10); // when the activations and gradients are not there
/// assert_eq!(table.total(), config.parameter_count() * 4 * 4 + (1 << 20));
/// let error = table.check(1 << 10).unwrap_err().to_string();
/// assert!(error.contains("first moments") && error.contains("activations"), "{error}");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryTable {
    rows: Vec<(String, u64)>,
    phases: Vec<(String, Vec<(String, u64)>)>,
}

impl MemoryTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a part. One of 0 bytes is left out.
    pub fn push(&mut self, label: impl Into<String>, bytes: u64) {
        if bytes > 0 {
            self.rows.push((label.into(), bytes));
        }
    }

    /// Adds a part that is there in one phase only. One of 0 bytes is left out.
    pub fn push_in(&mut self, phase: &str, label: impl Into<String>, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let row = (label.into(), bytes);
        match self.phases.iter_mut().find(|(name, _)| name == phase) {
            Some((_, rows)) => rows.push(row),
            None => self.phases.push((phase.to_owned(), vec![row])),
        }
    }

    /// The parts that are always there with their bytes, in the order in which they were added.
    pub fn rows(&self) -> &[(String, u64)] {
        &self.rows
    }

    /// The phases with the parts that are there in each alone.
    pub fn phases(&self) -> &[(String, Vec<(String, u64)>)] {
        &self.phases
    }

    /// The bytes of the parts that are always there, and of the phase that takes most.
    pub fn total(&self) -> u64 {
        sum(&self.rows).saturating_add(self.largest().map_or(0, |(_, rows)| sum(rows)))
    }

    fn largest(&self) -> Option<&(String, Vec<(String, u64)>)> {
        self.phases.iter().max_by_key(|(_, rows)| sum(rows))
    }

    /// Checks that all parts fit into `available` bytes, which [`available_memory`] tells.
    ///
    /// # Errors
    /// [`Error::TooLarge`] with the table.
    pub fn check(&self, available: u64) -> Result<()> {
        if self.total() <= available { Ok(()) } else { Err(Error::TooLarge { table: self.clone(), available }) }
    }
}

fn sum(rows: &[(String, u64)]) -> u64 {
    rows.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}

/// A line per part and one for the total, with sizes in MB or GB.
impl fmt::Display for MemoryTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_phases = self.phases.iter().flat_map(|(phase, rows)| {
            rows.iter().map(move |(label, bytes)| (format!("during {phase}: {label}"), *bytes))
        });
        let largest = self.largest().map_or_else(String::new, |(phase, _)| format!(" (during {phase})"));
        let rows: Vec<_> =
            self.rows.iter().cloned().chain(of_phases).chain([(format!("total{largest}"), self.total())]).collect();
        let width = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        for (place, (label, bytes)) in rows.iter().enumerate() {
            let line = if place == 0 { "" } else { "\n" };
            write!(f, "{line}  {label:width$}  {:>10}", readable_bytes(*bytes))?;
        }
        Ok(())
    }
}

/// The keys that reduce the memory of a run on the host.
pub(crate) const KNOBS: &str = "`lora` (adapters in place of all weights), grpo.gradient_accumulation_steps (more micro-batches of fewer \
    completions), rollout.batch_size (fewer sequences that decode together), rollout.max_completion_length, data.max_prompt_length, \
    grpo.prompts_per_step and grpo.num_generations need less";

/// The phase in which gradients are there.
pub const UPDATES: &str = "updates";

/// What of a model a training keeps in memory. Activations are for the policy to say, which knows what it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    /// The number of weights of the model.
    pub weights: u64,
    /// The number type in which the weights are computed with.
    pub dtype: Dtype,
    /// The number of weights that are trained: all of them, or those of adapters beside them.
    pub trained: Trained,
    /// The number type of the second set of weights that is kept as the reference policy, where there is one.
    pub reference: Option<Dtype>,
}

/// Which weights a training changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trained {
    /// Those of the model.
    All,
    /// Those of adapters beside it, as many as said; they are f32.
    Adapters(u64),
}

impl TrainingMemory {
    /// Training of all weights, without a reference policy.
    pub fn full(config: &ModelConfig, dtype: Dtype) -> Self {
        Self { weights: config.parameter_count(), dtype, trained: Trained::All, reference: None }
    }

    /// The bytes of weights, gradients and AdamW's two moments, and of the reference policy. What is trained has gradients
    /// during updates, moments and, beside 16-bit weights, the bits that these lack of f32.
    pub fn table(&self) -> MemoryTable {
        let single = Dtype::F32.size() as u64;
        let stored = self.weights.saturating_mul(self.dtype.size() as u64);
        let mut table = MemoryTable::new();
        table.push(format!("weights ({})", self.dtype), stored);
        let trained = match self.trained {
            Trained::Adapters(count) => {
                table.push("adapters (float32)", count.saturating_mul(single));
                count
            }
            Trained::All => {
                let lacking = single - self.dtype.size() as u64;
                table.push("remainders of weights (16 bits)", self.weights.saturating_mul(lacking));
                self.weights
            }
        };
        for part in ["first moments (float32)", "second moments (float32)"] {
            table.push(part, trained.saturating_mul(single));
        }
        if let Some(dtype) = self.reference {
            table.push(format!("reference policy ({dtype})"), self.weights.saturating_mul(dtype.size() as u64));
        }
        table.push_in(UPDATES, "gradients (float32)", trained.saturating_mul(single));
        table
    }
}

/// The memory in bytes that this process has now, and the most that it ever had; `None` where the system does not say.
pub fn resident_memory() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}

/// The memory in bytes that a new allocation of this process may still take: what the system says is available, or what is
/// left of the limit of the process's control group or of its address space (`ulimit -v`) if that is less. `None` where the system does
/// not say.
pub fn available_memory() -> Option<u64> {
    let system = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    [system, control_group_left(), address_space_left()].into_iter().flatten().min()
}

/// Returns the rest of this process's address space limit in bytes; `None` without a limit.
fn address_space_left() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let used = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let used = used.split_whitespace().next()?.parse::<u64>().ok()? * 1024;
    Some(address_space_limit(&limits)?.saturating_sub(used))
}

fn address_space_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// What is left of the limit of this process's control group (version 2), or of one above it.
fn control_group_left() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = std::path::Path::new("/sys/fs/cgroup");
    let number = |path: std::path::PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let left = |group: &std::path::Path| {
        let used = number(group.join("memory.current"))?;
        // Pages of files count as used and are dropped when memory is wanted.
        let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse::<u64>().ok());
        Some(number(group.join("memory.max"))?.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
    };
    root.join(own).ancestors().take_while(|group| group.starts_with(root)).filter_map(left).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_what_linux_says() {
        let text = "MemTotal:       24000000 kB\nMemFree:         9000000 kB\nMemAvailable:   22000000 kB\n";
        assert_eq!(mem_available(text), Some(22_000_000 * 1024));
        assert_eq!(mem_available("MemTotal: 1 kB\n"), None);
        let limits =
            |soft: &str| format!("Max processes 1 1 processes\nMax address space   {soft}    unlimited   bytes\n");
        assert_eq!(address_space_limit(&limits("4096000000")), Some(4_096_000_000));
        assert_eq!(address_space_limit(&limits("unlimited")), None);
        if cfg!(target_os = "linux") {
            assert!(available_memory().unwrap() > 1 << 20);
            let (now, most) = resident_memory().unwrap();
            assert!(1 << 20 < now && now <= most);
        }
    }
}
