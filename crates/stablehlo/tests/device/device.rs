//! Runs programs on XLA's CPU plugin, which is installed on first use.
#![allow(unreachable_pub, missing_docs)]

use grpo_pjrt::install::{self, Kind};
use grpo_pjrt::{Buffer, Client, CompileCache, CompileOptions, DType, Element, LoadedExecutable, Plugin};
use grpo_stablehlo::{Array, Dtype, Interpreter, Module, Rounding};
use grpo_testkit::margin::assert_below;
use grpo_testkit::xla_cpu::program_cache;
use half::{bf16, f16};
use std::sync::OnceLock;

/// Returns a client with four virtual devices.
pub fn client() -> &'static Client {
    static CLIENT: OnceLock<Client> = OnceLock::new();
    CLIENT.get_or_init(|| {
        let installed = install::install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
        let plugin = Plugin::load(installed.path).expect("the plugin loads");
        plugin.client(&[("cpu_device_count", 4.into())]).expect("the CPU opens")
    })
}

fn send(array: &Array, device: usize) -> Buffer {
    fn put<T: Element>(numbers: impl IntoIterator<Item = T>, array: &Array, device: usize) -> Buffer {
        let (numbers, device) = (numbers.into_iter().collect::<Vec<T>>(), &client().addressable_devices()[device]);
        client().buffer_from_host(&numbers, array.shape(), device).expect("a buffer")
    }
    let (floats, ints) = (array.to_floats().into_iter(), array.to_ints().into_iter());
    match array.ty().dtype {
        Dtype::Pred => put(array.to_preds(), array, device),
        Dtype::I16 => put(ints.map(|x| x as i16), array, device),
        Dtype::I32 => put(ints.map(|x| x as i32), array, device),
        Dtype::I64 => put(ints, array, device),
        Dtype::U8 => put(ints.map(|x| x as u8), array, device),
        Dtype::U32 => put(ints.map(|x| x as u32), array, device),
        Dtype::F16 => put(floats.map(f16::from_f64), array, device),
        Dtype::Bf16 => put(floats.map(bf16::from_f64), array, device),
        Dtype::F32 => put(floats.map(|x| x as f32), array, device),
        Dtype::F64 => put(floats, array, device),
    }
}

fn receive(buffer: &Buffer) -> Array {
    fn floats<T: Element + Into<f64>>(dtype: Dtype, buffer: &Buffer) -> grpo_stablehlo::Result<Array> {
        let numbers = buffer.to_vec::<T>().expect("numbers");
        Array::floats(dtype, buffer.dims(), numbers.into_iter().map(Into::into))
    }
    fn ints<T: Element + Into<i64>>(dtype: Dtype, buffer: &Buffer) -> grpo_stablehlo::Result<Array> {
        let numbers = buffer.to_vec::<T>().expect("numbers");
        Array::ints(dtype, buffer.dims(), numbers.into_iter().map(Into::into))
    }
    let array = match buffer.dtype() {
        DType::Pred => Array::preds(buffer.dims(), buffer.to_vec::<bool>().expect("predicates")),
        DType::I16 => ints::<i16>(Dtype::I16, buffer),
        DType::I32 => ints::<i32>(Dtype::I32, buffer),
        DType::I64 => ints::<i64>(Dtype::I64, buffer),
        DType::U8 => ints::<u8>(Dtype::U8, buffer),
        DType::U32 => ints::<u32>(Dtype::U32, buffer),
        DType::F16 => floats::<f16>(Dtype::F16, buffer),
        DType::Bf16 => floats::<bf16>(Dtype::Bf16, buffer),
        DType::F32 => floats::<f32>(Dtype::F32, buffer),
        DType::F64 => floats::<f64>(Dtype::F64, buffer),
        other => panic!("{other}"),
    };
    array.expect("as many elements as the shape has")
}

