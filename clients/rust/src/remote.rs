//! Agents whose actions come from a trainer, through a socket.

use std::cell::RefCell;
use std::env;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::space::{Action, Observation, Space};
use crate::wire::{self, invalid, Writer};

/// How long connecting, and the answer to HELLO, may take.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the trainer may leave what was sent unread.
pub(crate) const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the trainer may take for actions, unless [`Connection::set_patience`] changes it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3600);

pub(crate) trait Stream: Read + Write {
    fn set_timeouts(&self, read: Duration, write: Duration) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn set_timeouts(&self, read: Duration, write: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(read))?;
        self.set_write_timeout(Some(write))
    }
}

#[cfg(unix)]
impl Stream for std::os::unix::net::UnixStream {
    fn set_timeouts(&self, read: Duration, write: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(read))?;
        self.set_write_timeout(Some(write))
    }
}

/// Reads from a stream until a deadline, however slowly bytes arrive.
struct Until<'a> {
    stream: &'a mut dyn Stream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the trainer did not answer in time");
        if left.is_zero() {
            return Err(late());
        }
        self.stream.set_timeouts(left, SEND_TIMEOUT)?;
        self.stream.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => late(),
            _ => error,
        })
    }
}

pub(crate) fn receive(stream: &mut dyn Stream, timeout: Duration) -> io::Result<wire::Reader> {
    wire::receive(&mut Until { stream, deadline: Instant::now() + timeout })
}

/// A connection to a trainer, shared by all agents of a game.
pub struct Connection {
    space: Space,
    num_agents: usize,
    stream: Option<Box<dyn Stream>>,
    patience: Duration,
    /// The seed that the game should use.
    pub seed: u64,
}

impl Connection {
    /// Connects to the trainer that started this program, by its environment variables.
    pub fn from_env(space: Space, num_agents: usize, name: &str) -> io::Result<Connection> {
        let (address, token) = address_from_env()?;
        Connection::connect(space, num_agents, name, &address, &token)
    }

    /// Connects to `host:port`, or `unix:path`.
    pub fn connect(
        space: Space,
        num_agents: usize,
        name: &str,
        address: &str,
        token: &str,
    ) -> io::Result<Connection> {
        Connection::over(open(address)?, space, num_agents, name, token)
    }

    fn over(
        mut stream: Box<dyn Stream>,
        space: Space,
        num_agents: usize,
        name: &str,
        token: &str,
    ) -> io::Result<Connection> {
        stream.set_timeouts(CONNECT_TIMEOUT, SEND_TIMEOUT)?;
        wire::send(&mut stream, wire::hello(&space, num_agents, name, token))?;
        let mut data = receive(stream.as_mut(), CONNECT_TIMEOUT)?;
        match data.kind {
            wire::WELCOME => {}
            wire::ERROR => return Err(invalid(data.text()?)),
            kind => {
                return Err(invalid(format!(
                    "HELLO must be answered by WELCOME; got a frame of kind {kind}"
                )))
            }
        }
        let version = data.u32()?;
        if version != wire::VERSION {
            return Err(invalid(format!(
                "the protocol's version must be {}; got {version}",
                wire::VERSION
            )));
        }
        let seed = data.u64()?;
        data.end()?;
        Ok(Connection { space, num_agents, stream: Some(stream), patience: PATIENCE, seed })
    }

    /// Sets how long the trainer may take for actions; an hour by default.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Returns the agents, for games that ask them one after the other.
    pub fn agents(self) -> Vec<RemoteAgent> {
        let count = self.num_agents;
        let connection = Rc::new(RefCell::new(self));
        (0..count).map(|number| RemoteAgent { connection: connection.clone(), number }).collect()
    }

    /// Asks several agents at once, by number. Games with several agents should ask those of one
    /// tick this way. Returns the answers in the same order; Ok(None) means that the game must end
    /// its loop.
    pub fn act_all(
        &mut self,
        observations: &[(usize, &Observation)],
    ) -> io::Result<Option<Vec<Vec<Action>>>> {
        self.ask(observations, false)
    }

