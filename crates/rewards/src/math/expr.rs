//! Expressions and their values: exact for fractions, otherwise sampled at points.

use super::sample::{POINTS, Sample, gamma};
use num_bigint::BigInt;
use num_complex::Complex64;
use num_rational::Ratio;
use num_traits::{One, Signed, ToPrimitive, Zero};
use std::f64::consts::{E, PI};

/// A fraction of integers. Operations return `None` if a result has more than [`MAX_BITS`] bits.
pub(super) type Fraction = Ratio<BigInt>;

/// The maximum number of bits of a numerator or denominator. It allows 1,200 digits, more than the characters of an answer.
const MAX_BITS: u64 = 4096;
/// The largest integer whose factorial is computed exactly.
const MAX_FACTORIAL: u32 = 450;

#[derive(Clone, Debug)]
pub(super) enum Expr {
    /// A number; `is_decimal` if it was written with a decimal point.
    Number {
        value: Fraction,
        is_decimal: bool,
    },
    /// A number with more bits than [`MAX_BITS`].
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
    /// A value divided by 100.
    Percent(Box<Expr>),
    Factorial(Box<Expr>),
    Binomial(Box<Expr>, Box<Expr>),
    /// A function by its LaTeX name.
    Function(String, Box<Expr>),
    /// The logarithm of the second expression to the base of the first.
    Logarithm(Box<Expr>, Box<Expr>),
}

impl Expr {
    pub(super) fn integer(value: i32) -> Self {
        Self::Number { value: Fraction::from_integer(value.into()), is_decimal: false }
    }

    /// Parses a number: `12`, `0.5`, `1.5e3`, and `0.1(6)` for the repeating decimal 0.1666...
    pub(super) fn number(text: &str) -> Option<Self> {
        let (text, repeating) = match text.strip_suffix(')').and_then(|text| text.split_once('(')) {
            Some((text, repeating)) => (text, repeating),
            None => (text, ""),
        };
        let exact = || {
            let (mantissa, exponent) = match text.split_once(['e', 'E']) {
                Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
                None => (text, 0),
            };
            let (whole, decimals) = mantissa.split_once('.').unwrap_or((mantissa, ""));
            let digits: BigInt = format!("{whole}{decimals}").parse().ok()?;
            let exponent = exponent.checked_sub(i32::try_from(decimals.len()).ok()?)?;
            let power = bounded_power(&BigInt::from(10), exponent.unsigned_abs())?;
            let mut value = match exponent >= 0 {
                true => Fraction::from_integer(digits * &power),
                false => Fraction::new(digits, power.clone()),
            };
            if !repeating.is_empty() {
                let nines = bounded_power(&BigInt::from(10), u32::try_from(repeating.len()).ok()?)? - 1;
                value += Fraction::new(repeating.parse().ok()?, nines * power);
            }
            bounded(value)
        };
        match exact() {
            Some(value) => Some(Self::Number { value, is_decimal: text.contains('.') && repeating.is_empty() }),
            None => text.parse().ok().map(Self::Float),
        }
    }

    /// Returns the parts of this expression.
    fn parts(&self) -> impl Iterator<Item = &Self> {
        let (all, pair): (&[Self], [Option<&Self>; 2]) = match self {
            Self::Negative(a) | Self::Percent(a) | Self::Factorial(a) | Self::Function(_, a) => (&[], [Some(a), None]),
            Self::Sum(all) | Self::Product(all) => (all, [None, None]),
            Self::Quotient(a, b) | Self::Power(a, b) | Self::Binomial(a, b) | Self::Logarithm(a, b) => {
                (&[], [Some(a), Some(b)])
            }
            _ => (&[], [None, None]),
        };
        all.iter().chain(pair.into_iter().flatten())
    }

    /// Returns `true` if `test` holds for this expression or a part of it.
    pub(super) fn any(&self, test: &mut impl FnMut(&Expr) -> bool) -> bool {
        test(self) || self.parts().any(|part| part.any(test))
    }

    /// Returns `true` if expressions contain each other over more than this number of levels.
    pub(super) fn is_deeper_than(&self, levels: usize) -> bool {
        let (mut level, mut depth) = (vec![self], 0);
        while !level.is_empty() && depth < levels {
            level = level.into_iter().flat_map(Self::parts).collect();
            depth += 1;
        }
        !level.is_empty()
    }

