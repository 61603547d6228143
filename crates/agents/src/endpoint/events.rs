//! Responses as server-sent events.

use serde_json::Value;

/// The body of a response.
pub(super) enum Body {
    /// A JSON document.
    Json(Value),
    /// Server-sent events. Answers are sampled in batches, so all events of an answer are sent together.
    Events(String),
}

/// A list of server-sent events.
#[derive(Default)]
pub(super) struct Events(String);

impl Events {
    /// Adds an event without a name.
    pub(super) fn data(&mut self, data: &Value) {
        self.0 += &format!("data: {data}\n\n");
    }

    /// Adds an event, whose data has its name as `type`.
    pub(super) fn named(&mut self, mut data: Value, name: &str) {
        data["type"] = name.into();
        self.0 += &format!("event: {name}\ndata: {data}\n\n");
    }

    /// Adds the end of OpenAI's streams.
    pub(super) fn done(mut self) -> Body {
        self.0 += "data: [DONE]\n\n";
        self.body()
    }

    pub(super) fn body(self) -> Body {
        Body::Events(self.0)
    }
}
