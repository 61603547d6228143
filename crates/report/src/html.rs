//! An HTML builder that escapes all text that is not part of the program.

use grpo_files::is_printable;

#[derive(Debug, Default)]
pub(crate) struct Html(String);

impl Html {
    /// Adds markup, which is a constant of this program.
    pub(crate) fn raw(&mut self, markup: &'static str) -> &mut Self {
        self.0.push_str(markup);
        self
    }

    /// Adds escaped text between elements or in a double-quoted attribute.
    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        for c in text.chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                '\n' | '\t' => self.0.push(c),
                c => self.0.push(if is_shown(c) { c } else { char::REPLACEMENT_CHARACTER }),
            }
        }
        self
    }

    /// Adds a displayable value as escaped text.
    pub(crate) fn show(&mut self, value: impl std::fmt::Display) -> &mut Self {
        self.text(&value.to_string())
    }

    /// Adds an element `tag` that contains only text.
    pub(crate) fn element(&mut self, tag: &'static str, text: &str) -> &mut Self {
        self.raw("<").raw(tag).raw(">").text(text).raw("</").raw(tag).raw(">")
    }

    /// Adds JSON as the contents of a `script` element, escaped so that it cannot end the element.
    pub(crate) fn json(&mut self, json: &serde_json::Value) -> &mut Self {
        for c in json.to_string().chars() {
            match c {
                '<' => self.0.push_str("\\u003c"),
                '>' => self.0.push_str("\\u003e"),
                '&' => self.0.push_str("\\u0026"),
                // These characters only occur in JSON strings, where an escape is equivalent.
                c if !is_shown(c) => {
                    c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| self.0.push_str(&format!("\\u{unit:04x}")));
                }
                c => self.0.push(c),
            }
        }
        self
    }

    pub(crate) fn into_string(self) -> String {
        self.0
    }
}

/// Returns `true` if a character may appear unescaped. HTML cannot represent control characters, and marks that change the direction of
/// writing would affect later text.
pub(crate) fn is_shown(c: char) -> bool {
    is_printable(c) && !is_noncharacter(c)
}

fn is_noncharacter(c: char) -> bool {
    matches!(c, '\u{fdd0}'..='\u{fdef}') || c as u32 & 0xfffe == 0xfffe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        let mut html = Html::default();
        html.raw("<p title=\"")
            .text("\" onload='x'")
            .raw("\">")
            .text("<script>&\0\u{1b}[0m\u{ffff}\u{202e}")
            .raw("</p>");
        let expected =
            "<p title=\"&quot; onload=&#39;x&#39;\">&lt;script&gt;&amp;\u{fffd}\u{fffd}[0m\u{fffd}\u{fffd}</p>";
        assert_eq!(html.into_string(), expected);
    }

    #[test]
    fn embedded_json_cannot_end_its_script_and_round_trips() {
        let value = serde_json::json!({ "</script><!--": "]]> & <script>\u{2028}\u{ffff}\u{1fffe}\u{85}\0\u{202e}\u{2066}\u{200f}\u{e0041}\u{61c}" });
        let mut html = Html::default();
        html.json(&value);
        let text = html.into_string();
        assert!(!text.contains(['<', '>', '&']) && text.chars().all(is_shown), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
