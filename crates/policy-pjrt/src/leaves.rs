//! Structures of values of a program, as JAX's pytrees: the carry of a loop or the constants of its body, with names instead of positions.

use grpo_stablehlo::{Builder, TensorType, Value};
use std::slice::Iter;

/// A structure with a fixed order of its values.
pub(crate) trait Leaves: Sized {
    /// Returns the values.
    fn leaves(&self) -> Vec<&Value>;

    /// Returns the same structure with the next values of `values`.
    fn take(&self, values: &mut Iter<'_, Value>) -> Self;

    /// Returns `structure` with these values, for example in another function: the inverse of [`Leaves::leaves`].
    ///
    /// # Panics
    /// Panics if there are more or fewer values, as do all functions that use it.
    #[track_caller]
    fn from_leaves(structure: &Self, values: &[Value]) -> Self {
        let mut rest = values.iter();
        let same = structure.take(&mut rest);
        assert_eq!(rest.len(), 0, "a structure has fewer values than {}", values.len());
        same
    }

    /// Returns copies of the values.
    fn to_leaves(&self) -> Vec<Value> {
        self.leaves().into_iter().cloned().collect()
    }

    /// Returns the types of the values.
    fn types(&self) -> Vec<TensorType> {
        self.leaves().into_iter().map(|value| value.ty().clone()).collect()
    }
}

/// Implements [`Leaves`] for a structure, in the order of these fields; `copied` fields have no values.
macro_rules! leaves {
    ($name:ident { $($field:ident),+ } $(, copied: $($copied:ident),+)?) => {
        impl $crate::leaves::Leaves for $name {
            fn leaves(&self) -> Vec<&grpo_stablehlo::Value> {
                [$(self.$field.leaves()),+].concat()
            }

            fn take(&self, values: &mut std::slice::Iter<'_, grpo_stablehlo::Value>) -> Self {
                Self { $($field: self.$field.take(values)),+ $(, $($copied: self.$copied),+)? }
            }
        }
    };
}
pub(crate) use leaves;

impl Leaves for Value {
    fn leaves(&self) -> Vec<&Value> {
        vec![self]
    }

    fn take(&self, values: &mut Iter<'_, Value>) -> Self {
        let ([value], rest) = first(values.as_slice());
        *values = rest.iter();
        value.clone()
    }
}

impl<T: Leaves> Leaves for Option<T> {
    fn leaves(&self) -> Vec<&Value> {
        self.iter().flat_map(T::leaves).collect()
    }

    fn take(&self, values: &mut Iter<'_, Value>) -> Self {
        self.as_ref().map(|part| part.take(values))
    }
}

impl<T: Leaves> Leaves for Vec<T> {
    fn leaves(&self) -> Vec<&Value> {
        self.iter().flat_map(T::leaves).collect()
    }

    fn take(&self, values: &mut Iter<'_, Value>) -> Self {
        self.iter().map(|part| part.take(values)).collect()
    }
}

impl<T: Leaves, const N: usize> Leaves for [T; N] {
    fn leaves(&self) -> Vec<&Value> {
        self.iter().flat_map(T::leaves).collect()
    }

    fn take(&self, values: &mut Iter<'_, Value>) -> Self {
        self.each_ref().map(|part| part.take(values))
    }
}

impl<A: Leaves, B: Leaves> Leaves for (A, B) {
    fn leaves(&self) -> Vec<&Value> {
        [self.0.leaves(), self.1.leaves()].concat()
    }

    fn take(&self, values: &mut Iter<'_, Value>) -> Self {
        (self.0.take(values), self.1.take(values))
    }
}

/// Returns the values of a function's arguments or results, which the caller has declared, with a name for each.
///
/// # Panics
/// Panics if there are more or fewer.
#[track_caller]
pub(crate) fn all<const N: usize>(values: &[Value]) -> &[Value; N] {
    let (first, rest) = first(values);
    assert_eq!(rest.len(), 0, "a function has more than {N} values");
    first
}

/// Returns the first values as [`all`] does, and the rest.
///
/// # Panics
/// Panics if there are fewer.
#[track_caller]
pub(crate) fn first<const N: usize>(values: &[Value]) -> (&[Value; N], &[Value]) {
    values.split_first_chunk().unwrap_or_else(|| unreachable!("a function has at least {N} values, as declared"))
}

/// Repeats `body` on a structure while `condition` holds ([`Builder::while_loop`]).
#[track_caller]
pub(crate) fn while_loop<C: Leaves>(
    f: &Builder,
    initial: &C,
    condition: impl FnOnce(C) -> Value,
    body: impl FnOnce(C) -> C,
) -> C {
    let condition = |values: &[Value]| condition(C::from_leaves(initial, values));
    let results =
        f.while_loop(&initial.leaves(), condition, |values| body(C::from_leaves(initial, values)).to_leaves());
    C::from_leaves(initial, &results)
}

/// Calls `body` for each index below `trips` ([`Builder::for_loop`]).
#[track_caller]
pub(crate) fn for_loop<C: Leaves>(f: &Builder, trips: usize, initial: &C, body: impl FnOnce(&Value, C) -> C) -> C {
    let results =
        f.for_loop(trips, &initial.leaves(), |index, values| body(index, C::from_leaves(initial, values)).to_leaves());
    C::from_leaves(initial, &results)
}
