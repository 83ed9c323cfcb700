//! Options of a game, given as arguments `name=value` of its program.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

/// The options that the program's user gave.
#[derive(Clone, Debug, Default)]
pub struct Options(BTreeMap<String, String>);

impl Options {
    /// Reads `name=value` arguments.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Options, String> {
        let mut found = BTreeMap::new();
        for argument in arguments {
            let Some((name, value)) = argument.split_once('=') else {
                return Err(format!("an argument must be name=value; got {argument:?}"));
            };
            found.insert(name.to_string(), value.to_string());
        }
        Ok(Options(found))
    }

    /// Takes an option's value, or the default if it was not given.
    pub fn take<T: FromStr>(&mut self, name: &str, default: T) -> Result<T, String>
    where
        T::Err: Display,
    {
        let Some(text) = self.0.remove(name) else { return Ok(default) };
        text.parse().map_err(|error| format!("option {name}: {error}; got {text:?}"))
    }

    /// Checks that every option was taken.
    pub fn end(self) -> Result<(), String> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(format!("the game has no option {name:?}")),
        }
    }
}
