//! Executables on the XLA CPU plugin: values, errors, devices, donation, threads.

use crate::support::{DOUBLE, array, buffer, compile, cpu, run, run_on_all};
use grpo_pjrt::{Argument, Buffer, Client, Code, CompileOptions, DType, Device, Element, Error};
use half::{bf16, f16};

#[test]
fn a_bf16_product_accumulates_in_f32() {
    let client = cpu(1);
    let program = "
    func.func @main(%a: tensor<3x512xbf16>, %b: tensor<512x2xbf16>) -> tensor<3x2xf32> {
      %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
        : (tensor<3x512xbf16>, tensor<512x2xbf16>) -> tensor<3x2xf32>
      return %0 : tensor<3x2xf32>
    }";
    // Small integers: products and sums are exact in f32, but not in bf16 beyond 256.
    let a: Vec<bf16> = (0..3 * 512).map(|i| bf16::from_f32((i % 7) as f32 - 2.0)).collect();
    let b: Vec<bf16> = (0..512 * 2).map(|i| bf16::from_f32((i % 5) as f32)).collect();
    let mut expected = vec![0.0f32; 6];
    for (i, value) in expected.iter_mut().enumerate() {
        *value = (0..512).map(|k| a[i / 2 * 512 + k].to_f32() * b[k * 2 + i % 2].to_f32()).sum();
    }
    assert!(expected.iter().any(|&value| bf16::from_f32(value).to_f32() != value));
    let output = run(&compile(&client, program), &[&buffer(&client, &a, &[3, 512]), &buffer(&client, &b, &[512, 2])]);
    assert_eq!((output.dtype(), output.dims()), (DType::F32, &[3, 2][..]));
    assert_eq!(output.to_vec::<f32>().unwrap(), expected);
}

fn round_trip<T: Element + PartialEq + std::fmt::Debug>(values: [T; 6]) {
    let client = cpu(1);
    let name = T::DTYPE.name();
    // The result of a transpose may have any layout on the device, but must be row-major on the host.
    let program = format!(
        "func.func @main(%a: tensor<2x3x{name}>) -> tensor<3x2x{name}> {{
          %0 = stablehlo.transpose %a, dims = [1, 0] : (tensor<2x3x{name}>) -> tensor<3x2x{name}>
          return %0 : tensor<3x2x{name}>
        }}"
    );
    let sent = buffer(&client, &values, &[2, 3]);
    assert_eq!((sent.dtype(), sent.dims()), (T::DTYPE, &[2, 3][..]));
    assert_eq!(sent.to_vec::<T>().unwrap(), values);
    let transposed = run(&compile(&client, &program), &[&sent]).to_vec::<T>().unwrap();
    assert_eq!(transposed, [values[0], values[3], values[1], values[4], values[2], values[5]]);
}

#[test]
fn every_element_type_survives_the_round_trip() {
    round_trip([0.5f32, -1.0, f32::INFINITY, 1e-30, 3.0, f32::MAX]);
    round_trip([0.1f64, -1.0, f64::INFINITY, 1e-300, 3.0, f64::MAX]);
    round_trip([0.1, -1.0, 2.0, 3e4, 1e-3, -0.0].map(f16::from_f32));
    round_trip([0.1, -1.0, 2.0, 3e38, 1e-30, -0.0].map(bf16::from_f32));
    round_trip([0i8, 1, -1, i8::MIN, i8::MAX, 5]);
    round_trip([0i16, 1, -1, i16::MIN, i16::MAX, 5]);
    round_trip([0i32, 1, -1, i32::MIN, i32::MAX, 5]);
    round_trip([0i64, 1, -1, i64::MIN, i64::MAX, 5]);
    round_trip([0u8, 1, 2, 3, u8::MAX, 5]);
    round_trip([0u16, 1, 2, 3, u16::MAX, 5]);
    round_trip([0u32, 1, 2, 3, u32::MAX, 5]);
    round_trip([0u64, 1, 2, 3, u64::MAX, 5]);
    round_trip([true, false, false, true, true, false]);
}

#[test]
fn scalars_and_empty_arrays_are_arrays() {
    let client = cpu(1);
    assert_eq!(buffer(&client, &[7i32], &[]).to_vec::<i32>().unwrap(), [7]);
    assert!(buffer::<f32>(&client, &[], &[0, 4]).to_vec::<f32>().unwrap().is_empty());
}

