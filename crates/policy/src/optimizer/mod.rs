//! The parts of optimizers that all policies share: settings, update rules, the scalars of a step, and bounds on the size of weights and moments.
//!
//! Every rule and every optimizer is registered at the end of this file; all other files loop over them.

#[macro_use]
mod rule;

mod adamw;
mod bounds;
mod code_book;
mod eight_bit;
mod muon;
mod settings;
mod sgd;
mod step;
mod update_rule;

pub use adamw::{MOMENT_CODES, MOMENT_SCALES};
pub use bounds::OptimizerBounds;
pub use code_book::CodeBook;
pub use eight_bit::{MomentBlocks, check_moments, is_moment_codes, moment_codes, moment_tensors};
pub use grpo_models::OptimizerName;
pub use rule::{adapter_optimizers, check_optimizer, trains_adapters};
pub use settings::{AdjustLr, CLIP_EPSILON, OptimizerSettings};
pub use step::OptimizerStep;
pub use update_rule::{Matrices, MatrixRule, Slot, UpdateRule};

rules! {
    elements {
        adamw::AdamW by update_two(first, second),
        sgd::Sgd by update_one(buffer),
    }
    matrices {
        muon::Muon,
    }
}

impl Rule {
    /// Returns the rules of an optimizer: first the rule of single weights, then the rule of whole matrices of layers, if the optimizer has one.
    pub fn of_optimizer(optimizer: OptimizerName) -> &'static [Self] {
        match optimizer {
            OptimizerName::AdamW | OptimizerName::AdamW8bit => &[Self(Kind::AdamW)],
            OptimizerName::Sgd => &[Self(Kind::Sgd)],
            OptimizerName::Muon => &[Self(Kind::AdamW), Self(Kind::Muon)],
        }
    }
}
