//! Finds letters of multiple choice.

use crate::patterns::regex;
use regex::Regex;
use std::sync::LazyLock;

regex!(
    WRAPPING,
    r"\\(?:boxed|text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|bf|rm|left|right|quad|qquad)\b|\\[ ,;:!()]|[$*{}`\u{201c}\u{201d}\x22'~\u{a0}]"
);

/// Returns the letter that a whole text is, in upper case: `c`, `**c**`, `\text{c}`. Next to other text, a lower-case letter is a variable.
pub(super) fn lone_letter(text: &str) -> Option<char> {
    let bare = WRAPPING.replace_all(text, " ");
    let mut letters = bare.trim().trim_end_matches('.').trim_end().chars();
    letters.next().filter(|c| c.is_ascii_alphabetic() && letters.next().is_none()).map(|c| c.to_ascii_uppercase())
}

/// Returns the letter that a text is or starts with as a label, in upper case: `E`, `(E)`, `E.`, `\textbf{(B)}\ 12`, `E: a longer text`,
/// `E) 12 cm`. `None` for other texts that start with a letter: `E = mc^2`, `A \cup B`, `A dog`.
pub(crate) fn label(text: &str) -> Option<char> {
    regex!(
        LABEL,
        r"^(?:(?i:option|choice|answer)\s+)?(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])\s*(?:[).:](?:\s|$)|$|\s[-\u{2013}\u{2014}]\s+\w)|([a-z])(?:[).]|$))\s*\.?"
    );
    let bare = WRAPPING.replace_all(text, " ");
    let bare = bare.trim();
    let found = LABEL.captures(bare)?;
    let letter = found.iter().skip(1).flatten().next()?.as_str().chars().next()?;
    // `(A) + 1` is a formula.
    let rest = bare[found.get(0)?.end()..].trim_start();
    let is_formula = rest.starts_with(['=', '+', '*', '/', '^', '_', '\\', '<', '>', '|', '(', ',']);
    // A single lower-case letter is a variable.
    let is_variable = found.get(3).is_some() && bare.chars().count() == 1;
    (!is_formula && !is_variable).then_some(letter.to_ascii_uppercase())
}

