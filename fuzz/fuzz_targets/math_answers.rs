//! Scores a completion by a reference answer, which are separated by the first zero byte or line break.
#![no_main]

use grpo_data::Item;
use grpo_rewards::{AnswerRule, Choice, MathEquivalence, Numeric, RewardFn, RewardInput};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    let (reference, completion) = text.split_once(['\0', '\n']).unwrap_or((&text, &text));
    grpo_rewards::math::equivalent(reference, completion);
    let item = Item::new("").with_answer(reference);
    let input = RewardInput::new(&item, completion);
    let answer = AnswerRule::default();
    let rewards: [&dyn RewardFn; 3] =
        [&MathEquivalence { answer }, &Numeric { answer, tolerance: 1e-6 }, &Choice { answer }];
    for reward in rewards {
        let score = reward.score(&input);
        assert!(score.is_none_or(|score| [0.0, 1.0].contains(&score)), "{}: {score:?}", reward.name());
    }
});
