//! The thoughts of a model in its text, which are split off before tool calls are searched, as servers do.

use grpo_rewards::ThoughtMarks;
use serde::{Deserialize, Serialize};

/// A format of thoughts, by vLLM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningParser {
    /// No thoughts: tool calls are searched in the whole text.
    None,
    /// `<think>...</think>`, of DeepSeek R1.
    DeepseekR1,
    /// `<think>...</think>`, of DeepSeek V3.1.
    DeepseekV3,
    /// `<think>...</think>`, of DeepSeek V4.
    DeepseekV4,
    /// `<think>...</think>`, of Qwen3 and later.
    Qwen3,
    /// `<think>...</think>`, of GLM-4.5 and 4.6.
    Glm45,
    /// `<think>...</think>`, of GLM-4.7.
    Glm47,
    /// `<think>...</think>`, of Kimi K2, or `◁think▷...◁/think▷`, of Kimi-VL.
    KimiK2,
    /// `<think>...</think>`, of MiniMax M2.
    MinimaxM2,
    /// `<think>...</think>`, of Nemotron 3.
    NemotronV3,
    /// `<think>...</think>`, of OLMo 3.
    Olmo3,
    /// `<think>...</think>`, of Granite 4.
    GraniteThinkingParser,
    /// `<think>...</think>`, of Hunyuan.
    HunyuanA13b,
    /// `<think>...</think>`, of ERNIE 4.5.
    Ernie45,
    /// `<think>...</think>`, of MiMo.
    Mimo,
    /// `<think>...</think>`, of Step 3.
    Step3,
    /// `<think>...</think>`, of Step 3.5.
    Step3p5,
    /// `[THINK]...[/THINK]`, of Mistral.
    Mistral,
    /// `<|channel>thought...<channel|>`, of Gemma 4.
    Gemma4,
    /// `<seed:think>...</seed:think>`, of Seed-OSS.
    SeedOss,
    /// `<|channel|>analysis<|message|>...<|end|>`, of gpt-oss.
    OpenaiGptoss,
    /// `Here is my thought process: ... Here is my response:`, of Granite 3.
    Granite,
}

/// A text of a model, split at the end of its thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reasoned<'a> {
    /// The thoughts with their marks; empty without thoughts.
    pub(crate) thoughts: &'a str,
    /// The text behind the thoughts.
    pub(crate) answer: &'a str,
}

impl ReasoningParser {
    fn marks(self) -> &'static [ThoughtMarks] {
        match self {
            Self::None => &[],
            Self::KimiK2 => &[ThoughtMarks::THINK, ThoughtMarks::KIMI_VL],
            Self::Mistral => &[ThoughtMarks::MISTRAL],
            Self::Gemma4 => &[ThoughtMarks::GEMMA4],
            Self::SeedOss => &[ThoughtMarks::SEED_OSS],
            Self::OpenaiGptoss => &[ThoughtMarks::HARMONY],
            Self::Granite => &[ThoughtMarks::GRANITE],
            _ => &[ThoughtMarks::THINK],
        }
    }
}

/// Returns the marks of `parser`; of every format that is recognized by its marks if no parser is configured.
fn marks(parser: Option<ReasoningParser>) -> &'static [ThoughtMarks] {
    parser.map_or(ThoughtMarks::DISTINCT, ReasoningParser::marks)
}

/// Returns the texts that begin and end thoughts. Some of them are special tokens.
pub fn reasoning_tags(parser: Option<ReasoningParser>) -> impl Iterator<Item = &'static str> {
    marks(parser).iter().flat_map(|marks| [marks.start, marks.end])
}

/// Returns `true` if the prompt ends with the start of thoughts, so that the text of the model begins within them.
pub fn opens_thoughts(prompt: &str, parser: Option<ReasoningParser>) -> bool {
    let prompt = prompt.trim_end();
    marks(parser).iter().any(|marks| prompt.ends_with(marks.start))
}

