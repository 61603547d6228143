//! A test for leaks. It runs in its own process, because it measures the process's memory.

mod support;

use support::{DOUBLE, buffer, compile, cpu, run};

/// Returns the resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has /proc");
    let pages: usize = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number of pages");
    pages * 4096
}

#[test]
fn memory_does_not_grow_over_ten_thousand_runs() {
    let client = cpu(1);
    let program = compile(&client, DOUBLE);
    let round = || {
        let argument = buffer(&client, &[1.0f32; 4], &[4]);
        let output = run(&program, &[&argument]);
        assert_eq!(output.to_vec::<f32>().unwrap(), [2.0; 4]);
        let mut outputs = program.execute_donating(vec![vec![output.into()]]).unwrap();
        outputs.remove(0).remove(0).wait().unwrap();
        // Errors are also objects of the plugin.
        program.execute(&[&[]]).unwrap_err();
    };
    (0..1000).for_each(|_| round());
    let before = resident();
    (0..10_000).for_each(|_| round());
    let growth = resident().saturating_sub(before);
    eprintln!("{growth} bytes more after 10,000 rounds");
    // The smallest leak, 32 bytes per object of one kind, would be 320,000 bytes.
    assert!(growth < 256 << 10, "{growth} bytes more after 10,000 rounds");
}
