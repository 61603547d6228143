//! A compiler's analysis of a program, and the folder that caches it.

use super::compile::Compiler;
use super::cost::Cost;
use super::traffic::Traffic;
use crate::error::failed;
use grpo_core::error::Result;
use grpo_pjrt::{Cache, CompileOptions, Key};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Instant;

/// The version of the entries' format; other versions count as missing.
const FORM: &[u8] = b"analysis 3";

/// A compiler's analysis of a program, per device. Bytes are the compiler's allocations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Analysis {
    /// Bytes of all arguments.
    pub argument_bytes: u64,
    /// The bytes of all results, including results that reuse an argument's memory.
    pub output_bytes: u64,
    /// The bytes of results that reuse an argument's memory.
    pub alias_bytes: u64,
    /// The bytes of all other allocations of a run.
    pub temp_bytes: u64,
    /// Bytes of the program's code.
    pub code_bytes: u64,
    /// The bytes of the compiled text.
    pub program_bytes: u64,
    /// The compiler's cost estimates, with loop bodies counted once, or the reason why there are none.
    pub cost: std::result::Result<Cost, String>,
    /// The bytes that collectives move. A loop body counts once.
    pub traffic: Traffic,
    /// The compile time in seconds.
    pub compile_seconds: f64,
    /// The processor time of the compilation in seconds, measured for the whole process; nothing else should run in it.
    pub compile_processor_seconds: f64,
    /// `true` if the analysis was read from the cache.
    #[serde(skip)]
    pub from_cache: bool,
}

impl Analysis {
    /// Returns the bytes that must fit into the device's memory: arguments, results that are not aliased, temporaries
    /// and code.
    pub fn total_bytes(&self) -> u64 {
        let all = self.argument_bytes + self.output_bytes + self.temp_bytes + self.code_bytes;
        all.saturating_sub(self.alias_bytes)
    }
}

/// Returns the usual folder for [`Compiler::with_cache`] in this user's cache; `None` for a user without a cache.
pub fn user_cache() -> Option<PathBuf> {
    Some(grpo_pjrt::install::cache_dir().ok()?.with_file_name("aot"))
}

impl Compiler {
    /// Caches analyses in `directory`, for this and later processes. The key covers the program, the compiler's version
    /// and the target.
    #[must_use]
    pub fn with_cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(Cache::new(directory));
        self
    }

    /// Compiles `program`, the text of a module, and returns the compiler's analysis.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] if the compiler refuses, or if others may write to the cache folder.
    pub fn analyse(&self, program: &str, options: &CompileOptions) -> Result<Analysis> {
        let Some(cache) = &self.cache else { return self.compile_and_analyse(program, options) };
        let key = self.key(program, options)?;
        let remembered = cache.read(&key).map_err(failed)?;
        if let Some(analysis) = remembered.and_then(|entry| serde_json::from_slice::<Analysis>(&entry).ok()) {
            return Ok(Analysis { from_cache: true, ..analysis });
        }
        let analysis = self.compile_and_analyse(program, options)?;
        let written = serde_json::to_vec(&analysis).map_err(|error| error.to_string());
        if let Err(error) = written.and_then(|entry| cache.write(&key, &entry).map_err(|error| error.to_string())) {
            tracing::warn!("{error}: the program will be compiled again next time");
        }
        Ok(analysis)
    }

    fn compile_and_analyse(&self, program: &str, options: &CompileOptions) -> Result<Analysis> {
        let (began, used) = (Instant::now(), processor_seconds());
        let executable = self.topology.compile(program, options).map_err(failed)?;
        let (compile_seconds, compile_processor_seconds) = (began.elapsed().as_secs_f64(), processor_seconds() - used);
        let memory = executable.memory_stats().map_err(failed)?;
        let bytes = |value: i64| u64::try_from(value).unwrap_or(0);
        Ok(Analysis {
            argument_bytes: bytes(memory.argument),
            output_bytes: bytes(memory.output),
            alias_bytes: bytes(memory.alias),
            temp_bytes: bytes(memory.temp),
            code_bytes: bytes(memory.generated_code),
            program_bytes: program.len() as u64,
            cost: Cost::of(&executable)?,
            traffic: Traffic::of(&executable, options.num_replicas * options.num_partitions)?,
            compile_seconds,
            compile_processor_seconds,
            from_cache: false,
        })
    }

    fn key(&self, program: &str, options: &CompileOptions) -> Result<Key> {
        let version = self.version()?;
        let target = self.target();
        Ok(Key::of(&[
            FORM,
            version.as_bytes(),
            target.description().as_bytes(),
            &options.fingerprint(),
            program.as_bytes(),
        ]))
    }
}

/// Returns the processor time of this process so far, in seconds.
fn processor_seconds() -> f64 {
    let taken = clock_gettime(ClockId::ProcessCPUTime);
    taken.tv_sec as f64 + taken.tv_nsec as f64 / 1e9
}
