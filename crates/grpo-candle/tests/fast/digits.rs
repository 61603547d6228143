//! The example learns with every implementation.

#[path = "../../examples/digits.rs"]
mod example;

use grpo_core::Implementation;

#[test]
fn the_example_learns_under_every_implementation() {
    for implementation in Implementation::ALL {
        let (first, last) = example::train(implementation).unwrap();
        println!("{}: reward {first} -> {last}", implementation.name());
        assert!(first < 0.25, "the task was solved before training: {first}");
        assert!(last > 0.9, "{}: reward {first} -> {last}", implementation.name());
    }
}
