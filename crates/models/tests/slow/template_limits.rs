//! Chat templates that never end, grow without bound or nest without bound: each is an error in bounded time and memory.

use crate::support::says;
use grpo_models::ChatTemplate;
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
fn widths_and_precisions_are_limited() {
    for source in [
        "{{ '%.65536f' % 1.5 }}",
        "{{ '%.65535g' % 0.0001 }}",
        "{{ '%*d' % (65536, 1) }}",
        "{{ '{:.65536f}'.format(1) }}",
        "{{ '{:65536}'.format('a') }}",
    ] {
        refuses(source, &["format: expected widths of at most 32768"]);
    }
    for (source, length) in [("{{ '%.32768f' % 1.5 }}", 32770), ("{{ '%#.32768g' % 0.0001 }}", 32773)] {
        assert_eq!(render(source).unwrap().len(), length, "{source}");
    }
}

/// A list of lists is small and its text is not: each operator and filter that makes texts of values, compares or hashes them has a limit.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn texts_and_comparisons_of_huge_lists_are_refused() {
    let big = "(['a' * 1000] * 100000000)";
    let shared = "{% set a = [1, 2] %}".to_owned() + &"{% set a = [a, a] %}".repeat(60);
    let dictionaries = "{% set a = {'k': 1} %}".to_owned() + &"{% set a = {'k': a, 'l': a} %}".repeat(60);
    let tuples = "{% set a = (1, 2) %}".to_owned() + &"{% set a = (a, a) %}".repeat(60);
    let nested = "{% set a = [1] * 1000000 %}{% set a = [a] * 1000000 %}{% set a = [a] * 1000000 %}".to_owned();
    let big = format!("{{% set a = {big} %}}");
    // Each use with one of them, and one use with each.
    let values = [shared, big, dictionaries, tuples, nested];
    let chosen = |index: usize| values.iter().take(if index < 1 { values.len() } else { 1 });
    for (index, use_of_it) in [
        "{{ '' ~ a }}",
        "{{ a ~ a }}",
        "{{ a|upper }}",
        "{{ a|lower }}",
        "{{ a|title }}",
        "{{ a|capitalize }}",
        "{{ a|trim }}",
        "{{ a|replace('x', 'y') }}",
        "{{ 'x'|replace(a, 'y') }}",
        "{{ a|indent }}",
        "{{ a|string }}",
        "{{ a|tojson }}",
        "{{ a|pprint }}",
        "{{ a|escape }}",
        "{{ a|e }}",
        "{{ a|safe }}",
        "{{ a|split('x')|length }}",
        "{{ a|lines|length }}",
        "{{ a|join }}",
        "{{ a|join(', ') }}",
        "{{ [a]|join('x') }}",
        "{{ ['x', 'y']|join(a) }}",
        "{{ ['x', 'y']|join(d=a) }}",
        "{{ [{'k': a}]|join(attribute='k') }}",
        "{{ ''.join([a]) }}",
        "{{ '%s'|format(a) }}",
        "{{ '{}'.format(a) }}",
        "{{ a is upper }}",
        "{{ a is startingwith('x') }}",
        "{{ [a]|map('upper')|list }}",
        "{{ [a]|map('string')|list }}",
        "{{ a|urlencode }}",
        "{{ raise_exception(a) }}",
        "{{ a }}",
        "{% set b %}{{ a }}{% endset %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(a) }}",
        "{% filter upper %}{{ a }}{% endfilter %}",
        "{{ a in 'x' }}",
        "{{ debug() }}",
        "{{ debug(a) }}",
    ]
    .into_iter()
    .enumerate()
    {
        for value in chosen(index) {
            let error = render(&format!("{value}{use_of_it}")).expect_err(use_of_it);
            assert!(!error.contains("failed"), "{use_of_it}: {error}");
        }
    }
    // Two values with the same content and no memory in common.
    let both = |value: &str| {
        let other = value.replace("set a =", "set b =").replace("[a", "[b").replace(" a]", " b]");
        let other = other.replace("(a, a)", "(b, b)").replace("'k': a, 'l': a", "'k': b, 'l': b");
        format!("{value}{other}")
    };
    for (index, use_of_both) in [
        "{{ a == b }}",
        "{{ a != b }}",
        "{{ a < b }}",
        "{{ a <= b <= a }}",
        "{{ a > b }}",
        "{{ a >= b }}",
        "{{ a in [b] }}",
        "{{ a not in [b] }}",
        "{{ a is eq(b) }}",
        "{{ a is sameas(b) }}",
        "{{ a is in([b]) }}",
        "{{ [a]|select('eq', b)|list|length }}",
        "{{ [{'k': a}]|selectattr('k', 'equalto', b)|list|length }}",
        "{{ [a, b]|sort|length }}",
        "{{ [a, b]|unique|list|length }}",
        "{{ [a, b]|min|length }}",
        "{{ [a, b]|max|length }}",
        "{{ [{'k': a}, {'k': b}]|groupby('k')|length }}",
        "{{ {'x': a, 'y': b}|dictsort(by='value')|length }}",
        "{{ [a].count(b) }}",
        "{{ {}[a] }}",
        "{{ {a: 1}|length }}",
        "{{ {'x': 1}.get(a) }}",
        "{% for x in [a, b] %}{{ loop.changed(x) }}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.a = [a, b] %}",
    ]
    .into_iter()
    .enumerate()
    {
        for value in chosen(index) {
            render(&format!("{}{use_of_both}", both(value))).expect_err(use_of_both);
        }
    }
}

