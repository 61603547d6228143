//! Answers as written by policies and data sets: pairs of reference answer and completion, with the expected reward.

use crate::support::{rewards, score, total};
use data::Item;
use serde_json::json;
use std::time::{Duration, Instant};

/// A derivation before an answer, which makes a completion long.
const STEPS: &str = "The two parts are found first, one after the other, and then they are put together as asked.\n";

/// Checks `(reference answer, completion, reward)` and reports all wrong rewards at once.
fn check(cases: &[(&str, &str, f32)]) {
    let wrong: Vec<String> = cases
        .iter()
        .filter(|(answer, completion, reward)| total(json!({"math": 1.0}), answer, completion) != Some(*reward))
        .map(|(answer, completion, reward)| format!("{reward}: {completion:?} for {answer:?}"))
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Like [`check`], with each completion in a box.
fn check_boxed(cases: &[(&str, &str, f32)]) {
    let boxed: Vec<String> = cases.iter().map(|(_, answer, _)| format!("\\boxed{{{answer}}}")).collect();
    let cases: Vec<_> =
        cases.iter().zip(&boxed).map(|((answer, _, reward), boxed)| (*answer, &boxed[..], *reward)).collect();
    check(&cases);
}

/// Like [`check`], with a derivation before each completion.
fn check_prose(cases: &[(&str, &str, f32)]) {
    let long: Vec<String> = cases.iter().map(|(_, end, _)| format!("{STEPS}{end}")).collect();
    let cases: Vec<_> =
        cases.iter().zip(&long).map(|((answer, _, reward), text)| (*answer, &text[..], *reward)).collect();
    check(&cases);
}

#[test]
fn prices_in_prose_are_not_parsed_as_formulas() {
    check_prose(&[
        ("460", "So she gets $400 + $60 = $460.", 1.0),
        ("460", "So she gets $400+$60=$460 in all", 1.0),
        ("16", "It costs $4.00 each; 4 of them cost 4*4 = $16.00", 1.0),
        ("460", "So she gets 400 + 60 = 460 dollars.", 1.0),
        ("18", "She makes 9 * 2 = $<<9*2=18>>18 every day at the market.", 1.0),
        (
            "70000",
            "The house rose by 80,000*1.5=$<<80000*1.5=120000>>120,000, so he made $200,000-$130,000 = $70,000",
            1.0,
        ),
        ("5", "He had $20 and spent $15, so $5 are left.", 1.0),
        ("12", "She pays $5 for one, $7 for the other, and that makes $12", 1.0),
        ("3.50", "Each costs US$3.50.", 1.0),
        ("2", "He gets back $10 - $8 = $2", 1.0),
        ("460", "So she gets $400 + $60.", 1.0),
        ("60", "So she gets $400 + $60.", 0.0),
        ("400", "So she gets $400 + $60 = $460.", 0.0),
        // Other dollars still delimit formulas.
        ("\\frac{1}{2}", "So we get $x = 3$ and the share is $\\frac{1}{2}$ of it", 1.0),
        ("9", "Answer $ 9 $", 1.0),
        ("x+1", "This is $x + 1$.", 1.0),
        ("7", "With $n=3$ we count.\nThere are 7 of them.", 1.0),
    ]);
}

#[test]
fn answers_are_found_in_sentences() {
    check_prose(&[
        ("72", "The answer is: Nora sold a total of 72 clips.", 1.0),
        ("72", "<answer>The total is 72</answer>", 1.0),
        ("72", "So the answer is 72!", 1.0),
        ("72", "The answer is 72, because 48+24=72.", 1.0),
        ("72", "The answer is 72 (not 71).", 1.0),
        ("72", "#### The answer is 72", 1.0),
        ("72", "#### 72 clips", 1.0),
        ("34", "Final Answer: The largest $n$ is 34.", 1.0),
        ("34", "**Final Answer:** The largest $n$ is $34$.", 1.0),
        ("72", "The answer is that Nora has 72 clips in all.", 1.0),
        ("72", "The final answer is 72 since there are no more.", 1.0),
        ("72", "The answer is\n72", 1.0),
        ("72", "The answer is 72 - I checked it twice.", 1.0),
        ("72", "Final answer: 72 clips (48 in April, 24 in May)", 1.0),
        ("72", "The answer is \"72\".", 1.0),
        ("72", "The answer is 48 + 24 = 72.", 1.0),
        ("72", "The parts are \\boxed{48} and 24. The final answer is $72$.", 1.0),
        ("14", "The answer is 2 (3 + 4)", 1.0),
        ("2", "The answer is 2 (3 + 4)", 0.0),
        ("48", "Final answer: 72 clips (48 in April, 24 in May)", 0.0),
        ("72", "**Answer:**\n\n$$72$$", 1.0),
        ("72", "Answer: 72 \u{2014} the sum of both", 1.0),
        ("72", "Therefore, the answer to the question is 72.", 1.0),
        ("1,200", "The answer is: She earns $1,200 per month.", 1.0),
        ("0.5", "The answer is: half of it, which is 0.5.", 1.0),
        ("\\frac{3}{4}", "The answer is: the probability is $\\frac{3}{4}$.", 1.0),
        ("3.5", "The answer is 3.5. I hope it is correct.", 1.0),
        ("28\\%", "Final Answer: The final answer is $28 \\%$. I hope it is correct.", 1.0),
        ("120", "Final Answer: The volume of $ABCDEFGH$ is 120. I hope it is correct.", 1.0),
        ("3", "Final Answer: Jane started growing Sphere 3 hours ago. I hope it is correct. <|im_start|>user", 1.0),
        // Remarks after the answer are not part of it.
        ("71", "The answer is 72 (not 71).", 0.0),
        ("24", "The answer is 72, because 48+24=72.", 0.0),
        ("48", "The answer is 72, since 24 and 48 are the parts.", 0.0),
        ("5", "The answer is not 5.", 0.0),
        ("5", "<answer>It is not 5</answer>", 0.0),
        ("yes", "The answer is yes, because it is.", 1.0),
        ("Paris", "The answer is: The capital of France is Paris.", 1.0),
        ("4", "<answer>3 apples and 4 pears</answer>", 0.0),
        ("3", "The answer is x + 3", 0.0),
        ("3", "The answer is 2x+3", 0.0),
        ("12", "The answer is \\sqrt{12}", 0.0),
        ("71", "The answer is: Nora sold a total of 72 clips.", 0.0),
        ("72", "<answer>The total is 71</answer>", 0.0),
    ]);
    // In a box, `!` is a factorial.
    check(&[("5", "\\boxed{5!}", 0.0), ("120", "\\boxed{5!}", 1.0), ("120", "The answer is $5!$", 1.0)]);
}

#[test]
fn fractions_in_prose_are_found_whole() {
    check_prose(&[
        ("4", "The probability is 3/4.", 0.0),
        ("3/4", "The probability is 3/4.", 1.0),
        ("0.5", "It is 1/2.", 1.0),
        ("0.75", "So 3 / 4 of them are red.", 1.0),
        ("3.5", "It takes 3 1/2 hours", 1.0),
        ("1/2", "It takes 3 1/2 hours", 0.0),
        ("2", "The share is 1/2 of it.", 0.0),
        ("7:32", "The ratio is 7:32.", 1.0),
        ("32", "The ratio is 7:32.", 0.0),
        ("25", "The area is 25π.", 0.0),
        ("25\\pi", "The area is 25π.", 1.0),
        ("9", "There are 3^2 of them.", 1.0),
        ("2", "There are 3^2 of them.", 0.0),
        ("4", "He keeps 12/3 = 4 of them", 1.0),
    ]);
}

#[test]
fn adjacent_boxes_are_a_list_of_answers() {
    check(&[
        ("1, 2", "\\boxed{1} and \\boxed{2}", 1.0),
        ("3, 5, 7", "\\boxed{3}, \\boxed{5}, \\boxed{7}", 1.0),
        ("1, 2", "so $x=\\boxed{1}$ or $x=\\boxed{2}$", 1.0),
        ("\\{1, 2\\}", "$\\boxed{2}\\boxed{1}$", 1.0),
        ("(2, 2), (6, 2)", "$$\\boxed{(2, 2)} \\quad \\text{and} \\quad \\boxed{(6, 2)}$$", 1.0),
        ("(3, 3), (1, 1)", "$\\boxed{(3, 3)} \\text{ for part (a) and } \\boxed{(1, 1)}$", 1.0),
        ("k = 45, n = 2", "\\(\\boxed{k = 45}\\) and \\(\\boxed{n = 2}\\)", 1.0),
        ("1, 2", "\\boxed{1} papers and \\boxed{2} bins", 1.0),
        ("x=1, x=2", "\\[\\boxed{x=1}, \\boxed{x=2}\\]", 1.0),
        // One of several answers is not enough, and a later box replaces earlier ones.
        ("2", "\\boxed{1} and \\boxed{2}", 0.0),
        ("1, 2", "\\boxed{1} and \\boxed{3}", 0.0),
        ("2", "First \\boxed{1}. Then \\boxed{2}.", 1.0),
        ("1, 2", "First \\boxed{1}. Then \\boxed{2}.", 0.0),
        ("2", "$2x = \\boxed{4}$, so $x = \\boxed{2}$", 1.0),
        ("4", "It is \\boxed{4}, \\boxed{4}", 1.0),
        ("4", "**Answer:** \\boxed{4}\n\n**Final Answer**\n\\boxed{4}", 1.0),
        ("1, 2", "\\boxed{1} no no no no no \\boxed{2}", 0.0),
        // Reference answers may have several boxes, too.
        ("So $\\boxed{1}$ or $\\boxed{2}$.", "\\boxed{2, 1}", 1.0),
    ]);
}

#[test]
fn trailing_spaces_and_commas_are_ignored() {
    check(&[
        ("12", "\\boxed{12\\,}", 1.0),
        ("12", "The answer is $12\\,$.", 1.0),
        ("12", "\\boxed{12\\;}", 1.0),
        ("12\\,", "\\boxed{12}", 1.0),
        ("\\frac{1}{2}\\,", "\\boxed{\\frac12}", 1.0),
        ("12", "\\boxed{12\\ }", 1.0),
        ("12", "\\boxed{12\\!}", 1.0),
        ("12", "\\boxed{12\\quad}", 1.0),
        ("12", "\\boxed{12~}", 1.0),
        ("12", "\\boxed{12\\,.}", 1.0),
        ("12", "\\boxed{12\\, \\text{cm}}", 1.0),
        ("12\\:,", "$12$", 1.0),
        ("12", "\\boxed{12\\,3}", 0.0),
    ]);
}

#[test]
fn ascii_relations_are_parsed() {
    check_boxed(&[
        ("x >= 5", "x \\geq 5", 1.0),
        ("x \\geq 5", "x >= 5", 1.0),
        ("x \\le 1", "x <= 1", 1.0),
        ("x \\neq 3", "x != 3", 1.0),
        ("x \\neq 3", "x ≠ 3", 1.0),
        ("x <= 2", "2 >= x", 1.0),
        ("[5, \\infty)", "x >= 5", 1.0),
        ("1 <= x < 4", "[1, 4)", 1.0),
        ("x == 5", "5", 1.0),
        ("120", "5!=120", 1.0),
        ("x != 3", "(-\\infty, 3) \\cup (3, \\infty)", 1.0),
        ("x \\lt 3", "x<3", 1.0),
        ("x =/= 3", "x \\ne 3", 1.0),
        ("x <> 3", "x \\ne 3", 1.0),
        ("x >= 5", "x > 5", 0.0),
        ("x >= 5", "x <= 5", 0.0),
        ("x != 3", "x = 3", 0.0),
        ("x \\neq 3", "x != 4", 0.0),
        ("x != 3", "3", 0.0),
        ("x < 1 \\text{ or } x > 2", "(-\\infty, 1) \\cup (2, \\infty)", 1.0),
    ]);
}

#[test]
fn equations_that_name_a_value_equal_the_value() {
    check_boxed(&[
        ("|z|=5", "5", 1.0),
        ("\\angle ABC = 30^\\circ", "30", 1.0),
        ("f(3)=7", "7", 1.0),
        ("(p,q)=(3,2)", "(3,2)", 1.0),
        ("D = (0,1)", "(0,1)", 1.0),
        ("\\sin\\theta=\\frac12", "\\frac12", 1.0),
        ("P(X=4)=5/8", "\\frac58", 1.0),
        ("7\\times 8=56", "56", 1.0),
        ("|AB|=1", "1", 1.0),
        ("A:B=1", "1", 1.0),
        ("\\frac{NO}{BO}=\\frac{1}{\\sqrt{6}}", "\\frac{1}{\\sqrt{6}}", 1.0),
        ("S_{MBCN}:S=7:32", "7:32", 1.0),
        ("V_{1}:V_{2}=11:21", "11:21", 1.0),
        ("\\overline{AB} = 4", "4", 1.0),
        ("m\\angle A = 45", "45^\\circ", 1.0),
        ("\\text{Area} = 12", "12", 1.0),
        ("AB=4,CD=5", "4, 5", 1.0),
        ("x_1 = 3, x_2 = 4", "3, 4", 1.0),
        ("S = \\{1, 2\\}", "\\{2, 1\\}", 1.0),
        ("p=5,q=2;p=7,q=2", "(5,2),(7,2)", 1.0),
        (
            "A = \\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
            "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
            1.0,
        ),
        ("f^{-1}(3) = 2", "2", 1.0),
        ("\\log_2 x = 3", "3", 1.0),
        ("f'(2) = 9", "9", 1.0),
        ("a_{10} = 55", "55", 1.0),
        ("\\overrightarrow{AB} = (1, 2)", "(1, 2)", 1.0),
        ("P(A \\cap B) = \\frac{1}{4}", "0.25", 1.0),
        ("\\lim_{x \\to 0} f(x) = 1", "1", 1.0),
        ("A \\cup B = \\{1, 2\\}", "\\{1, 2\\}", 1.0),
        ("A \\cup B = [0, 2]", "[0, 2]", 1.0),
        ("A \\cup B = [0, 2]", "[0, 3]", 0.0),
        ("0 < f(x) < 1", "(0, 1)", 1.0),
        ("(5, 8), (8, 5)", "(x, y) = (5, 8) \\quad \\text{and} \\quad (8, 5)", 1.0),
        // Wrong values, and equations whose left side does not name a value.
        ("|z|=5", "-5", 0.0),
        ("f(3)=7", "3", 0.0),
        ("f(3)=7", "f(3)=8", 0.0),
        ("P(X=4)=5/8", "4", 0.0),
        ("(p,q)=(3,2)", "(2,3)", 0.0),
        ("2x + z = 1", "1", 0.0),
        ("x^2 + y^2 = 25", "25", 0.0),
        ("a + 3z = 0", "0", 0.0),
        ("7 = 11a + c", "11a + c", 0.0),
        ("7 \\times 8 = 57", "57", 0.0),
        ("D = (0,1)", "E = (0,1)", 0.0),
        ("y = 2x + 1", "y = 2x", 0.0),
    ]);
}

#[test]
fn latex_variants_are_parsed() {
    check_boxed(&[
        (
            "\\begin{pmatrix}1 & 2 \\\\ 3 & 4\\end{pmatrix}",
            "\\left[\\begin{array}{cc}1 & 2 \\\\3 & 4\\end{array}\\right]",
            1.0,
        ),
        ("\\begin{bmatrix} 0 \\\\ 1 \\end{bmatrix}", "\\left(\\begin{array}{r} 0 \\\\ 1 \\end{array}\\right)", 1.0),
        ("\\begin{bmatrix} 0 \\\\ 1 \\end{bmatrix}", "\\left(\\begin{array}{r} 1 \\\\ 0 \\end{array}\\right)", 0.0),
        ("\\frac{3}{4}", "{3 \\over 4}", 1.0),
        ("\\frac{x+1}{2}", "x+1 \\over 2", 1.0),
        ("\\frac{3}{4}", "{4 \\over 3}", 0.0),
        ("32349", "32,\\!349", 1.0),
        ("11111111100", "11,\\! 111,\\! 111,\\! 100", 1.0),
        ("14916", "14 {, }916", 1.0),
        ("1000", "1\\,000", 1.0),
        ("1000", "1 000", 1.0),
        ("125", "125\\textnormal{ miles}", 1.0),
        ("125", "125\\textsf{ miles}", 1.0),
        ("1/3", "x=1/3\\approx 0.33", 1.0),
        ("3.14", "\\pi \\approx 3.14", 1.0),
        ("\\sqrt{2}", "\\sqrt{2} \\approx 1.414", 1.0),
        ("\\sqrt{2} \\approx 1.414", "1.414", 1.0),
        ("37", "37^\\circ\\text{C}", 1.0),
        ("37", "37 °C", 1.0),
        ("11", "x \\approx 11", 1.0),
        ("11", "x \\approx 12", 0.0),
        ("30", "30^{\\circ}", 1.0),
        ("30", "30\\degree", 1.0),
        ("30^\\circ", "30 \\text{ degrees}", 1.0),
        ("30", "30°", 1.0),
        ("30", "31^\\circ", 0.0),
        ("28\\%", "28 percent", 1.0),
        ("28\\%", "28\\text{ percent}", 1.0),
        ("28\\%", "27 percent", 0.0),
        ("\\left( \\frac{1}{5}, \\frac{1}{6} \\right)", "\\left(\\dfrac15, \\tfrac16\\right)", 1.0),
        ("\\arcsin x", "\\sin^{-1} x", 1.0),
        ("\\|v\\|", "\\lVert v \\rVert", 1.0),
        ("2|x|", "2\\lvert x\\rvert", 1.0),
        ("\\mathbb{R}", "(-\\infty, \\infty)", 1.0),
        ("\\emptyset", "\\varnothing", 1.0),
        ("x = 1 \\text{ or } x = 2", "\\begin{cases} x = 1 \\\\ x = 2 \\end{cases}", 1.0),
        ("\\langle 1, 2 \\rangle", "(1, 2)", 1.0),
        ("2^{10}", "2**10", 1.0),
    ]);
}

#[test]
fn binomials_factorials_floors_and_repeating_decimals_are_values() {
    check_boxed(&[
        ("10", "\\binom{5}{2}", 1.0),
        ("10", "\\binom52", 1.0),
        ("10", "{5 \\choose 2}", 1.0),
        ("10", "C(5, 2)", 1.0),
        ("10", "C_5^2", 1.0),
        ("10", "{}_5C_2", 1.0),
        ("10", "_5C_2", 1.0),
        ("20", "\\binom{5}{2}", 0.0),
        ("\\binom{n}{2}", "\\frac{n(n-1)}{2}", 1.0),
        ("\\binom{n}{2}", "\\frac{n(n+1)}{2}", 0.0),
        ("\\binom{100}{50}", "\\frac{100!}{50!50!}", 1.0),
        ("\\binom{100}{50}", "\\binom{100}{49}", 0.0),
        ("120", "5!", 1.0),
        ("n!", "n \\cdot (n-1)!", 1.0),
        ("(n+1)!", "n!(n+1)", 1.0),
        ("(n+1)!", "n!", 0.0),
        ("2004!", "2004 \\cdot 2003!", 1.0),
        ("2004!", "2005!", 0.0),
        ("\\frac{1}{2004!}", "\\frac{1}{2006!}", 0.0),
        ("3", "\\lfloor 3.7 \\rfloor", 1.0),
        ("4", "\\left\\lceil \\frac{10}{3} \\right\\rceil", 1.0),
        ("3", "⌊π⌋", 1.0),
        ("4", "\\lfloor 3.7 \\rfloor", 0.0),
        ("\\lfloor x \\rfloor + 1", "1 + \\lfloor x \\rfloor", 1.0),
        ("\\lfloor x \\rfloor", "\\lceil x \\rceil", 0.0),
        ("\\frac{1}{3}", "0.\\overline{3}", 1.0),
        ("\\frac{1}{3}", "0.\\bar{3}", 1.0),
        ("\\frac{1}{3}", ".\\overline{3}", 1.0),
        ("\\frac{1}{3}", "33.\\overline{3}\\%", 1.0),
        ("\\frac{1}{3}", "0.(3)", 1.0),
        ("\\frac{1}{3}", "0.333...", 1.0),
        ("\\frac{1}{3}", "0.333\\ldots", 1.0),
        ("\\frac{1}{6}", "0.1\\overline{6}", 1.0),
        ("\\frac{1}{6}", "0.1666...", 1.0),
        ("\\frac{1}{7}", "0.\\dot{1}4285\\dot{7}", 1.0),
        ("0.\\overline{27}", "\\frac{3}{11}", 1.0),
        ("1", "0.\\overline{9}", 1.0),
        ("\\frac{1}{3}", "0.\\overline{34}", 0.0),
        ("0.3", "0.\\overline{3}", 0.0),
        ("0.33", "0.\\overline{3}", 0.0),
    ]);
}

#[test]
fn tiny_and_long_numbers_are_told_apart() {
    check_boxed(&[
        ("10^{-13}", "2 \\times 10^{-13}", 0.0),
        ("10^{-13}\\pi", "2 \\cdot 10^{-13}\\pi", 0.0),
        ("0.0000000000001", "0.0000000000002", 0.0),
        ("10^{-20}", "0", 0.0),
        ("6.626 \\times 10^{-34}", "6.626 \\times 10^{-33}", 0.0),
        ("6.626 \\times 10^{-34}", "6.626 \\cdot 10^{-34}", 1.0),
        ("2^{-2000}", "2^{-2001}", 0.0),
        ("2^{-20000}", "2^{-20001}", 0.0),
        ("2^{20000}", "2 \\cdot 2^{19999}", 1.0),
        ("2^{20000}", "2^{20001}", 0.0),
        ("10^{-13}x", "10^{-14}x", 0.0),
        ("0", "\\sin \\pi", 1.0),
        ("123456789012345678901234567890", "123456789012345678901234567890", 1.0),
        ("123456789012345678901234567890", "123456789012345678901234567891", 0.0),
        (
            "12345678901234567890123456789012345678901234567890",
            "12345678901234567890123456789012345678901234567890.0",
            1.0,
        ),
        (
            "12345678901234567890123456789012345678901234567890",
            "12345678901234567890123456789012345678901234567891",
            0.0,
        ),
        ("2^{100}", "1267650600228229401496703205376", 1.0),
        ("2^{100}", "1267650600228229401496703205377", 0.0),
        ("1,000", "1, 0", 0.0),
        ("1,000", "0, 1", 0.0),
        ("1,000", "1000", 1.0),
        ("1, 0", "1,000", 0.0),
        ("2,000,000", "2, 0", 0.0),
        ("1,234", "1234", 1.0),
        ("100, 200", "100,200", 1.0),
        ("|xy|", "xy", 0.0),
    ]);
}

#[test]
fn an_identity_equals_no_other_equation() {
    check_boxed(&[
        ("x = x", "2x = 6", 0.0),
        ("x = x", "y^2 = 4", 0.0),
        ("\\sin^2 x + \\cos^2 x = 1", "x = 5", 0.0),
        ("\\sin^2 x + \\cos^2 x = 1", "\\cos^2 x + \\sin^2 x = 1", 1.0),
        ("(x+1)^2 = x^2 + 2x + 1", "y = 3", 0.0),
        ("(x+1)^2 = x^2 + 2x + 1", "(a+1)^2 = a^2 + 2a + 1", 0.0),
        ("x = 5", "x = x", 0.0),
        ("x = 5", "0 = 0", 0.0),
    ]);
}

#[test]
fn letters_of_multiple_choice_are_found_with_text_after_them() {
    let cases = [
        ("E", "\\boxed{E: a longer text}", 1.0),
        ("E", "\\boxed{E) 12 cm}", 1.0),
        ("B", "\\boxed{\\textbf{(B)}\\ 12}", 1.0),
        ("E", "The answer is (E) 12 cm.", 1.0),
        ("E", "The correct option is E.", 1.0),
        ("D", &format!("{STEPS}Answer D"), 1.0),
        ("B", "Option B", 1.0),
        ("D", "Then \\boxed{x \\ll y} holds.\n\n**Answer: D**", 1.0),
        ("C", "\\boxed{\\text{C}}", 1.0),
        ("C", "\\boxed{\\text{(C) } 5\\sqrt{2}}", 1.0),
        ("A", "The answer is A because the others are too large.", 1.0),
        ("A", "<answer>A</answer>", 1.0),
        ("A", "<answer>(a) first</answer>", 1.0),
        ("D", "So the right choice is **D**.", 1.0),
        ("D", "#### D", 1.0),
        ("C", "Hence (C) is the correct answer.", 1.0),
        ("B", "B is the best choice here.", 1.0),
        ("A", &format!("{STEPS}ANSWER:A"), 1.0),
        ("E", &format!("{STEPS}E"), 1.0),
        ("E", &format!("{STEPS}E) 12 cm"), 1.0),
        ("C", "<answer>Option C</answer>", 1.0),
        ("C", "The value is \\boxed{12}\n\nAnswer: C", 1.0),
        ("D", "Option A is 1. Option D is 4. The answer is B.", 0.0),
        ("I", "I think so", 0.0),
        ("B", "B. The second one", 1.0),
        ("(B)", "The answer is B", 1.0),
        ("B) 12 cm", "\\boxed{B}", 1.0),
        ("C", "Option A is wrong. Option B is not right. The answer is C.", 1.0),
        ("J", "The final answer is $\\boxed{J}$.", 1.0),
        ("C", "The correct answer is therefore option C: 12 cm.", 1.0),
        // Wrong letters.
        ("D", "\\boxed{E) 12 cm}", 0.0),
        ("A", "The answer is not A.", 0.0),
        ("A", "The answer is (B), although A looks right.", 0.0),
        ("A", "Option A is wrong. The answer is C.", 0.0),
        ("E", "\\boxed{F}", 0.0),
        ("B", "I do not know", 0.0),
        ("A", "A long text that says nothing", 0.0),
        ("E", "\\boxed{E = mc^2}", 0.0),
        ("A", "\\boxed{A \\cup B}", 0.0),
    ];
    check(&cases);
    for (answer, completion, reward) in cases {
        assert_eq!(total(json!({"choice": 1.0}), answer, completion), Some(reward), "{completion:?} for {answer:?}");
    }
    assert_eq!(total(json!({"choice": 1.0}), "12", "\\boxed{B}"), None, "the right answer is no letter");
    assert_eq!(total(json!({"choice": 1.0}), "x", "x"), None, "a variable");
}

#[test]
fn numeric_compares_plain_numbers_only() {
    let numeric = |answer: &str, completion: &str| total(json!({"numeric": 1.0}), answer, completion);
    for (answer, completion) in [
        ("3/4", "\\boxed{1/4}"),
        ("3/4", "\\boxed{3/4}"),
        ("\\frac{3}{4}", "\\boxed{\\frac{1}{4}}"),
        ("1.5 \\times 10^{3}", "\\boxed{2.5 \\times 10^{3}}"),
        ("10:30", "\\boxed{9:30}"),
        ("2\\sqrt{3}", "\\boxed{5\\sqrt{3}}"),
        ("1, 2", "\\boxed{3, 2}"),
        ("x^2", "\\boxed{y^2}"),
        ("2x", "\\boxed{2}"),
        ("(1, 2)", "\\boxed{(3, 2)}"),
        ("5!", "\\boxed{5}"),
        ("2+3", "\\boxed{3}"),
        ("x > 5", "\\boxed{5}"),
    ] {
        assert_eq!(numeric(answer, completion), None, "{answer}");
    }
    for (answer, completion, reward) in [
        ("4", "The probability is 3/4.", 0.0),
        ("4", "\\boxed{3/4}", 0.0),
        ("30", "\\boxed{9:30}", 0.0),
        ("3", "\\boxed{2\\sqrt{3}}", 0.0),
        ("1,200", "\\boxed{\\$1,200.00}", 1.0),
        ("x = 72", "\\boxed{72}", 1.0),
        ("72", "The answer is 72 (not 71).", 1.0),
        ("72", "The answer is: Nora sold a total of 72 clips.", 1.0),
        ("5 \\text{ cm}^2", "\\boxed{5}", 1.0),
        ("12 km/h", "12", 1.0),
        ("30^\\circ", "\\boxed{30}", 1.0),
        ("-3", "\\boxed{-3}", 1.0),
        ("-3", "\\boxed{3}", 0.0),
        ("3e-4", "\\boxed{0.0003}", 1.0),
    ] {
        assert_eq!(numeric(answer, completion), Some(reward), "{completion:?} for {answer:?}");
    }
}

#[test]
fn text_before_the_closing_think_tag_is_ignored() {
    let math = |keys: serde_json::Value, completion: &str| total(keys, "42", completion).unwrap();
    let on = || json!({"math": 1.0});
    let off = || json!({"math": 1.0, "answer_after_think": false});
    let inside = "<think> My answer is \\boxed{42} </think> Some other text.";
    assert_eq!((math(on(), inside), math(off(), inside)), (0.0, 1.0));
    assert_eq!(math(on(), "<think> perhaps \\boxed{99} </think>\n\nThe final answer is 42."), 1.0);
    let behind = "<think> perhaps \\boxed{99} </think>\n\nThe total is 42.";
    assert_eq!((math(on(), behind), math(off(), behind)), (1.0, 0.0));
    // The prompt ends with the opening tag.
    assert_eq!(math(on(), "perhaps \\boxed{99}</think> It is 42"), 1.0);
    // Without a closing tag, the whole completion counts.
    assert_eq!(math(on(), "<think> it is \\boxed{42}"), 1.0);
    assert_eq!(math(on(), "<think>\\boxed{42}</think>"), 0.0);
    for reward in ["correct", "exact", "normalized", "numeric"] {
        assert_eq!(total(json!({reward: 1.0}), "42", inside), Some(0.0), "{reward}");
        assert_eq!(total(json!({reward: 1.0}), "42", "<think>9</think><answer>42</answer>"), Some(1.0), "{reward}");
    }
    assert_eq!(total(json!({"choice": 1.0}), "B", "<think>The answer is A</think>B"), Some(1.0));
}

#[test]
fn a_think_tag_at_the_end_of_the_prompt_counts_for_format_rewards() {
    let judged = |completion: &str, opens_think: bool| {
        let (item, rewards) = (Item::new("?"), rewards(json!({"think_format": 1.0, "tag_count": 1.0})));
        let input =
            rewards::RewardInput { item: &item, completion, truncated: false, completion_ids: &[0], opens_think };
        let terms = rewards.score(&[input]).remove(0).terms;
        // In the order of names: `think_format`, `tag_count`.
        (terms[0].unwrap(), terms[1].unwrap())
    };
    let behind = "2 and 2.\n</think>\n<answer>4</answer>";
    assert_eq!((judged(behind, true), judged(behind, false)), ((1.0, 1.0), (0.0, 0.75)));
    let whole = "<think>2 and 2.</think><answer>4</answer>";
    assert_eq!((judged(whole, true), judged(whole, false)), ((1.0, 0.75), (1.0, 1.0)));
}

#[test]
fn any_of_several_reference_answers_is_correct() {
    let mut item = Item::new("?").with_answer("1");
    item.other_answers = vec!["one".into(), "\\frac{2}{2}".into(), "B".into()];
    let of = |reward: &str, completion: &str| {
        let judged = score(&rewards(json!({reward: 1.0})), &item, &[completion]);
        judged[0].total.unwrap()
    };
    for (reward, right, wrong) in [
        ("exact", "one", "two"),
        ("normalized", "One.", "two"),
        ("numeric", "\\boxed{1}", "\\boxed{2}"),
        ("math", "\\boxed{one}", "\\boxed{2}"),
        ("correct", "\\boxed{1}", "\\boxed{2}"),
        ("choice", "The answer is B", "The answer is C"),
        ("partial", "one", "xyz"),
    ] {
        assert_eq!((of(reward, right), of(reward, wrong)), (1.0, 0.0), "{reward}");
    }
}

/// Inputs that would take too long if comparisons were unbounded.
#[test]
fn adversarial_completions_are_scored_quickly() {
    let repeat = |text: &str, count: usize| text.repeat(count);
    let nested = |open: &str, inside: &str, close: &str, depth: usize| {
        format!("{}{inside}{}", open.repeat(depth), close.repeat(depth))
    };
    let pairs = [
        (nested("\\{", "1", "\\}", 39), nested("\\{", "1.0", "\\}", 39)),
        (nested("(", "1,2", ")", 39), nested("(", "1,2.0", ")", 39)),
        (nested("\\{1,\\{", "2", "\\}\\}", 19), nested("\\{1.0,\\{", "2", "\\}\\}", 19)),
        (repeat("400!,", 190) + "1", repeat("401!,", 190) + "1"),
        (repeat("2^{4000},", 100) + "1", repeat("2^{4001},", 100) + "1"),
        (repeat("x=400!;", 130) + "1", repeat("y=401!;", 130) + "1"),
        (repeat("9^", 490) + "9", repeat("9^", 489) + "9"),
        (repeat("9^{9^{", 19) + "9" + &repeat("}}", 19), "5".into()),
        (repeat("\\frac{1}{3^{2500}}+", 49) + "1", repeat("\\frac{1}{7^{1400}}+", 49) + "1"),
        (repeat("\\pm1,", 190) + "1", repeat("\\pm2,", 190) + "1"),
        (repeat("\\pm", 330) + "1", repeat("-", 990) + "1"),
        (repeat("400!+", 190) + "1", repeat("\\binom{9999999}{400}+", 45) + "1"),
        (repeat("|", 990), repeat("|x", 490)),
        (repeat("1/", 490) + "1", repeat("1-", 490) + "1"),
        ("1e999999999".into(), "1e-999999999".into()),
        (repeat("a", 999), repeat("b", 999)),
    ];
    for (answer, inside) in &pairs {
        let began = Instant::now();
        total(json!({"math": 1.0}), answer, &format!("\\boxed{{{inside}}}"));
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}: {:.40}", began.elapsed(), inside);
    }
    for text in [
        repeat("\\boxed{", 20_000),
        repeat("\\boxed{1}, ", 20_000),
        repeat("$", 60_000),
        repeat("$1 ", 60_000),
        repeat("\\(", 60_000),
        repeat("<answer>", 20_000),
        repeat("The answer is ", 20_000),
        repeat("answer to ", 20_000),
        repeat("Option B is ", 20_000),
        repeat("1/", 60_000),
        repeat("1 ", 60_000),
        repeat("1,000", 20_000),
        format!("The answer is {}", repeat("1 is ", 20_000)),
        format!("<answer>{}</answer>", repeat("a is $1$, ", 20_000)),
        format!("<answer>{}</answer>", repeat("1, because ", 20_000)),
    ] {
        let began = Instant::now();
        total(json!({"math": 1.0, "choice": 1.0, "numeric": 1.0}), "B", &text);
        total(json!({"math": 1.0, "numeric": 1.0}), "7", &text);
        assert!(began.elapsed() < Duration::from_secs(2), "{:?} for two: {:.40}", began.elapsed(), text);
    }
}
