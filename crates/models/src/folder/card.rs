//! The README.md of a model folder.

use grpo_files::is_printable;
use serde_json::Value;

/// A model card: metadata for Hugging Face's pages and tools, and a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelCard {
    /// The name of the base model, such as `Qwen/Qwen2.5-0.5B-Instruct`.
    pub base_model: Option<String>,
    /// The text after the front matter, in Markdown.
    pub text: String,
}

impl ModelCard {
    /// Returns the file's content: front matter in YAML (`library_name: transformers`, `base_model`, `tags: grpo`), then the text.
    ///
    /// ```
    /// let card = grpo_models::ModelCard { base_model: Some("Qwen/Qwen3-0.6B".into()), text: "# Qwen3 on GSM8K".into() };
    /// assert!(card.render().starts_with("---\nlibrary_name: transformers\nbase_model: \"Qwen/Qwen3-0.6B\"\ntags:\n- grpo\n"));
    /// ```
    pub fn render(&self) -> String {
        self.render_for("transformers")
    }

    pub(crate) fn render_for(&self, library: &str) -> String {
        let base = self.base_model.as_ref().map(|name| {
            // A JSON string is a valid YAML string.
            let quoted = Value::from(name.as_str()).to_string();
            let escaped = |c: char| if is_printable(c) { c.to_string() } else { format!("\\U{:08x}", u32::from(c)) };
            format!("base_model: {}\n", quoted.chars().map(escaped).collect::<String>())
        });
        format!(
            "---\nlibrary_name: {library}\n{}tags:\n- grpo\n---\n\n{}\n",
            base.unwrap_or_default(),
            self.text.trim_end()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_and_control_characters_of_a_base_model_are_escaped_in_yaml() {
        let base_model = Some("a\u{1b}\n---\n\u{202e}\u{e0041}\"".to_owned());
        let card = ModelCard { base_model, text: "x".into() }.render();
        let expected = "base_model: \"a\\u001b\\n---\\n\\U0000202e\\U000e0041\\\"\"\n";
        assert!(card.contains(expected), "{card}");
    }
}
