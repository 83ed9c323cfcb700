//! Race: two runners on one track, asked at once. Runner 0 acts at every tick, runner 1 at every
//! other tick.
//!
//! A command for rlstack's SocketGame with two agents.

use rlstack_game::{ActionMask, Connection, Observation, Space};

const LENGTH: f32 = 4.0;

fn see(runner: usize, places: &[f32; 2]) -> Observation {
    Observation {
        score: places[runner] as f64,
        features: vec![vec![vec![places[runner]]], vec![vec![places[1 - runner]]]],
        action_masks: vec![ActionMask::new(0, vec![0])],
        ..Observation::default()
    }
}

fn main() -> std::io::Result<()> {
    let space = Space::default().entity("Me", 1, &["x"]).entity("Other", 1, &["x"]).categorical(
        "run",
        1,
        &["stay", "go"],
    );
    let mut connection = Connection::from_env(space, 2, "race")?;
    loop {
        let mut places = [0.0f32; 2];
        let mut tick = 0;
        while places[0] < LENGTH && places[1] < LENGTH && tick < 20 {
            let asked: Vec<usize> = if tick % 2 == 0 { vec![0, 1] } else { vec![0] };
            let seen: Vec<Observation> = asked.iter().map(|i| see(*i, &places)).collect();
            let shown: Vec<_> = asked.iter().copied().zip(&seen).collect();
            let Some(answers) = connection.act_all(&shown)? else { return Ok(()) };
            for (runner, actions) in asked.iter().zip(answers) {
                places[*runner] += actions[0].choices[0] as f32;
            }
            tick += 1;
        }
        for runner in 0..2 {
            let truncated = places[0] < LENGTH && places[1] < LENGTH;
            let seen = Observation { truncated, action_masks: vec![], ..see(runner, &places) };
            connection.game_over(runner, &seen)?;
        }
    }
}