    /// Returns the value as a fraction; `None` if it is not rational or has variables.
    pub(super) fn exact(&self) -> Option<Fraction> {
        let value = match self {
            Self::Number { value, .. } => return Some(value.clone()),
            Self::Negative(a) => -a.exact()?,
            Self::Sum(all) => all.iter().try_fold(Fraction::zero(), |sum, a| bounded(sum + a.exact()?))?,
            Self::Product(all) => all.iter().try_fold(Fraction::one(), |product, a| bounded(product * a.exact()?))?,
            Self::Quotient(a, b) => divide(a.exact()?, b.exact()?)?,
            Self::Percent(a) => a.exact()? / BigInt::from(100),
            Self::Power(a, b) => power(a.exact()?, b.exact()?)?,
            Self::Factorial(a) => {
                let n = natural(&a.exact()?).filter(|n| *n <= MAX_FACTORIAL)?;
                Fraction::from_integer((1..=n).product())
            }
            Self::Binomial(a, b) => {
                let (n, k) = (natural(&a.exact()?)?, natural(&b.exact()?)?);
                let k = if k > n { return Some(Fraction::zero()) } else { k.min(n - k) };
                if k > MAX_FACTORIAL {
                    return None;
                }
                Fraction::from_integer((0..k).fold(BigInt::one(), |c, i| c * (n - i) / (i + 1)))
            }
            Self::Function(name, a) => match name.as_str() {
                "abs" => a.exact()?.abs(),
                "floor" => a.exact()?.floor(),
                "ceil" => a.exact()?.ceil(),
                _ => return None,
            },
            _ => return None,
        };
        bounded(value)
    }

    /// Returns the value at the sample point `point`, with a bound of its rounding error.
    pub(super) fn at(&self, point: usize) -> Sample {
        match self {
            Self::Number { value, .. } => Sample::real(real_of(value)),
            Self::Float(value) => Sample::real(*value),
            Self::Variable(name) => Sample::variable(name, point),
            Self::Pi => Sample::real(PI),
            Self::Euler => Sample::real(E),
            Self::Imaginary => Sample::exactly(Complex64::i()),
            Self::Infinity => Sample::real(f64::INFINITY),
            Self::Negative(a) => a.at(point).negative(),
            Self::Sum(all) => all.iter().map(|a| a.at(point)).fold(Sample::real(0.0), Sample::plus),
            Self::Product(all) => all.iter().map(|a| a.at(point)).fold(Sample::real(1.0), Sample::times),
            Self::Quotient(a, b) => a.at(point).over(b.at(point)),
            Self::Percent(a) => a.at(point).over(Sample::real(100.0)),
            Self::Power(a, b) => a.at(point).to_the(b.at(point)),
            Self::Factorial(a) => a.at(point).plus(Sample::real(1.0)).map(gamma),
            Self::Binomial(n, k) => {
                let one = Sample::real(1.0);
                let (n, k) = (n.at(point), k.at(point));
                let below = k.plus(one).map(gamma).times(n.plus(k.negative()).plus(one).map(gamma));
                n.plus(one).map(gamma).over(below)
            }
            Self::Logarithm(base, a) => a.at(point).map(Complex64::ln).over(base.at(point).map(Complex64::ln)),
            Self::Function(name, a) => a.at(point).function(name),
        }
    }

    /// Returns the logarithm of a product's magnitude at a point, even if the product overflows or underflows f64.
    pub(super) fn ln(&self, point: usize) -> f64 {
        match self {
            Self::Negative(a) => a.ln(point),
            Self::Product(all) => all.iter().map(|a| a.ln(point)).sum(),
            Self::Quotient(a, b) => a.ln(point) - b.ln(point),
            Self::Power(a, b) => a.ln(point) * b.at(point).value.re,
            Self::Factorial(a) => super::sample::ln_gamma(a.at(point).value.re + 1.0),
            Self::Number { value, .. } => ln_of(value.numer()) - ln_of(value.denom()),
            other => other.at(point).value.norm().ln(),
        }
    }
}

/// An expression with the properties that comparisons use, computed once.
#[derive(Clone, Debug)]
pub(super) struct Quantity {
    pub(super) expr: Expr,
    pub(super) exact: Option<Fraction>,
    pub(super) samples: [Sample; POINTS],
    /// `true` if a part was written with a decimal point.
    pub(super) has_decimal: bool,
    pub(super) variables: std::collections::BTreeSet<String>,
}

