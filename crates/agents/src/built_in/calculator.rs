//! A calculator as a tool.

use crate::environment::{Environment, Episode, Failure, Reply, Start};
use grpo_data::Item;
use serde_json::{Value, json};

/// The longest expression, in bytes.
const LONGEST: usize = 1000;
/// The deepest nesting of parentheses and signs.
const DEEPEST: usize = 100;
/// The largest integer that is exact in f64.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// The tool `calculator(expression)`, which evaluates `+`, `-`, `*`, `/` and parentheses in f64. A message without a tool call ends the
/// conversation. It gives no rewards.
pub struct Calculator {
    tools: Value,
}

impl Default for Calculator {
    fn default() -> Self {
        let expression = json!({"type": "string", "description": "The expression, such as 6 * (7 + 1)."});
        let parameters =
            json!({"type": "object", "properties": {"expression": expression}, "required": ["expression"]});
        let description = "Evaluates an arithmetic expression with + - * / and parentheses.";
        let function = json!({"name": "calculator", "description": description, "parameters": parameters});
        Self { tools: json!([{"type": "function", "function": function}]) }
    }
}

impl Environment for Calculator {
    fn tools(&self) -> Option<&Value> {
        Some(&self.tools)
    }

    fn reset(&self, _: &Item, _: usize) -> Result<Start, Failure> {
        Ok(Start { messages: Vec::new(), episode: Box::new(Calculations) })
    }
}

struct Calculations;

