//! What an answer is, above values.

use super::expr::Quantity;

/// An answer that was read.
#[derive(Clone, Debug)]
pub(super) enum Form {
    /// A value, with variables or without.
    Value(Box<Quantity>),
    /// Things between brackets: a tuple, a point or an interval, or a set with `{` and `}`. A list without brackets has `,` for both.
    List { open: char, close: char, items: Vec<Form> },
    /// A union of sets.
    Union(Vec<Form>),
    /// `a = b`, `a < b <= c`.
    Relation { sides: Vec<Quantity>, signs: Vec<Sign> },
    /// A point, a set or a matrix with its name: `D = [0, 1]`.
    Named { name: String, value: Box<Form> },
    /// The rows of a matrix.
    Matrix(Vec<Vec<Form>>),
    /// Words, in lower case.
    Words(String),
}

/// The sign of a relation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Equal,
    Approximate,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

impl Sign {
    /// The sign with its sides exchanged.
    pub(super) fn flipped(self) -> Self {
        match self {
            Self::Less => Self::Greater,
            Self::LessEqual => Self::GreaterEqual,
            Self::Greater => Self::Less,
            Self::GreaterEqual => Self::LessEqual,
            same => same,
        }
    }
}
