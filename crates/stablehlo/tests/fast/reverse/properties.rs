//! What holds of the derivative of any function.
