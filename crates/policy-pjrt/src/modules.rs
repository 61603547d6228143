//! Finished modules of programs, and errors of programs that cannot be built.

use crate::error::{Error, Result};
use grpo_stablehlo::{Builder, Module, Value};

/// Finishes the module of `builder`.
pub(crate) fn finish<'a>(
    builder: Builder,
    name: &str,
    results: impl IntoIterator<Item = (&'a str, &'a Value)>,
) -> Result<Module> {
    let results: Vec<(&str, &Value)> = results.into_iter().collect();
    builder.finish(name, &results).map_err(program_error(name))
}

/// Returns results of a program without names.
pub(crate) fn unnamed<'a>(values: impl IntoIterator<Item = &'a Value>) -> impl Iterator<Item = (&'a str, &'a Value)> {
    values.into_iter().map(|value| ("", value))
}

/// Returns the error of a program that cannot be built.
pub(crate) fn program_error(program: &str) -> impl Fn(grpo_stablehlo::Error) -> Error {
    move |source| Error::Program { program: program.into(), source }
}
