//! The used subset of `tensorboard.Event`.

use prost::{Message, Oneof};

/// `DataType.DT_STRING`.
pub(super) const DT_STRING: i32 = 7;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "What", tags = "3, 5")]
    pub(super) what: Option<What>,
    #[prost(message, optional, tag = "10")]
    pub(super) source_metadata: Option<SourceMetadata>,
}

impl Event {
    /// Creates the first event of a file.
    pub(super) fn file_version(wall_time: f64) -> Self {
        let writer = concat!("grpo-sinks ", env!("CARGO_PKG_VERSION")).into();
        let source_metadata = Some(SourceMetadata { writer });
        Self { wall_time, step: 0, what: Some(What::FileVersion("brain.Event:2".into())), source_metadata }
    }

    pub(super) fn summary(wall_time: f64, step: i64, value: Vec<Value>) -> Self {
        Self { wall_time, step, what: Some(What::Summary(Summary { value })), source_metadata: None }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SourceMetadata {
    #[prost(string, tag = "1")]
    pub(super) writer: String,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    pub(super) tensor: Option<Tensor>,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadata>,
}

impl Value {
    pub(super) fn scalar(tag: String, value: f32) -> Self {
        Self { tag, simple_value: Some(value), tensor: None, metadata: None }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginData>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Tensor {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<TensorShape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) string_val: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorShape {
    #[prost(message, repeated, tag = "2")]
    pub(super) dim: Vec<Dim>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Dim {
    #[prost(int64, tag = "1")]
    pub(super) size: i64,
}