/// Returns the letter that a sentence chooses: `The answer is (E)`, `Option B`, `D is the correct choice`, or a last line that is a letter.
pub(super) fn chosen(text: &str) -> Option<char> {
    // An optional `**`, `\text{` or the like, then the letter: upper case, or any case in brackets.
    const LETTER: &str = r"[\s*_$\x22'\u{201c}`{:=>-]*(?:\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{\s*)*(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])(?:\b|_|[^\x00-\x7f])|([a-z])\**[.)]?\**\s*(?:\n|$))";
    static SAID: LazyLock<Vec<Regex>> = LazyLock::new(|| {
        let kind = r"(?:(?:option|choice|letter|alternative|answer|statement)s?\b\s*)";
        let verb = r"(?:(?:is|are|was|be|must be|will be|should be|would be|therefore|thus|clearly|indeed)\b\s*)";
        let of = r"(?:\s+(?:to|for|of|among)\b[^.:\n]{0,100}?)?";
        let patterns = [
            format!(r"(?i:\b(?:answers?|ans)\b{of}[\s*_:.=]*{kind}?[\s*_:.=]*{verb}*[\s:*]*{kind}?){LETTER}"),
            format!(
                r"(?i:\b(?:correct|right|best)\s+(?:one|option|choice|letter|alternative|statement)s?\b[\s*_:]*{verb}*[\s:*]*{kind}?){LETTER}"
            ),
            format!(
                r"{LETTER}(?i:\**\s*(?:is|must be)\s+(?:(?:therefore|thus|clearly|indeed|also)\s+)?(?:(?:the|our)\s+)?(?:only\s+)?(?:(?:correct|right|best|true|answer|choice)\b))"
            ),
            format!(r"(?i:\b(?:option|choice|choose|pick|select|chose|go with)\b[\s*_:]*{verb}*[\s:*]*{kind}?){LETTER}"),
            // Chinese: `故选：B`, `正确答案是 C`, `A选项正确`.
            format!(r"(?:^|[^不非未])选(?:项|择)?(?:是|为|出|应为)?\s*:?{LETTER}"),
            r"(?i:\b(?:option|choice)\s+)\(?([a-z])\)?\s+(?i:is\s+(?:(?:the|therefore|thus|also)\s+)*(?:correct|right|true|answer)\b)".to_owned(),
            format!(r"(?:^|\s)答\s*:{LETTER}"),
            format!(
                r"(?i:respuesta|réponse|antwort|resposta|risposta|ответ|đáp án|cevap|الإجابة|الجواب|جواب|پاسخ|उत्तर|答え|正解|정답|답)[^.:\n]{{0,30}}?(?:\s(?i:es|est|ist|é|è|هي|هو)|は|が|은|는|이|:)\s*{LETTER}"
            ),
            format!(r"答案[】\]]?(?:应该|应|就)?(?:是|为|选)?\s*:?\s*(?:选项)?{LETTER}"),
            format!(r"正确(?:的)?(?:选项|答案|说法|结论|一项)?(?:应该|应|就)?(?:是|为)?\s*:?{LETTER}"),
            r"([A-Z])\)?(?:选项|项)?(?:是|为)?\s*(?:正确|对的|符合)".to_owned(),
        ];
        patterns.map(|pattern| Regex::new(&pattern).expect("the pattern is a constant")).into()
    });
    regex!(
        REFUSED,
        r"(?i)^[)\]}\s*.,:$]*(?:(?:is|are|was|can|could|must|does|do)\s*)?(?:not\b|cannot\b|n['\u{2019}]t\b|isn|can['\u{2019}]t|wrong\b|incorrect\b|false\b|impossible\b|out\b|(?:选项|项)?\s*(?:是)?(?:不|错|有误|非|没))"
    );
    let chosen = SAID.iter().find_map(|said| {
        let letters = said.captures_iter(text).filter_map(|found| {
            let letter = found.iter().skip(1).flatten().next()?;
            let after = &text[letter.end()..];
            let is_chosen = !REFUSED.is_match(after) && !goes_on(letter.as_str(), after);
            is_chosen.then(|| letter.as_str().chars().next()).flatten()
        });
        letters.last()
    });
    // `D`, `Thus A`, `E)`, `= 3 = C` and `Therefore the second. **D**` as the last line.
    regex!(LAST, r"^(?:.*(?:[=>→⇒]|\*\*|(?i:thus|hence|therefore|so|is|be|it['’]s))[\s,:]*)?\(?([A-Z])\)?\.?\**\.?$");
    let last = || {
        let line = text.trim_end().lines().next_back()?.trim().trim_matches('*');
        let line = Some(line).filter(|line| line.len() <= 200)?;
        let letter = || LAST.captures(line)?.get(1)?.as_str().chars().next();
        letter().or_else(|| label(line)).or_else(|| lone_letter(line))
    };
    chosen.or_else(last).map(|letter| letter.to_ascii_uppercase())
}

/// Returns `true` if the letter starts something else: `E = mc^2`, `A dog`, `B's`.
fn goes_on(letter: &str, after: &str) -> bool {
    regex!(WORD, r"^\s+([a-z]+)");
    const BEHIND: &[&str] =
        &["because", "since", "as", "which", "and", "or", "but", "so", "for", "is", "with", "by", "in"];
    let operator =
        after.trim_start().starts_with(['=', '+', '^', '_', '<', '>', '/', '|']) || after.starts_with(['(', '\'', '-']);
    // `A` and `I` are also words.
    let word = WORD.captures(after).is_some_and(|word| !BEHIND.contains(&&word[1]));
    operator || ["A", "I"].contains(&letter) && word
}
