//! Spaces, observations and actions of a game.

use std::fmt;

/// The index that stands for the actor of a global action.
pub const GLOBAL: u32 = 0;

/// One type of entity.
#[derive(Clone, Debug, PartialEq)]
pub struct EntityType {
    pub name: String,
    /// Maximum number of entities of this type in one observation.
    pub capacity: u32,
    /// Names of its features; may be empty.
    pub features: Vec<String>,
}

/// The kind of an action type.
#[derive(Clone, Debug, PartialEq)]
pub enum ActionKind {
    /// Each actor chooses one of several labels.
    Categorical(Vec<String>),
    /// One choice of the whole game, without actors.
    Global(Vec<String>),
    /// Each actor chooses an entity, its actee.
    SelectEntity,
}

/// One action type.
#[derive(Clone, Debug, PartialEq)]
pub struct ActionType {
    pub name: String,
    /// Maximum number of actors in one observation.
    pub capacity: u32,
    pub kind: ActionKind,
}

/// The entity types, features and action types of a game's agents.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Space {
    pub entities: Vec<EntityType>,
    pub global_features: Vec<String>,
    pub actions: Vec<ActionType>,
}

impl Space {
    /// Adds an entity type.
    pub fn entity(mut self, name: &str, capacity: u32, features: &[&str]) -> Self {
        let (name, features) = (name.to_string(), texts(features));
        self.entities.push(EntityType { name, capacity, features });
        self
    }

    /// Adds features that belong to no single entity.
    pub fn globals(mut self, features: &[&str]) -> Self {
        self.global_features.extend(texts(features));
        self
    }

    /// Adds an action in which each actor chooses one of several labels.
    pub fn categorical(self, name: &str, capacity: u32, choices: &[&str]) -> Self {
        self.action(name, capacity, ActionKind::Categorical(texts(choices)))
    }

    /// Adds an action of the whole game, without actors.
    pub fn global(self, name: &str, choices: &[&str]) -> Self {
        self.action(name, 1, ActionKind::Global(texts(choices)))
    }

    /// Adds an action in which each actor chooses an entity.
    pub fn select_entity(self, name: &str, capacity: u32) -> Self {
        self.action(name, capacity, ActionKind::SelectEntity)
    }

    fn action(mut self, name: &str, capacity: u32, kind: ActionKind) -> Self {
        self.actions.push(ActionType { name: name.to_string(), capacity, kind });
        self
    }

    /// Checks that an observation fits this space.
    pub fn check(&self, observation: &Observation) -> Result<(), SpaceError> {
        let fail = |text: String| Err(SpaceError(text));
        if observation.features.len() != self.entities.len() {
            return fail(format!(
                "features: must have an entry for each of the {} entity types; got {}",
                self.entities.len(),
                observation.features.len()
            ));
        }
        if observation.global_features.len() != self.global_features.len() {
            return fail(format!(
                "global_features: must have {} values; got {}",
                self.global_features.len(),
                observation.global_features.len()
            ));
        }
        for (kind, rows) in self.entities.iter().zip(&observation.features) {
            if rows.len() > kind.capacity as usize {
                return fail(format!(
                    "entity type {:?}: must have at most {} entities, its capacity; got {}",
                    kind.name,
                    kind.capacity,
                    rows.len()
                ));
            }
            if let Some(row) = rows.iter().find(|row| row.len() != kind.features.len()) {
                return fail(format!(
                    "entity type {:?}: each entity must have {} features; got {}",
                    kind.name,
                    kind.features.len(),
                    row.len()
                ));
            }
        }
        if observation.visible.len() > self.entities.len() {
            return fail(format!(
                "visible: must have at most {} entries; got {}",
                self.entities.len(),
                observation.visible.len()
            ));
        }
        for (i, flags) in observation.visible.iter().enumerate() {
            let (wanted, kind) = (observation.features[i].len(), &self.entities[i]);
            if flags.as_ref().is_some_and(|flags| flags.len() != wanted) {
                return fail(format!(
                    "entity type {:?}: visible must have {wanted} flags, one for each entity",
                    kind.name
                ));
            }
        }
        let total = observation.num_entities();
        let mut seen = vec![false; self.actions.len()];
        for given in &observation.action_masks {
            let Some(action) = self.actions.get(given.action) else {
                return fail(format!(
                    "action_masks: action must be less than {}; got {}",
                    self.actions.len(),
                    given.action
                ));
            };
            if std::mem::replace(&mut seen[given.action], true) {
                return fail(format!("action {:?}: must have one mask; got two", action.name));
            }
            if given.actors.iter().chain(&given.actees).any(|i| *i as usize >= total) {
                return fail(format!(
                    "action {:?}: actors and actees must be less than {total}, the number of entities",
                    action.name
                ));
            }
            if given.actors.len() > action.capacity as usize {
                return fail(format!(
                    "action {:?}: must have at most {} actors, its capacity; got {}",
                    action.name,
                    action.capacity,
                    given.actors.len()
                ));
            }
            let wanted = given.rows(action) * given.width(action);
            if given.mask.as_ref().is_some_and(|mask| mask.len() != wanted) {
                return fail(format!(
                    "action {:?}: its mask must have {wanted} flags, one for each actor and choice",
                    action.name
                ));
            }
            let (rows, width) = (given.rows(action), given.width(action));
            let none = |row: &usize| !(0..width).any(|i| given.is_legal(action, *row, i));
            if let Some(row) = (0..rows).find(none) {
                return fail(format!(
                    "action {:?}: each actor must have a legal choice; actor {} has none. Make one \
                     legal, or leave the actor out",
                    action.name,
                    given.actors.get(row).copied().unwrap_or(GLOBAL)
                ));
            }
        }
        Ok(())
    }
}

