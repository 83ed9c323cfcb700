//! Games that rlstack has in Python too (`rlstack.entity.games`), with the same spaces and rules.

mod count;
mod multi_snake;

pub use count::{Count, CountConfig};
pub use multi_snake::{MultiSnake, MultiSnakeConfig};
