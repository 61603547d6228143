//! The loss inside a program that uses burn.

mod embed;
mod loss;