    /// Asks, and disconnects if that fails: what the trainer sends later would be misread.
    fn ask(
        &mut self,
        observations: &[(usize, &Observation)],
        sequential: bool,
    ) -> io::Result<Option<Vec<Vec<Action>>>> {
        let mut out = Writer::new(wire::OBSERVE);
        out.u8(sequential as u8);
        out.u32(observations.len());
        for (number, observation) in observations {
            self.append(&mut out, *number, None, observation)?;
        }
        let Some(mut stream) = self.stream.take() else { return Ok(None) };
        wire::send(&mut stream, out)?;
        let answers = self.answers(receive(stream.as_mut(), self.patience)?, observations)?;
        if answers.is_some() {
            self.stream = Some(stream);
        }
        Ok(answers)
    }

    /// Returns what a frame answers to observations; None for SHUTDOWN.
    fn answers(
        &self,
        mut data: wire::Reader,
        observations: &[(usize, &Observation)],
    ) -> io::Result<Option<Vec<Vec<Action>>>> {
        match data.kind {
            wire::ACT => {}
            wire::SHUTDOWN => return data.end().map(|()| None),
            wire::ERROR => return Err(invalid(data.text()?)),
            kind => {
                return Err(invalid(format!(
                    "OBSERVE must be answered by ACT, SHUTDOWN or ERROR; got kind {kind}"
                )))
            }
        }
        if data.u32()? as usize != observations.len() {
            return Err(invalid("ACT must answer every agent that was asked"));
        }
        let mut answers: Vec<Option<Vec<Action>>> = vec![None; observations.len()];
        for _ in observations {
            let number = data.u32()? as usize;
            let place = observations.iter().position(|(asked, _)| *asked == number);
            let place = place.ok_or_else(|| invalid(format!("agent {number} was not asked")))?;
            if answers[place].is_some() {
                return Err(invalid(format!("ACT must answer agent {number} once")));
            }
            answers[place] = Some(wire::actions(&mut data, &self.space, observations[place].1)?);
        }
        data.end()?;
        Ok(Some(answers.into_iter().flatten().collect()))
    }

    /// Shows an agent the last observation of its game.
    pub fn game_over(&mut self, number: usize, observation: &Observation) -> io::Result<()> {
        let mut out = Writer::new(wire::GAME_OVER);
        self.append(&mut out, number, Some(observation.truncated), observation)?;
        match self.stream.as_mut() {
            Some(stream) => wire::send(stream, out),
            None => Ok(()),
        }
    }

    fn append(
        &self,
        out: &mut Writer,
        number: usize,
        truncated: Option<bool>,
        observation: &Observation,
    ) -> io::Result<()> {
        if number >= self.num_agents {
            let most = self.num_agents;
            return Err(invalid(format!(
                "an agent's number must be less than {most}; got {number}"
            )));
        }
        self.space.check(observation).map_err(|error| invalid(error.0))?;
        out.u32(number);
        truncated.into_iter().for_each(|flag| out.u8(flag as u8));
        wire::observation(out, &self.space, observation);
        Ok(())
    }
}

/// One agent of a [`Connection`]. Synchronous pools need [`Connection::act_all`] if a game has
/// several agents.
pub struct RemoteAgent {
    connection: Rc<RefCell<Connection>>,
    number: usize,
}

impl RemoteAgent {
    /// Connects a game with one agent; see [`Connection::from_env`].
    pub fn from_env(space: Space, name: &str) -> io::Result<RemoteAgent> {
        Ok(RemoteAgent {
            connection: Rc::new(RefCell::new(Connection::from_env(space, 1, name)?)),
            number: 0,
        })
    }

