//! Times of day: `3 PM`, `15:00`, `10:30 a.m.`, `noon`, `下午3点`.

use crate::patterns::regex;
use num_rational::Ratio;

/// A time of day.
#[derive(Clone, Copy, Debug)]
pub(super) struct Time {
    hour: u32,
    minute: u32,
    half: Option<Half>,
    /// `false` if the text may also be a ratio, as `10:30`.
    is_certain: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Half {
    Morning,
    Afternoon,
}

impl Time {
    /// Parses an answer without its wrappers.
    pub(super) fn new(text: &str) -> Option<Self> {
        regex!(WRAPPER, r"\\(?:text|mathrm|textrm|rm|mbox)\b|\\[ ,;:!]|[{}~$]");
        regex!(
            WESTERN,
            r"^(?:at )?(\d{1,2})(?::(\d{2})(?::00)?)? ?(am|pm|a\.? ?m\b\.?|p\.? ?m\b\.?|noon|midnight|o'?clock|in the (?:morning|afternoon|evening)|at night)?$"
        );
        regex!(
            CHINESE,
            r"^(凌晨|清晨|早上|早晨|上午|中午|下午|傍晚|晚上|夜里)? ?(\d{1,2}) ?(点钟?|时|:) ?(?:(\d{1,2}) ?分?|(半)|整)?$"
        );
        if text.len() > 100 {
            return None;
        }
        let text = WRAPPER
            .replace_all(text, " ")
            .to_lowercase()
            .replace(['’', '‘'], "'")
            .replace(" :", ":")
            .replace(": ", ":");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let number = |text: &str| text.parse::<u32>().ok();
        let (hour, minute, word) = match text.as_str() {
            "noon" | "midday" | "midnight" => (12, 0, text.as_str()),
            text => match (WESTERN.captures(text), CHINESE.captures(text)) {
                (Some(found), _) => {
                    let word = found.get(3).map_or("", |word| word.as_str());
                    // A bare number is no time.
                    let minute = found.get(2).map(|minute| minute.as_str());
                    if word.is_empty() && minute.is_none() {
                        return None;
                    }
                    (number(&found[1])?, minute.map_or(Some(0), number)?, found.get(3).map_or("", |word| word.as_str()))
                }
                (None, Some(found)) => {
                    let half_hour = found.get(5).map(|_| 30);
                    let minute = found.get(4).map_or(Some(half_hour.unwrap_or(0)), |minute| number(minute.as_str()))?;
                    let sign = if &found[3] == ":" { "" } else { "o'clock" };
                    (number(&found[2])?, minute, found.get(1).map_or(sign, |word| word.as_str()))
                }
                (None, None) => return None,
            },
        };
        let letters: String = word.chars().filter(|c| c.is_alphanumeric()).collect();
        let half = match letters.as_str() {
            "am" | "midnight" | "inthemorning" | "凌晨" | "清晨" | "早上" | "早晨" | "上午" => {
                Some(Half::Morning)
            }
            "pm" | "noon" | "midday" | "intheafternoon" | "intheevening" | "下午" | "傍晚" => Some(Half::Afternoon),
            "中午" => Some(if (10..12).contains(&hour) { Half::Morning } else { Half::Afternoon }),
            "atnight" | "晚上" | "夜里" => {
                Some(if (1..5).contains(&hour) || hour == 12 { Half::Morning } else { Half::Afternoon })
            }
            _ => None,
        };
        let is_certain = !letters.is_empty();
        (hour < 24 && minute < 60).then_some(Self { hour, minute, half, is_certain })
    }

    /// Returns `true` if a time with this text is no ratio: it names a half of the day or an hour, or it is not in lowest terms.
    pub(super) fn is_no_ratio(&self) -> bool {
        self.is_certain || self.minute == 0 || *Ratio::new(self.hour, self.minute).denom() != self.minute
    }

    /// Returns `true` for the same time. A time without a half of the day may be in either half, if the other one has a half.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        if self.half.is_none() && other.half.is_none() {
            return (self.hour, self.minute) == (other.hour, other.minute);
        }
        let hours = |time: &Self| match time.half {
            _ if time.hour > 12 || time.hour == 0 => vec![time.hour],
            Some(Half::Morning) => vec![time.hour % 12],
            Some(Half::Afternoon) => vec![time.hour % 12 + 12],
            None => vec![time.hour % 12, time.hour % 12 + 12],
        };
        self.minute == other.minute && hours(self).iter().any(|hour| hours(other).contains(hour))
    }

    /// Returns `true` if the text names a half of the day, or an hour.
    pub(super) fn is_certain(&self) -> bool {
        self.is_certain
    }
}
