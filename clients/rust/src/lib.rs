//! Games in Rust that rlstack trains on, over version 1 of its game protocol
//! (docs/game_protocol.md).
//!
//! There are two ways to write one. An [`Environment`] is stepped from outside: [`serve`] runs many
//! of them in one process. A game that owns its loop shows an [`Agent`] an [`Observation`] and plays
//! the actions that come back; without a trainer, use a [`RandomAgent`].

// `Option::is_none_or`, which Clippy prefers, needs Rust 1.82.
#![allow(clippy::unnecessary_map_or)]

mod agent;
mod environment;
pub mod games;
mod options;
mod padded;
mod remote;
mod rng;
mod serve;
mod space;
mod typed;
mod vec_env;
mod wire;

pub use agent::{Agent, RandomAgent};
pub use environment::{
    play, space_of, ActionSpace, Actions, End, Environment, Group, Obs, ObsSpace, Place,
};
pub use options::Options;
pub use remote::{Connection, RemoteAgent};
pub use rng::Rng;
pub use serve::serve;
pub use space::{
    Action, ActionKind, ActionMask, ActionType, EntityType, Observation, Space, SpaceError, GLOBAL,
};
pub use typed::{Choices, Entity, Feature};
pub use vec_env::{Metrics, VecEnv};
pub use wire::VERSION;
