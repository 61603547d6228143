//! The devices of a plan.

use grpo_backend_tpu::aot::{Chip, Target};
use grpo_backend_tpu::plugins::Kind;

/// The devices for which a run is planned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Devices {
    /// The properties of one device.
    pub chip: Chip,
    /// The number of devices.
    pub count: usize,
    /// The number of links through which a device receives in a collective of all devices.
    pub links: usize,
    /// The bytes of a device's memory that programs may use.
    pub memory: u64,
}

impl Devices {
    /// Returns the devices of a target.
    pub fn of(target: &Target) -> Self {
        let chip = target.chip();
        Self { chip, count: target.devices(), links: target.links(), memory: chip.usable_memory }
    }

    /// Returns `count` devices without asking a plugin for their kind: a ring of v6e for TPUs and for the virtual devices of XLA's CPU, or H100
    /// GPUs.
    pub fn assumed(kind: Kind, count: usize) -> Self {
        let (name, links) = match kind {
            Kind::Cuda => ("h100", 1),
            Kind::Tpu | Kind::Cpu => ("v6e", if count > 2 { 2 } else { 1 }),
        };
        let chip = Chip::ALL.into_iter().find(|chip| chip.name == name).expect("a name of Chip::ALL");
        Self { chip, count, links, memory: chip.usable_memory }
    }

    /// Returns the first `count` of these devices.
    #[must_use]
    pub fn first(self, count: usize) -> Self {
        Self { count, links: if count == self.count { self.links } else { 1 }, ..self }
    }

    /// Returns the bytes per second that each device of an axis of this size receives from the others, which are `stride` devices apart. An axis
    /// of all devices uses every link; a smaller axis is a line of neighbours, which data crosses through one link. Between hosts of GPUs, data
    /// crosses through the network adapters of those devices of the axis that a host has.
    pub(crate) fn received_per_second(&self, axis: usize, stride: usize) -> f64 {
        let links = if axis == self.count { self.links } else { 1 };
        let through_links = links.max(1) as f64 * self.chip.link_bandwidth;
        match self.chip.host {
            Some(host) if axis * stride > host.devices => {
                let adapters = (host.devices / stride).max(1);
                through_links.min(adapters as f64 * host.network_bandwidth)
            }
            _ => through_links,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_across_gpu_hosts_use_the_network() {
        let gigabytes = |target: &str, axis, stride| {
            let devices = Devices::of(&Target::parse(target).unwrap());
            devices.received_per_second(axis, stride) / 1e9
        };
        assert_eq!(gigabytes("h100x8", 8, 1), 450.0);
        assert_eq!(gigabytes("h100x16", 8, 1), 450.0);
        // All eight adapters of a host, two of them, and one.
        assert_eq!(gigabytes("h100x16", 16, 1), 400.0);
        assert_eq!(gigabytes("h100x16", 4, 4), 100.0);
        assert_eq!(gigabytes("h100x16", 2, 8), 50.0);
        // The links of TPUs connect hosts.
        assert_eq!(gigabytes("v6e:4x4", 16, 1), 200.0);
    }
}
