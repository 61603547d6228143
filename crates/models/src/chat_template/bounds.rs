//! Bounds on the work of operators, filters and tests on lists and dictionaries, and Python's `%`.
//!
//! A list may hold the same list many times, so a few steps make a value whose text or comparison never ends:
//! `{% set a = [a, a] %}` 60 times, or `[[1] * 1000000] * 1000000`. minijinja charges steps for items that it visits, but neither for the
//! text that it makes of a list (`~`, `upper`), nor for the inner items of lists that it compares (`==`, `in`, `sort`), and it folds
//! constant expressions while it compiles. So:
//!
//! - [`instructions`] puts calls of the filters below before and behind the operators of a compiled template;
//! - [`add_to`] puts them around the filters and tests of minijinja;
//! - `source::prepared` keeps products from being constant, which are the only constants that are larger than their text.
//!
//! | filter | effect |
//! |---|---|
//! | [`WALKED`] | charges for every value within a value that is going to be compared or hashed |
//! | [`READ`] | charges for the characters of a text that is indexed |
//! | [`TEXT`] | makes Python's text of a list or dictionary, with the limit of texts |
//! | [`LISTED`] | makes a list of a lazy list, and charges for its items |
//! | [`ITEMS`] | makes a list of the text or iterator of a loop, so that `loop.last` is known |
//! | [`SETTLED`] | prevents namespaces from containing themselves, which would crash minijinja |

use super::limits::{MAX_DEPTH, Text, steps_of_characters, too_deep};
use super::{filters as own, printf, python, values};
use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, filters, tests};

/// The names of filters and functions that templates cannot write.
const WALKED: &str = "(walked)";
const READ: &str = "(read)";
const TEXT: &str = "(text)";
const LISTED: &str = "(listed)";
const ITEMS: &str = "(items)";
const SETTLED: &str = "(settled)";
const CONCATENATED: &str = "(~)";
const PERCENT: &str = "(%)";
const MAP: &str = "({})";
const SLICE: &str = "([:])";
const CHANGED: &str = "(changed)";
/// The index of a filter that is looked up at every call.
const NOT_CACHED: u8 = !0;

/// The instructions of a template with bounds on its operators.
pub(super) fn instructions<'a>(compiled: &Instructions<'a>) -> Instructions<'a> {
    let mut bounded = Instructions::new(compiled.name(), compiled.source());
    let all: Vec<(u32, &Instruction<'a>)> = (0..).map_while(|at| Some((at, compiled.get(at)?))).collect();
    let lengths = all.iter().map(|(_, instruction)| {
        let (before, behind) = around(instruction);
        (before.len() + 1 + behind.len()) as u32
    });
    // Where each instruction begins with those before it, and where the last one ends.
    let mut starts = vec![0];
    starts.extend(lengths.scan(0, |end, length| {
        *end += length;
        Some(*end)
    }));
    let moved = |target: u32| starts.get(target as usize).copied().unwrap_or(target);
    for (at, instruction) in all {
        let (before, behind) = around(instruction);
        let own = std::iter::once(replaced(instruction, moved));
        for added in before.into_iter().chain(own).chain(behind) {
            match compiled.get_span(at) {
                Some(span) => bounded.add_with_span(added, span),
                None => bounded.add_with_line(added, compiled.get_line(at).unwrap_or(1).try_into().unwrap_or(u16::MAX)),
            };
        }
    }
    bounded
}

/// The instructions that go before and behind one.
fn around<'a>(instruction: &Instruction<'a>) -> (Vec<Instruction<'a>>, Vec<Instruction<'a>>) {
    use Instruction as I;
    let apply = |name| I::ApplyFilter(name, Some(1), NOT_CACHED);
    match instruction {
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte | I::In | I::CompareAndPreserve(_) => {
            (vec![apply(WALKED), I::Swap, apply(WALKED), I::Swap], vec![])
        }
        I::EmitRaw(text) => (vec![I::LoadConst(Value::from(*text))], vec![]),
        I::GetItem => (vec![apply(WALKED), I::Swap, apply(READ), I::Swap], vec![]),
        I::PushLoop(_) => (vec![apply(ITEMS)], vec![]),
        // The value is below the namespace on the stack.
        I::SetAttr(_) => (vec![I::Swap, apply(SETTLED), I::Swap], vec![]),
        // Of a function, the steps of a text that is returned are paid once.
        I::Add | I::Mul | I::CallMethod(..) | I::CallFunction(..) | I::CallObject(_) => {
            (vec![], vec![I::CallFunction(LISTED, Some(1))])
        }
        I::UnpackList(_) => (vec![I::CallFunction(LISTED, Some(1))], vec![]),
        _ => (vec![], vec![]),
    }
}