#[test]
fn lists_that_grow_lazily_are_refused() {
    for source in [
        "{% set a = [1, 2] %}".to_owned() + &"{% set a = a + a %}".repeat(60),
        "{% set a = (1, 2) %}".to_owned() + &"{% set a = a + a %}".repeat(60),
        "{% set a = [1, 2] %}".to_owned() + &"{% set a = a|chain(a) %}".repeat(60) + "{{ a|length }}",
        "{% set a = [1] %}".to_owned() + &"{% set a = a * 100000 %}".repeat(3),
        "{% for i in range(99999) %}{{ ([1] * 100000000)[99999999:]|list }}{% endfor %}".to_owned(),
        "{% macro f() %}{{ varargs|length }}{% endmacro %}{{ f(*([1] * 100000000)) }}".to_owned(),
        "{% set a, b = [1] * 100000000 %}".to_owned(),
        "{{ (range(99999)|list * 1000)|sum }}".to_owned(),
        "{{ (range(99999)|list * 1000)|unique|list|length }}".to_owned(),
        "{{ (range(99999)|list * 1000)|sort|length }}".to_owned(),
        "{{ 'ab' * 50000000 }}".to_owned(),
        "{% set ns = namespace(a=[1, 2]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}".to_owned(),
        "{% for i in range(90000) %}".to_owned() + &"x".repeat(100_000) + "{% endfor %}",
    ] {
        render(&source).expect_err(&source[..source.len().min(100)]);
    }
}