/// Asserts that the interpreter agrees with XLA: exactly for integers and predicates, within the rounding of the dtype,
/// or `slack` times the largest magnitude, for floats.
pub fn interpreter_agrees(module: &Module, arguments: &[Array], found: &[Array], slack: f64) {
    let interpreter = Interpreter { rounding: Rounding::Dtypes, ..Interpreter::default() };
    // As the device has them, rounded to their dtypes.
    let arguments: Vec<Array> = arguments.iter().map(|array| receive(&send(array, 0))).collect();
    let expected = interpreter.run(module, &arguments).unwrap_or_else(|error| panic!("{error}\n{module}"));
    assert_eq!(expected.len(), found.len());
    for (i, (ours, xla)) in expected.iter().zip(found).enumerate() {
        assert_eq!(ours.ty(), xla.ty(), "result {i} of\n{module}");
        let exact = !ours.ty().dtype.is_float();
        let digits = match ours.ty().dtype {
            Dtype::F16 => 2e-3,
            Dtype::Bf16 => 1.6e-2,
            _ => 4e-6,
        };
        if exact {
            let different = ours.to_ints().into_iter().zip(xla.to_ints()).enumerate().filter(|(_, (a, b))| a != b);
            let different: Vec<_> = different.collect();
            assert!(different.is_empty(), "result {i}: (place, (the interpreter, XLA)) {different:?} of\n{module}");
            continue;
        }
        let (ours, xla) = (ours.to_floats(), xla.to_floats());
        let largest = xla.iter().filter(|x| x.is_finite()).fold(0.0_f64, |m, x| m.max(x.abs()));
        let share = |(a, b): (&f64, &f64)| match a == b || (a.is_nan() && b.is_nan()) {
            true => 0.0,
            false => (a - b).abs() / (digits * b.abs() + slack * largest),
        };
        let shares: Vec<f64> = ours.iter().zip(&xla).map(share).collect();
        let worst = shares.iter().fold(0.0, |m: f64, x| if *x > m || x.is_nan() { *x } else { m });
        let different = || {
            shares
                .iter()
                .enumerate()
                .filter(|(_, share)| **share > 1.0 || share.is_nan())
                .map(|(k, _)| (k, ours[k], xla[k]))
        };
        assert!(
            worst <= 1.0,
            "result {i}: (place, the interpreter, XLA) {:?} of\n{module}",
            different().collect::<Vec<_>>()
        );
        assert_below(&format!("{} of the interpreter and XLA, share of the bound", module.name), worst, 1.0);
    }
}

/// Compiles a program with the cache of all tests. Random programs are the same in every run, because the seed is.
pub fn compile(module: &Module) -> LoadedExecutable {
    let compiled = CompileCache::new(program_cache()).compile(client(), module.to_string(), &options(module));
    compiled.unwrap_or_else(|error| panic!("{error}\n{module}")).0
}

/// Returns the options for one device, or for the devices of a mesh with Shardy.
fn options(module: &Module) -> CompileOptions {
    let split = CompileOptions::shardy(module.partitions);
    let options = if module.partitions == 1 { CompileOptions::default() } else { split };
    let options = options.with("xla_backend_optimization_level", 0).with("xla_allow_excess_precision", false);
    // By default, minimum and maximum of XLA on the CPU do not propagate NaN, as StableHLO requires.
    options.with("xla_cpu_enable_fast_min_max", false)
}

fn execute(executable: &LoadedExecutable, arguments: &[Vec<Buffer>]) -> Vec<Vec<Array>> {
    let lists: Vec<Vec<&Buffer>> = arguments.iter().map(|list| list.iter().collect()).collect();
    let outputs = executable.execute(&lists.iter().map(Vec::as_slice).collect::<Vec<_>>()).expect("the program runs");
    outputs.iter().map(|list| list.iter().map(receive).collect()).collect()
}

/// Runs a compiled program on the first device.
pub fn run(executable: &LoadedExecutable, arguments: &[Array]) -> Vec<Array> {
    execute(executable, &[arguments.iter().map(|a| send(a, 0)).collect()]).remove(0)
}

/// Runs a compiled program on the devices of its mesh. Arguments and results are whole tensors; those without a
/// sharding are equal on all devices. Asserts that every device takes its shards.
pub fn run_on_mesh(executable: &LoadedExecutable, module: &Module, arguments: &[Array]) -> Vec<Array> {
    let mut lists: Vec<Vec<Buffer>> = (0..module.partitions).map(|_| vec![]).collect();
    let mut shapes = vec![];
    for (argument, array) in module.main.arguments.iter().zip(arguments) {
        let parts = match &argument.sharding {
            Some(sharding) => array.parts(sharding).expect("parts"),
            None => vec![array.clone(); module.partitions],
        };
        shapes.push(parts[0].shape().to_vec());
        parts.iter().enumerate().for_each(|(device, part)| lists[device].push(send(part, device)));
    }
    let taken = executable.executable().parameters().expect("a program").expect("types");
    assert_eq!(taken.into_iter().map(|ty| ty.dims).collect::<Vec<_>>(), shapes, "shapes of the shards");
    let outputs = execute(executable, &lists);
    let whole = module.main.results.iter().enumerate().map(|(i, result)| {
        let parts: Vec<Array> = outputs.iter().map(|list| list[i].clone()).collect();
        match &result.sharding {
            Some(sharding) => Array::whole(&parts, sharding).unwrap_or_else(|error| panic!("{error}\n{module}")),
            None => parts[0].clone(),
        }
    });
    whole.collect()
}
