//! The interface of a game that is stepped from outside, and its typed observations and actions.

use crate::agent::Agent;
use crate::space::{
    Action, ActionKind, ActionMask, ActionType, EntityType, Observation, Space, SpaceError,
};
use crate::typed::{Choices, Entity};

/// One game, stepped from outside. [`serve`](crate::serve) runs many of them for a trainer.
pub trait Environment: Send {
    /// The entity types and features that observations contain; never changes.
    fn obs_space(&self) -> ObsSpace;

    /// The action types that `act` takes; never changes.
    fn action_space(&self) -> ActionSpace;

    /// Begins an episode. If its first observation is already over, `reset` is called again.
    fn reset(&mut self) -> Obs;

    /// Plays one step.
    fn act(&mut self, actions: &Actions) -> Obs;
}

/// Returns the entity types, features and action types of an environment.
pub fn space_of(environment: &dyn Environment) -> Space {
    let (obs, actions) = (environment.obs_space(), environment.action_space());
    Space { entities: obs.entities, global_features: obs.globals, actions: actions.0 }
}

/// The entity types and global features of an environment.
#[derive(Clone, Debug, Default)]
pub struct ObsSpace {
    entities: Vec<EntityType>,
    globals: Vec<String>,
}

impl ObsSpace {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entity type with a maximum number of entities.
    pub fn entity<T: Entity>(mut self, capacity: u32) -> Self {
        let mut features = vec![];
        T::feature_names("", &mut features);
        self.entities.push(EntityType { name: T::NAME.to_string(), capacity, features });
        self
    }

    /// Adds features that belong to no single entity.
    pub fn globals<T: Entity>(mut self) -> Self {
        T::feature_names("", &mut self.globals);
        self
    }
}

/// The action types of an environment.
#[derive(Clone, Debug, Default)]
pub struct ActionSpace(Vec<ActionType>);

impl ActionSpace {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an action of up to `capacity` actors, each of which chooses a variant.
    pub fn categorical<T: Choices>(self, capacity: u32) -> Self {
        self.add(T::NAME, capacity, ActionKind::Categorical(labels::<T>()))
    }

    /// Adds an action of the whole game, without actors.
    pub fn global<T: Choices>(self) -> Self {
        self.add(T::NAME, 1, ActionKind::Global(labels::<T>()))
    }

    /// Adds an action of up to `capacity` actors, each of which chooses an entity.
    pub fn select_entity(self, name: &str, capacity: u32) -> Self {
        self.add(name, capacity, ActionKind::SelectEntity)
    }

    fn add(mut self, name: &str, capacity: u32, kind: ActionKind) -> Self {
        self.0.push(ActionType { name: name.to_string(), capacity, kind });
        self
    }
}

fn labels<T: Choices>() -> Vec<String> {
    T::LABELS.iter().map(|label| label.to_string()).collect()
}

/// An entity of an observation: its type and its row among the entities of this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub kind: &'static str,
    pub row: usize,
}

impl Place {
    pub fn of<T: Entity>(row: usize) -> Self {
        Place { kind: T::NAME, row }
    }
}

/// A set of entities of an observation.
#[derive(Clone, Debug)]
pub enum Group {
    /// All entities of a type, by name.
    All(&'static str),
    /// These entities.
    Some(Vec<Place>),
}

impl Group {
    /// All entities of a type.
    pub fn all<T: Entity>() -> Self {
        Group::All(T::NAME)
    }
}

/// The actors of an action at this step.
#[derive(Clone, Debug)]
pub(crate) struct Acting {
    pub action: &'static str,
    pub actors: Option<Group>, // None: a global action
    pub actees: Option<Group>, // of a select-entity action
    pub legal: Option<Vec<bool>>,
}

/// How an episode stands after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It goes on.
    No,
    /// It has ended.
    Done,
    /// Only a step limit ended it.
    Truncated,
}

#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub kind: &'static str,
    pub count: usize,
    pub features: Vec<f32>, // one row after the other
    pub visible: Option<Vec<bool>>,
}

/// What one environment shows at one step.
#[derive(Clone, Debug)]
pub struct Obs {
    /// Reward of the previous actions.
    pub reward: f64,
    pub end: End,
    pub(crate) rows: Vec<Rows>,
    pub(crate) globals: Vec<f32>,
    pub(crate) acting: Vec<Acting>,
    pub(crate) metrics: Vec<(String, f64)>,
}

impl Obs {
    /// Returns an observation without entities or actors.
    pub fn new(reward: f64) -> Self {
        Obs { reward, end: End::No, rows: vec![], globals: vec![], acting: vec![], metrics: vec![] }
    }

