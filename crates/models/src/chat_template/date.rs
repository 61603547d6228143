//! `strftime_now(format)`, which `transformers` defines as `datetime.now().strftime(format)`.

use super::limits::invalid;
use jiff::civil::DateTime;
use minijinja::Error;

/// Returns the local date and time.
pub(super) fn now() -> DateTime {
    jiff::Zoned::now().datetime()
}

/// Parses a date, or a date and time, such as `2026-11-25` or `2026-11-25T09:30:00`.
pub(super) fn parse(text: &str) -> Result<DateTime, jiff::Error> {
    text.parse()
}

/// Formats a date like Python's `date.strftime(format)`, where the name and offset of a missing time zone are empty.
pub(super) fn strftime(date: DateTime, format: &str) -> Result<String, Error> {
    let mut without_zone = String::with_capacity(format.len());
    let mut rest = format;
    while let Some((before, behind)) = rest.split_once('%') {
        without_zone.push_str(before);
        let directive = behind.chars().next();
        rest = &behind[directive.map_or(0, char::len_utf8)..];
        if !matches!(directive, Some('Z' | 'z')) {
            without_zone.push('%');
            without_zone.extend(directive);
        }
    }
    without_zone.push_str(rest);
    jiff::fmt::strtime::format(&without_zone, date).map_err(|e| invalid(format!("strftime_now: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_format_like_pythons_without_a_time_zone() {
        let date = parse("2026-03-05T09:07:30").unwrap();
        for (format, expected) in [
            ("%d %b %Y", "05 Mar 2026"),
            ("%B %-d, %Y %A", "March 5, 2026 Thursday"),
            ("%Y-%m-%dT%H:%M:%S%z [%Z] %%Z", "2026-03-05T09:07:30 [] %Z"),
            ("%j é", "064 é"),
        ] {
            assert_eq!(strftime(date, format).unwrap(), expected);
        }
        assert_eq!(strftime(parse("2026-12-31").unwrap(), "%d %H").unwrap(), "31 00");
        assert!(strftime(date, "%").is_err() && parse("tomorrow").is_err());
    }
}
