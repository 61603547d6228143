//! Compiles for devices that are not present.

use super::analysis::Analysis;
use super::cost::Cost;
use super::report::{LoopReport, Report};
use super::target::Target;
use super::variant::Variant;
use crate::compile_options::options_for;
use crate::error::{failed, unsupported};
use crate::program::{Blocking, MeshShape, Program, Spec};
use grpo_core::error::Result;
use grpo_pjrt::{Cache, DeviceDescription, Topology};
use grpo_stablehlo::{Loop, Module};
use std::path::Path;

/// A compiler for one [`Target`].
pub struct Compiler {
    target: Target,
    pub(super) topology: Topology,
    pub(super) cache: Option<Cache>,
}

impl Compiler {
    /// Loads the target's plugin: the file at `path`, or the one that [`crate::plugins::find`] finds.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] if there is no plugin (with the command that installs it), or it does not know the
    /// target.
    pub fn open(target: Target, path: Option<&Path>) -> Result<Self> {
        let topology = target.topology(path)?;
        Ok(Self { target, topology, cache: None })
    }

    /// Returns the devices that this compiler compiles for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns descriptions of the devices, with the process of each, in the plugin's order.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] if the plugin fails.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>> {
        self.topology.devices().map_err(failed)
    }

    /// Returns the compiler's version string.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] if the plugin fails.
    pub fn version(&self) -> Result<String> {
        self.topology.platform_version().map_err(failed)
    }

    /// Compiles `variant` and returns the compiler's report. If the variant has a workspace budget and no tile size,
    /// tiles shrink until the compiler's allocation fits the budget.
    ///
    /// # Errors
    /// [`grpo_core::Error::Config`] or [`grpo_core::Error::Unsupported`] if no program computes the variant,
    /// [`grpo_core::Error::Budget`] if no tile fits, [`grpo_core::Error::Backend`] if the compiler refuses.
    pub fn report(&self, variant: &Variant) -> Result<Report> {
        let mut spec = variant.spec()?;
        let compiled = variant.compile_within_budget(&mut spec, |spec| {
            let compiled = self.compile(variant, spec)?;
            Ok((usize::try_from(compiled.report.temp_bytes).unwrap_or(usize::MAX), compiled))
        })?;
        self.estimate(compiled, spec.mesh)
    }

    /// Compiles with the tiles of `spec`.
    pub(super) fn compile(&self, variant: &Variant, spec: &Spec) -> Result<Compiled> {
        let available = self.devices()?.len();
        let needed = spec.mesh.devices();
        if needed > available {
            let what = format!("the mesh {} of {needed} devices on {}", spec.mesh, self.target.name());
            return Err(unsupported(&what, &format!("it has {available}: name a larger slice")));
        }
        let program = variant.program(spec)?;
        let floor = variant.floor(spec, &program, self.target.chip());
        let blocking = variant.has_tiles().then_some(spec.blocking);
        let analysis = in_tiles(blocking, || self.analyse_module(&program.module, spec.mesh))?;
        let Analysis { temp_bytes, compile_seconds, from_cache, .. } = analysis;
        tracing::info!(?blocking, temp_bytes, compile_seconds, from_cache, "compiled");
        Ok(Compiled { report: Report::new(blocking, &analysis, floor), program, cost: analysis.cost })
    }

    fn analyse_module(&self, module: &Module, mesh: MeshShape) -> Result<Analysis> {
        self.analyse(&module.to_string(), &options_for(self.target.kind(), mesh.devices()))
    }

    /// Adds the compiler's cost estimates.
    pub(super) fn estimate(&self, compiled: Compiled, mesh: MeshShape) -> Result<Report> {
        let loops = compiled.program.module.main.loops();
        let mut reports: Vec<LoopReport> = vec![];
        for l in &loops {
            if !reports.iter().any(|report| report.counts(l)) {
                reports.push(LoopReport { trips: l.trips, begins: l.begins, body_seconds: None });
            }
        }
        let cost = in_tiles(compiled.report.blocking, || self.cost(&compiled, &loops, &mut reports, mesh))?;
        Ok(compiled.report.with_cost(cost, reports, self.target.chip()))
    }

    /// Estimates the cost of the whole program. For each distinct trip count, the program is compiled once more without
    /// these loops. An inner `Err` has the reason why there are no estimates.
    fn cost(
        &self,
        compiled: &Compiled,
        loops: &[Loop],
        reports: &mut [LoopReport],
        mesh: MeshShape,
    ) -> Result<Result<Cost, String>> {
        let once = match &compiled.cost {
            Ok(once) => *once,
            Err(reason) => return Ok(Err(reason.clone())),
        };
        if once.seconds == 0.0 {
            return Ok(Err("the plugin's cost analysis has no estimate of the time".into()));
        }
        let mut costs = vec![];
        for report in reports {
            let mut alike = loops.iter().filter(|l| report.counts(l)).peekable();
            let turns = alike.peek().and_then(|l| l.turns().zip(l.begins));
            let Some((turns, begins)) = turns else {
                return Ok(Err("a loop's trip count is not a constant".into()));
            };
            let alike: Vec<&[usize]> = alike.map(|l| &l.path[..]).collect();
            let without = self.analyse_module(&compiled.program.module.without_loops(&alike), mesh)?;
            let rest = match without.cost {
                Ok(cost) => cost,
                Err(reason) => return Ok(Err(reason)),
            };
            report.body_seconds = Some(once.seconds - rest.seconds);
            costs.push((turns, begins, rest));
        }
        Ok(Ok(Cost::of_loops(once, &costs)))
    }
}

/// Calls `compile` in the span `tiles`, whose field tells apart programs that differ in their tiles only.
fn in_tiles<T>(blocking: Option<Blocking>, compile: impl FnOnce() -> T) -> T {
    match blocking {
        Some(blocking) => tracing::info_span!(target: "backend_tpu", "tiles", tiles = %blocking).in_scope(compile),
        None => compile(),
    }
}

/// A compiled program, before loop costs are estimated.
pub(super) struct Compiled {
    pub(super) report: Report,
    program: Program,
    /// The estimates of the whole program, with loop bodies counted once.
    cost: std::result::Result<Cost, String>,
}
