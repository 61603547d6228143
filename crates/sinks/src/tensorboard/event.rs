//! The used subset of `tensorboard.Event`.

use crate::messages::messages;
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

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
}

messages! {
    SourceMetadata {
        1 => [string] writer: String,
    }

    Summary {
        1 => [message, repeated] value: Vec<Value>,
    }

    Value {
        1 => [string] tag: String,
        2 => [float, optional] simple_value: Option<f32>,
        8 => [message, optional] tensor: Option<Tensor>,
        9 => [message, optional] metadata: Option<SummaryMetadata>,
    }

    SummaryMetadata {
        1 => [message, optional] plugin_data: Option<PluginData>,
    }

    PluginData {
        1 => [string] plugin_name: String,
    }

    Tensor {
        1 => [int32] dtype: i32,
        2 => [message, optional] shape: Option<TensorShape>,
        8 => [bytes = "vec", repeated] string_val: Vec<Vec<u8>>,
    }

    TensorShape {
        2 => [message, repeated] dim: Vec<Dim>,
    }

    Dim {
        1 => [int64] size: i64,
    }
}

impl Event {
    pub(super) fn file_version(wall_time: f64) -> Self {
        let writer = concat!("grpo-sinks ", env!("CARGO_PKG_VERSION")).into();
        let source_metadata = Some(SourceMetadata { writer });
        Self { wall_time, step: 0, what: Some(What::FileVersion("brain.Event:2".into())), source_metadata }
    }

    pub(super) fn summary(wall_time: f64, step: i64, value: Vec<Value>) -> Self {
        Self { wall_time, step, what: Some(What::Summary(Summary { value })), source_metadata: None }
    }
}

impl Value {
    pub(super) fn scalar(tag: String, value: f32) -> Self {
        Self { tag, simple_value: Some(value), tensor: None, metadata: None }
    }
}
