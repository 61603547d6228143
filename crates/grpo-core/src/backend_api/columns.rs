//! Named columns: what is known of every token, and what is added up over tokens, each list in one place. The host fills and
//! reads them by name; a device gets them as the rows of a table, in the order of the fields.

/// A struct of fields of one type `T`, with their number, their names and ways to go over them in order.
macro_rules! columns {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name<T> {
            $($(#[$field_doc])* pub $field: T,)*
        }

        impl<T> $name<T> {
            /// Names of the columns, in their order.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($field)),*];
            /// Number of columns.
            pub const COUNT: usize = Self::NAMES.len();

            /// Each column as `make` has it, called once per column in their order with its index.
            pub fn from_fn(mut make: impl FnMut(usize) -> T) -> Self {
                let mut index = 0;
                let mut next = || {
                    index += 1;
                    make(index - 1)
                };
                Self { $($field: next(),)* }
            }

            /// The columns in their order.
            pub fn iter(&self) -> impl Iterator<Item = &T> {
                [$(&self.$field),*].into_iter()
            }

            /// The columns in their order, to be changed.
            pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
                [$(&mut self.$field),*].into_iter()
            }

            /// The same columns of another type.
            pub fn map<U>(&self, mut f: impl FnMut(&T) -> U) -> $name<U> {
                $name { $($field: f(&self.$field),)* }
            }
        }
    };
}

columns! {
    /// What is known of a token beside its log-probability ([`crate::backend_api::evaluate::Evaluator::columns`]). A number on the host, a
    /// vector over tokens in a program; 0 at tokens that do not count, of which nothing is read.
    TokenColumns {
        /// Advantage; geo_mean has its sequence's.
        advantage,
        /// The token's own advantage, where `advantage` is its sequence's.
        token_advantage,
        /// Weight of the policy term ([`crate::batch::TokenWeights::policy`]).
        policy_weight,
        /// Weight of the KL term, beta included.
        kl_weight,
        /// Weight of the negative log-likelihood, positive_example_nll_weight included.
        nll_weight,
        /// Weight of the entropy in the bonus, entropy_coef included.
        entropy_weight,
        /// What multiplies the policy term ([`crate::batch::TokenFactors::policy`]).
        policy_factor,
        /// What multiplies the token's part of its sequence's log-ratio.
        log_ratio_scale,
        /// What is added to the log-ratio of the token's sequence (vespo).
        log_ratio_bias,
        /// kl_cov: 1 where the penalty is paid.
        kl_cov_mask,
        /// 1 / active tokens of the token's sequence.
        share,
        /// What a clipped token counts: `share` where the clip is a sequence's, else 1.
        clip_share,
        /// Log-probability under the old policy; 0 without one.
        old_logp,
        /// Under the reference; 0 without one.
        ref_logp,
        /// Under the sampler, NaN where it gave none; 0 without one.
        sampler_logp,
        /// 1/T of the token.
        reciprocal_temperature,
    }
}

/// Which policies beside the one that is trained have given log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The old policy; without it the ratio is 1.
    pub old: bool,
    /// The reference.
    pub reference: bool,
    /// The sampler.
    pub sampler: bool,
}

columns! {
    /// What a pass over a batch adds up, wherever it is added up: on the host ([`crate::backend_api::evaluate::Totals`]) or on a device
    /// ([`crate::objective::batch_loss`]). Micro-batches and devices merge it by [`LossSums::REDUCTIONS`].
    LossSums {
        /// Of weight x token loss, entropy bonus included.
        loss,
        /// Of weight x policy term.
        policy,
        /// Of the KL term over active tokens.
        kl,
        /// Of the entropy over active tokens, in nats.
        entropy,
        /// Of tokens clipped below; of sequences where the clip is a sequence's
        /// ([`crate::backend_api::evaluate::Evaluator::shares_clip`]).
        low_clipped,
        /// The same above.
        high_clipped,
        /// Of the loss's own statistic, of sequences where it is a sequence's ([`crate::objective::PolicyTerm::statistic`]).
        statistic,
        /// Of -logp over the tokens to imitate.
        nll,
        /// Of logp - old logp over active tokens.
        log_ratio,
        /// Of the importance ratio over active tokens.
        ratio,
        /// Of active tokens that the second clip for negative advantages holds.
        dual_clipped,
        /// Smallest share of a sequence's active tokens that is clipped below; infinite without active tokens.
        low_min,
        /// Smallest importance ratio; infinite without active tokens.
        ratio_min,
        /// Largest share that is clipped above; minus infinity without active tokens.
        high_max,
        /// Largest importance ratio; minus infinity without active tokens.
        ratio_max,
    }
}

/// How a sum of [`LossSums`] merges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Added up.
    #[default]
    Sum,
    /// The smallest; infinite for nothing.
    Min,
    /// The largest; minus infinity for nothing.
    Max,
}

impl<T> LossSums<T> {
    /// How each of them merges. Those of one kind lie side by side.
    pub const REDUCTIONS: LossSums<Reduction> = {
        use Reduction::{Max, Min, Sum};
        LossSums {
            loss: Sum,
            policy: Sum,
            kl: Sum,
            entropy: Sum,
            low_clipped: Sum,
            high_clipped: Sum,
            statistic: Sum,
            nll: Sum,
            log_ratio: Sum,
            ratio: Sum,
            dual_clipped: Sum,
            low_min: Min,
            ratio_min: Min,
            high_max: Max,
            ratio_max: Max,
        }
    };
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
    fn reductions_of_one_kind_lie_side_by_side() {
        let kinds: Vec<Reduction> = LossSums::<f64>::REDUCTIONS.iter().copied().collect();
        let mut runs = kinds.clone();
        runs.dedup();
        assert_eq!(runs, [Reduction::Sum, Reduction::Min, Reduction::Max]);
        assert_eq!(kinds.len(), LossSums::<f64>::COUNT);
    }
}
