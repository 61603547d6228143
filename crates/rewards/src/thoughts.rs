//! Thoughts before an answer, by the marks of model families.

/// The marks at the start and at the end of a model's thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThoughtMarks {
    /// The text that begins thoughts.
    pub start: &'static str,
    /// The text that ends thoughts.
    pub end: &'static str,
    /// `true` if the end alone shows that thoughts came before it: the prompt may have opened them.
    pub ends_alone: bool,
}

impl ThoughtMarks {
    /// The marks of DeepSeek, Qwen, GLM, Kimi K2 and most other families.
    pub const THINK: Self = Self::new("<think>", "</think>");
    /// The marks of Kimi-VL.
    pub const KIMI_VL: Self = Self::new("◁think▷", "◁/think▷");
    /// The marks of Magistral and Mistral Small 4.
    pub const MISTRAL: Self = Self::new("[THINK]", "[/THINK]");
    /// The marks of Gemma 4.
    pub const GEMMA4: Self = Self::new("<|channel>", "<channel|>");
    /// The marks of Seed-OSS.
    pub const SEED_OSS: Self = Self::new("<seed:think>", "</seed:think>");
    /// The marks of gpt-oss, whose format is Harmony.
    pub const HARMONY: Self = Self { start: "<|channel|>analysis<|message|>", end: "<|end|>", ends_alone: false };
    /// The marks of Granite 3.
    pub const GRANITE: Self =
        Self { start: "Here is my thought process:", end: "Here is my response:", ends_alone: false };
    /// The marks that texts have for thoughts only.
    pub const DISTINCT: &'static [Self] =
        &[Self::THINK, Self::KIMI_VL, Self::MISTRAL, Self::GEMMA4, Self::SEED_OSS, Self::HARMONY];

    const fn new(start: &'static str, end: &'static str) -> Self {
        Self { start, end, ends_alone: true }
    }
}

/// Marks of thoughts in texts without tool calls: Command A, OpenThinker, MedGemma, and tags that prompts ask for.
const OTHERS: &[ThoughtMarks] = &[
    ThoughtMarks::new("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarks::new("<|begin_of_thought|>", "<|end_of_thought|>"),
    ThoughtMarks::new("<unused94>", "<unused95>"),
    ThoughtMarks::new("<thinking>", "</thinking>"),
    ThoughtMarks::new("<thought>", "</thought>"),
    ThoughtMarks::new("<reasoning>", "</reasoning>"),
    ThoughtMarks::GRANITE,
    ThoughtMarks { start: "Here's my thought process:", end: "Here's my response:", ends_alone: false },
];

/// Returns the text behind the last thought, without a thought that begins a line or a sentence and does not end; the whole text without thoughts. If
/// the prompt has opened thoughts, `is_open`, a text without an end is a thought.
pub(crate) fn behind_thoughts(text: &str, is_open: bool) -> &str {
    let Some(text) = behind_channels(text) else { return "" };
    let marks = || ThoughtMarks::DISTINCT.iter().chain(OTHERS).filter(|marks| **marks != ThoughtMarks::HARMONY);
    let ends = marks().filter(|marks| marks.ends_alone || text.trim_start().starts_with(marks.start));
    let end = ends.filter_map(|marks| text.rfind(marks.end).map(|at| at + marks.end.len())).max();
    if is_open && end.is_none() {
        return "";
    }
    let rest = &text[end.unwrap_or(0)..];
    // A sentence may name the mark.
    let begins_sentence = |at: &usize| {
        let before = rest[..*at].trim_end_matches([' ', '\t']);
        before.is_empty() || before.ends_with(['\n', '.', '!', '?', ':', '。', '！', '？', '：'])
    };
    let starts = marks().filter_map(|marks| rest.match_indices(marks.start).map(|(at, _)| at).find(begins_sentence));
    starts.min().map_or(rest, |start| &rest[..start])
}

/// Returns the message in the last channel `final` of Harmony, or the text behind the last message if it has no channel; a text without
/// channels as it is. `None` if the text has other channels only.
fn behind_channels(text: &str) -> Option<&str> {
    const MESSAGE: &str = "<|message|>";
    // Without special tokens, the text is `analysis...assistantfinal...`.
    if let Some(rest) = text.trim_start().strip_prefix("analysis")
        && rest.starts_with(|c: char| c.is_alphanumeric() || c == '\\')
    {
        return rest.rsplit_once("assistantfinal").map(|(_, last)| last);
    }
    let Some(channel) = text.rfind("<|channel|>") else { return Some(text) };
    if let Some((_, last)) = text.rsplit_once("<|channel|>final") {
        let message = last.split_once(MESSAGE).map_or(last, |(_, message)| message);
        return Some(message.split("<|").next().unwrap_or(message));
    }
    let end = ThoughtMarks::HARMONY.end;
    text[channel..].rfind(end).map(|at| &text[channel + at + end.len()..])
}