impl Quantity {
    pub(super) fn new(expr: Expr) -> Self {
        let mut variables = std::collections::BTreeSet::new();
        expr.any(&mut |part| {
            if let Expr::Variable(name) = part {
                variables.insert(name.clone());
            }
            false
        });
        let has_decimal = expr.any(&mut |part| matches!(part, Expr::Number { is_decimal: true, .. } | Expr::Float(_)));
        let samples = std::array::from_fn(|point| expr.at(point));
        Self { exact: expr.exact(), samples, has_decimal, variables, expr }
    }

    /// Returns `true` if two quantities have the same value for all values of their variables.
    pub(super) fn equals(&self, other: &Self) -> bool {
        let quantity = |expr: &Expr| Self::new(expr.clone());
        // Data sets add and omit percent signs.
        match (&self.expr, &other.expr) {
            (Expr::Percent(a), Expr::Percent(b)) => quantity(a).equals(&quantity(b)),
            (Expr::Percent(a), _) => quantity(a).equals(other) || self.equals_as_value(other),
            (_, Expr::Percent(b)) => self.equals(&quantity(b)) || self.equals_as_value(other),
            _ => self.equals_as_value(other),
        }
    }

    fn equals_as_value(&self, other: &Self) -> bool {
        let has_decimal = self.has_decimal || other.has_decimal;
        if let (Some(a), Some(b)) = (&self.exact, &other.exact) {
            return a == b || has_decimal && Sample::real(real_of(a)).is_near(Sample::real(real_of(b)), true);
        }
        (0..POINTS).all(|point| {
            let (a, b) = (self.samples[point], other.samples[point]);
            // Values outside the range of f64, such as `2^{20050}`, are compared by their logarithms.
            let overflows = |sample: Sample, of: &Self| {
                sample.value.re.is_infinite() && !of.expr.any(&mut |part| matches!(part, Expr::Infinity))
            };
            let both_zero = a.value.is_zero() && b.value.is_zero();
            if both_zero || overflows(a, self) && overflows(b, other) {
                let (a, b) = (self.expr.ln(point), other.expr.ln(point));
                return if a.is_finite() && b.is_finite() {
                    (a - b).abs() <= 1e-9 * a.abs().min(1.0)
                } else {
                    both_zero
                };
            }
            a.is_near(b, has_decimal)
        })
    }
}

/// Returns the value as f64, even if numerator and denominator overflow f64.
fn real_of(value: &Fraction) -> f64 {
    let part = |of: &BigInt| {
        let shift = of.bits().saturating_sub(128);
        ((of >> shift).to_f64().unwrap_or(f64::NAN), shift as f64)
    };
    let ((a, a_shift), (b, b_shift)) = (part(value.numer()), part(value.denom()));
    a / b * (a_shift - b_shift).exp2()
}

fn ln_of(value: &BigInt) -> f64 {
    let shift = value.bits().saturating_sub(128);
    (value >> shift).to_f64().unwrap_or(f64::NAN).abs().ln() + shift as f64 * std::f64::consts::LN_2
}

fn bounded(value: Fraction) -> Option<Fraction> {
    (value.numer().bits().max(value.denom().bits()) <= MAX_BITS).then_some(value)
}

fn bounded_power(base: &BigInt, exponent: u32) -> Option<BigInt> {
    (base.bits().checked_mul(exponent.into())? <= MAX_BITS || base.bits() <= 1).then(|| base.pow(exponent))
}

fn natural(value: &Fraction) -> Option<u32> {
    Some(value).filter(|value| value.is_integer())?.numer().to_u32()
}

fn divide(a: Fraction, b: Fraction) -> Option<Fraction> {
    (!b.is_zero()).then(|| a / b)
}

fn power(base: Fraction, exponent: Fraction) -> Option<Fraction> {
    let exponent = exponent.is_integer().then(|| exponent.numer().to_i32())??;
    if base.is_zero() && exponent < 0 {
        return None;
    }
    let part = |of: &BigInt| bounded_power(of, exponent.unsigned_abs());
    let (numer, denom) = (part(base.numer())?, part(base.denom())?);
    Some(if exponent < 0 { Fraction::new(denom, numer) } else { Fraction::new(numer, denom) })
}
