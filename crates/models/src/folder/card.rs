//! The README.md of a model folder.

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
    /// let card = models::ModelCard { base_model: Some("Qwen/Qwen3-0.6B".into()), text: "# Qwen3 on GSM8K".into() };
    /// assert!(card.render().starts_with("---\nlibrary_name: transformers\nbase_model: \"Qwen/Qwen3-0.6B\"\ntags:\n- grpo\n"));
    /// ```
    pub fn render(&self) -> String {
        self.render_for("transformers")
    }

    pub(crate) fn render_for(&self, library: &str) -> String {
        // A JSON string is a valid YAML string.
        let base = self.base_model.as_ref().map(|name| format!("base_model: {}\n", Value::from(name.as_str())));
        format!(
            "---\nlibrary_name: {library}\n{}tags:\n- grpo\n---\n\n{}\n",
            base.unwrap_or_default(),
            self.text.trim_end()
        )
    }
}
