//! Observations and actions as rows of fixed size, in the layout that trainers work with
//! (docs/game_protocol.md, "Rows"). An entity's slot is its row among those of all types, where each
//! type has as many as its capacity.

use crate::environment::{action_number, no_such_entity, Actions, Chosen, End, Group, Obs, Place};
use crate::space::{ActionKind, Space, SpaceError};
use std::sync::Arc;

pub(crate) const FIRST: i32 = 0;
pub(crate) const MID: i32 = 1;
pub(crate) const LAST: i32 = 2;

/// Where the columns of a row are, and how large they are.
#[derive(Debug)]
pub(crate) struct Layout {
    pub space: Space,
    /// Size in bytes of each column of a row, in the order of the message.
    pub columns: Vec<usize>,
    /// Size of a row.
    pub size: usize,
    /// Number of values of all actions of one environment.
    pub num_choices: usize,
    names: Arc<Vec<String>>,
    offsets: Vec<usize>, // first slot of each entity type
    slots: usize,        // with the slot of the global entity
    counts: usize,       // where columns begin
    actors: Vec<usize>,
    reward: usize,
    features: Vec<usize>,
    globals: usize,
    visible: Vec<usize>,
    masks: Vec<usize>,
    widths: Vec<usize>, // number of choices, or slots, of one actor
}

/// What is needed to decode the actions that follow an observation: by action, the places of the
/// actors; by type, the number of entities and the name that the environment gave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Context {
    actors: Vec<Vec<Place>>,
    counts: Vec<(usize, &'static str)>,
}

impl Layout {
    pub fn new(space: Space) -> Layout {
        let has_global = !space.global_features.is_empty()
            || space.actions.iter().any(|kind| matches!(kind.kind, ActionKind::Global(_)));
        let (mut offsets, mut slots) = (vec![], 0);
        for kind in &space.entities {
            offsets.push(slots);
            slots += kind.capacity as usize;
        }
        slots += has_global as usize;
        let widths: Vec<usize> = space
            .actions
            .iter()
            .map(|kind| match &kind.kind {
                ActionKind::Categorical(choices) | ActionKind::Global(choices) => choices.len(),
                ActionKind::SelectEntity => slots,
            })
            .collect();
        let (mut columns, mut size) = (vec![], 0);
        let mut column = |bytes: usize| {
            columns.push(bytes);
            size += bytes;
            size - bytes
        };
        column(4); // step type
        let counts = size_after(&mut column, space.entities.len());
        let actors = space.actions.iter().map(|kind| column(4 * kind.capacity as usize)).collect();
        let reward = column(4);
        column(4); // discount
        let features = space
            .entities
            .iter()
            .map(|kind| match kind.features.len() {
                0 => 0,
                width => column(4 * width * kind.capacity as usize),
            })
            .collect();
        let globals = match space.global_features.len() {
            0 => 0,
            width => column(4 * width),
        };
        let visible = space.entities.iter().map(|kind| column(kind.capacity as usize)).collect();
        let masks = space.actions.iter().zip(&widths);
        let masks = masks.map(|(kind, width)| column(kind.capacity as usize * width)).collect();
        let num_choices = space.actions.iter().map(|kind| kind.capacity as usize).sum();
        let names = Arc::new(space.actions.iter().map(|kind| kind.name.clone()).collect());
        Layout {
            space,
            columns,
            size,
            num_choices,
            names,
            offsets,
            slots,
            counts,
            actors,
            reward,
            features,
            globals,
            visible,
            masks,
            widths,
        }
    }

    /// Writes a row, and returns what is needed to decode the next actions.
    pub fn encode(&self, obs: &Obs, first: bool, row: &mut [u8]) -> Result<Context, SpaceError> {
        row.fill(0);
        let kind = match obs.end {
            End::No if first => FIRST,
            End::No => MID,
            _ => LAST,
        };
        put(row, 0, kind.to_le_bytes());
        put(row, self.reward, (obs.reward as f32).to_le_bytes());
        let discount = if obs.end == End::Done { 0.0f32 } else { 1.0 };
        put(row, self.reward + 4, discount.to_le_bytes());
        let mut context = Context {
            actors: vec![vec![]; self.space.actions.len()],
            counts: vec![(0, ""); self.space.entities.len()],
        };
        self.encode_entities(obs, row, &mut context)?;
        if obs.globals.len() != self.space.global_features.len() {
            return Err(SpaceError(format!(
                "global features: must be {} values; got {}",
                self.space.global_features.len(),
                obs.globals.len()
            )));
        }
        put_all(row, self.globals, &obs.globals);
        self.encode_actions(obs, row, &mut context)?;
        Ok(context)
    }

