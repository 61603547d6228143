//! A planned loss: its executables, and their arguments and results.
//!
//! All work happens on the devices. A call uploads two small tables and a flag, runs one executable, and downloads a
//! few sums. A batch with a sampling mask has a third table, N V / 8 bytes, and programs of its own. Gradients are updated in donated buffers. Host slices are uploaded before and downloaded after the same
//! call.

use crate::aot::Variant;
use crate::compiler::DeviceCompiler;
use crate::devices::{Argument, Layout};
use crate::error::failed;
use crate::operands::Operands;
use crate::padding::Padding;
use crate::program::{Pass, Program, Role, Spec};
use crate::tables::TokenTables;
use crate::tensor::{PjrtTensor, layout};
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::backend_api::plan::{Head, Step, TokenScores, step};
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::batch::PolicyValues;
use grpo_core::batch::TokenBatch;
use grpo_core::error::{Error, Result};
use grpo_core::{
    Dtype, GradsMut, LossOutput, LossPlan, MemoryReport, Metrics, PlanRequest, PolicyInput, Scores, TensorMut,
    TensorRef,
};
use grpo_pjrt::{CompiledMemoryStats, DType, LoadedExecutable};
use std::collections::HashMap;
use std::sync::Arc;

/// The loss on devices, planned for batches of one shape.
pub struct PjrtPlan {
    compiler: DeviceCompiler,
    request: PlanRequest,
    spec: Spec,
    /// The pass that the plan was made for.
    pass: Pass,
    /// By pass, and whether the program takes a sampling mask.
    programs: HashMap<(Pass, bool), Compiled>,
    memory: MemoryReport,
}

struct Compiled {
    program: Program,
    executable: Arc<LoadedExecutable>,
    /// The layouts of the results.
    results: Vec<Arc<Layout>>,
}

impl Compiled {
    fn new(compiler: &DeviceCompiler, program: Program) -> Result<Self> {
        let executable = compiler.compile(program.module.to_string())?;
        let results = Layout::of_results(&program.module);
        Ok(Self { program, executable, results })
    }

    fn memory(&self) -> Result<CompiledMemoryStats> {
        self.executable.executable().memory_stats().map_err(failed)
    }
}

/// The result of a call whose tensors stay on the devices.
#[derive(Debug)]
pub struct DeviceOutput {
    /// The sum over tokens of weight x token loss.
    pub loss: f64,
    /// The part of the loss that comes from the policy term.
    pub policy_loss: f64,
    /// TRL's metrics as mergeable sums.
    pub metrics: Metrics,
    /// The log-probabilities `[N]`.
    pub logp: PjrtTensor,
    /// The entropies `[N]`.
    pub entropy: PjrtTensor,
}

impl From<Step<OnDevice>> for DeviceOutput {
    fn from(Step { sums, metrics, scores }: Step<OnDevice>) -> Self {
        let OnDevice { logp, entropy } = scores;
        Self { loss: sums.loss, policy_loss: sums.policy, metrics, logp, entropy }
    }
}

impl PjrtPlan {
    /// Plans `variant`, whose pass runs the program that `build` returns.
    pub(crate) fn new(
        compiler: &DeviceCompiler,
        variant: Variant,
        build: impl Fn(&Spec) -> Result<Program>,
    ) -> Result<Self> {
        let (request, pass) = (&variant.request, variant.pass);
        // Fail before a slow compilation if no device could hold the tensors.
        let least = MemoryReport { inputs: request.inputs_bytes(), outputs: request.outputs_bytes(), workspace: 0 };
        request.check_memory(&least, None)?;
        let mut spec = variant.spec()?;
        let bytes = |value: i64| usize::try_from(value).unwrap_or(0);
        let (compiled, memory) = variant.compile_within_budget(&mut spec, |spec| {
            let compiled = Compiled::new(compiler, build(spec)?)?;
            let stats = compiled.memory()?;
            let workspace = bytes(stats.temp);
            let inputs = bytes(stats.argument - stats.alias);
            Ok((workspace, (compiled, MemoryReport { inputs, outputs: bytes(stats.output), workspace })))
        })?;
        request.check_memory(&memory, None)?;
        let programs = HashMap::from([((pass, false), compiled)]);
        Ok(Self { compiler: compiler.clone(), request: variant.request, spec, pass, programs, memory })
    }

