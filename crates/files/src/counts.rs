//! Formats counts with their nouns.

use std::borrow::Cow;

/// Formats a count with commas between groups of three digits.
///
/// ```
/// assert_eq!([0, 999, 1000, 1_234_567].map(grpo_files::grouped), ["0", "999", "1,000", "1,234,567"]);
/// ```
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().filter_map(|group| str::from_utf8(group).ok()).collect();
    groups.join(",")
}

/// Returns the form of a noun for a count: singular for 1, plural otherwise.
///
/// ```
/// use grpo_files::noun;
///
/// assert_eq!([0, 1, 2].map(|count| noun(count, "row")), ["rows", "row", "rows"]);
/// assert_eq!(["micro-batch", "class", "entry", "key", "row of a file"].map(|name| noun(2, name)), [
///     "micro-batches", "classes", "entries", "keys", "rows of a file",
/// ]);
/// ```
pub fn noun(count: u64, singular: &str) -> Cow<'_, str> {
    if count == 1 {
        return singular.into();
    }
    // `row of a file`: the plural is that of the first part.
    let (head, rest) = singular.find(" of ").map_or((singular, ""), |at| singular.split_at(at));
    let is_vowel = |c: char| "aeiou".contains(c);
    let stem = head.strip_suffix('y').filter(|stem| !stem.ends_with(is_vowel));
    let hisses = ["s", "x", "z", "ch", "sh"].iter().any(|end| head.ends_with(end));
    match stem {
        Some(stem) => format!("{stem}ies{rest}"),
        None if hisses => format!("{head}es{rest}"),
        None => format!("{head}s{rest}"),
    }
    .into()
}

/// Formats a count with its noun.
///
/// ```
/// use grpo_files::counted;
///
/// assert_eq!([0, 1, 1234].map(|count| counted(count, "held-out problem")), [
///     "0 held-out problems", "1 held-out problem", "1,234 held-out problems",
/// ]);
/// ```
pub fn counted(count: impl TryInto<u64>, singular: &str) -> String {
    let count = count.try_into().unwrap_or(u64::MAX);
    format!("{} {}", grouped(count), noun(count, singular))
}
