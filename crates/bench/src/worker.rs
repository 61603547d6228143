//! A worker: a process that plans jobs and runs their steps, or measures a model, on request.

use super::cpu::OnCpu;
use super::inputs::Inputs;
use super::pjrt::OnDevices;
use super::probe::Probe;
use super::protocol::{Job, Planned, Reply, Request, Role};
use super::runner::Runner;
use crate::config::BackendName;
use crate::error::{Error, Result};
use crate::model;
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::rc::Rc;

/// The jobs of a process.
#[derive(Default)]
struct Worker {
    jobs: HashMap<String, Box<dyn Runner>>,
    /// Devices and inputs, which the jobs of one process share.
    devices: Option<Rc<OnDevices>>,
    inputs: Option<(super::inputs::Files, Rc<Inputs>)>,
}

/// Answers requests until the input ends.
///
/// # Errors
/// [`Error::Text`] if a request cannot be parsed or the other side has closed the connection.
pub fn serve(requests: impl BufRead, mut replies: impl Write) -> Result<()> {
    let mut worker = Worker::default();
    let lost = |what: &str, error: &dyn std::fmt::Display| Error::Text(format!("bench worker: {what}: {error}"));
    for line in requests.lines() {
        let line = line.map_err(|e| lost("no request", &e))?;
        let request = serde_json::from_str(&line).map_err(|e| lost("not a request", &e))?;
        let reply = worker.answer(request).unwrap_or_else(|error| Reply::Failed {
            not_offered: matches!(&error, Error::Loss(grpo_core::Error::Unsupported { .. })),
            error: one_line(&error),
        });
        let mut text = serde_json::to_string(&reply).map_err(|e| lost("no reply", &e))?;
        text.push('\n');
        replies.write_all(text.as_bytes()).and_then(|()| replies.flush()).map_err(|e| lost("no reply", &e))?;
    }
    Ok(())
}

/// Formats an error with its causes on one line.
fn one_line(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text.replace('\n', " ")
}

impl Worker {
    fn answer(&mut self, request: Request) -> Result<Reply> {
        match request {
            Request::Plan(job) => {
                let name = job.name.clone();
                let (planned, runner) = self.plan(*job)?;
                self.jobs.insert(name, runner);
                Ok(Reply::Planned(Box::new(planned)))
            }
            Request::Score { name } => Ok(Reply::Scored { logp: self.job(&name)?.score()? }),
            Request::Step { name, check } => Ok(Reply::Stepped(Box::new(self.job(&name)?.step(check)?))),
            Request::Model(job) => Ok(Reply::Model(Box::new(model::measure(&job)?))),
        }
    }

    fn job(&mut self, name: &str) -> Result<&mut Box<dyn Runner>> {
        self.jobs.get_mut(name).ok_or_else(|| Error::argument("bench worker", "a job that was planned", name))
    }

    fn plan(&mut self, job: Job) -> Result<(Planned, Box<dyn Runner>)> {
        match job.role {
            Role::Multiply(unit) => Probe::multiply(unit, job.threads),
            Role::Stream { traffic, bytes } => Ok(Probe::stream(traffic, bytes, job.threads)),
            Role::Loss | Role::BareProducts => {
                let inputs = self.inputs(&job)?;
                match BackendName::parse("backend", &job.backend)? {
                    BackendName::Cpu => OnCpu::plan(&job, inputs),
                    BackendName::Pjrt(kind) => {
                        let devices = match &self.devices {
                            Some(devices) => devices.clone(),
                            None => Rc::new(OnDevices::open(kind, job.plugin.as_deref(), job.config.mesh)?),
                        };
                        self.devices = Some(devices.clone());
                        OnDevices::plan(&devices, &job, inputs)
                    }
                }
            }
        }
    }

    /// Returns the inputs, which jobs with the same files share.
    fn inputs(&mut self, job: &Job) -> Result<Rc<Inputs>> {
        match &self.inputs {
            Some((files, inputs)) if *files == job.tensors => Ok(inputs.clone()),
            _ => {
                let inputs = Rc::new(Inputs::load(&job.config, &job.tensors)?);
                self.inputs = Some((job.tensors.clone(), inputs.clone()));
                Ok(inputs)
            }
        }
    }
}
