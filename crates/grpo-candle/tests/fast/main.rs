//! Tests of the loss in programs that use candle.
//!
//! Legend: N tokens (rows), B sequences, H hidden size, V vocabulary.

mod case;
mod errors;
mod parity;
mod plain;
mod views;