    /// Adds the entities of a type. A type that is not added has none.
    pub fn entities<T: Entity>(mut self, entities: impl IntoIterator<Item = T>) -> Self {
        let entities = entities.into_iter();
        let (mut features, mut count) = (vec![], 0);
        for entity in entities {
            entity.features(&mut features);
            count += 1;
        }
        self.rows.push(Rows { kind: T::NAME, count, features, visible: None });
        self
    }

    /// Says which of the entities that were added last the policy sees; without this, all.
    pub fn visible(mut self, flags: Vec<bool>) -> Self {
        if let Some(rows) = self.rows.last_mut() {
            rows.visible = Some(flags);
        }
        self
    }

    /// Adds global features.
    pub fn globals<T: Entity>(mut self, values: &T) -> Self {
        values.features(&mut self.globals);
        self
    }

    /// Lets entities take an action, with every choice legal.
    pub fn actors<T: Choices>(self, actors: Group) -> Self {
        self.add(T::NAME, Some(actors), None)
    }

    /// Lets the whole game take an action.
    pub fn global_action<T: Choices>(self) -> Self {
        self.add(T::NAME, None, None)
    }

    /// Lets actors choose among entities.
    pub fn select_entity(self, action: &'static str, actors: Group, actees: Group) -> Self {
        self.add(action, Some(actors), Some(actees))
    }

    fn add(mut self, action: &'static str, actors: Option<Group>, actees: Option<Group>) -> Self {
        self.acting.push(Acting { action, actors, actees, legal: None });
        self
    }

    /// Sets the legal choices of the action that was added last: for each actor, one flag for each
    /// choice (or actee).
    pub fn legal(mut self, mask: Vec<bool>) -> Self {
        if let Some(acting) = self.acting.last_mut() {
            acting.legal = Some(mask);
        }
        self
    }

    /// Ends the episode if `over` is true, also where a step limit is reached in the same step.
    pub fn done(mut self, over: bool) -> Self {
        self.end = if over { End::Done } else { self.end };
        self
    }

    /// Ends the episode by a step limit if `over` is true and the game has not ended by itself.
    ///
    /// The order of `done` and `truncated` makes no difference: an end of the game counts as such.
    pub fn truncated(mut self, over: bool) -> Self {
        self.end = if over && self.end == End::No { End::Truncated } else { self.end };
        self
    }

    /// Adds a number to log; trainers log those of the last step of an episode.
    pub fn metric(mut self, name: &str, value: f64) -> Self {
        self.metrics.push((name.to_string(), value));
        self
    }
}

/// What the actors of one action chose.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chosen {
    pub actors: Vec<Place>,
    pub choices: Vec<usize>, // positions of choices
    pub actees: Vec<Place>,  // of a select-entity action
}

/// The actions of one step, by action type.
#[derive(Clone, Debug, Default)]
pub struct Actions {
    pub(crate) names: std::sync::Arc<Vec<String>>,
    pub(crate) chosen: Vec<Chosen>, // in the order of the space
}

impl Actions {
    /// Returns the choice of each actor, in the order in which the observation named them; of a
    /// global action one choice. Empty if the action had no actors.
    pub fn of<T: Choices>(&self) -> impl Iterator<Item = T> + '_ {
        self.find(T::NAME).into_iter().flat_map(|chosen| chosen.choices.iter().map(|i| T::ALL[*i]))
    }

    /// Returns the actors of an action.
    pub fn actors(&self, action: &str) -> &[Place] {
        self.find(action).map_or(&[], |chosen| &chosen.actors)
    }

    /// Returns the entity that each actor of a select-entity action chose.
    pub fn actees(&self, action: &str) -> &[Place] {
        self.find(action).map_or(&[], |chosen| &chosen.actees)
    }

    fn find(&self, name: &str) -> Option<&Chosen> {
        self.names.iter().position(|other| other == name).map(|i| &self.chosen[i])
    }
}