#[test]
fn a_buffer_does_not_alias_its_host_slice() {
    let client = cpu(1);
    // Plugins may use large and page-aligned slices without a copy.
    for len in [1, 16, 1 << 10, 1 << 22] {
        let mut data = vec![1.0f32; len];
        let copy = buffer(&client, &data, &[len]);
        data.fill(2.0);
        drop(data);
        assert!(copy.to_vec::<f32>().unwrap().iter().all(|&value| value == 1.0));
    }
}

/// Copies the columns of `[3, 4]` to four devices and reads them.
fn columns_on_four_devices<T: Element + PartialEq + std::fmt::Debug>(client: &Client, values: [T; 12]) {
    let devices = client.addressable_devices().iter().enumerate();
    let columns = devices.map(|(i, device)| {
        client.buffer_from_host_async(&values, &[3, 4], &[0..3, i..i + 1], device).expect("a copy starts")
    });
    let columns: Vec<Buffer> = columns.collect();
    let copies: Vec<_> = columns.iter().map(|column| column.to_vec_async::<T>().expect("a copy starts")).collect();
    for (i, copy) in copies.into_iter().enumerate() {
        assert_eq!(copy.wait().expect("a column"), [values[i], values[4 + i], values[8 + i]]);
        assert_eq!(
            (columns[i].dims(), columns[i].device().unwrap()),
            (&[3, 1][..], client.addressable_devices()[i].clone())
        );
    }
}

#[test]
fn parts_of_every_element_type_are_copied_to_several_devices() {
    let client = cpu(4);
    let numbers: [i8; 12] = std::array::from_fn(|i| 3 * i as i8 - 17);
    columns_on_four_devices(&client, numbers.map(|n| n % 2 == 0));
    columns_on_four_devices(&client, numbers);
    columns_on_four_devices(&client, numbers.map(i16::from));
    columns_on_four_devices(&client, numbers.map(i32::from));
    columns_on_four_devices(&client, numbers.map(i64::from));
    columns_on_four_devices(&client, numbers.map(|n| n as u8));
    columns_on_four_devices(&client, numbers.map(|n| n as u16));
    columns_on_four_devices(&client, numbers.map(|n| n as u32));
    columns_on_four_devices(&client, numbers.map(|n| n as u64));
    columns_on_four_devices(&client, numbers.map(|n| f16::from_f32(n.into())));
    columns_on_four_devices(&client, numbers.map(|n| bf16::from_f32(n.into())));
    columns_on_four_devices(&client, numbers.map(f32::from));
    columns_on_four_devices(&client, numbers.map(f64::from));
}

#[test]
fn plugin_errors_have_code_and_message() {
    let client = cpu(1);
    let error = client.compile("this is no program", &CompileOptions::default()).err().unwrap();
    let Error::Api { operation, message, .. } = &error else { panic!("{error}") };
    assert!(*operation == "PJRT_Client_Compile" && message.contains("StableHLO"), "{error}");

    let program = compile(&client, DOUBLE);
    let argument = buffer(&client, &[1.0f32; 4], &[4]);
    let refused: [(&[&[_]], &str); 3] = [
        (&[&[&argument, &argument]], "supplied 2 buffers"),
        (&[&[]], "supplied 0 buffers"),
        (&[&[&argument], &[&argument]], "2 argument lists"),
    ];
    for (arguments, reason) in refused {
        let error = program.execute(arguments).unwrap_err();
        let Error::Api { code: Code::InvalidArgument, message, .. } = &error else { panic!("{error}") };
        assert!(message.contains(reason), "{message}");
    }
    // The plugin still works after an error.
    assert_eq!(run(&program, &[&argument]).to_vec::<f32>().unwrap(), [2.0; 4]);
    assert!(client.load(b"no executable").is_err());
    assert!(client.addressable_devices()[0].memory_stats().unwrap_err().is_unsupported());
}

