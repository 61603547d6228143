//! A packed rhs of bf16 values in 12 bits each, without loss.
//!
//! A bf16 value has a sign, 8 bits of exponent and 7 bits of mantissa. Nearly all exponents of a weight are among 15
//! consecutive ones, so a code of 4 bits stands for an exponent. A product of few rows is bound by the bandwidth of memory; it reads a
//! quarter less, and its kernel decodes in registers. DFloat11 (Zhang et al., *70% Size, 100% Accuracy*, 2025) codes
//! exponents with Huffman codes instead, in 11 bits per value.
//!
//! A group has 128 values in four registers A to D of 32 values, and takes 96 u16:
//!
//! * 32 u16 with exponents. Each has the codes of one value of A, B, C and D, with A in the lowest 4 bits. Code 0 is the exponent
//!   0. Code c is the exponent `low + c`.
//! * 32 u16 with signs and mantissas of A and B. A value of A keeps its bits: the sign is bit 15, the mantissa bits 0 to 6. A value
//!   of B is rotated by 8 bits: the sign is bit 7, the mantissa bits 8 to 14.
//! * 32 u16 with the values of C and D, in the same way.
//!
//! A group that has another exponent is *escaped*: a list has its values, and the kernel does not read its 96 u16.
//!
//! With bf16 pairs, a group is two words of each of 32 columns, A and B the first ones. With f32, a group is the upper halves of four words of each of
//! 32 columns. A register is then one word of each column: 32 bits have column j in the lower half, and column j + 16 in the upper half.

use super::Gemm;
use crate::arch::microkernel::CodedPanel;
use crate::arch::panel::{GROUP, GROUP_U16, RHS_PANEL, SIGN_AND_MANTISSA};
use crate::arch::{MulAdd, simd_dispatch};
use crate::pages::Aligned;

/// The largest code.
const CODES: u16 = 15;
/// One group in so many may be escaped; otherwise a weight is not coded.
const PER_ESCAPE: usize = 16;
/// The groups between entries of [`CodedPanels::starts`].
const RUN: usize = 64;
/// The exponents that a weight's codes stand for: 0, and the 15 after `low`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exponents {
    low: u16,
}

/// A group that is not coded: its number and its values.
pub(crate) type Escape = (u32, [u16; GROUP]);

/// The panels of a coded rhs.
#[derive(Clone, Debug)]
pub(crate) struct CodedPanels {
    groups: Aligned<u16>,
    /// The words of a group.
    group_words: usize,
    table: [u16; 32],
    /// The numbers of the escaped groups, in order, and `u32::MAX`.
    escapes: Vec<u32>,
    values: Vec<[u16; GROUP]>,
    /// The number of escapes before every [`RUN`]th group.
    starts: Vec<u32>,
}

impl Exponents {
    /// Returns the exponents that cover most of `words`; words of f32 must have bf16 values.
    pub(crate) fn of(gemm: Gemm, words: &[u32]) -> Self {
        let mut counts = [0_usize; 256];
        let mut count = |half: u32| counts[usize::from(exponent(half as u16))] += 1;
        for word in words {
            count(word >> 16);
            if !gemm.packs_f32() {
                count(word & 0xffff);
            }
        }
        let covered = |low: u16| counts[usize::from(low) + 1..][..usize::from(CODES)].iter().sum::<usize>();
        // The lowest of several, so that the result does not depend on the order of iteration.
        let low = (0..=255 - CODES).rev().max_by_key(|low| covered(*low)).unwrap_or(0);
        Self { low }
    }

    fn table(self) -> [u16; 32] {
        std::array::from_fn(|i| match i as u16 % (CODES + 1) {
            0 => 0,
            code => (self.low + code) << 7,
        })
    }
}

impl CodedPanels {
    /// Returns how many of `groups` groups may be escaped.
    pub(crate) fn most_escapes(groups: usize) -> usize {
        groups / PER_ESCAPE
    }

    /// Returns the panels of `groups` from [`Gemm::code`], with the escapes of all of them in order; `None` if too many are escaped.
    pub(crate) fn new(gemm: Gemm, groups: Aligned<u16>, exponents: Exponents, escapes: &[Escape]) -> Option<Self> {
        let count = groups.len() / GROUP_U16;
        // Group numbers are u32, and the largest one ends the list of escapes.
        if escapes.len() > Self::most_escapes(count) || count > u32::MAX as usize {
            return None;
        }
        let (mut numbers, values): (Vec<_>, Vec<_>) = escapes.iter().copied().unzip();
        let before = |run: usize| numbers.partition_point(|number| (*number as usize) < run * RUN) as u32;
        let starts = (0..=count / RUN).map(before).collect();
        numbers.push(u32::MAX);
        let table = exponents.table();
        Some(Self { groups, group_words: gemm.group_words(), table, escapes: numbers, values, starts })
    }

    /// Returns the number of words.
    pub(crate) fn len(&self) -> usize {
        self.groups.len() / GROUP_U16 * self.group_words
    }