/// Plays one episode of an environment with an agent, such as a [`RemoteAgent`](crate::RemoteAgent)
/// or a [`RandomAgent`](crate::RandomAgent). Returns the episode's return; None if the agent ended
/// the loop.
pub fn play(
    environment: &mut dyn Environment,
    agent: &mut dyn Agent,
) -> Result<Option<f64>, SpaceError> {
    let space = space_of(environment);
    let names = std::sync::Arc::new(space.actions.iter().map(|kind| kind.name.clone()).collect());
    let mut score = 0.0;
    let mut obs = begin(environment)?;
    loop {
        score += obs.reward;
        let (shown, places) = as_observation(&space, &obs, score)?;
        space.check(&shown)?;
        if obs.end != End::No {
            agent.game_over(&shown);
            return Ok(Some(score));
        }
        let Some(answer) = agent.act(&shown) else { return Ok(None) };
        let chosen = answer.iter().zip(&space.actions).map(|(action, kind)| {
            let place = |index: &u32| places.get(*index as usize).copied();
            let selects = kind.kind == ActionKind::SelectEntity;
            let Action { actors, choices } = action;
            Chosen {
                actors: match kind.kind {
                    ActionKind::Global(_) => vec![],
                    _ => actors.iter().filter_map(place).collect(),
                },
                choices: if selects {
                    vec![]
                } else {
                    choices.iter().map(|i| *i as usize).collect()
                },
                actees: if selects { choices.iter().filter_map(place).collect() } else { vec![] },
            }
        });
        obs = environment
            .act(&Actions { names: std::sync::Arc::clone(&names), chosen: chosen.collect() });
    }
}

const MAX_RESETS: usize = 100; // consecutive episodes that may be over at their first observation

/// Begins an episode; skips those that are over at their first observation.
pub(crate) fn begin(environment: &mut dyn Environment) -> Result<Obs, SpaceError> {
    for _ in 0..MAX_RESETS {
        let mut obs = environment.reset();
        if obs.end == End::No {
            obs.reward = 0.0;
            return Ok(obs);
        }
    }
    Err(SpaceError(format!(
        "reset: must begin an episode that is not over; got {MAX_RESETS} in a row that were"
    )))
}

/// Returns an observation for agents, and the place of each entity by index.
fn as_observation(
    space: &Space,
    obs: &Obs,
    score: f64,
) -> Result<(Observation, Vec<Place>), SpaceError> {
    let mut shown = Observation {
        score,
        global_features: obs.globals.clone(),
        metrics: obs.metrics.clone(),
        truncated: obs.end == End::Truncated,
        ..Observation::default()
    };
    if let Some(rows) =
        obs.rows.iter().find(|rows| !space.entities.iter().any(|k| k.name == rows.kind))
    {
        return Err(SpaceError(format!("entity type {:?}: must be in the obs_space", rows.kind)));
    }
    let mut places = vec![];
    for kind in &space.entities {
        let found = obs.rows.iter().find(|rows| rows.kind == kind.name);
        let width = kind.features.len();
        shown.visible.push(found.and_then(|rows| rows.visible.clone()));
        shown.features.push(found.map_or(vec![], |rows| {
            (0..rows.count).map(|i| rows.features[i * width..(i + 1) * width].to_vec()).collect()
        }));
        if let Some(rows) = found {
            places.extend((0..rows.count).map(|row| Place { kind: rows.kind, row }));
        }
    }
    let indices = |group: &Option<Group>| -> Result<Vec<u32>, SpaceError> {
        let index = |place: &Place| {
            let found = places.iter().position(|other| other == place);
            found.map(|i| i as u32).ok_or_else(|| no_such_entity(place))
        };
        match group {
            None => Ok(vec![]),
            Some(Group::All(kind)) => Ok((0..places.len())
                .filter(|i| places[*i].kind == *kind)
                .map(|i| i as u32)
                .collect()),
            Some(Group::Some(group)) => group.iter().map(index).collect(),
        }
    };
    for acting in &obs.acting {
        let number = action_number(space, acting.action)?;
        let mut mask =
            ActionMask::new(number, indices(&acting.actors)?).at(indices(&acting.actees)?);
        mask.mask = acting.legal.clone();
        if acting.actors.is_none() || !mask.actors.is_empty() {
            shown.action_masks.push(mask);
        }
    }
    Ok((shown, places))
}

pub(crate) fn action_number(space: &Space, name: &str) -> Result<usize, SpaceError> {
    let found = space.actions.iter().position(|kind| kind.name == name);
    found.ok_or_else(|| SpaceError(format!("action {name:?}: must be in the action_space")))
}

pub(crate) fn no_such_entity(place: &Place) -> SpaceError {
    SpaceError(format!(
        "actors and actees must be entities of the observation; it has no {} {}",
        place.kind, place.row
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_of_the_game_wins_over_its_limit() {
        let end = |fell: bool, late: bool| {
            let one = Obs::new(0.0).done(fell).truncated(late).end;
            assert_eq!(
                one,
                Obs::new(0.0).truncated(late).done(fell).end,
                "the order must not matter"
            );
            one
        };
        assert_eq!(end(false, false), End::No);
        assert_eq!(end(true, false), End::Done);
        assert_eq!(end(false, true), End::Truncated);
        assert_eq!(end(true, true), End::Done);
    }
}
