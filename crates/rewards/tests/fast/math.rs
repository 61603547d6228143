//! Mathematical equivalence compared with the Python package math_verify: `math_table.py` generates `math_table.tsv`.

use grpo_rewards::math::equivalent;

/// `(reference, answer, reason)` of intended differences from math_verify.
const DIFFERENCES: &[(&str, &str, &str)] = &[
    ("70000", "7e4", "the notation of programs is a number"),
    ("12.5\\%", "12.5", "as 50\\% and 50, which are the same for math_verify, too"),
    ("6.02 \\times 10^{23}", "602 \\times 10^{21}", "math_verify rounds large decimals"),
    ("3+4i", "3 + 4 i", "math_verify takes an i between spaces for another i"),
    ("i", "\\sqrt{-1}", "that is what i is"),
    ("1 < x < 4", "4 > x > 1", "the same interval"),
    ("36 \\text{ cm}^2", "36 \\text{ cm}^3", "another unit is another answer"),
    ("\\text{5 dollars}", "5", "a unit does not count inside of \\text either"),
];

#[test]
fn verdicts_equal_math_verify_except_known_differences() {
    let (mut wrong, mut count) = (Vec::new(), [0, 0]);
    for line in include_str!("math_table.tsv").lines().filter(|line| !line.starts_with('#')) {
        let [reference, answer, verdict] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let theirs = verdict == "1";
        count[usize::from(theirs)] += 1;
        let known = DIFFERENCES.iter().any(|(a, b, _)| (*a, *b) == (reference, answer));
        if (equivalent(reference, answer) == theirs) == known {
            wrong.push(format!("{reference}   and   {answer}: math_verify says {theirs}, known: {known}"));
        }
    }
    assert!(wrong.is_empty(), "{}\n{} of {count:?}", wrong.join("\n"), wrong.len());
    assert!(count[0] > 150 && count[1] > 200, "{count:?}");
}

/// Parsing an item twice per level, or comparing a chain of signs link by link, would never end.
#[test]
fn nested_sets_and_chains_of_percent_signs_are_compared_once() {
    for opening in [r"\{x|", r"\{x|1;", r"\{1,"] {
        let nested = |inside: &str| format!("{}{inside}{}", opening.repeat(39), r"\}".repeat(39));
        assert!(equivalent(&nested("x > 1"), &nested(" x > 1 ")));
        assert!(!equivalent(&nested("x > 1"), &nested("x > 2")));
    }
    assert!(equivalent(r"25\%\%", "25%"));
    assert!(!equivalent(&format!("5{}", "%".repeat(990)), "6"));
}

#[test]
fn expressions_of_many_levels_are_compared_as_text() {
    let power = |exponents: usize| "2".to_owned() + &"^1".repeat(exponents);
    // Up to 100 levels are evaluated: all of these powers are 2.
    assert!(equivalent("2", &power(99)) && equivalent(&power(40), &power(60)));
    assert!(!equivalent("3", &power(99)) && !equivalent("2", &power(101)));
    // The same text is right for any number of levels.
    assert!(equivalent(&power(400), &power(400)) && !equivalent(&power(400), &power(399)));
}
