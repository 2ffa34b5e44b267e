//! Heat maps: dq as tokens by microbatch and rank, dk as rows of the vocabulary by D with the
//! label hits of the rows beside it. Each block shows its worst element.
//!
//! A map is drawn as one path for each class of scores, so that it prints, keeps its colours
//! in either theme and takes a few bytes a block. What stands behind each block goes to the
//! script as numbers; without it a table has the worst blocks.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::Page;
use super::escape::{base64, esc};
use crate::compare::{Cell, Chart};
use crate::replay::maps::{Map, Source, Strip};
use crate::report::number::{count, plural, ratio, short};
use crate::report::text::place;

/// Upper ends of the classes of scores; a block without any error has a class of its own.
const ENDS: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 6.0, 16.0, 64.0];
/// Classes, with that of no error first and all beyond the ends last.
const CLASSES: usize = ENDS.len() + 2;
/// Worst blocks that are listed under a map.
const LISTED: usize = 5;
/// Room for the indices of rows and columns.
const LEFT: f64 = 58.0;
const TOP: f64 = 30.0;
/// Width of the bars of label hits.
const HITS: f64 = 90.0;
/// Room for them and for what they are called.
const SIDE: f64 = 190.0;
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

/// One strip as it is drawn.
struct Drawn<'a> {
    strip: &'a Strip,
    chart: Cow<'a, Chart>,
    x: usize,
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
                1 => "&lt; 1σ".into(),
                at if at < CLASSES - 1 => format!("{} to {}", ENDS[at - 2], ENDS[at - 1]),
                _ => format!("{} and more", ENDS[ENDS.len() - 1]),
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
        let _ = writeln!(
            out,
            "<figure class=\"bt-figure\"><figcaption><strong>{}{}</strong>: {}</figcaption>\n\
             <div class=\"bt-grid\" id=\"{id}\" role=\"grid\" tabindex=\"0\" aria-rowcount=\"{bands}\" \
             aria-colcount=\"{across}\" aria-label=\"heat map of {}{}\" aria-describedby=\"{}-how\">",
            esc(whose),
            map.stage,
            esc(&caption(map, drawn)),
            esc(whose),
            map.stage,
            self.id
        );
        picture(out, map, drawn, (bands, across));
        let _ = writeln!(
            out,
            "<div role=\"row\" class=\"bt-read\"><span role=\"gridcell\" id=\"{id}-cell\"></span></div></div>"
        );
        let mut worst: Vec<(&Drawn<'_>, &Cell)> = Vec::new();
        for of in drawn {
            worst.extend(of.chart.cells.iter().flatten().map(|cell| (of, cell)));
        }
        // Stable: of equals the first stays first.
        worst.sort_by(|(_, a), (_, b)| match (a.is_worse_than(b), b.is_worse_than(a)) {
            (true, _) => std::cmp::Ordering::Less,
            (_, true) => std::cmp::Ordering::Greater,
            _ => std::cmp::Ordering::Equal,
        });
        worst.truncate(LISTED);
        let words = worst.first().map_or("nothing was compared".into(), |(of, cell)| {
            format!("worst: {}", sentence(map, of.strip, cell))
        });
        let _ = writeln!(
            out,
            "<output class=\"bt-status\" id=\"{id}-status\" aria-live=\"polite\">{}</output>",
            esc(&words)
        );
        listed(out, map, &worst);
        out.push_str("</figure>\n");
        let rows = if map.of_tokens { "token" } else { "row" };
        let strips = drawn.iter().map(|of| of.data(map)).collect();
        let (stage, tile, hits) = (map.stage.name(), map.tile, !map.hits.is_empty());
        data.maps.push(MapData { id, stage, rows, tile, bands, hits, strips });
    }
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

