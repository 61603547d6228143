//! Predicted costs of programs.

use grpo_run_config::MeshAxis;
use serde::Serialize;
use std::ops::{Add, Mul};

/// The predicted cost of a program on each device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// The time of matmuls and of memory traffic in seconds.
    pub chip_seconds: f64,
    /// The time of the links between devices in seconds.
    pub link_seconds: f64,
    /// The bytes received from other copies of the weights, along the axis `data`.
    pub received_data_bytes: f64,
    /// The bytes received from other shards of rows and of the hidden dimension, along the axis `fsdp`.
    pub received_fsdp_bytes: f64,
    /// The bytes received from other shards of heads and MLP, along the axis `tensor`.
    pub received_tensor_bytes: f64,
}

impl Cost {
    /// Returns the time of the device and of its links in seconds: compilers overlap neither with the other.
    pub fn seconds(self) -> f64 {
        self.chip_seconds + self.link_seconds
    }

    /// Adds bytes received along an axis.
    pub(crate) fn receive(&mut self, axis: MeshAxis, bytes: f64) {
        *match axis {
            MeshAxis::Data => &mut self.received_data_bytes,
            MeshAxis::Fsdp => &mut self.received_fsdp_bytes,
            MeshAxis::Tensor => &mut self.received_tensor_bytes,
        } += bytes;
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            chip_seconds: self.chip_seconds + other.chip_seconds,
            link_seconds: self.link_seconds + other.link_seconds,
            received_data_bytes: self.received_data_bytes + other.received_data_bytes,
            received_fsdp_bytes: self.received_fsdp_bytes + other.received_fsdp_bytes,
            received_tensor_bytes: self.received_tensor_bytes + other.received_tensor_bytes,
        }
    }
}

impl Mul<usize> for Cost {
    type Output = Self;

    fn mul(self, times: usize) -> Self {
        let times = times as f64;
        Self {
            chip_seconds: times * self.chip_seconds,
            link_seconds: times * self.link_seconds,
            received_data_bytes: times * self.received_data_bytes,
            received_fsdp_bytes: times * self.received_fsdp_bytes,
            received_tensor_bytes: times * self.received_tensor_bytes,
        }
    }
}
