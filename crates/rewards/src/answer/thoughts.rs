//! Thoughts before an answer, by the marks of model families.

/// The marks that end thoughts: Qwen and DeepSeek, Magistral, Gemma 4, Seed-OSS, Kimi, Command A, OpenThinker and others.
const ENDS: &[&str] = &[
    "</think>",
    "[/THINK]",
    "<channel|>",
    "</seed:think>",
    "◁/think▷",
    "<|END_THINKING|>",
    "<|end_of_thought|>",
    "</thinking>",
    "</thought>",
    "</reasoning>",
];

/// Returns the text after the last thought that has ended; the whole text if there is none.
pub(super) fn behind_thoughts(text: &str) -> &str {
    let text = behind_channels(text);
    let end = ENDS.iter().filter_map(|mark| text.rfind(mark).map(|at| at + mark.len())).max();
    &text[end.unwrap_or(0)..]
}

/// Returns the message in the last channel `final` of Harmony, the format of gpt-oss. Without this channel, it is the text after the last
/// message that has ended.
fn behind_channels(text: &str) -> &str {
    const MESSAGE: &str = "<|message|>";
    const END: &str = "<|end|>";
    // Without its special tokens, the text is `analysis...assistantfinal...`.
    if text.starts_with("analysis")
        && let Some((_, last)) = text.rsplit_once("assistantfinal")
    {
        return last;
    }
    let Some(channel) = text.rfind("<|channel|>") else { return text };
    let is_final = text[channel..].starts_with("<|channel|>final");
    match (is_final, text[channel..].find(MESSAGE), text.rfind(END)) {
        (true, Some(message), _) => {
            let message = &text[channel + message + MESSAGE.len()..];
            message.split("<|").next().unwrap_or(message)
        }
        (_, _, Some(end)) => &text[end + END.len()..],
        _ => text,
    }
}
