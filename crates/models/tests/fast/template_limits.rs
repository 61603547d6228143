//! Chat templates that never end, grow without bound or nest without bound: each is an error in bounded time and memory.

use crate::support::says;
use models::ChatTemplate;
use serde_json::json;
use std::time::{Duration, Instant};

#[track_caller]
fn render(source: &str) -> Result<String, String> {
    let begin = Instant::now();
    let result = ChatTemplate::new(source, "chat_template.jinja").render(&json!({"messages": [{"role": "user"}]}));
    assert!(begin.elapsed() < Duration::from_secs(60), "it took {:?}", begin.elapsed());
    result.map_err(|error| error.to_string())
}

#[track_caller]
fn refuses(source: &str, parts: &[&str]) {
    let error = render(source).expect_err(source);
    says(&error, &[&["chat_template.jinja"], parts].concat());
}

#[test]
fn a_template_that_does_not_end_is_stopped() {
    for source in [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x",
        "{% macro f(n) %}{% if n>0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    ] {
        refuses(source, &["takes more than", "steps", "data.chat_template"]);
    }
    refuses("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", &["recursion limit"]);
}

#[test]
fn a_text_that_grows_without_bound_is_refused() {
    for source in [
        "{{ range(10)|batch(10000000000, 1)|list }}",
        "{{ range(10)|slice(10000000000)|list }}",
        "{{ '{:>1000000000}'.format('a') }}",
        "{{ '{:.1000000000f}'.format(1.5) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ ('{0}' * 100000).format('a' * 100000) }}",
        "{{ {'a':1} | tojson(indent=100000000000) }}",
        "{{ (range(90000)|list)|join('a'*100000) }}",
        "{{ ('a'*100000).join(range(90000)|list) }}",
        "{{ ('a'*100000).replace('', 'b'*100000) }}",
        "{{ ('a'*100000)|replace('a', 'b'*100000) }}",
        "{{ 'a' * 100000000000 }}",
        "{{ 'a'|indent(100000000000, true) }}",
        "{{ ([1] * 100000000)|tojson }}",
        "{{ ([1] * 100000000)|string }}",
    ] {
        render(source).expect_err(source);
    }
}

#[test]
fn a_namespace_does_not_hold_itself() {
    for value in ["ns", "[ns]", "{'a': [ns]}", "dict(a=ns)", "(1, ns)"] {
        let source = format!("{{% set ns = namespace() %}}{{% set ns.a = {value} %}}{{{{ ns }}}}{{{{ ns|tojson }}}}");
        refuses(&source, &["line 1", "a namespace cannot be a value of a namespace"]);
    }
    // An iterator over a namespace becomes a list of its present entries.
    let text = render("{% set ns = namespace(b=1) %}{% set ns.a = [ns.items()] %}{{ ns.a }}").unwrap();
    assert_eq!(text, "[[('b', 1)]]");
    let nested =
        "{% set ns = namespace(a=[]) %}{% for i in range(1000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}";
    refuses(nested, &["more than 256 levels"]);
}

/// Chains as long as a template may be run; longer ones are refused before they are parsed.
#[test]
fn long_chains_do_not_overflow_the_stack() {
    for (before, link, after) in [
        ("{{ 1", " + 1", " }}"),
        ("{{ 'a'", "|upper", " }}"),
        ("{{ messages", ".a", " }}"),
        ("{{ 1", " ~ 1", " }}"),
        ("{{ ", "not ", "1 }}"),
        ("{{ ", "-", "1 }}"),
        ("{{ ", "(", "1 }}"),
        ("{{ ", "[", "1 }}"),
        ("{{ 1", " if 1 else 1", " }}"),
        ("{{ 1", " and 1", " }}"),
        ("{% if 1 %}", "{% elif 1 %}", "{% endif %}"),
        ("", "{% if 1 %}", ""),
        ("{{ messages", "[0]", " }}"),
    ] {
        for count in [1000, 8000, 16_000, 200_000] {
            let source = format!("{before}{}{after}", link.repeat(count));
            let result = render(&source);
            if count == 200_000 {
                let error = result.expect_err(link);
                assert!(error.contains("the limit"), "{link}: {error}");
            }
        }
    }
}
