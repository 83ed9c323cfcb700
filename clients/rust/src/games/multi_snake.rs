//! MultiSnake: each snake eats the food of its own colour and grows.

use std::collections::VecDeque;

use crate::environment::{ActionSpace, Actions, Environment, Group, Obs, ObsSpace};
use crate::options::Options;
use crate::rng::Rng;

crate::entity! { pub struct SnakeHead { x: i32, y: i32, colour: usize } }
crate::entity! { pub struct SnakeBody { x: i32, y: i32, colour: usize } }
crate::entity! { pub struct Food { x: i32, y: i32, colour: usize } }
crate::entity! { pub struct Clock { step: u32 } }
crate::choices! {
    pub enum Move: "move" { Up = "up", Down = "down", Left = "left", Right = "right" }
}

type Cell = (i32, i32);

/// The options of [`MultiSnake`].
#[derive(Clone, Debug)]
pub struct MultiSnakeConfig {
    pub board_size: usize,
    pub num_snakes: usize,
    pub max_snake_length: usize,
    pub num_steps: u32,
}

impl MultiSnakeConfig {
    /// Takes the options; the defaults are a board of 10 with one snake of up to 11 cells.
    pub fn from_options(options: &mut Options) -> Result<Self, String> {
        let config = MultiSnakeConfig {
            board_size: options.take("board_size", 10)?,
            num_snakes: options.take("num_snakes", 1)?,
            max_snake_length: options.take("max_snake_length", 11)?,
            num_steps: options.take("num_steps", 180)?,
        };
        let MultiSnakeConfig { board_size, num_snakes, max_snake_length, num_steps } = config;
        if !(2..=1000).contains(&board_size)
            || num_snakes < 1
            || max_snake_length < 2
            || num_steps < 1
        {
            return Err(format!(
                "board_size must be 2 to 1000, num_snakes and num_steps at least 1, and \
                 max_snake_length at least 2; got {config:?}"
            ));
        }
        if num_snakes.saturating_mul(max_snake_length + 1) > board_size * board_size {
            return Err(format!(
                "board_size must leave room for {num_snakes} snakes of {max_snake_length} cells and \
                 their food; got {board_size}"
            ));
        }
        Ok(config)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Content {
    Free,
    Body,
    Food(usize), // by colour
}

/// Snakes and as many Foods on a square board, one of each colour. The rules are those of
/// `rlstack.entity.games.multi_snake.MultiSnake` with one player.
pub struct MultiSnake {
    config: MultiSnakeConfig,
    rng: Rng,
    board: Vec<Content>,
    snakes: Vec<VecDeque<Cell>>, // heads last
    food: Vec<Cell>,
    step: u32,
}

impl MultiSnake {
    pub fn new(config: MultiSnakeConfig, seed: u64) -> Self {
        let board = vec![Content::Free; config.board_size * config.board_size];
        let rng = Rng::new(seed);
        MultiSnake { config, rng, board, snakes: vec![], food: vec![], step: 0 }
    }

    /// Returns where a cell is on the board; None outside.
    fn at(&self, (x, y): Cell) -> Option<usize> {
        let size = self.config.board_size as i32;
        ((0..size).contains(&x) && (0..size).contains(&y)).then_some((y * size + x) as usize)
    }

    /// Puts something on a random free cell and returns the cell.
    fn place(&mut self, content: Content) -> Cell {
        loop {
            let drawn = self.rng.below(self.board.len());
            if self.board[drawn] == Content::Free {
                self.board[drawn] = content;
                let size = self.config.board_size;
                return ((drawn % size) as i32, (drawn / size) as i32);
            }
        }
    }

    fn observe(&self, reward: f64, over: bool) -> Obs {
        let cells = |colour: usize| self.snakes[colour].iter().map(move |cell| (*cell, colour));
        let colours = 0..self.snakes.len();
        let heads = colours.clone().filter_map(|colour| cells(colour).next_back());
        let bodies = colours.flat_map(|colour| cells(colour).take(self.snakes[colour].len() - 1));
        let food = self.food.iter().enumerate();
        let full = self.snakes.iter().all(|snake| snake.len() >= self.config.max_snake_length);
        Obs::new(reward)
            .entities(heads.map(|((x, y), colour)| SnakeHead { x, y, colour }))
            .entities(bodies.map(|((x, y), colour)| SnakeBody { x, y, colour }))
            .entities(food.map(|(colour, (x, y))| Food { x: *x, y: *y, colour }))
            .globals(&Clock { step: self.step })
            .actors::<Move>(Group::all::<SnakeHead>())
            .done(over || full || self.step >= self.config.num_steps)
    }
}

impl Environment for MultiSnake {
    fn obs_space(&self) -> ObsSpace {
        let snakes = self.config.num_snakes as u32;
        let body = self.config.max_snake_length as u32 - 1;
        ObsSpace::new()
            .entity::<SnakeHead>(snakes)
            .entity::<SnakeBody>(snakes * body)
            .entity::<Food>(snakes)
            .globals::<Clock>()
    }

    fn action_space(&self) -> ActionSpace {
        ActionSpace::new().categorical::<Move>(self.config.num_snakes as u32)
    }

    fn reset(&mut self) -> Obs {
        self.board.fill(Content::Free);
        self.step = 0;
        let snakes = 0..self.config.num_snakes;
        self.snakes = snakes.clone().map(|_| VecDeque::from([self.place(Content::Body)])).collect();
        self.food = snakes.map(|colour| self.place(Content::Food(colour))).collect();
        self.observe(0.0, false)
    }

    fn act(&mut self, actions: &Actions) -> Obs {
        let (mut grown, mut eaten, mut over) = (0, vec![], false);
        for (colour, choice) in actions.of::<Move>().enumerate() {
            let (x, y) = *self.snakes[colour].back().expect("a snake has a head");
            let cell = match choice {
                Move::Up => (x, y + 1),
                Move::Down => (x, y - 1),
                Move::Left => (x - 1, y),
                Move::Right => (x + 1, y),
            };
            let ate = Content::Food(colour);
            let Some(place) = self.at(cell).filter(|place| {
                let content = self.board[*place];
                content == Content::Free || content == ate
            }) else {
                over = true;
                continue;
            };
            let content = std::mem::replace(&mut self.board[place], Content::Body);
            self.snakes[colour].push_back(cell);
            if content == ate {
                eaten.push(colour);
            }
            if content == ate && self.snakes[colour].len() <= self.config.max_snake_length {
                grown += 1;
            } else if let Some(place) =
                self.snakes[colour].pop_front().and_then(|cell| self.at(cell))
            {
                self.board[place] = Content::Free;
            }
        }
        for colour in eaten {
            self.food[colour] = self.place(Content::Food(colour));
        }
        self.step += 1;
        let possible = (self.config.max_snake_length - 1) * self.config.num_snakes;
        self.observe(grown as f64 / possible as f64, over)
    }
}