    /// Returns the executable of `pass`, with or without a sampling mask, which is compiled on first use.
    fn compiled(&mut self, pass: Pass, sampling_mask: bool) -> Result<&Compiled> {
        let key = (pass, sampling_mask);
        if !self.programs.contains_key(&key) {
            let spec = Spec { sampling_mask, ..self.spec.clone() };
            let compiled = Compiled::new(&self.compiler, spec.program(pass)?)?;
            self.programs.insert(key, compiled);
        }
        Ok(&self.programs[&key])
    }

    /// Returns the compiler's memory allocation of the executable that the plan was made for, per device.
    ///
    /// # Errors
    /// [`Error::Backend`] if the plugin does not report it.
    pub fn compiled_memory(&mut self) -> Result<CompiledMemoryStats> {
        self.compiled(self.pass, false)?.memory()
    }

    /// Returns the specification of the programs, with the chosen blocking.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Copies a tensor of `role` to the devices. `tokens` is N of its batches; it has no effect for a head.
    ///
    /// # Errors
    /// [`Error::Shape`] if its length or dtype does not match the role, [`Error::Backend`] if the device refuses.
    pub fn upload(&self, role: Role, tokens: usize, tensor: TensorRef<'_>) -> Result<PjrtTensor> {
        const OP: &str = "upload";
        let planned = self.request.max_tokens;
        if tokens > planned {
            return Err(Error::shape(OP, "tokens N", format!("at most the planned {planned}"), tokens));
        }
        let (elements, dtype) = (Padding::new(&self.spec, role, tokens).elements(), self.dtype(role));
        if tensor.dtype() != dtype {
            return Err(Error::shape(OP, format!("dtype of {}", role.name()), dtype.name(), tensor.dtype().name()));
        }
        if let Some(found) = tensor.host_len().filter(|found| *found != elements) {
            return Err(Error::shape(OP, format!("{} elements", role.name()), elements, found));
        }
        PjrtTensor::upload(&self.compiler.devices, &self.spec, role, tokens, tensor)
    }

    /// Makes a tensor of zeros for `role`, such as an initial gradient accumulator.
    ///
    /// # Errors
    /// As [`PjrtPlan::upload`].
    pub fn zeros(&self, role: Role, tokens: usize) -> Result<PjrtTensor> {
        let elements = Padding::new(&self.spec, role, tokens).elements();
        match self.dtype(role) {
            Dtype::F32 => self.upload(role, tokens, TensorRef::F32(&vec![0.0; elements])),
            Dtype::Bf16 => self.upload(role, tokens, TensorRef::Bf16(&vec![half::bf16::ZERO; elements])),
        }
    }

    fn dtype(&self, role: Role) -> Dtype {
        match self.spec.type_of(role).dtype {
            grpo_stablehlo::Dtype::Bf16 => Dtype::Bf16,
            _ => Dtype::F32,
        }
    }

