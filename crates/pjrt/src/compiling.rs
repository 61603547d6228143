//! The span that is open while a compiler works.

use tracing::field::Empty;
use tracing::span::EnteredSpan;

/// Opens the span `compile`: its fields are `program`, the name of the module where the program is text, `bytes`, the length of the program,
/// and `failed`, which is recorded when the compiler refuses.
pub(crate) fn span(program: &[u8]) -> EnteredSpan {
    let bytes = program.len() as u64;
    tracing::info_span!(target: "pjrt", "compile", program = name(program), bytes, failed = Empty).entered()
}

/// The name of a module as text, which begins with `module @NAME`.
fn name(program: &[u8]) -> Option<&str> {
    let head = std::str::from_utf8(program.get(..program.len().min(200))?).ok()?;
    let name = head.trim_start().strip_prefix("module @")?;
    name.split(|c: char| c.is_whitespace() || c == '{').next().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::name;

    #[test]
    fn a_program_as_text_has_the_name_of_its_module() {
        assert_eq!(name(b"module @gradient attributes {mhlo.num_partitions = 1 : i32} {"), Some("gradient"));
        assert_eq!(name(b"\nmodule @step{"), Some("step"));
        for text in [&b"module {"[..], b"module @", b"ML\xefR\x0dStableHLO_v1.0.0", b""] {
            assert_eq!(name(text), None, "{text:?}");
        }
    }
}
