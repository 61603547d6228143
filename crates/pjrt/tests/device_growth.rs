//! Nothing leaks: alone in its process, because it watches the memory of the process.

mod support;

use support::{DOUBLE, buffer, compile, cpu, run};

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has /proc");
    let pages: usize = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number of pages");
    pages * 4096
}

#[test]
fn ten_thousand_rounds_do_not_grow() {
    let client = cpu(1);
    let program = compile(&client, DOUBLE);
    let round = || {
        let argument = buffer(&client, &[1.0f32; 4], &[4]);
        let output = run(&program, &[&argument]);
        assert_eq!(output.to_vec::<f32>().unwrap(), [2.0; 4]);
        let mut outputs = program.execute_donating(vec![vec![output.into()]]).unwrap();
        outputs.remove(0).remove(0).wait().unwrap();
        // Errors are objects of the plugin too.
        program.execute(&[&[]]).unwrap_err();
    };
    (0..1000).for_each(|_| round());
    let before = resident();
    (0..10_000).for_each(|_| round());
    let growth = resident().saturating_sub(before);
    eprintln!("{growth} bytes more after 10,000 rounds");
    // 50,000 objects: the smallest leak, 32 bytes each, would be 320,000 of any one kind.
    assert!(growth < 256 << 10, "{growth} bytes more after 10,000 rounds");
}
