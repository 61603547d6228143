//! Methods and operators that values of programs and of kernels share. The macros expand where `Value`, `Unary`,
//! `Binary` and `Comparison` are in scope.

/// Adds methods that apply one operation of an enum.
macro_rules! named {
    ($($(#[$doc:meta])* $name:ident($($other:ident)?) $method:ident $group:ident::$operation:ident;)*) => {
        impl Value {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(&self $(, $other: &Self)?) -> Self {
                self.$method($group::$operation $(, $other)?)
            })*
        }
    };
}

/// Implements binary operators for values and references to values.
macro_rules! operators {
    ($($trait:ident $method:ident $operation:ident;)*) => {
        $(impl<V: AsRef<Value>> std::ops::$trait<V> for &Value {
            type Output = Value;
            #[track_caller]
            fn $method(self, other: V) -> Value {
                self.binary(Binary::$operation, other.as_ref())
            }
        }

        impl<V: AsRef<Value>> std::ops::$trait<V> for Value {
            type Output = Value;
            #[track_caller]
            fn $method(self, other: V) -> Value {
                self.binary(Binary::$operation, other.as_ref())
            }
        })*
    };
}

/// Adds the methods and operators that programs and kernels have in common.
macro_rules! common_operators {
    () => {
        named! {
            /// Computes the exponential e^x.
            exp() unary Unary::Exponential;
            /// Computes the natural logarithm ln x.
            log() unary Unary::Log;
            /// Computes the absolute value |x|.
            abs() unary Unary::Abs;
            /// Computes the maximum; NaN if either operand is NaN.
            max(other) binary Binary::Maximum;
            /// Computes the minimum; NaN if either operand is NaN.
            min(other) binary Binary::Minimum;
            /// Compares `self == other`.
            eq(other) compare Comparison::Eq;
            /// Compares `self != other`.
            ne(other) compare Comparison::Ne;
            /// Compares `self < other`.
            lt(other) compare Comparison::Lt;
            /// Compares `self <= other`.
            le(other) compare Comparison::Le;
            /// Compares `self > other`.
            gt(other) compare Comparison::Gt;
            /// Compares `self >= other`.
            ge(other) compare Comparison::Ge;
        }

        operators! {
            Add add Add;
            Sub sub Subtract;
            Mul mul Multiply;
            Div div Divide;
            BitAnd bitand And;
            BitOr bitor Or;
        }

        impl AsRef<Self> for Value {
            fn as_ref(&self) -> &Self {
                self
            }
        }

        impl std::ops::Neg for &Value {
            type Output = Value;
            #[track_caller]
            fn neg(self) -> Value {
                self.unary(Unary::Negate)
            }
        }

        impl std::ops::Neg for Value {
            type Output = Value;
            #[track_caller]
            fn neg(self) -> Value {
                self.unary(Unary::Negate)
            }
        }
    };
}

pub(crate) use {common_operators, named, operators};