    /// Returns log-probabilities and entropies `[N]` that stay on the devices.
    ///
    /// # Errors
    /// As [`LossPlan::score`].
    pub fn score_on_device(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<[PjrtTensor; 2]> {
        self.request.check_call(&policy, batch, None)?;
        self.spec.check_batch(batch)?;
        let OnDevice { logp, entropy, .. } = DeviceHead(self).score(&Operands::new(policy)?, batch)?;
        Ok([logp, entropy])
    }

    /// Computes loss, metrics and gradients; only scalars leave the devices. Host slices in `policy` and `grads` are
    /// uploaded before, and gradients downloaded after. Scores of tokens that the configuration excludes from the loss
    /// are 0.
    ///
    /// # Errors
    /// As [`LossPlan::value_and_grad`]. Gradients on devices are lost if the executable that owns them fails.
    pub fn value_and_grad_on_device(
        &mut self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<DeviceOutput> {
        let tensors = self.operands(policy, batch, grads)?;
        Ok(step(&self.request.loss.clone(), batch, &mut DeviceHead(self), tensors)?.into())
    }

    /// Like [`PjrtPlan::value_and_grad_on_device`], for logits that are overwritten with their gradient.
    ///
    /// # Errors
    /// As [`PjrtPlan::value_and_grad_on_device`].
    pub fn value_and_grad_in_place_on_device(
        &mut self,
        logits: TensorMut<'_>,
        batch: &TokenBatch,
    ) -> Result<DeviceOutput> {
        let tensors = self.operands_in_place(logits, batch)?;
        Ok(step(&self.request.loss.clone(), batch, &mut DeviceHead(self), tensors)?.into())
    }

    /// Checks a call, and collects its tensors.
    fn operands<'a>(&self, policy: PolicyInput<'a>, batch: &TokenBatch, grads: GradsMut<'a>) -> Result<Operands<'a>> {
        self.request.check_call(&policy, batch, Some(&grads))?;
        self.spec.check_batch(batch)?;
        let mut operands = Operands::new(policy)?;
        operands.add(grads)?;
        Ok(operands)
    }

    /// Checks a call that overwrites logits.
    fn operands_in_place<'a>(&self, logits: TensorMut<'a>, batch: &TokenBatch) -> Result<Operands<'a>> {
        self.request.check_call(&PolicyInput::Logits(logits.as_ref()), batch, None)?;
        self.spec.check_batch(batch)?;
        Operands::in_place(logits)
    }

    /// Runs the executable of `pass`: uploads host tensors, donates accumulators, and returns the updated ones.
    fn run(
        &mut self,
        pass: Pass,
        batch: &TokenBatch,
        tables: &TokenTables,
        mut operands: Operands<'_>,
    ) -> Result<(LossSums<f64>, OnDevice)> {
        let sampling_mask = tables.sampling_mask.is_some();
        self.compiled(pass, sampling_mask)?;
        let padding = |role| Padding::new(&self.spec, role, batch.tokens());
        let devices = &self.compiler.devices;
        operands.check(devices, |role| (padding(role), layout(&self.spec, role), self.dtype(role)))?;
        let mut uploaded = operands.upload(|role, tensor| match (tensor, self.dtype(role)) {
            // A frozen bf16 head with f32 hidden states: the program was compiled for an f32 head.
            (TensorRef::Bf16(values), Dtype::F32) => {
                let wide: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
                self.upload(role, batch.tokens(), TensorRef::F32(&wide))
            }
            _ => self.upload(role, batch.tokens(), tensor),
        })?;
        let tables = tables.upload(&Spec { sampling_mask, ..self.spec.clone() }, devices)?;
        let Compiled { program, executable, results } = &self.programs[&(pass, sampling_mask)];

        // From here on, the devices own the accumulators; a failure loses them.
        let mut donated = operands.donate(&mut uploaded);
        let borrowed = operands.borrowed(&uploaded);
        let mut arguments: Vec<Argument<'_>> = vec![];
        for role in &program.arguments {
            if let Some(tensor) = donated.remove(role) {
                arguments.push(tensor.into());
            } else if let Some(tensor) = borrowed.get(role).copied().or_else(|| tables.get(role)) {
                arguments.push(tensor.into());
            }
        }
        let outputs = devices.run(executable, arguments, results).map_err(failed)?;
        let named = program.results.iter().zip(outputs).map(|(role, tensor)| {
            let is_bf16 = tensor.shards().iter().any(|shard| shard.dtype() == DType::Bf16);
            let dtype = if is_bf16 { Dtype::Bf16 } else { Dtype::F32 };
            (*role, PjrtTensor { role: *role, dtype, padding: padding(*role), tensor: Some(tensor) })
        });
        let mut results: HashMap<Role, PjrtTensor> = named.collect();
        let mut take = |role: Role| match results.remove(&role) {
            Some(tensor) => tensor,
            None => unreachable!("the program of {pass:?} returns {role:?}"),
        };
        let (logp, entropy) = (take(Role::Logp), take(Role::Entropy));
        let sums = if pass == Pass::Score { LossSums::default() } else { read_sums(&take(Role::Sums))? };
        operands.give_back(take)?;
        Ok((sums, OnDevice { logp, entropy }))
    }
}

