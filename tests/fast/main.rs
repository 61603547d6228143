//! The CPU backend against files made with other systems' own code and against the f64 oracle; presets and documents. Largest
//! differences are printed (`cargo test -p grpo-tests --test fast -- --nocapture`).

mod dependencies;
mod documents;
mod golden;
mod not_finite;
mod presets;
mod report;
mod shapes;
mod variants;
