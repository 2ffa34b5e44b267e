//! Over which tokens the denominator of a mean loss counts: a choice of ranks, of microbatches and
//! of sequences. The three most common choices have names.

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Scope;

/// Which ranks' tokens are counted together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "lowercase",
    expecting = "ranks: \"all\", \"one\" or a list of axes is needed"
)]
pub enum Ranks {
    /// The tokens of all ranks.
    #[default]
    All,
    /// Each rank counts its own tokens. Ranks that hold the same tokens count them once.
    One,
    /// The tokens of the ranks along these axes of the mesh; ranks that differ on another axis
    /// count separately.
    #[serde(untagged)]
    Axes(Vec<String>),
}

/// Which microbatches' tokens are counted together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Microbatches {
    /// All microbatches of the step.
    #[default]
    All,
    /// Each microbatch counts its own tokens.
    One,
}

/// How the mean is taken over sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sequences {
    /// One mean over the tokens of all sequences.
    #[default]
    All,
    /// The mean of each sequence first; the loss is the mean of those over the sequences in which
    /// at least one token counts.
    Each,
}

/// Over which tokens the denominator counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Span {
    pub ranks: Ranks,
    pub microbatches: Microbatches,
    pub sequences: Sequences,
}

/// A span in parts: how one without a name is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename = "scope")]
struct Parts {
    ranks: Ranks,
    microbatches: Microbatches,
    sequences: Sequences,
}

impl Default for Parts {
    fn default() -> Self {
        Span::default().parts()
    }
}

impl Span {
    /// The span's name, if it has one.
    pub fn named(&self) -> Option<Scope> {
        let scopes = [Scope::Global, Scope::Microbatch, Scope::Rank];
        scopes.into_iter().find(|&scope| *self == Span::from(scope))
    }

    /// Every span that names no axis of a mesh.
    pub fn without_axes() -> Vec<Span> {
        let mut all = Vec::new();
        for sequences in [Sequences::All, Sequences::Each] {
            for microbatches in [Microbatches::All, Microbatches::One] {
                for ranks in [Ranks::All, Ranks::One] {
                    all.push(Span { ranks, microbatches, sequences });
                }
            }
        }
        all
    }

    fn parts(&self) -> Parts {
        let Span { ranks, microbatches, sequences } = self.clone();
        Parts { ranks, microbatches, sequences }
    }
}

impl From<Scope> for Span {
    fn from(scope: Scope) -> Span {
        let (ranks, microbatches) = match scope {
            Scope::Global => (Ranks::All, Microbatches::All),
            Scope::Microbatch => (Ranks::All, Microbatches::One),
            Scope::Rank => (Ranks::One, Microbatches::One),
        };
        Span { ranks, microbatches, sequences: Sequences::All }
    }
}

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(scope) = self.named() {
            return f.write_str(&format!("{scope:?}").to_lowercase());
        }
        let ranks = match &self.ranks {
            Ranks::All => "all ranks".to_string(),
            Ranks::One => "each rank".to_string(),
            Ranks::Axes(axes) => format!("ranks along {}", axes.join(" and ")),
        };
        let microbatches = match self.microbatches {
            Microbatches::All => "all microbatches",
            Microbatches::One => "each microbatch",
        };
        let each = match self.sequences {
            Sequences::All => "",
            Sequences::Each => ", a mean of sequence means",
        };
        write!(f, "{ranks}, {microbatches}{each}")
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.named() {
            Some(scope) => scope.serialize(to),
            None => self.parts().serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Span, D::Error> {
        from.deserialize_any(Reader)
    }
}

/// Parses a name or the parts; its error says what is expected.
struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Span;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(
            "\"global\", \"microbatch\", \"rank\", or {\"ranks\": \"all\", \"one\" or axes of the mesh, \"microbatches\": \"all\" or \"one\", \"sequences\": \"all\" or \"each\"}",
        )
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<Span, E> {
        let scopes = [Scope::Global, Scope::Microbatch, Scope::Rank];
        let named = scopes.into_iter().find(|scope| format!("{scope:?}").to_lowercase() == word);
        named.map(Span::from).ok_or_else(|| E::invalid_value(de::Unexpected::Str(word), &self))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Span, A::Error> {
        let Parts { ranks, microbatches, sequences } =
            Parts::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Span { ranks, microbatches, sequences })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Span, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn names_are_choices_of_ranks_and_microbatches_and_survive_json_as_names() {
        for (text, ranks, microbatches) in [
            ("\"global\"", Ranks::All, Microbatches::All),
            ("\"microbatch\"", Ranks::All, Microbatches::One),
            ("\"rank\"", Ranks::One, Microbatches::One),
        ] {
            let span = read(text).unwrap();
            assert_eq!((&span.ranks, span.microbatches), (&ranks, microbatches));
            assert_eq!(serde_json::to_string(&span).unwrap(), text);
        }
        let by_parts = read(r#"{"ranks": "one", "microbatches": "one"}"#).unwrap();
        assert_eq!(by_parts.named(), Some(Scope::Rank));
    }

    #[test]
    fn a_choice_without_a_name_survives_json_and_is_told_in_words() {
        for (text, words) in [
            (r#"{"ranks": "one"}"#, "each rank, all microbatches"),
            (r#"{"ranks": ["data"]}"#, "ranks along data, all microbatches"),
            (r#"{"sequences": "each"}"#, "all ranks, all microbatches, a mean of sequence means"),
        ] {
            let span = read(text).unwrap();
            assert_eq!(span.to_string(), words);
            assert_eq!(read(&serde_json::to_string(&span).unwrap()).unwrap(), span);
        }
    }

    #[test]
    fn what_is_no_scope_is_refused_with_what_is() {
        for text in ["\"batch\"", "3", r#"{"rank": "one"}"#, r#"{"sequences": "one"}"#] {
            let error = read(text).unwrap_err();
            assert!(error.contains("sequences") || error.contains("each"), "{error}");
        }
    }
}
