//! The built-in environments.

mod calculator;
mod word_guess;

pub use calculator::{Calculator, evaluate};
pub use word_guess::WordGuess;