#[test]
fn invalid_calls_report_the_expected_value() {
    let client = cpu(1);
    let device = &client.addressable_devices()[0];
    let error = client.buffer_from_host(&[1.0f32; 5], &[2, 3], device).unwrap_err();
    assert!(matches!(error, Error::Size { expected: 24, found: 20, .. }), "{error}");
    let overflowing = client.buffer_from_host(&[1.0f32; 5], &[usize::MAX, 2], device).unwrap_err();
    assert!(matches!(overflowing, Error::Size { .. }), "{overflowing}");

    let error = client.buffer_from_host_async(&[1.0f32; 6], &[2, 3], &[0..2, 2..4], device).unwrap_err();
    assert!(matches!(error, Error::Part { .. }), "{error}");

    let two = buffer(&client, &[1.0f32, 2.0], &[2]);
    let error = two.to_host(&mut [0i32; 2]).unwrap_err();
    assert!(matches!(error, Error::DType { expected: DType::F32, found: DType::I32, .. }), "{error}");
    let error = two.to_host(&mut [0.0f32; 3]).unwrap_err();
    assert!(matches!(error, Error::Size { expected: 8, found: 12, .. }), "{error}");

    // These have the same size as the parameter, so the plugin would accept them.
    let double = compile(&client, DOUBLE);
    let ints = buffer(&client, &[1i32; 4], &[4]);
    let matrix = buffer(&client, &[1.0f32; 4], &[2, 2]);
    for (argument, found) in [(&ints, "i32[4]"), (&matrix, "f32[2, 2]")] {
        let error = double.execute(&[&[argument]]).unwrap_err().to_string();
        assert_eq!(error, format!("execute: parameter 0 is f32[4], but the argument is {found}"));
    }

    let other = cpu(1);
    let error = other.buffer_from_host(&[1.0f32], &[1], device).unwrap_err();
    assert!(matches!(error, Error::Foreign { .. }), "{error}");
    let error = compile(&other, DOUBLE).execute(&[&[&two]]).unwrap_err();
    assert!(matches!(error, Error::Foreign { .. }), "{error}");
}

#[test]
fn files_that_are_not_plugins_are_refused() {
    let error = grpo_pjrt::Plugin::load("/no/such/plugin.so").unwrap_err();
    assert!(matches!(error, Error::Load { .. }), "{error}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = grpo_pjrt::Plugin::load(file.path()).unwrap_err();
    assert!(matches!(error, Error::Load { .. }), "{error}");
}

/// Copies two numbers, which may depend on the device's position, to each device.
fn one_each(client: &Client, devices: &[Device], numbers: impl Fn(f32) -> [f32; 2]) -> Vec<Buffer> {
    let send = |(index, device)| client.buffer_from_host(&numbers(index as f32), &[2], device).unwrap();
    devices.iter().enumerate().map(send).collect()
}

/// Every device gets the sum over four devices.
const SUM_OVER_FOUR: &str = "
func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  %0 = \"stablehlo.all_reduce\"(%a) ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %s = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}";

#[test]
fn all_reduce_over_four_devices() {
    let client = cpu(4);
    let executable = client.compile(SUM_OVER_FOUR, &CompileOptions::replicas(4)).unwrap();
    let [sum] = &executable.executable().collectives().unwrap().unwrap()[..] else { panic!("one collective") };
    assert_eq!((sum.kind.as_str(), &sum.types), ("all-reduce", &vec![array(DType::F32, &[2])]));
    // Each device receives three quarters of 8 bytes twice.
    assert_eq!(sum.received_bytes(4), 12.0);
    let devices = executable.devices().unwrap();
    assert_eq!(devices, client.addressable_devices());
    let arguments = one_each(&client, &devices, |index| [index, 10.0]);
    let outputs = run_on_all(&executable, &arguments);
    assert_eq!(outputs.len(), 4);
    for (output, device) in outputs.iter().zip(&devices) {
        assert_eq!(output.device().unwrap(), *device);
        assert_eq!(output.to_vec::<f32>().unwrap(), [6.0, 40.0]);
    }
    let mut arguments = arguments.into_iter();
    let (donated, borrowed) = (arguments.next().unwrap(), arguments.next().unwrap());
    let mixed = vec![vec![Argument::Donated(donated)], vec![Argument::Borrowed(&borrowed)]];
    let error = executable.execute_donating(mixed).unwrap_err();
    assert!(matches!(error, Error::MixedDonation { index: 0 }), "{error}");
}

#[test]
fn partitions_split_one_program_by_its_annotations() {
    let client = cpu(4);
    let program = "
    module attributes {mhlo.num_partitions = 4 : i32} {
      func.func @main(%a: tensor<8xf32> {mhlo.sharding = \"{devices=[4]<=[4]}\"}) -> tensor<f32> {
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %0 = stablehlo.reduce(%a init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
        return %0 : tensor<f32>
      }
    }";
    let options = CompileOptions { device_assignment: Some(vec![vec![3, 2, 1, 0]]), ..CompileOptions::partitions(4) };
    let executable = client.compile(program, &options).unwrap();
    let [sum] = &executable.executable().collectives().unwrap().unwrap()[..] else { panic!("one collective") };
    assert_eq!((sum.kind.as_str(), &sum.types), ("all-reduce", &vec![array(DType::F32, &[])]));
    let shards = one_each(&client, &executable.devices().unwrap(), |index| [index, 1.0]);
    for output in run_on_all(&executable, &shards) {
        assert_eq!(output.to_vec::<f32>().unwrap(), [10.0]);
    }
}

#[test]
fn borrowed_arguments_survive_and_donated_ones_are_reused() {
    let client = cpu(1);
    let program = compile(&client, DOUBLE);
    assert_eq!(program.executable().memory_stats().unwrap().alias, 16);

    let argument = buffer(&client, &[1.0f32, 2.0, 3.0, 4.0], &[4]);
    for _ in 0..3 {
        let output = run(&program, &[&argument]);
        assert_eq!(output.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0]);
        assert!(!argument.is_deleted().unwrap());
    }
    assert_eq!(argument.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);

    // A donated buffer is moved, so rustc rejects another use.
    let mut carried = argument;
    for _ in 0..10 {
        let mut outputs = program.execute_donating(vec![vec![carried.into()]]).unwrap();
        carried = outputs.remove(0).remove(0);
    }
    assert_eq!(carried.to_vec::<f32>().unwrap(), [1024.0, 2048.0, 3072.0, 4096.0]);
}

#[test]
fn using_a_deleted_buffer_is_an_error() {
    let client = cpu(1);
    let argument = buffer(&client, &[1.0f32; 4], &[4]);
    argument.wait().unwrap();
    argument.delete().unwrap();
    assert!(argument.is_deleted().unwrap());
    assert!(argument.to_vec::<f32>().is_err());
    assert!(compile(&client, DOUBLE).execute(&[&[&argument]]).is_err());
}

#[test]
fn a_program_is_usable_from_several_threads() {
    let client = cpu(1);
    let program = compile(&client, DOUBLE);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (client, program) = (&client, &program);
            scope.spawn(move || {
                for round in 0..200 {
                    let value = (thread * 1000 + round) as f32;
                    let argument = buffer(client, &[value; 4], &[4]);
                    assert_eq!(run(program, &[&argument]).to_vec::<f32>().unwrap(), [2.0 * value; 4]);
                }
            });
        }
    });
}

