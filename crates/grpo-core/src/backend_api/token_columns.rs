//! Structs of named columns: the inputs of every token, and the sums over tokens. The host accesses them by name; a device gets them as
//! the rows of a table, in the order of the fields.

use crate::backend_api::real::Real;

/// Defines a struct whose fields have one type `T`, with their names, their number, and iterators in their order.
macro_rules! columns {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name<T> {
            $($(#[$field_doc])* pub $field: T,)*
        }

        impl<T> $name<T> {
            /// Names of the columns, in order.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($field)),*];
            /// Number of columns.
            pub const COUNT: usize = Self::NAMES.len();

            /// Calls `make` with the index of each column, in order.
            pub fn from_fn(mut make: impl FnMut(usize) -> T) -> Self {
                let mut index = 0;
                let mut next = || {
                    index += 1;
                    make(index - 1)
                };
                Self { $($field: next(),)* }
            }

            /// Iterates over the columns in order.
            pub fn iter(&self) -> impl Iterator<Item = &T> {
                [$(&self.$field),*].into_iter()
            }

            /// Iterates over the columns in order, mutably.
            pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
                [$(&mut self.$field),*].into_iter()
            }

            /// Applies `f` to every column.
            pub fn map<U>(&self, mut f: impl FnMut(&T) -> U) -> $name<U> {
                $name { $($field: f(&self.$field),)* }
            }
        }
    };
}

columns! {
    /// The inputs of a token other than its log-probability ([`crate::backend_api::evaluate::Evaluator::columns`]). A number on the host, a
    /// vector over tokens in a compiled program; 0 at masked tokens.
    TokenColumns {
        /// Advantage; for geo_mean the mean of its sequence.
        advantage,
        /// The token's own advantage, if `advantage` is the mean of its sequence.
        token_advantage,
        /// Weight of the policy term ([`crate::batch::TokenWeights::policy`]).
        policy_weight,
        /// Weight of the KL term, including beta.
        kl_weight,
        /// Weight of the negative log-likelihood, including positive_example_nll_weight.
        nll_weight,
        /// Weight of the entropy in the bonus, including entropy_coef.
        entropy_weight,
        /// Factor of the policy term ([`crate::batch::TokenFactors::policy`]).
        policy_factor,
        /// Factor of the token's contribution to its sequence's log-ratio.
        log_ratio_scale,
        /// Added to the log-ratio of the token's sequence (vespo).
        log_ratio_bias,
        /// kl_cov: 1 if the token has the penalty, else 0.
        kl_cov_mask,
        /// 1 / active tokens of the token's sequence.
        share,
        /// Count of a clipped token: `share` if the clip has one value per sequence, else 1.
        clip_share,
        /// Log-probability under the old policy; 0 if there is none.
        old_logp,
        /// Log-probability under the reference policy; 0 if there is none.
        ref_logp,
        /// Log-probability under the sampler, NaN if unknown; 0 if the batch has none.
        sampler_logp,
        /// 1/T of the token.
        reciprocal_temperature,
    }
}