    fn encode_entities(
        &self,
        obs: &Obs,
        row: &mut [u8],
        context: &mut Context,
    ) -> Result<(), SpaceError> {
        for rows in &obs.rows {
            let number = self.space.entities.iter().position(|kind| kind.name == rows.kind);
            let fail =
                |text: String| Err(SpaceError(format!("entity type {:?}: {text}", rows.kind)));
            let Some(number) = number else {
                return fail("must be in the obs_space".into());
            };
            let kind = &self.space.entities[number];
            if !context.counts[number].1.is_empty() {
                return fail("must be added once; it is added twice".into());
            }
            if rows.count > kind.capacity as usize {
                let (most, got) = (kind.capacity, rows.count);
                return fail(format!("must have at most {most} entities, its capacity; got {got}"));
            }
            if rows.features.len() != rows.count * kind.features.len() {
                return fail(format!("each entity must have {} features", kind.features.len()));
            }
            context.counts[number] = (rows.count, rows.kind);
            put(row, self.counts + 4 * number, (rows.count as i32).to_le_bytes());
            put_all(row, self.features[number], &rows.features);
            let shown = &mut row[self.visible[number]..][..rows.count];
            match &rows.visible {
                None => shown.fill(1),
                Some(flags) if flags.len() == rows.count => {
                    shown.iter_mut().zip(flags).for_each(|(byte, flag)| *byte = *flag as u8);
                }
                Some(_) => return fail("must have one visible flag for each entity".into()),
            }
        }
        Ok(())
    }

    fn encode_actions(
        &self,
        obs: &Obs,
        row: &mut [u8],
        context: &mut Context,
    ) -> Result<(), SpaceError> {
        for (number, kind) in self.space.actions.iter().enumerate() {
            row[self.actors[number]..][..4 * kind.capacity as usize].fill(0xff); // -1: no actor
            for actor in 0..kind.capacity as usize {
                row[self.masks[number] + actor * self.widths[number]] = 1;
            }
        }
        for (at, acting) in obs.acting.iter().enumerate() {
            let number = action_number(&self.space, acting.action)?;
            let kind = &self.space.actions[number];
            let fail = |text: String| Err(SpaceError(format!("action {:?}: {text}", kind.name)));
            if obs.acting[..at].iter().any(|other| other.action == acting.action) {
                return fail("must be added once; it is added twice".into());
            }
            let (is_global, selects) =
                (acting.actors.is_none(), kind.kind == ActionKind::SelectEntity);
            if is_global != matches!(kind.kind, ActionKind::Global(_))
                || selects != acting.actees.is_some()
            {
                return fail("must be added as the kind that the action_space declares".into());
            }
            let actors = match &acting.actors {
                None => vec![],
                Some(group) => self.places(group, context)?,
            };
            let slots: Vec<usize> = match is_global {
                true => vec![self.slots - 1],
                false => actors.iter().map(|place| self.slot(place)).collect(),
            };
            if slots.len() > kind.capacity as usize {
                let (most, got) = (kind.capacity, slots.len());
                return fail(format!("must have at most {most} actors, its capacity; got {got}"));
            }
            let choices: Vec<usize> = match &acting.actees {
                None => (0..self.widths[number]).collect(),
                Some(group) => {
                    self.places(group, context)?.iter().map(|place| self.slot(place)).collect()
                }
            };
            let wanted = slots.len() * choices.len();
            if acting.legal.as_ref().is_some_and(|mask| mask.len() != wanted) {
                return fail(format!(
                    "its mask must have {wanted} flags, one for each actor and choice"
                ));
            }
            for (i, slot) in slots.iter().enumerate() {
                put(row, self.actors[number] + 4 * i, (*slot as i32).to_le_bytes());
                let mask = &mut row[self.masks[number] + i * self.widths[number]..];
                let mask = &mut mask[..self.widths[number]];
                mask[0] = 0;
                let legal = acting.legal.as_ref().map(|mask| &mask[i * choices.len()..]);
                let mut any = false;
                for (j, choice) in choices.iter().enumerate() {
                    let allowed = legal.map_or(true, |flags| flags[j]);
                    mask[*choice] = allowed as u8;
                    any |= allowed;
                }
                if !any {
                    return fail(format!(
                        "each actor must have a legal choice; the one at place {i} has none. Make \
                         one legal, or leave the actor out"
                    ));
                }
            }
            context.actors[number] = actors;
        }
        Ok(())
    }

