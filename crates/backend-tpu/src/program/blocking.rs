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
        match self {
            Self::TokenChunks(size) => write!(f, "{size} tokens"),
            Self::VocabPanels(size) => write!(f, "{size} columns"),
        }
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
