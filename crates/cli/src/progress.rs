//! Fits the fields of a progress line into a terminal.

use console::measure_text_width;

/// A part of the line, which is shown completely or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Field {
    /// The text, which may contain colours.
    pub(crate) text: String,
    /// The rank, 0 for the most important field. Fields with the highest rank are dropped first.
    pub(crate) rank: u8,
}

impl Field {
    pub(crate) fn new(rank: u8, text: impl Into<String>) -> Self {
        Self { text: text.into(), rank }
    }
}

/// The text between fields.
const GAP: &str = "  ";

/// Joins all fields.
pub(crate) fn joined(fields: &[Field]) -> String {
    fields.iter().map(|field| field.text.as_str()).collect::<Vec<_>>().join(GAP)
}

/// Joins the fields in order, dropping the least important ones until the line fits into `columns`.
pub(crate) fn fitted(fields: &[Field], columns: usize) -> String {
    let mut fields = fields.to_vec();
    loop {
        let line = joined(&fields);
        if measure_text_width(&line) <= columns {
            return line;
        }
        // Of equally important fields, the last is dropped.
        let least = fields.iter().enumerate().max_by_key(|(_, field)| field.rank).map(|(index, _)| index);
        match least {
            Some(index) => drop(fields.remove(index)),
            None => return line,
        }
    }
}

/// Splits `CASE: round 3 of 10: NAME` into fields; the last part is the most important.
pub(crate) fn phase_fields(elapsed: &str, what: &str) -> Vec<Field> {
    let parts: Vec<&str> = what.splitn(3, ": ").collect();
    let mut fields = vec![Field::new(3, elapsed)];
    match parts.as_slice() {
        [case, phase, rest @ ..] => {
            fields.extend([Field::new(2, *case), Field::new(0, *phase)]);
            fields.extend(rest.iter().map(|name| Field::new(1, *name)));
        }
        parts => fields.extend(parts.iter().map(|part| Field::new(0, *part))),
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields() -> Vec<Field> {
        let bar = console::style("━━━━━━╸─────").cyan().force_styling(true);
        vec![
            Field::new(3, "GRPO"),
            Field::new(5, bar.to_string()),
            Field::new(0, " 120/450"),
            Field::new(2, "12m left"),
            Field::new(1, "reward 0.500"),
            Field::new(4, "loss 0.0100"),
            Field::new(6, "6.0k tok/s"),
            Field::new(7, "entropy 1.234"),
            Field::new(8, "kl 0.0123"),
        ]
    }

    #[test]
    fn a_progress_line_fits_every_width_by_dropping_whole_fields() {
        let fields = fields();
        let mut before = 0;
        for columns in 20..=200 {
            let line = fitted(&fields, columns);
            assert!(measure_text_width(&line) <= columns, "{columns}: {line}");
            // Remaining fields are unchanged, in order, and the most important ones.
            let shown: Vec<&Field> = fields.iter().filter(|field| line.contains(&field.text)).collect();
            assert_eq!(shown.iter().map(|field| field.text.as_str()).collect::<Vec<_>>().join(GAP), line);
            let left_out = fields.iter().filter(|field| !shown.contains(field)).map(|field| field.rank).min();
            assert!(shown.iter().all(|field| left_out.is_none_or(|rank| field.rank < rank)), "{columns}: {line}");
            assert!(shown.len() >= before && line.contains("120/450"), "{columns}: {line}");
            before = shown.len();
        }
        assert_eq!(before, fields.len());
        assert_eq!(fitted(&fields, 20), " 120/450");
        assert_eq!(fitted(&fields, 3), "");
    }

    #[test]
    fn a_benchmark_shows_its_current_step_before_its_case() {
        let fields = phase_fields("12 s", "s2-wide-f32: round 3 of 10: fused: 64 tokens");
        assert_eq!(fitted(&fields, 80), "12 s  s2-wide-f32  round 3 of 10  fused: 64 tokens");
        assert_eq!(fitted(&fields, 40), "round 3 of 10  fused: 64 tokens");
        assert_eq!(fitted(&fields, 20), "round 3 of 10");
        assert_eq!(fitted(&phase_fields("12 s", "oracle"), 80), "12 s  oracle");
    }
}
