//! Frames and primitive types. A frame is a little-endian u32, the number of bytes that follow, then
//! one byte, its kind, then its body.

use std::io::{self, Read, Write};

use crate::space::{Action, ActionKind, Observation, Space};

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

    pub fn u64(&mut self) -> io::Result<u64> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    pub fn u32s(&mut self, count: u32) -> io::Result<Vec<u32>> {
        (0..count).map(|_| self.u32()).collect()
    }

    pub fn text(&mut self) -> io::Result<String> {
        let size = self.u32()? as usize;
        let end = self.at.saturating_add(size);
        let part = self.data.get(self.at..end).ok_or_else(|| invalid("the frame is too short"))?;
        self.at = end;
        Ok(String::from_utf8_lossy(part).into_owned())
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
    stream.write_all(&frame.finish())
}

pub(crate) fn hello(space: &Space, num_agents: usize, name: &str, token: &str) -> Writer {
    let mut out = Writer::new(HELLO);
    out.bytes(b"RLGP");
    out.u32(VERSION as usize);
    out.text(token);
    out.text(name);
    out.u32(num_agents);
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
    out
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

/// Takes the actions of one agent.
pub(crate) fn actions(data: &mut Reader, space: &Space) -> io::Result<Vec<Action>> {
    space
        .actions
        .iter()
        .map(|_| {
            let count = data.u32()?;
            Ok(Action { actors: data.u32s(count)?, choices: data.u32s(count)? })
        })
        .collect()
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

    #[test]
    fn actions_are_read_in_the_order_of_the_space() {
        let space = Space::default().categorical("a", 2, &["x"]).select_entity("b", 1);
        let mut out = Writer::new(ACT);
        for value in [2, 5, 6, 1, 0, 0] {
            out.u32(value);
        }
        let mut data = receive(&mut out.finish().as_slice()).unwrap();
        let read = actions(&mut data, &space).unwrap();
        assert_eq!(read[0], Action { actors: vec![5, 6], choices: vec![1, 0] });
        assert_eq!(read[1], Action::default());
    }
}
