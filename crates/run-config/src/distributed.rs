//! The section `distributed`: the processes of a run on several hosts, with JAX's names.

use crate::error::{Result, check};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The largest number of processes.
const MAX_PROCESSES: usize = 1 << 12;

/// The processes of a run. The first three keys are set together; without them the run has one process.
///
/// ```
/// use grpo_run_config::{DistributedConfig, TrainConfig};
///
/// let distributed = DistributedConfig {
///     coordinator_address: Some("10.0.0.1:8476".into()),
///     num_processes: Some(4),
///     process_id: Some(0),
///     ..Default::default()
/// };
/// TrainConfig { distributed, ..TrainConfig::built_in() }.validate()?;
/// # Ok::<(), grpo_run_config::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DistributedConfig {
    /// The address at which process 0 listens for the others, `HOST:PORT`, in a private network; `None` without other processes, and on TPU
    /// slices, whose environment has the hosts.
    pub coordinator_address: Option<String>,
    /// The number of processes; `None` is one, or the number of processes of a TPU slice.
    pub num_processes: Option<usize>,
    /// The number of this process; process 0 alone writes the run folder, calls reward functions and runs environments.
    pub process_id: Option<usize>,
    /// The time in seconds within which all processes must be connected.
    #[default(300)]
    pub initialization_timeout: u64,
    /// The time in seconds after which a process that sends nothing counts as lost.
    #[default(100)]
    pub heartbeat_timeout_seconds: u64,
}

impl DistributedConfig {
    /// Checks every key.
    ///
    /// # Errors
    /// [`crate::Error::Key`].
    pub fn validate(&self) -> Result<()> {
        let keys = [
            ("coordinator_address", self.coordinator_address.is_some()),
            ("num_processes", self.num_processes.is_some()),
            ("process_id", self.process_id.is_some()),
        ];
        let given = || keys.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| *name);
        if let Some((missing, _)) = keys.iter().find(|(_, is_set)| !is_set && given().next().is_some()) {
            let expected = "a value, because coordinator_address, num_processes and process_id are set together";
            let found = format!("null with {}", given().collect::<Vec<_>>().join(" and "));
            check(false, &format!("distributed.{missing}"), expected, found)?;
        }
        if let Some(address) = &self.coordinator_address {
            check(!address.trim().is_empty(), "distributed.coordinator_address", "HOST:PORT", "an empty text")?;
        }
        let num = self.num_processes.unwrap_or(1);
        let expected = format!("1 to {MAX_PROCESSES}");
        check((1..=MAX_PROCESSES).contains(&num), "distributed.num_processes", &expected, num)?;
        let process = self.process_id.unwrap_or(0);
        let expected = format!("a number below distributed.num_processes, {num}");
        check(process < num, "distributed.process_id", &expected, process)?;
        for (key, seconds) in [
            ("distributed.initialization_timeout", self.initialization_timeout),
            ("distributed.heartbeat_timeout_seconds", self.heartbeat_timeout_seconds),
        ] {
            check((1..=1 << 20).contains(&seconds), key, "1 to 1048576 seconds", seconds)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::TrainConfig;
    use rstest::rstest;

    #[rstest]
    #[case::nothing("{}", "")]
    #[case::all("{coordinator_address: 'a:1', num_processes: 2, process_id: 1}", "")]
    #[case::address_alone("{coordinator_address: 'a:1'}", "`distributed.num_processes`: expected a value")]
    #[case::id_alone("{process_id: 1}", "`distributed.coordinator_address`: expected a value")]
    #[case::no_id("{coordinator_address: 'a:1', num_processes: 2}", "null with coordinator_address and num_processes")]
    #[case::empty("{coordinator_address: ' ', num_processes: 2, process_id: 1}", "HOST:PORT")]
    #[case::too_large(
        "{coordinator_address: 'a:1', num_processes: 2, process_id: 2}",
        "below distributed.num_processes, 2"
    )]
    #[case::none("{coordinator_address: 'a:1', num_processes: 0, process_id: 0}", "expected 1 to 4096, got 0")]
    #[case::no_time("{heartbeat_timeout_seconds: 0}", "`distributed.heartbeat_timeout_seconds`")]
    fn keys_are_set_together_and_in_range(#[case] section: &str, #[case] words: &str) {
        let text = format!("{{distributed: {section}}}");
        let layers = grpo_files::Layers::new().text("a test", &text).unwrap();
        match TrainConfig::from_layers(layers).and_then(|config| config.validate()) {
            Ok(()) => assert_eq!(words, ""),
            Err(error) => assert!(!words.is_empty() && error.to_string().contains(words), "{error}"),
        }
    }

    #[test]
    fn tpus_and_gpus_of_several_processes_need_a_mesh() {
        let distributed = "distributed: {coordinator_address: 'a:1', num_processes: 2, process_id: 0}";
        let of = |policy: &str| {
            let text = format!("{{{distributed}, policy: {policy}}}");
            let layers = grpo_files::Layers::new().text("a test", &text).unwrap();
            TrainConfig::from_layers(layers).and_then(|config| config.validate())
        };
        for device in ["pjrt:tpu", "pjrt:cuda"] {
            let error = of(&format!("{{device: '{device}'}}")).unwrap_err().to_string();
            assert!(error.contains("`policy.mesh`: expected a mesh of the devices of all 2 processes"), "{error}");
            of(&format!("{{device: '{device}', mesh: {{fsdp: -1}}}}")).unwrap();
        }
        for device in ["host", "pjrt:cpu"] {
            of(&format!("{{device: '{device}'}}")).unwrap();
        }
    }
}
