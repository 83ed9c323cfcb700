//! Frames and primitive types. A frame is a little-endian u32, the number of bytes that follow, then
//! one byte, its kind, then its body.

use std::io::{self, Read, Write};

use crate::space::{Action, ActionKind, ActionMask, ActionType, Observation, Space, GLOBAL};

/// The protocol's version.
pub const VERSION: u32 = 1;
pub(crate) const MAX_FRAME: usize = 16 << 20;

pub(crate) const HELLO: u8 = 1;
pub(crate) const WELCOME: u8 = 2;
pub(crate) const OBSERVE: u8 = 3;
pub(crate) const ACT: u8 = 4;
pub(crate) const GAME_OVER: u8 = 5;
pub(crate) const SHUTDOWN: u8 = 6;
pub(crate) const ERROR: u8 = 7;
pub(crate) const MANY_HELLO: u8 = 8;
pub(crate) const MANY_WELCOME: u8 = 9;
pub(crate) const STEP: u8 = 10;
pub(crate) const ROWS: u8 = 11;

pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub fn new(kind: u8) -> Self {
        Writer(vec![0, 0, 0, 0, kind])
    }

    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u32(&mut self, value: usize) {
        self.0.extend((value as u32).to_le_bytes());
    }

    /// Appends bytes as `write` does.
    pub fn with(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.0);
    }

    pub fn bytes(&mut self, value: &[u8]) {
        self.0.extend(value);
    }

    pub fn f32s(&mut self, values: &[f32]) {
        values.iter().for_each(|value| self.0.extend(value.to_le_bytes()));
    }

    pub fn f64(&mut self, value: f64) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn text(&mut self, value: &str) {
        self.u32(value.len());
        self.bytes(value.as_bytes());
    }

    pub fn texts(&mut self, values: &[String]) {
        self.u32(values.len());
        values.iter().for_each(|value| self.text(value));
    }

    pub fn u32s(&mut self, values: &[u32]) {
        self.u32(values.len());
        values.iter().for_each(|value| self.u32(*value as usize));
    }

    pub fn flags(&mut self, values: &[bool]) {
        self.0.extend(values.iter().map(|value| *value as u8));
    }

    pub fn finish(mut self) -> Vec<u8> {
        let size = (self.0.len() - 4) as u32;
        self.0[..4].copy_from_slice(&size.to_le_bytes());
        self.0
    }
}

pub(crate) struct Reader {
    pub kind: u8,
    data: Vec<u8>,
    at: usize,
}

impl Reader {
    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let part =
            self.data.get(self.at..self.at + N).ok_or_else(|| invalid("the frame is too short"))?;
        self.at += N;
        Ok(part.try_into().expect("N bytes"))
    }

    pub fn u32(&mut self) -> io::Result<u32> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    pub fn flag(&mut self) -> io::Result<bool> {
        match self.take::<1>()? {
            [value @ (0 | 1)] => Ok(value == 1),
            [value] => Err(invalid(format!("a flag must be 0 or 1; got {value}"))),
        }
    }

    pub fn u64(&mut self) -> io::Result<u64> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    pub fn u32s(&mut self, count: u32) -> io::Result<Vec<u32>> {
        if count as usize > (self.data.len() - self.at) / 4 {
            return Err(invalid("the frame is too short"));
        }
        (0..count).map(|_| self.u32()).collect()
    }

    pub fn i32s(&mut self, count: usize) -> io::Result<Vec<i32>> {
        let part = self.data.get(self.at..self.at.saturating_add(4 * count));
        let part = part.ok_or_else(|| invalid("the frame is too short"))?;
        self.at += 4 * count;
        let values = part.chunks_exact(4);
        Ok(values.map(|bytes| i32::from_le_bytes(bytes.try_into().expect("4 bytes"))).collect())
    }

    /// Checks that the frame ends here.
    pub fn end(&self) -> io::Result<()> {
        match self.data.len() - self.at {
            0 => Ok(()),
            left => Err(invalid(format!("the frame must end here; got {left} more bytes"))),
        }
    }

    pub fn text(&mut self) -> io::Result<String> {
        let size = self.u32()? as usize;
        let end = self.at.saturating_add(size);
        let part = self.data.get(self.at..end).ok_or_else(|| invalid("the frame is too short"))?;
        self.at = end;
        String::from_utf8(part.to_vec()).map_err(|_| invalid("a text must be UTF-8"))
    }
}

pub(crate) fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

/// Returns the next frame.
pub(crate) fn receive(stream: &mut impl Read) -> io::Result<Reader> {
    let mut size = [0; 4];
    stream.read_exact(&mut size)?;
    let size = u32::from_le_bytes(size) as usize;
    if size == 0 || size > MAX_FRAME {
        return Err(invalid(format!("a frame must have 1 to {MAX_FRAME} bytes; got {size}")));
    }
    let mut data = vec![0; size];
    stream.read_exact(&mut data)?;
    Ok(Reader { kind: data[0], data, at: 1 })
}

