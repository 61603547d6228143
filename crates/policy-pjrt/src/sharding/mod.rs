//! Sharding of programs over a device mesh: the table of axis rules, the values that it shards, and the models that it fits.

mod legality;
mod programs;
mod rules;

pub use rules::AxisRules;
pub(crate) use rules::greatest_common_divisor;
