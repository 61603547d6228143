//! Parses tokens to one expression, by recursive descent.

use super::expr::{Expr, Fraction};
use super::lex::Token;
use super::parse::{closing, is_command, is_symbol, split};
use num_traits::One;

/// The largest number of levels of an expression, and of calls of [`Parser::base`] within each other. Without a bound, the recursion over
/// `9^9^9^...` in an unoptimised build exceeds the 2 MiB of a thread's stack.
const MAX_LEVELS: usize = 100;

/// Parses all of `tokens` as one expression; `None` for more than [`MAX_LEVELS`] levels, too.
pub(super) fn expression(tokens: &[Token]) -> Option<Expr> {
    within(tokens, 0)
}

/// Parses all of `tokens`, which are inside of `level` levels.
fn within(tokens: &[Token], level: usize) -> Option<Expr> {
    // The operands of `a \over b` and `n \choose k` are all tokens before and after the command.
    for (command, make) in [("over", Expr::Quotient as fn(_, _) -> _), ("choose", Expr::Binomial)] {
        if let [(_, a), (_, b)] = split(tokens, |token| is_command(Some(token), command))[..] {
            return Some(make(Box::new(within(a, level)?), Box::new(within(b, level)?)));
        }
    }
    let mut parser = Parser { tokens, at: 0, level };
    let expr = parser.sum()?;
    (parser.at == tokens.len() && !expr.is_deeper_than(MAX_LEVELS)).then_some(expr)
}

struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    /// The number of factors around the one that is being parsed.
    level: usize,
}

/// A kind of command that begins a factor.
#[derive(PartialEq)]
enum Kind {
    Function,
    /// Turns the letters after it into one name.
    Accent,
    Greek,
    Other,
}

impl Kind {
    fn of(command: &str) -> Option<Self> {
        match command {
            "sin" | "cos" | "tan" | "cot" | "sec" | "csc" | "sinh" | "cosh" | "tanh" | "arcsin" | "arccos"
            | "arctan" | "ln" | "log" | "lg" | "exp" | "floor" | "ceil" => Some(Self::Function),
            "overline" | "bar" | "vec" | "hat" | "widehat" | "tilde" | "overrightarrow" | "overleftarrow"
            | "underline" | "angle" | "measuredangle" | "triangle" | "Delta" | "arc" | "overset" | "widetilde"
            | "mathring" => Some(Self::Accent),
            "pi" | "frac" | "sqrt" | "binom" | "infty" | "imath" | "lfloor" | "lceil" => Some(Self::Other),
            _ => match command.to_ascii_lowercase().as_str() {
                "alpha" | "beta" | "gamma" | "delta" | "epsilon" | "varepsilon" | "zeta" | "eta" | "theta"
                | "kappa" | "lambda" | "mu" | "nu" | "xi" | "rho" | "sigma" | "tau" | "phi" | "varphi" | "chi"
                | "psi" | "omega" | "ell" | "hbar" => Some(Self::Greek),
                _ => None,
            },
        }
    }
}

