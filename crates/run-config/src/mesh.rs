//! The keys of meshes of devices, with the names of tunix and MaxText.

use crate::error::{Result, check};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use smart_default::SmartDefault;
use std::fmt;
use std::str::FromStr;

/// The number of devices along each axis of a mesh.
#[derive(Clone, Copy, Debug, SmartDefault, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeshConfig {
    /// The number of copies of the weights; rows are sharded over them. -1, on one axis, is the number of remaining devices.
    #[default(1)]
    pub data: i64,
    /// The number of shards of rows and of the weights' hidden dimension; a layer's weights are gathered when it runs.
    #[default(1)]
    pub fsdp: i64,
    /// The number of shards of heads, MLP and vocabulary; it divides the number of query heads, and of the key heads
    /// of Gated DeltaNets. Devices hold copies of key/value heads that are fewer.
    #[default(1)]
    pub tensor: i64,
}

/// Writes `fsdp 4 x tensor 2`, without axes of one device.
impl fmt::Display for MeshConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = self.axes().into_iter().filter(|(_, size)| *size != 1);
        let axes: Vec<String> = axes.map(|(axis, size)| format!("{} {size}", axis.name())).collect();
        f.pad(&if axes.is_empty() { "one device".to_owned() } else { axes.join(" x ") })
    }
}

/// An axis of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MeshAxis {
    /// Copies of the weights.
    Data,
    /// Shards of the weights' hidden dimension.
    Fsdp,
    /// Shards of heads, MLP and vocabulary.
    Tensor,
}

impl MeshAxis {
    /// All axes, from the one that changes slowest.
    pub const ALL: [Self; 3] = [Self::Data, Self::Fsdp, Self::Tensor];

    /// Returns the name of the axis.
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Fsdp => "fsdp",
            Self::Tensor => "tensor",
        }
    }
}

/// Reads `fsdp=4,tensor=2`, for the command line.
impl FromStr for MeshConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut mesh = Self::default();
        for part in text.split(',') {
            let size = part.split_once('=').and_then(|(axis, size)| Some((axis.trim(), size.trim().parse().ok()?)));
            match size {
                Some(("data", size)) => mesh.data = size,
                Some(("fsdp", size)) => mesh.fsdp = size,
                Some(("tensor", size)) => mesh.tensor = size,
                _ => {
                    return Err(format!(
                        "expected data=N, fsdp=N and tensor=N, with commas between them, got `{part}`"
                    ));
                }
            }
        }
        mesh.validate("--mesh").map(|()| mesh).map_err(|error| error.to_string())
    }
}

impl MeshConfig {
    /// Returns the sizes of all axes, with -1 for the remaining devices.
    pub fn axes(&self) -> [(MeshAxis, i64); 3] {
        [(MeshAxis::Data, self.data), (MeshAxis::Fsdp, self.fsdp), (MeshAxis::Tensor, self.tensor)]
    }

    /// Returns the number of devices; `None` if an axis is -1.
    pub fn devices(&self) -> Option<usize> {
        self.axes().iter().try_fold(1_usize, |all, (_, size)| all.checked_mul(usize::try_from(*size).ok()?))
    }

    /// Returns the mesh on this number of devices, without -1.
    ///
    /// ```
    /// let mesh = grpo_run_config::MeshConfig { fsdp: -1, tensor: 2, ..Default::default() };
    /// assert_eq!(mesh.on_devices("policy.mesh", 8)?.to_string(), "fsdp 4 x tensor 2");
    /// # Ok::<(), grpo_run_config::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Key`] with `key` if the sizes do not multiply to `devices`.
    pub fn on_devices(&self, key: &str, devices: usize) -> Result<Self> {
        self.validate(key)?;
        let given: usize = self.axes().iter().filter_map(|(_, size)| usize::try_from(*size).ok()).product();
        let has_rest = self.devices().is_none();
        let fits = if has_rest { devices.is_multiple_of(given) } else { devices == given };
        let expected = match has_rest {
            true => format!("axes whose product divides the number of devices, {devices}"),
            false => format!("axes whose product is the number of devices, {devices} (policy.devices)"),
        };
        check(fits, key, &expected, format!("{given} devices"))?;
        let rest = i64::try_from(devices / given).unwrap_or(i64::MAX);
        let [data, fsdp, tensor] = self.axes().map(|(_, size)| if size == -1 { rest } else { size });
        Ok(Self { data, fsdp, tensor })
    }

    /// Checks that every axis has at least one device, or one axis takes the rest.
    pub(crate) fn validate(&self, key: &str) -> Result<()> {
        for (axis, size) in self.axes() {
            let expected = "1 or more devices, or -1 for the remaining ones";
            check(size > 0 || size == -1, &format!("{key}.{}", axis.name()), expected, size)?;
        }
        let rest = self.axes().iter().filter(|(_, size)| *size == -1).count();
        check(rest <= 1, key, "-1 on one axis", format!("-1 on {rest} axes"))
    }
}

/// A mesh, or the planner's choice of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeshChoice {
    /// `auto`: the planner chooses.
    Auto,
    /// The sizes of the axes.
    Axes(MeshConfig),
}

impl Serialize for MeshChoice {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Axes(axes) => axes.serialize(serializer),
        }
    }
}

/// Written by hand, because the errors of an untagged enum would not name the wrong key.
impl<'de> Deserialize<'de> for MeshChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Choice;
        impl<'de> Visitor<'de> for Choice {
            type Value = MeshChoice;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`auto`, or a section such as {fsdp: 8}")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<MeshChoice, E> {
                if text == "auto" {
                    Ok(MeshChoice::Auto)
                } else {
                    Err(E::invalid_value(serde::de::Unexpected::Str(text), &self))
                }
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<MeshChoice, A::Error> {
                MeshConfig::deserialize(MapAccessDeserializer::new(map)).map(MeshChoice::Axes)
            }
        }
        deserializer.deserialize_any(Choice)
    }
}

/// The axes of the mesh that shard each logical axis of the model, with MaxText's name for such a table. `None` is the default: batch over
/// data and fsdp; embed over fsdp; heads, kv and mlp over tensor; expert and vocab over tensor and fsdp; length over tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogicalAxisRules {
    /// The mesh axes that shard the rows of a batch.
    pub batch: Option<Vec<MeshAxis>>,
    /// The mesh axes that shard the hidden dimension of weights.
    pub embed: Option<Vec<MeshAxis>>,
    /// The mesh axes that shard query heads, and the heads of Gated DeltaNets.
    pub heads: Option<Vec<MeshAxis>>,
    /// The mesh axes that shard key/value heads.
    pub kv: Option<Vec<MeshAxis>>,
    /// The mesh axes that shard the intermediate dimension of the MLP.
    pub mlp: Option<Vec<MeshAxis>>,
    /// The mesh axes that shard the experts of a layer; each device has the same number of whole experts.
    pub expert: Option<Vec<MeshAxis>>,
    /// The mesh axes that shard the vocabulary.
    pub vocab: Option<Vec<MeshAxis>>,
    /// The mesh axes that shard the tokens of a row in the residual stream, Megatron's sequence parallelism with `[tensor]`.
    pub length: Option<Vec<MeshAxis>>,
}
