//! Values: expressions, what they are exactly, and what they are at a point.

use num_complex::Complex64;
use num_rational::Ratio;
use num_traits::{CheckedAdd, CheckedDiv, CheckedMul, One, Zero};
use rng::stable_hash;
use std::collections::BTreeSet;
use std::f64::consts::{E, PI};

/// A fraction of integers; operations that leave 128 bits give up.
pub(super) type Fraction = Ratio<i128>;

/// The largest exponent that is multiplied out exactly.
const MAX_EXPONENT: i128 = 128;
/// The number of points at which expressions with variables are compared.
const POINTS: u64 = 4;
/// The difference of values that are equal but for rounding, as a share of the larger one.
const ROUNDING: f64 = 1e-9;
/// The difference of values one of which is a decimal: six places.
const DECIMAL: f64 = 5.1e-7;
/// The same as a share of the value, for small ones.
const DECIMAL_SHARE: f64 = 1e-3;

/// An expression.
#[derive(Clone, Debug)]
pub(super) enum Expr {
    /// A number; `is_decimal` when it was written with a decimal point.
    Number {
        value: Fraction,
        is_decimal: bool,
    },
    /// A number that no fraction of 128 bits holds.
    Float(f64),
    /// A variable by name.
    Variable(String),
    Pi,
    Euler,
    Imaginary,
    Infinity,
    Negative(Box<Expr>),
    Sum(Vec<Expr>),
    Product(Vec<Expr>),
    Quotient(Box<Expr>, Box<Expr>),
    Power(Box<Expr>, Box<Expr>),
    /// A hundredth.
    Percent(Box<Expr>),
    Factorial(Box<Expr>),
    Binomial(Box<Expr>, Box<Expr>),
    /// A function by its name in LaTeX.
    Function(String, Box<Expr>),
    /// The logarithm of the second to the base of the first.
    Logarithm(Box<Expr>, Box<Expr>),
}

impl Expr {
    pub(super) fn integer(value: i128) -> Self {
        Self::Number { value: Fraction::from_integer(value), is_decimal: false }
    }

    /// A number as it was written.
    pub(super) fn number(text: &str) -> Option<Self> {
        let exact = || {
            let (mantissa, exponent) = match text.split_once(['e', 'E']) {
                Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
                None => (text, 0),
            };
            let (whole, decimals) = mantissa.split_once('.').unwrap_or((mantissa, ""));
            let digits: i128 = format!("{whole}{decimals}").parse().ok()?;
            let exponent = exponent.checked_sub(i32::try_from(decimals.len()).ok()?)?;
            let power = 10i128.checked_pow(exponent.unsigned_abs())?;
            match exponent >= 0 {
                true => digits.checked_mul(power).map(Fraction::from_integer),
                false => Some(Fraction::new(digits, power)),
            }
        };
        match exact() {
            Some(value) => Some(Self::Number { value, is_decimal: text.contains('.') }),
            None => text.parse().ok().map(Self::Float),
        }
    }

    /// Whether `test` holds for this expression or for a part of it.
    fn any(&self, test: &mut impl FnMut(&Expr) -> bool) -> bool {
        if test(self) {
            return true;
        }
        match self {
            Self::Negative(a) | Self::Percent(a) | Self::Factorial(a) | Self::Function(_, a) => a.any(test),
            Self::Sum(all) | Self::Product(all) => all.iter().any(|a| a.any(test)),
            Self::Quotient(a, b) | Self::Power(a, b) | Self::Binomial(a, b) | Self::Logarithm(a, b) => {
                a.any(test) || b.any(test)
            }
            _ => false,
        }
    }

    pub(super) fn variables(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        self.any(&mut |part| {
            if let Self::Variable(name) = part {
                names.insert(name.clone());
            }
            false
        });
        names
    }

    pub(super) fn has_decimal(&self) -> bool {
        self.any(&mut |part| matches!(part, Self::Number { is_decimal: true, .. } | Self::Float(_)))
    }