    fn slot(&self, place: &Place) -> usize {
        let number = self.space.entities.iter().position(|kind| kind.name == place.kind);
        number.map_or(0, |number| self.offsets[number] + place.row) // `places` has checked it
    }

    fn places(&self, group: &Group, context: &Context) -> Result<Vec<Place>, SpaceError> {
        let count = |name: &str| {
            context.counts.iter().find(|(_, kind)| *kind == name).map_or(0, |(count, _)| *count)
        };
        match group {
            Group::All(kind) => Ok((0..count(kind)).map(|row| Place { kind, row }).collect()),
            Group::Some(places) => match places.iter().find(|p| p.row >= count(p.kind)) {
                None => Ok(places.clone()),
                Some(place) => Err(no_such_entity(place)),
            },
        }
    }

    /// Returns the actions of one environment.
    ///
    /// `choices` has the values of each action in turn, as many as its capacity.
    pub fn decode(&self, context: &Context, choices: &[i32]) -> Result<Actions, SpaceError> {
        let (mut chosen, mut at) = (vec![], 0);
        for (number, kind) in self.space.actions.iter().enumerate() {
            let given = &choices[at..at + kind.capacity as usize];
            at += kind.capacity as usize;
            let actors = &context.actors[number];
            let is_global = matches!(kind.kind, ActionKind::Global(_));
            let given = &given[..if is_global { 1 } else { actors.len() }];
            let range = 0..self.widths[number] as i32;
            if let Some(wrong) = given.iter().find(|choice| !range.contains(choice)) {
                return Err(SpaceError(format!(
                    "action {:?}: a choice must be less than {}; got {wrong}",
                    kind.name, range.end
                )));
            }
            let mut action = Chosen { actors: actors.clone(), ..Chosen::default() };
            if kind.kind == ActionKind::SelectEntity {
                for slot in given {
                    action.actees.push(self.entity_at(*slot as usize, context)?);
                }
            } else {
                action.choices = given.iter().map(|choice| *choice as usize).collect();
            }
            chosen.push(action);
        }
        Ok(Actions { names: Arc::clone(&self.names), chosen })
    }

    fn entity_at(&self, slot: usize, context: &Context) -> Result<Place, SpaceError> {
        let number = self.offsets.iter().rposition(|offset| *offset <= slot).unwrap_or(0);
        let (count, kind) = context.counts[number];
        let row = slot - self.offsets[number];
        if row < count {
            return Ok(Place { kind, row });
        }
        Err(SpaceError(format!("an actee must be an entity of the observation; got slot {slot}")))
    }
}

/// Adds a column of four bytes for each of `count` values; returns where the first is.
fn size_after(column: &mut impl FnMut(usize) -> usize, count: usize) -> usize {
    let places: Vec<usize> = (0..count).map(|_| column(4)).collect();
    places.first().copied().unwrap_or(0)
}

fn put(row: &mut [u8], at: usize, bytes: [u8; 4]) {
    row[at..at + 4].copy_from_slice(&bytes);
}

