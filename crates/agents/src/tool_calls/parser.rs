//! The formats of tool calls by name.

use super::{MOST_CALLS, Parsed, ToolCall};
use super::{functions, gemma, glm, harmony, hermes, invoke, json_list, llama3_json, marked, pythonic};
use crate::reasoning::{Reasoned, ReasoningParser, split};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A format of tool calls, by vLLM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolParser {
    /// `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, of Hermes, Qwen2.5 and Qwen3.
    Hermes,
    /// `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, of Qwen3-Coder, Qwen3.5 and Nemotron 3.
    Qwen3Coder,
    /// `{"name": "f", "parameters": {"x": 1}}`, of Llama 3.1 and later.
    Llama3Json,
    /// `[f(x=1)]` as the whole message, of Llama 3.2.
    Pythonic,
    /// `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]`, or `[TOOL_CALLS]f[ARGS]{"x": 1}`, of Mistral.
    Mistral,
    /// `<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]`, of Granite 3.
    Granite,
    /// `functools[{"name": "f", "arguments": {"x": 1}}]`, of Phi-4-mini.
    Phi4MiniJson,
    /// `<function_calls>`, a call `f(x=1)` per line, `</function_calls>`, of OLMo 3.
    Olmo3,
    /// `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>`, of gpt-oss.
    Openai,
    /// `<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`, of GLM-4.5 and 4.6.
    Glm45,
    /// The format of `glm45`, of GLM-4.7.
    Glm47,
    /// `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, and the arguments in a block of code, of DeepSeek V3 and R1.
    DeepseekV3,
    /// `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>`, of DeepSeek V3.1.
    DeepseekV31,
    /// `<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter></｜DSML｜invoke>` in
    /// `<｜DSML｜function_calls>`, of DeepSeek V3.2.
    DeepseekV32,
    /// The format of `deepseek_v32` in `<｜DSML｜tool_calls>`, of DeepSeek V4.
    DeepseekV4,
    /// `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>`, of Kimi K2.
    KimiK2,
    /// `<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{"x": 1}<|tool_call:end|>`, of Solar Open.
    SolarOpen,
    /// `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]<|END_ACTION|>`, of Command R7B and A.
    CohereCommand3,
    /// `<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>`, of Apertus.
    Apertus,
    /// The format of `glm45` with `:opensource` in its tags, of Hunyuan 3.
    HyV3,
    /// `<atem:invoke name="f"><atem:parameter name="x">1</atem:parameter></atem:invoke>` in `<atem:function_calls>`, of Muse.
    MuseGlimmer,
    /// `<|tool_call>call:f{x:1}<tool_call|>`, of Gemma 4.
    Gemma4,
    /// `<start_function_call>call:f{x:1}<end_function_call>`, of FunctionGemma.
    #[serde(rename = "functiongemma")]
    FunctionGemma,
    /// `<tool_calls>{"name": "f", "arguments": {"x": 1}}</tool_calls>`, of MiniMax M1.
    Minimax,
    /// `<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>`, of MiniMax M2.
    MinimaxM2,
    /// The format of `llama3_json`, of Llama 4.
    Llama4Json,
    /// `[f(x=1)]`, which may be between `<|python_start|>` and `<|python_end|>`, of Llama 4.
    Llama4Pythonic,
    /// `<seed:tool_call><function=f><parameter=x>1</parameter></function></seed:tool_call>`, of Seed-OSS.
    SeedOss,
    /// The format of `hermes`, of Granite 4.
    Granite4,
    /// `[{"name": "f", "arguments": {"x": 1}}]` as the whole message, or in a block of code, of xLAM.
    Xlam,
    /// `<|tool_call_start|>[f(x=1)]<|tool_call_end|>`, of LFM2.
    Lfm2,
    /// The format of `hermes`, of Qwen3.
    Qwen3Json,
    /// The format of `qwen3_coder`.
    Qwen3Xml,
    /// The format of `qwen3_coder`, of MiMo.
    Mimo,
    /// The format of `qwen3_coder`, of Step 3.5.
    Step3p5,
    /// The format of `hermes`, of ERNIE 4.5.
    Ernie45,
    /// `<longcat_tool_call>{"name": "f", "arguments": {"x": 1}}</longcat_tool_call>`, of LongCat.
    Longcat,
    /// `<tool_calls>[{"name": "f", "arguments": {"x": 1}}]</tool_calls>`, of Hunyuan A13B.
    HunyuanA13b,
    /// `<tool_calls>[{"name": "f", "arguments": {"x": 1}}]</tool_calls>`, of Jamba.
    Jamba,
    /// `<|action_start|><|plugin|>{"name": "f", "parameters": {"x": 1}}<|action_end|>`, of InternLM 2.5.
    Internlm,
}