/// Splits a text at the first end of thoughts. Thoughts without an end last to the first of `calls`, the tags of tool calls, as in SGLang, or
/// to the end of the text. `is_open` says that the prompt has opened them.
pub(crate) fn split<'a>(text: &'a str, parser: Option<ReasoningParser>, is_open: bool, calls: &[&str]) -> Reasoned<'a> {
    let marks = marks(parser);
    let (trimmed, skipped) = (text.trim_start(), text.len() - text.trim_start().len());
    let begun = marks.iter().find_map(|marks| {
        let prefix = if marks.start == ThoughtMarks::HARMONY.start { "<|start|>assistant" } else { "" };
        let rest = trimmed.strip_prefix(prefix).unwrap_or(trimmed);
        rest.starts_with(marks.start).then(|| (trimmed.len() - rest.len() + skipped + marks.start.len(), marks))
    });
    let end = match begun {
        Some((start, marks)) => text[start..].find(marks.end).map(|at| start + at + marks.end.len()),
        None => {
            let alone = marks.iter().filter(|marks| marks.ends_alone || text.contains(marks.start));
            alone.filter_map(|marks| Some(text.find(marks.end)? + marks.end.len())).min()
        }
    };
    let at = match end {
        Some(end) => end,
        None if begun.is_some() || is_open => calls.iter().filter_map(|tag| text.find(tag)).min().unwrap_or(text.len()),
        None => 0,
    };
    let (thoughts, answer) = text.split_at(at);
    Reasoned { thoughts, answer }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("<think>a</think>b", "<think>a</think>", "b")]
    #[case("a</think>b</think>", "a</think>", "b</think>")]
    #[case("\n[THINK]a </think>[/THINK]b", "\n[THINK]a </think>[/THINK]", "b")]
    #[case("<|channel>thought\na<channel|>b", "<|channel>thought\na<channel|>", "b")]
    #[case("<seed:think>a</seed:think>b", "<seed:think>a</seed:think>", "b")]
    #[case("◁think▷a◁/think▷b", "◁think▷a◁/think▷", "b")]
    #[case("<|channel|>analysis<|message|>a<|end|>b", "<|channel|>analysis<|message|>a<|end|>", "b")]
    #[case("<think>a", "<think>a", "")]
    #[case("<think>a <call>b", "<think>a ", "<call>b")]
    #[case("a<|end|>b", "", "a<|end|>b")]
    #[case("I write <think> here", "", "I write <think> here")]
    #[case(
        "Here is my thought process: a Here is my response: b",
        "",
        "Here is my thought process: a Here is my response: b"
    )]
    #[case("", "", "")]
    fn thoughts_are_found_by_their_marks(#[case] text: &str, #[case] thoughts: &str, #[case] answer: &str) {
        assert_eq!(split(text, None, false, &["<call>"]), Reasoned { thoughts, answer });
    }

    #[test]
    fn a_configured_parser_knows_its_own_marks_only() {
        let text = "<think>a</think>b";
        assert_eq!(split(text, Some(ReasoningParser::Mistral), false, &[]).answer, text);
        assert_eq!(split(text, Some(ReasoningParser::None), true, &[]).thoughts, text);
        let granite = "Here is my thought process: a Here is my response: b";
        assert_eq!(split(granite, Some(ReasoningParser::Granite), false, &[]).answer, " b");
    }

    #[test]
    fn thoughts_that_the_prompt_opens_need_no_start() {
        for prompt in ["<|im_start|>assistant\n<think>\n", "[THINK]", "<seed:think>"] {
            assert!(opens_thoughts(prompt, None), "{prompt}");
        }
        assert!(!opens_thoughts("<think>\n\n</think>\n\n", None) && !opens_thoughts("", None));
        assert!(!opens_thoughts("<think>", Some(ReasoningParser::Mistral)));
        assert_eq!(split("a <call>b", None, true, &["<call>"]).answer, "<call>b");
        assert_eq!(split("a", None, true, &[]).answer, "");
        assert_eq!(split("a", None, false, &[]).answer, "a");
    }
}
