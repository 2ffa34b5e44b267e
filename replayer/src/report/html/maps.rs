//! Heat maps: dq as tokens by microbatch and rank, dk as rows of the vocabulary by D with the
//! label hits of the rows beside it. Each block shows its worst element.
//!
//! What stands behind each block goes to the script as numbers; without it a table has the
//! worst blocks.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::Page;
use super::escape::{base64, esc};
use super::picture::{CLASSES, Drawn, ENDS, picture};
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

impl Page<'_> {
    /// The section of the maps; what the script needs of them comes back.
    pub(super) fn maps(&self, out: &mut String) -> String {
        self.section(out, "maps", "Heat maps of dq and dk");
        let mut data = Data { maps: Vec::new() };
        let own = self.report.drawings.as_ref().map(|drawn| &drawn.maps[..]);
        let other = self.report.against.as_ref().and_then(|against| against.drawings.as_ref());
        let other = other.map(|drawn| &drawn.maps[..]).unwrap_or_default();
        match own {
            None => {
                out.push_str("<p>Not gathered: <code>replay --report</code> gathers them.</p>\n")
            }
            Some([]) if other.is_empty() => out.push_str(
                "<p>There is none: no dq and no dk was compared element by element. \
                 What was not checked, and why, is below.</p>\n",
            ),
            Some(_) => self.explained(out),
        }
        for map in own.unwrap_or_default() {
            self.map(out, map, "", &mut data);
        }
        for map in other {
            self.map(out, map, "the other run's ", &mut data);
        }
        out.push_str("</section>\n");
        serde_json::to_string(&data).unwrap_or_default()
    }

    fn explained(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "<p class=\"bt-note\" id=\"{}-how\">A block's colour is its worst element: |error| over the \
             standard deviation σ that rounding explains. A dot: an element beyond its bound. A \
             cross: a value that is no number. The ring: the worst block. Lines: tiles. Point at a \
             block, or focus a map and use the arrow keys, Home, End, Page Up, Page Down; W goes to \
             the worst block, + and - change the size.</p>",
            self.id
        );
        let _ = write!(out, "<p class=\"bt-legend\" aria-label=\"colours\">");
        for class in 0..CLASSES {
            let name = match class {
                0 => "equal".to_string(),
                1 => "below 1 σ".into(),
                at if at < CLASSES - 1 => format!("{} to {} σ", ENDS[at - 2], ENDS[at - 1]),
                _ => format!("{} σ and more", ENDS[ENDS.len() - 1]),
            };
            let _ = write!(
                out,
                "<span><svg width=\"18\" height=\"12\" aria-hidden=\"true\"><path class=\"bt-c{class}\" \
                 stroke-width=\"12\" d=\"M0 6h18\"/></svg> {name}</span> "
            );
        }
        out.push_str("</p>\n");
    }

    fn map(&self, out: &mut String, map: &Map, whose: &str, data: &mut Data) {
        // Tokens stand beside each other; tensors of several shapes are drawings of their own.
        let groups: Vec<&[Strip]> = match map.of_tokens {
            true => vec![&map.strips[..]],
            false => map.strips.chunks(1).collect(),
        };
        let all = groups.len();
        for strips in groups.into_iter().take(self.detail.items) {
            let mut x = 0;
            let mut drawn = Vec::new();
            for strip in strips {
                let halvings = 0..self.detail.halvings;
                let chart = halvings
                    .fold(Cow::Borrowed(&strip.chart), |chart, _| Cow::Owned(chart.halved()));
                let across = chart.size.1;
                drawn.push(Drawn { strip, chart, x });
                x += across + 1;
            }
            if x > 0 {
                self.figure(out, map, (&drawn, x - 1), whose, data);
            }
        }
        self.more(out, all, "shapes of this map");
    }

    fn figure(
        &self,
        out: &mut String,
        map: &Map,
        (drawn, across): (&[Drawn<'_>], usize),
        whose: &str,
        data: &mut Data,
    ) {
        let id = format!("{}-map-{}", self.id, data.maps.len());
        let bands = drawn.iter().map(|of| of.chart.size.0).max().unwrap_or(0);
        let worst = worst_of(drawn);
        let words = match worst.first() {
            None => "nothing was compared".into(),
            Some((_, cell)) if equal(cell) => "every element is equal".into(),
            Some((of, cell)) => format!("worst: {}", sentence(map, of.strip, cell)),
        };
        // The line stands before the map: it is read while the pointer is on the map.
        let _ = writeln!(
            out,
            "<figure class=\"bt-figure\"><figcaption><strong>{}{}</strong>: {}</figcaption>\n\
             <output class=\"bt-status\" id=\"{id}-status\" aria-live=\"polite\">{}</output>\n\
             <div class=\"bt-grid\" id=\"{id}\" role=\"grid\" tabindex=\"0\" aria-rowcount=\"{bands}\" \
             aria-colcount=\"{across}\" aria-label=\"heat map of {}{}\" aria-describedby=\"{}-how\">",
            esc(whose),
            map.stage,
            esc(&caption(map, drawn)),
            esc(&words),
            esc(whose),
            map.stage,
            self.id
        );
        picture(out, map, drawn, (bands, across));
        let _ = writeln!(
            out,
            "<div role=\"row\" class=\"bt-read\"><span role=\"gridcell\" id=\"{id}-cell\"></span></div></div>"
        );
        let off: Vec<_> = worst.into_iter().filter(|(_, cell)| !equal(cell)).collect();
        if !off.is_empty() {
            listed(out, map, &off);
        }
        out.push_str("</figure>\n");
        let rows = if map.of_tokens { "token" } else { "row" };
        let strips = drawn.iter().map(|of| of.data(map)).collect();
        let (stage, tile, hits) = (map.stage.name(), map.tile, !map.hits.is_empty());
        data.maps.push(MapData { id, stage, rows, tile, bands, hits, strips });
    }
}

/// The worst blocks, of equals the first one first.
fn worst_of<'d>(drawn: &'d [Drawn<'d>]) -> Vec<(&'d Drawn<'d>, &'d Cell)> {
    let cells = |of: &'d Drawn<'d>| of.chart.cells.iter().flatten().map(move |cell| (of, cell));
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
    let of = format!("a block is {} x {}", count(block.0 as u64), count(block.1 as u64));
    let mut text = match map.of_tokens {
        true => format!(
            "for each microbatch and rank its tokens down, counted from its first, and their {} \
             columns across; {of}, tiles of {} tokens",
            shape.1, map.tile
        ),
        false => format!(
            "{} rows of the vocabulary down, D = {} across, the worst of {}; {of}, tiles of {} rows; \
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
    strip.sources.get(cell.of as usize).copied().unwrap_or((None, None))
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
    let at = whose(source_of(strip, cell));
    if !at.is_empty() {
        let _ = write!(text, ", {at}");
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

fn listed(out: &mut String, map: &Map, worst: &[(&Drawn<'_>, &Cell)]) {
    out.push_str("<div class=\"bt-scroll\"><table class=\"bt-worst-blocks\"><caption>worst blocks</caption><thead><tr><th scope=\"col\">element</th>\
         <th scope=\"col\">captured</th><th scope=\"col\">reference</th><th scope=\"col\">|error|</th>\
         <th scope=\"col\">beyond bound</th><th scope=\"col\">where</th>");
    if !map.of_tokens {
        out.push_str("<th scope=\"col\">label hits</th>");
    }
    out.push_str("</tr></thead><tbody>\n");
    for (of, cell) in worst {
        let (row, column) = cell.worst.index;
        let mut texts = vec![
            format!("[{row}, {column}]"),
            short(cell.worst.captured),
            short(cell.worst.reference),
            off(cell),
            format!("{} of {}", count(cell.exceeding), count(cell.elements)),
            whose(source_of(of.strip, cell)),
        ];
        texts.extend(
            (!map.of_tokens).then(|| hits_of(map, cell).map_or("-".into(), |n| count(n.into()))),
        );
        let cells: Vec<String> =
            texts.iter().map(|text| format!("<td class=\"bt-num\">{}</td>", esc(text))).collect();
        let _ = writeln!(out, "<tr>{}</tr>", cells.concat());
    }
    out.push_str("</tbody></table></div>\n");
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
            let number = *numbers.entry(cell.of).or_insert_with(|| {
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
        StripData { x: self.x, columns, bands, sources, blocks: base64(&bytes) }
    }
}
