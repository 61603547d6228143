//! The used subset of `wandb_internal.Record`.

use prost::{Message, Oneof};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
    #[prost(oneof = "What", tags = "2, 3, 12, 17, 18, 21, 26")]
    pub(super) what: Option<What>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum What {
    #[prost(message, tag = "2")]
    History(History),
    #[prost(message, tag = "3")]
    Summary(Summary),
    #[prost(message, tag = "12")]
    Metric(Metric),
    #[prost(message, tag = "17")]
    Run(Run),
    #[prost(message, tag = "18")]
    Exit(Exit),
    #[prost(message, tag = "21")]
    Header(Header),
    #[prost(message, tag = "26")]
    Environment(Environment),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(message, optional, tag = "1")]
    pub(super) version_info: Option<VersionInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct VersionInfo {
    #[prost(string, tag = "1")]
    pub(super) producer: String,
    #[prost(string, tag = "2")]
    pub(super) min_consumer: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Run {
    #[prost(string, tag = "1")]
    pub(super) run_id: String,
    #[prost(string, tag = "2")]
    pub(super) entity: String,
    #[prost(string, tag = "3")]
    pub(super) project: String,
    #[prost(message, optional, tag = "4")]
    pub(super) config: Option<Config>,
    #[prost(string, tag = "6")]
    pub(super) run_group: String,
    #[prost(string, tag = "8")]
    pub(super) display_name: String,
    #[prost(string, repeated, tag = "10")]
    pub(super) tags: Vec<String>,
    #[prost(string, tag = "13")]
    pub(super) host: String,
    #[prost(message, optional, tag = "17")]
    pub(super) start_time: Option<Timestamp>,
    /// Continues the run with this id, which need not exist on the server.
    #[prost(bool, tag = "24")]
    pub(super) resume: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Config {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<Item>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct History {
    #[prost(message, repeated, tag = "1")]
    pub(super) item: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    pub(super) step: Option<Step>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Step {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<Item>,
}

/// A key, plain or as a path, and its value in JSON.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Item {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, repeated, tag = "2")]
    pub(super) nested_key: Vec<String>,
    #[prost(string, tag = "16")]
    pub(super) value_json: String,
}

impl Item {
    /// Creates a number under one key, which may contain dots and slashes. As in the SDK's JSON, `NaN` and `Infinity` are allowed.
    pub(super) fn number(key: impl Into<String>, value: f64) -> Self {
        let value_json = match value {
            v if v.is_nan() => "NaN".to_owned(),
            f64::INFINITY => "Infinity".to_owned(),
            f64::NEG_INFINITY => "-Infinity".to_owned(),
            v => v.to_string(),
        };
        Self { key: String::new(), nested_key: vec![key.into()], value_json }
    }
}

/// The definition of a metric: the metric of its x axis.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Metric {
    #[prost(string, tag = "2")]
    pub(super) glob_name: String,
    #[prost(string, tag = "4")]
    pub(super) step_metric: String,
    #[prost(message, optional, tag = "6")]
    pub(super) options: Option<MetricOptions>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricOptions {
    #[prost(bool, tag = "1")]
    pub(super) step_sync: bool,
    #[prost(bool, tag = "3")]
    pub(super) defined: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Exit {
    #[prost(int32, tag = "1")]
    pub(super) exit_code: i32,
    #[prost(int32, tag = "2")]
    pub(super) runtime: i32,
}

/// The content of wandb-metadata.json after the upload.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Environment {
    #[prost(string, tag = "1")]
    pub(super) os: String,
    #[prost(message, optional, tag = "3")]
    pub(super) started_at: Option<Timestamp>,
    #[prost(string, tag = "6")]
    pub(super) program: String,
    #[prost(string, tag = "12")]
    pub(super) host: String,
    #[prost(uint32, tag = "17")]
    pub(super) cpu_count_logical: u32,
    #[prost(string, tag = "199")]
    pub(super) writer_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Timestamp {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanos: i32,
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() as i32 }
    }
}
