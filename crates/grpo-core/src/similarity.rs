//! The similarity of two names, to suggest the key that a misspelt one stands for.

/// Returns the Jaro-Winkler similarity of two strings, from 0 to 1.
pub(crate) fn jaro_winkler(a: &str, b: &str) -> f64 {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let similarity = jaro(&a, &b);
    let prefix = a.iter().zip(&b).take(4).take_while(|(a, b)| a == b).count();
    similarity + 0.1 * prefix as f64 * (1.0 - similarity)
}

/// Returns the Jaro similarity: equal characters at most half the longer string apart, and how many of them are out of order.
fn jaro(a: &[char], b: &[char]) -> f64 {
    if a.is_empty() || b.is_empty() {
        return if a.len() == b.len() { 1.0 } else { 0.0 };
    }
    let range = (a.len().max(b.len()) / 2).saturating_sub(1);
    let mut taken = vec![false; b.len()];
    let mut matched = Vec::new();
    for (i, char) in a.iter().enumerate() {
        let window = i.saturating_sub(range)..(i + range + 1).min(b.len());
        if let Some(j) = window.into_iter().find(|j| !taken[*j] && b[*j] == *char) {
            taken[j] = true;
            matched.push(*char);
        }
    }
    if matched.is_empty() {
        return 0.0;
    }
    let in_b = (0..b.len()).filter(|j| taken[*j]).map(|j| b[j]);
    let moved = matched.iter().zip(in_b).filter(|(a, b)| *a != b).count() / 2;
    let count = matched.len() as f64;
    (count / a.len() as f64 + count / b.len() as f64 + (count - moved as f64) / count) / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similarities_are_those_of_the_literature() {
        // Winkler, "String Comparator Metrics and Enhanced Decision Rules", 1990, table 1.
        let table =
            [("MARTHA", "MARHTA", 0.961), ("DWAYNE", "DUANE", 0.840), ("DIXON", "DICKSONX", 0.813), ("ab", "cd", 0.0)];
        for (a, b, expected) in table {
            assert!((jaro_winkler(a, b) - expected).abs() < 1e-3, "{a} {b}: {}", jaro_winkler(a, b));
            assert_eq!(jaro_winkler(a, b), jaro_winkler(b, a));
        }
        assert_eq!((jaro_winkler("", ""), jaro_winkler("", "a"), jaro_winkler("beta", "beta")), (1.0, 0.0, 1.0));
    }
}
