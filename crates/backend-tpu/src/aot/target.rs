//! Targets: devices that need not be present.

use super::chip::Chip;
use super::slice::{Slices, TPUS};
use crate::plugins::{self, Kind};
use grpo_core::error::{Error, Result};
use grpo_pjrt::Topology;
use std::path::Path;

/// Devices to compile for: a TPU slice such as `v6e:2x4`, or NVIDIA GPUs of one host such as `h200` or `h100x8`, or of several hosts such as
/// `h100x16`.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    name: String,
    chip: Chip,
    devices: Devices,
    count: usize,
    links: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Devices {
    /// libtpu's name of the slice.
    Tpu(String),
    /// XLA's description of the GPU.
    Gpu(&'static str),
}

const GPUS: [(&str, &str); 4] = [
    ("a100", include_str!("../../targets/a100.txtpb")),
    ("h100", include_str!("../../targets/h100.txtpb")),
    ("h200", include_str!("../../targets/h200.txtpb")),
    ("b200", include_str!("../../targets/b200.txtpb")),
];

impl Target {
    /// Parses `v6e:2x4`, `v6e` (its smallest slice) or `h200`.
    ///
    /// # Errors
    /// [`Error::Value`] with the known names.
    pub fn parse(name: &str) -> Result<Self> {
        let (family, shape) = name.split_once(':').map_or((name, None), |(family, shape)| (family, Some(shape)));
        let parse_tpu = || {
            let slices = Slices::of(family)?;
            let shape = shape.unwrap_or(slices.smallest);
            let (count, links) = slices.devices_and_links(shape)?;
            Some((family, Devices::Tpu(format!("{family}:{shape}")), count, links))
        };
        let parse_gpu = || {
            let (family, count) = match name.split_once('x') {
                Some((family, count)) => (family, count.parse::<u8>().ok().filter(|count| *count > 0)?),
                None => (name, 1),
            };
            let (_, description) = GPUS.iter().find(|(name, _)| *name == family)?;
            let (count, host_devices) = (usize::from(count), Chip::from_name(family)?.host?.devices);
            let fills_hosts = count <= host_devices || count.is_multiple_of(host_devices);
            // Every GPU has one link, to the switch.
            fills_hosts.then_some((family, Devices::Gpu(description), count, 1))
        };
        let found = parse_tpu().or_else(parse_gpu);
        found
            .and_then(|(family, devices, count, links)| {
                Some(Self { name: name.into(), chip: Chip::from_name(family)?, devices, count, links })
            })
            .ok_or_else(|| {
                let tpus = TPUS.map(|slices| slices.generation).join(", ");
                let gpus = GPUS.map(|(name, _)| name).join(", ");
                let shapes = Slices::of(family).map_or_else(String::new, |slices| {
                    format!("; {family} has the shapes {}", slices.known())
                });
                let known = format!(
                    "expected a TPU slice ({tpus} with a shape, as v6e:2x4{shapes}) or GPUs ({gpus}, with a number as h100x8, \
                     above 8 a multiple of 8 as h100x16)"
                );
                Error::value("target", format!("`{name}`"), known)
            })
    }

    /// Returns the name of the target, as passed to [`Target::parse`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the chip of its devices.
    pub fn chip(&self) -> Chip {
        self.chip
    }

    /// Returns the number of devices, as PJRT counts them.
    pub fn devices(&self) -> usize {
        self.count
    }

    /// Returns the number of links through which a device receives in a collective of all devices: one per axis of a
    /// slice, two along an axis that is a ring, and one for a GPU.
    pub fn links(&self) -> usize {
        self.links
    }

    /// Returns the complete description of the target for the compiler.
    pub(super) fn description(&self) -> String {
        match (&self.devices, self.count) {
            (Devices::Tpu(name), _) => name.clone(),
            (Devices::Gpu(description), 1) => (*description).into(),
            (Devices::Gpu(description), count) => format!("{count} x {description}"),
        }
    }

    /// Returns the kind of plugin that compiles for it.
    pub fn kind(&self) -> Kind {
        match self.devices {
            Devices::Tpu(_) => Kind::Tpu,
            Devices::Gpu(_) => Kind::Cuda,
        }
    }

    /// Describes the target to the plugin at `path`, or to the one that [`plugins::find`] finds.
    ///
    /// # Errors
    /// The errors of [`plugins::topology`].
    pub(super) fn topology(&self, path: Option<&Path>) -> Result<Topology> {
        match &self.devices {
            Devices::Tpu(name) => plugins::topology(Kind::Tpu, path, name, &[]),
            Devices::Gpu(description) => {
                // Slices, hosts per slice, devices per host.
                let host_devices = self.chip.host.map_or(self.count, |host| host.devices.min(self.count));
                let topology = format!("1x{}x{host_devices}", self.count / host_devices);
                let options = [("target_config", (*description).into()), ("topology", topology.as_str().into())];
                plugins::topology(Kind::Cuda, path, "", &options)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_slices_or_gpus() {
        let v6e = Target::parse("v6e:2x4").expect("a slice");
        assert_eq!((v6e.kind(), v6e.chip().name, v6e.name()), (Kind::Tpu, "v6e", "v6e:2x4"));
        assert_eq!(Target::parse("v5p").expect("a slice").devices, Devices::Tpu("v5p:2x2x1".into()));
        assert_eq!(Target::parse("h200").expect("a GPU").kind(), Kind::Cuda);
        let devices = ["v6e", "v6e:2x4", "v5p", "v5p:2x2x2", "tpu7x:2x2x1", "h200", "h100x8", "h100x16"]
            .map(|name| Target::parse(name).expect(name).devices());
        assert_eq!(devices, [1, 8, 4, 8, 8, 1, 8, 16]);
        for name in
            ["", "v6e:", "v6e:2x", "v6e:0x4", "v6e:two", "h200:2x4", "h100x12", "h100x0", "h100x", "h2000", "V6E"]
        {
            let text = Target::parse(name).expect_err(name).to_string();
            assert!(text.contains(&format!("`{name}`")) && text.contains("v6e") && text.contains("h200"), "{text}");
        }
    }

    #[test]
    fn every_chip_has_a_target() {
        for chip in Chip::ALL {
            assert_eq!(Target::parse(chip.name).expect("a target").chip(), chip);
        }
    }
}
