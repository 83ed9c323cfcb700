//! Agents that a game asks for actions.

use crate::rng::Rng;
use crate::space::{Action, ActionKind, Observation, Space, GLOBAL};

/// One player, in one game after the other.
pub trait Agent {
    /// Returns an [`Action`] for each action type of the space, in its order; None means that the
    /// game must end its loop.
    fn act(&mut self, observation: &Observation) -> Option<Vec<Action>>;

    /// Receives the last observation of a game; the next observation begins another game.
    fn game_over(&mut self, observation: &Observation) {
        let _ = observation;
    }
}

/// Chooses uniformly among the legal choices. An actor without a legal choice does nothing; a trainer
/// refuses such an observation.
pub struct RandomAgent {
    space: Space,
    rng: Rng,
}

impl RandomAgent {
    pub fn new(space: Space, seed: u64) -> Self {
        RandomAgent { space, rng: Rng::new(seed) }
    }
}

impl Agent for RandomAgent {
    fn act(&mut self, observation: &Observation) -> Option<Vec<Action>> {
        let mut actions = vec![Action::default(); self.space.actions.len()];
        for given in &observation.action_masks {
            let kind = self.space.actions[given.action].clone();
            let width = given.width(&kind);
            for row in 0..given.rows(&kind) {
                let legal: Vec<usize> =
                    (0..width).filter(|i| given.is_legal(&kind, row, *i)).collect();
                if legal.is_empty() {
                    continue;
                }
                let mut choice = legal[self.rng.below(legal.len())] as u32;
                if kind.kind == ActionKind::SelectEntity {
                    choice = given.actees[choice as usize];
                }
                let actor = given.actors.get(row).copied().unwrap_or(GLOBAL);
                actions[given.action].actors.push(actor);
                actions[given.action].choices.push(choice);
            }
        }
        Some(actions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::ActionMask;

    #[test]
    fn random_choices_are_legal_and_reach_every_legal_one() {
        let space = Space::default()
            .entity("A", 3, &[])
            .categorical("pick", 3, &["x", "y", "z"])
            .select_entity("point", 3)
            .global("say", &["p", "q"]);
        let observation = Observation {
            features: vec![vec![vec![]; 3]],
            action_masks: vec![
                ActionMask::new(0, vec![0, 2]).legal(vec![true, false, true, false, true, false]),
                ActionMask::new(1, vec![1]).at(vec![0, 2]),
                ActionMask::new(2, vec![]).legal(vec![false, true]),
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

    #[test]
    fn nothing_legal_is_no_action() {
        let space = Space::default()
            .entity("A", 3, &[])
            .categorical("pick", 3, &["x", "y"])
            .select_entity("point", 3);
        let observation = Observation {
            features: vec![vec![vec![]; 2]],
            action_masks: vec![
                ActionMask::new(0, vec![0, 1]).legal(vec![false, false, false, true]),
                ActionMask::new(1, vec![0]),
            ],
            ..Observation::default()
        };
        let actions = RandomAgent::new(space, 7).act(&observation).unwrap();
        assert_eq!(actions[0], Action { actors: vec![1], choices: vec![1] });
        assert_eq!(actions[1], Action::default());
    }
}
