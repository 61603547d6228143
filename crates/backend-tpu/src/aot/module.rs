//! A compiler's report on any program.

use super::compile::Compiler;
use super::cost::Cost;
use super::report::{Floor, LoopReport, Report};
use grpo_core::error::Result;
use grpo_pjrt::CompileOptions;
use grpo_stablehlo::{Module, Sharding, ValueId};

impl Compiler {
    /// Compiles `module` and returns the compiler's report. `floor` is a lower bound for all programs that compute the
    /// same.
    ///
    /// Compilers count a loop body once. To find the cost of an iteration, the program is compiled again with the loops
    /// of each distinct trip count duplicated. A loop that may end earlier counts with its upper bound.
    ///
    /// # Errors
    /// [`grpo_core::Error::Backend`] if the compiler refuses.
    pub fn report_module(&self, module: &Module, options: &CompileOptions, floor: Floor) -> Result<Report> {
        let analysis = self.analyse(&module.to_string(), options)?;
        let mut report = Report::new(None, &analysis, floor);
        let loops = module.main.loops();
        let mut reports: Vec<LoopReport> = vec![];
        for l in &loops {
            if !reports.iter().any(|report| report.counts(l)) {
                reports.push(LoopReport { trips: l.trips, begins: l.begins, body_seconds: None });
            }
        }
        let chip = self.target().chip();
        let once = match analysis.cost {
            Ok(once) if once.seconds > 0.0 => once,
            Ok(_) => {
                let reason = "the plugin's cost analysis has no estimate of the time".to_owned();
                return Ok(report.with_cost(Err(reason), reports, chip));
            }
            Err(reason) => return Ok(report.with_cost(Err(reason), reports, chip)),
        };
        let (mut cost, mut traffic) = (once, analysis.traffic.clone());
        for report_of_loops in &mut reports {
            let alike: Vec<_> = loops.iter().filter(|l| report_of_loops.counts(l)).collect();
            let Some((turns, begins)) = alike.first().and_then(|l| l.turns().zip(l.begins)) else {
                return Ok(report.with_cost(Err("a loop's trip count is not a constant".into()), reports, chip));
            };
            if turns == begins {
                continue;
            }
            let paths: Vec<&[usize]> = alike.iter().map(|l| &l.path[..]).collect();
            let analysis_of_twice = self.analyse(&module.with_loops_twice(&paths).to_string(), options)?;
            let twice = match analysis_of_twice.cost {
                Ok(twice) => twice,
                Err(reason) => return Ok(report.with_cost(Err(reason), reports, chip)),
            };
            report_of_loops.body_seconds = Some(twice.seconds - once.seconds);
            let more = turns as f64 - begins as f64;
            cost = cost + (twice - once) * more;
            traffic = traffic.plus_difference(&analysis_of_twice.traffic, &analysis.traffic, more);
        }
        report.traffic = traffic;
        Ok(report.with_cost(Ok::<Cost, String>(cost), reports, chip))
    }
}

impl Floor {
    /// Returns the bound of `module`, which reads its arguments once, writes its results once, and needs `flops`
    /// operations for products on each device. Of sharded arguments and results, each device moves its shard.
    pub fn of_module(module: &Module, flops: f64, chip: super::Chip) -> Self {
        let main = &module.main;
        let arguments = main.body().arguments.iter().zip(main.arguments.iter().map(|argument| &argument.sharding));
        let results = main.body().results.iter().zip(main.results.iter().map(|result| &result.sharding));
        let device_bytes = |(id, sharding): (&ValueId, &Option<Sharding>)| {
            let ty = main.type_of(*id);
            sharding.as_ref().and_then(|sharding| sharding.part(ty).ok()).map_or(ty.bytes(), |part| part.bytes())
        };
        let bytes: usize = arguments.chain(results).map(device_bytes).sum();
        Self::new(flops, bytes as f64, chip)
    }
}
