//! Hostile servers, chat templates and tokenizers, which end at a limit of time or memory.

#[cfg(all(unix, feature = "hub"))]
mod hub_attack;
#[cfg(all(unix, feature = "hub"))]
#[path = "../fast/hub_server.rs"]
mod hub_server;
// The fast tests use all of it.
#[allow(dead_code)]
#[path = "../fast/support.rs"]
mod support;
mod template_limits;
mod tokenizer_limits;

grpo_testkit::tiers!();