impl Episode for Calculations {
    fn step(&mut self, message: &Value) -> Result<Reply, Failure> {
        let calls = message["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
        let results =
            calls.iter().map(|call| match call["function"]["arguments"]["expression"].as_str().map(evaluate) {
                Some(Ok(value)) => json!({"role": "tool", "content": shown(value)}),
                Some(Err(error)) => json!({"role": "tool", "content": format!("error: {error}"), "is_error": true}),
                None => json!({"role": "tool", "content": "error: expected the text `expression`", "is_error": true}),
            });
        Ok(Reply { messages: results.collect(), reward: None, done: calls.is_empty() })
    }
}

/// Writes integers without a fraction.
fn shown(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() <= EXACT { format!("{value:.0}") } else { value.to_string() }
}

/// Evaluates an arithmetic expression.
///
/// ```
/// assert_eq!(grpo_agents::evaluate("6 * (7 + 1) / -4"), Ok(-12.0));
/// assert!(grpo_agents::evaluate("6 *").is_err());
/// ```
///
/// # Errors
/// A message with the position of the error; division by zero; a value that is not finite.
pub fn evaluate(expression: &str) -> Result<f64, String> {
    if expression.len() > LONGEST {
        return Err(format!("expected at most {LONGEST} characters, got {}", expression.len()));
    }
    let mut reader = Reader { text: expression.as_bytes(), at: 0 };
    let value = reader.sum(0)?;
    match reader.peek() {
        None if value.is_finite() => Ok(value),
        None => Err("the value is not finite".into()),
        Some(_) => Err(reader.unexpected("an operator")),
    }
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    /// Returns the next character that is no space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    /// Takes the next character if it is one of `of`.
    fn take(&mut self, of: &[u8]) -> Option<u8> {
        let next = self.peek().filter(|next| of.contains(next))?;
        self.at += 1;
        Some(next)
    }

    fn unexpected(&mut self, expected: &str) -> String {
        let found = match self.peek() {
            Some(byte) if byte.is_ascii_graphic() => format!("`{}`", char::from(byte)),
            Some(_) => "a character that is not ASCII".to_owned(),
            None => "the end".to_owned(),
        };
        format!("expected {expected} at position {}, got {found}", self.at + 1)
    }

    fn sum(&mut self, depth: usize) -> Result<f64, String> {
        let mut value = self.product(depth)?;
        while let Some(sign) = self.take(b"+-") {
            let next = self.product(depth)?;
            value = if sign == b'+' { value + next } else { value - next };
        }
        Ok(value)
    }

    fn product(&mut self, depth: usize) -> Result<f64, String> {
        let mut value = self.factor(depth)?;
        while let Some(sign) = self.take(b"*/") {
            let next = self.factor(depth)?;
            if sign == b'/' && next == 0.0 {
                return Err("division by zero".into());
            }
            value = if sign == b'*' { value * next } else { value / next };
        }
        Ok(value)
    }

    fn factor(&mut self, depth: usize) -> Result<f64, String> {
        if depth > DEEPEST {
            return Err(format!("expected at most {DEEPEST} nested parentheses and signs"));
        }
        match self.take(b"+-(") {
            Some(b'(') => {
                let value = self.sum(depth + 1)?;
                self.take(b")").map(|_| value).ok_or_else(|| self.unexpected("`)`"))
            }
            Some(b'-') => Ok(-self.factor(depth + 1)?),
            Some(_) => self.factor(depth + 1),
            None => self.number(),
        }
    }

    fn number(&mut self) -> Result<f64, String> {
        self.peek();
        let rest = &self.text[self.at..];
        let length = rest.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').count();
        let text = std::str::from_utf8(&rest[..length]).unwrap_or_default();
        let number = text.parse().map_err(|_| self.unexpected("a number"))?;
        self.at += length;
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("2+3*4", "14")]
    #[case(" ( 2 + 3 ) * 4 ", "20")]
    #[case("123*456", "56088")]
    #[case("7/2", "3.5")]
    #[case("2 - 3 - 4", "-5")]
    #[case("8/4/2", "1")]
    #[case("--2*-(3)", "-6")]
    #[case(".5*4.0", "2")]
    #[case("99999999*99999999", "9999999800000001")]
    fn expressions_have_the_value_of_arithmetic(#[case] expression: &str, #[case] value: &str) {
        let value_of = |text: &str| evaluate(text).map(shown);
        // 9999999800000001 is above 2^53, and its nearest f64 is printed.
        let expected = if value.len() > 15 { "9999999800000000" } else { value };
        assert_eq!(value_of(expression).as_deref(), Ok(expected));
    }

    #[test]
    fn invalid_expressions_are_errors_with_their_position() {
        for (expression, words) in [
            ("2 +", "expected a number at position 4, got the end"),
            ("2 3", "expected an operator at position 3, got `3`"),
            ("(2", "expected `)` at position 3, got the end"),
            ("two", "expected a number at position 1, got `t`"),
            ("1.2.3", "expected a number at position 1"),
            ("é", "not ASCII"),
            ("1/0", "division by zero"),
            ("", "the end"),
        ] {
            let error = evaluate(expression).unwrap_err();
            assert!(error.contains(words), "{expression}: {error}");
        }
        assert!(evaluate(&"(".repeat(500)).unwrap_err().contains("nested"));
        assert!(evaluate(&"1".repeat(2000)).unwrap_err().contains("1000 characters"));
        assert!(evaluate(&format!("{0}*{0}*{0}*{0}", "9".repeat(200))).unwrap_err().contains("not finite"));
    }

    #[test]
    fn calls_are_answered_in_order_and_a_message_without_calls_ends() {
        let Start { messages, mut episode } = Calculator::default().reset(&Item::new("?"), 0).unwrap();
        assert!(messages.is_empty());
        let call =
            |expression: Value| json!({"function": {"name": "calculator", "arguments": {"expression": expression}}});
        let calls = [call(json!("6*7")), call(json!("6*")), call(json!(6))];
        let reply = episode.step(&json!({"role": "assistant", "content": "", "tool_calls": calls})).unwrap();
        assert_eq!((reply.done, reply.messages.len()), (false, 3));
        assert_eq!(reply.messages[0], json!({"role": "tool", "content": "42"}));
        assert!(reply.messages[1..].iter().all(|message| message["is_error"] == true));
        assert!(episode.step(&json!({"role": "assistant", "content": "42"})).unwrap().done);
    }
}
