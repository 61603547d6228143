//! The burn operation compared with the loss on slices, and its other guarantees.
//!
//! Legend: N tokens (rows), B sequences, H hidden size, V vocabulary.

mod adapters;
mod bf16;
mod case;
mod errors;
mod graph;
mod logits;
mod parity;
mod plain;
mod planning;
mod spy;
