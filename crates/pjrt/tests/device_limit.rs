//! A wait that exceeds its limit. It runs in its own process, which ends while the device still computes.

mod support;

use grpo_pjrt::{Client, Error};
use std::time::Duration;
use support::{buffer, compile, cpu, run};

/// A loop over products.
const PROGRAM: &str = "
    module @NAME {
      func.func @main(%a: tensor<512x512xf32>) -> tensor<512x512xf32> {
        %zero = stablehlo.constant dense<0> : tensor<i32>
        %one = stablehlo.constant dense<1> : tensor<i32>
        %count = stablehlo.constant dense<COUNT> : tensor<i32>
        %i, %r = stablehlo.while(%j = %zero, %b = %a) : tensor<i32>, tensor<512x512xf32>
          cond {
            %more = stablehlo.compare LT, %j, %count : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %more : tensor<i1>
          } do {
            %next = stablehlo.add %j, %one : tensor<i32>
            %c = stablehlo.dot %b, %a : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
            stablehlo.return %next, %c : tensor<i32>, tensor<512x512xf32>
          }
        return %r : tensor<512x512xf32>
      }
    }";

#[test]
fn a_program_beyond_the_wait_limit_is_an_error() {
    let program = |name: &str, count: usize| PROGRAM.replace("NAME", name).replace("COUNT", &count.to_string());

    let client = cpu(1);
    assert_eq!(client.wait_limit(), Client::DEFAULT_WAIT_LIMIT);
    // The plugin prepares its kernels at the first product, and registers destructors for them.
    let short = compile(&client, &program("short", 1));
    // The loop takes many seconds.
    let executable = compile(&client, &program("too_long", 20_000));
    let argument = buffer(&client, &vec![0.0f32; 512 * 512], &[512, 512]);
    run(&short, &[&argument]).wait().unwrap();
    let _same = client.clone().with_wait_limit(Duration::from_millis(1));
    assert_eq!(client.wait_limit(), Duration::from_millis(1));
    let output = run(&executable, &[&argument]);
    let error = output.wait().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    assert!(error.to_string().contains("`too_long`"), "{error}");
    assert!(output.to_vec::<f32>().unwrap_err().is_timed_out());
    assert!(executable.execute(&[&[&argument]]).unwrap_err().is_timed_out());
    drop((argument, output, short, executable, client));
}
