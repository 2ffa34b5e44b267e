//! Heat maps: dq as tokens by microbatch and rank, dk as rows of the vocabulary by D with the
//! label hits of the rows beside it. Each block shows its worst element.
//!
//! What stands behind each block goes to the script as numbers; without it a table has the
//! worst blocks.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;

use askama::Template;
use askama::filters::Safe;
use base64::prelude::{BASE64_STANDARD, Engine};
use serde::Serialize;

use super::picture::{CLASSES, Drawn, ENDS, picture};
use super::{Markup, Page, markup};
use crate::compare::Cell;
use crate::number::{count, plural, ratio, short};
use crate::replay::maps::{Map, Source, Strip};
use crate::report::text::place;

/// Worst blocks that are listed under a map.
const LISTED: usize = 5;
/// Bytes of one block for the script.
const RECORD: usize = 44;
/// In place of a comparison's number: no block.
const NONE: u16 = u16::MAX;

/// What the script is told.
#[derive(Serialize)]
struct Data {
    maps: Vec<MapData>,
}

#[derive(Serialize)]
struct MapData {
    id: String,
    stage: &'static str,
    rows: &'static str,
    tile: usize,
    bands: usize,
    /// Whether label hits are known.
    hits: bool,
    strips: Vec<StripData>,
}

#[derive(Serialize)]
struct StripData {
    /// First column of it on the drawing.
    x: usize,
    columns: usize,
    bands: usize,
    /// Microbatch and rank of what the blocks are of.
    sources: Vec<(Option<u32>, Option<u32>)>,
    blocks: String,
}

/// Whether there is a map.
enum State {
    NotGathered,
    Nothing,
    Drawn,
}

#[derive(Template)]
#[template(path = "maps.html")]
struct Maps<'a> {
    id: &'a str,
    state: State,
    /// What the classes of colours are called.
    legend: Vec<String>,
    maps: Vec<MapShown>,
    /// Items of a list that are shown.
    items: usize,
}

/// One map; tensors of several shapes are figures of their own.
struct MapShown {
    name: String,
    of_tokens: bool,
    figures: Vec<Figure>,
    all_figures: usize,
}

struct Figure {
    id: String,
    caption: String,
    /// The worst block.
    words: String,
    bands: usize,
    across: usize,
    picture: Markup,
    /// The worst blocks that are not equal, a line of a table each.
    worst: Vec<Vec<String>>,
}