/// An instruction with its targets moved, or the one that takes its place.
fn replaced<'a>(instruction: &Instruction<'a>, moved: impl Fn(u32) -> u32) -> Instruction<'a> {
    use Instruction as I;
    match instruction {
        I::Iterate(target) => I::Iterate(moved(*target)),
        I::Jump(target) => I::Jump(moved(*target)),
        I::JumpIfFalse(target) => I::JumpIfFalse(moved(*target)),
        I::JumpIfFalseOrPop(target) => I::JumpIfFalseOrPop(moved(*target)),
        I::JumpIfTrueOrPop(target) => I::JumpIfTrueOrPop(moved(*target)),
        I::BuildMacro(name, target, flags) => I::BuildMacro(name, moved(*target), *flags),
        I::StringConcat => I::CallFunction(CONCATENATED, Some(2)),
        // The operator of minijinja counts characters and items without a charge.
        I::Slice => I::CallFunction(SLICE, Some(4)),
        // The operator of minijinja does not format texts.
        I::Rem => I::CallFunction(PERCENT, Some(2)),
        // The limit of tokens keeps the number of pairs below 2^15.
        I::BuildMap(pairs) => match u16::try_from(pairs * 2) {
            Ok(count) => I::CallFunction(MAP, Some(count)),
            Err(_) => I::BuildMap(*pairs),
        },
        // So that the limit of a formatter counts it.
        I::EmitRaw(_) => I::Emit,
        I::CallMethod("changed", count) => I::CallFunction(CHANGED, *count),
        other => other.clone(),
    }
}

/// Adds the filters and functions of [`instructions`] to `environment`, and bounds to the filters and tests that it has.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    // It writes everything there is, and Jinja has no such function.
    environment.remove_global("debug");
    add_operators(environment);
    add_filters(environment);
    add_tests(environment);
}

