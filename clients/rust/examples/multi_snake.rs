//! MultiSnake as a program for trainers: `rlstack train ... --env.name rust:target/release/examples/multi_snake`.

use rlstack_game::games::{MultiSnake, MultiSnakeConfig};

fn main() -> std::process::ExitCode {
    rlstack_game::serve("MultiSnake", |options| {
        let config = MultiSnakeConfig::from_options(options)?;
        Ok(move |seed| MultiSnake::new(config.clone(), seed))
    })
}
