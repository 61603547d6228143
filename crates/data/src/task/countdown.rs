//! Countdown: `2,3,4:14=` -> `2*(3+4)`, or any other expression that uses each number once and reaches the target.

use super::{Problem, Task};
use rand::{Rng, RngExt};

/// Reaching a target with `count` numbers from 1 to `max_number`, each used exactly once, with + - * / and parentheses. Targets are
/// non-negative integers generated from an expression, so every problem has a solution.
///
/// ```
/// use grpo_data::task::Countdown;
/// use grpo_data::{Problem, Task};
///
/// let problem = Problem { prompt: "2,3,4:14=".into(), answer: "2*(3+4)".into() };
/// assert!(Countdown { count: 3, max_number: 9 }.verify(&problem, "(4+3)*2"));
/// ```
#[derive(Clone, Debug)]
pub struct Countdown {
    /// The number of given numbers, at least 1.
    pub count: usize,
    /// The largest of the given numbers.
    pub max_number: u32,
}

/// The credit for an expression that uses exactly the given numbers but misses the target.
const WELL_FORMED: f32 = 0.2;

impl Task for Countdown {
    fn name(&self) -> &str {
        "countdown"
    }

    fn sample(&self, rng: &mut dyn Rng) -> Problem {
        let numbers: Vec<i64> =
            (0..self.count.max(1)).map(|_| rng.random_range(1..=i64::from(self.max_number))).collect();
        // A left-to-right chain whose intermediate values are non-negative integers.
        let (mut value, mut answer) = (numbers[0], numbers[0].to_string());
        let mut last_is_sum = false;
        for &n in &numbers[1..] {
            let operator =
                *['+', '-', '*'].get(rng.random_range(0..3)).filter(|o| **o != '-' || value >= n).unwrap_or(&'+');
            answer = match operator {
                '*' if last_is_sum => format!("({answer})*{n}"),
                _ => format!("{answer}{operator}{n}"),
            };
            value = match operator {
                '-' => value - n,
                '*' => value * n,
                _ => value + n,
            };
            last_is_sum = operator != '*';
        }
        let given = numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        Problem { prompt: format!("{given}:{value}="), answer }
    }

    fn verify(&self, problem: &Problem, completion: &str) -> bool {
        judge(&problem.prompt, completion) == Some(true)
    }

    fn score(&self, problem: &Problem, completion: &str) -> f32 {
        match judge(&problem.prompt, completion) {
            Some(true) => 1.0,
            Some(false) => WELL_FORMED,
            None => 0.0,
        }
    }
}

/// Returns `true` if `completion` reaches the prompt's target; `None` if it is not an expression over exactly the given numbers.
fn judge(prompt: &str, completion: &str) -> Option<bool> {
    let (given, target) = prompt.strip_suffix('=')?.split_once(':')?;
    let mut given = given.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<i64>>>()?;
    let target: i64 = target.parse().ok()?;

    let mut parser = Parser { text: completion.as_bytes(), at: 0, depth: 0, used: Vec::new() };
    let value = parser.sum()?;
    if parser.at != parser.text.len() {
        return None;
    }
    given.sort_unstable();
    parser.used.sort_unstable();
    (given == parser.used).then_some(value == Ratio { numerator: target, denominator: 1 })
}

/// An exact fraction in lowest terms with a positive denominator, so that division does not round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ratio {
    numerator: i64,
    denominator: i64,
}

impl Ratio {
    /// Returns `None` on division by zero or overflow.
    fn new(numerator: i64, denominator: i64) -> Option<Self> {
        if denominator == 0 {
            return None;
        }
        let (mut a, mut b) = (numerator.checked_abs()?, denominator.checked_abs()?);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        let divisor = a.checked_mul(denominator.signum())?;
        Some(Self { numerator: numerator / divisor, denominator: denominator / divisor })
    }

    fn apply(self, operator: u8, other: Self) -> Option<Self> {
        let (a, b, c, d) = (self.numerator, self.denominator, other.numerator, other.denominator);
        match operator {
            b'+' => Self::new(a.checked_mul(d)?.checked_add(c.checked_mul(b)?)?, b.checked_mul(d)?),
            b'-' => Self::new(a.checked_mul(d)?.checked_sub(c.checked_mul(b)?)?, b.checked_mul(d)?),
            b'*' => Self::new(a.checked_mul(c)?, b.checked_mul(d)?),
            _ => Self::new(a.checked_mul(d)?, b.checked_mul(c)?),
        }
    }
}

/// A recursive-descent parser of `sum := product (+|- product)*`, `product := atom (*|/ atom)*`, `atom := number | (sum)`.
struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
    used: Vec<i64>,
}

impl Parser<'_> {
    /// The limit of nested parentheses, so that no completion can overflow the stack.
    const MAX_DEPTH: usize = 32;

    fn take(&mut self, accepted: &[u8]) -> Option<u8> {
        let next = *self.text.get(self.at)?;
        accepted.contains(&next).then(|| {
            self.at += 1;
            next
        })
    }

    fn sum(&mut self) -> Option<Ratio> {
        let mut value = self.product()?;
        while let Some(operator) = self.take(b"+-") {
            value = value.apply(operator, self.product()?)?;
        }
        Some(value)
    }

    fn product(&mut self) -> Option<Ratio> {
        let mut value = self.atom()?;
        while let Some(operator) = self.take(b"*/") {
            value = value.apply(operator, self.atom()?)?;
        }
        Some(value)
    }

    fn atom(&mut self) -> Option<Ratio> {
        if self.take(b"(").is_some() {
            self.depth += 1;
            if self.depth > Self::MAX_DEPTH {
                return None;
            }
            let value = self.sum()?;
            self.depth -= 1;
            return self.take(b")").map(|_| value);
        }
        let start = self.at;
        while self.take(b"0123456789").is_some() {}
        let number: i64 = std::str::from_utf8(&self.text[start..self.at]).ok()?.parse().ok()?;
        self.used.push(number);
        Ratio::new(number, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn countdown_accepts_any_expression_with_the_target_value() {
        for right in ["2*(3+4)", "(4+3)*2", "((2))*(4+3)"] {
            assert_eq!(judge("2,3,4:14=", right), Some(true), "{right}");
        }
        assert_eq!(judge("1,2,2:1=", "1/2*2"), Some(true), "division is exact");
        assert_eq!(judge("1,3,3:1=", "1/3*3"), Some(true), "thirds too");
    }

    #[test]
    fn countdown_rejects_wrong_values_and_unknown_numbers() {
        assert_eq!(judge("2,3,4:14=", "2*3+4"), Some(false));
        for bad in
            ["14", "2*7", "2*(3+4", "2*(3+4)+", "2*(3+4))", "2*(3+4)*1", "2 *(3+4)", "-2+3+4", "(2+3)4", "2/(3-3)"]
        {
            assert_eq!(judge("2,3,4:14=", bad), None, "{bad}");
        }
        assert_eq!(judge("1,1,2:0=", "2/(1-1)"), None, "division by zero");
        let huge = "9".repeat(30);
        assert_eq!(judge("2,3,4:14=", &huge), None);
        assert_eq!(judge("2,3,4:14=", &"(".repeat(100_000)), None, "deep nesting must not overflow the stack");
    }
}
