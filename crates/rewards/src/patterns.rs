//! Constant regular expressions.

/// Defines a regular expression, which is compiled when it is first used.
macro_rules! regex {
    ($name:ident, $pattern:expr) => {
        static $name: std::sync::LazyLock<regex::Regex> =
            std::sync::LazyLock::new(|| regex::Regex::new(&$pattern).expect("the pattern is a constant"));
    };
}

pub(crate) use regex;
