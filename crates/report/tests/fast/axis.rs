//! Labels of axes: runs [`grpo_plot::AXIS_SCRIPT`] in a JavaScript engine with given text widths.

use grpo_plot::{AXIS_SCRIPT, labels};
use rquickjs::{Context, Runtime};
use serde_json::{Value, json};

/// Returns the value of an expression that may use `axis`.
fn evaluate(expression: &str) -> Value {
    let script = format!("{AXIS_SCRIPT}\nJSON.stringify({expression})");
    let context = Context::full(&Runtime::new().unwrap()).unwrap();
    let text: String = context.with(|ctx| ctx.eval(script)).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the labels of a vertical axis with room for `most`.
fn vertical(low: f64, high: f64, most: usize, options: &str) -> Vec<String> {
    let labels = evaluate(&format!("axis.vertical({low:e}, {high:e}, {most}, {options})"));
    labels.as_array().unwrap().iter().map(|label| label["text"].as_str().unwrap().to_owned()).collect()
}

/// Returns the labels of a horizontal axis of this width in pixels, with characters of `character` pixels.
fn horizontal(low: f64, high: f64, pixels: u32, character: u32) -> Vec<String> {
    let place = format!("(v) => 54 + (v - {low:e}) / ({high:e} - {low:e} || 1) * ({pixels} - 66)");
    let room = format!(
        "{{ place: {place}, measure: (t) => {character} * t.length + 2, left: 0, right: {pixels}, whole: true }}"
    );
    let labels = evaluate(&format!("axis.horizontal({low:e}, {high:e}, {room})"));
    labels.as_array().unwrap().iter().map(|label| label["text"].as_str().unwrap().to_owned()).collect()
}

/// Ranges of steps, seconds and tokens, from a single step to unrealistically many.
const HORIZONTAL: &str = "[[0, 1], [0, 2], [1, 2], [1, 15], [0, 60], [7, 7], [123456, 123456], [1, 99999], [1, 100000], [99999, 100001], \
    [0, 123456789], [1234567000, 2233569997], [0, 8.39e11], [8e17, 8e17], [0, 9.007199254740991e15], [0, 0.0004], [0, 1e-300], [0, 1e300], [0, 3.37]]";

#[test]
fn adjacent_labels_do_not_touch_and_stay_in_the_chart() {
    // Characters of 5 to 14 pixels, from condensed to enlarged fonts.
    let found = evaluate(&format!(
        "(() => {{
            const wrong = [];
            let count = 0;
            for (const [low, high] of {HORIZONTAL}) for (const right of [200, 320, 387, 700, 1400]) for (const character of [5, 7, 14]) for (const whole of [true, false]) {{
                const measure = (text) => character * text.length + 2;
                const place = (v) => high > low ? 54 + (v - low) / (high - low) * (right - 66) : right / 2;
                const labels = axis.horizontal(low, high, {{ place, measure, left: 0, right, whole }});
                const say = (what) => wrong.push(`${{what}}: ${{low}} to ${{high}} on ${{right}} pixels, ${{character}} each: ${{labels.map((l) => l.text)}}`);
                count += labels.length;
                if (labels.length === 0) say('no label');
                if (new Set(labels.map((l) => l.text)).size < labels.length) say('a text twice');
                labels.forEach((label, i) => {{
                    const half = measure(label.text) / 2;
                    if (!(label.at - half >= 0 && label.at + half <= right)) say('cut off');
                    if (i > 0 && !(label.at - half >= labels[i - 1].at + measure(labels[i - 1].text) / 2 + 8)) say('too near');
                }});
            }}
            return [count, wrong];
        }})()"
    ));
    assert_eq!(found[1], json!([]), "{found}");
    assert!(found[0].as_u64() > Some(1500), "there are labels: {}", found[0]);
}

#[test]
fn axes_have_as_many_labels_as_fit() {
    assert_eq!(horizontal(1.0, 1e5, 387, 7), ["20k", "40k", "60k", "80k", "100k"]);
    assert_eq!(horizontal(1.0, 1e5, 387, 14), ["50k", "100k"], "wider characters, fewer labels");
    assert_eq!(horizontal(1.0, 1e5, 200, 7), ["50k", "100k"], "a narrower chart, fewer labels");
    assert_eq!(horizontal(99_999.0, 100_001.0, 387, 7), ["99999", "100000", "100001"]);
    assert_eq!(horizontal(123_456.0, 123_456.0, 387, 7), ["123456"], "a single step is written as it is");
    assert_eq!(horizontal(1.0, 2.0, 1400, 7), ["1", "2"], "there is no step between two steps");
}

