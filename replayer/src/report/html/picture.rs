//! The picture of a heat map in SVG: blocks by classes of scores, marks, tiles, indices and
//! label hits.
//!
//! A class is one path of runs, so that a map prints, keeps its colours in either theme and
//! takes a few bytes a block.

use std::borrow::Cow;
use std::fmt::Write;

use super::escape::escaped;
use super::maps::whose;
use crate::compare::{Cell, Chart};
use crate::number::count;
use crate::replay::maps::{Map, Strip};

/// Upper ends of the classes of scores; a block without any error has a class of its own.
pub(super) const ENDS: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 6.0, 16.0, 64.0];
/// Classes, with that of no error first and all beyond the ends last.
pub(super) const CLASSES: usize = ENDS.len() + 2;
/// Room for the indices of rows and columns.
const LEFT: f64 = 58.0;
const TOP: f64 = 30.0;
/// Width of the bars of label hits.
const HITS: f64 = 90.0;
/// Room for them and for what they are called.
const SIDE: f64 = 190.0;

/// One strip as it is drawn.
pub(super) struct Drawn<'a> {
    pub(super) strip: &'a Strip,
    pub(super) chart: Cow<'a, Chart>,
    /// Its first column on the drawing.
    pub(super) x: usize,
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
pub(super) fn picture(
    out: &mut String,
    map: &Map,
    drawn: &[Drawn<'_>],
    (bands, across): (usize, usize),
) {
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
    blocks(out, drawn, kx.min(ky));
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

/// `side`: the shorter side of a block in pixels.
fn blocks(out: &mut String, drawn: &[Drawn<'_>], side: f64) {
    let mut paths: [String; CLASSES] = Default::default();
    let (mut dots, mut crosses) = (String::new(), String::new());
    let mut ring: Option<(&Cell, usize, usize)> = None;
    for strip in drawn {
        let across = strip.chart.size.1.max(1);
        for (y, row) in strip.chart.cells.chunks(across).enumerate() {
            let mut column = 0;
            while column < row.len() {
                let Some(cell) = &row[column] else {
                    column += 1;
                    continue;
                };
                let cell_class = class(cell);
                let same = |cell: &Option<Cell>| {
                    cell.as_ref().is_some_and(|cell| class(cell) == cell_class)
                };
                let run = row[column..].iter().take_while(|cell| same(cell)).count();
                let _ = write!(paths[cell_class], "M{} {y}.5h{run}", strip.x + column);
                column += run;
            }
            for (column, cell) in row.iter().enumerate() {
                let Some(cell) = cell else { continue };
                let x = strip.x + column;
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
    // Strokes in pixels: blocks need not be square, and a dot is round.
    for (class, path, (share, least)) in
        [("bt-dots", dots, (0.45, 3.5)), ("bt-crosses", crosses, (0.18, 1.2))]
    {
        if !path.is_empty() {
            let width = (side * share).max(least);
            let _ = writeln!(
                out,
                "<path class=\"{class}\" style=\"stroke-width:{width:.1}px\" d=\"{path}\"/>"
            );
        }
    }
    // Where every element is equal no block is the worst.
    if let Some((_, x, y)) = ring.filter(|(cell, ..)| class(cell) > 0) {
        let _ =
            writeln!(out, "<rect class=\"bt-ring\" x=\"{x}\" y=\"{y}\" width=\"1\" height=\"1\"/>");
    }
}

/// Lines where tiles begin, as long as they are no more than every second block.
fn tiles(out: &mut String, map: &Map, drawn: &[Drawn<'_>]) {
    let mut path = String::new();
    for strip in drawn {
        let (rows, block) = (strip.chart.shape.0, strip.chart.block.0);
        if map.tile < 2 * block {
            continue;
        }
        for start in (map.tile..rows).step_by(map.tile) {
            let y = start as f64 / block as f64;
            let _ = write!(path, "M{} {y:.3}h{}", strip.x, strip.chart.size.1);
        }
    }
    if !path.is_empty() {
        let _ = writeln!(out, "<path class=\"bt-tiles\" d=\"{path}\"/>");
    }
}

fn axes(out: &mut String, map: &Map, drawn: &[Drawn<'_>], (kx, ky): (f64, f64)) {
    let tallest = drawn.iter().max_by_key(|drawn| drawn.chart.size.0);
    let Some(chart) = tallest.map(|drawn| &drawn.chart) else { return };
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
    for strip in drawn {
        let x = LEFT + kx * strip.x as f64;
        let words = match map.of_tokens {
            true => whose(strip.strip.sources[0]),
            false => "column 0".into(),
        };
        let width = 6.6 * words.len() as f64;
        // Names that would run into each other are left to the pointer.
        if x >= free {
            let _ = write!(
                out,
                "<text class=\"bt-axis\" x=\"{x:.0}\" y=\"{}\">{}</text>",
                TOP - 8.0,
                escaped(&words)
            );
            free = x + width + 8.0;
        }
        if !map.of_tokens && strip.chart.size.1 > 12 {
            let half = strip.chart.size.1 / 2;
            let _ = write!(
                out,
                "<text class=\"bt-axis\" x=\"{:.0}\" y=\"{}\">{}</text>",
                x + kx * half as f64,
                TOP - 8.0,
                half * strip.chart.block.1
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
         <path class=\"bt-hits\" style=\"stroke-width:{:.1}px\" d=\"{path}\"/>",
        TOP - 8.0,
        count(most),
        (ky - 1.0).max(1.0)
    );
}
