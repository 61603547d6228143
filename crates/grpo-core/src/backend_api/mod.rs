//! For authors of backends, and of programs that evaluate the loss in another way: who calls the loss needs none of it.
//!
//! A backend implements [`plan::Head`], which makes log-probabilities and takes their derivatives; [`plan::Plan`] stands around
//! it. On the host [`evaluate::Evaluator`] turns log-probabilities into the loss and dL/dlogp, token by token; a program in which
//! a number is a vector calls [`objective`](crate::objective) on its own [`real::Real`], with the tokens as [`columns::TokenColumns`].
//!
//! ```
//! use grpo_core::backend_api::real::{Dual, Real};
//!
//! // The formulas of a loss are written once over `Real`: with dual numbers, they are their own derivatives.
//! let log_ratio = Dual::variable(0.5_f64);
//! let ratio = log_ratio.exp();
//! assert_eq!(ratio.value, ratio.tangent);
//! ```

pub mod columns;
pub mod evaluate;
pub mod plan;
pub mod real;
pub mod strict;
