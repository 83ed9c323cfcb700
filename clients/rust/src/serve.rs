//! The main function of a program that has an [`Environment`].

use std::process::ExitCode;
use std::{env, io};

use crate::agent::{Agent, RandomAgent};
use crate::environment::{play, space_of, Environment};
use crate::options::Options;
use crate::remote::{self, RemoteAgent, Stream};
use crate::space::Space;
use crate::vec_env::VecEnv;
use crate::wire::{self, invalid, Reader, Writer};

/// Set to 1 by a trainer that wants many environments; otherwise the program plays one game.
const MANY_VARIABLE: &str = "RLSTACK_GAME_MANY";
const GAMES: usize = 1000; // that a random agent plays

/// Runs a program that a trainer starts, as `rust:PATH` (many environments in this process) or as
/// the command of a `SocketGame` (one game). With the first argument `random` it plays 1000
/// episodes with random actions and prints the mean return. The other arguments are `name=value`.
///
/// `configure` takes its options and returns a function from a seed to an environment.
pub fn serve<E, F>(
    name: &str,
    configure: impl FnOnce(&mut Options) -> Result<F, String>,
) -> ExitCode
where
    E: Environment + 'static,
    F: Fn(u64) -> E,
{
    let mut arguments: Vec<String> = env::args().skip(1).collect();
    let random = arguments.first().is_some_and(|first| first == "random");
    arguments.drain(..random as usize);
    let make = Options::parse(arguments).and_then(|mut options| {
        let make = configure(&mut options)?;
        options.end().map(|()| make)
    });
    let done = match (make, env::var(MANY_VARIABLE).is_ok_and(|value| value == "1")) {
        (make, true) if !random => serve_many(name, make).map_err(|error| error.to_string()),
        (Ok(make), _) if random => play_randomly(make),
        (Ok(make), _) => serve_one(name, make),
        (Err(reason), _) => Err(reason),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn play_randomly<E: Environment>(make: impl Fn(u64) -> E) -> Result<(), String> {
    let mut environment = make(1);
    let mut agent = RandomAgent::new(space_of(&environment), 1);
    let mut sum = 0.0;
    for _ in 0..GAMES {
        sum += play(&mut environment, &mut agent).map_err(|error| error.0)?.unwrap_or(0.0);
    }
    println!("{:.4}", sum / GAMES as f64);
    Ok(())
}

/// Plays one game after the other with the agent of a trainer.
fn serve_one<E: Environment>(name: &str, make: impl Fn(u64) -> E) -> Result<(), String> {
    let space = space_of(&make(0));
    let mut agent = RemoteAgent::from_env(space, name).map_err(|error| error.to_string())?;
    let mut environment = make(agent.seed());
    let agent: &mut dyn Agent = &mut agent;
    while play(&mut environment, agent).map_err(|error| error.0)?.is_some() {}
    Ok(())
}

/// Steps many environments as a trainer says, until it says to end.
fn serve_many<E, F>(name: &str, make: Result<F, String>) -> io::Result<()>
where
    E: Environment + 'static,
    F: Fn(u64) -> E,
{
    let (address, token) = remote::address_from_env()?;
    let stream = remote::open(&address)?;
    let (make, space) = match make {
        Ok(make) => {
            let space = space_of(&make(0));
            (make, space)
        }
        Err(reason) => {
            Trainer { stream }.send(wire::many_hello(&Space::default(), name, &token, &reason))?;
            return Err(invalid(reason));
        }
    };
    let mut trainer = Trainer { stream };
    trainer.stream.set_timeouts(remote::CONNECT_TIMEOUT, remote::SEND_TIMEOUT)?;
    trainer.send(wire::many_hello(&space, name, &token, ""))?;
    let (threads, seeds) = trainer.welcome()?;
    let built = VecEnv::new(make, &seeds, threads);
    let mut environments = match built {
        Ok(environments) if *environments.space() == space => environments,
        Ok(_) => return trainer.fail("the environments must have the spaces of seed 0's"),
        Err(reason) => return trainer.fail(&reason),
    };
    while let Some((listed, actions, reset)) = trainer.order(&environments)? {
        if let Err(reason) = environments.step(&listed, actions, reset) {
            return trainer.fail(&reason);
        }
        if let Err(error) = trainer.send(rows(&mut environments, listed.len())) {
            // A trainer that ends does not wait for the last rows.
            let left =
                matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
            return if left { Ok(()) } else { Err(error) };
        }
    }
    Ok(())
}

fn rows(environments: &mut VecEnv, count: usize) -> Writer {
    let mut out = Writer::new(wire::ROWS);
    let metrics = environments.take_metrics();
    out.u32(count);
    out.u32(metrics.len());
    out.with(|bytes| environments.write_rows(bytes));
    for (row, values) in metrics {
        out.u32(row);
        out.u32(values.len());
        for (name, value) in values {
            out.text(&name);
            out.f64(value);
        }
    }
    out
}

struct Trainer {
    stream: Box<dyn Stream>,
}

/// The environments to step, the values of their actions, and whether to reset them all.
type Order = (Vec<u32>, Vec<i32>, bool);

impl Trainer {
    fn send(&mut self, frame: Writer) -> io::Result<()> {
        wire::send(&mut self.stream, frame)
    }

    /// Tells the trainer why this program ends.
    fn fail(&mut self, reason: &str) -> io::Result<()> {
        let mut out = Writer::new(wire::ERROR);
        out.text(reason);
        self.send(out)?;
        Err(invalid(reason))
    }

    /// Returns the number of threads and the seeds that the trainer wants.
    fn welcome(&mut self) -> io::Result<(usize, Vec<u64>)> {
        let mut data = remote::receive(self.stream.as_mut(), remote::CONNECT_TIMEOUT)?;
        match data.kind {
            wire::MANY_WELCOME => {}
            wire::ERROR => return Err(invalid(data.text()?)),
            kind => return Err(invalid(format!("MANY_HELLO must not be answered by kind {kind}"))),
        }
        let version = data.u32()?;
        if version != wire::VERSION {
            let ours = wire::VERSION;
            return Err(invalid(format!("the protocol's version must be {ours}; got {version}")));
        }
        let threads = data.u32()? as usize;
        let count = data.u32()?;
        let seeds = (0..count).map(|_| data.u64()).collect::<io::Result<Vec<u64>>>()?;
        data.end()?;
        Ok((threads, seeds))
    }

    /// Returns what to do next; None at the end.
    fn order(&mut self, environments: &VecEnv) -> io::Result<Option<Order>> {
        let mut data = remote::receive(self.stream.as_mut(), remote::PATIENCE)?;
        match data.kind {
            wire::STEP => {
                let order = read_order(&mut data, environments);
                match order {
                    Err(error) => self.fail(&format!("STEP: {error}")).map(|()| None),
                    order => order.map(Some),
                }
            }
            wire::SHUTDOWN => data.end().map(|()| None),
            wire::ERROR => Err(invalid(data.text()?)),
            kind => {
                self.fail(&format!("a trainer must not send a frame of kind {kind}")).map(|()| None)
            }
        }
    }
}

fn read_order(data: &mut Reader, environments: &VecEnv) -> io::Result<Order> {
    let reset = data.flag()?;
    let count = data.u32()?;
    if count as usize > environments.len() {
        return Err(invalid(format!("must list at most {} environments", environments.len())));
    }
    let listed = data.u32s(count)?;
    let actions = data.i32s(listed.len() * environments.num_choices())?;
    data.end()?;
    Ok((listed, actions, reset))
}
