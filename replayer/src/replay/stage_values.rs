//! Values by stage, gathered block by block.

use crate::head::Stage;
use crate::kernels::policy::DkParts;

/// Values of a stage.
pub(super) type StageValues = (Stage, Vec<f64>);

/// Of several stages.
pub(super) type ValuesByStage = Vec<StageValues>;

/// Writes an emulated block's values into the list of each stage that it has values of.
pub(super) fn put_block(lists: &mut ValuesByStage, block: &DkParts<'_>) {
    let all = [
        (Stage::DkLse, block.dk_lse),
        (Stage::DkLabel, block.dk_label),
        (Stage::Dk, block.dk),
        (Stage::Dbias, block.dbias),
    ];
    for (stage, values) in all.into_iter().filter(|(_, values)| !values.is_empty()) {
        let width = values.len() / block.rows.len().max(1);
        put(lists, stage, block.rows.start * width, values);
    }
}

/// Writes values into the list of a stage, which grows as they come.
fn put(lists: &mut ValuesByStage, stage: Stage, offset: usize, values: &[f64]) {
    let index = lists.iter().position(|(of, _)| *of == stage).unwrap_or_else(|| {
        lists.push((stage, Vec::new()));
        lists.len() - 1
    });
    let list = &mut lists[index].1;
    list.resize(list.len().max(offset + values.len()), 0.0);
    list[offset..offset + values.len()].copy_from_slice(values);
}

/// A value of a stage's list, 0 where there is none.
pub(super) fn value_of(lists: &[StageValues], stage: Stage, element: usize) -> f64 {
    let list = lists.iter().find(|(list, _)| *list == stage);
    list.and_then(|(_, values)| values.get(element)).copied().unwrap_or(0.0)
}
