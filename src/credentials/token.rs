//! The secret token that a rank sends with each call.

use std::collections::BTreeMap;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::identity::{Name, NameError};

/// Random bytes of a new token.
const DRAWN: usize = 32;
/// Fewest characters of a token: a shorter one could be guessed.
const SHORTEST: usize = 32;
/// Most characters of a token: it is sent in a header of each call.
const LONGEST: usize = 512;

/// Why a text cannot be read as tokens.
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

/// A secret token; its `Debug` output does not contain it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// A new token from the operating system's random numbers.
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

    /// Whether `shown` is this token. The time does not depend on how much of it is right: blake3
    /// compares hashes in constant time.
    fn is(&self, shown: &str) -> bool {
        blake3::hash(self.0.as_bytes()) == blake3::hash(shown.as_bytes())
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// The tokens that a coordinator accepts; if it has none, it serves every caller.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    any: Option<Token>,
    runs: BTreeMap<Name, Token>,
}

impl Tokens {
    /// One token that is valid for every run.
    pub fn any(token: Token) -> Tokens {
        Tokens { any: Some(token), runs: BTreeMap::new() }
    }

    /// The token of a run.
    pub fn of(&self, run: &Name) -> Option<&Token> {
        self.runs.get(run).or(self.any.as_ref())
    }

    /// Whether callers need a token.
    pub fn guard(&self) -> bool {
        self.any.is_some() || !self.runs.is_empty()
    }

    /// Whether a caller with this token may call for at least one run.
    pub fn admit_some(&self, shown: Option<&str>) -> bool {
        if !self.guard() {
            return true;
        }
        let known = || self.any.iter().chain(self.runs.values());
        shown.is_some_and(|shown| known().any(|token| token.is(shown)))
    }

    /// Whether a caller with this token may call for this run.
    pub fn admit(&self, run: &Name, shown: Option<&str>) -> bool {
        if !self.guard() {
            return true;
        }
        self.of(run).zip(shown).is_some_and(|(token, shown)| token.is(shown))
    }
}

impl FromStr for Tokens {
    type Err = TokenError;

    /// Reads one token per line: `TOKEN` for every run without a token of its own, or `RUN TOKEN`.
    fn from_str(text: &str) -> Result<Tokens, TokenError> {
        let mut tokens = Tokens::default();
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        for (line, words) in lines.map(|(at, line)| (at + 1, line.split_whitespace())) {
            let words: Vec<&str> = words.collect();
            let token = |text| Token::new(text).ok_or(TokenError::Token { line });
            match words[..] {
                [text] => tokens.any = Some(token(text)?),
                [run, text] => {
                    let run = Name::new(run).map_err(|source| TokenError::Run { line, source })?;
                    tokens.runs.insert(run, token(text)?);
                }
                _ => return Err(TokenError::Line { line }),
            }
        }
        match tokens.any.is_none() && tokens.runs.is_empty() {
            true => Err(TokenError::Empty),
            false => Ok(tokens),
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
        let (own_token, common) = ("a".repeat(64), "b".repeat(64));
        let tokens: Tokens = format!("fused {own_token}\n\n{common}\n").parse().unwrap();
        for (name, shown, admitted) in [
            ("fused", Some(&own_token), true),
            ("fused", Some(&common), false),
            ("plain", Some(&common), true),
            ("plain", Some(&own_token), false),
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