pub(crate) fn send(stream: &mut impl Write, frame: Writer) -> io::Result<()> {
    let frame = frame.finish();
    if frame.len() - 4 > MAX_FRAME {
        let size = frame.len() - 4;
        return Err(invalid(format!("a frame must have at most {MAX_FRAME} bytes; got {size}")));
    }
    stream.write_all(&frame)
}

pub(crate) fn hello(space: &Space, num_agents: usize, name: &str, token: &str) -> Writer {
    let mut out = Writer::new(HELLO);
    greet(&mut out, token);
    out.text(name);
    out.u32(num_agents);
    write_space(&mut out, space);
    out
}

/// Returns the first frame of a program with many environments; `refusal` says why there are none.
pub(crate) fn many_hello(space: &Space, name: &str, token: &str, refusal: &str) -> Writer {
    let mut out = Writer::new(MANY_HELLO);
    greet(&mut out, token);
    out.text(name);
    out.text(refusal);
    write_space(&mut out, space);
    out
}

fn greet(out: &mut Writer, token: &str) {
    out.bytes(b"RLGP");
    out.u32(VERSION as usize);
    out.text(token);
}

fn write_space(out: &mut Writer, space: &Space) {
    out.u32(space.entities.len());
    for kind in &space.entities {
        out.text(&kind.name);
        out.u32(kind.capacity as usize);
        out.texts(&kind.features);
    }
    out.texts(&space.global_features);
    out.u32(space.actions.len());
    for action in &space.actions {
        let (kind, choices): (u8, &[String]) = match &action.kind {
            ActionKind::Categorical(choices) => (0, choices),
            ActionKind::Global(choices) => (1, choices),
            ActionKind::SelectEntity => (2, &[]),
        };
        out.text(&action.name);
        out.u8(kind);
        out.u32(action.capacity as usize);
        out.texts(choices);
    }
}

/// Appends an observation that fits the space.
pub(crate) fn observation(out: &mut Writer, space: &Space, observation: &Observation) {
    out.f64(observation.score);
    for rows in &observation.features {
        out.u32(rows.len());
        rows.iter().for_each(|row| out.f32s(row));
    }
    out.f32s(&observation.global_features);
    for i in 0..space.entities.len() {
        let visible = observation.visible.get(i).and_then(Option::as_ref);
        out.u8(visible.is_some() as u8);
        visible.into_iter().for_each(|flags| out.flags(flags));
    }
    out.u32(observation.action_masks.len());
    for given in &observation.action_masks {
        let kind = &space.actions[given.action].kind;
        out.u32(given.action);
        if !matches!(kind, ActionKind::Global(_)) {
            out.u32s(&given.actors);
        }
        if *kind == ActionKind::SelectEntity {
            out.u32s(&given.actees);
        }
        out.u8(given.mask.is_some() as u8);
        given.mask.iter().for_each(|mask| out.flags(mask));
    }
    out.u32(observation.metrics.len());
    for (name, value) in &observation.metrics {
        out.text(name);
        out.f64(*value);
    }
}

/// Takes the actions of one agent, which must be legal choices of actors of its observation.
pub(crate) fn actions(
    data: &mut Reader,
    space: &Space,
    observation: &Observation,
) -> io::Result<Vec<Action>> {
    space
        .actions
        .iter()
        .enumerate()
        .map(|(number, kind)| {
            let count = data.u32()?;
            let action = Action { actors: data.u32s(count)?, choices: data.u32s(count)? };
            let given = observation.action_masks.iter().find(|given| given.action == number);
            check_action(&action, kind, given)
                .map_err(|reason| invalid(format!("ACT: action {:?}: {reason}", kind.name)))?;
            Ok(action)
        })
        .collect()
}

