//! The blocking of the fused loops.

use serde::{Deserialize, Serialize};

/// The dimension that the fused loops block, and the block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Blocking {
    /// Chunks of this many tokens, with the whole vocabulary.
    TokenChunks(usize),
    /// Panels of this many vocabulary entries, with all tokens.
    VocabPanels(usize),
}

impl std::fmt::Display for Blocking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (size, noun) = match self {
            Self::TokenChunks(size) => (*size, "token"),
            Self::VocabPanels(size) => (*size, "column"),
        };
        write!(f, "{size} {noun}{}", if size == 1 { "" } else { "s" })
    }
}

impl Blocking {
    /// Returns smaller tiles, about `ratio` times the size; `None` if there are none.
    pub(crate) fn scaled(self, ratio: f64) -> Option<Self> {
        let smaller = |size: usize| {
            let next = ((size as f64 * ratio) as usize).min(size.saturating_sub(1));
            (next > 0).then_some(next)
        };
        match self {
            Self::TokenChunks(c) => smaller(c).map(Self::TokenChunks),
            Self::VocabPanels(w) => smaller(w).map(Self::VocabPanels),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Blocking;

    #[test]
    fn a_blocking_of_one_uses_the_singular() {
        let of = |size| [Blocking::TokenChunks(size), Blocking::VocabPanels(size)].map(|blocking| blocking.to_string());
        assert_eq!([of(1), of(512)], [["1 token", "1 column"], ["512 tokens", "512 columns"]]);
    }
}