fn texts(values: &[&str]) -> Vec<String> {
    values.iter().map(|value| value.to_string()).collect()
}

/// The actors of an action at this step, and their legal choices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ActionMask {
    /// The action type, by its position in the space.
    pub action: usize,
    /// Entities by index; empty for a global action.
    pub actors: Vec<u32>,
    /// Entities that can be chosen, by index; for a select-entity action.
    pub actees: Vec<u32>,
    /// True where legal, one row after the other, one for each actor; None: everything is legal.
    pub mask: Option<Vec<bool>>,
}

impl ActionMask {
    /// Lets actors take an action.
    pub fn new(action: usize, actors: Vec<u32>) -> Self {
        ActionMask { action, actors, ..ActionMask::default() }
    }

    /// Sets the entities that can be chosen.
    pub fn at(mut self, actees: Vec<u32>) -> Self {
        self.actees = actees;
        self
    }

    /// Sets the legal choices.
    pub fn legal(mut self, mask: Vec<bool>) -> Self {
        self.mask = Some(mask);
        self
    }

    pub(crate) fn rows(&self, action: &ActionType) -> usize {
        if matches!(action.kind, ActionKind::Global(_)) {
            1
        } else {
            self.actors.len()
        }
    }

    /// Whether a row of the mask, or every choice without one, allows a choice by its position.
    pub(crate) fn is_legal(&self, action: &ActionType, row: usize, column: usize) -> bool {
        let width = self.width(action);
        column < width && self.mask.as_ref().map_or(true, |mask| mask[row * width + column])
    }

    pub(crate) fn width(&self, action: &ActionType) -> usize {
        match &action.kind {
            ActionKind::Categorical(choices) | ActionKind::Global(choices) => choices.len(),
            ActionKind::SelectEntity => self.actees.len(),
        }
    }
}

/// What one agent observes. The index of an entity counts the entities of the observation, types
/// in the order of the space.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// What the agent has earned since its game began; rewards are the differences of scores.
    pub score: f64,
    /// By type, one row of features for each entity.
    pub features: Vec<Vec<Vec<f32>>>,
    pub global_features: Vec<f32>,
    /// By type, whether the policy sees each entity; if empty or None, it sees all of them.
    pub visible: Vec<Option<Vec<bool>>>,
    /// The action types that have actors at this step.
    pub action_masks: Vec<ActionMask>,
    /// Numbers to log.
    pub metrics: Vec<(String, f64)>,
    /// In the last observation of a game: whether only a step limit ended it.
    pub truncated: bool,
}

impl Observation {
    /// Returns the number of entities.
    pub fn num_entities(&self) -> usize {
        self.features.iter().map(Vec::len).sum()
    }
}

/// What the actors of one action chose.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Action {
    /// Entities by index; [`GLOBAL`] for a global action.
    pub actors: Vec<u32>,
    /// For each actor the position of its choice, or the index of its actee.
    pub choices: Vec<u32>,
}

/// The error for an observation that does not fit its space.
#[derive(Clone, Debug, PartialEq)]
pub struct SpaceError(pub String);

impl fmt::Display for SpaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SpaceError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Observation)) -> String {
        let space = Space::default()
            .entity("A", 3, &["x"])
            .categorical("go", 2, &["l", "r"])
            .select_entity("at", 2);
        let mut observation = Observation {
            features: vec![vec![vec![0.0]; 2]],
            visible: vec![Some(vec![true, false])],
            action_masks: vec![
                ActionMask::new(0, vec![0, 1]),
                ActionMask::new(1, vec![0]).at(vec![1]),
            ],
            ..Observation::default()
        };
        space.check(&observation).unwrap();
        change(&mut observation);
        space.check(&observation).unwrap_err().0
    }

    #[test]
    fn an_actor_without_a_legal_choice_is_refused() {
        let nothing = refused(|o| o.action_masks[0].mask = Some(vec![true, false, false, false]));
        assert!(nothing.contains("actor 1 has none"), "{nothing}");
        assert!(refused(|o| o.action_masks[1].actees.clear()).contains("actor 0 has none"));
    }

    #[test]
    fn wrong_lengths_are_refused() {
        assert!(refused(|o| o.visible = vec![Some(vec![true])]).contains("2 flags"));
        assert!(refused(|o| o.visible = vec![None, None]).contains("at most 1 entries"));
        assert!(refused(|o| o.action_masks[0].mask = Some(vec![true])).contains("4 flags"));
        assert!(refused(|o| o.action_masks[0].actors = vec![0, 9]).contains("less than 2"));
        assert!(refused(|o| o.action_masks[1].action = 0).contains("one mask; got two"));
        assert!(refused(|o| o.action_masks[1].action = 7).contains("less than 2; got 7"));
        assert!(refused(|o| o.features = vec![vec![vec![0.0, 1.0]]]).contains("1 features"));
    }
}
