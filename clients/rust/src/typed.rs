//! Entities and choices as Rust types: [`entity!`](crate::entity) and [`choices!`](crate::choices).

/// A value that becomes one or more features.
pub trait Feature {
    /// Appends the names of the features of a field called `field`.
    fn names(field: &str, out: &mut Vec<String>);

    /// Appends the features.
    fn write(&self, out: &mut Vec<f32>);
}

macro_rules! numbers {
    ($($kind:ty),*) => {$(
        impl Feature for $kind {
            fn names(field: &str, out: &mut Vec<String>) {
                out.push(field.to_string());
            }

            #[inline]
            fn write(&self, out: &mut Vec<f32>) {
                out.push(*self as f32);
            }
        }
    )*};
}

numbers!(f32, f64, i8, i16, i32, i64, isize, u8, u16, u32, u64, usize);

impl Feature for bool {
    fn names(field: &str, out: &mut Vec<String>) {
        out.push(field.to_string());
    }

    fn write(&self, out: &mut Vec<f32>) {
        out.push(*self as u8 as f32);
    }
}

/// An array has the features of its items, named `field.0`, `field.1`, ...
impl<T: Feature, const N: usize> Feature for [T; N] {
    fn names(field: &str, out: &mut Vec<String>) {
        (0..N).for_each(|i| T::names(&format!("{field}.{i}"), out));
    }

    fn write(&self, out: &mut Vec<f32>) {
        self.iter().for_each(|item| item.write(out));
    }
}

/// A struct whose fields are the features of an entity type, or the global features; made by
/// [`entity!`](crate::entity).
pub trait Entity {
    /// The name of the entity type.
    const NAME: &'static str;

    /// Appends the names of the features; `prefix` goes before each.
    fn feature_names(prefix: &str, out: &mut Vec<String>);

    /// Appends the features.
    fn features(&self, out: &mut Vec<f32>);
}

/// An enum whose variants are the choices of an action; made by [`choices!`](crate::choices).
pub trait Choices: Copy + 'static {
    /// The name of the action type.
    const NAME: &'static str;
    /// The variants, in the order of their positions.
    const ALL: &'static [Self];
    /// Their labels.
    const LABELS: &'static [&'static str];
}

/// Declares a struct as an entity type: its fields are the features.
///
/// A number or a bool is one feature, an enum of [`choices!`](crate::choices) one for each variant,
/// an array one for each item, and another entity all of its own.
///
/// ```
/// rlstack_game::entity! {
///     /// A robot of the player.
///     pub struct Robot { position: [f32; 2], charged: bool }
/// }
/// ```
#[macro_export]
macro_rules! entity {
    ($(#[$meta:meta])* $vis:vis struct $name:ident {
        $($(#[$note:meta])* $of:vis $field:ident : $kind:ty),* $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $name { $($(#[$note])* $of $field: $kind),* }

        impl $crate::Entity for $name {
            const NAME: &'static str = stringify!($name);

            #[allow(unused_variables)]
            fn feature_names(prefix: &str, out: &mut Vec<String>) {
                $(<$kind as $crate::Feature>::names(
                    &format!("{prefix}{}", stringify!($field)), out);)*
            }

            #[allow(unused_variables)]
            #[inline]
            fn features(&self, out: &mut Vec<f32>) {
                $($crate::Feature::write(&self.$field, out);)*
            }
        }

        impl $crate::Feature for $name {
            fn names(field: &str, out: &mut Vec<String>) {
                <$name as $crate::Entity>::feature_names(&format!("{field}."), out);
            }

            fn write(&self, out: &mut Vec<f32>) {
                $crate::Entity::features(self, out);
            }
        }
    };
}

/// Declares an enum as the choices of an action, with its name and the label of each choice.
///
/// ```
/// rlstack_game::choices! {
///     /// Where to go.
///     pub enum Move: "move" { Left = "left", Right = "right" }
/// }
/// ```
#[macro_export]
macro_rules! choices {
    ($(#[$meta:meta])* $vis:vis enum $name:ident : $label:literal {
        $($(#[$note:meta])* $variant:ident = $text:literal),+ $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name { $($(#[$note])* $variant),+ }

        impl $crate::Choices for $name {
            const NAME: &'static str = $label;
            const ALL: &'static [Self] = &[$($name::$variant),+];
            const LABELS: &'static [&'static str] = &[$($text),+];
        }

        impl $crate::Feature for $name {
            fn names(field: &str, out: &mut Vec<String>) {
                $(out.push(format!("{field}={}", $text));)+
            }

            fn write(&self, out: &mut Vec<f32>) {
                $(out.push((*self == $name::$variant) as u8 as f32);)+
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    choices! { enum Heading: "turn" { North = "north", South = "south" } }
    entity! { struct Place { x: f32, y: i32 } }
    entity! { struct Robot { at: Place, load: [u8; 2], heading: Heading, charged: bool } }
    entity! { struct Nothing {} }

    #[test]
    fn fields_are_features() {
        let mut names = vec![];
        Robot::feature_names("", &mut names);
        assert_eq!(
            names,
            ["at.x", "at.y", "load.0", "load.1", "heading=north", "heading=south", "charged"]
        );
        let at = Place { x: 0.5, y: -2 };
        let robot = Robot { at, load: [3, 4], heading: Heading::South, charged: true };
        let mut row = vec![];
        robot.features(&mut row);
        assert_eq!(row, [0.5, -2.0, 3.0, 4.0, 0.0, 1.0, 1.0]);
        Nothing {}.features(&mut row);
        assert_eq!((row.len(), Nothing::NAME), (7, "Nothing"));
    }

    #[test]
    fn variants_are_choices() {
        assert_eq!((Heading::NAME, Heading::LABELS), ("turn", &["north", "south"][..]));
        assert_eq!(Heading::ALL, [Heading::North, Heading::South]);
    }
}