    /// The seed that the game should use.
    pub fn seed(&self) -> u64 {
        self.connection.borrow().seed
    }
}

impl Agent for RemoteAgent {
    /// If the connection fails, writes the error to standard error and returns None.
    fn act(&mut self, observation: &Observation) -> Option<Vec<Action>> {
        match self.connection.borrow_mut().ask(&[(self.number, observation)], true) {
            Ok(answers) => answers.and_then(|mut answers| answers.pop()),
            Err(error) => {
                eprintln!("rlstack-game: {error}");
                None
            }
        }
    }

    fn game_over(&mut self, observation: &Observation) {
        if let Err(error) = self.connection.borrow_mut().game_over(self.number, observation) {
            eprintln!("rlstack-game: {error}");
        }
    }
}

/// Returns the address and the token of the trainer that started this program.
pub(crate) fn address_from_env() -> io::Result<(String, String)> {
    let address = env::var("RLSTACK_GAME_ADDRESS").map_err(|_| {
        invalid("RLSTACK_GAME_ADDRESS is not set; let SocketGame start this program")
    })?;
    Ok((address, env::var("RLSTACK_GAME_TOKEN").unwrap_or_default()))
}

pub(crate) fn open(address: &str) -> io::Result<Box<dyn Stream>> {
    #[cfg(unix)]
    if let Some(path) = address.strip_prefix("unix:") {
        return Ok(Box::new(std::os::unix::net::UnixStream::connect(path)?));
    }
    let mut last = invalid(format!("there is no address {address}"));
    for place in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&place, CONNECT_TIMEOUT) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(Box::new(stream));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::ActionMask;
    use std::net::TcpListener;
    use std::thread;

    fn space() -> Space {
        Space::default().entity("A", 2, &["x"]).categorical("go", 2, &["l", "r"])
    }

    fn seen() -> Observation {
        Observation {
            features: vec![vec![vec![0.5]]],
            action_masks: vec![ActionMask::new(0, vec![0])],
            ..Default::default()
        }
    }

    fn answer(stream: &mut TcpStream, values: &[usize]) {
        let mut out = Writer::new(wire::ACT);
        values.iter().for_each(|value| out.u32(*value));
        wire::send(stream, out).unwrap();
    }

    fn with_server<T>(
        serve: impl FnOnce(&mut TcpStream) + Send + 'static,
        play: impl FnOnce(io::Result<Connection>) -> T,
    ) -> T {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || serve(&mut listener.accept().unwrap().0));
        let result = play(Connection::connect(space(), 1, "t", &address, ""));
        server.join().unwrap();
        result
    }

    fn welcome(stream: &mut TcpStream, version: u32) {
        assert_eq!(wire::receive(stream).unwrap().kind, wire::HELLO);
        let mut out = Writer::new(wire::WELCOME);
        out.u32(version as usize);
        out.bytes(&9u64.to_le_bytes());
        wire::send(stream, out).unwrap();
    }

    #[test]
    fn an_agent_acts_until_it_is_told_to_end() {
        let serve = |stream: &mut TcpStream| {
            welcome(stream, wire::VERSION);
            let mut shown = wire::receive(stream).unwrap();
            assert_eq!((shown.kind, shown.u32().unwrap()), (wire::OBSERVE, 0x101));
            let mut out = Writer::new(wire::ACT);
            [1, 0, 1, 0, 1].iter().for_each(|value| out.u32(*value));
            wire::send(stream, out).unwrap();
            assert_eq!(wire::receive(stream).unwrap().kind, wire::OBSERVE);
            wire::send(stream, Writer::new(wire::SHUTDOWN)).unwrap();
        };
        with_server(serve, |connection| {
            let mut agent = connection.unwrap().agents().pop().unwrap();
            assert_eq!(agent.seed(), 9);
            let seen = seen();
            let action = Action { actors: vec![0], choices: vec![1] };
            assert_eq!(agent.act(&seen), Some(vec![action]));
            assert_eq!(agent.act(&seen), None);
            assert_eq!(agent.act(&seen), None);
        });
    }

    #[test]
    fn refusals_are_errors() {
        let other = |stream: &mut TcpStream| welcome(stream, 99);
        let error = with_server(other, |connection| connection.err().unwrap().to_string());
        assert!(error.contains("99"), "{error}");
        let refuse = |stream: &mut TcpStream| {
            wire::receive(stream).unwrap();
            let mut out = Writer::new(wire::ERROR);
            out.text("go away");
            wire::send(stream, out).unwrap();
        };
        let error = with_server(refuse, |connection| connection.err().unwrap().to_string());
        assert!(error.contains("go away"), "{error}");
    }

    #[test]
    fn wrong_observations_are_not_sent() {
        let serve = |stream: &mut TcpStream| welcome(stream, wire::VERSION);
        with_server(serve, |connection| {
            let seen = Observation { features: vec![vec![vec![]]], ..Default::default() };
            let error = connection.unwrap().act_all(&[(0, &seen)]).err().unwrap().to_string();
            assert!(error.contains("must have 1 features; got 0"), "{error}");
        });
    }

    #[test]
    fn wrong_answers_are_errors_and_end_the_connection() {
        for (wrong, reason) in [
            (&[1, 0, 1, 7777, 1][..], "actor 7777"),
            (&[1, 0, 1, 0, 4242], "choice 4242"),
            (&[1, 0, 1, 0, 1, 9], "4 more bytes"),
            (&[1, 3, 1, 0, 1], "agent 3 was not asked"),
            (&[2, 0, 1, 0, 1, 0, 1, 0, 1], "every agent"),
            (&[1, 0, 0], "actor 0 must act"),
            (&[1, 0], "too short"),
        ] {
            let serve = |stream: &mut TcpStream| {
                welcome(stream, wire::VERSION);
                wire::receive(stream).unwrap();
                answer(stream, wrong);
            };
            with_server(serve, |connection| {
                let mut connection = connection.unwrap();
                let error = connection.act_all(&[(0, &seen())]).err().unwrap().to_string();
                assert!(error.contains(reason), "{wrong:?}: {error}");
                assert_eq!(connection.act_all(&[(0, &seen())]).unwrap(), None);
            });
        }
    }

    #[test]
    fn an_agent_is_answered_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            welcome(&mut stream, wire::VERSION);
            wire::receive(&mut stream).unwrap();
            answer(&mut stream, &[2, 0, 1, 0, 1, 0, 1, 0, 1]);
        });
        let mut connection = Connection::connect(space(), 2, "t", &address, "").unwrap();
        let error = connection.act_all(&[(0, &seen()), (1, &seen())]).err().unwrap().to_string();
        assert!(error.contains("agent 0 once"), "{error}");
        server.join().unwrap();
    }

    #[test]
    fn a_trainer_that_is_silent_or_slow_is_not_waited_for_forever() {
        let serve = |stream: &mut TcpStream| {
            welcome(stream, wire::VERSION);
            wire::receive(stream).unwrap();
            for byte in [17, 0, 0, 0, 4, 1] {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(100));
            }
        };
        with_server(serve, |connection| {
            let mut connection = connection.unwrap();
            connection.set_patience(Duration::from_millis(250));
            let begin = Instant::now();
            let error = connection.act_all(&[(0, &seen())]).err().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
            assert!(begin.elapsed() < Duration::from_secs(5));
        });
    }

    #[test]
    fn an_agent_that_does_not_exist_is_not_shown_anything() {
        let serve = |stream: &mut TcpStream| welcome(stream, wire::VERSION);
        with_server(serve, |connection| {
            let error = connection.unwrap().act_all(&[(1, &seen())]).err().unwrap().to_string();
            assert!(error.contains("less than 1; got 1"), "{error}");
        });
    }
}