fn check_action(
    action: &Action,
    kind: &ActionType,
    given: Option<&ActionMask>,
) -> Result<(), String> {
    let Some(given) = given else {
        let actors = &action.actors;
        let rule = "it must have no actors, because the observation has none";
        return if actors.is_empty() { Ok(()) } else { Err(format!("{rule}; got {actors:?}")) };
    };
    let mut acted = vec![false; given.rows(kind)];
    for (actor, choice) in action.actors.iter().zip(&action.choices) {
        let row = match kind.kind {
            ActionKind::Global(_) => (*actor == GLOBAL).then_some(0),
            _ => given.actors.iter().position(|other| other == actor),
        };
        let row = row.ok_or_else(|| format!("actor {actor} must be one of the observation's"))?;
        if std::mem::replace(&mut acted[row], true) {
            return Err(format!("actor {actor} must act once; it acts twice"));
        }
        let column = match kind.kind {
            ActionKind::SelectEntity => given.actees.iter().position(|actee| actee == choice),
            _ => Some(*choice as usize),
        };
        if !column.is_some_and(|column| given.is_legal(kind, row, column)) {
            return Err(format!("choice {choice} of actor {actor} must be legal"));
        }
    }
    match acted.iter().position(|acts| !acts) {
        None => Ok(()),
        Some(row) => {
            let actor = given.actors.get(row).copied().unwrap_or(GLOBAL);
            Err(format!("actor {actor} must act; it does not"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_as_the_protocol_says() {
        let mut out = Writer::new(ERROR);
        out.text("no");
        let frame = out.finish();
        assert_eq!(frame, [7, 0, 0, 0, 7, 2, 0, 0, 0, b'n', b'o']);
        let mut data = receive(&mut frame.as_slice()).unwrap();
        assert_eq!((data.kind, data.text().unwrap()), (ERROR, "no".to_string()));
        assert!(data.u32().is_err());
    }

    #[test]
    fn invalid_frames_are_errors() {
        for bytes in [&[0, 0, 0, 0][..], &[255; 4], &[9, 0, 0, 0, 1], &[1]] {
            assert!(receive(&mut &bytes[..]).is_err());
        }
    }

    fn read(values: &[usize], observation: &Observation) -> io::Result<Vec<Action>> {
        let space = Space::default()
            .entity("A", 9, &[])
            .categorical("a", 2, &["x", "y"])
            .select_entity("b", 1)
            .global("c", &["p", "q"]);
        space.check(observation).unwrap();
        let mut out = Writer::new(ACT);
        values.iter().for_each(|value| out.u32(*value));
        let mut data = receive(&mut out.finish().as_slice())?;
        let actions = actions(&mut data, &space, observation)?;
        data.end()?;
        Ok(actions)
    }

    fn shown() -> Observation {
        Observation {
            features: vec![vec![vec![]; 7]],
            action_masks: vec![
                ActionMask::new(0, vec![5, 6]).legal(vec![true, true, true, false]),
                ActionMask::new(1, vec![3]).at(vec![2, 4]),
            ],
            ..Observation::default()
        }
    }

    #[test]
    fn actions_are_read_in_the_order_of_the_space() {
        let found = read(&[2, 5, 6, 1, 0, 1, 3, 4, 0], &shown()).unwrap();
        assert_eq!(found[0], Action { actors: vec![5, 6], choices: vec![1, 0] });
        assert_eq!(found[1], Action { actors: vec![3], choices: vec![4] });
        assert_eq!(found[2], Action::default());
        let global = Observation {
            action_masks: vec![ActionMask::new(2, vec![]).legal(vec![false, true])],
            ..shown()
        };
        let found = read(&[0, 0, 1, 0, 1], &global).unwrap();
        assert_eq!(found[2], Action { actors: vec![GLOBAL], choices: vec![1] });
        assert!(read(&[0, 0, 1, 0, 0], &global).is_err());
        assert!(read(&[0, 0, 1, 1, 1], &global).is_err());
    }

    #[test]
    fn actions_that_the_observation_does_not_allow_are_refused() {
        for (wrong, reason) in [
            (&[2, 5, 7777, 1, 0, 1, 3, 4, 0][..], "actor 7777 must be one of"),
            (&[2, 5, 4, 1, 0, 1, 3, 4, 0], "actor 4 must be one of"),
            (&[2, 5, 5, 1, 0, 1, 3, 4, 0], "actor 5 must act once"),
            (&[1, 5, 1, 1, 3, 4, 0], "actor 6 must act"),
            (&[2, 5, 6, 4242, 0, 1, 3, 4, 0], "choice 4242 of actor 5 must be legal"),
            (&[2, 5, 6, 1, 1, 1, 3, 4, 0], "choice 1 of actor 6 must be legal"),
            (&[2, 5, 6, 1, 0, 1, 3, 3, 0], "choice 3 of actor 3 must be legal"),
            (&[2, 5, 6, 1, 0, 1, 3, 4, 1, 0, 0], "it must have no actors"),
            (&[2, 5, 6, 1, 0, 1, 3, 4, 0, 0], "got 4 more bytes"),
            (&[2, 5, 6, 1, 0, 1, 3, 4], "too short"),
            (&[4_000_000_000, 5, 6], "too short"),
            (&[3, 5, 6, 1, 1, 0, 0, 1, 3, 4, 0], "actor 1 must be one of"),
        ] {
            let error = read(wrong, &shown()).unwrap_err().to_string();
            assert!(error.contains(reason), "{wrong:?}: {error}");
        }
    }

    #[test]
    fn texts_must_be_utf_8() {
        let frame = [7, 0, 0, 0, 7, 2, 0, 0, 0, 0xff, b'o'];
        assert!(receive(&mut frame.as_slice()).unwrap().text().is_err());
    }
}