/// [`columns!`] of sums over tokens, each with its reduction.
macro_rules! sums {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $reduction:ident,)* }) => {
        columns! {
            $(#[$doc])*
            $name { $($(#[$field_doc])* $field,)* }
        }

        impl<T> $name<T> {
            /// The reduction of each field. Fields of the same reduction are contiguous.
            pub const REDUCTIONS: $name<Reduction> = $name { $($field: Reduction::$reduction,)* };
        }
    };
}

/// Which policies other than the trained one have log-probabilities in the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The old policy; if `false` the ratio is 1.
    pub old: bool,
    /// The reference policy.
    pub reference: bool,
    /// The sampler.
    pub sampler: bool,
}

sums! {
    /// Sums of a pass over a batch, or the summands of one token ([`crate::objective::batch_loss`]). Tokens and devices are merged by
    /// [`LossSums::REDUCTIONS`].
    LossSums {
        /// Sum of weight x token loss, including the entropy bonus.
        loss: Sum,
        /// Sum of weight x policy term.
        policy: Sum,
        /// Sum of the KL term over active tokens.
        kl: Sum,
        /// Sum of the entropy over active tokens, in nats.
        entropy: Sum,
        /// Number of tokens clipped below, or of sequences if the clip has one value per sequence
        /// ([`crate::backend_api::evaluate::Evaluator::shares_clip`]).
        low_clipped: Sum,
        /// Number of tokens or sequences clipped above.
        high_clipped: Sum,
        /// Sum of the loss's own statistic, over tokens or sequences ([`crate::objective::PolicyTerm::statistic`]).
        statistic: Sum,
        /// Sum of -logp over the tokens of `positive_rows`.
        nll: Sum,
        /// Sum of logp - old logp over active tokens.
        log_ratio: Sum,
        /// Sum of the importance ratio over active tokens.
        ratio: Sum,
        /// Number of active tokens at which the dual clip binds.
        dual_clipped: Sum,
        /// Smallest share of a sequence's active tokens that is clipped below; infinite without active tokens.
        low_min: Min,
        /// Smallest importance ratio; infinite without active tokens.
        ratio_min: Min,
        /// Largest share of a sequence's active tokens that is clipped above; minus infinity without active tokens.
        high_max: Max,
        /// Largest importance ratio; minus infinity without active tokens.
        ratio_max: Max,
    }
}

/// The operation that merges a field of [`LossSums`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    #[default]
    Sum,
    /// Minimum; infinity for no values.
    Min,
    /// Maximum; minus infinity for no values.
    Max,
}

impl LossSums<f64> {
    /// Returns the sums over no tokens.
    pub fn empty() -> Self {
        Self::REDUCTIONS.map(|reduction| match reduction {
            Reduction::Sum => 0.0,
            Reduction::Min => f64::INFINITY,
            Reduction::Max => f64::NEG_INFINITY,
        })
    }

    /// Merges the sums of other tokens. NaN stays NaN.
    pub fn merge(&mut self, other: &Self) {
        for ((sum, other), reduction) in self.iter_mut().zip(other.iter()).zip(Self::REDUCTIONS.iter()) {
            *sum = match reduction {
                Reduction::Sum => *sum + other,
                Reduction::Min => Real::min(sum, other),
                Reduction::Max => Real::max(sum, other),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_keep_their_order_and_their_names() {
        let numbered = TokenColumns::from_fn(|i| i);
        assert_eq!(numbered.iter().copied().collect::<Vec<_>>(), (0..TokenColumns::<usize>::COUNT).collect::<Vec<_>>());
        let name = |index: usize| TokenColumns::<usize>::NAMES[index];
        assert_eq!((name(numbered.advantage), name(numbered.share)), ("advantage", "share"));
        assert_eq!(name(numbered.reciprocal_temperature), "reciprocal_temperature");
        assert_eq!(numbered.map(|i| name(*i)).old_logp, "old_logp");
    }

    #[test]
    fn fields_of_one_reduction_are_contiguous() {
        let kinds: Vec<Reduction> = LossSums::<f64>::REDUCTIONS.iter().copied().collect();
        let mut runs = kinds.clone();
        runs.dedup();
        assert_eq!(runs, [Reduction::Sum, Reduction::Min, Reduction::Max]);
        assert_eq!(kinds.len(), LossSums::<f64>::COUNT);
    }

    #[test]
    fn sums_merge_by_their_reductions_and_keep_nan() {
        let mut sums = LossSums::empty();
        [2.0, 1.0].into_iter().for_each(|value| sums.merge(&LossSums::from_fn(|_| value)));
        assert_eq!((sums.loss, sums.ratio_min, sums.ratio_max), (3.0, 1.0, 2.0));
        sums.merge(&LossSums::from_fn(|_| f64::NAN));
        assert!(sums.iter().all(|sum| sum.is_nan()), "{sums:?}");
    }
}
