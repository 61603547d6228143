//! Environments of several lines, whose last line has the answer: `aligned`, `align*`, `gathered`, `split` and others.

use crate::patterns::regex;

const NAMES: &str = "align|aligned|alignedat|alignat|flalign|gather|gathered|split|multline|multlined|equation|eqnarray|displaymath|math|array";

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
    let last = rows.iter().rposition(|row| RELATION.is_match(row));
    // An array without a relation is a table or a matrix.
    if last.is_none() && name(text.trim()) == Some("array") {
        return None;
    }
    let from = last.unwrap_or(rows.len() - 1);
    let line = rows[from..].join(" ");
    Some(EQUAL.replace(line.trim(), "").into_owned())
}

/// Returns the equations at the end of an environment as a list: `x = 1, y = 2` of `x &= 1 \\ y &= 2`. `None` if fewer than two rows at the end
/// name values.
pub(super) fn system(text: &str) -> Option<String> {
    regex!(NAMED, r"^\s*[A-Za-z](?:_\{?\w+\}?)?\s*=(?:\\[[:alpha:]]+|[^=\\A-Za-z])*$");
    let rows = rows(text)?;
    let first = rows.iter().rposition(|row| !NAMED.is_match(row)).map_or(0, |other| other + 1);
    (rows.len() - first > 1).then(|| rows[first..].join(", "))
}

/// Returns the rows of an environment of lines that are not empty, without alignment marks.
fn rows(text: &str) -> Option<Vec<String>> {
    let text = text.trim();
    let name = name(text)?;
    let (_, inside) = text.split_once('}')?;
    let inside = inside.strip_suffix(&format!("\\end{{{name}}}"))?;
    // The columns of `\begin{array}{rl}`.
    regex!(COLUMNS, r"^\s*(?:\[[tbc]\]\s*)?\{[rlc|@{}!\s]*\}");
    let inside =
        if name == "array" { &inside[COLUMNS.find(inside).map_or(0, |columns| columns.end())..] } else { inside };
    regex!(MARK, r"\\(?:begin|end)\b|\\\\(?:\s*\[[^\]]*\])?|\\.|[{}&]");
    regex!(
        DROPPED,
        r"\\(?:nonumber|notag|hline|checkmark|qed|blacksquare|square|Box)\b|[✓✔]|\\(?:tag\*?|label)\s*\{[^{}]*\}"
    );
    // The reason for a row: `\text{ (since } x > 0)`.
    regex!(
        REASON,
        r"(?:\\(?:quad|qquad|hspace\{[^{}]*\})|\\[ ,;]|\s|\()*\\(?:text|mbox|textrm)\s*\{\s*[(\[]?\s*(?i:since|because|as|by|where|using|from|for)\b.*$"
    );
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
    let clean = |row: &String| {
        REASON
            .replace(&DROPPED.replace_all(row, ""), "")
            .replace("\\quad", " ")
            .trim()
            .trim_end_matches([',', '.', ';'])
            .to_owned()
    };
    let rows: Vec<String> = rows.iter().map(clean).filter(|row| !row.is_empty()).collect();
    (!rows.is_empty()).then_some(rows)
}
