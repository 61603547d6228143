//! Sharded programs on four of eight virtual devices of XLA's CPU plugin, against the same programs on one device.

use crate::mesh_support::eight;
use grpo_pjrt::{Buffer, Client, CompileCache, CompileOptions, DType, Element, LoadedExecutable};
use grpo_stablehlo::{Array, Dtype, Mesh, Module};
use grpo_testkit::xla_cpu::{flags, mesh_flags, program_cache};

/// Returns meshes of four devices: weights in four shards; in two shards with two-way data parallelism; in two shards with heads over two
/// devices.
pub(crate) fn meshes() -> [Mesh; 3] {
    let meshes: [&[(&str, usize)]; 3] = [&[("fsdp", 4)], &[("data", 2), ("fsdp", 2)], &[("fsdp", 2), ("tensor", 2)]];
    meshes.map(|axes| Mesh::new("mesh", axes.iter().copied()).expect("a mesh"))
}

fn client() -> &'static Client {
    eight().client()
}

/// Compiles the program for the number of devices in its mesh.
pub(crate) fn compile(module: &Module) -> LoadedExecutable {
    let split = CompileOptions::shardy(module.partitions);
    let options = if module.partitions == 1 { CompileOptions::default() } else { split };
    let options = options.with("xla_allow_excess_precision", false).with("xla_cpu_enable_fast_min_max", false);
    let flags = if module.partitions == 1 { flags() } else { mesh_flags() };
    let options = flags.into_iter().fold(options, |options, (flag, value)| options.with(flag, value));
    let compiled = CompileCache::new(program_cache()).compile(client(), module.to_string(), &options);
    compiled.unwrap_or_else(|error| panic!("{error}\n{module}")).0
}

fn send(array: &Array, device: usize) -> Buffer {
    fn upload<T: Element>(values: impl IntoIterator<Item = T>, shape: &[usize], device: usize) -> Buffer {
        let values: Vec<T> = values.into_iter().collect();
        client().buffer_from_host(&values, shape, &client().addressable_devices()[device]).expect("a buffer")
    }
    let shape = array.shape();
    match array.ty().dtype {
        Dtype::Pred => upload(array.to_preds(), shape, device),
        Dtype::F32 => upload(array.to_floats().into_iter().map(|x| x as f32), shape, device),
        Dtype::I32 => upload(array.to_ints().into_iter().map(|x| x as i32), shape, device),
        Dtype::U32 => upload(array.to_ints().into_iter().map(|x| x as u32), shape, device),
        Dtype::U8 => upload(array.to_ints().into_iter().map(|x| x as u8), shape, device),
        other => panic!("no program takes {other}"),
    }
}

fn receive(buffer: &Buffer) -> Array {
    let dims = buffer.dims().to_vec();
    let array = match buffer.dtype() {
        DType::Pred => Array::preds(dims, numbers::<bool>(buffer)),
        DType::F32 => Array::floats(Dtype::F32, dims, numbers::<f32>(buffer).into_iter().map(f64::from)),
        DType::I32 => Array::ints(Dtype::I32, dims, numbers::<i32>(buffer).into_iter().map(i64::from)),
        DType::U8 => Array::ints(Dtype::U8, dims, numbers::<u8>(buffer).into_iter().map(i64::from)),
        DType::U32 => Array::ints(Dtype::U32, dims, numbers::<u32>(buffer).into_iter().map(i64::from)),
        other => panic!("no program returns {other:?}"),
    };
    array.expect("numbers")
}

fn numbers<T: Element>(buffer: &Buffer) -> Vec<T> {
    buffer.to_vec().expect("a buffer is read")
}

/// Runs a program. Arguments and results are unsharded; the function shards arguments and checks the shard shapes.
pub(crate) fn run(module: &Module, arguments: &[Array]) -> Vec<Array> {
    let devices = module.partitions;
    let mut lists: Vec<Vec<Buffer>> = (0..devices).map(|_| vec![]).collect();
    let mut shapes = vec![];
    for (argument, array) in module.main.arguments.iter().zip(arguments) {
        let parts = match &argument.sharding {
            Some(sharding) => array.parts(sharding).expect("parts"),
            None => vec![array.clone(); devices],
        };
        shapes.push(parts[0].shape().to_vec());
        parts.iter().enumerate().for_each(|(device, part)| lists[device].push(send(part, device)));
    }
    let executable = compile(module);
    let taken = executable.executable().parameters().expect("a program").expect("types");
    assert_eq!(taken.into_iter().map(|ty| ty.dims).collect::<Vec<_>>(), shapes, "shapes of the shards");
    let lists: Vec<Vec<&Buffer>> = lists.iter().map(|list| list.iter().collect()).collect();
    let outputs = executable.execute(&lists.iter().map(Vec::as_slice).collect::<Vec<_>>()).expect("the program runs");
    let whole = module.main.results.iter().enumerate().map(|(i, result)| {
        let parts: Vec<Array> = outputs.iter().map(|list| receive(&list[i])).collect();
        match &result.sharding {
            Some(sharding) => Array::whole(&parts, sharding).expect("parts of one tensor"),
            None => parts[0].clone(),
        }
    });
    whole.collect()
}