    /// The value as a fraction, where it is one and has no variables.
    pub(super) fn exact(&self) -> Option<Fraction> {
        match self {
            Self::Number { value, .. } => Some(*value),
            Self::Negative(a) => Fraction::zero().checked_sub_of(a.exact()?),
            Self::Sum(all) => all.iter().try_fold(Fraction::zero(), |sum, a| sum.checked_add(&a.exact()?)),
            Self::Product(all) => all.iter().try_fold(Fraction::one(), |product, a| product.checked_mul(&a.exact()?)),
            Self::Quotient(a, b) => divide(a.exact()?, b.exact()?),
            Self::Percent(a) => divide(a.exact()?, Fraction::from_integer(100)),
            Self::Power(a, b) => power(a.exact()?, b.exact()?),
            Self::Factorial(a) => {
                let n = Some(a.exact()?).filter(Fraction::is_integer)?.to_integer();
                (0..=30).contains(&n).then(|| (1..=n).product()).map(Fraction::from_integer)
            }
            Self::Binomial(a, b) => {
                let (n, k) = (a.exact()?, b.exact()?);
                let (n, k) = (n.is_integer().then(|| n.to_integer())?, k.is_integer().then(|| k.to_integer())?);
                if !(0..=n).contains(&k) || n > 100 {
                    return None;
                }
                let step = |c: i128, i: i128| Some(c.checked_mul(n - i)? / (i + 1));
                (0..k.min(n - k)).try_fold(1i128, step).map(Fraction::from_integer)
            }
            Self::Function(name, a) if name == "abs" => {
                let value = a.exact()?;
                if value < Fraction::zero() { Fraction::zero().checked_sub_of(value) } else { Some(value) }
            }
            _ => None,
        }
    }

    /// The value where variables have the values of point number `point`.
    pub(super) fn at(&self, point: u64) -> Complex64 {
        let real = |x: f64| Complex64::new(x, 0.0);
        match self {
            Self::Number { value, .. } => real_of(*value),
            Self::Float(value) => real(*value),
            Self::Variable(name) => {
                // In [0.5, 2.5), on both sides of 0 from point to point: what roots and logarithms make of signs should show.
                let hash = stable_hash(&format!("{name}/{point}"));
                let size = 0.5 + (hash % 1_000_003) as f64 / 1_000_003.0 * 2.0;
                real(if point < POINTS / 2 { size } else { -size })
            }
            Self::Pi => real(PI),
            Self::Euler => real(E),
            Self::Imaginary => Complex64::i(),
            Self::Infinity => real(f64::INFINITY),
            Self::Negative(a) => {
                let value = a.at(point);
                // Without -0 in the imaginary part, which roots would see.
                if value.im == 0.0 { real(-value.re) } else { -value }
            }
            Self::Sum(all) => all.iter().map(|a| a.at(point)).fold(real(0.0), |a, b| a + b),
            Self::Product(all) => all.iter().map(|a| a.at(point)).fold(real(1.0), times),
            Self::Quotient(a, b) => {
                let (a, b) = (a.at(point), b.at(point));
                if a.im == 0.0 && b.im == 0.0 { real(a.re / b.re) } else { a / b }
            }
            Self::Percent(a) => a.at(point) / 100.0,
            Self::Power(a, b) => raise(a.at(point), b.at(point)),
            Self::Factorial(_) | Self::Binomial(..) => self.exact().map_or(real(f64::NAN), real_of),
            Self::Logarithm(base, a) => a.at(point).ln() / base.at(point).ln(),
            Self::Function(name, a) => {
                let x = a.at(point);
                match name.as_str() {
                    "sin" => x.sin(),
                    "cos" => x.cos(),
                    "tan" => x.tan(),
                    "cot" => x.tan().inv(),
                    "sec" => x.cos().inv(),
                    "csc" => x.sin().inv(),
                    "arcsin" => x.asin(),
                    "arccos" => x.acos(),
                    "arctan" => x.atan(),
                    "ln" => x.ln(),
                    "log" => x.log(10.0),
                    "exp" => x.exp(),
                    "abs" => real(x.norm()),
                    _ => real(f64::NAN),
                }
            }
        }
    }

