//! How the products of experts are computed, and the sizes of the loop over blocks of grouped products.
//!
//! Legend: G groups of tokens, D devices that share the experts for the same tokens, n tokens of a group, E experts of a device, k experts of a token, M
//! blocks, R rows of a block, Q tokens of a chunk.

use super::super::{Axis, AxisRules};
use grpo_models::Experts;
use std::num::NonZeroUsize;

/// The largest number of tokens of a chunk: small integers are exact in every dtype of a product.
const CHUNK: usize = 256;

/// The number of rows whose product with a matrix takes as long as reading the matrix: 560 on a v6e, 300 on an H100.
const BALANCE: usize = 512;

/// How the products of a mixture of experts are computed. All variants agree up to rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ExpertProducts {
    /// Every expert computes every token, and the weights of the experts that the router has not chosen are 0.
    #[default]
    Dense,
    /// A loop over blocks of tokens with the same expert.
    Grouped {
        /// The number of rows of a block; `None` is the power of two from 8 to 1024 with the least time, by a count of products and reads of
        /// matrices.
        rows: Option<NonZeroUsize>,
    },
}

/// The sizes of the loop over blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    /// G, the groups of tokens.
    pub(super) groups: usize,
    /// D, the devices that share the experts for the same tokens.
    pub(super) devices: usize,
    /// n, the tokens of a group.
    pub(super) tokens: usize,
    /// E, the experts of a device.
    pub(super) experts: usize,
    /// k, the experts of a token on a device at most.
    pub(super) top: usize,
    /// R, the rows of a block.
    pub(super) rows: usize,
}

impl ExpertProducts {
    /// Returns the share of the products of dense experts that each device computes for `tokens` tokens of a batch, on a mesh with these rules; 1 if
    /// products are dense. `tokens` must divide evenly over the shards of [`Axis::Batch`], and the experts over the shards of [`Axis::Experts`].
    ///
    /// ```
    /// use grpo_policy_pjrt::decoder::{AxisRules, ExpertProducts};
    ///
    /// let experts = grpo_models::Experts { num_experts: 128, num_experts_per_tok: 8, ..grpo_models::Experts::default() };
    /// assert_eq!(ExpertProducts::Dense.share(8192, &experts, &AxisRules::default()), 1.0);
    /// let grouped = ExpertProducts::Grouped { rows: std::num::NonZero::new(512) };
    /// // 8 of 128 experts, and blocks that are not full.
    /// assert!((0.0625..0.13).contains(&grouped.share(8192, &experts, &AxisRules::default())));
    /// ```
    pub fn share(self, tokens: usize, experts: &Experts, rules: &AxisRules) -> f64 {
        let blocks = self.blocks(tokens, experts, rules);
        blocks.map_or(1.0, |of| (of.count() * of.rows) as f64 / (of.experts * of.tokens).max(1) as f64)
    }

    /// Returns the sizes of the loop over blocks for `tokens` tokens of a batch, or `None` for dense products.
    pub(super) fn blocks(self, tokens: usize, experts: &Experts, rules: &AxisRules) -> Option<Blocks> {
        let groups = rules.parts(Axis::Batch);
        let sharding = rules.sharding(&[Axis::Batch, Axis::Experts]);
        let devices = sharding.map_or(1, |sharding| sharding.parts(1));
        let sizes = |rows: usize| Blocks {
            groups,
            devices,
            tokens: tokens / groups,
            experts: experts.num_experts / devices,
            top: experts.num_experts_per_tok.min(experts.num_experts / devices),
            rows,
        };
        let best = || (3..=10).map(|power| sizes(1 << power)).min_by_key(|blocks| blocks.cost());
        match self {
            Self::Dense => None,
            Self::Grouped { rows: Some(rows) } => Some(sizes(rows.get())),
            Self::Grouped { rows: None } => best(),
        }
    }
}

impl Blocks {
    /// Returns M, the largest number of blocks of any choice: one row in a block of each expert, and full blocks for the rest.
    pub(super) fn count(self) -> usize {
        let pairs = self.tokens * self.top;
        let begun = self.experts.min(pairs);
        (begun + (pairs - begun) / self.rows).max(1)
    }

    /// Returns Q, a divisor of n.
    pub(super) fn chunk(self) -> usize {
        (1..=CHUNK).rev().find(|chunk| self.tokens.is_multiple_of(*chunk)).unwrap_or(1)
    }

    /// Returns the time of the loop, in units of a [`BALANCE`]th of the time in which the matrices of an expert are read.
    fn cost(self) -> usize {
        self.count() * self.rows.max(BALANCE)
    }
}
