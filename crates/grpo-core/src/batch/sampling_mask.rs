//! The token ids that a sampler kept, for the loss of a truncated distribution.

use super::{OP, TokenBatch};
use crate::error::{Error, Result};
use std::ops::Range;

/// The ids that top-k, top-p or min-p kept at each of N tokens: `sampling_mask` of vLLM and SGLang, the "keep sampling mask" of DeepSeek-V3.2.
///
/// With it, log-probabilities and entropies of a token are over its ids only, as the sampler's are: the softmax is over these ids, and the
/// gradient of every other logit is 0. A token without ids has the whole vocabulary.
///
/// ```
/// use grpo_core::TokenBatch;
/// use grpo_core::batch::SamplingMask;
///
/// // The first token was sampled from ids 3 and 5, the second one from the whole vocabulary.
/// let mask = SamplingMask::new(&[0, 2, 2], &[5, 3])?;
/// let batch = TokenBatch::packed(vec![3, 7], vec![0, 2])?.with_sampling_mask(mask)?;
/// assert_eq!((batch.kept(0), batch.kept(1)), (Some(&[3, 5][..]), None));
/// // The sampler cannot have drawn id 3 from ids 4 and 5.
/// let other = SamplingMask::new(&[0, 2, 2], &[4, 5])?;
/// assert!(TokenBatch::packed(vec![3, 7], vec![0, 2])?.with_sampling_mask(other).is_err());
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplingMask {
    /// `[N + 1]`.
    offsets: Vec<usize>,
    /// Ascending within a token.
    ids: Vec<u32>,
}

impl Default for SamplingMask {
    /// The mask of no tokens.
    fn default() -> Self {
        Self { offsets: vec![0], ids: Vec::new() }
    }
}

impl SamplingMask {
    /// Creates a mask from the ids of all tokens, concatenated, and their `offsets: [N + 1]`, from 0 to the number of ids. The ids of a token
    /// may have any order.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Value`] if the offsets do not have this form.
    pub fn new(offsets: &[usize], ids: &[u32]) -> Result<Self> {
        if offsets.first() != Some(&0) || offsets.last() != Some(&ids.len()) {
            let expected = format!("a list from 0 to {} (the number of ids)", ids.len());
            let found = format!("{} entries from {:?} to {:?}", offsets.len(), offsets.first(), offsets.last());
            return Err(Error::shape(OP, "offsets of the sampling mask", expected, found));
        }
        if let Some(token) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            let name = "offsets of the sampling mask";
            return Err(Error::value(name, format!("entry {}", token + 1), "smaller than the one before"));
        }
        let mut mask = Self::default();
        offsets.windows(2).for_each(|pair| mask.push(&ids[pair[0]..pair[1]]));
        Ok(mask)
    }

    /// Appends a token with these ids, in any order; without ids, it has the whole vocabulary.
    pub fn push(&mut self, ids: &[u32]) {
        let begin = self.ids.len();
        self.ids.extend_from_slice(ids);
        self.ids[begin..].sort_unstable();
        let mut end = begin;
        for i in begin..self.ids.len() {
            if i == begin || self.ids[i] != self.ids[end - 1] {
                self.ids[end] = self.ids[i];
                end += 1;
            }
        }
        self.ids.truncate(end);
        self.offsets.push(end);
    }

    /// Appends the tokens of `other`.
    pub fn extend(&mut self, other: &Self) {
        let begin = self.ids.len();
        self.ids.extend_from_slice(&other.ids);
        self.offsets.extend(other.offsets[1..].iter().map(|offset| begin + offset));
    }

    /// Changes the number of tokens: drops the last ones, or appends tokens with the whole vocabulary.
    pub fn resize(&mut self, tokens: usize) {
        self.offsets.resize(tokens + 1, self.ids.len());
        self.ids.truncate(self.offsets[tokens]);
    }

    /// Returns the number of tokens N.
    pub fn tokens(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Returns the ids of a token, ascending; `None` if it has the whole vocabulary.
    pub fn kept(&self, token: usize) -> Option<&[u32]> {
        Some(&self.ids[self.offsets[token]..self.offsets[token + 1]]).filter(|ids| !ids.is_empty())
    }

    /// Returns the offsets of the tokens' ids `[N + 1]`.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Returns the ids of all tokens, concatenated.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the mask of the tokens `rows`.
    pub(super) fn select(&self, rows: Range<usize>) -> Self {
        let begin = self.offsets[rows.start];
        let ids = self.ids[begin..self.offsets[rows.end]].to_vec();
        Self { offsets: self.offsets[rows.start..=rows.end].iter().map(|offset| offset - begin).collect(), ids }
    }
}

impl TokenBatch {
    /// Sets the ids that the sampler kept at each token. All log-probabilities of the batch, also recorded ones, are then over these ids.
    ///
    /// # Errors
    /// [`Error::Shape`] for a mask of another number of tokens, [`Error::Value`] for an active token whose target is not among its ids.
    pub fn with_sampling_mask(mut self, mask: SamplingMask) -> Result<Self> {
        self.check_sampling_mask(&mask)?;
        self.sampling_mask = Some(mask);
        Ok(self)
    }

    /// Returns the ids that the sampler kept, if set.
    pub fn sampling_mask(&self) -> Option<&SamplingMask> {
        self.sampling_mask.as_ref()
    }

    /// Returns the ids of a row over which its log-probabilities are, ascending; `None` if they are over the whole vocabulary.
    pub fn kept(&self, row: usize) -> Option<&[u32]> {
        self.sampling_mask.as_ref().and_then(|mask| mask.kept(row))
    }

    pub(super) fn check_sampling_mask(&self, mask: &SamplingMask) -> Result<()> {
        self.check_len("sampling_mask", mask.tokens())?;
        let holds_target = |row: &usize| {
            let target = u32::try_from(self.targets[*row]).ok();
            mask.kept(*row).is_none_or(|ids| target.is_some_and(|target| ids.binary_search(&target).is_ok()))
        };
        match self.active.iter().copied().find(|row| !holds_target(row)) {
            None => Ok(()),
            Some(row) => {
                let count = mask.kept(row).map_or(0, <[u32]>::len);
                let reason =
                    format!("target {} is not among the {count} ids that it was sampled from", self.targets[row]);
                Err(Error::value("sampling_mask", self.position(row), reason))
            }
        }
    }
}