impl Page<'_> {
    /// The section of the maps, and what the script needs of them.
    pub(super) fn maps(&self) -> (Markup, String) {
        let own_maps = self.report.drawings.as_ref().map(|drawn| &drawn.maps[..]);
        let other = self.report.against.as_ref().and_then(|against| against.drawings.as_ref());
        let other = other.map(|drawn| &drawn.maps[..]).unwrap_or_default();
        let state = match own_maps {
            None => State::NotGathered,
            Some([]) if other.is_empty() => State::Nothing,
            Some(_) => State::Drawn,
        };
        let mut data = Data { maps: Vec::new() };
        let mut maps = Vec::new();
        for map in own_maps.unwrap_or_default() {
            maps.push(self.map(map, "", &mut data));
        }
        for map in other {
            maps.push(self.map(map, "the other run's ", &mut data));
        }
        let (legend, items) = ((0..CLASSES).map(colour).collect(), self.detail.items);
        let section = markup(&Maps { id: &self.id, state, legend, maps, items });
        (section, serde_json::to_string(&data).unwrap_or_default())
    }

    fn map(&self, map: &Map, whose: &str, data: &mut Data) -> MapShown {
        // Tokens stand beside each other.
        let groups: Vec<&[Strip]> = match map.of_tokens {
            true => vec![&map.strips[..]],
            false => map.strips.chunks(1).collect(),
        };
        let mut figures = Vec::new();
        for strips in self.shown(&groups) {
            let mut x = 0;
            let mut drawn = Vec::new();
            for strip in *strips {
                let halvings = 0..self.detail.halvings;
                let chart = halvings
                    .fold(Cow::Borrowed(&strip.chart), |chart, _| Cow::Owned(chart.halved()));
                let across = chart.size.1;
                drawn.push(Drawn { strip, chart, x });
                x += across + 1;
            }
            if x > 0 {
                figures.push(self.figure(map, (&drawn, x - 1), data));
            }
        }
        let (name, of_tokens) = (format!("{whose}{}", map.stage), map.of_tokens);
        MapShown { name, of_tokens, figures, all_figures: groups.len() }
    }

    fn figure(&self, map: &Map, (drawn, across): (&[Drawn<'_>], usize), data: &mut Data) -> Figure {
        let id = format!("{}-map-{}", self.id, data.maps.len());
        let bands = drawn.iter().map(|drawn| drawn.chart.size.0).max().unwrap_or(0);
        let worst = worst_of(drawn);
        let words = match worst.first() {
            None => "nothing was compared".into(),
            Some((_, cell)) if equal(cell) => "every element is equal".into(),
            Some((drawn, cell)) => format!("worst: {}", sentence(map, drawn.strip, cell)),
        };
        let mut svg = String::new();
        picture(&mut svg, map, drawn, (bands, across));
        let rows = if map.of_tokens { "token" } else { "row" };
        let strips = drawn.iter().map(|drawn| drawn.data(map)).collect();
        let (stage, tile, hits) = (map.stage.name(), map.tile, !map.hits.is_empty());
        data.maps.push(MapData { id: id.clone(), stage, rows, tile, bands, hits, strips });
        let off = worst.into_iter().filter(|(_, cell)| !equal(cell));
        let worst = off.map(|(drawn, cell)| listed(map, drawn.strip, cell)).collect();
        let caption = caption(map, drawn);
        Figure { id, caption, words, bands, across, picture: Safe(svg), worst }
    }
}

/// What a class of colours is called.
fn colour(class: usize) -> String {
    match class {
        0 => "equal".into(),
        1 => "below 1 σ".into(),
        at if at < CLASSES - 1 => format!("{} to {} σ", ENDS[at - 2], ENDS[at - 1]),
        _ => format!("{} σ and more", ENDS[ENDS.len() - 1]),
    }
}

/// The worst blocks, of equals the first one first.
fn worst_of<'d>(drawn: &'d [Drawn<'d>]) -> Vec<(&'d Drawn<'d>, &'d Cell)> {
    let cells =
        |drawn: &'d Drawn<'d>| drawn.chart.cells.iter().flatten().map(move |cell| (drawn, cell));
    let mut worst: Vec<_> = drawn.iter().flat_map(cells).collect();
    worst.sort_by(|(_, a), (_, b)| match (a.is_worse_than(b), b.is_worse_than(a)) {
        (true, _) => std::cmp::Ordering::Less,
        (_, true) => std::cmp::Ordering::Greater,
        _ => std::cmp::Ordering::Equal,
    });
    worst.truncate(LISTED);
    worst
}

/// What a map is of, in words.
fn caption(map: &Map, drawn: &[Drawn<'_>]) -> String {
    let shape = drawn[0].chart.shape;
    let block = drawn[0].chart.block;
    let size_of_block = format!("a block is {} x {}", count(block.0 as u64), count(block.1 as u64));
    let mut text = match map.of_tokens {
        true => format!(
            "for each microbatch and rank its tokens down, counted from its first, and their {} \
             columns across; {size_of_block}, tiles of {} tokens",
            shape.1, map.tile
        ),
        false => format!(
            "{} rows of the vocabulary down, D = {} across, the worst of {}; {size_of_block}, tiles of {} rows; \
             {}",
            count(shape.0 as u64),
            shape.1,
            plural(drawn[0].strip.sources.len() as u64, "comparison"),
            map.tile,
            match map.hits.is_empty() {
                true => "rows of one rank's part, so without label hits",
                false => "at the right how often the rows are labels",
            }
        ),
    };
    if map.left_out > 0 {
        let _ = write!(
            text,
            "; the {} with the least errors are left out",
            plural(map.left_out as u64, "strip")
        );
    }
    text
}

fn source_of(strip: &Strip, cell: &Cell) -> Source {
    strip.sources.get(cell.source as usize).copied().unwrap_or((None, None))
}

pub(super) fn whose((microbatch, rank): Source) -> String {
    place(microbatch.map(|mb| mb.0), rank.map(|rank| rank.0))
}

/// One block in words: the element, both values, how far off.
fn sentence(map: &Map, strip: &Strip, cell: &Cell) -> String {
    let worst = &cell.worst;
    let mut text = format!(
        "[{}, {}] captured {} reference {}, {}",
        worst.index.0,
        worst.index.1,
        short(worst.captured),
        short(worst.reference),
        off(cell)
    );
    let source = whose(source_of(strip, cell));
    if !source.is_empty() {
        let _ = write!(text, ", {source}");
    }
    if let Some(hits) = hits_of(map, cell) {
        let _ = write!(text, ", a label {}", plural(u64::from(hits), "time"));
    }
    text
}

fn equal(cell: &Cell) -> bool {
    cell.nonfinite == 0 && cell.worst.score == 0.0
}

fn off(cell: &Cell) -> String {
    match (cell.nonfinite > 0, cell.worst.score) {
        (true, _) => "not a finite number".into(),
        (_, 0.0) => "equal".into(),
        (_, score) => format!("{} σ", ratio(score)),
    }
}

fn hits_of(map: &Map, cell: &Cell) -> Option<u32> {
    map.hits.get(cell.worst.index.0 as usize).copied()
}

/// One block as a line of a table.
fn listed(map: &Map, strip: &Strip, cell: &Cell) -> Vec<String> {
    let (row, column) = cell.worst.index;
    let mut texts = vec![
        format!("[{row}, {column}]"),
        short(cell.worst.captured),
        short(cell.worst.reference),
        off(cell),
        format!("{} of {}", count(cell.exceeding), count(cell.elements)),
        whose(source_of(strip, cell)),
    ];
    let hits = || hits_of(map, cell).map_or("-".into(), |n| count(n.into()));
    texts.extend((!map.of_tokens).then(hits));
    texts
}

impl Drawn<'_> {
    /// The blocks as numbers, little endian: row f64, column u32, captured f64, reference f64,
    /// score f32, elements beyond their bound u32, label hits u32, values that are no
    /// numbers u16, whose u16.
    fn data(&self, map: &Map) -> StripData {
        let mut numbers: BTreeMap<u32, u16> = BTreeMap::new();
        let mut sources = Vec::new();
        let mut bytes = Vec::with_capacity(self.chart.cells.len() * RECORD);
        for cell in &self.chart.cells {
            let Some(cell) = cell else {
                bytes.resize(bytes.len() + RECORD - 2, 0);
                bytes.extend(NONE.to_le_bytes());
                continue;
            };
            let number = *numbers.entry(cell.source).or_insert_with(|| {
                let (microbatch, rank) = source_of(self.strip, cell);
                sources.push((microbatch.map(|mb| mb.0), rank.map(|rank| rank.0)));
                (sources.len() - 1) as u16
            });
            let worst = &cell.worst;
            let score = if cell.nonfinite > 0 { f32::NAN } else { worst.score as f32 };
            let few = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
            bytes.extend((worst.index.0 as f64).to_le_bytes());
            bytes.extend(few(worst.index.1).to_le_bytes());
            bytes.extend(worst.captured.to_le_bytes());
            bytes.extend(worst.reference.to_le_bytes());
            bytes.extend(score.to_le_bytes());
            bytes.extend(few(cell.exceeding).to_le_bytes());
            bytes.extend(hits_of(map, cell).unwrap_or(0).to_le_bytes());
            bytes.extend((cell.nonfinite.min(u64::from(u16::MAX)) as u16).to_le_bytes());
            bytes.extend(number.to_le_bytes());
        }
        let (bands, columns) = self.chart.size;
        StripData { x: self.x, columns, bands, sources, blocks: BASE64_STANDARD.encode(&bytes) }
    }
}