fn put_all(row: &mut [u8], at: usize, values: &[f32]) {
    for (place, value) in row[at..].chunks_exact_mut(4).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::{ActionSpace, ObsSpace};

    crate::entity! { struct Unit { x: f32 } }
    crate::entity! { struct Wall {} }
    crate::entity! { struct Clock { tick: u32 } }
    crate::choices! { enum Move: "move" { Left = "left", Right = "right" } }
    crate::choices! { enum Say: "say" { Yes = "yes", No = "no" } }

    struct Fixed(Obs);

    impl crate::environment::Environment for Fixed {
        fn obs_space(&self) -> ObsSpace {
            ObsSpace::new().entity::<Unit>(2).entity::<Wall>(1).globals::<Clock>()
        }

        fn action_space(&self) -> ActionSpace {
            ActionSpace::new().categorical::<Move>(2).select_entity("hit", 1).global::<Say>()
        }

        fn reset(&mut self) -> Obs {
            self.0.clone()
        }

        fn act(&mut self, _: &Actions) -> Obs {
            self.0.clone()
        }
    }

    fn obs() -> Obs {
        Obs::new(0.5)
            .entities([Wall {}])
            .entities([Unit { x: 1.0 }, Unit { x: 2.0 }])
            .visible(vec![true, false])
            .globals(&Clock { tick: 9 })
            .actors::<Move>(Group::Some(vec![Place::of::<Unit>(1)]))
            .legal(vec![false, true])
            .select_entity("hit", Group::Some(vec![Place::of::<Unit>(0)]), Group::all::<Wall>())
            .global_action::<Say>()
    }

    fn encoded(obs: Obs) -> Result<(Layout, Vec<u8>, Context), SpaceError> {
        let layout = Layout::new(crate::environment::space_of(&Fixed(obs.clone())));
        let mut row = vec![7; layout.size];
        let context = layout.encode(&obs, true, &mut row)?;
        Ok((layout, row, context))
    }

    #[test]
    fn rows_are_as_the_protocol_says() {
        let (layout, row, context) = encoded(obs()).unwrap();
        let mut wanted: Vec<u8> = vec![];
        let int = |out: &mut Vec<u8>, values: &[i32]| {
            values.iter().for_each(|value| out.extend(value.to_le_bytes()))
        };
        // Slots: two Units, one Wall, the global entity.
        int(&mut wanted, &[FIRST, 2, 1, 1, -1, 0, 3]);
        [0.5f32, 1.0, 1.0, 2.0, 9.0].iter().for_each(|x| wanted.extend(x.to_le_bytes()));
        wanted.extend([1, 0, 1]); // visible
        wanted.extend([0, 1, 1, 0]); // move of Unit 1, and of nobody
        wanted.extend([0, 0, 1, 0, 1, 1]); // hit the Wall; say both
        assert_eq!(row, wanted);
        assert_eq!(layout.columns, [4, 4, 4, 8, 4, 4, 4, 4, 8, 4, 2, 1, 4, 4, 2]);
        let actions = layout.decode(&context, &[1, 77, 2, 0]).unwrap();
        assert_eq!(actions.of::<Move>().collect::<Vec<_>>(), [Move::Right]);
        assert_eq!(actions.actors("move"), [Place::of::<Unit>(1)]);
        assert_eq!(actions.actees("hit"), [Place::of::<Wall>(0)]);
        assert_eq!(actions.of::<Say>().collect::<Vec<_>>(), [Say::Yes]);
        for wrong in [[2, 0, 2, 0], [-1, 0, 2, 0], [0, 0, 3, 0], [0, 0, 9, 0], [0, 0, 2, 2]] {
            assert!(layout.decode(&context, &wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn observations_outside_the_spaces_are_errors() {
        crate::entity! { struct Ghost {} }
        crate::choices! { enum Fly: "fly" { Up = "up" } }
        let one = || Obs::new(0.0).globals(&Clock { tick: 0 }).entities([Unit { x: 0.0 }]);
        let unit = |row| Group::Some(vec![Place::of::<Unit>(row)]);
        for (wrong, reason) in [
            (Obs::new(0.0), "must be 1 values; got 0"),
            (one().entities([Unit { x: 0.0 }]), "added twice"),
            (one().entities([Ghost {}]), "must be in the obs_space"),
            (one().entities([Wall {}, Wall {}]), "at most 1 entities"),
            (one().visible(vec![]), "one visible flag"),
            (one().actors::<Fly>(unit(0)), "must be in the action_space"),
            (one().actors::<Move>(unit(1)), "it has no Unit 1"),
            (one().actors::<Move>(unit(0)).actors::<Move>(unit(0)), "added twice"),
            (one().actors::<Move>(unit(0)).legal(vec![true]), "2 flags"),
            (one().actors::<Move>(unit(0)).legal(vec![false; 2]), "must have a legal choice"),
            (one().actors::<Say>(unit(0)), "as the kind"),
            (one().select_entity("hit", unit(0), Group::all::<Wall>()), "must have a legal choice"),
            (one().actors::<Move>(Group::Some(vec![Place::of::<Unit>(0); 3])), "at most 2 actors"),
        ] {
            let error = encoded(wrong).map(|_| ()).expect_err(reason).0;
            assert!(error.contains(reason), "{error}");
        }
    }
}
