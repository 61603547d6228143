//! Tests of the loss in programs that use burn.

mod loss;
