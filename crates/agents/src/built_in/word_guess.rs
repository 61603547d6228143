//! A game: guess a word.

use crate::environment::{Environment, Episode, Failure, Reply, Start};
use grpo_data::Item;
use serde_json::{Value, json};

/// The model guesses the word that is the row's reference answer. After a wrong guess it reads which letters are right. The reward is 1 for
/// the word and 0 for another guess; the game ends with the word or after `max_guesses` guesses.
pub struct WordGuess {
    /// The largest number of guesses.
    pub max_guesses: usize,
}

impl Default for WordGuess {
    fn default() -> Self {
        Self { max_guesses: 6 }
    }
}

impl Environment for WordGuess {
    fn reset(&self, row: &Item, _: usize) -> Result<Start, Failure> {
        let word = row.answer.as_deref().unwrap_or_default().trim().to_lowercase();
        if word.is_empty() || !word.chars().all(char::is_alphabetic) {
            return Err(Failure::new(format!("expected a word as the row's answer, got {:?}", row.answer)));
        }
        let rules = format!(
            "Guess a word of {} letters. Write each guess as <guess>word</guess>. You have {} guesses.",
            word.chars().count(),
            self.max_guesses
        );
        let messages = vec![json!({"role": "user", "content": rules})];
        Ok(Start { messages, episode: Box::new(Game { word, left: self.max_guesses }) })
    }
}

struct Game {
    word: String,
    left: usize,
}

impl Episode for Game {
    fn step(&mut self, message: &Value) -> Result<Reply, Failure> {
        let text = message["content"].as_str().unwrap_or_default();
        self.left = self.left.saturating_sub(1);
        let guess = guess(text);
        let is_right = guess.as_deref() == Some(&self.word);
        let content = match &guess {
            Some(guess) => format!("{}. {} guesses left.", self.hints(guess), self.left),
            None => format!("Write a guess as <guess>word</guess>. {} guesses left.", self.left),
        };
        let messages = vec![json!({"role": "user", "content": content})];
        Ok(Reply { messages, reward: Some(f32::from(is_right)), done: is_right || self.left == 0 })
    }
}

impl Game {
    /// Returns each letter of the guess with `right` (its place), `elsewhere` or `absent`. A letter of the word counts once.
    fn hints(&self, guess: &str) -> String {
        let word: Vec<char> = self.word.chars().collect();
        let letters: Vec<char> = guess.chars().collect();
        let mut rest: Vec<char> =
            word.iter().enumerate().filter(|(i, c)| letters.get(*i) != Some(c)).map(|(_, c)| *c).collect();
        let hint = |(i, letter): (usize, &char)| {
            let hint = if word.get(i) == Some(letter) {
                "right"
            } else if let Some(at) = rest.iter().position(|c| c == letter) {
                rest.swap_remove(at);
                "elsewhere"
            } else {
                "absent"
            };
            format!("{letter} {hint}")
        };
        letters.iter().enumerate().map(hint).collect::<Vec<_>>().join(", ")
    }
}

/// Returns the word in the last `<guess>`, in lower case, of at most 32 letters.
fn guess(text: &str) -> Option<String> {
    let (_, rest) = text.rsplit_once("<guess>")?;
    let word = rest.split("</guess>").next()?.trim().to_lowercase();
    (1..=32).contains(&word.chars().count()).then_some(word).filter(|word| word.chars().all(char::is_alphabetic))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Value {
        json!({"role": "assistant", "content": text})
    }

    #[test]
    fn a_game_gives_hints_and_ends_with_the_word() {
        let row = Item::new("Let us play.").with_answer("Lever");
        let Start { messages, mut episode } = WordGuess::default().reset(&row, 0).unwrap();
        assert!(messages[0]["content"].as_str().unwrap().contains("5 letters"));
        let reply = episode.step(&said("<guess>eerie</guess>")).unwrap();
        // Of the two letters e of the word, one is in its place, and one elsewhere.
        let hints = "e elsewhere, e right, r elsewhere, i absent, e absent. 5 guesses left.";
        assert_eq!((reply.messages[0]["content"].as_str(), reply.reward, reply.done), (Some(hints), Some(0.0), false));
        let reply = episode.step(&said("level?")).unwrap();
        assert!(reply.messages[0]["content"].as_str().unwrap().starts_with("Write a guess"));
        let reply = episode.step(&said("<guess>level</guess> no, <guess> LEVER </guess>")).unwrap();
        assert_eq!((reply.reward, reply.done), (Some(1.0), true));
    }

    #[test]
    fn a_game_ends_after_its_guesses_and_needs_a_word() {
        let game = WordGuess { max_guesses: 2 };
        let mut episode = game.reset(&Item::new("?").with_answer("ab"), 0).unwrap().episode;
        assert!(!episode.step(&said("<guess>b</guess>")).unwrap().done);
        assert!(episode.step(&said("")).unwrap().done);
        for row in [Item::new("?"), Item::new("?").with_answer("two words"), Item::new("?").with_answer("7")] {
            assert!(game.reset(&row, 0).is_err());
        }
    }
}