fn is_function(command: &str) -> bool {
    Kind::of(command) == Some(Kind::Function)
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.at)
    }

    fn take_symbol(&mut self, symbol: char) -> bool {
        let found = is_symbol(self.peek(), symbol);
        self.at += usize::from(found);
        found
    }

    fn sum(&mut self) -> Option<Expr> {
        let mut terms = Vec::new();
        loop {
            let mut negative = false;
            let mut signed = terms.is_empty();
            while let Some(Token::Symbol(sign @ ('+' | '-'))) = self.peek() {
                negative ^= *sign == '-';
                signed = true;
                self.at += 1;
            }
            if !signed {
                break;
            }
            let term = self.product()?;
            terms.push(if negative { Expr::Negative(Box::new(term)) } else { term });
        }
        if terms.len() == 1 { terms.pop() } else { Some(Expr::Sum(terms)) }
    }

    fn product(&mut self) -> Option<Expr> {
        let mut product = match self.mixed_number() {
            // `12\frac{1}{2}\%`
            Some(number) if self.take_symbol('%') => Expr::Percent(Box::new(number)),
            Some(number) => number,
            None => self.power()?,
        };
        loop {
            match self.peek() {
                Some(Token::Symbol('*')) => self.at += 1,
                Some(Token::Command(name)) if ["cdot", "times", "ast"].contains(&name.as_str()) => self.at += 1,
                token if is_command(token, "div") || matches!(token, Some(Token::Symbol('/' | ':'))) => {
                    self.at += 1;
                    product = Expr::Quotient(Box::new(product), Box::new(self.signed_power()?));
                    continue;
                }
                Some(token) if begins_factor(token) => {
                    // Adjacent numbers are not a product.
                    if matches!((token, &self.tokens[self.at - 1]), (Token::Number(_), Token::Number(_))) {
                        return None;
                    }
                }
                _ => return Some(product),
            }
            let factor = self.signed_power()?;
            product = match product {
                Expr::Product(mut all) => {
                    all.push(factor);
                    Expr::Product(all)
                }
                first => Expr::Product(vec![first, factor]),
            };
        }
    }

    /// Parses `2\frac{1}{2}` or `2 1/2`, which are sums.
    fn mixed_number(&mut self) -> Option<Expr> {
        let rest = self.tokens.get(self.at..)?;
        let Some(Token::Number(whole)) = rest.first() else { return None };
        if whole.contains(['.', 'e', 'E']) {
            return None;
        }
        let is_integer = |tokens: &[Token]| matches!(tokens, [Token::Number(n)] | [Token::Symbol('{'), Token::Number(n), Token::Symbol('}')] if !n.contains('.'));
        let whole = Expr::number(whole)?;
        match rest {
            [_, Token::Number(a), Token::Symbol('/'), Token::Number(b), ..] => {
                self.at += 4;
                let fraction = Expr::Quotient(Box::new(Expr::number(a)?), Box::new(Expr::number(b)?));
                Some(Expr::Sum(vec![whole, fraction]))
            }
            [_, Token::Command(frac), rest @ ..] if frac == "frac" => {
                let argument = |tokens: &[Token]| if is_symbol(tokens.first(), '{') { 3 } else { 1 };
                let first = argument(rest);
                let second = argument(rest.get(first..)?);
                let ok = is_integer(rest.get(..first)?) && is_integer(rest.get(first..first + second)?);
                if !ok {
                    return None;
                }
                self.at += 1;
                let fraction = self.base()?;
                Some(Expr::Sum(vec![whole, fraction]))
            }
            _ => None,
        }
    }

    fn signed_power(&mut self) -> Option<Expr> {
        let mut signs = 0;
        while self.take_symbol('-') {
            signs += 1;
        }
        self.take_symbol('+');
        let value = self.power()?;
        Some((0..signs).fold(value, |value, _| Expr::Negative(Box::new(value))))
    }

    fn power(&mut self) -> Option<Expr> {
        let mut value = self.base()?;
        loop {
            if self.take_symbol('^') {
                let exponent = self.argument()?;
                value = Expr::Power(Box::new(value), Box::new(exponent));
            } else if self.take_symbol('!') {
                value = Expr::Factorial(Box::new(value));
            } else if self.take_symbol('%') {
                // `25\%%` is 25 %. A long chain of divisions would take minutes.
                if !matches!(value, Expr::Percent(_)) {
                    value = Expr::Percent(Box::new(value));
                }
            } else {
                return Some(value);
            }
        }
    }

    /// Parses an argument of a command, or an exponent: braces, or one token with its sign.
    fn argument(&mut self) -> Option<Expr> {
        if is_symbol(self.peek(), '{') {
            return self.group();
        }
        if self.take_symbol('-') {
            return self.base().map(|value| Expr::Negative(Box::new(value)));
        }
        self.base()
    }

    /// Parses the contents of the brackets that open here.
    fn group(&mut self) -> Option<Expr> {
        let end = closing(self.tokens, self.at)?;
        let inside = &self.tokens[self.at + 1..end];
        self.at = end + 1;
        within(inside, self.level)
    }

    fn base(&mut self) -> Option<Expr> {
        if self.level == MAX_LEVELS {
            return None;
        }
        self.level += 1;
        let value = self.one_base();
        self.level -= 1;
        value
    }

    fn one_base(&mut self) -> Option<Expr> {
        let token = self.peek()?;
        match token {
            Token::Number(text) => {
                self.at += 1;
                // The base of a numeral, as in `1011_2`, is ignored, because answers often omit it.
                self.subscript();
                Expr::number(text)
            }
            Token::Letter(letter) => {
                self.at += 1;
                let subscript = self.subscript();
                Some(match letter {
                    'i' if subscript.is_empty() => Expr::Imaginary,
                    'e' if subscript.is_empty() => Expr::Euler,
                    _ => Expr::Variable(format!("{letter}{subscript}")),
                })
            }
            Token::Symbol('(' | '[' | '{') => self.group(),
            Token::Symbol('|') => {
                let rest = &self.tokens[self.at + 1..];
                let length = split(rest, |token| *token == Token::Symbol('|')).first()?.1.len();
                let inside = within(rest.get(..length).filter(|_| length < rest.len())?, self.level)?;
                self.at += length + 2;
                Some(Expr::Function("abs".into(), Box::new(inside)))
            }
            Token::Command(name) if name == "lfloor" || name == "lceil" => {
                let function = if name == "lfloor" { "floor" } else { "ceil" };
                Some(Expr::Function(function.into(), Box::new(self.group()?)))
            }
            Token::Command(name) => {
                self.at += 1;
                self.command(name)
            }
            Token::Symbol(_) | Token::Words(_) => None,
        }
    }

    fn command(&mut self, name: &str) -> Option<Expr> {
        match name {
            "pi" => Some(Expr::Pi),
            "infty" | "inf" | "infinity" => Some(Expr::Infinity),
            "imath" => Some(Expr::Imaginary),
            // A line, an arc or an angle is named by the letters after it.
            _ if Kind::of(name) == Some(Kind::Accent) => {
                let from = self.at;
                self.at = match is_symbol(self.peek(), '{') {
                    true => closing(self.tokens, self.at)? + 1,
                    false => {
                        from + self.tokens[from..].iter().take_while(|token| matches!(token, Token::Letter(_))).count()
                    }
                };
                let letters = text(&self.tokens[from..self.at]);
                (!letters.is_empty()).then(|| Expr::Variable(format!("{name} {letters}")))
            }
            "frac" => Some(Expr::Quotient(Box::new(self.argument()?), Box::new(self.argument()?))),
            "binom" => Some(Expr::Binomial(Box::new(self.argument()?), Box::new(self.argument()?))),
            "sqrt" => {
                let degree = match is_symbol(self.peek(), '[') {
                    true => self.group()?,
                    false => Expr::integer(2),
                };
                let inverse = Expr::Quotient(Box::new(Expr::integer(1)), Box::new(degree));
                let radicand = self.argument()?;
                Some(Expr::Power(Box::new(radicand), Box::new(inverse)))
            }
            _ if is_function(name) => {
                let base = if name == "log" && self.take_symbol('_') { Some(self.argument()?) } else { None };
                let mut exponent = if self.take_symbol('^') { Some(self.argument()?) } else { None };
                let argument = Box::new(self.function_argument()?);
                let is_inverse = |exponent: &Expr| exponent.exact().is_some_and(|value| value == -Fraction::one());
                let arc = format!("arc{name}");
                let value = match base {
                    // `\sin^{-1} x`
                    _ if is_function(&arc) && exponent.as_ref().is_some_and(is_inverse) => {
                        exponent = None;
                        Expr::Function(arc, argument)
                    }
                    Some(base) => Expr::Logarithm(Box::new(base), argument),
                    None => Expr::Function(name.to_owned(), argument),
                };
                Some(match exponent {
                    Some(exponent) => Expr::Power(Box::new(value), Box::new(exponent)),
                    None => value,
                })
            }
            // A Greek letter or another symbol.
            _ if Kind::of(name) == Some(Kind::Greek) => {
                let subscript = self.subscript();
                Some(Expr::Variable(format!("{name}{subscript}")))
            }
            _ => None,
        }
    }

    /// Parses an argument in brackets, or the following product: `\sin 2x`.
    fn function_argument(&mut self) -> Option<Expr> {
        if let Some(Token::Symbol('(' | '[' | '{')) = self.peek() {
            return self.power();
        }
        let mut factors = vec![self.signed_power()?];
        while let Some(token) = self.peek() {
            let is_function = matches!(token, Token::Command(name) if is_function(name));
            if !begins_factor(token) || is_function {
                break;
            }
            factors.push(self.power()?);
        }
        if factors.len() == 1 { factors.pop() } else { Some(Expr::Product(factors)) }
    }

    /// Parses the subscript of a variable, which becomes a part of its name.
    fn subscript(&mut self) -> String {
        if !self.take_symbol('_') {
            return String::new();
        }
        let from = self.at;
        self.at = match is_symbol(self.peek(), '{') {
            true => closing(self.tokens, self.at).map_or(self.tokens.len(), |end| end + 1),
            false => (self.at + 1).min(self.tokens.len()),
        };
        format!("_{}", text(&self.tokens[from..self.at]))
    }
}

/// Returns the letters and digits of tokens, without punctuation.
pub(super) fn text(tokens: &[Token]) -> String {
    let text = |token: &Token| match token {
        Token::Number(text) | Token::Command(text) | Token::Words(text) => text.clone(),
        Token::Letter(letter) => letter.to_string(),
        Token::Symbol(_) => String::new(),
    };
    tokens.iter().map(text).collect()
}

fn begins_factor(token: &Token) -> bool {
    match token {
        Token::Number(_) | Token::Letter(_) | Token::Symbol('(' | '[' | '{' | '|') => true,
        Token::Command(name) => Kind::of(name).is_some(),
        _ => false,
    }
}
