//! The endpoint of a run: agents ask the policy for messages over the protocols of OpenAI and Anthropic. Each protocol is a file that reads
//! a [`ChatRequest`] and writes a [`ChatReply`].
//!
//! ```text
//! for each conversation, on a thread per worker of its agent:
//!     make a key, run the agent with it, and revoke the key
//! on the caller's thread, until all agents have ended:
//!     wait for a request, and shortly for those of the other agents
//!     pass them to the caller, who samples for all of them at once
//! ```

#[cfg(not(feature = "http"))]
mod absent;
#[cfg(feature = "http")]
mod chat;
#[cfg(feature = "http")]
mod completions;
#[cfg(feature = "http")]
mod connection;
#[cfg(feature = "http")]
mod events;
#[cfg(feature = "http")]
mod fields;
#[cfg(feature = "http")]
mod hold;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
mod messages;
#[cfg(feature = "http")]
mod protocol;
mod request;
#[cfg(feature = "http")]
mod responses;
#[cfg(feature = "http")]
mod routes;

#[cfg(not(feature = "http"))]
pub use absent::Endpoint;
#[cfg(feature = "http")]
pub use hold::Endpoint;
pub(crate) use request::MODEL;
pub use request::{ApiError, Asked, ChatReply, ChatRequest, Delivery, Held, Job, Rules, socket_address};