/// The tags of Qwen and of many others.
const TOOL_CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];
const SEED_TOOL_CALL: [&str; 2] = ["<seed:tool_call>", "</seed:tool_call>"];
const LONGCAT: [&str; 2] = ["<longcat_tool_call>", "</longcat_tool_call>"];
const INTERNLM: [&str; 2] = ["<|action_start|><|plugin|>", "<|action_end|>"];

impl ToolParser {
    /// The parsers that read different formats, the most specific ones first: a text of one of them may be read by a later one, too.
    pub const DISTINCT: [Self; 30] = [
        Self::Hermes,
        Self::SeedOss,
        Self::Qwen3Coder,
        Self::Mistral,
        Self::Granite,
        Self::Phi4MiniJson,
        Self::Olmo3,
        Self::Openai,
        Self::Glm45,
        Self::DeepseekV3,
        Self::DeepseekV31,
        Self::DeepseekV32,
        Self::DeepseekV4,
        Self::KimiK2,
        Self::SolarOpen,
        Self::CohereCommand3,
        Self::Apertus,
        Self::HyV3,
        Self::MuseGlimmer,
        Self::Gemma4,
        Self::FunctionGemma,
        Self::MinimaxM2,
        Self::Lfm2,
        Self::Longcat,
        Self::Internlm,
        Self::Minimax,
        Self::Xlam,
        Self::Pythonic,
        Self::Llama4Pythonic,
        Self::Llama3Json,
    ];

