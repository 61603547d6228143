//! A call in every format.

use super::*;

#[rstest]
#[case::hermes(
    ToolParser::Hermes,
    "So:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>",
    "So:"
)]
#[case::hermes_with_parameters(
    ToolParser::Hermes,
    "So:\n<tool_call>\n{\"name\": \"f\", \"parameters\": {\"n\": 1}}\n</tool_call>",
    "So:"
)]
#[case::hermes_with_arguments_as_text(
    ToolParser::Hermes,
    "So:\n<tool_call>\n{\"name\": \"f\", \"arguments\": \"{\\\"n\\\": 1}\"}\n</tool_call>",
    "So:"
)]
#[case::hermes_without_end(ToolParser::Hermes, "So:<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}", "So:")]
#[case::qwen3_coder(
    ToolParser::Qwen3Coder,
    "So:\n<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "So:"
)]
#[case::qwen3_coder_without_tags(
    ToolParser::Qwen3Coder,
    "So: <function=f>\n<parameter=n>\n1\n</parameter>\n</function>",
    "So:"
)]
#[case::openai(
    ToolParser::Openai,
    "<|channel|>analysis<|message|>Call functions.f.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
     <|constrain|>json<|message|>{\"n\": 1}<|call|>",
    ""
)]
#[case::openai_as_templates_write_it(
    ToolParser::Openai,
    " to=functions.f<|channel|>commentary json<|message|>{\"n\": 1}",
    ""
)]
#[case::openai_with_preamble(
    ToolParser::Openai,
    "<|channel|>commentary<|message|>So:<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"n\": 1}",
    "So:"
)]
#[case::glm45(
    ToolParser::Glm45,
    "So:\n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "So:"
)]
#[case::glm47(ToolParser::Glm45, "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", "")]
#[case::deepseek_v3(
    ToolParser::DeepseekV3,
    "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"n\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "So:"
)]
#[case::deepseek_v31(
    ToolParser::DeepseekV31,
    "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"n\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "So:"
)]
#[case::deepseek_v32(
    ToolParser::DeepseekV32,
    "So:\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"n\" string=\"false\">1</｜DSML｜parameter>\n\
     </｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "So:"
)]
#[case::deepseek_v4(
    ToolParser::DeepseekV4,
    "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"n\" string=\"false\">1</｜DSML｜parameter>\n\
     </｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ""
)]
#[case::solar_open(
    ToolParser::SolarOpen,
    "So:<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>f<|tool_call:args|>{\"n\": 1}<|tool_call:end|><|calls|>",
    "So:"
)]
#[case::cohere(
    ToolParser::CohereCommand3,
    "So:<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"n\": 1}}\n]<|END_ACTION|>",
    "So:"
)]
#[case::apertus(ToolParser::Apertus, "So:<|tools_prefix|>[{\"f\": {\"n\": 1}}]<|tools_suffix|>", "So:")]
#[case::hy_v3(
    ToolParser::HyV3,
    "So:<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>n</arg_key:opensource>\n\
     <arg_value:opensource>1</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
    "So:"
)]
#[case::muse(
    ToolParser::MuseGlimmer,
    "So:<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"n\">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    "So:"
)]
#[case::llama31_functions(ToolParser::Qwen3Coder, "So:<function=f>{\"n\": 1}</function>", "So:")]
#[case::kimi_k2(
    ToolParser::KimiK2,
    "So:<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"n\": 1}<|tool_call_end|>\
     <|tool_calls_section_end|>",
    "So:"
)]
#[case::gemma4(ToolParser::Gemma4, "So:<|tool_call>call:f{n:1}<tool_call|>", "So:")]
#[case::functiongemma(ToolParser::FunctionGemma, "<start_function_call>call:f{n:1}<end_function_call>", "")]
#[case::minimax(
    ToolParser::Minimax,
    "So:<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_calls>",
    "So:"
)]
#[case::minimax_m2(
    ToolParser::MinimaxM2,
    "So:\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"n\">1</parameter>\n</invoke>\n</minimax:tool_call>",
    "So:"
)]
#[case::seed_oss(
    ToolParser::SeedOss,
    "So:\n<seed:tool_call>\n<function=f>\n<parameter=n>1</parameter>\n</function>\n</seed:tool_call>",
    "So:"
)]
#[case::llama4_pythonic(ToolParser::Llama4Pythonic, "<|python_start|>[f(n=1)]<|python_end|>", "")]
#[case::lfm2(ToolParser::Lfm2, "So:<|tool_call_start|>[f(n=1)]<|tool_call_end|>", "So:")]
#[case::lfm2_with_json(
    ToolParser::Lfm2,
    "<|tool_call_start|>[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]<|tool_call_end|>",
    ""
)]
#[case::xlam(ToolParser::Xlam, "[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "")]
#[case::xlam_in_code(ToolParser::Xlam, "So:\n```json\n[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]\n```", "So:")]
#[case::longcat(
    ToolParser::Longcat,
    "<longcat_tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}</longcat_tool_call>",
    ""
)]
#[case::internlm(
    ToolParser::Internlm,
    "<|action_start|><|plugin|>{\"name\": \"f\", \"parameters\": {\"n\": 1}}<|action_end|>",
    ""
)]
#[case::llama3_json_in_text(ToolParser::Llama3Json, "So: {\"name\": \"f\", \"parameters\": {\"n\": 1}}", "So:")]
#[case::llama3_json(ToolParser::Llama3Json, "{\"name\": \"f\", \"parameters\": {\"n\": 1}}", "")]
#[case::llama3_json_with_tag(ToolParser::Llama3Json, "<|python_tag|>{\"name\": \"f\", \"arguments\": {\"n\": 1}}", "")]
#[case::pythonic(ToolParser::Pythonic, " [f(n=1)] ", "")]
#[case::mistral(
    ToolParser::Mistral,
    "So:[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"n\": 1}, \"id\": \"abc\"}]",
    "So:"
)]
#[case::mistral_with_names(ToolParser::Mistral, "[TOOL_CALLS]f{\"n\": 1}", "")]
#[case::mistral_with_tags(ToolParser::Mistral, "So:[TOOL_CALLS]f[CALL_ID]a1B2[ARGS]{\"n\": 1}", "So:")]
#[case::granite(ToolParser::Granite, "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "")]
#[case::granite_with_other_tag(ToolParser::Granite, "<tool_call>\n[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "")]
#[case::phi4(ToolParser::Phi4MiniJson, "So: functools[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "So:")]
#[case::olmo3(ToolParser::Olmo3, "So:\n<function_calls>\nf(n=1)\n</function_calls>", "So:")]
#[case::olmo3_without_end(ToolParser::Olmo3, "<function_calls>f(n=1)", "")]
fn a_call_is_found_and_its_format_is_recognized(#[case] parser: ToolParser, #[case] text: &str, #[case] content: &str) {
    let expected = call("f", json!({"n": 1}));
    let parsed = parser.parse(text, &tools());
    assert_eq!((without_ids(parsed.calls), parsed.content.as_str()), (vec![expected.clone()], content));
    assert_eq!(ToolParser::of_rendered(text, &expected.unwrap(), &tools()), Some(parser));
}
