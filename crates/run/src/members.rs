//! The processes of a run, from the section `distributed` or from the environment of a TPU slice, which libtpu reads, too.

use crate::error::Result;
use grpo_distributed::DEFAULT_PORT;
use grpo_run_config::{DistributedConfig, PolicyDevice, TrainConfig, check};

/// The number of processes of a run, this process, and the address of process 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Members {
    pub(crate) coordinator_address: String,
    pub(crate) num_processes: usize,
    pub(crate) process_id: usize,
}

/// Returns `true` if this process follows process 0 of a run with this configuration.
///
/// # Errors
/// [`grpo_run_config::Error::Key`] if the section `distributed` differs from libtpu's environment, or if the environment is incomplete.
pub fn is_follower(config: &TrainConfig) -> Result<bool> {
    Ok(Members::of(config)?.is_some_and(|members| members.process_id > 0))
}

impl Members {
    /// Returns the processes of a run; `None` for a run of one process.
    ///
    /// # Errors
    /// See [`is_follower`].
    pub(crate) fn of(config: &TrainConfig) -> Result<Option<Self>> {
        Self::in_environment(config, |name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn in_environment(config: &TrainConfig, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let DistributedConfig { coordinator_address, num_processes, process_id, .. } = &config.distributed;
        let slice = match config.policy.device {
            PolicyDevice::PjrtTpu => Self::of_slice(&config.distributed, variable)?,
            _ => None,
        };
        let (Some(address), Some(num_processes), Some(process_id)) = (coordinator_address, num_processes, process_id)
        else {
            return Ok(slice);
        };
        if let Some(slice) = slice {
            for (key, expected, found) in [
                ("distributed.num_processes", slice.num_processes, num_processes),
                ("distributed.process_id", slice.process_id, process_id),
            ] {
                check(*found == expected, key, &format!("{expected}, as libtpu's environment says, or null"), found)?;
            }
        }
        Ok(Some(Self { coordinator_address: address.clone(), num_processes: *num_processes, process_id: *process_id }))
    }

    /// Returns the processes of a TPU slice of several hosts, by the variables that libtpu reads. Process 0 listens at the first host's
    /// [`DEFAULT_PORT`].
    fn of_slice(keys: &DistributedConfig, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let list = |name| variable(name).map(|text| text.split(',').map(|one| one.trim().to_owned()).collect());
        let [addresses, hosts]: [Option<Vec<String>>; 2] = ["TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"].map(list);
        let names = match &addresses {
            Some(_) => ["TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"],
            None => ["TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"],
        };
        let Some(listed) = addresses.or(hosts) else { return Ok(None) };
        // A host of a slice may be used alone.
        let bounds = variable("TPU_PROCESS_BOUNDS");
        let sides = bounds.iter().flat_map(|bounds| bounds.split(','));
        let bounds_count = sides.map(|side| side.trim().parse::<usize>().ok()).product::<Option<usize>>();
        let is_one = bounds.is_some() && bounds_count == Some(1);
        if is_one || listed.len() == 1 && bounds.is_none() {
            return Ok(None);
        }
        let expected = format!("a list of the {} processes of TPU_PROCESS_BOUNDS", bounds.as_deref().unwrap_or("?"));
        check(bounds.is_none() || bounds_count == Some(listed.len()), names[0], &expected, listed.join(","))?;
        let slices = variable("MEGASCALE_NUM_SLICES");
        let one_slice = slices.as_deref().is_none_or(|slices| slices == "1");
        check(one_slice, "MEGASCALE_NUM_SLICES", "one slice: a mesh does not span slices", slices.unwrap_or_default())?;
        let id = variable(names[1]);
        let process = id.as_ref().and_then(|id| id.parse().ok()).filter(|id| *id < listed.len());
        let expected = format!("a number below {}, the number of processes in {}", listed.len(), names[0]);
        check(process.is_some(), names[1], &expected, id.unwrap_or("nothing".into()))?;
        let host: &str = match names[0] {
            "TPU_PROCESS_ADDRESSES" => listed[0].rsplit_once(':').map_or(&*listed[0], |(host, _)| host),
            _ => &listed[0],
        };
        let coordinator_address = format!("{host}:{DEFAULT_PORT}");
        let is_taken = keys.coordinator_address.is_none() && listed.contains(&coordinator_address);
        let expected = format!("an address, because libtpu itself uses {coordinator_address}");
        check(!is_taken, "distributed.coordinator_address", &expected, "null")?;
        Ok(Some(Self { coordinator_address, num_processes: listed.len(), process_id: process.unwrap_or(0) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn of(settings: &str, variables: &[(&str, &str)]) -> Result<Option<Members>> {
        let layers = grpo_files::Layers::new().text("a test", settings).unwrap();
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Members::in_environment(&TrainConfig::from_layers(layers).unwrap(), find)
    }

    const TPU: &str = "{policy: {device: 'pjrt:tpu', mesh: {fsdp: -1}}}";
    const HOSTS: (&str, &str) = ("TPU_WORKER_HOSTNAMES", "t-0, t-1,t-2,t-3");
    const ADDRESSES: (&str, &str) = ("TPU_PROCESS_ADDRESSES", "localhost:8470,localhost:8471");

    #[rstest]
    #[case::worker(TPU, &[HOSTS, ("TPU_WORKER_ID", "2")], "t-0:8476", 4, 2)]
    #[case::bounds(TPU, &[HOSTS, ("TPU_WORKER_ID", "0"), ("TPU_PROCESS_BOUNDS", "2,2,1")], "t-0:8476", 4, 0)]
    // Several processes of one host, as JAX's own tests start them.
    #[case::task(TPU, &[ADDRESSES, HOSTS, ("CLOUD_TPU_TASK_ID", "1")], "localhost:8476", 2, 1)]
    #[case::keys(
        "{policy: {device: 'pjrt:tpu'}, distributed: {coordinator_address: 'a:1', num_processes: 4, process_id: 2}}",
        &[HOSTS, ("TPU_WORKER_ID", "2")], "a:1", 4, 2
    )]
    #[case::keys_without_environment(
        "{policy: {device: 'pjrt:tpu'}, distributed: {coordinator_address: 'a:1', num_processes: 4, process_id: 2}}",
        &[], "a:1", 4, 2
    )]
    #[case::another_device(
        "{policy: {device: 'pjrt:cuda'}, distributed: {coordinator_address: 'a:1', num_processes: 2, process_id: 1}}",
        &[HOSTS, ("TPU_WORKER_ID", "2")], "a:1", 2, 1
    )]
    fn processes_come_from_keys_or_from_the_environment_of_libtpu(
        #[case] settings: &str,
        #[case] variables: &[(&str, &str)],
        #[case] address: &str,
        #[case] num_processes: usize,
        #[case] process_id: usize,
    ) {
        let expected = Members { coordinator_address: address.into(), num_processes, process_id };
        assert_eq!(of(settings, variables).unwrap(), Some(expected));
    }

