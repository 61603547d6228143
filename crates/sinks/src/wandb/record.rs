//! The used subset of `wandb_internal.Record`.

use crate::messages::messages;
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
    Summary(Update),
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

messages! {
    Header {
        1 => [message, optional] version_info: Option<VersionInfo>,
    }

    VersionInfo {
        1 => [string] producer: String,
        2 => [string] min_consumer: String,
    }

    Run {
        1 => [string] run_id: String,
        2 => [string] entity: String,
        3 => [string] project: String,
        4 => [message, optional] config: Option<Update>,
        6 => [string] run_group: String,
        8 => [string] display_name: String,
        10 => [string, repeated] tags: Vec<String>,
        13 => [string] host: String,
        17 => [message, optional] start_time: Option<Timestamp>,
        // Continues the run with this id, which need not exist on the server.
        24 => [bool] resume: bool,
    }

    /// The changed keys of a configuration or a summary.
    Update {
        1 => [message, repeated] update: Vec<Item>,
    }

    History {
        1 => [message, repeated] item: Vec<Item>,
        2 => [message, optional] step: Option<Step>,
    }

    Step {
        1 => [int64] num: i64,
    }

    /// A key, plain or as a path, and its value in JSON.
    Item {
        1 => [string] key: String,
        2 => [string, repeated] nested_key: Vec<String>,
        16 => [string] value_json: String,
    }

    /// The definition of a metric: the metric of its x axis.
    Metric {
        2 => [string] glob_name: String,
        4 => [string] step_metric: String,
        6 => [message, optional] options: Option<MetricOptions>,
    }

    MetricOptions {
        1 => [bool] step_sync: bool,
        3 => [bool] defined: bool,
    }

    Exit {
        1 => [int32] exit_code: i32,
        2 => [int32] runtime: i32,
    }

    /// The content of wandb-metadata.json after the upload.
    Environment {
        1 => [string] os: String,
        3 => [message, optional] started_at: Option<Timestamp>,
        6 => [string] program: String,
        12 => [string] host: String,
        17 => [uint32] cpu_count_logical: u32,
        199 => [string] writer_id: String,
    }

    Timestamp {
        1 => [int64] seconds: i64,
        2 => [int32] nanos: i32,
    }
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

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() as i32 }
    }
}
