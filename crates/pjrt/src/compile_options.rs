//! Options of a compilation: XLA's `CompileOptionsProto`.

use std::collections::BTreeMap;

use prost::Message;

use crate::value::conversions;

/// Options of a compilation.
///
/// A program runs on `num_replicas x num_partitions` devices. Replicas are copies of a program with explicit
/// collectives; partitions are shards of one program that XLA partitions by its sharding annotations.
///
/// ```
/// use grpo_pjrt::CompileOptions;
///
/// // Four replicas of a program with explicit collectives.
/// let options = CompileOptions { num_replicas: 4, ..CompileOptions::default() };
/// assert_eq!(options.num_partitions, 1);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CompileOptions {
    /// The number of replicas.
    pub num_replicas: usize,
    /// The number of partitions of each replica.
    pub num_partitions: usize,
    /// `true` to partition the program by its sharding annotations (required for more than one partition).
    pub use_spmd_partitioning: bool,
    /// `true` if the annotations are in the `sdy` dialect instead of `mhlo.sharding`.
    pub use_shardy_partitioner: bool,
    /// The compiler's optimisation level; its default if `None`.
    pub optimization_level: Option<OptimizationLevel>,
    /// The ids of the devices, `[num_replicas][num_partitions]`; the first devices if `None`.
    pub device_assignment: Option<Vec<Vec<i64>>>,
    /// Compiler flags by name, without dashes, such as `xla_tpu_scoped_vmem_limit_kib`.
    pub overrides: BTreeMap<String, OptionValue>,
}

/// The environment variables with compiler flags for plugins.
const FLAGS: [&str; 2] = ["XLA_FLAGS", "LIBTPU_INIT_ARGS"];

/// A compiler's optimisation level, with XLA's numbers. libtpu compiles a large program at `O0` in 1/25 of the time
/// that its default takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // named as compilers name them
pub enum OptimizationLevel {
    O0 = 9,
    O1 = 19,
    O2 = 29,
    O3 = 39,
}

/// The value of a compiler flag.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum OptionValue {
    /// A string, which every flag accepts.
    #[prost(string, tag = "1")]
    String(String),
    /// A boolean.
    #[prost(bool, tag = "2")]
    Bool(bool),
    /// An integer.
    #[prost(int64, tag = "3")]
    Int(i64),
    /// A floating-point number.
    #[prost(double, tag = "4")]
    Float(f64),
}

conversions! { OptionValue: &str => String, bool => Bool, i64 => Int, f64 => Float }

impl Default for CompileOptions {
    /// Returns the options for a program on one device.
    fn default() -> Self {
        CompileOptions {
            num_replicas: 1,
            num_partitions: 1,
            use_spmd_partitioning: false,
            use_shardy_partitioner: false,
            optimization_level: None,
            device_assignment: None,
            overrides: BTreeMap::new(),
        }
    }
}

impl CompileOptions {
    /// Returns the options for `count` replicas, one on each device.
    pub fn replicas(count: usize) -> Self {
        CompileOptions { num_replicas: count, ..Self::default() }
    }

    /// Returns the options for one program that XLA partitions over `count` devices by its `mhlo.sharding` annotations.
    pub fn partitions(count: usize) -> Self {
        CompileOptions { num_partitions: count, use_spmd_partitioning: true, ..Self::default() }
    }

    /// Returns the options for one program that Shardy partitions over `count` devices by its `sdy` annotations; each
    /// device takes and returns its shard. Such programs do not compile without this partitioner.
    ///
    /// ```
    /// use grpo_pjrt::CompileOptions;
    ///
    /// let options = CompileOptions::shardy(4);
    /// assert!(options.num_partitions == 4 && options.use_shardy_partitioner);
    /// ```
    pub fn shardy(count: usize) -> Self {
        CompileOptions { use_shardy_partitioner: true, ..Self::partitions(count) }
    }

    /// Sets a compiler flag.
    pub fn with(mut self, flag: &str, value: impl Into<OptionValue>) -> Self {
        self.overrides.insert(flag.into(), value.into());
        self
    }

