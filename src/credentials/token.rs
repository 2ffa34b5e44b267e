//! The secret that a rank shows with each call.

use std::collections::BTreeMap;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::identity::{Name, NameError};

/// Bytes that a token is drawn from.
const DRAWN: usize = 32;
/// A token that can be guessed is none.
const SHORTEST: usize = 32;
/// A header of a call holds it.
const LONGEST: usize = 512;

/// Why a text holds no tokens.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TokenError {
    #[error("line {line} is neither TOKEN nor RUN TOKEN")]
    Line { line: usize },
    #[error("line {line}: a token has {SHORTEST} to {LONGEST} visible ASCII characters")]
    Token { line: usize },
    #[error("line {line}: {source}")]
    Run { line: usize, source: NameError },
    #[error("it holds no token")]
    Empty,
}

/// A secret; its own words never show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// A new one from the system's randomness.
    pub fn draw() -> io::Result<Token> {
        let mut bytes = [0; DRAWN];
        getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Token(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The secret itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn new(text: &str) -> Option<Token> {
        let fits = (SHORTEST..=LONGEST).contains(&text.len());
        (fits && text.bytes().all(|b| b.is_ascii_graphic())).then(|| Token(text.into()))
    }

    /// In a time that says nothing of how much of it is right: hashes are compared, and
    /// blake3 compares its own in constant time.
    fn is(&self, shown: &str) -> bool {
        blake3::hash(self.0.as_bytes()) == blake3::hash(shown.as_bytes())
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// The tokens that a coordinator serves; none: everyone.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    any: Option<Token>,
    runs: BTreeMap<Name, Token>,
}

impl Tokens {
    /// One token for every run.
    pub fn any(token: Token) -> Tokens {
        Tokens { any: Some(token), runs: BTreeMap::new() }
    }

    /// The token of a run.
    pub fn of(&self, run: &Name) -> Option<&Token> {
        self.runs.get(run).or(self.any.as_ref())
    }

    /// False where everyone is let in.
    pub fn guard(&self) -> bool {
        self.any.is_some() || !self.runs.is_empty()
    }

    /// Whether a caller that shows this may speak for some run.
    pub fn admit_some(&self, shown: Option<&str>) -> bool {
        if !self.guard() {
            return true;
        }
        let known = || self.any.iter().chain(self.runs.values());
        shown.is_some_and(|shown| known().any(|token| token.is(shown)))
    }

    /// Whether a caller that shows this may speak for a run.
    pub fn admit(&self, run: &Name, shown: Option<&str>) -> bool {
        if !self.guard() {
            return true;
        }
        self.of(run).zip(shown).is_some_and(|(token, shown)| token.is(shown))
    }
}

impl FromStr for Tokens {
    type Err = TokenError;

    /// One a line: `TOKEN` for every run that has none of its own, or `RUN TOKEN`.
    fn from_str(text: &str) -> Result<Tokens, TokenError> {
        let mut found = Tokens::default();
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        for (line, words) in lines.map(|(at, line)| (at + 1, line.split_whitespace())) {
            let words: Vec<&str> = words.collect();
            let token = |text| Token::new(text).ok_or(TokenError::Token { line });
            match words[..] {
                [text] => found.any = Some(token(text)?),
                [run, text] => {
                    let run = Name::new(run).map_err(|source| TokenError::Run { line, source })?;
                    found.runs.insert(run, token(text)?);
                }
                _ => return Err(TokenError::Line { line }),
            }
        }
        match found.any.is_none() && found.runs.is_empty() {
            true => Err(TokenError::Empty),
            false => Ok(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str) -> Name {
        Name::new(name).unwrap()
    }

    #[test]
    fn a_run_is_served_with_its_own_token_or_with_the_common_one_where_it_has_none() {
        let (own, common) = ("a".repeat(64), "b".repeat(64));
        let tokens: Tokens = format!("fused {own}\n\n{common}\n").parse().unwrap();
        for (name, shown, admitted) in [
            ("fused", Some(&own), true),
            ("fused", Some(&common), false),
            ("plain", Some(&common), true),
            ("plain", Some(&own), false),
            ("plain", None, false),
        ] {
            assert_eq!(tokens.admit(&run(name), shown.map(String::as_str)), admitted, "{name}");
        }
        assert!(Tokens::default().admit(&run("fused"), None), "none is asked for");
    }

    #[test]
    fn what_is_no_token_is_refused_with_its_line() {
        for (text, says) in
            [("", "no token"), ("short", "line 1"), ("fused short", "line 1"), ("a b c", "line 1")]
        {
            let refused = text.parse::<Tokens>().unwrap_err().to_string();
            assert!(refused.contains(says), "{text:?}: {refused}");
        }
        let drawn = Token::draw().unwrap();
        assert!(
            Token::new(drawn.as_str()) == Some(drawn.clone()) && drawn != Token::draw().unwrap()
        );
        assert!(!format!("{drawn:?}").contains(drawn.as_str()));
    }
}
