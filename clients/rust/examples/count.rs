//! Count: say how many beans there are. A game is one step; the score is 1 for the right number.
//!
//! `cargo run --example count -- random` plays 1000 games with a random agent and prints the mean
//! score. Without the argument it is a command for rlstack's SocketGame.

use rlstack_game::{ActionMask, Agent, Observation, RandomAgent, RemoteAgent, Space};

const MOST: usize = 4;

fn space() -> Space {
    Space::default().entity("Player", 1, &[]).entity("Bean", MOST as u32 - 1, &[]).categorical(
        "count",
        1,
        &["0", "1", "2", "3"],
    )
}

/// Plays `games` games, or until the agent ends the loop; returns the mean score.
fn play(agent: &mut dyn Agent, seed: u64, games: usize) -> f64 {
    let (mut state, mut sum) = (seed | 1, 0.0);
    for game in 0..games {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let beans = (state >> 33) as usize % MOST;
        let mut observation = Observation {
            features: vec![vec![vec![]], vec![vec![]; beans]],
            action_masks: vec![ActionMask::new(0, vec![0])],
            ..Observation::default()
        };
        let Some(actions) = agent.act(&observation) else { return sum / game.max(1) as f64 };
        observation.score = (actions[0].choices[0] as usize == beans) as u32 as f64;
        observation.action_masks.clear();
        sum += observation.score;
        agent.game_over(&observation);
    }
    sum / games as f64
}

fn main() -> std::io::Result<()> {
    if std::env::args().nth(1).as_deref() == Some("random") {
        println!("{:.3}", play(&mut RandomAgent::new(space(), 1), 1, 1000));
        return Ok(());
    }
    let mut agent = RemoteAgent::from_env(space(), "count")?;
    let seed = agent.seed();
    play(&mut agent, seed, usize::MAX);
    Ok(())
}
