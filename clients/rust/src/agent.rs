//! Whom a game asks.

use crate::space::{Action, ActionKind, Observation, Space, GLOBAL};

/// One player, in one game after the other.
pub trait Agent {
    /// Returns an [`Action`] for each action of the space, in its order; None means that the game
    /// must end its loop.
    fn act(&mut self, observation: &Observation) -> Option<Vec<Action>>;

    /// Takes note of the last observation; the next one begins another game.
    fn game_over(&mut self, observation: &Observation) {
        let _ = observation;
    }
}

/// Chooses uniformly among what is legal.
pub struct RandomAgent {
    space: Space,
    state: u64,
}

impl RandomAgent {
    pub fn new(space: Space, seed: u64) -> Self {
        RandomAgent { space, state: seed }
    }

    /// Returns a number below `bound`, by SplitMix64.
    fn below(&mut self, bound: usize) -> usize {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (((z ^ (z >> 31)) as u128 * bound as u128) >> 64) as usize
    }
}

impl Agent for RandomAgent {
    fn act(&mut self, observation: &Observation) -> Option<Vec<Action>> {
        let mut actions = vec![Action::default(); self.space.actions.len()];
        for offer in &observation.offers {
            let kind = self.space.actions[offer.action].clone();
            let width = offer.width(&kind);
            for row in 0..offer.rows(&kind) {
                let is_legal =
                    |i: &usize| offer.mask.as_ref().map_or(true, |mask| mask[row * width + i]);
                let legal: Vec<usize> = (0..width).filter(is_legal).collect();
                let mut choice = legal[self.below(legal.len())] as u32;
                if kind.kind == ActionKind::SelectEntity {
                    choice = offer.actees[choice as usize];
                }
                let actor = offer.actors.get(row).copied().unwrap_or(GLOBAL);
                actions[offer.action].actors.push(actor);
                actions[offer.action].choices.push(choice);
            }
        }
        Some(actions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Offer;

    #[test]
    fn random_choices_are_legal_and_reach_all_that_is() {
        let space = Space::default()
            .entity("A", 3, &[])
            .categorical("pick", 3, &["x", "y", "z"])
            .select_entity("point", 3)
            .global("say", &["p", "q"]);
        let observation = Observation {
            features: vec![vec![vec![]; 3]],
            offers: vec![
                Offer::new(0, vec![0, 2]).legal(vec![true, false, true, false, true, false]),
                Offer::new(1, vec![1]).at(vec![0, 2]),
                Offer::new(2, vec![]).legal(vec![false, true]),
            ],
            ..Observation::default()
        };
        space.check(&observation).unwrap();
        let mut agent = RandomAgent::new(space, 7);
        let mut counts = [0; 4];
        for _ in 0..200 {
            let actions = agent.act(&observation).unwrap();
            assert_eq!(actions[0].actors, [0, 2]);
            assert_eq!(actions[0].choices[1], 1);
            assert_eq!(actions[2], Action { actors: vec![GLOBAL], choices: vec![1] });
            counts[actions[0].choices[0] as usize / 2] += 1;
            counts[2 + actions[1].choices[0] as usize / 2] += 1;
            assert_ne!(actions[0].choices[0], 1);
            assert_ne!(actions[1].choices[0], 1);
        }
        assert!(counts.iter().all(|count| (60..140).contains(count)), "{counts:?}");
    }
}