/// Adds the filters and functions that only [`instructions`] calls.
fn add_operators(environment: &mut Environment<'static>) {
    environment.add_filter(WALKED, walked);
    environment.add_filter(READ, read);
    environment.add_filter(TEXT, |state: &State<'_, '_>, value: Value| text(state, value));
    environment.add_filter(ITEMS, own::listed);
    environment.add_filter(SETTLED, values::settled);
    environment.add_function(LISTED, listed);
    environment.add_function(PERCENT, printf::percent);
    environment.add_function(SLICE, values::slice);
    environment.add_function(CONCATENATED, |state: &State<'_, '_>, left: Value, right: Value| {
        let mut out = Text::default();
        python::add_text(&left, &mut out)?;
        python::add_text(&right, &mut out)?;
        state.consume_fuel(out.steps())?;
        Ok::<_, Error>(out.into_string())
    });
    environment.add_function(MAP, |state: &State<'_, '_>, items: Rest<Value>| {
        let pairs = items.chunks_exact(2).map(|pair| Ok((walked(state, pair[0].clone())?, pair[1].clone())));
        Ok::<_, Error>(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
    });
    environment.add_function(CHANGED, |state: &mut State<'_, '_>, called: Value, items: Rest<Value>| {
        for item in items.iter() {
            walked(state, item.clone())?;
        }
        called.call_method(state, "changed", &items)
    });
}

/// Calls a filter or test with arguments, after a charge for them.
type Charged = fn(&Value, &mut State<'_, '_>, Rest<ValueOrKwargs>) -> Result<Value, Error>;

/// Adds bounds to the filters of minijinja.
fn add_filters(environment: &mut Environment<'static>) {
    let mut replace = |call: Charged, filters: &[(&'static str, Value)]| {
        for (name, filter) in filters.iter().cloned() {
            environment.add_filter(name, move |state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>| {
                let made = call(&filter, state, items)?;
                listed(state, made)
            });
        }
    };
    replace(
        call_on_texts,
        &[
            ("upper", Value::from_function(filters::upper)),
            ("lower", Value::from_function(filters::lower)),
            ("title", Value::from_function(filters::title)),
            ("capitalize", Value::from_function(filters::capitalize)),
            ("replace", Value::from_function(filters::replace)),
            ("split", Value::from_function(filters::split)),
            ("lines", Value::from_function(filters::lines)),
            ("escape", Value::from_function(filters::escape)),
            ("e", Value::from_function(filters::escape)),
            ("safe", Value::from_function(filters::safe)),
        ],
    );
    replace(
        call_on_sorted,
        &[
            ("sort", Value::from_function(filters::sort)),
            ("unique", Value::from_function(filters::unique)),
            ("groupby", Value::from_function(filters::groupby)),
            ("dictsort", Value::from_function(filters::dictsort)),
        ],
    );
    replace(
        call_on_walked,
        &[("min", Value::from_function(filters::min)), ("max", Value::from_function(filters::max))],
    );
    replace(
        call_on_items,
        &[
            ("select", Value::from_function(filters::select)),
            ("reject", Value::from_function(filters::reject)),
            ("selectattr", Value::from_function(filters::selectattr)),
            ("rejectattr", Value::from_function(filters::rejectattr)),
            ("map", Value::from_function(filters::map)),
            ("chain", Value::from_function(filters::chain)),
            ("zip", Value::from_function(filters::zip)),
        ],
    );
    for (name, filter) in [
        ("attr", Value::from_function(filters::attr)),
        ("length", Value::from_function(filters::length)),
        ("count", Value::from_function(filters::length)),
        ("int", Value::from_function(own::int)),
        ("float", Value::from_function(own::float)),
    ] {
        environment.add_filter(name, move |state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>| {
            call_on_read(&filter, state, items)
        });
    }
    let trim = Value::from_function(filters::trim);
    environment.add_filter("trim", move |state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>| {
        if let [text, characters, ..] =
            &items.iter().map(|item| item.as_str().map_or(0, str::len)).collect::<Vec<_>>()[..]
        {
            values::charge_strip(state, *text, *characters)?;
        }
        call_on_texts(&trim, state, items)
    });
    let sum = Value::from_function(filters::sum);
    environment.add_filter("sum", move |state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>| {
        // A sum of lists goes through all of them for each of its items.
        let lists: Vec<usize> =
            items.first().into_iter().flat_map(|list| python::items(list)).filter_map(|item| item.len()).collect();
        state.consume_fuel((lists.len() * lists.iter().sum::<usize>() / 16) as u64)?;
        let made = call_on_walked(&sum, state, items)?;
        listed(state, made)
    });
    environment.add_filter("reverse", |state: &State<'_, '_>, value: Value| {
        read(state, value.clone())?;
        state.consume_fuel(count_of(std::slice::from_ref(&value)) as u64)?;
        listed(state, filters::reverse(&value)?)
    });
    environment.add_filter("pprint", |state: &State<'_, '_>, value: Value| text(state, value));
    environment.add_filter("join", join);
}

/// Adds bounds to the tests of minijinja.
fn add_tests(environment: &mut Environment<'static>) {
    for (name, test) in [
        ("startingwith", Value::from_function(tests::is_startingwith)),
        ("endingwith", Value::from_function(tests::is_endingwith)),
        ("lower", Value::from_function(tests::is_lower)),
        ("upper", Value::from_function(tests::is_upper)),
    ] {
        environment.add_test(name, move |state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>| {
            Ok::<_, Error>(call_on_texts(&test, state, items)?.is_true())
        });
    }
    let comparisons: [(&[&'static str], Value); 8] = [
        (&["eq", "equalto", "=="], Value::from_function(tests::is_eq)),
        (&["ne", "!="], Value::from_function(tests::is_ne)),
        (&["lt", "lessthan", "<"], Value::from_function(tests::is_lt)),
        (&["le", "<="], Value::from_function(tests::is_le)),
        (&["gt", "greaterthan", ">"], Value::from_function(tests::is_gt)),
        (&["ge", ">="], Value::from_function(tests::is_ge)),
        (&["in"], Value::from_function(tests::is_in)),
        (&["sameas"], Value::from_function(tests::is_sameas)),
    ];
    for (names, test) in comparisons {
        for name in names {
            let test = test.clone();
            environment.add_test(*name, move |state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>| {
                Ok::<_, Error>(call_on_walked(&test, state, items)?.is_true())
            });
        }
    }
}

/// Whether a value has others in it.
fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
}

/// The value itself, after a charge for all values within it.
fn walked(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    walk(state, &value, steps_of_characters, 0)?;
    Ok(value)
}

/// The value itself, after a charge for the characters of a text.
fn read(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    state.consume_fuel(value.as_str().map_or(1, |text| steps_of_characters(text.len())))?;
    Ok(value)
}

/// Charges for the values within `values`.
pub(super) fn walk_all(state: &State<'_, '_>, values: &[Value]) -> Result<(), Error> {
    values.iter().try_for_each(|value| walk(state, value, steps_of_characters, 0))
}

/// Charges for the values within a value; a text of some bytes costs `text_steps`.
fn walk(state: &State<'_, '_>, value: &Value, text_steps: fn(usize) -> u64, depth: usize) -> Result<(), Error> {
    state.consume_fuel(value.as_str().map_or(1, |text| text_steps(text.len())))?;
    if !is_container(value) {
        return Ok(());
    }
    // An iterator over it is made here, and another one by the comparison.
    state.consume_fuel(2)?;
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    if value.kind() == ValueKind::Map {
        python::pairs(value).try_for_each(|(key, item)| {
            walk(state, &key, text_steps, depth + 1)?;
            walk(state, &item, text_steps, depth + 1)
        })
    } else {
        python::items(value).try_for_each(|item| walk(state, &item, text_steps, depth + 1))
    }
}

/// A list or a dictionary as Python's text; other values as they are.
fn text(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    if !is_container(&value) || value.is_kwargs() {
        return Ok(value);
    }
    let mut out = Text::default();
    python::add_text(&value, &mut out)?;
    state.consume_fuel(out.steps())?;
    Ok(Value::from(out.into_string()))
}

/// The result of a filter or test that reads the characters of its arguments.
fn call_on_read(called: &Value, state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let items = items.into_values();
    for item in &items {
        read(state, item.clone())?;
    }
    called.call(state, &items)
}

/// The result of a filter or test that makes texts of its arguments.
fn call_on_texts(called: &Value, state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let items = items.into_values();
    for item in &items {
        read(state, item.clone())?;
    }
    let kwargs = items.iter().filter(|value| value.is_kwargs());
    for (_, value) in kwargs.flat_map(python::pairs) {
        text(state, value)?;
    }
    let texts = items.iter().map(|value| text(state, value.clone())).collect::<Result<Vec<_>, _>>()?;
    called.call(state, &texts)
}

/// The result of a filter or test that compares or hashes its arguments.
fn call_on_walked(called: &Value, state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let items = items.into_values();
    walk_all(state, &items)?;
    called.call(state, &items)
}

/// The result of a filter that reads every item of its first argument, and passes it to another filter or test, which charges for it.
fn call_on_items(called: &Value, state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let items = items.into_values();
    items.iter().try_for_each(|value| walk(state, value, |_| 1, 0))?;
    charge_paths(state, &items)?;
    called.call(state, &items)
}

/// Charges for the path of an attribute, which is read for every item of the first argument.
fn charge_paths(state: &State<'_, '_>, arguments: &[Value]) -> Result<(), Error> {
    let named = arguments.iter().filter(|value| value.is_kwargs()).flat_map(python::pairs).map(|(_, value)| value);
    let paths = arguments.iter().skip(1).cloned().chain(named);
    let bytes = paths.filter_map(|path| path.as_str().map(str::len)).sum();
    state.consume_fuel((count_of(arguments) as u64).saturating_mul(steps_of_characters(bytes) - 1))
}

/// The number of items of the first argument, if it is a list or a dictionary.
fn count_of(arguments: &[Value]) -> usize {
    arguments.first().filter(|value| is_container(value)).and_then(Value::len).unwrap_or(1)
}

/// The result of a filter that sorts its first argument, whose items are compared about log2(n) times each.
fn call_on_sorted(called: &Value, state: &mut State<'_, '_>, items: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let items = items.into_values();
    for _ in 0..=count_of(&items).max(1).ilog2() {
        walk_all(state, &items)?;
    }
    charge_paths(state, &items)?;
    called.call(state, &items)
}

/// A list of a lazy list (`x * 3`, `x + y`, `x[1:]`, `x.items()`); other values as they are.
pub(super) fn listed(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    let is_lazy = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
        && value.downcast_object_ref::<Vec<Value>>().is_none()
        && value.downcast_object_ref::<Tuple>().is_none();
    if !is_lazy {
        return Ok(value);
    }
    let mut items = vec![];
    for (index, item) in value.try_iter()?.enumerate() {
        // An item takes memory like half a step of text.
        if index % 2 == 0 {
            state.consume_fuel(1)?;
        }
        items.push(item);
    }
    Ok(Value::from(items))
}

/// `values|join(separator, attribute)`, with Python's texts.
fn join(
    state: &mut State<'_, '_>,
    values: Value,
    separator: Option<Value>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let separator = python::argument(separator, &options, "d")?.unwrap_or_else(|| "".into());
    let attribute = python::argument(attribute, &options, "attribute")?;
    options.assert_all_used()?;
    let separator = python::text(&separator)?;
    let values = match attribute.filter(|attribute| !attribute.is_none()) {
        Some(attribute) => {
            let named = Value::from(Kwargs::from_iter([("attribute", attribute)]));
            state.apply_filter("map", &[values, named])?
        }
        None => values,
    };
    joined(state, &separator, &values).map(Value::from)
}

/// The texts of `values` with `separator` between them.
pub(super) fn joined(state: &State<'_, '_>, separator: &str, values: &Value) -> Result<String, Error> {
    let mut out = Text::default();
    if values.is_undefined() {
        return Ok(String::new());
    }
    for (index, value) in values.try_iter()?.enumerate() {
        let before = out.steps();
        if index > 0 {
            out.push(separator)?;
        }
        python::add_text(&value, &mut out)?;
        state.consume_fuel(1 + out.steps() - before)?;
    }
    Ok(out.into_string())
}
