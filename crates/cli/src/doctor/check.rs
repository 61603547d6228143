//! A checked fact.

use serde::Serialize;
use serde_json::Value;

/// A checked fact of the machine or the environment.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    /// The group and the name: `memory.available`.
    pub(super) id: String,
    pub(super) status: Status,
    /// The finding.
    pub(super) found: String,
    /// The remedy of a problem; a note may have one.
    pub(super) advice: Option<String>,
    /// The finding for programs, by key.
    pub(super) values: Value,
}

/// The judgement of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    /// Everything works.
    Ok,
    /// A feature is off or slow, or a fact is not known.
    Note,
    /// Something fails that is present or asked for.
    Problem,
}

impl Status {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

impl Check {
    pub(super) fn ok(id: impl Into<String>, found: impl Into<String>) -> Self {
        Self { id: id.into(), status: Status::Ok, found: found.into(), advice: None, values: serde_json::json!({}) }
    }

    pub(super) fn note(id: impl Into<String>, found: impl Into<String>) -> Self {
        Self { status: Status::Note, ..Self::ok(id, found) }
    }

    pub(super) fn problem(id: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { status: Status::Problem, ..Self::ok(id, found) }.advise(advice)
    }

    pub(super) fn advise(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }

    /// Adds the finding for programs, an object.
    pub(super) fn with(self, values: Value) -> Self {
        Self { values, ..self }
    }
}