/// Each use reads a text of a megabyte: 100 of them are few instructions and take long.
#[test]
fn the_length_of_texts_costs_steps() {
    let texts =
        "{% set a = 'a' * 1000000 %}{% set b = 'a' * 1000000 %}{% set d = 'ä' * 500000 %}{% set n = '1' * 1000000 %}";
    for use_of_it in [
        "{% set x = messages[0]|attr(a) %}",
        "{% set x = messages[0][a] %}",
        "{% set x = {a: 1} %}",
        "{% set x = {}.get(a) %}",
        "{% set x = a == b %}",
        "{% set x = a < b %}",
        "{% set x = a is eq(b) %}",
        "{% set x = a in [b] %}",
        "{% set x = a is upper %}",
        "{% set x = a is startingwith(b) %}",
        "{% set x = d[499999] %}",
        "{% set x = d[499999:] %}",
        "{% set x = (range(90000)|list)[89999:] %}",
        "{% set x = d|length %}",
        "{% set x = d|reverse %}",
        "{% set x = a|title %}",
        "{% set x = n|int %}",
        "{% set x = n|float %}",
        "{% set x = [d]|string %}",
        "{% set x = d|tojson %}",
        "{% set x = a.count('a') %}",
        "{% set x = a.find('b') %}",
        "{% set x = a.isalnum() %}",
        "{% set x = strftime_now('%Y' * 100000) %}",
        "{% set x = a.strip('bcdefghijklmnopqrstuvwxyz' * 100 ~ 'a') %}",
        "{% set x = a|trim('bcdefghijklmnopqrstuvwxyz' * 100 ~ 'a') %}",
        "{% set x = ([[1] * 100] * 2000)|sum(start=[]) %}",
        "{% set x = [a, b]|min %}",
        "{% set x = [a, b]|sort %}",
        "{% set x = [a]|map('trim')|list %}",
        "{% set x = [a]|reject('lower')|list %}",
        "{% set x = [{'k': 1}]|map(attribute=a, default=1)|list %}",
    ] {
        let source = format!("{texts}{{% for i in range(100) %}}{use_of_it}{{% endfor %}}");
        refuses(&source, &["takes more than", "steps"]);
    }
    let deep = "{% set ns = namespace(s=[1]) %}{% for i in range(200) %}{% set ns.s = [ns.s] %}{% endfor %}";
    refuses(
        &format!("{deep}{{% for i in range(20000) %}}{{% set x = ns.s|string %}}{{% endfor %}}"),
        &["takes more than"],
    );
}

/// A conversation of a megabyte, whose texts a template reads again and again.
#[test]
fn templates_of_long_conversations_stay_within_the_steps() {
    let content = "A sentence with some words and a </think> in it. ".repeat(40);
    let roles = ["user", "assistant"];
    let messages: Vec<_> = (0..500).map(|i| json!({"role": roles[i % 2], "content": content})).collect();
    let source = "{% set ns = namespace(last=-1, has_tool=false) %}{% for m in messages %}{% if m.role == 'user' %}\
        {% set ns.last = loop.index0 %}{% endif %}{% if m['role'] == 'tool' or '<tool_response>' in m.content %}\
        {% set ns.has_tool = true %}{% endif %}{% endfor %}{% for m in messages %}\
        {%- set text = m.content %}{% if m.role == 'assistant' and '</think>' in text %}\
        {% set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\
        {% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
        {{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if loop.index0 > ns.last and text is string and text|trim|length > 0 %}{{ thought|trim }}{% endif %}\
        {{ text|trim ~ '<|im_end|>\\n' }}{{ m|tojson if loop.last }}\
        {% if messages|selectattr('role', 'equalto', 'tool')|list|length > 0 and messages[-1].role == 'user' %}x{% endif %}{% endfor %}";
    let text = ChatTemplate::new(source, "long").render(&json!({"messages": messages})).unwrap();
    assert!(text.len() > 300_000 && text.contains("<|im_start|>assistant\n"), "{}", text.len());
}

/// minijinja works out constants while it compiles.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn constants_are_not_worked_out_without_limits() {
    for constant in [
        "'' ~ (['a'*1000]*100000000)",
        "[[1]*100000000]*100000000 == [[1]*100000000]*100000000",
        "[1]*100000000 in [[1]*100000000]*10",
        "1 in [[1]*100000000]*100000000",
        "{([1]*100000000): 1}",
        "(('a'*1000,)*30,)*30 ~ ((('a'*1000,)*30,)*30,)*30",
    ] {
        for source in [format!("{{{{ {constant} }}}}"), format!("{{% if {constant} %}}x{{% endif %}}")] {
            let error = render(&source).map(|text| text.len());
            assert!(error.as_ref().map_or(true, |length| *length < 1 << 25), "{source}: {error:?}");
        }
    }
}

