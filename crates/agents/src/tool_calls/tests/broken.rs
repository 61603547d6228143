//! Calls that cannot be read.

use super::*;

#[rstest]
#[case(ToolParser::Hermes, "<tool_call>{\"name\": \"f\"", "no JSON")]
#[case(ToolParser::Hermes, "<tool_call>[1]</tool_call>", "`name` and `arguments`")]
#[case(ToolParser::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"[1]\"}</tool_call>", "no JSON object")]
#[case(ToolParser::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": 1}</tool_call>", "`arguments`, an object")]
#[case(ToolParser::Openai, "<|channel|>commentary to=functions.f<|message|>{", "no JSON object")]
#[case(ToolParser::Glm45, "<tool_call>f<arg_key>n</arg_key><arg_value>1", "<arg_value>VALUE</arg_value>")]
#[case(ToolParser::Glm45, "<tool_call>{\"name\": \"f\"}</tool_call>", "the name of a function")]
#[case(
    ToolParser::DeepseekV3,
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f{}",
    "a block of JSON"
)]
#[case(ToolParser::DeepseekV31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{}", "<｜tool▁sep｜>")]
#[case(ToolParser::DeepseekV31, "<｜tool▁calls▁begin｜>f", "<｜tool▁call▁begin｜>")]
#[case(ToolParser::DeepseekV32, "<｜DSML｜function_calls>f", "<｜DSML｜invoke name=")]
#[case(
    ToolParser::KimiK2,
    "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}",
    "NAME:INDEX"
)]
#[case(ToolParser::Gemma4, "<|tool_call>call:f{n:<|\"|>a}<tool_call|>", "<|\"|>")]
#[case(ToolParser::Gemma4, "<|tool_call>call:f{n}<tool_call|>", "`KEY:`")]
#[case(ToolParser::Gemma4, "<|tool_call>f<tool_call|>", "call:NAME")]
#[case(ToolParser::Gemma4, "<|tool_call>call:f{n:}<tool_call|>", "a value")]
#[case(ToolParser::MinimaxM2, "<minimax:tool_call><invoke name=\"f\"><parameter name=\"n\">1", "VALUE</parameter>")]
#[case(ToolParser::MinimaxM2, "<minimax:tool_call><invoke name=\"f></invoke>", "a name in quotes")]
#[case(ToolParser::SeedOss, "<seed:tool_call>f</seed:tool_call>", "<function=NAME>")]
#[case(ToolParser::Lfm2, "<|tool_call_start|>f(n=1)<|tool_call_end|>", "`[`")]
#[case(ToolParser::Xlam, "[{\"name\": \"f\", \"arguments\": {]", "no JSON")]
#[case(ToolParser::Minimax, "<tool_calls>{</tool_calls>", "no JSON")]
#[case(ToolParser::Qwen3Coder, "<tool_call>{\"name\": \"f\"}</tool_call>", "<function=NAME>")]
#[case(ToolParser::Qwen3Coder, "<tool_call><function=f><parameter=n>1</function></tool_call>", "<parameter=NAME>")]
#[case(ToolParser::Llama3Json, "{\"name\": \"f\", ", "no JSON")]
#[case(ToolParser::Llama3Json, "<|python_tag|>{}", "`name`")]
#[case(ToolParser::Pythonic, "[f(n=)]", "a literal")]
#[case(ToolParser::Pythonic, "[f(n=1)", "`]`")]
#[case(ToolParser::Pythonic, "[f(1)]", "name of an argument")]
#[case(ToolParser::Pythonic, "[f(n='a)]", "a text that ends with '")]
#[case(ToolParser::Pythonic, "[f(n=1)] and more", "the end")]
#[case(ToolParser::Mistral, "[TOOL_CALLS][{]", "no JSON")]
#[case(ToolParser::Mistral, "[TOOL_CALLS][1]", "`name` and `arguments`")]
#[case(ToolParser::Mistral, "[TOOL_CALLS]{}", "the name of a function")]
#[case(ToolParser::Mistral, "[TOOL_CALLS]f[ARGS]", "the arguments of `f`, a JSON object")]
#[case(ToolParser::Mistral, "[TOOL_CALLS]f[ARGS][1]", "the arguments of `f` are no JSON object")]
#[case(ToolParser::Granite, "<|tool_call|>[{\"name\": \"f\"}", "no JSON")]
#[case(ToolParser::Phi4MiniJson, "functools[f(n=1)]", "no JSON")]
#[case(ToolParser::Olmo3, "<function_calls></function_calls>", "expected a call")]
#[case(ToolParser::Olmo3, "<function_calls>f(n=)</function_calls>", "a literal")]
fn a_broken_call_is_an_error(#[case] parser: ToolParser, #[case] text: &str, #[case] words: &str) {
    let calls = parser.parse(text, &tools()).calls;
    let error = calls[0].clone().unwrap_err();
    assert!(calls.len() == 1 && error.contains(words), "{error}");
}
