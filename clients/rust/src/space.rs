//! What a game shows and takes.

use std::fmt;

/// The index by which an action of the whole game names its actor.
pub const GLOBAL: u32 = 0;

/// One type of entity.
#[derive(Clone, Debug, PartialEq)]
pub struct EntityType {
    pub name: String,
    /// The most entities of this type in one observation.
    pub capacity: u32,
    /// Names of its features; may be none.
    pub features: Vec<String>,
}

/// How an action is decided.
#[derive(Clone, Debug, PartialEq)]
pub enum ActionKind {
    /// Each actor makes one of the same choices.
    Categorical(Vec<String>),
    /// The game itself makes one choice; it has no actors.
    Global(Vec<String>),
    /// Each actor points at an entity.
    SelectEntity,
}

/// One type of action.
#[derive(Clone, Debug, PartialEq)]
pub struct ActionType {
    pub name: String,
    /// The most actors in one observation.
    pub capacity: u32,
    pub kind: ActionKind,
}

/// Everything that agents of a game see and do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Space {
    pub entities: Vec<EntityType>,
    pub global_features: Vec<String>,
    pub actions: Vec<ActionType>,
}

impl Space {
    /// Adds a type of entity.
    pub fn entity(mut self, name: &str, capacity: u32, features: &[&str]) -> Self {
        let (name, features) = (name.to_string(), texts(features));
        self.entities.push(EntityType { name, capacity, features });
        self
    }

    /// Adds features that belong to no entity.
    pub fn globals(mut self, features: &[&str]) -> Self {
        self.global_features.extend(texts(features));
        self
    }

    /// Adds an action that each actor makes one of some choices of.
    pub fn categorical(self, name: &str, capacity: u32, choices: &[&str]) -> Self {
        self.action(name, capacity, ActionKind::Categorical(texts(choices)))
    }

    /// Adds an action of the whole game.
    pub fn global(self, name: &str, choices: &[&str]) -> Self {
        self.action(name, 1, ActionKind::Global(texts(choices)))
    }

    /// Adds an action that points at an entity.
    pub fn select_entity(self, name: &str, capacity: u32) -> Self {
        self.action(name, capacity, ActionKind::SelectEntity)
    }

    fn action(mut self, name: &str, capacity: u32, kind: ActionKind) -> Self {
        self.actions.push(ActionType { name: name.to_string(), capacity, kind });
        self
    }

    /// Checks that an observation is one of this space.
    pub fn check(&self, observation: &Observation) -> Result<(), SpaceError> {
        let fail = |text: String| Err(SpaceError(text));
        if observation.features.len() != self.entities.len() {
            return fail(format!("features must be given for {} types", self.entities.len()));
        }
        if observation.global_features.len() != self.global_features.len() {
            return fail(format!("there must be {} global features", self.global_features.len()));
        }
        for (kind, rows) in self.entities.iter().zip(&observation.features) {
            if rows.len() > kind.capacity as usize {
                return fail(format!("{} has a capacity of {}", kind.name, kind.capacity));
            }
            if rows.iter().any(|row| row.len() != kind.features.len()) {
                return fail(format!("{} has {} features", kind.name, kind.features.len()));
            }
        }
        let total = observation.num_entities();
        for offer in &observation.offers {
            let Some(action) = self.actions.get(offer.action) else {
                return fail(format!("there is no action {}", offer.action));
            };
            if offer.actors.iter().chain(&offer.actees).any(|i| *i as usize >= total) {
                return fail(format!("{}: there are {} entities", action.name, total));
            }
            if offer.actors.len() > action.capacity as usize {
                return fail(format!("{} has a capacity of {}", action.name, action.capacity));
            }
            let wanted = offer.rows(action) * offer.width(action);
            if offer.mask.as_ref().is_some_and(|mask| mask.len() != wanted) {
                return fail(format!("{}: its mask must have {} flags", action.name, wanted));
            }
        }
        Ok(())
    }
}

fn texts(values: &[&str]) -> Vec<String> {
    values.iter().map(|value| value.to_string()).collect()
}

/// Who may take an action, and what is legal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offer {
    /// Which action, by its place in the space.
    pub action: usize,
    /// Entities by index; none for a global action.
    pub actors: Vec<u32>,
    /// Whom to point at, by index; for a select-entity action.
    pub actees: Vec<u32>,
    /// Row by row, one row for each actor; None: all is legal.
    pub mask: Option<Vec<bool>>,
}

impl Offer {
    /// Offers an action to actors.
    pub fn new(action: usize, actors: Vec<u32>) -> Self {
        Offer { action, actors, ..Offer::default() }
    }

    /// Sets whom to point at.
    pub fn at(mut self, actees: Vec<u32>) -> Self {
        self.actees = actees;
        self
    }

    /// Sets what is legal.
    pub fn legal(mut self, mask: Vec<bool>) -> Self {
        self.mask = Some(mask);
        self
    }

    pub(crate) fn rows(&self, action: &ActionType) -> usize {
        if matches!(action.kind, ActionKind::Global(_)) { 1 } else { self.actors.len() }
    }

    pub(crate) fn width(&self, action: &ActionType) -> usize {
        match &action.kind {
            ActionKind::Categorical(choices) | ActionKind::Global(choices) => choices.len(),
            ActionKind::SelectEntity => self.actees.len(),
        }
    }
}

/// What one agent sees. An entity's index counts those there are, types in the space's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// What the agent has earned since its game began; rewards are its differences.
    pub score: f64,
    /// By type, a row of features for each entity.
    pub features: Vec<Vec<Vec<f32>>>,
    pub global_features: Vec<f32>,
    /// By type, whether the policy sees each entity; left empty, it sees all.
    pub visible: Vec<Option<Vec<bool>>>,
    /// Who may act.
    pub offers: Vec<Offer>,
    /// Numbers to log.
    pub metrics: Vec<(String, f64)>,
    /// At a game's end: whether a limit of steps alone ended it.
    pub truncated: bool,
}

impl Observation {
    /// How many entities there are.
    pub fn num_entities(&self) -> usize {
        self.features.iter().map(Vec::len).sum()
    }
}

/// What the actors of one action chose.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Action {
    /// Entities by index; [`GLOBAL`] for a global action.
    pub actors: Vec<u32>,
    /// For each actor its choice, or whom it points at, by index.
    pub choices: Vec<u32>,
}

/// An observation that is none of its space.
#[derive(Clone, Debug, PartialEq)]
pub struct SpaceError(pub String);

impl fmt::Display for SpaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SpaceError {}