    /// Returns the bytes of the panels.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val::<[u16]>(&self.groups)
            + size_of_val(&self.escapes[..])
            + size_of_val(&self.values[..])
            + size_of_val(&self.starts[..])
    }

    /// Returns the bytes of the groups of `words` words.
    pub(crate) fn bytes_of(&self, words: usize) -> usize {
        words / self.group_words * GROUP_U16 * size_of::<u16>()
    }

    /// Returns the address of the first group.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.groups.as_ptr().cast()
    }

    /// Returns the part of a panel from the word `word` on, the first of a group.
    ///
    /// # Panics
    /// Beyond the end.
    pub(crate) fn panel(&self, word: usize) -> CodedPanel {
        let group = word / self.group_words;
        debug_assert_eq!(word % self.group_words, 0);
        let mut escape = self.starts[group / RUN] as usize;
        while (self.escapes[escape] as usize) < group {
            escape += 1;
        }
        CodedPanel {
            groups: self.groups[group * GROUP_U16..].as_ptr(),
            table: self.table.as_ptr(),
            group: group as u32,
            escapes: self.escapes[escape..].as_ptr(),
            values: self.values[escape..].as_ptr().cast(),
        }
    }
}

impl Gemm {
    /// Returns `true` if a rhs of `k` entries of K can be coded: kernels of this instruction set decode it, and a panel
    /// is a whole number of groups.
    pub(crate) fn codes(self, k: usize) -> bool {
        let whole = (self.words(k) * RHS_PANEL).is_multiple_of(self.group_words());
        self.multiplies_narrow() && whole
    }

    /// Returns the words of a group.
    fn group_words(self) -> usize {
        if self.packs_f32() { GROUP } else { GROUP / 2 }
    }

    /// Returns the u16 of `words` coded words, whole groups.
    pub(crate) fn coded(self, words: usize) -> usize {
        words / self.group_words() * GROUP_U16
    }

    /// Returns the most bytes of a coded rhs of so many words.
    pub(crate) fn coded_bytes(self, words: usize) -> usize {
        let groups = words / self.group_words();
        let parts = [
            (groups, GROUP_U16 * size_of::<u16>()),
            (CodedPanels::most_escapes(groups), size_of::<Escape>()),
            (groups / RUN + 2, size_of::<u32>()),
        ];
        parts.into_iter().fold(0, |sum: usize, (count, bytes)| sum.saturating_add(count.saturating_mul(bytes)))
    }

    /// Codes packed words into `out`: whole groups; the first has the number `first`. Escaped groups are added to `escapes`.
    pub(crate) fn code(
        self,
        words: &[u32],
        exponents: Exponents,
        first: usize,
        out: &mut [u16],
        escapes: &mut Vec<Escape>,
    ) {
        for (i, (words, out)) in words.chunks_exact(self.group_words()).zip(out.chunks_exact_mut(GROUP_U16)).enumerate()
        {
            let mut values = [0; GROUP];
            match self.packs_f32() {
                true => upper_halves(self.isa, words, &mut values),
                false => values.copy_from_slice(bytemuck::cast_slice(words)),
            }
            if !code_group(self.isa, &values, exponents.low, out) {
                escapes.push(((first + i) as u32, values));
            }
        }
    }
}

/// Returns the exponent of a bf16 value.
#[inline(always)]
fn exponent(value: u16) -> u16 {
    value >> 7 & 0xff
}

simd_dispatch! {
    /// Writes the upper halves of four rows of 32 words. Column j + 16 comes after column j.
    fn upper_halves(words: &[u32], values: &mut [u16; GROUP]) = upper_halves_body
}

#[inline(always)]
fn upper_halves_body<M: MulAdd>(words: &[u32], values: &mut [u16; GROUP]) {
    let values: &mut [u32] = bytemuck::cast_slice_mut(values);
    for (row, to) in words.chunks_exact(RHS_PANEL).zip(values.chunks_exact_mut(RHS_PANEL / 2)) {
        let (first, second) = row.split_at(RHS_PANEL / 2);
        for x in 0..RHS_PANEL / 2 {
            to[x] = first[x] >> 16 | second[x] & 0xffff_0000;
        }
    }
}

simd_dispatch! {
    /// Codes a group. Returns `false` if an exponent has no code; the output is unspecified then.
    fn code_group(values: &[u16; GROUP], low: u16, out: &mut [u16]) -> bool = code_group_body
}

#[inline(always)]
fn code_group_body<M: MulAdd>(values: &[u16; GROUP], low: u16, out: &mut [u16]) -> bool {
    const SIDE: usize = GROUP / 4;
    let out: &mut [u16; GROUP_U16] = out.try_into().unwrap_or_else(|_| unreachable!("a group"));
    let mut beyond = 0;
    let mut code = |value: u16| {
        let exponent = exponent(value);
        let code = exponent.wrapping_sub(low);
        let code = if exponent == 0 { 0 } else { code };
        beyond |= code >> 4 | u16::from(exponent != 0 && code == 0);
        code & CODES
    };
    for i in 0..SIDE {
        let [a, b, c, d] = [values[i], values[SIDE + i], values[2 * SIDE + i], values[3 * SIDE + i]];
        out[i] = code(a) | code(b) << 4 | code(c) << 8 | code(d) << 12;
        out[SIDE + i] = a & SIGN_AND_MANTISSA | (b & SIGN_AND_MANTISSA).rotate_left(8);
        out[2 * SIDE + i] = c & SIGN_AND_MANTISSA | (d & SIGN_AND_MANTISSA).rotate_left(8);
    }
    beyond == 0
}