fn whose((microbatch, rank): Source) -> String {
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

/// The class of a block's colour.
fn class(cell: &Cell) -> usize {
    match cell.worst.score {
        _ if cell.nonfinite > 0 => CLASSES - 1,
        0.0 => 0,
        score => ENDS.iter().position(|&end| score < end).map_or(CLASSES - 1, |at| at + 1),
    }
}

/// The picture in units of its own: indices at the left, label hits at the right.
fn picture(out: &mut String, map: &Map, drawn: &[Drawn<'_>], (bands, across): (usize, usize)) {
    let size = |n: usize, room: f64| (room / n.max(1) as f64).clamp(5.0, 22.0).floor();
    let (kx, ky) = (size(across, 640.0), size(bands, 420.0));
    let (width, height) = (kx * across as f64, ky * bands as f64);
    let side = if map.hits.is_empty() { 10.0 } else { SIDE };
    let _ = writeln!(
        out,
        "<svg aria-hidden=\"true\" focusable=\"false\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" height=\"{h}\">",
        w = LEFT + width + side,
        h = TOP + height + 8.0
    );
    let _ = writeln!(out, "<g transform=\"translate({LEFT} {TOP}) scale({kx} {ky})\">");
    blocks(out, drawn);
    tiles(out, map, drawn);
    let _ = writeln!(
        out,
        "<rect class=\"bt-hit\" width=\"{across}\" height=\"{bands}\"/>\
         <rect class=\"bt-cursor\" width=\"1\" height=\"1\" visibility=\"hidden\"/></g>"
    );
    axes(out, map, drawn, (kx, ky));
    if !map.hits.is_empty() {
        hit_bars(out, map, &drawn[0].chart, (LEFT + width + 6.0, ky));
    }
    out.push_str("</svg>\n");
}

fn blocks(out: &mut String, drawn: &[Drawn<'_>]) {
    let mut paths: [String; CLASSES] = Default::default();
    let (mut dots, mut crosses) = (String::new(), String::new());
    let mut ring: Option<(&Cell, usize, usize)> = None;
    for of in drawn {
        let across = of.chart.size.1.max(1);
        for (y, row) in of.chart.cells.chunks(across).enumerate() {
            let mut at = 0;
            while at < row.len() {
                let Some(cell) = &row[at] else {
                    at += 1;
                    continue;
                };
                let own = class(cell);
                let same =
                    |cell: &Option<Cell>| cell.as_ref().is_some_and(|cell| class(cell) == own);
                let run = row[at..].iter().take_while(|cell| same(cell)).count();
                let _ = write!(paths[own], "M{} {y}.5h{run}", of.x + at);
                at += run;
            }
            for (at, cell) in row.iter().enumerate() {
                let Some(cell) = cell else { continue };
                let x = of.x + at;
                match (cell.nonfinite > 0, cell.exceeding > 0) {
                    (true, _) => drop(write!(crosses, "M{x}.2 {y}.2l.6 .6m0-.6l-.6 .6")),
                    (_, true) => drop(write!(dots, "M{x}.5 {y}.5h0")),
                    _ => {}
                }
                if ring.is_none_or(|(worst, ..)| cell.is_worse_than(worst)) {
                    ring = Some((cell, x, y));
                }
            }
        }
    }
    for (class, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let _ = writeln!(out, "<path class=\"bt-c{class}\" d=\"{path}\"/>");
    }
    for (class, path) in [("bt-dots", dots), ("bt-crosses", crosses)] {
        if !path.is_empty() {
            let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}\"/>");
        }
    }
    if let Some((_, x, y)) = ring {
        let _ =
            writeln!(out, "<rect class=\"bt-ring\" x=\"{x}\" y=\"{y}\" width=\"1\" height=\"1\"/>");
    }
}

/// Lines where tiles begin, as long as they are no more than every second block.
fn tiles(out: &mut String, map: &Map, drawn: &[Drawn<'_>]) {
    let mut path = String::new();
    for of in drawn {
        let (rows, block) = (of.chart.shape.0, of.chart.block.0);
        if map.tile < 2 * block {
            continue;
        }
        for start in (map.tile..rows).step_by(map.tile) {
            let y = start as f64 / block as f64;
            let _ = write!(path, "M{} {y:.3}h{}", of.x, of.chart.size.1);
        }
    }
    if !path.is_empty() {
        let _ = writeln!(out, "<path class=\"bt-tiles\" d=\"{path}\"/>");
    }
}

fn axes(out: &mut String, map: &Map, drawn: &[Drawn<'_>], (kx, ky): (f64, f64)) {
    let tallest = drawn.iter().max_by_key(|of| of.chart.size.0);
    let Some(chart) = tallest.map(|of| &of.chart) else { return };
    let every = (chart.size.0 as f64 * ky / 60.0).max(1.0);
    let step = (chart.size.0 as f64 / every).ceil().max(1.0) as usize;
    for band in (0..chart.size.0).step_by(step) {
        let y = TOP + ky * (band as f64 + 0.5) + 4.0;
        let _ = write!(
            out,
            "<text class=\"bt-axis bt-end\" x=\"{}\" y=\"{y:.0}\">{}</text>",
            LEFT - 6.0,
            band * chart.block.0
        );
    }
    let mut free = f64::NEG_INFINITY;
    for of in drawn {
        let x = LEFT + kx * of.x as f64;
        let words = match map.of_tokens {
            true => whose(of.strip.sources[0]),
            false => "column 0".into(),
        };
        let width = 6.6 * words.len() as f64;
        // Names that would run into each other are left to the pointer.
        if x >= free {
            let _ = write!(
                out,
                "<text class=\"bt-axis\" x=\"{x:.0}\" y=\"{}\">{}</text>",
                TOP - 8.0,
                esc(&words)
            );
            free = x + width + 8.0;
        }
        if !map.of_tokens && of.chart.size.1 > 12 {
            let half = of.chart.size.1 / 2;
            let _ = write!(
                out,
                "<text class=\"bt-axis\" x=\"{:.0}\" y=\"{}\">{}</text>",
                x + kx * half as f64,
                TOP - 8.0,
                half * of.chart.block.1
            );
        }
    }
    out.push('\n');
}

/// How often the rows of each band are labels, on a logarithmic scale.
fn hit_bars(out: &mut String, map: &Map, chart: &Chart, (x, ky): (f64, f64)) {
    let bands: Vec<u64> = map
        .hits
        .chunks(chart.block.0)
        .map(|hits| hits.iter().map(|&n| u64::from(n)).sum())
        .collect();
    let most = bands.iter().copied().max().unwrap_or(0);
    let length = |n: u64| HITS * (1.0 + n as f64).ln() / (1.0 + most as f64).ln().max(1e-9);
    let mut path = String::new();
    for (band, &n) in bands.iter().enumerate().filter(|(_, n)| **n > 0) {
        let _ = write!(path, "M{x:.0} {:.1}h{:.1}", TOP + ky * (band as f64 + 0.5), length(n));
    }
    let _ = writeln!(
        out,
        "<text class=\"bt-axis\" x=\"{x:.0}\" y=\"{}\">label hits, log: to {}</text>\
         <path class=\"bt-hits\" stroke-width=\"{:.1}\" d=\"{path}\"/>",
        TOP - 8.0,
        count(most),
        (ky - 1.0).max(1.0)
    );
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
