//! Properties of the CPU backend in many cases: divisions of a step, sampling masks, and bf16 products of f32 inputs.

mod bf16_products;
mod properties;
mod sampling_mask;

grpo_testkit::tiers!();