    /// Whether two expressions have the same value, whatever their variables are.
    pub(super) fn equals(&self, other: &Self) -> bool {
        // Data sets leave percent signs out, and put them in.
        match (self, other) {
            (Self::Percent(a), Self::Percent(b)) => return a.equals(b),
            (Self::Percent(a), b) | (b, Self::Percent(a)) => {
                let hundredth = Self::Quotient(a.clone(), Box::new(Self::integer(100)));
                return a.equals(b) || hundredth.equals(b);
            }
            _ => {}
        }
        let is_decimal = self.has_decimal() || other.has_decimal();
        if let (Some(a), Some(b)) = (self.exact(), other.exact()) {
            return a == b || is_decimal && close(real_of(a), real_of(b), true);
        }
        (0..POINTS).all(|point| {
            let (a, b) = (self.at(point), other.at(point));
            // Too large to tell by the values: `2^{2005}`.
            let overflows =
                |x: Complex64, of: &Self| x.re.is_infinite() && !of.any(&mut |part| matches!(part, Self::Infinity));
            if overflows(a, self) && overflows(b, other) {
                let (a, b) = (self.ln(point), other.ln(point));
                return a.is_finite() && (a - b).abs() <= ROUNDING * a.abs().min(1.0);
            }
            close(a, b, is_decimal)
        })
    }

    /// The logarithm of the size of a product at a point, also where the product itself is too large for f64.
    fn ln(&self, point: u64) -> f64 {
        match self {
            Self::Negative(a) => a.ln(point),
            Self::Product(all) => all.iter().map(|a| a.ln(point)).sum(),
            Self::Quotient(a, b) => a.ln(point) - b.ln(point),
            Self::Power(a, b) => a.ln(point) * b.at(point).re,
            other => other.at(point).norm().ln(),
        }
    }

    /// self / other where that is the same number at every point, which is not 0.
    pub(super) fn constant_ratio(&self, other: &Self) -> Option<f64> {
        let ratio = |point| self.at(point) / other.at(point);
        let first = ratio(0);
        let ok = first.im.abs() <= ROUNDING && first.re.is_finite() && first.re != 0.0;
        (ok && (1..POINTS).all(|point| close(first, ratio(point), false))).then_some(first.re)
    }
}

trait CheckedSubOf: Sized {
    fn checked_sub_of(self, other: Self) -> Option<Self>;
}

impl CheckedSubOf for Fraction {
    fn checked_sub_of(self, other: Self) -> Option<Self> {
        num_traits::CheckedSub::checked_sub(&self, &other)
    }
}

fn real_of(value: Fraction) -> Complex64 {
    Complex64::new(*value.numer() as f64 / *value.denom() as f64, 0.0)
}

fn divide(a: Fraction, b: Fraction) -> Option<Fraction> {
    if b.is_zero() { None } else { a.checked_div(&b) }
}

fn power(base: Fraction, exponent: Fraction) -> Option<Fraction> {
    let exponent = exponent.is_integer().then(|| exponent.to_integer())?;
    if exponent.abs() > MAX_EXPONENT || base.is_zero() && exponent < 0 {
        return None;
    }
    let whole = (0..exponent.abs()).try_fold(Fraction::one(), |product, _| product.checked_mul(&base))?;
    if exponent < 0 { divide(Fraction::one(), whole) } else { Some(whole) }
}

/// Products of real numbers stay real: infinity times 0i is NaN.
fn times(a: Complex64, b: Complex64) -> Complex64 {
    if a.im == 0.0 && b.im == 0.0 { Complex64::new(a.re * b.re, 0.0) } else { a * b }
}

fn raise(base: Complex64, exponent: Complex64) -> Complex64 {
    let is_real = base.im == 0.0 && exponent.im == 0.0;
    if is_real && (base.re >= 0.0 || exponent.re.fract() == 0.0) {
        return Complex64::new(base.re.powf(exponent.re), 0.0);
    }
    // Odd roots of negative numbers are the real ones.
    let root = 1.0 / exponent.re;
    if is_real && (root - root.round()).abs() < ROUNDING && root.round() % 2.0 != 0.0 {
        return Complex64::new(-(-base.re).powf(exponent.re), 0.0);
    }
    base.powc(exponent)
}

/// Whether two values are equal but for rounding, or to six places where one is a decimal. NaN is equal to nothing.
fn close(a: Complex64, b: Complex64, is_decimal: bool) -> bool {
    if a.re.is_infinite() || b.re.is_infinite() {
        return a.re == b.re;
    }
    let (difference, size) = ((a - b).norm(), a.norm().max(b.norm()));
    difference <= ROUNDING * size.max(1e-3)
        || is_decimal && difference <= DECIMAL.max(ROUNDING * 1e-3 * size) && difference <= DECIMAL_SHARE * size
}
