//! A client for games that rlstack trains on, over version 1 of its game protocol
//! (docs/game_protocol.md). A game owns its loop: it shows an [`Agent`] an [`Observation`] and plays
//! the actions that come back. Without a trainer, use a [`RandomAgent`].

mod agent;
mod remote;
mod space;
mod wire;

pub use agent::{Agent, RandomAgent};
pub use remote::{Connection, RemoteAgent};
pub use space::{
    Action, ActionKind, ActionMask, ActionType, EntityType, Observation, Space, SpaceError, GLOBAL,
};
pub use wire::VERSION;
