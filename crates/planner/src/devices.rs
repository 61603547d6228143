//! The devices of a plan.

use backend_tpu::aot::{Chip, Target};
use backend_tpu::plugins::Kind;

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

    /// Returns the bytes per second that each device of an axis of this size receives from the others. An axis of all devices uses every
    /// link; a smaller axis is a line of neighbours, which data crosses through one link.
    pub(crate) fn received_per_second(&self, axis: usize) -> f64 {
        let links = if axis == self.count { self.links } else { 1 };
        links.max(1) as f64 * self.chip.link_bandwidth
    }
}
