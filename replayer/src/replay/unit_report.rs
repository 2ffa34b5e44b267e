//! What was found of a unit, written into the outcome: comparisons, and the maps for a drawing.

use backtape::identity::Microbatch;

use super::captured_gradients::{Captured, Gradient};
use super::comparison::{Comparison, MemberError};
use super::findings::Findings;
use super::label_counts::hits;
use super::maps::{Drawn, Map, Source};
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plan::Plan;
use super::plausible_policies::members;
use crate::compare::{Allowed, Chart};
use crate::head::{MicrobatchInputs, Scores, Stage, Unit};

impl Plan<'_> {
    pub(super) fn report(
        &self,
        findings: Findings,
        captured: &Captured,
        inputs: &MicrobatchInputs,
        unit: &Unit,
        outcome: &mut Outcome,
    ) {
        let names = members(&self.roundings).into_iter().map(|member| member.name);
        let names: Vec<String> = names.collect();
        for (stage, tally, bound) in findings.tallies {
            let stage_energies = findings.energies.iter().find(|(energies, _)| *energies == stage);
            let energies =
                stage_energies.map(|(_, energies)| energies.as_slice()).unwrap_or_default();
            let member =
                |(name, &energy): (&String, &f64)| MemberError { name: name.clone(), energy };
            let members = names.iter().zip(energies).map(member).collect();
            let by_hits = findings.hits.iter().find(|(of, _)| *of == stage);
            let by_hits = by_hits.map(|(_, classes)| classes.clone()).unwrap_or_default();
            let gradient = captured.stage(stage);
            let source = gradient.map(|gradient| gradient.source.clone()).unwrap_or_default();
            let stored_apart = gradient.is_some_and(Gradient::is_stored_apart);
            let comparison = Comparison::new(inputs.microbatch, unit.rank(), source, tally, &bound);
            let sampled = findings.sampled.contains(&stage);
            outcome
                .add(stage, Comparison { members, sampled, stored_apart, by_hits, ..comparison });
        }
        self.take_charts(findings.charts, inputs.microbatch, unit, outcome);
    }

    /// Adds what was noted of one unit to the maps.
    pub(super) fn take_charts(
        &self,
        charts: Vec<(Stage, Chart)>,
        microbatch: Option<Microbatch>,
        unit: &Unit,
        outcome: &mut Outcome,
    ) {
        for (stage, chart) in charts {
            self.take_chart(stage, chart, (microbatch, unit.rank()), outcome);
        }
    }

    pub(super) fn take_chart(
        &self,
        stage: Stage,
        chart: Chart,
        source: Source,
        outcome: &mut Outcome,
    ) {
        if self.step.lacking.withholds(stage, source.0).is_some() {
            return;
        }
        let tiles = self.roundings.tiles;
        let of_tokens = stage.is_of_q();
        let index = outcome.maps.iter().position(|map| map.stage == stage).unwrap_or_else(|| {
            let tile = if of_tokens { tiles.tokens } else { tiles.vocab };
            let (strips, left_out, hits) = (Vec::new(), 0, Vec::new());
            outcome.maps.push(Map { stage, of_tokens, strips, left_out, hits, tile });
            outcome.maps.len() - 1
        });
        outcome.maps[index].take(chart, source);
    }

    /// The chart of a comparison that is made in one go.
    pub(super) fn chart<F>(&self, drawn: &Drawn<'_, F>) -> Option<Chart>
    where
        F: Fn(usize, usize, f64) -> Allowed + Sync,
    {
        let mut chart =
            Chart::new((drawn.all, drawn.rows.captured.cols), self.draw?.most(drawn.stage));
        chart.add(drawn.first, drawn.rows, drawn.allowed, drawn.bound);
        Some(chart)
    }
}

/// Notes the label hits of every row of the vocabulary in the maps of all of its rows. A part of
/// dk that one rank holds has rows of its own, of which the labels say nothing.
pub(super) fn note_hits(microbatches: &[HeadMicrobatch], outcome: &mut Outcome) {
    let of_k = |microbatch: &HeadMicrobatch| match &microbatch.inputs.scores {
        Scores::Product { k, .. } => k.shape.first().map(|&rows| rows as usize),
        _ => None,
    };
    let Some(classes) = microbatches.iter().find_map(of_k) else { return };
    let whole = |map: &&mut Map| {
        !map.of_tokens && map.strips.iter().all(|strip| strip.chart.shape.0 == classes)
    };
    for map in outcome.maps.iter_mut().filter(whole) {
        map.hits = hits(microbatches, classes);
    }
}
