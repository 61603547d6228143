//! Real plugins for the tests, downloaded on first use.
#![allow(dead_code, missing_docs, unreachable_pub)]

use grpo_pjrt::install::{self, Kind};
use grpo_pjrt::{ArrayType, Buffer, Client, CompileOptions, DType, Element, LoadedExecutable, Plugin};

pub fn plugin(kind: Kind) -> Plugin {
    let installed = install::install(kind, |step| eprintln!("{step:?}")).expect("the plugin can be installed");
    Plugin::load(installed.path).expect("the plugin loads")
}

/// Opens the CPU plugin with `devices` virtual devices.
pub fn cpu(devices: i64) -> Client {
    plugin(Kind::Cpu).client(&[("cpu_device_count", devices.into())]).expect("the CPU opens")
}

pub fn array(dtype: DType, dims: &[usize]) -> ArrayType {
    ArrayType { dtype, dims: dims.to_vec() }
}

pub fn compile(client: &Client, program: &str) -> LoadedExecutable {
    client.compile(program, &CompileOptions::default()).expect("the program compiles")
}

pub fn buffer<T: Element>(client: &Client, data: &[T], dims: &[usize]) -> Buffer {
    client.buffer_from_host(data, dims, &client.addressable_devices()[0]).expect("the data gets to the device")
}

/// Runs an executable with one output on the first device.
pub fn run(executable: &LoadedExecutable, arguments: &[&Buffer]) -> Buffer {
    let mut outputs = executable.execute(&[arguments]).expect("the program runs");
    outputs.remove(0).remove(0)
}

/// Runs an executable once on every device with one argument each.
pub fn run_on_all(executable: &LoadedExecutable, arguments: &[Buffer]) -> Vec<Buffer> {
    let lists: Vec<[&Buffer; 1]> = arguments.iter().map(|argument| [argument]).collect();
    let lists: Vec<&[&Buffer]> = lists.iter().map(|list| &list[..]).collect();
    executable.execute(&lists).expect("the program runs").into_iter().flatten().collect()
}

/// `a + a` on four numbers; the output reuses the argument's memory if it is donated.
pub const DOUBLE: &str = "
func.func @main(%a: tensor<4xf32> {tf.aliasing_output = 0 : i32}) -> tensor<4xf32> {
  %0 = stablehlo.add %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}";
