//! Count as a program for trainers: `rlstack train ... --env.name rust:target/release/examples/count_env`.

use rlstack_game::games::{Count, CountConfig};

fn main() -> std::process::ExitCode {
    rlstack_game::serve("Count", |options| {
        let config = CountConfig::from_options(options)?;
        Ok(move |seed| Count::new(config.clone(), seed))
    })
}
