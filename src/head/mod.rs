//! The declaration of the loss head, as the job made it with `tape.head`.
//!
//! It contains only what was declared: an absent dtype is *unknown*, not f32, and the replayer
//! treats it as unknown. The replayer checks whether the options fit together and fit the tensors.

mod options;
mod path;
mod source;
mod span;
mod values;
mod written;

pub use options::{GRPO_OPTIONS, GrpoDeclaration, HeadDeclaration, HeadOption, OPTIONS, written};
pub use path::{DeclaredTiles, PolicyDeclaration, SumDeclaration};
pub use source::{DTYPES, Source};
pub use span::{Microbatches, Ranks, Sequences, Span};
pub use values::{
    Denominator, KLayout, KlEstimator, Loss, LossAverage, LossReduction, MicrobatchReduction,
    RatioLevel, Scope, SmoothingFormula,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_denominator_survives_json() {
        for (text, value) in [
            ("\"valid\"", Denominator::Valid),
            ("\"weights\"", Denominator::Weights),
            ("1024.0", Denominator::Number(1024.0)),
        ] {
            assert_eq!(serde_json::from_str::<Denominator>(text).unwrap(), value);
            assert_eq!(serde_json::to_string(&value).unwrap(), text);
        }
        let refused = serde_json::from_str::<Denominator>("\"tokens\"").unwrap_err().to_string();
        let wanted = "\"tokens\" is none: choose \"valid\" (tokens that are not ignored), \"all\"";
        assert!(refused.starts_with(wanted), "{refused}");
        let refused = serde_json::from_str::<Denominator>("[1]").unwrap_err().to_string();
        assert!(refused.contains("a number or a word is needed"), "{refused}");
    }

    #[test]
    fn an_infinite_mask_value_survives_json() {
        for mask_value in [None, Some(f64::NEG_INFINITY), Some(-2.38e38)] {
            let head = HeadDeclaration { mask_value, ..HeadDeclaration::default() };
            let json = serde_json::to_string(&head).unwrap();
            assert_eq!(serde_json::from_str::<HeadDeclaration>(&json).unwrap(), head, "{json}");
        }
        assert!(serde_json::from_str::<HeadDeclaration>(r#"{"mask_value": "low"}"#).is_err());
    }

    #[test]
    fn a_misspelt_option_is_an_error_not_a_default() {
        let error = serde_json::from_str::<HeadDeclaration>(r#"{"redaction": "mean"}"#);
        assert!(error.unwrap_err().to_string().contains("redaction"));
    }

    /// Goal: the words that the table lists for Python, docs and messages are the words that the
    /// parser accepts. Method: the parser's error for an unknown word lists them.
    #[test]
    fn the_words_of_an_option_are_those_that_its_reader_takes() {
        fn words_read<Of: serde::de::DeserializeOwned>(name: &str) -> Vec<String> {
            let refused = serde_json::from_str::<Of>(&format!("{{\"{name}\": \"?\"}}"));
            let said = refused.err().expect("no word").to_string();
            said.split('`').skip(3).step_by(2).map(|word| format!("\"{word}\"")).collect()
        }
        fn same<Of: serde::de::DeserializeOwned + Default>(all: &[HeadOption<Of>]) -> usize {
            let of_words = all.iter().filter(|option| !option.words().is_empty());
            of_words.map(|option| (option, words_read::<Of>(option.name))).fold(
                0,
                |n, (option, read)| {
                    let mut told = option.words();
                    assert!(
                        told[0] == option.default(),
                        "{}: the default comes first",
                        option.name
                    );
                    told.sort_unstable();
                    let mut read: Vec<&str> = read.iter().map(String::as_str).collect();
                    read.sort_unstable();
                    assert_eq!(told, read, "{}", option.name);
                    n + 1
                },
            )
        }
        assert_eq!((same(OPTIONS), same(GRPO_OPTIONS)), (5, 3));
    }

    #[test]
    fn what_nobody_mentions_is_good_and_written_as_python_has_it() {
        let head = HeadDeclaration::default();
        assert!(OPTIONS.iter().all(|option| option.is_good(&head)));
        let value_of = |name| written(&head, name);
        assert_eq!(
            [value_of("gradient_filter"), value_of("z_loss"), value_of("z_loss_in_loss")],
            ["None", "0.0", "True"]
        );
        assert_eq!([value_of("scope"), value_of("grpo.kl")], ["\"global\"", "None"]);
    }
}