    /// Returns bytes that cover all inputs of a compilation except for the program: these options, and the flags from
    /// the environment (`XLA_FLAGS`, `LIBTPU_INIT_ARGS`). Keys of compiled executables need these, not only
    /// [`CompileOptions::encode`].
    pub fn fingerprint(&self) -> Vec<u8> {
        let mut all = self.encode();
        for name in FLAGS {
            if let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) {
                all.extend_from_slice(format!("\n{name}=").as_bytes());
                all.extend_from_slice(value.as_encoded_bytes());
            }
        }
        all
    }

    /// Returns the serialized proto; equal options give equal bytes.
    pub fn encode(&self) -> Vec<u8> {
        let build = proto::ExecutableBuildOptions {
            device_ordinal: -1,
            num_replicas: self.num_replicas as i64,
            num_partitions: self.num_partitions as i64,
            use_spmd_partitioning: self.use_spmd_partitioning,
            use_shardy_partitioner: self.use_shardy_partitioner,
            optimization_level: self.optimization_level.map_or(0, |level| level as i32),
            device_assignment: self.device_assignment.as_deref().map(proto::DeviceAssignment::new),
        };
        let overrides = self.overrides.iter().map(|(name, value)| {
            let value = proto::OptionOverride { value: Some(value.clone()) };
            (name.clone(), value)
        });
        proto::CompileOptions { executable_build_options: Some(build), env_option_overrides: overrides.collect() }
            .encode_to_vec()
    }
}

/// The fields that this crate sets, with their numbers in `xla/pjrt/proto/compile_options.proto` and
/// `xla/xla_data.proto`.
mod proto {
    use std::collections::BTreeMap;

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct CompileOptions {
        #[prost(message, optional, tag = "3")]
        pub(super) executable_build_options: Option<ExecutableBuildOptions>,
        #[prost(btree_map = "string, message", tag = "7")]
        pub(super) env_option_overrides: BTreeMap<String, OptionOverride>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ExecutableBuildOptions {
        /// -1: no particular device of this machine.
        #[prost(int64, tag = "1")]
        pub(super) device_ordinal: i64,
        #[prost(int64, tag = "4")]
        pub(super) num_replicas: i64,
        #[prost(int64, tag = "5")]
        pub(super) num_partitions: i64,
        #[prost(bool, tag = "6")]
        pub(super) use_spmd_partitioning: bool,
        #[prost(message, optional, tag = "9")]
        pub(super) device_assignment: Option<DeviceAssignment>,
        #[prost(bool, tag = "19")]
        pub(super) use_shardy_partitioner: bool,
        /// An enumeration; 0 is the compiler's default.
        #[prost(int32, tag = "24")]
        pub(super) optimization_level: i32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct DeviceAssignment {
        #[prost(int32, tag = "1")]
        replica_count: i32,
        #[prost(int32, tag = "2")]
        computation_count: i32,
        #[prost(message, repeated, tag = "3")]
        computation_devices: Vec<ComputationDevice>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct ComputationDevice {
        #[prost(int64, repeated, tag = "1")]
        replica_device_ids: Vec<i64>,
    }

    impl DeviceAssignment {
        /// Makes the assignment from `[replicas][partitions]`; the proto stores it transposed.
        pub(super) fn new(replicas: &[Vec<i64>]) -> Self {
            let partitions = replicas.iter().map(Vec::len).max().unwrap_or(0);
            let column = |index| replicas.iter().filter_map(|row| row.get(index).copied()).collect();
            DeviceAssignment {
                replica_count: replicas.len() as i32,
                computation_count: partitions as i32,
                computation_devices: (0..partitions)
                    .map(|index| ComputationDevice { replica_device_ids: column(index) })
                    .collect(),
            }
        }
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct OptionOverride {
        #[prost(oneof = "super::OptionValue", tags = "1, 2, 3, 4")]
        pub(super) value: Option<super::OptionValue>,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_optimization_level_is_field_24() {
        let at = |level| CompileOptions { optimization_level: Some(level), ..CompileOptions::default() }.encode();
        let (low, high) = (at(OptimizationLevel::O0), at(OptimizationLevel::O3));
        assert!(low.ends_with(&[0xc0, 0x01, 9]) && high.ends_with(&[0xc0, 0x01, 39]), "{low:?} {high:?}");
    }

    #[test]
    fn one_device_encodes_to_the_shortest_options_that_plugins_accept() {
        let minus_one = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        let expected = [&[0x1a, 15, 0x08][..], &minus_one, &[0x20, 1, 0x28, 1]].concat();
        assert_eq!(CompileOptions::default().encode(), expected);
    }

    #[test]
    fn use_shardy_partitioner_is_field_19() {
        let options = CompileOptions::shardy(4).encode();
        assert!(options.ends_with(&[0x28, 4, 0x30, 1, 0x98, 0x01, 1]), "{options:?}");
    }

    #[test]
    fn a_device_assignment_is_stored_by_partition() {
        let assignment = proto::DeviceAssignment::new(&[vec![0, 1], vec![2, 3], vec![4, 5]]);
        let ids = |ids: &[u8]| [&[0x1a, ids.len() as u8 + 2, 0x0a, ids.len() as u8][..], ids].concat();
        let expected = [vec![0x08, 3, 0x10, 2], ids(&[0, 2, 4]), ids(&[1, 3, 5])].concat();
        assert_eq!(assignment.encode_to_vec(), expected);
    }
}
