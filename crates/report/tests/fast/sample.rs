//! Cards of samples: runs the functions of `page/page.js` in a JavaScript engine, without a document.

use rquickjs::{Context, Runtime};

/// Returns the card of a sample with these fields, as JSON of its elements.
fn card(fields: &str) -> String {
    let page = include_str!("../../src/page/page.js");
    let begin = page.find("  const signed =").expect("the functions of samples");
    let end = page.find("  const samples =").expect("the browser of samples");
    let elements = "const plain = (value) => String(value);\nconst make = (tag, attributes, ...children) => ({ tag, children });\n";
    let script = format!("{elements}{}\nJSON.stringify(card({{ step: 1, fields: {fields} }}))", &page[begin..end]);
    let context = Context::full(&Runtime::new().unwrap()).unwrap();
    context.with(|ctx| ctx.eval(script)).unwrap()
}

/// Rows whose answer is in a column of another name, such as `solution`, have an empty answer.
#[test]
fn an_empty_answer_of_a_sample_is_not_shown() {
    let with = card(r#"{ prompt: "2 + 5", completion: "7", answer: "7", reward: 1 }"#);
    assert!(with.contains("Right answer") && with.contains("Completion"), "{with}");
    for answer in [r#""""#, "null", "undefined"] {
        let without = card(&format!(r#"{{ prompt: "2 + 5", completion: "7", answer: {answer}, solution: "7" }}"#));
        assert!(!without.contains("Right answer") && without.contains("Completion"), "{without}");
        assert!(without.contains("solution"), "{without}");
    }
}
