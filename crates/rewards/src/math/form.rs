//! The structure of an answer.

use super::expr::Quantity;

#[derive(Clone, Debug)]
pub(super) enum Form {
    /// A value, with or without variables.
    Value(Box<Quantity>),
    /// Items between brackets: a tuple, a point, an interval, or a set with `{` and `}`. For a list without brackets, both brackets are
    /// `,`.
    List { open: char, close: char, items: Vec<Form> },
    /// A union of sets.
    Union(Vec<Form>),
    /// `a = b`, `a < b <= c`.
    Relation { sides: Vec<Quantity>, signs: Vec<Sign> },
    /// A named point, set or matrix: `D = [0, 1]`.
    Named { name: String, value: Box<Form> },
    /// The rows of a matrix.
    Matrix(Vec<Vec<Form>>),
    /// Words, in lower case.
    Words(String),
}

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
    /// Returns the sign for exchanged sides.
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
