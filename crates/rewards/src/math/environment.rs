//! Environments of several lines, whose last line has the answer: `aligned`, `align*`, `gathered`, `split` and others.

use crate::patterns::regex;

const NAMES: &str = "align|aligned|alignedat|alignat|flalign|gather|gathered|split|multline|multlined|equation|eqnarray|displaymath|math";

/// Returns the name of the environment of lines that opens at the beginning of a text: `align*` of `\begin{align*}`.
pub(crate) fn name(text: &str) -> Option<&str> {
    regex!(OPENING, format!(r"^\\begin\s*\{{((?:{NAMES})\*?)\}}"));
    Some(OPENING.captures(text)?.get(1)?.as_str())
}

/// Returns the text after the last sign of a derivation in an environment: `12` of `x &= 4 \cdot 3 \\ &= 12`, and `x = 12` of `x &= 12`.
/// `None` for other texts.
pub(super) fn last_line(text: &str) -> Option<String> {
    let rows = rows(text)?;
    regex!(
        RELATION,
        r"[=<>≈≤≥]|\\(?:approx|simeq|sim|cong|equiv|leq?|geq?|neq?|to|[Rr]ightarrow|Longrightarrow|implies)\b"
    );
    regex!(EQUAL, r"^(?:[=≈]|\\(?:approx|simeq|sim|cong|equiv)\b)\s*");
    let from = rows.iter().rposition(|row| RELATION.is_match(row)).unwrap_or(rows.len() - 1);
    let line = rows[from..].join(" ");
    Some(EQUAL.replace(line.trim(), "").into_owned())
}

/// Returns the equations of an environment as a list: `x = 1, y = 2` of `x &= 1 \\ y &= 2`. `None` if a row names no value.
pub(super) fn system(text: &str) -> Option<String> {
    regex!(NAMED, r"^\s*[A-Za-z](?:_\{?\w+\}?)?\s*=(?:\\[[:alpha:]]+|[^=\\A-Za-z])*$");
    let rows = rows(text)?;
    (rows.len() > 1 && rows.iter().all(|row| NAMED.is_match(row))).then(|| rows.join(", "))
}

/// Returns the rows of an environment of lines that are not empty, without alignment marks.
fn rows(text: &str) -> Option<Vec<String>> {
    let text = text.trim();
    let name = name(text)?;
    let (_, inside) = text.split_once('}')?;
    let inside = inside.strip_suffix(&format!("\\end{{{name}}}"))?;
    regex!(MARK, r"\\(?:begin|end)\b|\\\\(?:\s*\[[^\]]*\])?|\\.|[{}&]");
    regex!(DROPPED, r"\\(?:nonumber|notag|hline)\b|\\(?:tag\*?|label)\s*\{[^{}]*\}");
    let (mut rows, mut row, mut from, mut depth, mut braces) = (Vec::new(), String::new(), 0, 0i32, 0i32);
    for mark in MARK.find_iter(inside) {
        match mark.as_str() {
            "\\begin" => depth += 1,
            "\\end" => depth -= 1,
            "{" => braces += 1,
            "}" => braces -= 1,
            "&" if depth == 0 => {
                row.push_str(&inside[from..mark.start()]);
                from = mark.end();
            }
            end if end.starts_with("\\\\") && depth == 0 && braces == 0 => {
                row.push_str(&inside[from..mark.start()]);
                rows.push(std::mem::take(&mut row));
                from = mark.end();
            }
            _ => {}
        }
        if depth < 0 {
            return None;
        }
    }
    row.push_str(&inside[from..]);
    rows.push(row);
    let clean = |row: &String| DROPPED.replace_all(row, "").trim().trim_end_matches([',', '.', ';']).to_owned();
    let rows: Vec<String> = rows.iter().map(clean).filter(|row| !row.is_empty()).collect();
    (!rows.is_empty()).then_some(rows)
}