    /// Returns the texts that begin calls. Some of them are special tokens, with which the text must then be decoded.
    pub fn tags(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Json | Self::Granite4 | Self::Ernie45 | Self::Glm45 | Self::Glm47 => {
                &[TOOL_CALL[0]]
            }
            Self::Qwen3Coder | Self::Qwen3Xml | Self::Mimo | Self::Step3p5 => &[TOOL_CALL[0], "<function="],
            Self::SeedOss => &[SEED_TOOL_CALL[0]],
            Self::Llama3Json | Self::Llama4Json => &[llama3_json::TAG],
            Self::Pythonic | Self::Xlam => &[],
            Self::Llama4Pythonic => &[pythonic::LLAMA4[0]],
            Self::Lfm2 => &[pythonic::LFM2[0]],
            Self::Olmo3 => &["<function_calls>"],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::Granite => &[json_list::GRANITE, TOOL_CALL[0]],
            Self::Phi4MiniJson => &["functools"],
            Self::Openai => &[harmony::CHANNEL],
            Self::DeepseekV3 | Self::DeepseekV31 => &[marked::DEEPSEEK_CALLS],
            Self::DeepseekV32 => &[invoke::DEEPSEEK_V32.start],
            Self::DeepseekV4 => &[invoke::DEEPSEEK_V4.start],
            Self::KimiK2 => &[marked::KIMI_CALLS],
            Self::SolarOpen => &[marked::SOLAR_CALLS],
            Self::CohereCommand3 => &[json_list::COHERE[0]],
            Self::Apertus => &[json_list::APERTUS[0]],
            Self::HyV3 => &[glm::HY_V3],
            Self::MuseGlimmer => &[invoke::MUSE_GLIMMER.start],
            Self::Gemma4 => &[gemma::GEMMA4.start],
            Self::FunctionGemma => &[gemma::FUNCTION_GEMMA.start],
            Self::MinimaxM2 => &[invoke::MINIMAX_M2.start],
            Self::Minimax | Self::HunyuanA13b | Self::Jamba => &["<tool_calls>"],
            Self::Longcat => &[LONGCAT[0]],
            Self::Internlm => &[INTERNLM[0]],
        }
    }

    /// Finds the tool calls in a message of the assistant. `tools` are the functions as JSON schemas; formats that write arguments as texts
    /// take their types from them.
    ///
    /// ```
    /// use grpo_agents::ToolParser;
    ///
    /// let text = "I compute.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    /// let parsed = ToolParser::Hermes.parse(text, &serde_json::json!([]));
    /// assert_eq!((parsed.content.as_str(), parsed.calls.len()), ("I compute.", 1));
    /// assert_eq!(parsed.calls[0].as_ref().unwrap().name, "add");
    /// ```
    pub fn parse(self, text: &str, tools: &Value) -> Parsed {
        let mut parsed = match self {
            Self::Hermes | Self::Qwen3Json | Self::Granite4 | Self::Ernie45 => {
                hermes::parse(text, TOOL_CALL[0], TOOL_CALL[1])
            }
            Self::Longcat => hermes::parse(text, LONGCAT[0], LONGCAT[1]),
            Self::Internlm => hermes::parse(text, INTERNLM[0], INTERNLM[1]),
            Self::Minimax | Self::HunyuanA13b | Self::Jamba => hermes::parse_list(text),
            Self::Qwen3Coder | Self::Qwen3Xml | Self::Mimo | Self::Step3p5 => {
                functions::parse(text, TOOL_CALL[0], TOOL_CALL[1], tools)
            }
            Self::SeedOss => functions::parse(text, SEED_TOOL_CALL[0], SEED_TOOL_CALL[1], tools),
            Self::Llama3Json | Self::Llama4Json => llama3_json::parse(text),
            Self::Pythonic => pythonic::parse(text),
            Self::Llama4Pythonic => pythonic::parse_llama4(text),
            Self::Lfm2 => pythonic::parse_lfm2(text),
            Self::Olmo3 => pythonic::parse_olmo3(text),
            Self::Mistral => json_list::parse_mistral(text),
            Self::Granite => json_list::parse(text, self.tags()),
            Self::Phi4MiniJson => json_list::parse(text, self.tags()),
            Self::Xlam => json_list::parse_xlam(text),
            Self::Openai => harmony::parse(text),
            Self::Glm45 | Self::Glm47 => glm::parse(text, tools),
            Self::DeepseekV3 => marked::parse_deepseek_v3(text),
            Self::DeepseekV31 => marked::parse_deepseek_v31(text),
            Self::DeepseekV32 => invoke::parse(text, &invoke::DEEPSEEK_V32, tools),
            Self::DeepseekV4 => invoke::parse(text, &invoke::DEEPSEEK_V4, tools),
            Self::MinimaxM2 => invoke::parse(text, &invoke::MINIMAX_M2, tools),
            Self::KimiK2 => marked::parse_kimi_k2(text),
            Self::SolarOpen => marked::parse_solar_open(text),
            Self::CohereCommand3 => json_list::parse_cohere(text),
            Self::Apertus => json_list::parse_apertus(text),
            Self::HyV3 => glm::parse_hy_v3(text, tools),
            Self::MuseGlimmer => invoke::parse(text, &invoke::MUSE_GLIMMER, tools),
            Self::Gemma4 => gemma::parse(text, &gemma::GEMMA4, tools),
            Self::FunctionGemma => gemma::parse(text, &gemma::FUNCTION_GEMMA, tools),
        };
        parsed.calls.truncate(MOST_CALLS);
        parsed
    }

    /// Finds the tool calls behind the thoughts of a message, as servers do: a call within thoughts is none. The thoughts stay in the content,
    /// except those of `openai`. `is_open` says that the prompt ends with the start of thoughts.
    pub fn parse_reasoned(
        self,
        text: &str,
        tools: &Value,
        reasoning: Option<ReasoningParser>,
        is_open: bool,
    ) -> Parsed {
        if self == Self::Openai {
            return self.parse(text, tools);
        }
        let Reasoned { thoughts, answer } = split(text, reasoning, is_open, self.tags());
        let mut parsed = self.parse(answer, tools);
        if !thoughts.is_empty() {
            let between = if parsed.content.is_empty() { "" } else { "\n\n" };
            parsed.content = match parsed.calls.is_empty() {
                true => text.trim().to_owned(),
                false => format!("{}{between}{}", thoughts.trim(), parsed.content),
            };
        }
        parsed
    }

    /// Returns the parser of the format that a prompt with tools describes, for templates that write no calls.
    pub fn of_prompt(prompt: &str) -> Option<Self> {
        let marks =
            [(Self::Lfm2, pythonic::LFM2_TOOLS), (Self::Granite, json_list::GRANITE), (Self::Hermes, TOOL_CALL[0])];
        marks.into_iter().find(|(_, mark)| prompt.contains(mark)).map(|(parser, _)| parser)
    }

    /// Returns the parser that finds the call `of` in a message that a chat template has rendered; `None` if none does.
    pub fn of_rendered(text: &str, of: &ToolCall, tools: &Value) -> Option<Self> {
        // The template may write an id of its own.
        let reads = |parser: &Self| match &parser.parse(text, tools).calls[..] {
            [Ok(call)] => call.name == of.name && call.arguments == of.arguments,
            _ => false,
        };
        let has_tag = |parser: &Self| parser.tags().is_empty() || parser.tags().iter().any(|tag| text.contains(tag));
        let all = || Self::DISTINCT.into_iter();
        let found = all().filter(has_tag).find(reads).or_else(|| all().find(reads));
        // The template of Kimi K2 writes the id of a call in place of its name.
        found.or_else(|| text.contains(marked::KIMI_CALL).then_some(Self::KimiK2))
    }
}
