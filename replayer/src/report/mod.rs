//! The reports of a replay for people and programs: text, JSON and HTML from plain data. Nothing is
//! judged here, except that `verdict` combines all findings into one verdict.

mod against;
mod algebra;
pub mod catalogue;
mod causes;
pub mod checked;
pub mod drawings;
pub mod dumped;
pub mod html;
pub mod inventory;
pub mod listed;
mod measured;
mod norm;
pub mod precision;
pub mod schema;
mod seen;
pub mod shown;
mod step_against;
pub mod step_checks;
pub mod text;
pub mod trajectory;
pub mod verdict;

pub use schema::Report;