#[test]
fn buffers_and_executables_keep_their_client_open() {
    let client = cpu(2);
    let program = compile(&client, DOUBLE);
    let argument = buffer(&client, &[1.0f32; 4], &[4]);
    drop(client);
    let output = run(&program, &[&argument]);
    drop(program);
    drop(argument);
    assert_eq!(output.to_vec::<f32>().unwrap(), [2.0; 4]);
}

#[test]
fn executables_report_their_memory_and_deserialize() {
    let client = cpu(1);
    let program = compile(&client, DOUBLE);
    let executable = program.executable();
    assert_eq!(executable.outputs().unwrap(), [array(DType::F32, &[4])]);
    assert_eq!(executable.parameters().unwrap().unwrap(), [array(DType::F32, &[4])]);
    assert_eq!(executable.num_replicas().unwrap(), 1);
    let memory = executable.memory_stats().unwrap();
    assert_eq!((memory.argument, memory.output), (16, 16));
    assert_eq!(executable.cost_analysis().unwrap()["flops"], 4.0);
    let optimized = executable.optimized_program().unwrap();
    assert_eq!(optimized.format, "hlo_with_config");
    assert!(!optimized.code.is_empty());

    let again = client.load(&executable.serialize().unwrap()).unwrap();
    assert_eq!(again.executable().name().unwrap(), executable.name().unwrap());
    assert_eq!(run(&again, &[&buffer(&client, &[3.0f32; 4], &[4])]).to_vec::<f32>().unwrap(), [6.0; 4]);
}

/// Collectives of concurrent launches do not interfere.
#[test]
fn threads_run_programs_on_several_devices() {
    let client = cpu(4);
    let executable = client.compile(SUM_OVER_FOUR, &CompileOptions::replicas(4)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (client, executable) = (&client, &executable);
            scope.spawn(move || {
                for round in 0..50 {
                    let value = (thread * 100 + round) as f32;
                    let arguments = one_each(client, client.addressable_devices(), |_| [value, 10.0]);
                    for output in run_on_all(executable, &arguments) {
                        assert_eq!(output.to_vec::<f32>().unwrap(), [4.0 * value, 40.0]);
                    }
                }
            });
        }
    });
}