/// The tensors that an executable returns.
struct OnDevice {
    logp: PjrtTensor,
    entropy: PjrtTensor,
}

impl OnDevice {
    /// Copies the scores to the host; they are 0 at masked tokens.
    fn scores(&self) -> Result<Scores> {
        Ok(Scores { logp: self.logp.to_host()?, entropy: self.entropy.to_host()? })
    }
}

impl TokenScores for OnDevice {
    const FILLED: bool = false;

    fn to_values(&self) -> Result<PolicyValues> {
        Ok(self.scores()?.into())
    }

    fn fill(&mut self, _: &TokenBatch, _: &Self) {}
}

/// The head of a plan, with scores that stay on the devices.
struct DeviceHead<'a>(&'a mut PjrtPlan);

impl Head for DeviceHead<'_> {
    type Tensors<'a> = Operands<'a>;
    type Scores = OnDevice;
    type Error = Error;

    fn score(&mut self, tensors: &Operands<'_>, batch: &TokenBatch) -> Result<OnDevice> {
        let tables = TokenTables::new(&self.0.spec.for_batch(batch), batch, None);
        Ok(self.0.run(Pass::Score, batch, &tables, tensors.inputs())?.1)
    }

    fn gradient(&mut self, tensors: Operands<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, OnDevice)> {
        let tables = TokenTables::new(&self.0.spec.for_batch(loss.batch()), loss.batch(), Some(loss));
        let pass = if tensors.are_in_place() { Pass::GradientInPlace } else { Pass::Gradient };
        self.0.run(pass, loss.batch(), &tables, tensors)
    }
}

/// The head of a plan, with scores on the host.
struct HostHead<'a>(DeviceHead<'a>);

impl Head for HostHead<'_> {
    type Tensors<'a> = Operands<'a>;
    type Scores = Scores;
    type Error = Error;

    fn score(&mut self, tensors: &Operands<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.0.score(tensors, batch)?.scores()
    }

    fn gradient(&mut self, tensors: Operands<'_>, loss: &Evaluator<'_>) -> Result<(LossSums<f64>, Scores)> {
        let (sums, made) = self.0.gradient(tensors, loss)?;
        Ok((sums, made.scores()?))
    }
}

/// Reads the result of `Tokens::sums`.
fn read_sums(tensor: &PjrtTensor) -> Result<LossSums<f64>> {
    let mut values = [0.0_f32; LossSums::<f32>::COUNT];
    tensor.read(&mut values)?;
    Ok(LossSums::from_fn(|i| values[i].into()))
}

impl LossPlan for PjrtPlan {
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores> {
        let [logp, entropy] = self.score_on_device(policy, batch)?;
        OnDevice { logp, entropy }.scores()
    }

    fn value_and_grad(
        &mut self,
        policy: PolicyInput<'_>,
        batch: &TokenBatch,
        grads: GradsMut<'_>,
    ) -> Result<LossOutput> {
        let tensors = self.operands(policy, batch, grads)?;
        Ok(step(&self.request.loss.clone(), batch, &mut HostHead(DeviceHead(self)), tensors)?.into())
    }

    fn value_and_grad_in_place(&mut self, logits: TensorMut<'_>, batch: &TokenBatch) -> Result<LossOutput> {
        let tensors = self.operands_in_place(logits, batch)?;
        Ok(step(&self.request.loss.clone(), batch, &mut HostHead(DeviceHead(self)), tensors)?.into())
    }

    fn memory(&self) -> MemoryReport {
        self.memory
    }
}
