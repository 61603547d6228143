//! The interface for authors of backends and of compiled programs that evaluate the loss. Callers of the loss do not need it.
//!
//! A backend implements [`plan::Head`], which computes log-probabilities and takes their derivatives; [`plan::step`] does the rest of a
//! step. On the host, [`evaluate::Evaluator`] turns log-probabilities into the loss and dL/dlogp, token by token. A compiled program, in
//! which a value is a vector over tokens, calls [`objective`](crate::objective) with its own [`real::Real`] and [`token_columns::TokenColumns`].
//!
//! ```
//! use grpo_core::backend_api::real::{Dual, Real};
//!
//! // The formulas of a loss are generic over `Real`: with dual numbers they also compute their derivatives.
//! let log_ratio = Dual::variable(0.5_f64);
//! let ratio = log_ratio.exp();
//! assert_eq!(ratio.value, ratio.tangent);
//! ```

pub mod evaluate;
pub mod plan;
pub mod real;
pub mod strict;
pub mod token_columns;
