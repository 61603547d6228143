//! Runs programs on XLA's CPU plugin, which is installed on first use.
#![allow(dead_code, unreachable_pub, missing_docs)] // every test binary uses its own part

use half::{bf16, f16};
use pjrt::install::{self, Kind};
use pjrt::{Argument, Buffer, Client, CompileOptions, DType, Element, LoadedExecutable, Plugin};
use stablehlo::{Array, Builder, Dtype, Interpreter, Module, Rounding, TensorType, Value};
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

/// A tensor on the host.
#[derive(Clone, Debug)]
pub struct Tensor {
    shape: Vec<usize>,
    elements: Elements,
}

#[derive(Clone, Debug)]
enum Elements {
    Bool(Vec<bool>),
    I16(Vec<i16>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    U32(Vec<u32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

macro_rules! elements {
    ($($new:ident $get:ident $variant:ident $ty:ty;)*) => {
        impl Tensor {
            $(pub fn $new(elements: &[$ty], shape: &[usize]) -> Self {
                assert_eq!(elements.len(), shape.iter().product::<usize>());
                Self { shape: shape.to_vec(), elements: Elements::$variant(elements.to_vec()) }
            }

            pub fn $get(&self) -> Vec<$ty> {
                match &self.elements {
                    Elements::$variant(elements) => elements.clone(),
                    other => panic!("{other:?} is no {}", stringify!($variant)),
                }
            })*

            fn dtype(&self) -> Dtype {
                match &self.elements {
                    Elements::Bool(_) => Dtype::Pred,
                    Elements::I16(_) => Dtype::I16,
                    Elements::I32(_) => Dtype::I32,
                    Elements::I64(_) => Dtype::I64,
                    Elements::U32(_) => Dtype::U32,
                    Elements::F16(_) => Dtype::F16,
                    Elements::Bf16(_) => Dtype::Bf16,
                    Elements::F32(_) => Dtype::F32,
                    Elements::F64(_) => Dtype::F64,
                }
            }

            fn send(&self, device: usize) -> Buffer {
                match &self.elements {
                    $(Elements::$variant(elements) => send(elements, &self.shape, device),)*
                }
            }

            fn receive(buffer: &Buffer) -> Self {
                let elements = match buffer.dtype() {
                    DType::Pred => Elements::Bool(buffer.to_vec().unwrap()),
                    DType::I16 => Elements::I16(buffer.to_vec().unwrap()),
                    DType::I32 => Elements::I32(buffer.to_vec().unwrap()),
                    DType::I64 => Elements::I64(buffer.to_vec().unwrap()),
                    DType::U32 => Elements::U32(buffer.to_vec().unwrap()),
                    DType::F16 => Elements::F16(buffer.to_vec().unwrap()),
                    DType::Bf16 => Elements::Bf16(buffer.to_vec().unwrap()),
                    DType::F32 => Elements::F32(buffer.to_vec().unwrap()),
                    DType::F64 => Elements::F64(buffer.to_vec().unwrap()),
                    other => panic!("{other}"),
                };
                Self { shape: buffer.dims().to_vec(), elements }
            }
        }
    };
}

elements! {
    bool bools Bool bool;
    i16 i16s I16 i16;
    i32 i32s I32 i32;
    i64 i64s I64 i64;
    u32 u32s U32 u32;
    f16 f16s F16 f16;
    bf16 bf16s Bf16 bf16;
    f32 wide F32 f32;
    f64 f64s F64 f64;
}

impl Tensor {
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn ty(&self) -> TensorType {
        TensorType::new(self.dtype(), &self.shape[..])
    }
}

impl Tensor {
    /// Converts an argument of the interpreter into a tensor.
    pub fn of(array: &Array) -> Self {
        let (floats, ints) = (array.to_floats(), array.to_ints());
        let elements = match array.ty().dtype {
            Dtype::Pred => Elements::Bool(array.to_preds()),
            Dtype::I16 => Elements::I16(ints.iter().map(|x| *x as i16).collect()),
            Dtype::I32 => Elements::I32(ints.iter().map(|x| *x as i32).collect()),
            Dtype::I64 => Elements::I64(ints),
            Dtype::U32 => Elements::U32(ints.iter().map(|x| *x as u32).collect()),
            Dtype::F16 => Elements::F16(floats.into_iter().map(f16::from_f64).collect()),
            Dtype::Bf16 => Elements::Bf16(floats.into_iter().map(bf16::from_f64).collect()),
            Dtype::F32 => Elements::F32(floats.into_iter().map(|x| x as f32).collect()),
            Dtype::F64 => Elements::F64(floats),
        };
        Self { shape: array.shape().to_vec(), elements }
    }

    /// Converts the tensor into an argument of the interpreter.
    pub fn array(&self) -> Array {
        let (dtype, shape) = (self.dtype(), self.shape.clone());
        let array = match &self.elements {
            Elements::Bool(x) => Array::preds(shape, x.iter().copied()),
            Elements::I16(x) => Array::ints(dtype, shape, x.iter().map(|x| (*x).into())),
            Elements::I32(x) => Array::ints(dtype, shape, x.iter().map(|x| (*x).into())),
            Elements::I64(x) => Array::ints(dtype, shape, x.iter().copied()),
            Elements::U32(x) => Array::ints(dtype, shape, x.iter().map(|x| (*x).into())),
            Elements::F16(x) => Array::floats(dtype, shape, x.iter().map(|x| x.to_f64())),
            Elements::Bf16(x) => Array::floats(dtype, shape, x.iter().map(|x| x.to_f64())),
            Elements::F32(x) => Array::floats(dtype, shape, x.iter().map(|x| (*x).into())),
            Elements::F64(x) => Array::floats(dtype, shape, x.iter().copied()),
        };
        array.expect("as many elements as the shape has")
    }
}

/// Asserts that the interpreter agrees with XLA: exactly for integers and predicates, within the rounding of the dtype,
/// or `slack` times the largest magnitude, for floats.
pub fn interpreter_agrees(module: &Module, arguments: &[Tensor], found: &[Tensor], slack: f64) {
    let interpreter = Interpreter { rounding: Rounding::Dtypes, ..Interpreter::default() };
    let arguments: Vec<Array> = arguments.iter().map(Tensor::array).collect();
    let expected = interpreter.run(module, &arguments).unwrap_or_else(|error| panic!("{error}\n{module}"));
    assert_eq!(expected.len(), found.len());
    for (i, (ours, xla)) in expected.iter().zip(found).enumerate() {
        let xla = xla.array();
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
        let same = |a: f64, b: f64| {
            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= digits * b.abs() + slack * largest
        };
        let different: Vec<_> = ours.iter().zip(&xla).enumerate().filter(|(_, (a, b))| !same(**a, **b)).collect();
        assert!(different.is_empty(), "result {i}: (place, (the interpreter, XLA)) {different:?} of\n{module}");
    }
}

pub fn f32s(tensor: &Tensor) -> Vec<f32> {
    tensor.wide()
}

fn send<T: Element>(elements: &[T], shape: &[usize], device: usize) -> Buffer {
    let client = client();
    client.buffer_from_host(elements, shape, &client.addressable_devices()[device]).expect("the data gets there")
}

pub fn compile_with(module: &Module, options: CompileOptions) -> LoadedExecutable {
    let options = options.with("xla_backend_optimization_level", 0).with("xla_allow_excess_precision", false);
    // By default, minimum and maximum of XLA on the CPU do not propagate NaN, as StableHLO requires.
    let options = options.with("xla_cpu_enable_fast_min_max", false);
    client().compile(module.to_string(), &options).unwrap_or_else(|error| panic!("{error}\n{module}"))
}

/// Returns the options for one device, or for the devices of a mesh with Shardy.
pub fn options(module: &Module) -> CompileOptions {
    if module.partitions == 1 { CompileOptions::default() } else { CompileOptions::shardy(module.partitions) }
}

pub fn compile(module: &Module) -> LoadedExecutable {
    compile_with(module, options(module))
}

fn execute(executable: &LoadedExecutable, arguments: &[Vec<Buffer>]) -> Vec<Vec<Tensor>> {
    let lists: Vec<Vec<&Buffer>> = arguments.iter().map(|list| list.iter().collect()).collect();
    let lists: Vec<&[&Buffer]> = lists.iter().map(|list| &list[..]).collect();
    let outputs = executable.execute(&lists).expect("the program runs");
    outputs.iter().map(|list| list.iter().map(Tensor::receive).collect()).collect()
}

/// Runs a program on the first device.
pub fn run_module(module: &Module, arguments: &[Tensor]) -> Vec<Tensor> {
    execute(&compile(module), &[arguments.iter().map(|a| a.send(0)).collect()]).remove(0)
}

/// Builds a program of `arguments`, and runs it.
pub fn run(arguments: &[Tensor], build: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) -> Vec<Tensor> {
    let f = Builder::new();
    let values: Vec<Value> = arguments.iter().map(|a| f.argument("", a.ty())).collect();
    let results = build(&f, &values);
    let named: Vec<(&str, &Value)> = results.iter().map(|v| ("", v)).collect();
    let module = f.finish("main", &named).unwrap_or_else(|error| panic!("{error}"));
    let outputs = run_module(&module, arguments);
    for (output, value) in outputs.iter().zip(&results) {
        assert_eq!(&output.ty(), value.ty(), "the builder and XLA agree on the type");
    }
    interpreter_agrees(&module, arguments, &outputs, 1e-6);
    outputs
}

pub fn run_one(arguments: &[Tensor], build: impl FnOnce(&Builder, &[Value]) -> Value) -> Tensor {
    run(arguments, |f, values| vec![build(f, values)]).remove(0)
}

/// Runs a program of one argument on one replica per element of `arguments`; returns `[replicas][outputs]`.
pub fn on_replicas(arguments: &[Tensor], build: impl FnOnce(&Builder, &Value) -> Vec<Value>) -> Vec<Vec<Tensor>> {
    let f = Builder::new();
    let argument = f.argument("a", arguments[0].ty());
    let results = build(&f, &argument);
    let named: Vec<(&str, &Value)> = results.iter().map(|v| ("", v)).collect();
    let mut module = f.finish("replicated", &named).unwrap_or_else(|error| panic!("{error}"));
    module.replicas = arguments.len();
    let executable = compile_with(&module, CompileOptions::replicas(arguments.len()));
    let buffers: Vec<_> = arguments.iter().enumerate().map(|(device, a)| vec![a.send(device)]).collect();
    let outputs = execute(&executable, &buffers);
    let lists: Vec<Vec<Array>> = arguments.iter().map(|a| vec![a.array()]).collect();
    let interpreter = Interpreter { rounding: Rounding::Dtypes, ..Interpreter::default() };
    let expected = interpreter.run_replicas(&module, &lists).unwrap_or_else(|error| panic!("{error}\n{module}"));
    for (found, expected) in outputs.iter().flatten().zip(expected.iter().flatten()) {
        assert_eq!(found.array(), *expected, "the interpreter and XLA agree\n{module}");
    }
    outputs
}

/// Returns the shapes of each device's parameters.
pub fn parameters(module: &Module) -> Vec<Vec<usize>> {
    let parameters = compile(module).executable().parameters().expect("a program").expect("types");
    parameters.into_iter().map(|ty| ty.dims).collect()
}

/// Runs a program on the devices of its mesh. Arguments and results are whole tensors; each has a sharding.
pub fn run_on_mesh(module: &Module, arguments: &[Array]) -> Vec<Array> {
    let mut lists: Vec<Vec<Buffer>> = (0..module.partitions).map(|_| vec![]).collect();
    for (argument, array) in module.main.arguments.iter().zip(arguments) {
        let parts = array.parts(argument.sharding.as_ref().expect("a sharding")).expect("parts");
        parts.iter().enumerate().for_each(|(device, part)| lists[device].push(Tensor::of(part).send(device)));
    }
    let outputs = execute(&compile(module), &lists);
    let whole = module.main.results.iter().enumerate().map(|(i, result)| {
        let parts: Vec<Array> = outputs.iter().map(|list| list[i].array()).collect();
        Array::whole(&parts, result.sharding.as_ref().expect("a sharding")).unwrap_or_else(|e| panic!("{e}\n{module}"))
    });
    whole.collect()
}

/// Runs a program on the first device; the `donated` arguments follow the `borrowed` ones.
pub fn run_donating(module: &Module, borrowed: &[Tensor], donated: &[Tensor]) -> Vec<Tensor> {
    let kept: Vec<Buffer> = borrowed.iter().map(|a| a.send(0)).collect();
    let arguments = kept.iter().map(Argument::Borrowed).chain(donated.iter().map(|a| Argument::Donated(a.send(0))));
    let outputs = compile(module).execute_donating(vec![arguments.collect()]).expect("the program runs");
    outputs[0].iter().map(Tensor::receive).collect()
}

/// Asserts that both are equal within a relative `tolerance`; NaN equals itself.
pub fn close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (f, e) in found.iter().zip(expected) {
        let same = f == e || (f.is_nan() && e.is_nan()) || (f - e).abs() <= tolerance * e.abs();
        assert!(same, "{what}: {found:?} and should be {expected:?}");
    }
}

pub(crate) fn ty(dtype: Dtype, shape: &[usize]) -> TensorType {
    TensorType::new(dtype, shape)
}

/// Runs `build` on f32 vectors.
pub(crate) fn on_vectors(arguments: &[&[f32]], build: impl FnOnce(&[Value]) -> Value) -> Tensor {
    let tensors: Vec<Tensor> = arguments.iter().map(|a| Tensor::f32(a, &[a.len()])).collect();
    run_one(&tensors, |_, values| build(values))
}

/// Small numbers with a period of 7.
pub(crate) fn counting(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 7) as f32 - 2.0).collect()
}