    #[rstest]
    #[case::nothing(TPU, &[])]
    #[case::one_host(TPU, &[("TPU_WORKER_HOSTNAMES", "localhost"), ("TPU_WORKER_ID", "0")])]
    #[case::one_host_of_a_slice(TPU, &[HOSTS, ("TPU_WORKER_ID", "2"), ("TPU_PROCESS_BOUNDS", "1,1,1")])]
    #[case::another_device("{policy: {device: 'pjrt:cpu'}}", &[HOSTS, ("TPU_WORKER_ID", "2")])]
    fn one_process_needs_no_others(#[case] settings: &str, #[case] variables: &[(&str, &str)]) {
        assert_eq!(of(settings, variables).unwrap(), None);
    }

    #[rstest]
    #[case::no_id(&[HOSTS], "`TPU_WORKER_ID`: expected a number below 4", "nothing")]
    #[case::large_id(&[HOSTS, ("TPU_WORKER_ID", "4")], "`TPU_WORKER_ID`: expected a number below 4", "4")]
    #[case::no_task(&[ADDRESSES, ("TPU_WORKER_ID", "0")], "`CLOUD_TPU_TASK_ID`: expected a number below 2", "nothing")]
    #[case::other_bounds(
        &[HOSTS, ("TPU_WORKER_ID", "0"), ("TPU_PROCESS_BOUNDS", "2,1,1")],
        "the 2,1,1 processes of TPU_PROCESS_BOUNDS", "t-0,t-1,t-2,t-3"
    )]
    #[case::slices(&[HOSTS, ("TPU_WORKER_ID", "0"), ("MEGASCALE_NUM_SLICES", "2")], "`MEGASCALE_NUM_SLICES`", "2")]
    #[case::port_of_libtpu(
        &[("TPU_PROCESS_ADDRESSES", "localhost:8476,localhost:8477"), ("CLOUD_TPU_TASK_ID", "0")],
        "libtpu itself uses localhost:8476", "null"
    )]
    fn an_incomplete_environment_is_an_error(
        #[case] variables: &[(&str, &str)],
        #[case] expected: &str,
        #[case] found: &str,
    ) {
        let error = of(TPU, variables).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(found), "{error}");
    }

    #[test]
    fn keys_that_differ_from_the_environment_are_refused() {
        for (id, key) in [("1", "distributed.process_id"), ("2", "distributed.num_processes")] {
            let settings = format!(
                "{{policy: {{device: 'pjrt:tpu'}}, distributed: {{coordinator_address: 'a:1', num_processes: {}, process_id: 2}}}}",
                if id == "2" { 3 } else { 4 }
            );
            let error = of(&settings, &[HOSTS, ("TPU_WORKER_ID", id)]).unwrap_err().to_string();
            assert!(error.contains(&format!("`{key}`")) && error.contains("libtpu"), "{error}");
        }
    }
}
