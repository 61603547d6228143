//! The CPU backend compared with other systems' results and with the f64 oracle; presets, packages, documents and installation. The largest
//! differences are printed (`cargo test -p grpo-tests --test fast -- --nocapture`).

mod accidental_markup;
mod circles;
mod dependencies;
mod documents;
mod golden;
mod installable;
mod not_finite;
mod packages;
mod presets;
mod report;
mod shapes;
mod tiers;
mod tokens;
mod variants;

grpo_testkit::tiers!();
