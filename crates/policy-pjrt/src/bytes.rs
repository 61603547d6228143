//! Bytes of tensors in memory tables.

/// The bytes of an f32.
pub(crate) const SINGLE: u64 = size_of::<f32>() as u64;

/// Returns the product of sizes, `u64::MAX` if it is larger: more than any memory.
pub(crate) fn product(sizes: &[usize]) -> u64 {
    sizes.iter().fold(1, |product: u64, size| product.saturating_mul(*size as u64))
}

/// Returns the bytes of sampling masks: a bit per token and entry of the vocabulary.
pub(crate) fn mask_bytes(tokens: usize, vocab: usize) -> u64 {
    product(&[tokens, vocab.div_ceil(8)])
}
