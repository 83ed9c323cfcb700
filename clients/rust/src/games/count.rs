//! Count: count the beans.

use crate::environment::{ActionSpace, Actions, Environment, Group, Obs, ObsSpace};
use crate::options::Options;
use crate::rng::Rng;

const NUM_CHOICES: usize = 10;

crate::entity! { pub struct Player {} }
crate::entity! { pub struct Bean {} }
crate::choices! {
    pub enum Number: "count" {
        Zero = "0", One = "1", Two = "2", Three = "3", Four = "4",
        Five = "5", Six = "6", Seven = "7", Eight = "8", Nine = "9",
    }
}

/// The options of [`Count`].
#[derive(Clone, Debug)]
pub struct CountConfig {
    /// Numbers of beans are below this.
    pub masked_choices: usize,
}

impl CountConfig {
    /// Takes the options.
    pub fn from_options(options: &mut Options) -> Result<Self, String> {
        let masked_choices = options.take("masked_choices", NUM_CHOICES)?;
        if !(1..=NUM_CHOICES).contains(&masked_choices) {
            return Err(format!("masked_choices must be in 1..=10; got {masked_choices}"));
        }
        Ok(CountConfig { masked_choices })
    }
}

/// A Player counts n Beans. The legal numbers are n and a random subset of those below
/// `masked_choices`. The reward is 1 for n. An episode is one step.
pub struct Count {
    config: CountConfig,
    rng: Rng,
    beans: usize,
}

impl Count {
    pub fn new(config: CountConfig, seed: u64) -> Self {
        Count { config, rng: Rng::new(seed), beans: 0 }
    }
}

impl Environment for Count {
    fn obs_space(&self) -> ObsSpace {
        ObsSpace::new().entity::<Player>(1).entity::<Bean>(NUM_CHOICES as u32 - 1)
    }

    fn action_space(&self) -> ActionSpace {
        ActionSpace::new().categorical::<Number>(1)
    }

    fn reset(&mut self) -> Obs {
        let most = self.config.masked_choices;
        self.beans = self.rng.below(most);
        let size = self.rng.below(most + 1);
        let mut order: Vec<usize> = (0..most).collect();
        self.rng.shuffle(&mut order);
        let mut legal = vec![false; NUM_CHOICES];
        order[..size].iter().for_each(|choice| legal[*choice] = true);
        legal[self.beans] = true;
        let beans = (0..self.beans).map(|_| Bean {});
        Obs::new(0.0)
            .entities([Player {}])
            .entities(beans)
            .actors::<Number>(Group::all::<Player>())
            .legal(legal)
    }

    fn act(&mut self, actions: &Actions) -> Obs {
        let right = actions.of::<Number>().all(|number| number as usize == self.beans);
        let beans = (0..self.beans).map(|_| Bean {});
        Obs::new(right as u8 as f64).entities([Player {}]).entities(beans).done(true)
    }
}
