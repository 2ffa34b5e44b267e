//! What a person or a program reads of a replay: plain data in, text or JSON
//! out. The one verdict that is made here is what all findings come to, see `verdict`.

mod against;
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
pub mod step_checks;
pub mod text;
pub mod trajectory;
pub mod verdict;

pub use schema::Report;
