//! Another declaration of the head with which everything would agree: plain data for the report.

use serde::Serialize;

/// A declaration with which everything agrees.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OtherDeclaration {
    /// The option of `tape.head`.
    pub option: &'static str,
    /// What the job declared.
    pub declared: String,
    /// What makes everything agree.
    pub instead: String,
    /// True where the value was fitted to what was captured.
    pub fitted: bool,
    /// Stages that fail as declared and pass with it.
    pub stages: Vec<&'static str>,
    /// Other options that would do as well, as they would be written.
    pub others: Vec<String>,
    /// What to look at, to tell a wrong declaration from wrong code.
    pub look: &'static str,
    /// True where the declaration is what is wrong, as far as the dump can say.
    pub misdeclared: bool,
}

impl OtherDeclaration {
    /// The whole in one sentence: both readings.
    pub fn sentence(&self) -> String {
        format!("your declaration or your code: {}", self.agreement())
    }

    /// The same where the declaration is what is wrong: the verdict.
    pub fn verdict(&self) -> String {
        format!("the declaration does not describe this job: {}", self.agreement())
    }

    /// What makes everything agree.
    fn agreement(&self) -> String {
        let others = match &self.others[..] {
            [] => String::new(),
            others => format!(" (or {})", others.join(", or ")),
        };
        format!(
            "with {}={}{others} declared in place of {} everything agrees ({}, which do not as declared)",
            self.option,
            self.instead,
            self.declared,
            self.stages.join(", ")
        )
    }
}
