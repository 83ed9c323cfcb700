//! Games that ask rlstack's agents for actions, over version 1 of its game protocol
//! (docs/game_protocol.md). A game owns its loop: it shows an [`Agent`] what it sees and plays the
//! actions that come back. Without a trainer a [`RandomAgent`] will do.

mod agent;
mod remote;
mod space;
mod wire;

pub use agent::{Agent, RandomAgent};
pub use remote::{RemoteAgent, Team};
pub use space::{
    Action, ActionKind, ActionType, EntityType, Observation, Offer, Space, SpaceError, GLOBAL,
};
pub use wire::VERSION;