/// Ranges of values: constants, tiny, huge, negative, and the limits of f64.
const VERTICAL: &str = "[[0, 1], [0.99999, 1.00001], [-4.5e-7, 4.5e-7], [0, 1.2e-3], [0, 12500], [9.5e11, 1.05e12], [-1.3e6, -1.2e6], [-1.97e-322, 0], \
    [0, 1e308], [-1.7e308, 1.7e308], [4.75, 5.25], [-3.4, -3.1], [0.95e-6, 1.05e-6], [261000, 271000], [999990, 1000010], [31, 32], [0, 9999], [0, 10001]]";

#[test]
fn vertical_labels_differ_and_have_the_same_format() {
    let found = evaluate(&format!(
        "(() => {{
            const wrong = [];
            for (const [low, high] of {VERTICAL}) for (const most of [3, 6, 12]) for (const percent of [false, true]) {{
                const labels = axis.vertical(low, high, most, {{ percent }}), texts = labels.map((l) => l.text);
                const say = (what) => wrong.push(`${{what}}: ${{low}} to ${{high}}: ${{texts}}`);
                const slack = (high - low) * 1e-6;
                if (labels.length < 1 || (most >= 6 && labels.length < 3) || labels.length > most) say('their number');
                if (new Set(texts).size < texts.length) say('a text twice');
                if (texts.some((text) => text.length > 12)) say('too long');
                if (labels.some((l) => !(l.value >= low - slack && l.value <= high + slack))) say('outside');
                // The unit or the power of ten, and the number of decimals.
                const ends = new Set(texts.filter((t) => t !== '0' && t !== '0 %').map((t) => t.replace(/^-?[0-9]+(\\.[0-9]+)?/, (n) => '.'.repeat((n.split('.')[1] || '').length))));
                if (ends.size > 1) say('written differently');
            }}
            return wrong;
        }})()"
    ));
    assert_eq!(found, json!([]));
}

#[test]
fn labels_have_the_fewest_digits_that_distinguish_them() {
    let plain = |low, high| vertical(low, high, 6, "{}");
    assert_eq!(plain(0.99999, 1.00001), ["0.999990", "0.999995", "1.000000", "1.000005", "1.000010"]);
    assert_eq!(plain(-4.5e-7, 4.5e-7), ["-4e-7", "-2e-7", "0", "2e-7", "4e-7"]);
    assert_eq!(plain(0.0, 12_500.0), ["0", "5k", "10k"]);
    assert_eq!(plain(0.0, 0.0012), ["0", "0.0005", "0.0010"]);
    assert_eq!(plain(9.6e11, 1.04e12), ["0.96T", "0.98T", "1.00T", "1.02T", "1.04T"]);
    assert_eq!(plain(2.5, 2.5), ["2.5"]);
    let shares = "{ percent: true }";
    assert_eq!(vertical(0.0, 1.0, 6, shares), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]);
    let log = "{ log: true }";
    assert_eq!(vertical(-6.0, 3.0, 6, log), ["1e-6", "1e-4", "0.01", "1", "100"]);
    assert_eq!(vertical(0.0, 1.0, 6, log), ["1", "2", "5", "10"]);
    assert_eq!(vertical(-0.3, 0.1, 6, log), ["0.6", "0.8", "1.0", "1.2"], "less than a decade");
}

#[test]
fn the_page_and_charts_as_svg_have_the_same_labels() {
    let ranges = evaluate(VERTICAL);
    let ranges: Vec<[f64; 2]> = serde_json::from_value(ranges).unwrap();
    for [low, high] in ranges.into_iter().chain([[1e-3, 1.000_1e-3], [1e15, 1.1e15], [-7e9, 3e9]]) {
        for most in [3, 6, 12] {
            let texts: Vec<String> = labels(&(low..high), most, false).into_iter().map(|(_, text)| text).collect();
            assert_eq!(vertical(low, high, most, "{}"), texts, "{low} to {high}, at most {most}");
        }
    }
}