#[test]
fn bounds_change_nothing_of_what_templates_write() {
    for (source, expected) in [
        (
            "{{ 2 * 3 * 4 }} {{ 2 ** 3 }} {{ 'ab' * 2 }} {{ [1] * 3 }} {{ 1.5 * 2 }} {{ 3 * -1 }}",
            "24 8 abab [1, 1, 1] 3.0 -3",
        ),
        ("{% macro f(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ f(*[1, 2]) }}", "12"),
        ("{{ '' ~ [1, none, true, 'x'] ~ {'a': 1.0} ~ (1,) }}", "[1, None, True, 'x']{'a': 1.0}(1,)"),
        ("{{ [none]|upper }} {{ ['a', [1]]|join(', ') }} {{ ', '.join(['a', 'b']) }}", "[NONE] a, [1] a, b"),
        ("{{ [{'k': 'a'}, {'k': 'b'}]|join('-', attribute='k') }}", "a-b"),
        (
            "{% if 1 < 2 < 3 and not 2 < 1 < 3 %}{% if 'a' in 'abc' %}y{% elif 1 %}n{% else %}n{% endif %}{% endif %}",
            "y",
        ),
        (
            "{{ 'a' if [1, [2]] == [1, [2]] else 'b' }}{{ {'a': 1} == {'a': 1} }}{{ 1 in {1: 2} }}{{ 3 not in [1] }}",
            "aTrueTrueTrue",
        ),
        ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{{ loop.changed(v) }}{% endfor %}", "a1Trueb2True"),
        (
            "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}",
            "123",
        ),
        (
            "{% for x in [1, 2, 3] if x > 1 %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% else %}none{% endfor %}",
            "2",
        ),
        (
            "{{ messages[0]['role'] }}{{ messages[0].get('x', 'y') }}{{ messages[::-1][0].role }}{{ messages[1:]|length }}",
            "useryuser0",
        ),
        (
            "{% set ns = namespace(x=[1]) %}{% set ns.x = ns.x + [2] %}{{ ns.x }}{{ ([1] + [2])[1] }}{{ 'a' + 'b' }}",
            "[1, 2]2ab",
        ),
        (
            "{{ [[1], [2, 3]]|sum(start=[]) }}{{ [1.5, 2]|sum }}{{ ' ab'|trim }}{{ 'xabx'|trim('x') }}",
            "[1, 2, 3]3.5abab",
        ),
        ("{{ [3, 1, 2]|sort }}{{ [1, 1]|unique|list }}{{ [1, 2]|sum }}{{ [1, 2]|max }}", "[1, 2, 3][1]32"),
        (
            "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|map(attribute='role')|list }}",
            "1['user']",
        ),
        ("{{ 'a\nb'|indent(2) }}{{ 'a\nb'|indent(width=2, first=true) }}", "a\n  b  a\n  b"),
        (
            "{{ 'äbc'[1:] }}{{ 'äbc'[::-1] }}{{ 'äbc'[-2:][:1] }}{{ 'äbc'[5:] }}{{ 'abc'[-9:2] }}{{ 'abcdef'[4:0:-2] }}{{ 'abc'[::-9] }}",
            "bccbäbabecc",
        ),
        (
            "{{ [1, 2, 3][1:] }}{{ (1, 2, 3)[:2] }}{{ [1, 2, 3][::-2] }}{{ range(5)[3:] }}{{ nothing[1:] }}{{ [][::-1] }}{{ [1, 2][-1:-9:-1] }}",
            "[2, 3](1, 2)[3, 1][3, 4][][][2, 1]",
        ),
        ("{% call f() %}{% endcall %}{% macro f() %}x{% endmacro %}", ""),
    ] {
        match expected {
            "" => drop(render(source)),
            expected => assert_eq!(render(source).as_deref(), Ok(expected), "{source}"),
        }
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
        ("{{ 1", " * 1", " }}"),
        ("{{ 1", " == 1", " }}"),
        ("{{ 1", " + 1 * 1", " }}"),
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
